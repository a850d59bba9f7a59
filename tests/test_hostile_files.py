"""Files made to mislead, as one table: each is one line and status 2, at once, in little memory."""

import io
import json
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from checked_files import shown

from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def npy(shape, dtype="<f4", data=b""):
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


def npz(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("ESC", "\x1b[2J\n") + ".npy", content)
    return file.getvalue()


def whole(array):
    return npy(array.shape, array.dtype.str, array.tobytes())


def bomb(name):
    """Return an archive of some kilobytes in which one member is 256 MB of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x.npy", whole(X))
        with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
            stream.write(npy((1 << 26,)))
            for _ in range(16):
                stream.write(bytes(1 << 24))
    return file.getvalue()


def safetensors(entries, data=bytes(64)):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# What the file is called, what is in it, the command, words of the line.
FILES = {
    "no rows, of a length that no machine has": (
        "x.npy", lambda: npy((0, 2**70)), "diagnose", "shape (0, 1180591620717411303424)"),
    "no rows, of more bytes than an array has": (
        "x.npy", lambda: npy((0, 2**62)), "diagnose", "shape (0, 4611686018427387904) of float32"),
    "no rows, of more bytes than an array has, as a tensor": (
        "x.safetensors", lambda: safetensors({"x": tensor([0, 2**62], 0, 0)}),
        "diagnose", "shape (0, 4611686018427387904) of float32"),
    "a shape with a fraction": (
        "x.safetensors", lambda: safetensors({"x": tensor([2, 4.7], 0, 32)}), "diagnose", "damaged"),
    "tensors that overlap": (
        "x.safetensors",
        lambda: safetensors({"x": tensor([2, 4], 0, 32), "y": tensor([2, 4], 16, 48)}),
        "diagnose", "the places of two tensors overlap"),
    "a name that a terminal obeys": (
        "x.npz", lambda: npz(aESC=whole(X), b=whole(X)), "diagnose", "holds 2 arrays"),
    "a label that a terminal obeys": (
        "x.npz", lambda: npz(aESC=whole(X.astype(int))), "diagnose", r"a\x1b[2J\n in x.npz must be"),
    "no x, and a name that a terminal obeys": (
        "x.npz", lambda: npz(aESC=whole(X), b=whole(X)), "run", r"got a\x1b[2J\n, b"),
    "eps of 256 MB": (
        "x.npz", lambda: bomb("eps"),
        "diagnose", "eps in x.npz must be one number, got shape (67108864,)"),
    "gamma of 256 MB": (
        "x.npz", lambda: bomb("gamma"), "run",
        "gamma must have shape (8,) to match x, got (67108864,) in x.npz"),
    "beta of 256 MB, run": (
        "x.npz", lambda: bomb("beta"), "run",
        "beta must have shape (8,) to match x, got (67108864,) in x.npz"),
    "dy of another type": (
        "x.npz", lambda: npz(x=whole(X), dy=whole(X.astype(int))), "run", "dy must be float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_made_to_mislead_is_one_line(name, tmp_path, capsys):
    called, content, command, words = FILES[name]
    (tmp_path / called).write_bytes(content())
    tracemalloc.start()
    try:
        assert main([command, called]) == 2
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    out, err = shown(capsys)
    assert words in err, err
    assert err.count("\n") == 1
    assert "\x1b" not in out + err


def test_a_shape_without_rows_is_diagnosed_at_once(tmp_path, capsys):
    (tmp_path / "x.npy").write_bytes(npy((10**12, 0, 16)))
    np.save(tmp_path / "few.npy", np.empty((0, 16), np.float32))
    said = []
    for name in ("x.npy", "few.npy"):
        assert main(["diagnose", name]) == 0
        said.append(shown(capsys)[0].split("axis", 1)[1].split("]", 1)[1])
    assert said[0] == said[1].replace("0 x 16", "1000000000000 x 0 x 16")


@pytest.mark.parametrize("command", ["diagnose", "check"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("/dev/null"), "a device"),
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to(path), "a link that leads to itself"),
        (lambda path: path.mkdir(), "a directory"),
        (lambda _: None, "which is not there"),
    ],
)
def test_what_is_no_file_is_named(command, make, words, tmp_path, capsys):
    make(tmp_path / "x.py")
    assert main([command, "x.py"]) == 2
    assert words in shown(capsys)[1]
