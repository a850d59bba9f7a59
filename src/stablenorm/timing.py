"""
Time functions side by side, and the copy that they are measured against.

An instrument: it takes functions and knows nothing of what they do. It assumes that nothing else
of this process runs meanwhile.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from stablenorm.types import Array

# A thousand times the tens of nanoseconds that reading the clock costs, with room to spare.
BURST = 3e-4
# Thread pools keep spinning after a call, on the cores that the next candidate needs: GNU OpenMP's,
# as PyTorch comes with, for up to 10 ms (processor time used while the process slept, 2-core AMD
# EPYC 9005). With pauses of 5 ms, what came after it was timed on one processor of two.
SETTLE = 2e-2
# Seconds of calls that are not counted, after a pause: processors come out of it slowly. Nine calls
# of (2, 128, 1024) took 50 to 60 us each, and 35 where a hundred had gone before (same machine).
# Without this, PyTorch alone was warm: its first two calls take 5 ms each, looking for its thread.
WARM = 1e-2
# A call as long as this warms its caches and clocks up itself, and two of it would be dear.
_LONG = 0.02
# As long as this, the calls before the first round are warm-up enough.
_VERY_LONG = 0.2
# Well beyond the caches of any machine of today that this is likely to run on.
COPY_BYTES = 2**28


class Timing(NamedTuple):
    """Seconds a call: the median over rounds, and the quartiles around it."""

    median: float
    low: float
    high: float
    rounds: int
    calls: int


def measure_interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    least: int = 3,
    limit: float = math.inf,
    settle: float = SETTLE,
    step: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """
    Time every candidate once a round, in an order that rotates; take medians over rounds.

    Parameters
    ----------
    candidates : mapping of str to callable
        What to time; each is called without arguments and its result dropped.
    rounds : int, default: 15
        At most so many rounds.
    least : int, default: 3
        At least so many, whatever `limit`.
    limit : float, optional
        Seconds after which no further round begins. Default: no limit.
    settle : float, default: 2e-2
        Seconds of sleep before each candidate, until the threads of the one before stop spinning.
    step : callable, optional
        Called after each sample.

    Returns
    -------
    dict of str to Timing
        Per candidate, in the order given.

    Notes
    -----
    What changes slowly on a machine (its clock, its neighbours) changes for all candidates alike.
    Before each sample the candidate is called without being timed: twice and for 10 ms at least;
    once if a call is longer than 20 ms; not at all if longer than 0.2 s. The garbage collector is
    off, as in `timeit`. A sample is as many calls as last 0.3 ms, and at least one.

    Examples
    --------
    >>> import time
    >>> from stablenorm.timing import measure_interleaved
    >>> naps = {"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.02)}
    >>> timings = measure_interleaved(naps, rounds=3)
    >>> timings["long"].median > timings["short"].median
    True
    """
    if least < 1:
        msg = f"least must be >= 1, got {least}"
        raise ValueError(msg)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    with _no_collection():
        counts = {}
        for name, function in candidates.items():
            time.sleep(settle)
            counts[name] = _calibrate(function)
        order = list(candidates)
        end = time.perf_counter() + limit
        for i in range(max(rounds, least)):
            if i >= least and time.perf_counter() >= end:
                break
            for name in order:
                time.sleep(settle)
                samples[name].append(_sample(candidates[name], *counts[name]))
                if step is not None:
                    step()
            order.append(order.pop(0))
    return {name: _timing(samples[name], counts[name][0]) for name in candidates}


def make_copy(source: Array, target: Array, threads: int) -> Callable[[], None]:
    """
    Return a function that copies `source` to `target`, each of `threads` a part of its own.

    Parameters
    ----------
    source, target : array
        Contiguous, of one shape and dtype.
    threads : int
        How many threads copy, the calling one among them.

    Returns
    -------
    callable
        To be timed by `measure_interleaved`; each call copies all of it.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm.timing import make_copy
    >>> target = np.zeros(3)
    >>> make_copy(np.arange(3.0), target, threads=2)()
    >>> target
    array([0., 1., 2.])
    """
    parts = list(
        zip(
            np.array_split(source.reshape(-1), threads),
            np.array_split(target.reshape(-1), threads),
            strict=True,
        )
    )
    # It lives as long as the function that is returned; np.copyto releases the interpreter lock.
    pool = ThreadPoolExecutor(max(1, threads - 1))

    def copy() -> None:
        """Copy all parts, the first of them here."""
        others = [pool.submit(np.copyto, to, from_) for from_, to in parts[1:]]
        np.copyto(parts[0][1], parts[0][0])
        for other in others:
            other.result()

    return copy


def measure_copy(threads: int, nbytes: int = COPY_BYTES) -> float:
    """
    Measure what the memory can move: bytes read and written a second by a plain copy.

    Parameters
    ----------
    threads : int
        How many threads copy, each a part of its own.
    nbytes : int, default: 2**28
        Bytes copied, from arrays and to arrays whose pages exist already.

    Returns
    -------
    float
        ``2 * nbytes`` over the median time of seven copies, in bytes a second.

    Examples
    --------
    >>> from stablenorm.timing import measure_copy
    >>> measure_copy(threads=1, nbytes=2**16) > 0
    True
    """
    source, target = np.ones((2, nbytes), np.int8)
    copy = make_copy(source, target, threads)
    return 2 * nbytes / measure_interleaved({"copy": copy}, rounds=7)["copy"].median


def _calibrate(function: Callable[[], Any]) -> tuple[int, int]:
    """Call without counting; return how many calls make a burst, and how many warm it up."""
    # The first call may compile something, and touches the pages of its outputs.
    function()
    count, seconds = 1, _least(function, 1)
    while count * seconds < BURST:
        # At most tenfold at a time: the estimate from few calls is too high, never far too low.
        count = min(10 * count, math.ceil(1.1 * BURST / max(seconds, 1e-9)))
        seconds = _least(function, count)
    if seconds > _VERY_LONG:
        return count, 0
    return count, 1 if seconds > _LONG else 2


def _least(function: Callable[[], Any], calls: int) -> float:
    """
    Least seconds a call of up to five samples, as long as they take no more than 0.1 s.

    One sample may be a thousand times too long, where threads of two libraries meet; taken for
    the truth it would make every burst a single call.
    """
    samples = [_sample(function, calls, 0)]
    while len(samples) < 5 and calls * sum(samples) < 0.1:
        samples.append(_sample(function, calls, 0))
    return min(samples)


def _sample(function: Callable[[], Any], calls: int, warm: int) -> float:
    """Seconds a call, over `calls` of them; before that `warm`, and more until it is warm."""
    start = time.perf_counter()
    for _ in range(warm):
        function()
    while warm > 1 and time.perf_counter() - start < WARM:
        function()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _timing(samples: list[float], calls: int) -> Timing:
    low, high = samples[0], samples[0]
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), low, high, len(samples), calls)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and not while something is timed."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
