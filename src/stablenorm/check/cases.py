"""The problems on which a layer norm is compared with its closed form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.closed_form import Candidate, Case, Judged, statistics, unit
from stablenorm.check.report import FindingVerdict
from stablenorm.types import Array

# Elements of a battery's case: rows are left out beyond it. 8 rows of 4096, where one call of a
# plain program takes a millisecond.
_ELEMENTS = 2**15
_ROWS = 8


class Trial(NamedTuple):
    """
    One problem, its name, and how a deviation is to be read.

    `harmless`: as well-conditioned as any, so that right code is accurate; where it is not, right
    code may lose digits, or all of them. `optional`: the code may refuse it.
    """

    name: str
    case: Case
    harmless: bool = True
    optional: bool = False


def few_rows(case: Case) -> int:
    """Return how many rows a trial takes."""
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


def invariances(base: Case, rng: np.random.Generator, *, takes_eps: bool) -> Iterator[Trial]:
    """Yield equivalent problems: shifted, scaled, permuted, some of the rows."""
    x = base.x.dtype.type
    # Few enough bits to be shifted and scaled exactly in all four dtypes.
    drawn = np.clip(rng.standard_normal(base.x.shape), -3, 3)
    here = base._replace(x=(np.round(drawn * 8) / 8).astype(base.x.dtype))
    yield Trial("x + 4", here._replace(x=here.x + x(4)))
    if takes_eps and base.eps > 0:
        yield Trial("4 x and 16 eps", here._replace(x=x(4) * here.x, eps=16 * base.eps))
    order = rng.permutation(base.n)

    def permuted(a: Array) -> Array:
        return a.reshape(-1, base.n)[:, order].reshape(a.shape)

    gamma, beta = (None if a is None else permuted(a) for a in (base.gamma, base.beta))
    case = base._replace(x=permuted(base.x), gamma=gamma, beta=beta, dy=permuted(base.dy))
    yield Trial("permuted columns", case)
    yield from _rows_chosen(base)


def _rows_chosen(base: Case) -> Iterator[Trial]:
    row = base.row_shape
    x, dy = (a.reshape(-1, *row) for a in (base.x, base.dy))
    if len(x) > 1:
        last, half = len(x) - 1, (len(x) + 1) // 2
        for name, chosen in (
            ("the last row alone", np.arange(last, last + 1)),
            ("the first rows alone", np.arange(half)),
            ("rows in another order", np.roll(np.arange(len(x))[::-1], 1)),
        ):
            yield Trial(name, base._replace(x=x[chosen], dy=dy[chosen]))
    if base.x.ndim == 1 + len(row):
        extra = base._replace(x=x[:, None], dy=dy[:, None])
        yield Trial("one more leading axis", extra, optional=True)
        yield Trial("no leading axis", base._replace(x=x[0], dy=dy[0]), optional=True)


def hard_inputs(like: Case, rng: np.random.Generator) -> Iterator[Trial]:
    """Yield the hard inputs that exist in the dtype of `like`."""
    base = _plain(like, rng)
    trials = (
        _short_rows(like, rng),
        _offsets(base),
        _scales(base),
        _parameters(base),
        _cotangents(base, rng),
    )
    for trial in chain(*trials):
        # What the code refuses is a restriction that it states itself.
        yield trial._replace(optional=True)


def _plain(like: Case, rng: np.random.Generator) -> Case:
    case = ordinary(like, rng, min(4, few_rows(like)))
    return case._replace(x=rng.standard_normal(case.x.shape).astype(like.x.dtype))


def _short_rows(like: Case, rng: np.random.Generator) -> Iterator[Trial]:
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
            yield Trial(f"n = {n}", case)


def _short(like: Array | None, n: int, rng: np.random.Generator) -> Array | None:
    return None if like is None else parameter(like.reshape(-1), n, rng)


def _moved(case: Case, x: Array) -> Case:
    with np.errstate(over="ignore", under="ignore"):
        return case._replace(x=x.astype(case.x.dtype))


def _wide(a: Array) -> Array:
    wide: Array = a.astype(np.float64)
    return wide


def _offsets(base: Case) -> Iterator[Trial]:
    for offset in (1e2, 1e4, 1e6):
        case = _moved(base, _wide(base.x) + offset)
        x = _wide(case.x)
        # An offset at which the elements are hardly a few different numbers is another problem.
        if np.isfinite(x).all() and np.max(np.abs(x - offset - _wide(base.x))) < 2.0**-3:
            name = f"offset {offset:.0e}".replace("e+0", "e")
            yield Trial(name, case, harmless=False)


def _scales(base: Case) -> Iterator[Trial]:
    if base.eps > 0:
        constant = np.full(base.x.shape, 0.1)
        constant[1::2] = 123.456
        yield Trial("constant rows", _moved(base, constant), harmless=False)
    largest = float(np.finfo(base.x.dtype).max) if base.x.dtype.kind == "f" else 2.0**127
    # So that squares overflow, or underflow, in the dtype itself.
    power = 2.0 ** (math.frexp(largest)[1] // 2 + 4)
    for name, scale in (("huge", power), ("tiny", 1 / power)):
        if base.eps > 0 or name == "huge":
            yield Trial(f"{name} values", _moved(base, scale * _wide(base.x)), harmless=False)


def _parameters(base: Case) -> Iterator[Trial]:
    if base.gamma is None:
        return
    gamma = base.gamma.copy().reshape(-1)
    gamma[::3] = 0
    case = base._replace(gamma=gamma.reshape(base.gamma.shape))
    yield Trial("gamma with zeros", case)
    yield Trial("gamma = 0", base._replace(gamma=np.zeros_like(base.gamma)))


def _cotangents(base: Case, rng: np.random.Generator) -> Iterator[Trial]:
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
        yield Trial(name, case)


def judge_trial(
    candidate: Candidate, trial: Trial, tolerated: float
) -> tuple[FindingVerdict, str, float | None]:
    """
    Return verdict, message and resolution of one trial.

    Lost digits are a NOTE. On a harmless trial, an output beyond what rounding explains is a FAIL
    if it is off by more than `tolerated`, relative to what it is made of.
    """
    outcome = candidate.run(trial.case)
    if outcome.error:
        # A restriction that the program states itself, not a wrong gradient.
        return "NOTE" if trial.optional else "FAIL", outcome.error, None
    judged = candidate.judge(trial.case, outcome).values()
    for each in judged:
        if not np.isfinite(each.actual).all():
            message = f"{each.name} is not finite for {trial.name}"
            return "FAIL" if trial.harmless else "NOTE", message, None
    worst = max(judged, key=lambda each: each.relative / each.u)
    resolution = max(each.resolution for each in judged)
    wrong = [each for each in judged if each.wrong and each.relative > tolerated]
    if trial.harmless and wrong:
        off = f"{wrong[0].relative:.1e}"
        return "FAIL", f"{wrong[0].name} is off by {off} of what it is made of", resolution
    lost = _digits_lost(worst)
    # A plain program loses to an offset what a careful one keeps: to be known, not blamed.
    if not lost or (trial.harmless and worst.right):
        return "PASS", "", resolution
    digits = "1 digit" if lost == 1 else f"{lost} digits"
    # All that the precision has.
    if lost >= math.floor(-math.log10(worst.u)):
        digits = "all digits"
    return "NOTE", f"{worst.name} is inaccurate here: loses {digits} at {trial.name}", resolution


def _digits_lost(judged: Judged) -> int:
    """Count the decimal digits lost of those that the sums of a plain program would keep."""
    kept = unit(max(judged.bounds.value.shape), judged.u)
    ratio = judged.relative / kept
    if not math.isfinite(ratio):
        return 16
    return max(0, math.floor(math.log10(ratio))) if ratio > 0 else 0
