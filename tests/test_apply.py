"""`stablenorm apply`: the bits of the call in memory, whatever the files, and whatever interrupts it."""

import contextlib
import errno
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward, rms_norm
from stablenorm.cli import apply as command
from stablenorm.cli import main
from stablenorm.functional import FUNCTIONS
from stablenorm.scale.files import Target, box_lengths, boxes, runs

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
    # Of 16 bits, kernels of RMS norm would only be compiled for this.
    kind, norm = ("rms", rms_norm) if x.itemsize > 2 else ("layer", layer_norm)
    done(capsys, "x.npz", "--out", "y.npy", "--rounding", "nearest", "--kind", kind)
    exact = norm(x, gamma, beta, 1e-3, rounding="nearest")
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


def test_run_checks_the_same_files(capsys, monkeypatch):
    x, dy = made((6, 8)), made((6, 8), seed=1)
    np.save("x.npy", x)
    group = zarr.open_group("g.zarr", mode="w")
    for name, array in {"x": x, "dy": dy}.items():
        group.create_array(name, shape=array.shape, dtype=array.dtype)[...] = array
    for name, words in (("x.npy", "dy not given"), ("g.zarr", "dy of the file")):
        assert main(["run", name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert words in out
        assert out.endswith("All checks passed.")
    monkeypatch.setattr("os.sysconf", lambda _: 20)
    assert main(["run", "x.npy"]) == 2
    assert "x must fit in memory, with y, dx and dy, to be checked" in capsys.readouterr().err


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
    "gamma": (
        ["x.npy", "--gamma", "x.npy"],
        "gamma must have shape (32,) to match x, got (13, 32) in",
    ),
    "no gamma": (["x.npy", "--gamma", "none.npy"], "to match x, got (0, 32) in none.npy"),
    "int": (["int.npy"], "int.npy must be float16, bfloat16, float32 or float64, got int64"),
    "short": (["short.npy"], "must hold 1664 bytes of data, as its header says, got fewer"),
    "not there": (["absent.npy"], "absent.npy, which is not there"),
    "axis": (["x.npy", "--axis", "0"], "must have its normalized axes last, in C order"),
    "no axis": (["x.npy", "--axis", "2"], "axis must name axes of x, which has 2 dimensions"),
    "fortran": (["f.npy"], "in Fortran order; save np.ascontiguousarray"),
    "row": (["long.npy"], "must have at most 12 MiB in a row to be streamed, got 32 MiB"),
    "shape": (["negative.npy"], "must be whole, got a damaged one: shape (-13, -32) of float32"),
    "damaged": (["damaged.npz"], "must be whole, got a damaged one"),
    "chunk": (["large.zarr"], "8 MiB in the rows of a chunk to be streamed, got 32 MiB"),
    "offset": (["x.npy", "--gamma-offset", "1"], "gamma must be given with gamma_offset=1.0"),
    "zarr": (["bad.zarr"], "bad.zarr must be whole, got a damaged one"),
    "itself": (["x.npy", "--out", "x.npy"], "x.npy, which is read or written"),
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
    np.save("int.npy", x.astype(int))
    np.save("f.npy", np.asfortranarray(x))
    Path("short.npy").write_bytes(as_npy(x)[:-1])
    Path("negative.npy").write_bytes(as_npy(x).replace(b"(13, 32)", b"(-13, -32)"))
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


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("rms", "float32"), ("layer", "float64"), ("layer", "float16"), ("layer", ml_dtypes.bfloat16)],
)
def test_the_gradients(kind, rounding, dtype, capsys):
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-3, 4, (2, 3, 9, 16)).astype(dtype) for _ in range(2))
    x[0, 0, 0] = 1
    gamma, beta = rng.standard_normal((2, 16)).astype(np.float32)
    for name, array in {"x": x, "dy": dy, "g": gamma, "b": beta}.items():
        np.save(f"{name}.npy", array)
    forward, backward = FUNCTIONS[kind]
    _, cache = forward(x, gamma, beta, rounding=rounding)
    expected = backward(dy, cache)
    options = ["--gamma", "g.npy", "--beta", "b.npy", "--kind", kind, "--rounding", rounding]
    done(capsys, "x.npy", *options, "--backward", "dy.npy", "--out", "dx.npy")
    assert Path("dx.npy").read_bytes() == as_npy(expected.dx)
    for name, sums in (("dx.dgamma.npy", expected.dgamma), ("dx.dbeta.npy", expected.dbeta)):
        actual = np.load(name)
        assert actual.dtype == sums.dtype
        # In the default mode within 0.501 ulp, as those of the call; half of their elements tie.
        ulps = np.abs(actual - sums) / np.spacing(np.abs(sums))
        assert ulps.max() <= (rounding == "fast")


