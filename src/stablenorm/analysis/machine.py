"""
Measure what a machine can do at most: rates of loops that do one thing, on as many threads as asked.

It takes the loops; how they are compiled is not its affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Loops = Mapping[str, tuple[Callable[[], Callable[[], Any]], int]]


def make_together(
    loops: Loops, threads: int
) -> tuple[dict[str, Callable[[], None]], Callable[[str, float], float]]:
    """
    Return calls that run each loop on several threads at once, to be timed beside other things.

    Parameters
    ----------
    loops : mapping of str to a pair
        What makes the loop for one thread, with memory of its own, and how much a call of that
        does. The loop must not hold the interpreter lock.
    threads : int
        How many run at the same time, the calling one among them.

    Returns
    -------
    calls : dict of str to callable
        By name: returns when the last thread has done.
    rate : callable
        ``rate(name, seconds)`` is the work of all threads a second, if a call takes `seconds`.

    Examples
    --------
    >>> from stablenorm.analysis.machine import make_together
    >>> calls, rate = make_together({"nothing": (lambda: lambda: None, 10)}, threads=2)
    >>> calls["nothing"](), rate("nothing", 0.5)
    (None, 40.0)
    """
    # It lives as long as the calls.
    pool = ThreadPoolExecutor(max(1, threads - 1))
    calls = {name: _together(make, threads, pool) for name, (make, _) in loops.items()}
    return calls, lambda name, seconds: threads * loops[name][1] / seconds


def _together(
    make: Callable[[], Callable[[], Any]], threads: int, pool: ThreadPoolExecutor
) -> Callable[[], None]:
    """Return what runs one loop on each thread, and waits for all."""
    here, *others = (make() for _ in range(threads))

    def run() -> None:
        waiting = [pool.submit(other) for other in others]
        here()
        for one in waiting:
            one.result()

    return run
