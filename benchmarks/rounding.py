"""
What rounding="nearest" costs, beside fast and on hard inputs: `make rounding`.

Writes benchmarks/results/rounding.json and docs/evidence/rounding.md, and exits with 1 if the two CPU
backends differ in an element. Four minutes, alone on the machine.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np
from page import digits, keep, medians, origin, origin_line, table, write

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cli.bench import PASSES, make_candidates, make_problem
from stablenorm.cli.parts import ROUNDINGS
from stablenorm.testing import FAMILIES, Case, make_case

# What fits a small machine.
SHAPES = {"float32": [(32, 512, 768), (65_536, 1024)], "float64": [(16, 512, 768), (32_768, 1024)]}
ROWS, N = 64, 1024
# Seconds of each dtype in which the backends are compared.
COMPARED = 30


def run(case: Case, backend: str | None = None) -> tuple[Any, ...]:
    """Return y, dx, dgamma and dbeta."""
    y, cache = layer_norm_forward(*case[:4], rounding="nearest", backend=backend)
    return y, *layer_norm_backward(case.dy, cache)


def draw(rng: np.random.Generator, dtype: Any, rows: int) -> Case:
    """Return N(0, 1)."""
    x, dy, (gamma, beta) = (rng.standard_normal((k, N), dtype=dtype) for k in (rows, rows, 2))
    return Case(x, gamma, beta, 1e-5, dy)


def ratio(shape: tuple[int, ...], dtype: str, direction: str) -> float:
    """Return the time of nearest over that of fast, with `out=`."""
    problem = make_problem(shape, dtype)
    calls = {each: make_candidates(problem, None, each)[direction]["out="] for each in ROUNDINGS}
    fast, nearest = medians(calls, rounds=9, least=1, limit=4)
    return nearest / fast


def random_data(dtype: str) -> tuple[str, int, int]:
    """Count of N(0, 1) how many elements of x both backends had, and how many results differ."""
    rng, compared, differ = np.random.default_rng(0), 0, 0
    end = time.perf_counter() + COMPARED
    while time.perf_counter() < end:
        case = draw(rng, dtype, 256)
        for one, other in zip(run(case), run(case, "numpy"), strict=True):
            differ += int((one.view(f"u{one.itemsize}") != other.view(f"u{one.itemsize}")).sum())
        compared += case.x.size
    return dtype, compared, differ


def hard(dtype: str) -> list[tuple[Any, ...]]:
    """Return, for each kind of input, the time over that of N(0, 1), and rows per second."""
    x, gamma, beta, eps, dy = normal = draw(np.random.default_rng(0), dtype, ROWS)
    # Of all y and dx: halfway between two float32.
    one, tie = np.sign(np.arange(N) % 4 - 1.5).astype(dtype), np.full(N, 1 + 2.0**-24)
    tied = Case(np.tile(one, (ROWS, 1)), tie, 0 * tie, 0.0, np.tile(np.roll(one, 1), (ROWS, 1)))
    cases = {
        **({"exact ties": tied} if dtype == "float32" else {}),
        "constant rows": Case(np.ones_like(x) * x[:, :1], gamma, beta, eps, dy),
        "gamma dy constant": Case(x, np.ones_like(gamma), beta, eps, np.ones_like(x) * dy[:, :1]),
        "dy = 0": Case(x, gamma, beta, eps, np.zeros_like(x)),
    } | {
        f"{each.title} <small>{each.name}</small>": make_case(each.name, dtype, N, ROWS)
        for each in FAMILIES.values()
        if each.finite and not each.why_not(np.dtype(dtype), N, ROWS)
    }
    found = []
    for name, case in cases.items():
        calls = {"it": partial(run, case), "normal": partial(run, normal)}
        it, base = medians(calls, rounds=9, least=1, limit=0.5)
        found.append((name, dtype, it / base, ROWS / it))
    return found


def measure() -> dict[str, Any]:
    """Return all that the page holds."""
    return {
        "origin": origin(),
        "ratios": [
            (dtype, shape, *(ratio(shape, dtype, each) for each in PASSES))
            for dtype, shapes in SHAPES.items()
            for shape in shapes
        ],
        "random": [random_data(dtype) for dtype in SHAPES],
        "hard": [line for dtype in SHAPES for line in hard(dtype)],
    }


def page(found: dict[str, Any]) -> str:
    """docs/evidence/rounding.md."""
    lines = [
        (dtype, tuple(shape), *map(digits, ratios)) for dtype, shape, *ratios in found["ratios"]
    ]
    kinds = [
        (name, dtype, digits(times), digits(speed)) for name, dtype, times, speed in found["hard"]
    ]
    return f"""# What correct rounding costs

`rounding="nearest"` returns the exact result rounded to nearest, without exception
([the contract](../reference/accuracy-contract.md)). The kernels compute in double-double, with bounds of
the errors. The rows and columns in which these leave something undecided go to the reference, which has
integers at last.

## Time of nearest over that of fast

All threads of this machine, with `out=`.

{table(("dtype", "x", "forward", "backward"), lines)}

## Random data

Rows of {N} from N(0, 1): how many elements of x were given to both CPU backends, and how many elements
of all four results differed in a bit.

{table(("dtype", "compared", "differ"), found["random"])}

## Hard inputs

Forward and backward of {ROWS} rows of {N}, over the time of N(0, 1), and rows per second: arrays of one
kind, and each [family](accuracy.md). Slow are those of which the kernels leave something undecided.

{table(("x", "dtype", "time", "rows per second"), kinds)}

{origin_line("make rounding", found["origin"])}
"""


def main() -> int:
    """Measure or read, write the page; 1 if the backends differ."""
    found = keep("rounding", __doc__, measure)
    write("rounding", page(found))
    return int(any(line[-1] for line in found["random"]))


if __name__ == "__main__":
    sys.exit(main())