def test_what_sums_of_blocks_leave_open_is_asked_again(capsys, monkeypatch):
    """Rows of -1 and 1 have an xhat of that, so dgamma is a sum of integers, and half an ulp."""
    monkeypatch.setattr(command, "_BLOCK", 40)
    dy = np.zeros((9, 2), np.float32)
    dy[2:4], dy[5], dy[6], dy[8] = [[1, 2], [-1, -2]], 2.0**23, [0.5, 1.5], -0.0
    x, gamma = np.tile(np.float32([-1, 1]), (9, 1)), np.ones(2, np.float32)
    np.savez("x.npz", x=x, dy=dy, gamma=gamma, beta=gamma, eps=0.0)
    _, cache = layer_norm_forward(x, gamma, gamma, 0.0, rounding="nearest")
    expected, asked = layer_norm_backward(dy, cache), []
    ask = command.exact_parts
    monkeypatch.setattr(command, "exact_parts", lambda *a: (asked.append(a), ask(*a))[1])
    done(capsys, "x.npz", "--backward", "x.npz", "--out", "dx.npy", "--rounding", "nearest")
    assert len(asked) == 2
    for name in ("dgamma", "dbeta"):
        assert np.load(f"dx.{name}.npy").tobytes() == getattr(expected, name).tobytes()


def test_gradients_of_zarr_and_of_what_is_given_alone(capsys):
    x, dy, gamma = made((6, 5, 8)), made((6, 5, 8), "f8", 1), made((1, 8), "f8", 2)
    as_zarr("x.zarr", x, (4, 2, 3))
    as_zarr("dy.zarr", dy, (3, 5, 8))
    np.savez("x.npz", x=x, dy=dy, gamma=gamma)
    expected = layer_norm_backward(dy, layer_norm_forward(x, gamma, rounding="nearest")[1])
    np.save("g.npy", gamma)
    options = ["--rounding", "nearest", "--backward"]
    done(capsys, "x.zarr", "--gamma", "g.npy", *options, "dy.zarr", "--out", "dx.zarr")
    done(capsys, "x.npz", *options, "x.npz", "--out", "dx.npy")
    assert zarr.open_array("dx.zarr", mode="r")[...].tobytes() == expected.dx.tobytes()
    assert np.load("dx.npy").tobytes() == expected.dx.tobytes()
    assert np.load("dx.dgamma.npy").tobytes() == expected.dgamma.tobytes()
    assert np.load("dx.dgamma.npy").shape == (1, 8)
    assert not Path("dx.dbeta.npy").exists()


# ---- interrupts ----

KILLED = """
import os, sys
from stablenorm.cli import apply, main
from stablenorm.scale.files import Target
apply._BLOCK, apply._PERIOD_S, write, left = 1000, 0.0, Target.write, 6

def stop(*arguments):
    global left
    left -= 1
    if left == 0:
        print("stopped", flush=True)
        sys.stdin.read()
    write(*arguments)

Target.write = stop
main(sys.argv[1:])
"""


@pytest.fixture
def backward():
    """The arguments of a backward of 20 blocks, with sums that depend on every one."""
    for name, shape in {"x": (20, 7, 32), "dy": (20, 7, 32), "g": (32,), "b": (32,)}.items():
        np.save(f"{name}.npy", made(shape))
    options = ["--gamma", "g.npy", "--beta", "b.npy", "--backward", "dy.npy"]
    return ["x.npy", *options, "--out"]


def killed(out, backward):
    """Run as a process that is killed when it would write the sixth block."""
    command = [sys.executable, "-c", KILLED, "apply", *backward, out]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"stopped\n"
        process.send_signal(signal.SIGKILL)
    assert not Path(out).exists()


def test_a_killed_run_goes_on(backward, capsys, monkeypatch):
    done(capsys, *backward, "whole.npy")
    killed("dx.npy", backward)
    blocks = json.loads(Path("dx.npy.part.journal").read_text())["finished"][0]
    assert 1 <= blocks <= 5
    written = []
    write = Target.write
    monkeypatch.setattr(Target, "write", lambda *a: (written.append(a[1]), write(*a))[1])
    done(capsys, *backward, "dx.npy", "--resume")
    assert len(written) == 20 - blocks
    for name in ("", ".dgamma", ".dbeta"):
        assert Path(f"dx{name}.npy").read_bytes() == Path(f"whole{name}.npy").read_bytes()
    assert not list(Path().glob("*.part*"))


