"""`stablenorm apply`: the bits of the call in memory, whatever the files; the old file or the whole new one."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, rms_norm
from stablenorm.api import FUNCTIONS
from stablenorm.cli import apply as command
from stablenorm.cli import main

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
    # Of 16 bits, kernels of RMS norm would only be compiled for this.
    kind, norm = ("rms", rms_norm) if x.itemsize > 2 else ("layer", layer_norm)
    done(capsys, "x.npz", "--out", "y.npy", "--rounding", "nearest", "--kind", kind)
    exact = norm(x, gamma, beta, 1e-3, rounding="nearest")
    assert Path("y.npy").read_bytes() == as_npy(exact)
    assert names() == ["b.npy", "g.npy", "x.npy", "x.npz", "y.npy"]


def names():
    return sorted(path.name for path in Path().iterdir())


def test_options_and_members(capsys):
    x, gamma = made((6, 4, 8), ">f4"), made((4, 8))
    np.savez("m.npz", a=x, b=x[0])
    np.save("g.npy", gamma)
    expected = layer_norm(x, gamma, eps=0.5, axis=(1, 2), gamma_offset=1.0)
    options = ["--gamma", "g.npy", "--axis", 1, 2, "--eps", 0.5, "--gamma-offset", 1]
    done(capsys, "m.npz", "--member", "a", *options, "--out", "y.npy")
    assert np.load("y.npy").tobytes() == expected.tobytes()


def test_no_rows(capsys):
    np.savez("x.npz", x=made((0, 8)), gamma=made((8,)))
    done(capsys, "x.npz", "--out", "y.npy")
    assert np.load("y.npy").shape == (0, 8)
    np.save("dy.npy", made((0, 8)))
    done(capsys, "x.npz", "--backward", "dy.npy", "--out", "dx.npy")
    assert not np.load("dx.dgamma.npy").any()


BAD = {
    "gamma": (
        ["x.npy", "--gamma", "x.npy"],
        "gamma must have shape (32,) to match x, got (13, 32) in",
    ),
    "no gamma": (["x.npy", "--gamma", "none.npy"], "to match x, got (0, 32) in none.npy"),
    "axis": (["x.npy", "--axis", "0"], "must have its normalized axes last, in C order"),
    "fortran": (["f.npy"], "in Fortran order; save np.ascontiguousarray"),
    "row": (["long.npy"], "must have at most 2359296 elements to be streamed, got 8388608"),
    "itself": (["x.npy", "--out", "x.npy"], "x.npy, which is read"),
    "itself by a hard link": (["x.npy", "--out", "hard.npy"], "hard.npy, which is read"),
    "itself by a symbolic link": (["soft.npy", "--out", "x.npy"], "x.npy, which is read"),
    "a folder": (
        ["x.npy", "--gamma", "g.npy", "--backward", "x.npy", "--out", "there.npy"],
        "dgamma must be a new name, got the directory",
    ),
    "nearest": (
        ["x.npy", "--backward", "x.npy", "--rounding", "nearest"],
        "--backward must be in the default rounding",
    ),
    "its gamma": (
        ["x.npy", "--gamma", "g.npy", "--out", "g.npy"],
        "--out must be a file of its own",
    ),
    "its dgamma": (
        ["x.npy", "--gamma", "dx.dgamma.npy", "--backward", "x.npy", "--out", "dx.npy"],
        "stablenorm: dgamma must be a file of its own",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(kind, capsys):
    arguments, words = BAD[kind]
    x = made((13, 32))
    np.save("x.npy", x)
    np.save("none.npy", x[:0])
    np.save("dx.dgamma.npy", x[0])
    np.save("g.npy", x[0])
    np.save("f.npy", np.asfortranarray(x))
    with Path("long.npy").open("wb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": (2, 1 << 23)}
        np.lib.format.write_array_header_1_0(file, described)
        file.truncate(file.tell() + (1 << 26))
    os.link("x.npy", "hard.npy")
    Path("soft.npy").symlink_to("x.npy")
    Path("there.dgamma.npy").mkdir()
    before = sorted(Path().rglob("*"))
    out = [] if "--out" in arguments else ["--out", "y.npy"]
    refused(capsys, words, *arguments, *out)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("rms", "float32"), ("layer", "float64"), ("layer", "float16"), ("layer", ml_dtypes.bfloat16)],
)
def test_the_gradients(kind, dtype, capsys):
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-3, 4, (2, 3, 9, 16)).astype(dtype) for _ in range(2))
    x[0, 0, 0] = 1
    gamma, beta = rng.standard_normal((2, 16)).astype(np.float32)
    for name, array in {"x": x, "dy": dy, "g": gamma, "b": beta}.items():
        np.save(f"{name}.npy", array)
    forward, backward = FUNCTIONS[kind]
    expected = backward(dy, forward(x, gamma, beta)[1])
    options = ["--gamma", "g.npy", "--beta", "b.npy", "--kind", kind]
    done(capsys, "x.npy", *options, "--backward", "dy.npy", "--out", "dx.npy")
    assert Path("dx.npy").read_bytes() == as_npy(expected.dx)
    for name, sums in (("dx.dgamma.npy", expected.dgamma), ("dx.dbeta.npy", expected.dbeta)):
        actual = np.load(name)
        assert actual.dtype == sums.dtype
        # Within 0.501 ulp, as those of the call; half of their elements tie.
        assert (np.abs(actual - sums) / np.spacing(np.abs(sums))).max() <= 1


# ---- the target is the old file or the whole new one ----

KILLED = """
import sys
from stablenorm.cli import apply, main
apply._BLOCK, computed, left = 1000, apply._computed, 6

