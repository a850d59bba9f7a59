"""How fast: ours and the plain formula against a copy of the same bytes, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._bench import PASSES
from stablenorm._files import Problem
from stablenorm._threads import get_num_threads
from stablenorm._types import Array, Gradients
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import SETTLE, Timing, make_copy, measure_interleaved

# Bytes of x beyond the caches of most machines: a copy reads and writes 128 MiB, a backward 192.
_FAR = 2**26
_ROUNDS = 9
# Seconds for all rounds of one direction and size.
_LIMIT = 1.5
_SETTLE = SETTLE
# Below, handing parts to other threads takes longer than copying them (20 against 5 us for 100 KiB,
# 2-core AMD EPYC).
_COPY_ALONE = 2**21
# Two sizes, two directions.
STEPS = 4

OURS, OURS_FRESH, PLAIN, COPY = "stablenorm, `out=`", "stablenorm", "plain formula", "copy"


class Speed(NamedTuple):
    """One size: what was timed, and the medians by direction and candidate."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    words: str
    threads: int
    timings: dict[str, dict[str, Timing]]

    def rate(self, direction: str, name: str) -> float:
        """Bytes a second: what must be read and written, over the median time."""
        arrays = 2 if name == COPY else PASSES[direction]
        return arrays * self.nbytes / self.timings[direction][name].median


def measure_speed(problem: Problem, step: Callable[[str], None]) -> tuple[Speed, ...]:
    """Time the data as they are, and repeated or cut to a size beyond the caches."""
    n = problem.x.shape[-1]
    x, dy = (array.reshape(-1, n) for array in (problem.x, problem.dy))
    most = max(1, _FAR // (n * x.dtype.itemsize))
    sizes = []
    if len(x) <= most:
        sizes.append((x, dy, "the data as they are"))
    # Data of nearly that size are beyond the caches themselves.
    if len(x) <= most // 2 or len(x) > most:
        words = "cut to" if len(x) > most else "its rows repeated to"
        again = np.resize(np.arange(min(len(x), most)), most)
        sizes.append((x[again], dy[again], f"the data, {words} {_FAR >> 20} MiB"))
    speeds = []
    for one, cotangent, words in sizes:
        part = problem._replace(x=np.ascontiguousarray(one), dy=np.ascontiguousarray(cotangent))
        speeds.append(_measure_one(part, words, step))
    for _ in range(STEPS - len(PASSES) * len(sizes)):
        step("timing")
    return tuple(speeds)


def _measure_one(part: Problem, words: str, step: Callable[[str], None]) -> Speed:
    threads = get_num_threads()
    target = np.empty_like(part.x)
    copy = make_copy(part.x, target, threads if part.x.nbytes > _COPY_ALONE else 1)
    timings = {}
    for direction, calls in _candidates(part, target).items():
        step(f"timing, {direction}")
        # A NaN or an overflow in the data is no news here.
        with np.errstate(all="ignore"):
            timings[direction] = measure_interleaved(
                {**calls, COPY: copy}, rounds=_ROUNDS, limit=_LIMIT, settle=_SETTLE
            )
    shape, dtype = part.x.shape, str(part.x.dtype)
    return Speed(shape, dtype, part.x.nbytes, words, threads, timings)


def _candidates(part: Problem, y: Array) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, per direction, what is timed."""
    x, gamma, beta, eps, dy = part.x, part.gamma, part.beta, part.eps, part.dy
    _, cache = layer_norm_forward(x, gamma, beta, eps)
    with np.errstate(all="ignore"):
        _, plain_cache = plain_forward(x, gamma, beta, eps)
    gradients = Gradients(*(None if array is None else np.empty_like(array) for array in part[1:4]))
    return {
        "forward": {
            OURS: lambda: layer_norm_forward(x, gamma, beta, eps, out=y),
            OURS_FRESH: lambda: layer_norm_forward(x, gamma, beta, eps),
            PLAIN: lambda: plain_forward(x, gamma, beta, eps),
        },
        "backward": {
            OURS: lambda: layer_norm_backward(dy, cache, out=gradients),
            OURS_FRESH: lambda: layer_norm_backward(dy, cache),
            PLAIN: lambda: plain_backward(dy, plain_cache),
        },
    }
