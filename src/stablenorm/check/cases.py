"""The problems on which a layer norm is compared with its closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from stablenorm.check.closed_form import Candidate, Case, unit
from stablenorm.check.operation import FaultError
from stablenorm.check.report import FindingVerdict
from stablenorm.formats import format_of
from stablenorm.types import Array

# Elements of a battery's case: rows are left out beyond it. 8 rows of 4096, where one call of a
# plain program takes a millisecond.
_ELEMENTS, _ROWS = 2**15, 8


class Trial(NamedTuple):
    """
    One problem and its name; the code may refuse it.

    `harmless`: as well-conditioned as any, so that right code is accurate; where it is not, right
    code may lose digits, or all of them.
    """

    name: str
    case: Case
    harmless: bool = True


def few_rows(case: Case) -> int:
    """Return how many rows a trial takes."""
    return max(1, min(case.x.size // case.n, _ROWS, _ELEMENTS // case.n))


def ordinary(like: Case, rng: np.random.Generator, rows: int | None = None) -> Case:
    """
    Return a case of the shapes and dtypes of `like` in which every mistake would show.

    Rows have different spreads, some so small that eps counts, and means that no narrow type
    holds; gamma has both signs and is nowhere 0 or 1, beta nowhere 0.
    """
    n, shape = like.n, like.x.shape
    if rows is not None:
        # As many axes as the data have: code may insist on them.
        shape = (*(1,) * (like.x.ndim - len(like.row_shape) - 1), rows, *like.row_shape)
    count = max(1, math.prod(shape) // n)
    # From 2^-5: its var is 1e-3, of which the usual eps of 1e-5 is 1 %.
    spread = np.exp2(rng.uniform(-5, 1, (count, 1)))
    if count > 1:
        spread[rng.integers(count)] = 2.0**-5
    x = spread * (rng.standard_normal((count, n)) + rng.uniform(-1, 1, (count, 1)))
    return Case(
        x.reshape(shape).astype(like.x.dtype),
        _parameter(like.gamma, n, rng),
        _parameter(like.beta, n, rng),
        like.eps,
        rng.standard_normal(shape).astype(like.dy.dtype),
    )


def _parameter(like: Array | None, n: int, rng: np.random.Generator) -> Array | None:
    """Return a gamma or beta of both signs, nowhere near 0, for rows of n."""
    if like is None:
        return None
    values = rng.permutation(np.resize([1.0, -1.0], n)) * rng.uniform(0.5, 1.5, n)
    return values.reshape(like.shape if like.size == n else (n,)).astype(like.dtype)


def invariances(base: Case, rng: np.random.Generator, *, takes_eps: bool) -> Iterator[Trial]:
    """Yield equivalent problems: shifted, scaled, some of the rows, other leading axes."""
    kind, row = base.x.dtype.type, base.row_shape
    # Few enough bits to be shifted and scaled exactly in all four dtypes.
    drawn = np.clip(rng.standard_normal(base.x.shape), -3, 3)
    here = base._replace(x=(np.round(drawn * 8) / 8).astype(base.x.dtype))
    yield Trial("x + 4", here._replace(x=here.x + kind(4)))
    if takes_eps and base.eps > 0:
        yield Trial("4 x and 16 eps", here._replace(x=kind(4) * here.x, eps=16 * base.eps))
    x, dy = (a.reshape(-1, *row) for a in (base.x, base.dy))
    if len(x) > 1:
        half = (len(x) + 1) // 2
        yield Trial("the last row alone", base._replace(x=x[-1:], dy=dy[-1:]))
        yield Trial("the first rows alone", base._replace(x=x[:half], dy=dy[:half]))
    if base.x.ndim == 1 + len(row):
        extra = base._replace(x=x[:, None], dy=dy[:, None])
        yield Trial("one more leading axis", extra)
        yield Trial("no leading axis", base._replace(x=x[0], dy=dy[0]))


def hard_inputs(like: Case, rng: np.random.Generator) -> Iterator[Trial]:
    """Yield the hard inputs that exist in the dtype of `like`; code may refuse any of them."""
    for n in (1, 2, 3):
        # A row of one element has no spread at all: with eps = 0, nothing is defined.
        if n > 1 or like.eps > 0:
            x, dy = (rng.standard_normal((4, n)).astype(a.dtype) for a in (like.x, like.dy))
            flat = (None if p is None else p.reshape(-1) for p in (like.gamma, like.beta))
            gamma, beta = (_parameter(p, n, rng) for p in flat)
            yield Trial(f"n = {n}", Case(x, gamma, beta, like.eps, dy))
    base = ordinary(like, rng, min(4, few_rows(like)))
    base = base._replace(x=rng.standard_normal(base.x.shape).astype(like.x.dtype))
    for name, x in _hard_x(base).items():
        yield Trial(name, base._replace(x=x), harmless=False)
    if base.gamma is not None:
        zeros = np.where(np.arange(base.n) % 3, 1, 0).reshape(base.gamma.shape)
        for name, factor in (("gamma with zeros", zeros), ("gamma = 0", 0 * zeros)):
            gamma = base.gamma * factor.astype(base.gamma.dtype)
            yield Trial(name, base._replace(gamma=gamma))


def _hard_x(base: Case) -> dict[str, Array]:
    """Return offsets, constant rows, and squares that overflow or underflow in the dtype."""
    dtype, wide = base.x.dtype, base.x.astype(np.float64)
    found = {}
    for offset in (1e2, 1e4, 1e6):
        moved = (wide + offset).astype(dtype)
        # An offset at which the elements are hardly a few different numbers is another problem.
        if np.max(np.abs(moved.astype(np.float64) - offset - wide)) < 2.0**-3:
            found[f"offset {offset:.0e}".replace("e+0", "e")] = moved
    power = 2.0 ** ((format_of(dtype).emax + 1) // 2 + 4)
    found["huge values"] = (power * wide).astype(dtype)
    if base.eps > 0:
        found["tiny values"] = (wide / power).astype(dtype)
        constant = np.full(wide.shape, 0.1)
        constant[1::2] = 123.456
        found["constant rows"] = constant.astype(dtype)
    return found


def judge_trial(
    candidate: Candidate, trial: Trial, tolerated: float
) -> tuple[FindingVerdict, str, float | None]:
    """
    Return verdict, message and resolution of one trial.

    Lost digits are a NOTE. On a harmless trial, an output beyond what rounding explains is a FAIL
    if it is off by more than `tolerated`, relative to what it is made of.
    """
    try:
        judged = candidate.judge(trial.case, candidate.run(trial.case)).values()
    except FaultError as fault:
        # A restriction that the program states itself, not a wrong gradient.
        return "NOTE", str(fault), None
    resolution = max(each.resolution for each in judged)
    for each in judged:
        if trial.harmless and each.wrong and each.relative > tolerated:
            message = f"{each.name} is off by {each.relative:.1e} of what it is made of"
            return "FAIL", message, resolution
    worst = max(judged, key=lambda each: each.relative / each.u)
    # A digit more than the sums of a plain program lose. It loses to an offset what a careful one
    # keeps: to be known, not blamed.
    kept = worst.relative < 10 * unit(max(worst.bounds.value.shape), worst.u)
    if kept or (trial.harmless and worst.right):
        return "PASS", "", resolution
    message = f"{worst.name} is inaccurate here: off by {worst.relative:.0e} of what it is made of"
    return "NOTE", message, resolution