def stop(*arguments):
    global left
    left -= 1
    if left == 0:
        print("stopped", flush=True)
        sys.stdin.read()
    return computed(*arguments)

apply._computed = stop
main(sys.argv[1:])
"""


@pytest.fixture
def backward():
    """The arguments of a backward of 20 blocks, with sums that depend on every one."""
    for name, shape in {"x": (20, 7, 32), "dy": (20, 7, 32), "g": (32,), "b": (32,)}.items():
        np.save(f"{name}.npy", made(shape))
    options = ["--gamma", "g.npy", "--beta", "b.npy", "--backward", "dy.npy"]
    return ["x.npy", *options, "--out"]


def test_a_killed_run_leaves_the_old_file(backward, capsys):
    for name in ("dx", "dx.dgamma", "dx.dbeta"):
        Path(f"{name}.npy").write_text("old")
    command = [sys.executable, "-c", KILLED, "apply", *backward, "dx.npy"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"stopped\n"
        process.send_signal(signal.SIGKILL)
    assert {Path(f"dx{part}.npy").read_text() for part in ("", ".dgamma", ".dbeta")} == {"old"}
    # What is left has a name of its own, which the next run does not write to.
    (left,) = Path().glob(".dx.npy.*.part")
    before = left.read_bytes()
    done(capsys, *backward, "dx.npy")
    assert left.read_bytes() == before
    assert np.load("dx.npy").shape == (20, 7, 32)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "dx.npy"), 2, "No space left on device"),
    ],
)
def test_an_interrupt_and_a_full_disk_leave_nothing(
    error, status, words, backward, capsys, monkeypatch
):
    computed, calls = command._computed, iter(range(100))

    def stop(*arguments):
        if next(calls) == 7:
            raise error
        return computed(*arguments)

    monkeypatch.setattr(command, "_computed", stop)
    before = names()
    refused(capsys, words, *backward, "dx.npy", status=status)
    assert names() == before


def test_a_file_cut_while_it_is_read(capsys, monkeypatch):
    np.save("x.npy", made((400, 64)))
    np.save("y.npy", made((1, 1)))
    before = Path("y.npy").read_bytes()
    monkeypatch.setitem(command._NORMS, "layer", lambda *_, **__: os.truncate("x.npy", 5000))
    refused(capsys, "got fewer: truncated", "x.npy", "--out", "y.npy")
    assert names() == ["x.npy", "y.npy"]
    assert Path("y.npy").read_bytes() == before


def test_what_a_link_leads_to_is_not_written(capsys):
    """The name is given to the new file; the file of the link, and other names of it, stay."""
    np.save("x.npy", made((13, 32)))
    Path("kept").write_text("kept")
    Path("soft.npy").symlink_to("kept")
    os.link("kept", "hard.npy")
    for out in ("soft.npy", "hard.npy"):
        done(capsys, "x.npy", "--out", out)
        assert np.load(out).tobytes() == layer_norm(made((13, 32))).tobytes()
        assert not Path(out).is_symlink()
    assert Path("kept").read_text() == "kept"
