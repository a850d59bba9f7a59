"""Files of every kind, whole and damaged; damaged ones and unusable options give status 2 and one line."""

import io
import json
import os
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stablenorm import diagnose
from stablenorm.cli import main
from stablenorm.cli.parts import BUNDLED

pytestmark = pytest.mark.usefixtures("plain_terminal")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


class Bomb:
    """An object that would write a file when unpickled."""

    def __reduce__(self):
        return (open, ("exploded", "w"))


def npy(shape, dtype="<f4", data=b""):
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


def whole(array):
    return npy(array.shape, array.dtype.str, array.tobytes())


def npz(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            whole_name = name.replace("ESC", "\x1b[2J\n") + ".npy"
            archive.writestr(whole_name.removesuffix("BARE.npy"), content)
    return file.getvalue()


def saved(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


# Headers of 256 MB of zeros, of 4 GiB of header, and of signs that Python's parser gives up.
HUGE = npy((1 << 26,))
LONG_HEADER = b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1)
SIGNS = b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"-" * 9000


def flipped():
    raw = bytearray(saved(h=np.random.default_rng(0).random((20, 20))))
    raw[len(raw) // 2] ^= 255
    return bytes(raw)


def huge(name, header=HUGE):
    """Return an archive of a few kilobytes in which one member is 256 MB of zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("h.npy" if name == "x" else "x.npy", whole(X))
        with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
            stream.write(header)
            for _ in range(16):
                stream.write(bytes(1 << 24))
    return file.getvalue()


def tensors(data=bytes(64), **entries):
    """Return a .safetensors file of {name: (shape, begin, end)}; a fourth entry is the dtype."""
    table = {}
    for name, (shape, *offsets, dtype) in ((n, (*e, "F32")[:4]) for n, e in entries.items()):
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + data


def diagnosed(*arguments):
    """Diagnose a file; return the diagnosis that the command wrote as JSON."""
    assert main(["diagnose", *map(str, arguments), "--json", "out.json"]) == 0
    return json.loads(Path("out.json").read_text())


def expected(x, **options):
    return json.loads(diagnose(x, **options).to_json())


def test_every_kind_of_file_says_what_the_array_says():
    x = (3 + np.random.default_rng(0).standard_normal((6, 5, 32))).astype(np.float32)
    bf = x.astype(ml_dtypes.bfloat16)
    stored = {"c.npy": x, "f.npy": np.asfortranarray(x), "big.npy": x.astype(">f4"), "bf.npy": bf}
    for name, array in stored.items():
        np.save(name, array)
    np.savez("one.npz", h=x)
    # NumPy reads the first for the name of the second.
    Path("odd.npz").write_bytes(npz(**{"x": whole(X), "x.npy": whole(X[:2])}))
    np.savez("x.npz", x=x, g=x[0], eps=1e-3)
    np.savez_compressed("more.npz", a=x, b=x[0], c=bf)
    places = {"w": (x.shape, 0, bf.nbytes, "BF16"), "v": (x.shape, bf.nbytes, 3 * bf.nbytes)}
    Path("m.st").write_bytes(tensors(bf.tobytes() + x.tobytes(), **places))
    for arguments, array, options in (
        *((name, array, {}) for name, array in stored.items()),
        ("one.npz", x, {}),
        ("odd.npz --member x.npy", X[:2], {}),
        ("x.npz", x, {"eps": 1e-3}),
        ("x.npz --eps 0 --top 2", x, {"eps": 0.0, "top": 2}),
        ("more.npz --member a", x, {}),
        ("more.npz --member c", bf, {}),
        ("m.st --member w", bf, {}),
        ("c.npy --axis 1", x, {"axis": 1}),
        ("more.npz --member a --axis 0 2", x, {"axis": (0, 2)}),
        ("m.st --member v --axis 0 2", x, {"axis": (0, 2)}),
        ("c.npy --axis None", x, {"axis": None}),
    ):
        assert diagnosed(*arguments.split()) == expected(array, **options), arguments


def test_files_of_the_safetensors_package_are_read():
    package = pytest.importorskip("safetensors.numpy")
    package.save_file({"x": X}, "x.safetensors")
    assert diagnosed("x.safetensors") == expected(X)
    assert main(["run", "x.safetensors"]) == 0


FOUR = "must be float16, bfloat16, float32 or float64"
LONG = 300 * "a"
RUNS = b"open('ran', 'w').close()"
TWO = {"a[b]ESC": whole(X), "c": whole(X)}
# The file, its content, the command, words of the error line.
TABLE = [
    # Files that are not what they seem.
    ("x.npy", lambda: whole(X)[:-8], "diagnose x.npy", "x.npy must be whole, got a damaged one"),
    ("x.st", lambda: tensors(x=([2, 8], 0, 64))[:-8], "diagnose x.st", "ends after 56 of 64"),
    ("x.st", lambda: tensors(x=([1 << 40], 0, 1 << 42)), "run x.st", "x.st must be whole, got a da"),
    ("x.npy", lambda: npy((-1, 8), data=bytes(64)), "diagnose x.npy", "must be whole, got a damag"),
    ("x.npy", lambda: npy((10**400,)), "diagnose x.npy", "x.npy must be whole, got a damaged"),
    ("x.npy", lambda: npy((2, 3), "(2,)<f4", bytes(48)), "diagnose x.npy", "must be whole, got a"),
    ("x.npy", lambda: npy((1 << 40,)), "run x.npy", "the data ends after 0 of 4398046511104 bytes"),
    ("x.npy", lambda: SIGNS, "diagnose x.npy", "damaged one: EOF: reading array header, ex"),
    ("x.npz", lambda: huge("x", LONG_HEADER), "run x.npz", "x in x.npz must be whole, got a damaged one"),
    ("x.npz", lambda: npz(x=whole(X), xBARE=whole(X[:2])), "run x.npz", "two entries have one name"),
    ("x.npy", bytes, "diagnose x.npy", "or .safetensors file, got an empty file"),
    ("x.npz", lambda: b"1,2\n", "run x.npz", "or .safetensors file, got a text file"),
    ("x\n.npy", bytes, "diagnose x\n.npy", r"x\n.npy must be an .npy, "),
    ("x.npy", lambda: saved(a=X), "run .", "x.npy must hold one array, as np.save writes it, got"),
    ("x.npz", flipped, "diagnose x.npz", "damaged one"),
    ("x.st", lambda: tensors(x=([2, 4.7], 0, 32)), "diagnose x.st", "damaged"),
    ("x.st", lambda: tensors(x=([2, 5], 0, 32)), "diagnose x.st", "the place of x does not fit it"),
    ("x.st", lambda: tensors(x=([2, 4], 0, 32), y=([2, 4], 16, 48)), "diagnose x.st", "the places"),
    ("x.st", lambda: tensors(q=([8], 0, 8, "F8_E4M3")), "diagnose x.st", FOUR),
    ("x.bin", lambda: bytes(range(1, 200)), "diagnose x.bin", r"got one that begins with b'\x01\x02"),
    ("x.npz", lambda: npz(**TWO), "diagnose x.npz", "holds 2 arrays"),
    ("x.npz", lambda: npz(**TWO), "diagnose x.npz --member no", "holds 2 arrays: choose one with"),
    ("x.npz", lambda: npz(aESC=whole(X.astype(int))), "diagnose x.npz", r"a\x1b[2J\n in x.npz mus"),
    ("x.npz", lambda: npz(**TWO), "run x.npz", "holds 2 arrays: choose one with --member NAME"),
    ("y.npy", bytes, "run .", ". must hold x.npy, got no such file"),
    ("x.npz", lambda: huge("eps"), "diagnose x.npz", "eps in x.npz must be one number, got 671088"),
    ("x.npz", lambda: huge("gamma"), "run x.npz", "gamma in x.npz must have shape 8 to match x, g"),
    ("x.npz", lambda: saved(x=np.array([Bomb()])), "run x.npz", f"{FOUR}, got object; save np.asarray(x, np.float64)"),
    # Arrays that have no norm, or none that can be checked.
    ("x.npy", lambda: whole(X.astype(int)), "diagnose x.npy", f"{FOUR}, got int64; save np.asarray("),
    ("x.npy", lambda: whole(X * 1j), "run x.npy", f"{FOUR}, got complex64; save x.real and x.imag, e"),
    ("x.npy", lambda: whole(X[0, 0]), "diagnose x.npy", "x.npy must have at least one axis, got a"),
    ("x.npz", lambda: saved(x=X, dy=X.astype(int)), "run x.npz", f"dy in x.npz {FOUR}"),
    ("x.npz", lambda: saved(x=X, dy=X[:2]), "run x.npz", "dy in x.npz must have shape 4 x 8 to ma"),
    ("x.npz", lambda: saved(x=np.float32(1)), "run x.npz", "x in x.npz must have at least one axis"),
    ("x.npz", lambda: saved(x=X[:0]), "run x.npz", "x must have at least one row, got 0 x 8"),
    ("x.npz", lambda: saved(x=X * np.nan), "run x.npz --html p.html", "must be finite to be check"),
    ("x.npz", lambda: saved(x=X, eps=-1.0), "run x.npz", "eps must be finite and >= 0, got -1.0"),
    ("x.npz", lambda: saved(x=0 * X, eps=0.0), "run x.npz", "eps must be > 0 where a row of x is"),
    ("x.npz", lambda: saved(x=0 * X), "run x.npz --kind rms --eps 0", "where a row of x is zero,"),
    # Names and options.
    ("x", bytes, "run missing.npz", "must be an .npy, .npz or .safetensors file, got missing.npz"),
    ("x.npy", lambda: whole(X), "diagnose x.npy --axis 1 1", "at least one axis, each once"),
    ("x.npy", lambda: whole(X), "diagnose x.npy --axis 1 None", "axis must be an int or a tuple o"),
    ("x", bytes, "diagnose --axis all", "--axis: invalid axis value: 'all'; see"),
    ("x", bytes, f"diagnose --axis {9**25}", "--axis: the number must be at least -64 and less than"),
    ("x", bytes, "diagnose --top -2", "--top: the number must be at least 0 and less than inf, got -"),
    ("x", bytes, "bench --threads 2147483648", "the number must be at least 1 and less than 214748364"),
    ("x", bytes, "bench --shape" + 65 * " 1", "--shape: maximum supported dimension for an ndarray i"),
    ("x", bytes, "run --eps abc", "--eps: invalid float value: 'abc'; see"),
    ("x", bytes, "run --colour", "unrecognized arguments: --colour; see stablenorm --help"),
    ("x", bytes, "run --out no/o.npz", "in an existing, writable directory, got no/o.npz"),
    ("x", bytes, "run --out out.txt", "--out must be a .npz file, got out.txt"),
    ("x", bytes, f"run --out {LONG}.npz", "File name too long"),
    ("x.npz", lambda: saved(x=X), "run x.npz --out ./x.npz", "--out must not be the file that is"),
    ("x.htm", lambda: saved(x=X), "run x.htm --html x.htm", "--html must not be the file that is"),
    ("x.npy", lambda: whole(X), "diagnose x.npy --json soft.json", "--json must not be the file that"),
    ("x.npy", lambda: whole(X), "run . --out hard.npz", "--out must not be the file that is read, go"),
    ("x", bytes, f"run --out {BUNDLED}", "--out must not be the file that is read, got"),
    ("x", bytes, "run --html there.html", "must be a new name, got the directory there.html; remo"),
    ("x", bytes, "bench --shape 1000000 1000000", "must fit in memory, got 40979 GiB, of "),
    ("x", bytes, "bench --backend fast", "invalid choice: 'fast'"),
    ("x", bytes, "check x.py", "FILE must be a Python file, named *.py, got x.py, which is not th"),
    ("b.ipynb", bytes, "check b.ipynb", "FILE must be a Python file, named *.py, got b.ipynb"),
    ("x.py", lambda: RUNS, "check x.py --shape 3 0", "--shape: the number must be at least 1 and"),
    ("x.py", lambda: RUNS, "check x.py --shape 999999999 9999", "must fit in memory, got"),
    ("x", bytes, "check", "arguments are required"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "command", "words"), TABLE, ids=range(len(TABLE)))
def test_bad_input_is_one_line(name, content, command, words, tmp_path, capsys):
    (tmp_path / name).write_bytes(content())
    (tmp_path / "there.html").mkdir()
    (tmp_path / "soft.json").symlink_to(tmp_path / name)
    (tmp_path / "hard.npz").hardlink_to(tmp_path / name)
    before = sorted(tmp_path.iterdir())
    tracemalloc.start()
    try:
        assert main(command.split(" ")) == 2
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    out, err = capsys.readouterr()
    assert words in err, err
    assert err.startswith("stablenorm: ")
    assert err.count("\n") == 1
    # The members to choose from are listed.
    assert bool(out) == ("holds 2 arrays" in words) == ("a[b]" in out and "4 x 8" in out)
    assert "\x1b" not in out + err
    assert sorted(tmp_path.iterdir()) == before


NO_FILES = {
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a pipe": os.mkfifo,
    "which is not there": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("command", ["diagnose", "check"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_a_path_that_is_no_file_is_refused(command, kind, tmp_path, capsys):
    NO_FILES[kind](tmp_path / "x.py")
    assert main([command, "x.py"]) == 2
    assert re.fullmatch(
        rf"stablenorm: FILE must be .*, got x\.py, .*{kind}.*\n", capsys.readouterr().err
    )
