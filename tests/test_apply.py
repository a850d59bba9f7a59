"""`stablenorm apply`: the bits of the call in memory, whatever the files, and whatever interrupts it."""

import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr

from stablenorm import layer_norm, rms_norm
from stablenorm.cli import apply as command
from stablenorm.cli import main
from stablenorm.scale.files import box_lengths, boxes, runs

pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks of a few rows, the last one shorter."""
    monkeypatch.setattr(command, "_BLOCK", 1000)


def made(shape, dtype=np.float32, seed=0):
    return (3 + np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def as_npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def as_zarr(name, array, chunks):
    zarr.create_array(name, shape=array.shape, dtype=array.dtype, chunks=chunks)[...] = array


def run(capsys, *arguments):
    status = main(["apply", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def done(capsys, *arguments):
    status, _, err = run(capsys, *arguments)
    assert (status, err) == (0, "")


def refused(capsys, words, *arguments, status=2):
    """One line, and nothing that could be taken for a result."""
    actual, out, err = run(capsys, *arguments)
    assert (actual, out) == (status, "")
    assert err.startswith("stablenorm: ")
    assert err.count("\n") == 1
    assert words in err


SHAPES = [(37,), (13, 32), (5, 7, 32), (2, 3, 5, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_the_call_in_memory(shape, dtype, capsys):
    x, gamma, beta = made(shape, dtype), made(shape[-1:], dtype, 1), made(shape[-1:], dtype, 2)
    np.save("x.npy", x)
    np.save("g.npy", gamma)
    np.save("b.npy", beta)
    np.savez_compressed("x.npz", x=x, gamma=gamma, beta=beta, eps=1e-3)
    done(capsys, "x.npy", "--gamma", "g.npy", "--beta", "b.npy", "--out", "y.npy")
    expected = layer_norm(x, gamma, beta)
    assert Path("y.npy").read_bytes() == as_npy(expected)
    done(capsys, "x.npz", "--out", "y.npy", "--rounding", "nearest", "--kind", "rms")
    exact = rms_norm(x, gamma, beta, 1e-3, rounding="nearest")
    assert Path("y.npy").read_bytes() == as_npy(exact)
    if dtype == ml_dtypes.bfloat16:
        refused(capsys, "an .npy file for bfloat16", "x.npy", "--out", "y.zarr")
        return
    as_zarr("x.zarr", x, tuple(min(3, length) for length in shape))
    for number, source in enumerate(("x.npy", "x.zarr")):
        out = f"{number}.zarr"
        done(capsys, source, "--gamma", "g.npy", "--beta", "b.npy", "--out", out)
        assert zarr.open_array(out, mode="r")[...].tobytes() == expected.tobytes()
    done(capsys, "x.zarr", "--gamma", "g.npy", "--beta", "b.npy", "--out", "y.npy")
    assert np.load("y.npy").tobytes() == expected.tobytes()
    assert not list(Path().glob("*.part*"))


def test_options_and_members(capsys):
    x, gamma = made((6, 4, 8), ">f4"), made((4, 8))
    np.savez("m.npz", a=x, b=x[0])
    np.save("g.npy", gamma)
    group = zarr.open_group("g.zarr", mode="w")
    group.create_array("in/x", shape=x.shape, dtype=x.dtype, chunks=(2, 2, 8))[...] = x
    expected = layer_norm(x, gamma, eps=0.5, axis=(1, 2), gamma_offset=1.0)
    options = ["--gamma", "g.npy", "--axis", 1, 2, "--eps", 0.5, "--gamma-offset", 1]
    for source, member in (("m.npz", "a"), ("g.zarr", "in/x")):
        done(capsys, source, "--member", member, *options, "--out", "y.npy")
        assert np.load("y.npy").tobytes() == expected.tobytes()


def test_no_rows(capsys):
    np.save("x.npy", made((0, 8)))
    for out in ("y.npy", "y.zarr"):
        done(capsys, "x.npy", "--out", out)
    assert np.load("y.npy").shape == zarr.open_array("y.zarr").shape == (0, 8)


@pytest.mark.parametrize("lead", [(), (1,), (10,), (3, 7), (2, 5, 4)])
@pytest.mark.parametrize("rows", [1, 3, 8, 1000])
def test_boxes_are_every_row_once(lead, rows):
    whole = np.arange(np.prod(lead, dtype=int)).reshape(lead)
    for chunk in (1, 2, 3):
        chunks = tuple(min(chunk, length) for length in lead)
        lengths = box_lengths(lead, chunks, rows)
        assert np.prod(lengths, dtype=int) <= max(rows, np.prod(chunks, dtype=int))
        found = []
        for box in boxes(lead, lengths):
            there = [at for start, count in runs(lead, box) for at in range(start, start + count)]
            assert there == whole[box].ravel().tolist()
            found += there
        assert sorted(found) == whole.ravel().tolist()


BAD = {
    "gamma": (["x.npy", "--gamma", "x.npy"], "gamma must have shape (32,) to match x normalized"),
    "int": (["int.npy"], "int.npy must be float16, bfloat16, float32 or float64, got int64"),
    "short": (["short.npy"], "must hold 1664 bytes of data, as its header says, got fewer"),
    "not there": (["absent.npy"], "absent.npy, which is not there"),
    "axis": (["x.npy", "--axis", "0"], "must have its normalized axes last, in C order"),
    "no axis": (["x.npy", "--axis", "2"], "axis must name axes of x, which has 2 dimensions"),
    "fortran": (["f.npy"], "in Fortran order; save np.ascontiguousarray"),
    "row": (["long.npy"], "must take at most 16 MiB for a row to be streamed, got 32 MiB"),
    "damaged": (["damaged.npz"], "must be whole, got a damaged one"),
    "chunk": (["large.zarr"], "16 MiB for whole rows of a chunk to be streamed, got 32 MiB"),
    "offset": (["x.npy", "--gamma-offset", "1"], "gamma must be given with gamma_offset=1.0"),
    "zarr": (["bad.zarr"], "bad.zarr must be whole, got a damaged one"),
    "itself": (["x.npy", "--out", "x.npy"], "--out must not be a file that is read, got"),
    "its gamma": (["x.npy", "--gamma", "g.npy", "--out", "g.npy"], "must not be a file that is"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind, capsys):
    arguments, words = BAD[kind]
    x = made((13, 32))
    np.save("x.npy", x)
    np.save("g.npy", x[0])
    np.save("int.npy", x.astype(int))
    np.save("f.npy", np.asfortranarray(x))
    Path("short.npy").write_bytes(as_npy(x)[:-1])
    with Path("long.npy").open("wb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": (2, 1 << 23)}
        np.lib.format.write_array_header_1_0(file, described)
        file.truncate(file.tell() + (1 << 26))
    zarr.create_array("large.zarr", shape=(1 << 10, 1 << 14), chunks=(512, 1 << 10), dtype="f4")
    as_zarr("bad.zarr", x, (4, 32))
    Path("bad.zarr/c/2/0").write_bytes(b"no chunk")
    np.savez_compressed("damaged.npz", x=x)
    with Path("damaged.npz").open("r+b") as file:
        file.seek(900)
        file.write(b"no zip")
    before = sorted(Path().rglob("*"))
    out = [] if "--out" in arguments else ["--out", "y.npy"]
    refused(capsys, words, *arguments, *out)
    assert sorted(Path().rglob("*")) == before