def test_of_a_killed_run_nothing_is_left(backward, capsys):
    """A chunk of Zarr and a journal that were being written."""
    killed("dx.zarr", backward)
    for name in ("dx.zarr.part/c/0/0/0.0123.partial", "dx.zarr.part.journal.part"):
        Path(name).touch()
    done(capsys, *backward, "dx.zarr", "--resume")
    assert not list(Path().rglob("*.part*"))


def test_an_interrupt_names_resume(backward, capsys, monkeypatch):
    done(capsys, *backward, "whole.npy")
    merge, calls = command.merged, iter(range(100))

    def interrupted(*sums):
        if next(calls) == 9:
            raise KeyboardInterrupt
        return merge(*sums)

    monkeypatch.setattr(command, "merged", interrupted)
    words = "interrupted: 35 of 140 rows are finished, --resume goes on from there"
    refused(capsys, words, *backward, "dx.npy", status=130)
    done(capsys, *backward, "dx.npy", "--resume")
    assert Path("dx.npy").read_bytes() == Path("whole.npy").read_bytes()
    assert Path("dx.dbeta.npy").read_bytes() == Path("whole.dbeta.npy").read_bytes()


@pytest.mark.parametrize("changed", ["x", "dy", "gamma", "beta", "options", "version", "journal"])
def test_what_changed_is_noticed(changed, backward, capsys, monkeypatch):
    with stopped_writing(monkeypatch, 5, KeyboardInterrupt):
        run(capsys, *backward, "dx.npy")
    more, words = [], f"--resume needs the same {changed} "
    if changed in {"x", "dy"}:
        # As large as before, and as old.
        before = Path(f"{changed}.npy").stat()
        np.save(f"{changed}.npy", made((20, 7, 32), seed=1))
        os.utime(f"{changed}.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    elif changed in {"gamma", "beta"}:
        np.save(f"{changed[0]}.npy", made((32,), seed=1))
    elif changed == "options":
        more = ["--eps", "0.5"]
    elif changed == "version":
        monkeypatch.setattr("stablenorm.__version__", "0")
    else:
        journal = Path("dx.npy.part.journal")
        whole, words = journal.read_text(), "journal must be whole, got a damaged one; leave"
        for damaged in ("{}", whole[:100], "[]", whole.replace('"finished": [', '"finished": [1')):
            journal.write_text(damaged)
            refused(capsys, words, *backward, "dx.npy", "--resume")
    refused(capsys, words, *backward, "dx.npy", "--resume", *more)
    done(capsys, *backward, "dx.npy", *more)
    assert not list(Path().glob("*.part*"))


@contextlib.contextmanager
def stopped_writing(monkeypatch, blocks, error):
    """Raise this error where so many blocks have been written."""
    write, calls = Target.write, iter(range(1000))

    def stopped(*arguments):
        if next(calls) == blocks:
            raise error
        write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Target, "write", stopped)
        yield


def test_a_disk_that_fills_up_is_one_line(backward, capsys, monkeypatch):
    done(capsys, *backward, "whole.npy")
    full = OSError(errno.ENOSPC, "No space left on device", "dx.npy.part")
    words = "No space left on device (dx.npy.part); 49 of 140 rows are finished, --resume goes"
    with stopped_writing(monkeypatch, 7, full):
        refused(capsys, words, *backward, "dx.npy")
    assert not Path("dx.npy").exists()
    done(capsys, *backward, "dx.npy", "--resume")
    assert Path("dx.npy").read_bytes() == Path("whole.npy").read_bytes()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot be asked")
