"""Measured times of the counted programs, and a roofline of two numbers, measured and drawn."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.cost._counts import DIRECTIONS, PROGRAMS, Cost, count_cost
from stablenorm.figures import COLORS
from stablenorm.formats import parse
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import Timing, make_copy, measure_interleaved, together
from stablenorm.types import Array, Gradients

# Which backend a program is; the plain formula is none.
_BACKENDS = {"reference": "numpy", "fused CPU kernel": "numba"}
# A copy of less, in several threads, would measure how long it takes to wake them.
_LEAST_COPY = 1 << 20
# Matrices that a thread multiplies, 128 KiB in a second-level cache: the largest that OpenBLAS shares with no
# other thread. A call lasts some ms, beside which waking a thread is nothing.
_SIDE, _MATRICES, _REPEATS = 64, 4, 32
# A color and a marker for each program.
_STYLES = {
    "plain NumPy": (COLORS[1], "^"),
    "reference": (COLORS[2], "s"),
    "fused CPU kernel": (COLORS[0], "o"),
}


class Roofline(NamedTuple):
    """
    What so many threads of a machine can do per second, each number measured.

    `copy` is bytes that a copy reads and writes, `flops` float64 operations of NumPy's products of small
    matrices.
    """

    threads: int
    copy: float
    flops: float

    def seconds(self, cost: Cost) -> float:
        """Return the longer of the times of its bytes and of its flops: what a program must take."""
        return max(cost.moved / self.copy, cost.flops / self.flops)


class Line(NamedTuple):
    """One program and direction: its counts, the time that the roofline allows, and its own."""

    program: str
    direction: str
    cost: Cost
    predicted: float
    measured: Timing


class Measured(NamedTuple):
    """Everything that `stablenorm complexity` shows; one roofline for one thread, one for all."""

    matrix: tuple[int, int]
    dtype: str
    one_thread: Roofline
    all_threads: Roofline
    lines: tuple[Line, ...]
    kind: str = "layer"


def measure_costs(
    matrix: tuple[int, int],
    dtype: str,
    threads: int,
    *,
    kind: str = "layer",
    rounds: int = 11,
    limit: float = 12.0,
    step: Callable[[], None] | None = None,
) -> Measured:
    """
    Time the three programs, a copy of x and the arithmetic, all in turn.

    Parameters
    ----------
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.
    threads : int
        Of the fused kernel; the other two programs use one.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.
    rounds : int, default: 11
        At most so many calls of each.
    limit : float, default: 12
        Seconds after which no round begins, once there are three.
    step : callable, optional
        Called after each sample.

    Returns
    -------
    Measured
        The two rooflines, and a line for each program and direction.
    """
    counts = {1, threads}
    copied = max(math.prod(matrix) * parse(dtype).itemsize, _LEAST_COPY)
    source, target = np.ones((2, copied), np.uint8)
    calls = _make_calls(matrix, dtype, kind)
    calls |= {f"copy {count}": make_copy(source, target, count) for count in counts}
    calls |= {f"flops {count}": _make_flops(count) for count in counts}
    timings = measure_interleaved(calls, rounds=rounds, limit=limit, step=step)
    one_thread, all_threads = (
        Roofline(
            count,
            2 * copied / timings[f"copy {count}"].median,
            # The lower quartile: whatever else runs only takes from arithmetic.
            2 * count * _REPEATS * _MATRICES * _SIDE**3 / timings[f"flops {count}"].low,
        )
        for count in (1, threads)
    )
    lines = []
    for program, direction in itertools.product(PROGRAMS, DIRECTIONS):
        cost = count_cost(program, direction, matrix, dtype, kind)
        roofline = all_threads if program == "fused CPU kernel" else one_thread
        timing = timings[f"{program} {direction}"]
        lines.append(Line(program, direction, cost, roofline.seconds(cost), timing))
    return Measured(matrix, dtype, one_thread, all_threads, tuple(lines), kind)


def _make_calls(matrix: tuple[int, int], dtype: str, norm: str) -> dict[str, Callable[[], Any]]:
    """Return a call for each program and direction."""
    rng = np.random.default_rng(0)
    kind = parse(dtype)
    x, dy = (rng.standard_normal(matrix, np.float32).astype(kind) for _ in range(2))
    gamma, beta = rng.uniform(0.5, 1.5, (2, matrix[1])).astype(kind)
    y, out = np.zeros_like(x), Gradients(*map(np.zeros_like, (x, gamma, beta)))
    _, kept = plain_forward(x, gamma, beta, kind=norm)
    forward, backward = FUNCTIONS[norm]
    calls: dict[str, Callable[[], Any]] = {
        "plain NumPy forward": lambda: plain_forward(x, gamma, beta, kind=norm),
        "plain NumPy backward": lambda: plain_backward(dy, kept, norm),
    }
    for program, backend in _BACKENDS.items():
        _, cache = forward(x, gamma, beta, backend=backend)
        calls[f"{program} forward"] = functools.partial(
            forward, x, gamma, beta, out=y, backend=backend
        )
        calls[f"{program} backward"] = functools.partial(backward, dy, cache, out=out)
    return calls


def _make_flops(threads: int) -> Callable[[], Any]:
    """Return a call of products of matrices in so many threads."""
    matrices = np.full((_MATRICES, _SIDE, _SIDE), 1.0 / _SIDE)

    def multiply(products: Array) -> None:
        for _ in range(_REPEATS):
            np.matmul(matrices, matrices, out=products)

    rooms = np.empty((threads, *matrices.shape))
    return together([functools.partial(multiply, each) for each in rooms])


def draw_roofline(measured: Measured, axes: Any) -> None:
    """Draw the roof of all threads and of one, and each program below them, on Matplotlib axes."""
    lines, roof, one = measured.lines, measured.all_threads, measured.one_thread
    intensities = [roof.flops / roof.copy, *(line.cost.intensity for line in lines)]
    grid = np.geomspace(min(intensities) / 2, 4 * max(intensities), 200)
    label = f"copy {roof.copy / 1e9:.3g} GB/s, arithmetic {roof.flops / 1e9:.3g} Gflop/s"
    both = [(roof, "-", label), (one, ":", "the same, one thread")]
    for each, style, label in both[: 1 + (roof.threads > 1)]:
        attainable = np.minimum(grid * each.copy, each.flops) / 1e9
        axes.plot(grid, attainable, style, color="#333333", lw=1.3, label=label)
    for line in lines:
        color, marker = _STYLES[line.program]
        axes.plot(
            line.cost.intensity, line.cost.flops / line.measured.median / 1e9, marker, ms=7,
            color=color, mfc=color if line.direction == "forward" else "none", ls="none",
            label=f"{line.program}, {line.direction}",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="flops per byte moved", ylabel="Gflop/s")
    axes.grid(alpha=0.25, which="major")
