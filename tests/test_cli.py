"""`stablenorm run`, `diagnose`: false alarms, missed mistakes, half-written files, 60 columns."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import stablenorm.cli.run as job
from stablenorm import layer_norm, layer_norm_forward
from stablenorm.cli import main, parts
from stablenorm.testing import near_midpoints

X = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


pytestmark = pytest.mark.usefixtures("plain_terminal")


def save(tmp_path, **arrays):
    """Write in.npz where the command runs; its name alone, so that no message depends on a path."""
    np.savez(tmp_path / "in.npz", **arrays)
    return "in.npz"


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bundled_data_passes(kind, capsys):
    assert main(["run", "--kind", kind]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith("All checks passed.")
    assert f"check_{kind}_norm in float64" in out
    assert (", RMS norm;" in out) == (kind == "rms")


SWAPPED = X.astype(X.dtype.newbyteorder())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        # Once a false alarm: the checker took big-endian float32 for something finer.
        ({"x": SWAPPED, "gamma": SWAPPED[0], "dy": SWAPPED}, "All checks passed."),
        # A dx beyond the largest float32 is infinity, correctly rounded; nothing else can tell.
        ({"x": X * np.float32(1e-42), "eps": 0.0, "dy": X}, "an output overflows|No check failed."),
        (
            {"x": X, "weight": X[0], "gamma": X[1], "bias": X[2]},
            "dy not given: random N(0, 1), seed 0; not used: bias, weight",
        ),
    ],
)
def test_right_results_of_unusual_data_are_no_failure(arrays, words, tmp_path, capsys):
    assert main(["run", save(tmp_path, **arrays)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [each for each in words.split("|") if each not in out] == []


def test_a_terminal_shows_how_far_run_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parts, "_is_terminal", lambda stream: stream is sys.stderr)
    assert main(["run", save(tmp_path, x=X)]) == 0
    err = capsys.readouterr().err
    assert "\rsections: 3 of 4\x1b[K" in err
    assert err.endswith("\r\x1b[K")


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: stablenorm")
    for command in ("run", "diagnose", "check", "bench"):
        assert re.search(rf"^    {command}\b", shown.err, re.MULTILINE)


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line(tmp_path, capsys, monkeypatch):
    """Once the place in our code, and a line of it."""

    def warn(problem):
        warnings.warn("gamma should be float32", RuntimeWarning, stacklevel=2)
        return compute(problem)

    compute = job.Problem.compute
    monkeypatch.setattr(job.Problem, "compute", warn)
    assert main(["run", save(tmp_path, x=X)]) == 0
    assert capsys.readouterr().err == "stablenorm: gamma should be float32\n"


FULL = "stablenorm: No space left on device\n"


@pytest.mark.parametrize(
    ("where", "status", "words"),
    [
        # Once 1, that of a failed check; a shell says 141 of what SIGPIPE ends.
        ("run | true", 141, ""),
        ("run --digests | true", 141, ""),
        ("--version | true", 141, ""),
        ("run >&-", 0, ""),
        ("run >/dev/full", 2, FULL),
        ("run --digests >/dev/full", 2, FULL),
    ],
)
def test_output_that_goes_nowhere(where, status, words):
    if "/dev/full" in where and not Path("/dev/full").exists():
        pytest.skip("a disk that is full is Linux's")
    # Buffered, as for users: Rich met the broken pipe in a table, and exited with 1.
    python = f"env -u PYTHONUNBUFFERED {sys.executable}"
    script = f"{python} -m stablenorm {where}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", words)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_out_leaves_what_was_there(tmp_path, capsys, monkeypatch, error):
    path = save(tmp_path, x=X)
    (tmp_path / "out.npz").write_bytes(b"older")

    def half(file, **_):
        file.write(b"half")
        raise error

    monkeypatch.setattr(np, "savez", half)
    status = main(["run", path, "--out", "out.npz"])
    assert status == (130 if error is KeyboardInterrupt else 2)
    assert (tmp_path / "out.npz").read_bytes() == b"older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.npz", "out.npz"]
    reason = "interrupted" if error is KeyboardInterrupt else "No space left on device"
    assert capsys.readouterr().err == f"stablenorm: {reason}\n"


@pytest.mark.parametrize("wrong", ["y", "dx", "dgamma", "dbeta"])
def test_a_wrong_result_fails_the_run(tmp_path, capsys, monkeypatch, wrong):
    """One element 1 % off: by the oracle and by the finite differences, exit status 1."""

    def broken(function):
        def call(*args, **options):
            results = function(*args, **options)
            first = results[0] if wrong == "y" else getattr(results, wrong)
            first.flat[0] *= 1.01
            return results

        return call

    forward, backward, *others = job.NORMS["layer"]
    pair = (broken(forward), backward) if wrong == "y" else (forward, broken(backward))
    monkeypatch.setitem(job.NORMS, "layer", (*pair, *others))
    path = save(tmp_path, x=X, gamma=X[0], beta=X[1], dy=X)
    assert main(["run", path, "--html", "page.html"]) == 1
    assert "A CHECK FAILED." in capsys.readouterr().out
    assert 'class="fail"' in Path("page.html").read_text("utf8")


@pytest.mark.parametrize(
    ("rounding", "kept"), [("fast", False), ("nearest", True), ("nearest", False)]
)
def test_what_is_misrounded_is_counted_and_fails_nearest(
    capsys, tmp_path, monkeypatch, rounding, kept
):
    """An element within 0.501 ulp that is not the nearest float: of fast, and of a broken nearest."""
    case = next(
        c for c in near_midpoints()
        if c.output == "y" and layer_norm(*c[:4])[c.where] != c.expected
    )  # fmt: skip
    if not kept:
        fast = lambda *a, **_: layer_norm_forward(*a)
        monkeypatch.setitem(job.NORMS, "layer", (fast, *job.NORMS["layer"][1:]))
    path = save(tmp_path, **dict(zip(case._fields[:5], case[:5], strict=True)))
    assert main(["run", path, "--rounding", rounding]) == (rounding == "nearest" and not kept)
    shown = " ".join(capsys.readouterr().out.split())
    words = f'Rounding "{rounding}". Misrounded: {int(not kept)} of {case.x.size} elements of y,'
    assert words in shown
    assert ("A CHECK FAILED" in shown) == (rounding == "nearest" and not kept)


@pytest.mark.parametrize("command", ["run", "diagnose", "check", "bench"])
def test_help_teaches_and_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "exit status:" in shown
    assert ("THE CODE OF THE FILE IS RUN" in shown) == (command == "check")
    assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_the_bundled_data_is_diagnosed_in_60_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["diagnose", "--dtype", "float16"]) == 0
    out, err = capsys.readouterr()
    # A path is one word, as long as the checkout's.
    assert [line for line in out.splitlines() if len(line) > 60 and " " in line.strip()] == []
    assert err == ""
    assert "E[x^2] - E[x]^2" in " ".join(out.split())
