"""
The experiments of docs/explanation/stability.md: one table each, hazard by hazard.

A table has a column for each input and a row for each implementation; `cell` measures one of them.
Errors are against the exact oracle (sums over rows: `math.fsum`).
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
from stablenorm.testing.published import PUBLISHED
from stablenorm.timing import Problem
from stablenorm.types import Array, Gradients, bfloat16

N, ROWS, EPS = 768, 4, 1e-5


@dataclass(frozen=True, eq=False)
class Input:
    """The arguments of a measurement, and the oracle for them."""

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array

    @cached_property
    def exact(self) -> Any:
        """The exact results: computed once for all subjects."""
        return exact_layer_norm(self.x, self.gamma, self.beta, self.eps, self.dy)


# Results by their names, of an implementation on an input.
Results = dict[str, Array]


class Table(NamedTuple):
    """One experiment: `cell` judges what a subject returns on the input of a column."""

    name: str
    columns: dict[str, Input]
    cell: Callable[[Results, Input], float]
    # Names of the subjects that are measured; all that know the dtype where None.
    subjects: tuple[str, ...] | None = None
    # Rows that are no library but a simulation.
    simulated: dict[str, Callable[[Input], Results]] = {}  # noqa: RUF012


def make_input(
    x: Any, dtype: Any = np.float32, eps: float = EPS, gamma: float = 1.0, dy: Any = None
) -> Input:
    """Round to `dtype`; dy is N(0, 1) if not given."""
    x = np.asarray(x).astype(dtype)
    n = x.shape[1]
    drawn = np.random.default_rng(1).standard_normal(x.shape) if dy is None else dy
    dy = np.broadcast_to(np.asarray(drawn).astype(dtype), x.shape).copy()
    return Input(x, np.full(n, gamma).astype(dtype), np.zeros(n, dtype), eps, dy)


def normal(rows: int = ROWS, n: int = N, at: dict[int, float] | None = None) -> Array:
    """Return the same N(0, 1) every time, some columns replaced."""
    x = np.random.default_rng(0).standard_normal((rows, n))
    for column, value in (at or {}).items():
        x[:, column] = value
    return x


def run(subject: Peer, at: Input) -> Results:
    """Return the subject's outputs."""
    nowhere = Gradients(None, None, None)
    with np.errstate(all="ignore"):
        problem = Problem(at.x, at.gamma, at.beta, at.dy, at.x, nowhere)
        return subject.make(problem, at.eps).results()


def relative(found: Results, at: Input, name: str = "y") -> float:
    """Return max|error| over max|exact|; 1 is nothing left."""
    expected = at.exact.rounded(name, np.float64)
    worst = float(np.abs(found[name].astype(np.float64) - expected).max())
    size = float(np.abs(expected).max())
    # An exact result of 0 leaves nothing to be relative to.
    return worst if size == 0 or math.isnan(worst) else worst / size


def relative_to_g(found: Results, at: Input) -> float:
    """Return max|error of dx| / (rstd max|g|), worst of the rows."""
    off = np.abs(found["dx"].astype(np.float64) - at.exact.rounded("dx", np.float64)).max(axis=1)
    g = np.abs(at.gamma.astype(np.float64) * at.dy.astype(np.float64)).max(axis=1)
    rstd = [1 / math.sqrt(at.exact.var(row) + Fraction(at.eps)) for row in range(len(g))]
    return float(np.nan_to_num(off / (rstd * g), nan=np.inf).max())


def share_misrounded(found: Results, at: Input) -> float:
    """Return the share of the elements of y that are not the correctly rounded ones."""
    expected = at.exact.rounded("y", at.x.dtype)
    return float(np.mean(found["y"].astype(np.float64) != expected.astype(np.float64)))


def ulp_at_outlier(found: Results, at: Input) -> float:
    """Return the error of dx at element 5, in ulp of its exact value."""
    return float(np.max(at.exact.ulp_errors(dx=found["dx"])["dx"][:, 5]))


def of_dbeta(found: Results, at: Input) -> float:
    """Return max|error of dbeta| / sum|dy|, the exact sums by fsum."""
    pairs = zip(found["dbeta"].astype(float), at.dy.astype(float).T.tolist(), strict=True)
    largest: float = max(abs(a - math.fsum(c)) / math.fsum(map(abs, c)) for a, c in pairs)
    return largest


def with_parameters(at: Input) -> Input:
    """Give gamma and beta the values of an ordinary layer."""
    gamma, beta = np.random.default_rng(4).standard_normal((2, at.x.shape[1])) * 0.1
    return replace(at, gamma=(1 + gamma).astype(at.x.dtype), beta=beta.astype(at.x.dtype))


def published() -> dict[str, Input]:
    """Return rows that went wrong in public, where float32 can hold them."""
    columns = {}
    for case in PUBLISHED:
        if case.fits(np.float32) and case.gamma == 1:
            x, gamma, beta, eps = case.arguments(np.float32)
            columns[f"{case.source}: {case.title}"] = Input(x, gamma, beta, eps, np.ones_like(x))
    return columns


def tables() -> list[Table]:
    """Return all experiments, in the order of the page."""
    offsets = {"N": make_input(normal())}
    offsets |= {f"10^{p} + N": make_input(10.0**p + normal()) for p in (2, 4, 6)}
    by_moments: dict[str, Callable[[Input], Results]] = {
        f"{name}, simulated": lambda at, m=m: {"y": normalize(at.x, m, at.eps)}
        for name, m in MOMENTS.items()
    } | {"two passes corrected, simulated": lambda at: {"y": corrected(at.x, at.eps)}}
    kept: dict[str, Callable[[Input], Results]] = {
        f"exact, but the mean kept in {way}": lambda at, way=way: {  # type: ignore[misc]
            "dx": backward_from(way, at.x, (at.gamma * at.dy).astype(at.x.dtype), at.eps)
        }
        for way in ("bfloat16", "float32", "float64")
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
        Table("saved", offsets, relative_to_g, back, kept),
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
