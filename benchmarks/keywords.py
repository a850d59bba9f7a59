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
from page import DOCS, ROOT, digits, keep, medians, origin, origin_line, put, seconds, table

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
    """Time each keyword, the same thing written around the plain call, and the plain call; both ways in one."""
    x, gamma, beta, dy, *_ = make_problem(SAMPLES, "float32")
    counts = np.ones(SAMPLES[:2], bool)
    # Padding: of each sample, a quarter at its end.
    counts[:, 3 * SAMPLES[1] // 4 :] = False
    scales, shifts = (np.repeat(p[None, None], SAMPLES[0], axis=0) for p in (gamma, beta))
    olds = [np.zeros_like(gamma), np.zeros_like(beta)]

    def both(*parameters: Any, sums: Any = None, **keywords: Any) -> Callable[[], Any]:
        def run() -> Any:
            _, cache = sn.layer_norm_forward(x, *parameters, **keywords)
            return sn.layer_norm_backward(dy, cache, sum_axes=sums)

        return run

    def by_samples() -> None:
        """Loop over the samples."""
        for i in range(SAMPLES[0]):
            _, cache = sn.layer_norm_forward(x[i], scales[i, 0], shifts[i, 0])
            sn.layer_norm_backward(dy[i], cache)

    def by_rows() -> None:
        """Gather the rows that count, and put the results back."""
        y, dx = np.zeros_like(x), np.zeros_like(x)
        y[counts], cache = sn.layer_norm_forward(x[counts], gamma, beta)
        dx[counts] = sn.layer_norm_backward(dy[counts], cache).dx

    def accumulated() -> None:
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        sn.layer_norm_backward(dy, cache, out=(None, *olds), accumulate=True)

    def added() -> None:
        """Add afterwards, which rounds twice."""
        _, cache = sn.layer_norm_forward(x, gamma, beta)
        found: Any = sn.layer_norm_backward(dy, cache)
        for old, total in zip(olds, found[1:], strict=True):
            np.add(old, total, out=old)

    _, cache = sn.layer_norm_forward(x, gamma, beta)
    plain, pull = both(gamma, beta), lambda: sn.layer_norm_backward(dy, cache)
    calls: dict[str, tuple[Any, Any, Any]] = {
        "`gamma_offset=1.0`": (
            both(gamma, beta, gamma_offset=1.0), both(gamma + 1, beta), plain,
        ),
        "gamma and beta per sample": (both(scales, shifts), by_samples, plain),
        "`sum_axes=1`": (both(gamma, beta, sums=1), by_samples, plain),
        "`where=`, a quarter of the rows is padding": (
            both(gamma, beta, where=counts[..., None]), by_rows, plain,
        ),
        "`accumulate=True`": (accumulated, added, plain),
        "`where=`, elements": (both(gamma, beta, where=x > -1), None, plain),
        "`layer_norm_jvp`, beside the backward": (lambda: sn.layer_norm_jvp(dy, cache), None, pull),
        "`layer_norm_double_backward`, beside the backward": (
            lambda: sn.layer_norm_double_backward(x, dy, cache), None, pull,
        ),
    }  # fmt: skip
    found = []
    for name, (it, around, base) in calls.items():
        times = medians({"it": it, "plain": base} | ({"around": around} if around else {}))
        found.append((name, *times[:2], times[2] if around else None))
    return found


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
    rest = _others_table(found)
    return f"""Float32, {THREADS} threads, results allocated. Each ratio is of medians of calls taken in turns.

### Residuals

The time of NumPy's addition and the call, over that of the call with `residual=` or `dsum=`.

{table(("x", "direction", "together", "apart over together"), sums)}

### The other keywords

Forward and backward of {SAMPLES}: over the time of the plain call; and the time of the same thing written around plain
calls, over it.

{rest}

{origin_line("make keywords", found["origin"])}
"""


def _others_table(found: dict[str, Any]) -> str:
    lines = [
        (name, seconds(it), digits(it / plain), "-" if around is None else digits(around / it))
        for name, it, plain, around in found["others"]
    ]
    return table(("what", "time", "over the plain call", "around plain calls, over it"), lines)


def developers_table(found: dict[str, Any]) -> str:
    """The table of CONTRIBUTING.md: what is in a kernel, and what is written around the plain call."""
    lines = [
        (f"{direction} of {tuple(shape)}: `{name}`", digits(apart / together, 3), "in the kernels")
        for (shape, direction, together, apart), name in (
            (line, "residual" if line[1] == "forward" else "dsum")
            for line in found["residual"]
            if tuple(line[0]) == BEYOND[-1]
        )
    ]
    for name, it, _, around in found["others"]:
        inside = (
            "in the kernels: tiles of samples"
            if "sample" in name or "sum_axes" in name
            else "`functional`"
        )
        if around is not None:
            lines.append((name, digits(around / it, 3), inside))
    return table(("feature", "around plain calls, over it", "where it is"), lines)


if __name__ == "__main__":
    kept = keep("keywords", __doc__, measure)
    put(DOCS / "evidence" / "performance.md", {"keywords": page(kept)})
    put(ROOT / "CONTRIBUTING.md", {"keywords": developers_table(kept)})
