"""The cost job: counts from the model, ceilings of this machine, and times that were measured beside them."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm._bench import Problem, make_candidates, make_problem, type_of
from stablenorm._types import Array
from stablenorm.analysis._counts import Cost, Term, total
from stablenorm.analysis._counts_gpu import Launch
from stablenorm.analysis.complexity import (
    DIRECTIONS,
    IMPLEMENTATIONS,
    ITEMSIZES,
    Ceilings,
    Time,
    count_held,
    count_saved,
    count_terms,
    fit_exponent,
    predict_fused,
    predict_passes,
)
from stablenorm.analysis.machine import make_together
from stablenorm.analysis.plain import plain_backward, plain_forward
from stablenorm.analysis.timing import Timing, make_copy, measure_interleaved

# Which backend an implementation is; plain NumPy is none.
_BACKENDS = {"reference": "numpy", "fused CPU": "numba"}
# Rounds of everything, as long as they take no more than so many seconds.
ROUNDS, LIMIT = 11, 12.0
# Of these seconds, what each of the eight shapes of the sweep may take.
_SWEEP_PART = 1 / 12
# What is timed three times as often, in turns of its own.
_BOUND_BY_MEMORY = (
    *("copy", "copy, one thread", "copy in the caches"),
    *("fused CPU forward", "fused CPU backward"),
)
# Growth: the whole and halves of it, down to an eighth.
_HALVES = 4
# The GPU that the counts are of: an H100, 132 multiprocessors, of which each holds two blocks; its
# compute capability and the shared memory that a block may ask for.
_GPU_BLOCKS, _GPU_CAPABILITY, _GPU_SHARED = 264, (9, 0), 227 << 10
# A copy of less, in several threads, would be a measurement of waking them.
_LEAST_COPY = 1 << 20
# A copy that stays in a second-level cache, as the blocks of the reference do.
_CACHED_COPY = 1 << 18


class Line(NamedTuple):
    """One implementation and direction: what it does, and how long it takes."""

    implementation: str
    direction: str
    terms: list[tuple[Term, Cost]]
    cost: Cost
    held: tuple[str, int]
    predicted: Time | None
    measured: Timing | None

    @property
    def intensity(self) -> float:
        """Floating-point operations a byte that memory must move."""
        return self.cost.flops / self.cost.memory

    @property
    def deviation(self) -> float | None:
        """What the prediction is off by, as a part of the time measured."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted.seconds / self.measured.median - 1


class Point(NamedTuple):
    """The fused kernel on a part of the rows, or of the columns."""

    along: str
    direction: str
    rows: int
    n: int
    measured: float
    predicted: float


class Growth(NamedTuple):
    """Exponents of the time in rows or n: of the times measured, and of the predicted ones."""

    along: str
    direction: str
    measured: float | None
    predicted: float | None


class Complexity(NamedTuple):
    """All that `stablenorm complexity` has to tell."""

    shape: tuple[int, ...]
    matrix: tuple[int, int]
    dtype: str
    threads: int
    beyond_caches: bool
    tiles: int
    lines: list[Line]
    saved: list[tuple[str, str, int]]
    fused: Ceilings
    one_thread: Ceilings
    flops_float32: float
    points: list[Point]
    growth: list[Growth]


