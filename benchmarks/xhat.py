"""
Rebuild xhat in the backward, or keep it? And how large should a row block be?

Times the backward of `stablenorm.reference` on float32, (8192, 768), beside a copy of it that
reads a kept float64 xhat and a forward that writes one, interleaved, and writes docs/xhat.md.
The two backwards must agree bit for bit before they are timed.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import processor

from stablenorm import reference
from stablenorm._types import Gradients

ROWS, N = 8192, 768
EPS = 1e-5
# Interleaved repetitions: the median of 15 moved by less than 3 % between runs.
REPEATS = 15
PAGE = Path(__file__).parent.parent / "docs" / "xhat.md"


def blocks() -> list[slice]:
    """Return the row blocks of the reference."""
    return list(reference._blocks((ROWS, N)))


def forward_keeping(x: Any, gamma: Any, beta: Any, y: Any, xhat: Any, rstd: Any) -> None:
    """The reference's forward, writing xhat and rstd as well."""
    for rows in blocks():
        centered, _, _ = reference._center(
            x[rows].astype(np.float64), lambda v: np.asarray(v, np.float64)
        )
        rstd[rows] = 1 / np.sqrt(reference._mean(centered * centered) + EPS)
        centered *= rstd[rows]
        xhat[rows] = centered
        centered *= gamma
        centered += beta
        y[rows] = centered.astype(np.float32)


def backward_keeping(dy: Any, gamma: Any, xhat: Any, rstd: Any, dx: Any, sums: Any) -> None:
    """The reference's backward, reading xhat instead of rebuilding it."""
    dgamma, dbeta = reference._RowSum(), reference._RowSum()
    for rows in blocks():
        cotangent, block = dy[rows].astype(np.float64), xhat[rows]
        dgamma.add(cotangent * block)
        dbeta.add(cotangent)
        projected = reference.project(cotangent * gamma, block)
        projected *= rstd[rows]
        dx[rows] = projected.astype(np.float32)
    sums[0][...], sums[1][...] = dgamma.rounded(sums[0]), dbeta.rounded(sums[1])


def medians(cases: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Time all cases in turn, REPEATS times; return the median of each, in ms."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(REPEATS):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, and write the page."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, ROWS, N)).astype(np.float32)
    gamma, beta = rng.standard_normal((2, N)).astype(np.float32)
    wide_gamma, wide_beta = gamma.astype(np.float64), beta.astype(np.float64)
    y, y_keeping, dx, dx_keeping = (np.empty_like(x) for _ in range(4))
    xhat, rstd = np.empty((ROWS, N)), np.empty((ROWS, 1))
    sums, sums_keeping = (np.empty_like(gamma), np.empty_like(beta)), np.empty((2, N), np.float32)
    kept = reference.forward(x, gamma, beta, EPS, y)
    out = Gradients(dx, *sums)
    cases: dict[str, Callable[[], Any]] = {
        "forward, rebuilding": lambda: reference.forward(x, gamma, beta, EPS, y),
        "forward, keeping": lambda: forward_keeping(
            x, wide_gamma, wide_beta, y_keeping, np.empty((ROWS, N)), rstd
        ),
        "forward, keeping in a reused array": lambda: forward_keeping(
            x, wide_gamma, wide_beta, y_keeping, xhat, rstd
        ),
        "backward, rebuilding": lambda: reference.backward(dy, x, gamma, kept, out),
        "backward, keeping": lambda: backward_keeping(
            dy, wide_gamma, xhat, rstd, dx_keeping, sums_keeping
        ),
    }
    for case in cases.values():
        case()
    for one, other in ((y, y_keeping), (dx, dx_keeping), (sums[0], sums_keeping[0])):
        np.testing.assert_array_equal(one, other)
    times = medians(cases)
    default = reference._BLOCK
    sizes = {}
    for power in range(11, 19):
        reference._BLOCK = 1 << power
        sizes[power] = medians(
            {name: cases[name] for name in ("forward, rebuilding", "backward, rebuilding")}
        )
    reference._BLOCK = default
    # Bytes an element that cross the memory bus: x, y; dy, x, dx; and float64 xhat.
    traffic = {
        "forward, rebuilding": 8,
        "forward, keeping": 16,
        "forward, keeping in a reused array": 16,
        "backward, rebuilding": 12,
        "backward, keeping": 16,
    }
    rows = [
        f"| {name} | {traffic[name]} | {times[name]:.1f} | {1e6 * times[name] / x.size:.2f} |"
        for name in times
    ]
    both = {
        way: times[f"forward, {way}"] + times[f"backward, {way}"]
        for way in ("rebuilding", "keeping")
    }
    reused = times["forward, keeping in a reused array"] + times["backward, keeping"]
    PAGE.write_text(
        f"""# Rebuild xhat, or keep it?

The backward needs xhat again. The forward may keep it, an array as large as x or larger, or the
backward may rebuild it from x and the mean and rstd of the row. Here the reference in NumPy,
`stablenorm.reference`, is timed both ways.

Generated by `benchmarks/xhat.py` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()},
{os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}. float32,
({ROWS}, {N}), one thread, medians of {REPEATS} interleaved runs; the results of both ways are
bitwise equal.

| | bytes an element | ms | ns an element |
|---|---|---|---|
{chr(10).join(rows)}

y and dx are written into reused arrays in all of them. A kept xhat must be float64 for the gradients
to be correctly rounded. Held between forward and backward: {xhat.nbytes / 2**20:.0f} MiB, against {kept.nbytes / 2**20:.2f} MiB of statistics
({kept.nbytes / ROWS:.0f} bytes a row). Forward and backward together: {both["rebuilding"]:.1f} ms
rebuilding, {both["keeping"]:.1f} ms keeping, a ratio of {both["keeping"] / both["rebuilding"]:.2f};
with an xhat array that a caller could hand back each time, {reused:.1f} ms. The memory is saved in any
case, so the package rebuilds, in all kernels.

## Elements of a row block

| elements | forward, ms | backward, ms |
|---|---|---|
"""
        + "\n".join(
            f"| 2^{power} | {t['forward, rebuilding']:.1f} | {t['backward, rebuilding']:.1f} |"
            for power, t in sizes.items()
        )
        + f"\n\nThe package uses {default} elements.\n"
    )
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
