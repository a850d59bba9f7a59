"""
The cost of rounding="nearest", beside fast and on hard inputs: `make rounding`.

Writes benchmarks/results/rounding.json and docs/evidence/rounding.md. The exit status is 1 if two ways to the same
results differ in an element. Twelve minutes, alone on the machine.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from cases import BEYOND, IN_CACHE
from page import digits, keep, medians, origin, origin_line, table, write

from stablenorm import layer_norm_backward, layer_norm_forward, set_num_threads
from stablenorm.api import FUNCTIONS
from stablenorm.formats import parse
from stablenorm.testing import FAMILIES, Case, make_case
from stablenorm.timing import ROUNDINGS

NARROW = ("float32", "bfloat16", "float16")
THREADS = os.cpu_count() or 1
# Shapes that fit the cache of one core, and the bytes of a large x: 256 MiB.
SMALL = [(2**16 // n, n) for n in (256, 512, 1024, 2048, 4096)]
LARGE = 2**28
ROWS, N = 64, 1024
# Elements of x for the comparison of float64 with double-double, seconds for that of the backends.
ELEMENTS, SECONDS = 2 * 10**9, 30


def run(case: Case, backend: Any = None, kind: str = "layer", *, pairs: bool = False) -> Any:
    """Return y, dx, dgamma and dbeta, or with `pairs`, by a beta of float64, all but dbeta in double-double."""
    forward, backward = FUNCTIONS[kind]
    # An RMS norm has a beta only to compute in double-double.
    beta = case.beta if kind == "layer" or pairs else None
    if pairs:
        beta = (0 * case.beta if kind == "rms" else case.beta).astype(np.float64)
    y, cache = forward(case.x, case.gamma, beta, case.eps, rounding="nearest", backend=backend)
    return y, *backward(case.dy, cache)[: 2 + (beta is not None and not pairs)]


def draw(rng: np.random.Generator, dtype: Any, rows: int, n: int = N) -> Case:
    """Draw x, dy, gamma and beta from N(0, 1)."""
    kind = parse(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    x, dy, (gamma, beta) = (
        rng.standard_normal((k, n), dtype=wide).astype(kind) for k in (rows, rows, 2)
    )
    return Case(x, gamma, beta, 1e-5, dy)


def ratios(shape: tuple[int, ...], dtype: str, threads: int = THREADS) -> tuple[float, float]:
    """Return the times of nearest over those of fast, forward and backward, with `out=`."""
    set_num_threads(threads)
    rows, n = math.prod(shape[:-1]), shape[-1]
    x, gamma, beta, eps, dy = draw(np.random.default_rng(0), dtype, rows, n)
    x, dy = x.reshape(shape), dy.reshape(shape)
    y, sums = np.empty_like(x), (np.empty_like(gamma), np.empty_like(beta))
    # Three dy in turns, because dy decides which columns are uncertified.
    dys = [dy, *(np.roll(dy, k, axis=-2) for k in (1, 2))]
    forwards, backwards = dict[str, Any](), dict[str, Any]()
    for rounding in ROUNDINGS:
        forward = partial(layer_norm_forward, x, gamma, beta, eps, rounding=rounding)
        cache, next_dy = forward()[1], itertools.cycle(dys).__next__
        forwards[rounding] = partial(forward, out=y)
        backwards[rounding] = lambda c=cache, d=next_dy: layer_norm_backward(d(), c, out=(y, *sums))
    times = [medians(calls, rounds=15, least=3, limit=4) for calls in (forwards, backwards)]
    set_num_threads(THREADS)
    return times[0][1] / times[0][0], times[1][1] / times[1][0]


def differences(dtype: str) -> tuple[str, str, int, int]:
    """Compute x ~ N(0, 1) in two ways; count the elements of x, and the results that differ."""
    rng, compared, differ = np.random.default_rng(0), 0, 0
    end, narrow = time.perf_counter() + SECONDS, dtype in NARROW
    while compared < ELEMENTS if narrow else time.perf_counter() < end:
        case = draw(rng, dtype, 2**14 if narrow else 256)
        # RMS norm every other time.
        norm = "rms" if compared // case.x.size % 2 else "layer"
        others = run(case, None if narrow else "numpy", norm, pairs=narrow)
        for result, other in zip(run(case, kind=norm), others, strict=False):
            bits = f"u{result.itemsize}"
            differ += int((result.view(bits) != other.view(bits)).sum())
        compared += case.x.size
    return dtype, "float64 and pairs" if narrow else "both backends", compared, differ


def hard(dtype: str) -> list[tuple[Any, ...]]:
    """Return, for each kind of input, the time over that of N(0, 1), and rows per second."""
    x, gamma, beta, eps, dy = normal = draw(np.random.default_rng(0), dtype, ROWS)
    # Every y and dx lies halfway between two float32.
    signs, tie = np.sign(np.arange(N) % 4 - 1.5).astype(dtype), np.full(N, 1 + 2.0**-24)
    tied = Case(np.tile(signs, (ROWS, 1)), tie, 0 * tie, 0.0, np.tile(np.roll(signs, 1), (ROWS, 1)))
    cases = {
        **({"exact ties": tied} if dtype == "float32" else {}),
        "constant rows": Case(np.ones_like(x) * x[:, :1], gamma, beta, eps, dy),
        "gamma dy constant": Case(x, np.ones_like(gamma), beta, eps, np.ones_like(x) * dy[:, :1]),
        "dy = 0": Case(x, gamma, beta, eps, np.zeros_like(x)),
    } | {
        f"{family.title} <small>{family.name}</small>": make_case(family.name, dtype, N, ROWS)
        for family in FAMILIES.values()
        if family.finite and not family.why_not(np.dtype(dtype), N, ROWS)
    }
    lines = []
    for name, case in cases.items():
        calls = {"hard": partial(run, case), "normal": partial(run, normal)}
        seconds, base = medians(calls, rounds=9, least=1, limit=0.5)
        lines.append((name, dtype, seconds / base, ROWS / seconds))
    return lines


def measure() -> dict[str, Any]:
    """Return the figures of the page."""
    lines = []
    for dtype in (*NARROW, "float64"):
        rows = LARGE // N // parse(dtype).itemsize
        small = [(shape, 1) for shape in SMALL if dtype in NARROW]
        for shape, threads in (*small, ((rows, N), 1), ((rows, N), THREADS)):
            lines.append((dtype, shape, threads, *ratios(shape, dtype, threads)))
    nine = []
    for dtype in NARROW:
        both = [ratio for shape in (*IN_CACHE, *BEYOND) for ratio in ratios(shape, dtype)]
        nine.append((dtype, math.prod(both) ** (1 / len(both)), max(both)))
    return {
        "origin": origin(),
        "ratios": lines,
        "nine": nine,
        "random": [differences(dtype) for dtype in (*NARROW, "float64")],
        "hard": [line for dtype in ("float32", "float64") for line in hard(dtype)],
    }


def page(results: dict[str, Any]) -> str:
    """Return docs/evidence/rounding.md."""
    lines = [
        (dtype, tuple(shape), threads, *map(digits, both))
        for dtype, shape, threads, *both in results["ratios"]
    ]
    nine = [(dtype, *map(digits, both)) for dtype, *both in results["nine"]]
    kinds = [(name, dtype, *map(digits, figures)) for name, dtype, *figures in results["hard"]]
    return f"""# What correct rounding costs