def count_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes held at once while this shape is timed, roughly."""
    s = ITEMSIZES[dtype]
    # x, dy, y, dx and the numbers as drawn; the temporaries of plain NumPy and what it keeps.
    return math.prod(shape) * (5 * s + 4 + 6 * max(s, 4))


def count_steps() -> int:
    """How often `inspect` calls `step`."""
    return 2


def inspect(
    shape: tuple[int, ...],
    dtype: str,
    threads: int,
    step: Callable[[str], None],
    *,
    rounds: int = ROUNDS,
    limit: float = LIMIT,
) -> Complexity:
    """
    Count, measure the ceilings and the implementations, sweep; `step` is told what goes on.

    At most `rounds` of each timing, and, once there are three, none that begins after `limit`
    seconds; of what memory bounds, three times as many and another `limit`; of the sweep, two thirds
    as many and another.
    """
    matrix = (math.prod(shape[:-1]), shape[-1])
    tiles = count_tiles(*matrix)
    step("implementations")
    problem = make_problem(matrix, dtype)
    timings, rates = _measure(problem, dtype, threads, rounds, limit)
    copied = 2 * max(problem.x.nbytes, _LEAST_COPY)
    cached = 2 * _CACHED_COPY / timings["copy in the caches"].median
    fused, one = (
        _ceilings(rates[which], copied / timings[which].median, cached)
        for which in ("copy", "copy, one thread")
    )
    beyond = problem.x.nbytes >= last_cache()
    # Its temporaries are wider than x.
    plain_beyond = problem.x.size * max(ITEMSIZES[dtype], 4) >= last_cache()
    lines = []
    for implementation in IMPLEMENTATIONS:
        for direction in DIRECTIONS:
            launch = launch_gpu(direction, matrix, dtype) if implementation == "fused GPU" else None
            of = (implementation, direction, matrix, dtype)
            terms = count_terms(*of, tiles=tiles, launch=launch)
            held = count_held(*of, tiles=tiles, launch=launch)
            if not terms or held is None:
                continue
            costs = [cost for _, cost in terms]
            predicted = _predict(implementation, costs, fused, one, plain_beyond)
            measured = timings.get(f"{implementation} {direction}")
            lines.append(
                Line(implementation, direction, terms, total(costs), held, predicted, measured)
            )
    step("growth")
    points = _sweep(problem, fused, dtype, threads, 2 * rounds // 3, limit * _SWEEP_PART)
    return Complexity(
        shape,
        matrix,
        dtype,
        threads,
        beyond,
        tiles,
        lines,
        count_saved(matrix, dtype),
        fused,
        one,
        rates["copy"]["flops float32"],
        points,
        _growth(points),
    )


def count_tiles(rows: int, n: int) -> int:
    """Into how many tiles the backward of the fused CPU kernel divides the rows."""
    tiles = importlib.import_module("stablenorm.kernels._tiles")
    return int(-(-rows // tiles.backward_rows(rows, n)))


def launch_gpu(
    direction: str,
    matrix: tuple[int, int],
    dtype: str,
    *,
    shared_limit: int = _GPU_SHARED,
    blocks: int = _GPU_BLOCKS,
    cluster_limit: int | None = None,
) -> Launch:
    """
    Return how the GPU kernel is launched where `blocks` fit at once; the default is an H100.

    `cluster_limit` is how many blocks may share a row, as many as there by default.
    """
    plans = importlib.import_module("stablenorm.cuda.plan")
    (rows, n), x = matrix, type_of(dtype)
    which = plans.arithmetic(_GPU_CAPABILITY, np.empty(0, x))
    if cluster_limit is None:
        cluster_limit = plans.largest_cluster(_GPU_CAPABILITY)
    limits = {"shared_limit": shared_limit, "cluster_limit": cluster_limit}
    plan = (
        plans.plan_forward(rows, n, x, which, **limits)
        if direction == "forward"
        else plans.plan_backward(rows, n, x, x, which, **limits)
    )
    defined = dict(define.removeprefix("-DLN_").split("=") for define in plan.defines)
    return Launch(
        int(defined["ROW_THREADS"]),
        int(defined["VECTORS"]),
        plan.rows_per_block,
        defined["STAGED"] == "1",
        plan.chunks,
        plan.chunk_rows,
        plan.segments,
        plans.grid_blocks(plan, rows, blocks),
        plan.cluster,
    )


def is_a_row_a_lane(direction: str, n: int, dtype: str) -> bool:
    """Tell whether rows are so short that another kernel takes them than the one counted."""
    tiny = importlib.import_module("stablenorm.kernels._tiny")
    longest = tiny.LONGEST_FORWARD if direction == "forward" else tiny.LONGEST_BACKWARD
    return dtype != "float64" and n <= int(longest)


def last_cache() -> int:
    """Bytes of the last-level cache; 32 MiB where the system does not tell."""
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        size = 0
    return size if size > 0 else 1 << 25


def _predict(
    implementation: str, costs: list[Cost], fused: Ceilings, one: Ceilings, beyond: bool
) -> Time | None:
    if implementation == "fused CPU":
        return predict_fused(total(costs), fused)
    if implementation == "fused GPU":
        # None is here to be measured.
        return None
    if not any(cost.moved for cost in costs):
        # In double-double each operation is a pass of its own, that reads two numbers and writes one.
        costs = [cost._replace(read=16 * cost.single, written=8 * cost.single) for cost in costs]
    return predict_passes(costs, one, in_memory=beyond and implementation == "plain NumPy")


def _ceilings(rates: dict[str, float], memory: float, cached: float) -> Ceilings:
    four = (
        _alone(rates[f"{way} {which}"], rates["additions"])
        for which in ("x", "word")
        for way in ("loads", "stores")
    )
    arithmetic = (rates[name] for name in ("flops float64", "additions", "operations", "divisions"))
    return Ceilings(memory, cached, *arithmetic, *four)


def _alone(rate: float, additions: float) -> float:
    """Return the rate of loads or stores without the addition that goes with each in its loop."""
    # What is left of a loop that is bound by its additions is noise: no less than a tenth.
    return 1 / max(1 / rate - 1 / additions, 0.1 / rate)


def _measure(
    problem: Problem, dtype: str, threads: int, rounds: int, limit: float
) -> tuple[dict[str, Timing], dict[str, dict[str, float]]]:
    """
    Time the implementations, copies of the same size and the loops of the ceilings, in turn.

    In turn: the machine may be slower while others use it, and then all of these are. What memory
    bounds has a turn of its own, which takes a quarter of a second: within the seconds that all of
    them take, memory has been seen to become twice as fast.
    """
    loops = importlib.import_module("stablenorm._ceilings")
    kinds = {"x": type_of(dtype), "word": np.dtype(np.float64)}
    every = loops.arithmetic_loops() | {
        f"{name} {which}": loop
        for which, kind in kinds.items()
        for name, loop in loops.conversion_loops(kind).items()
    }
    calls, finish = _implementations(problem, threads), []
    for which, count in (("copy", threads), ("copy, one thread", 1)):
        together, rate = make_together(every, count)
        calls |= {f"{which}: {name}": call for name, call in together.items()}
        finish.append((which, rate))
    bound = {name: call for name, call in calls.items() if name in _BOUND_BY_MEMORY}
    timings = measure_interleaved(bound, rounds=3 * rounds, limit=limit)
    others = {name: call for name, call in calls.items() if name not in bound}
    timings |= measure_interleaved(others, rounds=rounds, limit=limit)
    rates = {
        # The lower quartile: of loops that touch no memory all else is disturbance.
        which: {name: rate(name, timings[f"{which}: {name}"].low) for name in every}
        for which, rate in finish
    }
    return timings, rates


def _implementations(problem: Problem, threads: int) -> dict[str, Callable[[], Any]]:
    x, gamma, beta, dy, _, _ = problem
    source, target = _copied(problem)
    near, nearby = np.ones((2, _CACHED_COPY), np.int8)
    calls: dict[str, Callable[[], Any]] = {
        "copy": make_copy(source, target, threads),
        "copy, one thread": make_copy(source, target, 1),
        "copy in the caches": make_copy(near, nearby, 1),
    }
    for implementation, backend in _BACKENDS.items():
        for direction, ways in make_candidates(problem, backend).items():
            calls[f"{implementation} {direction}"] = ways["out="]
    _, cache = plain_forward(x, gamma, beta)
    calls["plain NumPy forward"] = lambda: plain_forward(x, gamma, beta)
    calls["plain NumPy backward"] = lambda: plain_backward(dy, cache)
    return calls


def _copied(problem: Problem) -> tuple[Array, Array]:
    """Return x and where a copy of it may go; others, if it is small."""
    if problem.x.nbytes >= _LEAST_COPY:
        return problem.x.reshape(-1).view(np.uint8), problem.y.reshape(-1).view(np.uint8)
    source, target = np.ones((2, _LEAST_COPY), np.uint8)
    return source, target


def _sweep(
    problem: Problem, ceilings: Ceilings, dtype: str, threads: int, rounds: int, limit: float
) -> list[Point]:
    """Time the fused kernel on fewer rows, and on shorter ones, beside copies of these."""
    rows, n = problem.x.shape
    points = []
    for along, shapes in (
        ("rows", [(max(rows >> k, 1), n) for k in range(_HALVES)]),
        ("n", [(rows, max(n >> k, 1)) for k in range(_HALVES)]),
    ):
        for shape in sorted(set(shapes)):
            part = _part(problem, shape)
            ways = make_candidates(part, "numba")
            source, target = _copied(part)
            calls = {direction: ways[direction]["out="] for direction in DIRECTIONS}
            timings = measure_interleaved(
                {**calls, "copy": make_copy(source, target, threads)},
                rounds=rounds,
                limit=limit,
            )
            here = ceilings._replace(memory=2 * source.nbytes / timings["copy"].median)
            for direction in DIRECTIONS:
                terms = count_terms("fused CPU", direction, shape, dtype, tiles=count_tiles(*shape))
                predicted = predict_fused(total(cost for _, cost in terms), here)
                points.append(
                    Point(along, direction, *shape, timings[direction].median, predicted.seconds)
                )
    return points


def _part(problem: Problem, shape: tuple[int, int]) -> Problem:
    """Return a problem of another shape in the memory of this one."""
    rows, n = shape

    def matrix(array: Array) -> Array:
        return array.reshape(-1)[: rows * n].reshape(shape)

    x, gamma, beta, dy, y, every = problem
    # All of them are there: make_problem has made them.
    dx, dgamma, dbeta = (np.asarray(one) for one in every)
    gradients = type(every)(matrix(dx), dgamma[:n], dbeta[:n])
    return Problem(matrix(x), gamma[:n], beta[:n], matrix(dy), matrix(y), gradients)


def _growth(points: list[Point]) -> list[Growth]:
    found = []
    for along in ("rows", "n"):
        for direction in DIRECTIONS:
            here = [p for p in points if (p.along, p.direction) == (along, direction)]
            sizes = [float(getattr(p, along)) for p in here]
            exponents: list[float | None] = [None, None]
            if len(here) > 1:
                exponents = [
                    fit_exponent(sizes, [getattr(p, which) for p in here])
                    for which in ("measured", "predicted")
                ]
            found.append(Growth(along, direction, *exponents))
    return found
