"""The cost of a layer norm: its counts against runs, the roofline, and `stablenorm complexity`."""

import functools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from untimed import call_once

from stablenorm import cost
from stablenorm.cli import main
from stablenorm.cost import Cost, Roofline, count_cost, count_kept
from stablenorm.memory import get_idle_limit, set_idle_limit
from stablenorm.report.findings import NORMS
from stablenorm.testing.plain import plain_backward, plain_forward


def _problem(shape, dtype):
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    return x, dy, np.ones(shape[1], dtype), np.ones(shape[1], dtype)


def _calls(program, shape, dtype, kind):
    x, dy, gamma, beta = _problem(shape, dtype)
    if program == "plain NumPy":
        kept = plain_forward(x, gamma, beta, kind=kind)[1]
        return (
            lambda: plain_forward(x, gamma, beta, kind=kind),
            lambda: plain_backward(dy, kept, kind),
        )
    backend = {"reference": "numpy", "fused CPU kernel": "numba"}[program]
    forward, backward, *_ = NORMS[kind]
    cache = forward(x, gamma, beta, backend=backend)[1]
    return lambda: forward(x, gamma, beta, backend=backend), lambda: backward(dy, cache)


def _peak(function, expected):
    """The new bytes at the worst moment of a call; up to three are made, as other threads add theirs."""
    peak = expected + 1
    for _ in range(3):
        if peak > expected:
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            result = function()
            peak = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            del result
    return peak


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        ("plain NumPy", "float32"),
        ("plain NumPy", "float64"),
        ("reference", "float16"),
        ("reference", "float64"),
        ("fused CPU kernel", "float32"),
    ],
)
def test_bytes_held_are_what_tracemalloc_sees(program, dtype, kind, request):
    # Memory of an earlier result would not be new.
    request.addfinalizer(functools.partial(set_idle_limit, get_idle_limit()))
    set_idle_limit(0)
    shape = (2000, 768)
    for direction, call in zip(cost.DIRECTIONS, _calls(program, shape, dtype, kind), strict=True):
        call()
        held = count_cost(program, direction, shape, dtype, kind).held
        most = 1.06 * held + 2**20
        peak = _peak(call, most)
        # Left out: a few numbers per row and column, and the kernel's partial sums over rows.
        assert held <= peak + 2**14, direction
        assert peak <= most, direction


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_kept_are_those_of_a_cache(dtype, kind):
    x, _, gamma, beta = _problem((50, 64), dtype)
    cache = NORMS[kind][0](x, gamma, beta)[1]
    kept, held = count_kept(x.shape, dtype, kind), plain_forward(x, gamma, beta, kind=kind)[1]
    assert next(iter(kept.values())) == cache.statistics.nbytes
    plain = kept["xhat and rstd, as plain NumPy keeps them"]
    assert plain == sum(array.nbytes for array in held[1:])


def test_a_dtype_that_is_no_float_of_ours_is_refused():
    with pytest.raises(TypeError, match="or float64, got int32"):
        count_cost("reference", "forward", (2, 3), "int32")


def test_the_roofline_is_the_longer_of_memory_and_arithmetic():
    roofline = Roofline(1, copy=100.0, flops=1000.0)
    assert roofline.seconds(Cost(flops=10, moved=200, held=0)) == 2
    assert roofline.seconds(Cost(flops=5000, moved=200, held=0)) == 5


@pytest.fixture
def command(monkeypatch, plain_terminal):  # noqa: ARG001
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("stablenorm.cost._measure.measure_interleaved", call_once)
    return lambda *arguments: main(["complexity", *arguments])


@pytest.mark.parametrize("kind", NORMS)
def test_the_command_counts_measures_and_writes(kind, command, capsys):
    shape = ("--shape", "4", "16", "768", "--kind", kind)
    assert command(*shape, "--json", "c.json", "--plot", "c.png") == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 60
    for words in ("fused CPU kernel, backward", "roofline", "Kept from forward to backward"):
        assert words in out
    found = json.loads(Path("c.json").read_text("utf8"))
    lines = {(line["program"], line["direction"]): line for line in found["lines"]}
    fused = count_cost("fused CPU kernel", "forward", (64, 768), "float32", kind)
    assert lines["fused CPU kernel", "forward"]["cost"] == fused._asdict()
    for (program, _), line in lines.items():
        roof = found["all_threads" if program == "fused CPU kernel" else "one_thread"]
        times = line["cost"]["moved"] / roof["copy"], line["cost"]["flops"] / roof["flops"]
        assert line["predicted"] == max(times)
    assert Path("c.png").read_bytes()[:4] == b"\x89PNG"


def test_a_shape_beyond_memory_is_one_line(command, capsys):
    assert command("--shape", "1000000", "1000000") == 2
    error = capsys.readouterr().err
    assert "--shape must fit in memory, got 1000000 1000000" in error
    assert error.count("\n") == 1