`rounding="nearest"` returns the exact result rounded to nearest, without exception
([the contract](../reference/accuracy-contract.md)). The kernels compute float16, bfloat16 and float32 in float64, as
they do by default, and apply Ziv's rounding test to each result. Rows and columns with an uncertified element are
repeated in double-double. float64 data are computed in double-double at once. Elements that double-double leaves
uncertified go to integers.

## Time of nearest over time of fast

The data are N(0, 1), and results are written with `out=`. The backward takes three dy in turns, because dy decides which
columns are uncertified.

{table(("dtype", "x", "threads", "forward", "backward"), lines)}

Geometric mean and largest ratio of forward and backward, over {len(IN_CACHE)} shapes that fit the caches and
{len(BEYOND)} that do not, with all threads:

{table(("dtype", "mean", "worst"), nine)}

## Random data

Rows of {N} from N(0, 1) were computed in two ways. The table counts the elements of x, and the elements of y, dx and
dgamma that differed in a bit. The comparison of both backends includes dbeta.

{table(("dtype", "ways", "compared", "differ"), results["random"])}

## Hard inputs

The time of forward and backward of {ROWS} rows of {N} over the time of N(0, 1), and rows per second. The first lines of
a dtype are arrays of one kind, the others the [families](accuracy.md). An input is slow if its rows are repeated in
double-double, and slower if integers must decide elements.

{table(("x", "dtype", "time", "rows per second"), kinds)}

{origin_line("make rounding", results["origin"])}
"""


def main() -> int:
    """Measure or read, and write the page; return 1 if a result differs."""
    results = keep("rounding", __doc__, measure)
    write("rounding", page(results))
    return int(any(line[-1] for line in results["random"]))


if __name__ == "__main__":
    sys.exit(main())
