"""
What the keywords cost beside the plain call: `make keywords`.

Times a residual beside NumPy's addition, and the other keywords beside the plain call; writes
benchmarks/results/keywords.json and the last part of docs/evidence/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import BEYOND, IN_CACHE
from page import DOCS, digits, keep, medians, origin, origin_line, put, seconds, table

import stablenorm as sn
from stablenorm.timing import make_problem, use_threads

THREADS = 2
# 64k elements of a sample are 10 us of work.
SAMPLES = (64, 64, 1024)

Calls = dict[str, Callable[[], Any]]


def residual(shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Time NumPy's addition and the norm, apart and together, both ways."""
    x, gamma, beta, dy, *_ = make_problem(shape, "float32")
    other = x[::-1].copy()
    _, cache = sn.layer_norm_forward(x, gamma, beta)

    def backward_and_add() -> None:
        dx: Any = sn.layer_norm_backward(dy, cache).dx
        dx += other

    ways: dict[str, Calls] = {
        "forward": {
            "apart": lambda: sn.layer_norm_forward(x + other, gamma, beta),
            "together": lambda: sn.layer_norm_forward(x, gamma, beta, residual=other),
        },
        "backward": {
            "apart": backward_and_add,
            "together": lambda: sn.layer_norm_backward(dy, cache, dsum=other),
        },
    }
    return [(shape, way, *medians(calls)) for way, calls in ways.items()]


def others() -> list[tuple[Any, ...]]:
    """Time the other keywords beside the plain call, forward and backward in one."""
    x, gamma, beta, dy, *_ = make_problem(SAMPLES, "float32")
    rows = np.ones((*SAMPLES[:2], 1), bool)
    # Padding: of each sample, a quarter at its end.
    rows[:, 3 * SAMPLES[1] // 4 :] = False
    scales, shifts = (np.repeat(p[None, None], SAMPLES[0], axis=0) for p in (gamma, beta))

    def both(*parameters: Any, sums: Any = None, **keywords: Any) -> Callable[[], Any]:
        return lambda: sn.layer_norm_backward(
            dy, sn.layer_norm_forward(x, *parameters, **keywords)[1], sum_axes=sums
        )

    _, cache = sn.layer_norm_forward(x, gamma, beta)
    plain, pull = both(gamma, beta), lambda: sn.layer_norm_backward(dy, cache)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "`gamma_offset=1.0`": (both(gamma, beta, gamma_offset=1.0), plain),
        "gamma and beta per sample": (both(scales, shifts), plain),
        "`sum_axes=1`": (both(gamma, beta, sums=1), plain),
        "`where=`, a quarter of the rows is padding": (both(gamma, beta, where=rows), plain),
        "`where=`, elements": (both(gamma, beta, where=x > -1), plain),
        "`layer_norm_jvp`, beside the backward": (lambda: sn.layer_norm_jvp(dy, cache), pull),
        "`layer_norm_double_backward`, beside the backward": (
            lambda: sn.layer_norm_double_backward(x, dy, cache),
            pull,
        ),
    }
    return [(name, *medians({"it": it, "plain": base})) for name, (it, base) in calls.items()]


def measure() -> dict[str, Any]:
    """Return all that the page holds."""
    use_threads(THREADS)
    return {
        "origin": origin(),
        "residual": [line for shape in IN_CACHE[2:] + BEYOND for line in residual(shape)],
        "others": others(),
    }


def page(found: dict[str, Any]) -> str:
    """The last part of docs/evidence/performance.md."""
    sums = [
        (tuple(shape), way, seconds(together), digits(apart / together, 3))
        for shape, way, apart, together in found["residual"]
    ]
    rest = [(name, seconds(it), digits(it / plain)) for name, it, plain in found["others"]]
    return f"""Float32, {THREADS} threads, results allocated. Each ratio is of medians of calls taken in turns.

### Residuals

The time of NumPy's addition and the call, over that of the call with `residual=` or `dsum=`.

{table(("x", "direction", "together", "apart over together"), sums)}

### The other keywords

Forward and backward of {SAMPLES}, over the time of the plain call.

{table(("what", "time", "over the plain call"), rest)}

{origin_line("make keywords", found["origin"])}
"""


if __name__ == "__main__":
    put(
        DOCS / "evidence" / "performance.md", {"keywords": page(keep("keywords", __doc__, measure))}
    )
