"""
Time functions side by side, and a plain copy for comparison; make the norms to be timed.

A measurement takes functions and knows nothing of their purpose. It assumes that nothing else of this
process runs meanwhile.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from timeit import Timer
from typing import Any, NamedTuple

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.backends import BACKENDS, choose
from stablenorm.formats import parse
from stablenorm.records import Array, Gradients, Rounding
from stablenorm.testing.plain import plain_backward, plain_forward

Call = Callable[[], Any]
# Bytes moved, in arrays of x: forward reads x and writes y; backward reads dy and x, writes dx.
PASSES = {"forward": 2, "backward": 3}
ROUNDINGS: tuple[Rounding, ...] = "fast", "nearest"

# Seconds of a sample: more than a thousand times the tens of nanoseconds that reading the clock costs.
_BURST = 3e-4
# Thread pools keep spinning after a call, on the cores that the next candidate needs: GNU OpenMP's,
# which PyTorch includes, for up to 10 ms. With pauses of 5 ms, the candidate after PyTorch was timed on
# one processor of two (2-core AMD EPYC 9005).
_SETTLE = 2e-2
# Seconds of calls that are not counted: processors come slowly out of a pause. Nine calls of
# (2, 128, 1024) took 50 to 60 us each, but 35 us after a hundred calls (same machine).
_WARM = 1e-2
# Seconds of a call that warms up caches and clocks itself; a further call would take too long.
_LONG = 0.2
# More than the caches of today's usual machines.
COPY_BYTES = 2**28


class Timing(NamedTuple):
    """Seconds a call: the median over rounds, and the quartiles around it."""

    median: float
    low: float
    high: float


def measure_interleaved(
    candidates: Mapping[Any, Call], rounds: int, least: int = 1, limit: float = math.inf
) -> dict[Any, Timing]:
    """
    Time every candidate once a round, in an order that rotates; take medians over rounds.

    Slow changes of a machine (its clock, its neighbours) then reach all candidates alike. After `limit`
    seconds no further round begins, once there are `least`. A sample is as many calls as last 0.3 ms,
    at least one. Before each sample come 20 ms of sleep, in which the threads of the previous candidate
    stop spinning, and 10 ms of calls that are not counted.
    """
    samples: dict[Any, list[float]] = {name: [] for name in candidates}
    counts = {name: _calibrate(function) for name, function in candidates.items()}
    order, end = list(candidates), time.perf_counter() + limit
    for i in range(rounds):
        if i >= least and time.perf_counter() >= end:
            break
        for name in order:
            time.sleep(_SETTLE)
            samples[name].append(_sample(candidates[name], *counts[name]))
        order.append(order.pop(0))
    quartiles = {k: np.quantile(v, (0.5, 0.25, 0.75)).tolist() for k, v in samples.items()}
    return {name: Timing(*three) for name, three in quartiles.items()}


def make_copy(source: Array, target: Array, threads: int) -> Call:
    """Return a function that copies `source` to `target`; each of `threads` copies one part."""
    parts = [np.array_split(array.reshape(-1), threads) for array in (target, source)]
    # The pool lives as long as the function. np.copyto releases the interpreter lock.
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(np.copyto, *parts))


def measure_copy(threads: int, nbytes: int = COPY_BYTES) -> float:
    """Return the bytes that a copy by so many threads reads and writes in a second."""
    source, target = np.ones((2, nbytes), np.int8)
    copy = make_copy(source, target, threads)
    return 2 * nbytes / measure_interleaved({"copy": copy}, rounds=7)["copy"].median


def _calibrate(function: Call) -> tuple[int, float]:
    """Return the number of calls in a sample, and the seconds of uncounted calls before it."""
    time.sleep(_SETTLE)
    # The first call may compile something, and touches the pages of its outputs.
    function()
    count = 1
    while True:
        seconds = _sample(function, count, 0)
        if count * seconds < _LONG / 2:
            # One sample may be a thousand times too long if threads of two libraries meet. It alone
            # would make every later sample a single call.
            seconds = min(seconds, *(_sample(function, count, 0) for _ in range(4)))
        if count * seconds >= _BURST:
            return count, _WARM if seconds < _LONG else 0
        # At most tenfold at a time: an estimate from few calls is too high, but never far too low.
        count = min(10 * count, math.ceil(1.1 * _BURST / max(seconds, 1e-9)))


def _sample(function: Call, calls: int, warm: float) -> float:
    """Return the seconds of a call, over `calls` of them after `warm` seconds, without garbage collection."""
    timer, end = Timer(function), time.perf_counter() + warm
    while time.perf_counter() < end:
        function()
    return timer.timeit(calls) / calls


# ---- norms to be timed ----


class Problem(NamedTuple):
    """Arrays to normalize over the last axis, and arrays to write into."""

    x: Array
    gamma: Array
    beta: Array
    dy: Array
    y: Array
    gradients: Gradients


def make_problem(shape: Sequence[int], dtype: str) -> Problem:
    """Draw x and dy from N(0, 1), gamma around 1; timings do not depend on the values."""
    rng = np.random.default_rng(0)
    kind = parse(dtype)
    # Larger arrays repeat these numbers: drawing fills memory ten times as slowly as a norm does.
    count = min(math.prod(shape), 2**22)
    x, dy = (np.resize(rng.standard_normal(count).astype(kind), shape) for _ in range(2))
    beta = rng.standard_normal(shape[-1]).astype(kind)
    gamma = rng.uniform(0.5, 1.5, shape[-1]).astype(kind)
    gradients = Gradients(np.zeros_like(x), np.zeros_like(gamma), np.zeros_like(beta))
    return Problem(x, gamma, beta, dy, np.zeros_like(x), gradients)


def make_candidates(
    problem: Problem, backend: Any, rounding: Any = "fast", kind: str = "layer"
) -> dict[str, dict[str, Call]]:
    """Return by direction the calls with fresh outputs and with `out=`."""
    x, gamma, beta, dy, y, gradients = problem
    norm, pull = FUNCTIONS[kind]
    forward = partial(norm, x, gamma, beta, backend=backend, rounding=rounding)
    _, cache = forward()
    backward = partial(pull, dy, cache)
    return {
        "forward": {"fresh": forward, "out=": partial(forward, out=y)},
        "backward": {"fresh": backward, "out=": partial(backward, out=gradients)},
    }


def make_plain(problem: Any, kind: str = "layer") -> dict[str, Call]:
    """Return by direction the call of plain NumPy, as one writes it."""
    x, gamma, beta, dy = problem.x, problem.gamma, problem.beta, problem.dy
    forward = partial(plain_forward, x, gamma, beta, kind=kind)
    return {"forward": forward, "backward": partial(plain_backward, dy, forward()[1], kind)}


def usable_backends() -> list[str]:
    """Return the names of the backends that can be loaded here."""
    usable = []
    for name in BACKENDS:
        with contextlib.suppress(ImportError):
            usable.append(choose(name))
    return usable
