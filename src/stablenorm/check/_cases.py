"""The problems that the batteries of a layer norm check are run on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._expected import Case, statistics

# Elements of a battery's case: rows are left out beyond it. 8 rows of 4096, where one call of a
# plain program takes a millisecond.
_ELEMENTS = 2**15
_ROWS = 8


class Hard(NamedTuple):
    """
    One hard input: what it is, and how a loss of digits there is to be read.

    `harmless`: the problem is as well-conditioned as any, so that a program that is right is
    accurate; where it is not, digits may be lost, or all of them, by a right formula.
    """

    name: str
    case: Case
    harmless: bool


def few_rows(case: Case) -> int:
    """Return how many rows a battery takes."""
    rows = max(1, case.x.size // case.n)
    return max(1, min(rows, _ROWS, _ELEMENTS // case.n))


def ordinary(like: Case, rng: np.random.Generator, rows: int | None = None) -> Case:
    """
    Return a case of the shapes and dtypes of `like` in which every mistake would show.

    Rows have different spreads, some so small that eps counts, and means that no narrow type
    holds; gamma has both signs and is nowhere 0 or 1, beta nowhere 0.
    """
    n = like.n
    shape = like.x.shape if rows is None else (rows, *like.row_shape)
    count = max(1, math.prod(shape) // n)
    # From 2^-5: its var is 1e-3, of which the usual eps of 1e-5 is 1 %.
    spread = np.exp2(rng.uniform(-5, 1, (count, 1)))
    if count > 1:
        spread[rng.integers(count)] = 2.0**-5
    x = spread * (rng.standard_normal((count, n)) + rng.uniform(-1, 1, (count, 1)))
    return Case(
        x.reshape(shape).astype(like.x.dtype),
        parameter(like.gamma, n, rng),
        parameter(like.beta, n, rng),
        like.eps,
        rng.standard_normal(shape).astype(like.dy.dtype),
    )


def parameter(like: Array | None, n: int, rng: np.random.Generator) -> Array | None:
    """Return a gamma or beta of both signs, nowhere near 0, for rows of n."""
    if like is None:
        return None
    signs = rng.permutation(np.resize([1.0, -1.0], n))
    values = signs * rng.uniform(0.5, 1.5, n)
    return values.reshape(like.shape if like.size == n else (n,)).astype(like.dtype)


def normal_like(case: Case, rng: np.random.Generator) -> Array:
    """Return an N(0, 1) array of the shape and dtype of dy."""
    drawn: Array = rng.standard_normal(case.dy.shape).astype(case.dy.dtype)
    return drawn


def hard_inputs(like: Case, rng: np.random.Generator) -> Iterator[Hard]:
    """Yield the hard inputs that exist in the dtype of `like`."""
    base = _plain(like, rng)
    yield from _short_rows(like, rng)
    yield from _offsets(base)
    yield from _scales(base)
    yield from _parameters(base)
    yield from _cotangents(base, rng)


def _plain(like: Case, rng: np.random.Generator) -> Case:
    case = ordinary(like, rng, min(4, few_rows(like)))
    return case._replace(x=rng.standard_normal(case.x.shape).astype(like.x.dtype))


def _short_rows(like: Case, rng: np.random.Generator) -> Iterator[Hard]:
    for n in (1, 2, 3):
        case = Case(
            rng.standard_normal((4, n)).astype(like.x.dtype),
            _short(like.gamma, n, rng),
            _short(like.beta, n, rng),
            like.eps,
            rng.standard_normal((4, n)).astype(like.dy.dtype),
        )
        # A row of one element has no spread at all: with eps = 0, nothing is defined.
        if n > 1 or like.eps > 0:
            yield Hard(f"n = {n}", case, harmless=True)


def _short(like: Array | None, n: int, rng: np.random.Generator) -> Array | None:
    return None if like is None else parameter(like.reshape(-1), n, rng)


def _moved(case: Case, x: Array) -> Case:
    with np.errstate(over="ignore", under="ignore"):
        return case._replace(x=x.astype(case.x.dtype))


def _wide(a: Array) -> Array:
    wide: Array = a.astype(np.float64)
    return wide


def _offsets(base: Case) -> Iterator[Hard]:
    for offset in (1e2, 1e4, 1e6):
        case = _moved(base, _wide(base.x) + offset)
        x = _wide(case.x)
        # An offset at which the elements are hardly a few different numbers is another problem.
        if np.isfinite(x).all() and np.max(np.abs(x - offset - _wide(base.x))) < 2.0**-3:
            yield Hard(f"offset {offset:.0e}".replace("e+0", "e"), case, harmless=False)


def _scales(base: Case) -> Iterator[Hard]:
    if base.eps > 0:
        constant = np.full(base.x.shape, 0.1)
        constant[1::2] = 123.456
        yield Hard("constant rows", _moved(base, constant), harmless=False)
    largest = float(np.finfo(base.x.dtype).max) if base.x.dtype.kind == "f" else 2.0**127
    # So that squares overflow, or underflow, in the dtype itself.
    power = 2.0 ** (math.frexp(largest)[1] // 2 + 4)
    for name, scale in (("huge", power), ("tiny", 1 / power)):
        if base.eps > 0 or name == "huge":
            yield Hard(f"{name} values", _moved(base, scale * _wide(base.x)), harmless=False)


def _parameters(base: Case) -> Iterator[Hard]:
    if base.gamma is None:
        return
    gamma = base.gamma.copy().reshape(-1)
    gamma[::3] = 0
    case = base._replace(gamma=gamma.reshape(base.gamma.shape))
    yield Hard("gamma with zeros", case, harmless=True)
    yield Hard("gamma = 0", base._replace(gamma=np.zeros_like(base.gamma)), harmless=True)


def _cotangents(base: Case, rng: np.random.Generator) -> Iterator[Hard]:
    shape, n = base.dy.shape, base.n
    hot = np.zeros((base.dy.size // n, n))
    hot[:, n // 3] = 1
    xhat = statistics(base.rows(base.x), base.eps).xhat
    with np.errstate(over="ignore"):
        drawn: dict[str, Any] = {
            "one-hot dy": hot,
            "dy = 1": np.ones(shape),
            "dy = xhat": xhat,
            "dy = 1 + 1e-3 N": 1 + 1e-3 * rng.standard_normal(shape),
            "lognormal dy": np.exp(2 * rng.standard_normal(shape)),
            "dy = 0": np.zeros(shape),
        }
    for name, dy in drawn.items():
        case = base._replace(dy=dy.reshape(shape).astype(base.dy.dtype))
        yield Hard(name, case, harmless=True)