def test_room_is_asked_for_at_the_beginning(capsys):
    np.save("x.npy", made((40, 64)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        refused(capsys, "File too large (", "x.npy", "--out", "y.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in Path().iterdir()] == ["x.npy"]


def test_a_file_cut_while_it_is_read(capsys, monkeypatch):
    np.save("x.npy", made((400, 64)))
    np.save("y.npy", made((1, 1)))
    before = Path("y.npy").read_bytes()
    monkeypatch.setitem(command._NORMS, "layer", lambda *_, **__: os.truncate("x.npy", 5000))
    refused(capsys, "got fewer: truncated", "x.npy", "--out", "y.npy")
    assert sorted(path.name for path in Path().iterdir()) == ["x.npy", "y.npy"]
    assert Path("y.npy").read_bytes() == before


@pytest.mark.parametrize("out", ["y.npy", "y.zarr"])
def test_one_process_at_a_time(out, capsys, monkeypatch):
    np.save("x.npy", made((13, 32)))
    inner = []

    def second(rows, **_):
        if len(rows) and not inner:
            inner.append(())
            inner.append(run(capsys, "x.npy", "--out", out))
        return rows

    monkeypatch.setitem(command._NORMS, "layer", second)
    run(capsys, "x.npy", "--out", out)
    assert "must be written by one process at a time" in inner[1][2]


def test_resume_begins_where_there_is_nothing(capsys):
    np.save("x.npy", made((13, 32)))
    done(capsys, "x.npy", "--out", "y.npy", "--resume")
    assert np.load("y.npy").tobytes() == layer_norm(made((13, 32))).tobytes()


@pytest.mark.parametrize("size", [None, -1, 1])
def test_resume_begins_again_where_what_was_written_is_gone(size, backward, capsys, monkeypatch):
    done(capsys, *backward, "whole.npy")
    for out in ("dx.npy", "dx.zarr"):
        with stopped_writing(monkeypatch, 5, KeyboardInterrupt):
            run(capsys, *backward, out)
    if size is None:
        Path("dx.npy.part").unlink()
    else:
        os.truncate("dx.npy.part", Path("dx.npy.part").stat().st_size + size)
    Path("dx.zarr.part/zarr.json").unlink()
    for out in ("dx.npy", "dx.zarr"):
        done(capsys, *backward, out, "--resume")
    assert Path("dx.npy").read_bytes() == Path("whole.npy").read_bytes()
    assert as_npy(zarr.open_array("dx.zarr", mode="r")[...]) == Path("whole.npy").read_bytes()


def test_a_disk_that_fails_is_noticed_whoever_is_told(backward, capsys, monkeypatch):
    """The system says once that an earlier write has failed: here to what runs beside the blocks."""
    fsync, calls = os.fsync, iter([OSError(errno.EIO, "Input/output error")])

    def failing(file):
        beside = threading.current_thread() is not threading.main_thread()
        if beside and (error := next(calls, None)):
            raise error
        fsync(file)

    monkeypatch.setattr("stablenorm.scale.files._FLUSH", 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        refused(capsys, "Input/output error (", *backward, "dx.npy")
    assert not Path("dx.npy").exists()
    assert not Path("dx.npy.part.journal").exists()


def test_an_interrupt_counts_a_block_with_its_sums_or_not_at_all(backward, capsys, monkeypatch):
    done(capsys, *backward, "whole.npy")
    added, count, calls = command._added, command.count_rows, iter(range(100))
    pending = []

    def marked(*sums):
        result = added(*sums)
        pending.extend([()] * (next(calls) == 9))
        return result

    def interrupted(box):
        if pending and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return count(box)

    with monkeypatch.context() as patched:
        patched.setattr(command, "_added", marked)
        patched.setattr(command, "count_rows", interrupted)
        refused(capsys, "--resume goes on", *backward, "dx.npy", status=130)
    done(capsys, *backward, "dx.npy", "--resume")
    assert Path("dx.dbeta.npy").read_bytes() == Path("whole.dbeta.npy").read_bytes()


@pytest.mark.parametrize("out", ["y.npy", "y.zarr"])
def test_the_journal_of_another_process_is_left_alone(out, capsys):
    """Only who may write the result may say how much of it there is."""
    np.save("x.npy", made((13, 32)))
    Path(f"{out}.part.journal").write_text("kept")
    with contextlib.closing(Target(Path(out), (13,), made((13, 32)), (1, 32) * (out != "y.npy"))):
        for more in ([], ["--resume"]):
            refused(capsys, "one process at a time", "x.npy", "--out", out, *more)
    assert Path(f"{out}.part.journal").read_text() == "kept"
    # Nothing of the result is there, so nothing of the journal counts.
    done(capsys, "x.npy", "--out", out, "--resume")


def test_an_input_is_not_where_the_result_lies_until_it_is_whole(capsys):
    Path("y.npy.part").write_bytes(as_npy(made((13, 32))))
    refused(capsys, "--out must be a file of its own", "y.npy.part", "--out", "y.npy")
    assert Path("y.npy.part").read_bytes() == as_npy(made((13, 32)))
