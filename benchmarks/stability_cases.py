"""
The experiments of docs/explanation/stability.md, one table for each hazard.

A table has a column for each input and a row for each implementation. `cell` measures one implementation
on one input, against the exact oracle (sums over rows: against `math.fsum`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from peers import OURS, Peer
from stability_methods import MOMENTS, backward_from, corrected, normalize, rounded_before_gamma

from stablenorm import exact_layer_norm
from stablenorm.records import Array, Gradients, bfloat16
from stablenorm.timing import Problem

N, ROWS, EPS = 768, 4, 1e-5


@dataclass(frozen=True, eq=False)
class Input:
    """The arguments of a measurement, with their exact results."""

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array

    @cached_property
    def exact(self) -> Any:
        """Return the exact results, computed once for all subjects."""
        return exact_layer_norm(self.x, self.gamma, self.beta, self.eps, self.dy)


# The results of an implementation on an input, by name.
Results = dict[str, Array]


class Table(NamedTuple):
    """One experiment: `cell` measures the results of a subject on the input of a column."""

    name: str
    columns: dict[str, Input]
    cell: Callable[[Results, Input], float]
    # Names of the libraries; None: all of them.
    subjects: tuple[str, ...] | None = None
    # Further rows, each a simulation.
    simulated: dict[str, Callable[[Input], Results]] = {}  # noqa: RUF012


def make_input(
    x: Any, dtype: Any = np.float32, eps: float = EPS, gamma: float = 1.0, dy: Any = None
) -> Input:
    """Return x, rounded to `dtype`, with gamma, beta 0 and dy, by default N(0, 1)."""
    x = np.asarray(x).astype(dtype)
    n = x.shape[1]
    drawn = np.random.default_rng(1).standard_normal(x.shape) if dy is None else dy
    dy = np.broadcast_to(np.asarray(drawn).astype(dtype), x.shape).copy()
    return Input(x, np.full(n, gamma).astype(dtype), np.zeros(n, dtype), eps, dy)


def normal(rows: int = ROWS, n: int = N, at: dict[int, float] | None = None) -> Array:
    """Return N(0, 1), the same at each call; `at` has values for whole columns."""
    x = np.random.default_rng(0).standard_normal((rows, n))
    for column, value in (at or {}).items():
        x[:, column] = value
    return x


def run(subject: Peer, at: Input) -> Results:
    """Return the results of a subject."""
    no_arrays = Gradients(None, None, None)
    with np.errstate(all="ignore"):
        problem = Problem(at.x, at.gamma, at.beta, at.dy, at.x, no_arrays)
        return subject.make(problem, at.eps).results()


def relative(results: Results, at: Input, name: str = "y") -> float:
    """Return max|error| over max|exact|; at 1 no digit is right."""
    expected = at.exact.rounded(name, np.float64)
    worst = float(np.abs(results[name].astype(np.float64) - expected).max())
    size = float(np.abs(expected).max())
    # The error itself if all exact results are 0.
    return worst if size == 0 or math.isnan(worst) else worst / size


def relative_to_g(results: Results, at: Input) -> float:
    """Return max|error of dx| / (rstd max|g|) of the worst row."""
    off = np.abs(results["dx"].astype(np.float64) - at.exact.rounded("dx", np.float64)).max(axis=1)
    g = np.abs(at.gamma.astype(np.float64) * at.dy.astype(np.float64)).max(axis=1)
    rstd = [1 / math.sqrt(at.exact.var(row) + Fraction(at.eps)) for row in range(len(g))]
    return float(np.nan_to_num(off / (rstd * g), nan=np.inf).max())


def share_misrounded(results: Results, at: Input) -> float:
    """Return the share of the elements of y that are not correctly rounded."""
    expected = at.exact.rounded("y", at.x.dtype)
    return float(np.mean(results["y"].astype(np.float64) != expected.astype(np.float64)))


def ulp_at_outlier(results: Results, at: Input) -> float:
    """Return the error of dx at element 5, in ulp of its exact value."""
    return float(np.max(at.exact.ulp_errors(dx=results["dx"])["dx"][:, 5]))


def of_dbeta(results: Results, at: Input) -> float:
    """Return max|error of dbeta| / sum|dy|, with exact sums by fsum."""
    pairs = zip(results["dbeta"].astype(float), at.dy.astype(float).T.tolist(), strict=True)
    largest: float = max(abs(a - math.fsum(c)) / math.fsum(map(abs, c)) for a, c in pairs)
    return largest


def with_parameters(at: Input) -> Input:
    """Return the input with the gamma and beta of an ordinary layer."""
    gamma, beta = np.random.default_rng(4).standard_normal((2, at.x.shape[1])) * 0.1
    return replace(at, gamma=(1 + gamma).astype(at.x.dtype), beta=beta.astype(at.x.dtype))


def published() -> dict[str, Input]:
    """Return rows that went wrong in public, by thread; one seed draws the random numbers of a recipe."""
    rng, ones, steps = np.random.default_rng(51102), np.ones, np.arange(4.0)[None]
    mlx = (
        1449.570556640625, 1448.8741455078125, 1450.650390625, 1449.2633056640625, 1449.7763671875,
        1449.317138671875, 1449.3297119140625, 1449.077880859375, 1449.2181396484375,
        1449.4329833984375, 1449.1605224609375, 1449.413330078125, 1449.7933349609375,
        1450.066650390625, 1449.7762451171875, 1450.364990234375,
    )  # fmt: skip
    rows = {
        "onnxruntime 28463: 40000 to 40003: NaN": 40_000 + steps,
        "onnxruntime 28463, tvm 19592: 80000 to 80003": 80_000 + steps,
        "onnxruntime 21935: 256 of 1234: NaN": 1234 * ones((1, 256)),
        "onnxruntime 17692: float16, std 496": 496 * rng.standard_normal((4, 96)),
        "pytorch 51102: 2000 + N, n = 4": 2000 + rng.standard_normal((64, 4)),
        "pytorch 40302: 100 + 0.01 N": 100 + 0.01 * rng.standard_normal((8, 500)),
        "pytorch 188372: n = 1, x = 1e6": 1e6 * ones((5, 1)),
        "burn 5607: 100 + 0.001 i": 100 + 1e-3 * np.arange(64.0).reshape(2, 32),
        "mlx 2238: 16 values of a model near 1449: NaN": np.array([mlx]),
        "flax 1491: a constant of 1e4": 1e4 * ones((4, 64)),
        "tt-metal 55159: 1e25 N: zeros": 1e25 * rng.standard_normal((4, 64)),
        "quack: n = 769 far from 0: padding entered the variance": 1000
        + 100 * np.arange(8)[:, None]
        + (np.arange(769) % 17 - 8) / 8,
    }
    return {name: make_input(x, dy=1.0) for name, x in rows.items()}


def tables() -> list[Table]:
    """Return all experiments, in the order of the page."""
    offsets = {"N": make_input(normal())}
    offsets |= {f"10^{p} + N": make_input(10.0**p + normal()) for p in (2, 4, 6)}
    by_moments: dict[str, Callable[[Input], Results]] = {
        f"{name}, simulated": lambda at, m=m: {"y": normalize(at.x, m, at.eps)}
        for name, m in MOMENTS.items()
    } | {"two passes corrected, simulated": lambda at: {"y": corrected(at.x, at.eps)}}
    by_means: dict[str, Callable[[Input], Results]] = {
        f"exact, but the mean kept in {kind}": lambda at, kind=kind: {  # type: ignore[misc]
            "dx": backward_from(kind, at.x, (at.gamma * at.dy).astype(at.x.dtype), at.eps)
        }
        for kind in ("bfloat16", "float32", "float64")
    }
    scales = {
        "1e-40, eps 0": make_input(1e-40 * normal(), eps=0.0),
        "1e-25, eps 0": make_input(1e-25 * normal(), eps=0.0),
        "1e15": make_input(1e15 * normal()),
        "1e20": make_input(1e20 * normal()),
        "3e38": make_input(3e38 * np.sign(normal())),
    }
    constants = {
        f"{value}, eps {words}": make_input(np.full((1, N), value), eps=eps)
        for words, eps in (("1e-5", 1e-5), ("1e-12", 1e-12))
        for value in (0.1, 1234.567)
    }
    outliers = {f"2^{p}": make_input(normal(at={5: 2.0**p})) for p in (10, 24, 66)}
    noise = np.random.default_rng(3).standard_normal((ROWS, N))
    cotangents = {
        "dy = N": make_input(normal(), dy=noise),
        "1 + N / 1000": make_input(normal(), dy=1 + 1e-3 * noise),
        "dy = x": make_input(normal(), dy=normal()),
        "x and dy 1000 + N": make_input(1000 + normal(), dy=1000 + noise),
    }
    rows = {
        f"{words} rows": make_input(
            normal(count, 8), dy=np.random.default_rng(2).random((count, 8))
        )
        for words, count in (("100", 100), ("10 000", 10_000), ("1 000 000", 1_000_000))
    }
    narrow = {
        f"{np.dtype(kind).name}, {words}": with_parameters(make_input(offset + normal(), kind))
        for kind in (np.float16, bfloat16)
        for words, offset in (("N", 0), ("100 + N", 100))
    }
    tiny = {
        "x of 1e-40, eps 0": make_input(1e-40 * normal(), eps=0.0),
        "gamma of 1e-40": make_input(normal(), gamma=1e-40),
    }
    back = ("plain NumPy", "PyTorch", "JAX, the formula", OURS)
    every = (*back, "jax.nn.standardize")
    return [
        Table("offset", offsets, relative, None, by_moments),
        Table("saved", offsets, relative_to_g, back, by_means),
        Table("range", scales, relative),
        Table("constant", constants, relative),
        Table("outlier", outliers, ulp_at_outlier, back),
        Table("outlier_size", outliers, relative_to_g, back),
        Table("cotangent", cotangents, partial(relative, name="dx"), every),
        Table("rows", rows, of_dbeta, every),
        Table(
            "narrow", narrow, share_misrounded, back,
            {
                "xhat rounded before gamma, simulated": lambda at: {
                    "y": rounded_before_gamma(at.x, at.gamma, at.beta, at.eps)
                }
            },
        ),
        Table("subnormal", tiny, relative),
        Table("published", published(), relative),
    ]  # fmt: skip
