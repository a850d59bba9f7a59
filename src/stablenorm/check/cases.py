"""The problems on which a norm is compared with its closed form."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.random import Generator

from stablenorm.check.closed_form import Case, judge, unit
from stablenorm.check.differences import name_pattern
from stablenorm.check.operation import FaultError, Operation
from stablenorm.check.results import Verdict
from stablenorm.formats import format_of
from stablenorm.text import shape_text
from stablenorm.types import Array

# Elements of a battery's case: rows are left out beyond it. 8 rows of 4096, where one call of a
# plain program takes a millisecond.
_ELEMENTS = 2**15


def example(shape: tuple[int, ...], rng: Generator) -> tuple[Array, Array, Array]:
    """Return x, gamma of both signs and nothing special, and beta, in float64."""
    n = shape[-1]
    x, signs = rng.standard_normal(shape), rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0))
    return x, signs * (1 + 0.5 * rng.random(n)), 0.5 + rng.random(n)


def ordinary(like: Case, rng: Generator, shape: tuple[int, ...] = ()) -> Case:
    """Return a case like `like`, of its shape or another, in which every mistake would show."""
    # Some rows are so narrow that eps counts; no narrow type holds their means.
    shape = shape or like.x.shape
    count, n = max(1, math.prod(shape[:-1])), shape[-1]
    # From 2^-5: its var is 1e-3, of which the usual eps of 1e-5 is 1 %.
    spread = np.exp2(rng.uniform(-5, 1, (count, 1)))
    if count > 1:
        spread[rng.integers(count)] = 2.0**-5
    x = spread * (rng.standard_normal((count, n)) + rng.uniform(-1, 1, (count, 1)))
    gamma, beta = (_parameter(p, n, rng) for p in (like.gamma, like.beta))
    dy = rng.standard_normal(shape).astype(like.dy.dtype)
    return like._replace(x=x.reshape(shape).astype(like.x.dtype), gamma=gamma, beta=beta, dy=dy)


def _parameter(like: Array | None, n: int, rng: Generator) -> Array | None:
    """Return a gamma or beta of both signs, nowhere near 0, for rows of n."""
    if like is None:
        return None
    signs = rng.permutation(np.resize([1.0, -1.0], n))
    return (signs * rng.uniform(0.5, 1.5, n)).astype(like.dtype)


def _shape_of(like: Case, rows: int, n: int) -> tuple[int, ...]:
    """Return the shape of some rows, with as many axes as the data have: code may insist on them."""
    return (*(1,) * (like.x.ndim - 2), rows, n) if like.x.ndim > 1 else (n,)


def few(like: Case, most: int = 8) -> tuple[int, ...]:
    """Return the shape of so many rows at most of the data, if there is an axis of rows at all."""
    return _shape_of(like, max(1, min(like.x.size // like.n, most, _ELEMENTS // like.n)), like.n)


def equivalent(like: Case, base: Case, rng: Generator, *, takes_eps: bool) -> Iterator[Case]:
    """Yield problems that must go like `base`: tails, shifted, scaled, some rows, other leading axes."""
    # Rows and columns beyond a block, of 2, 4, 8, 16 or 32 nearly always, and some left over.
    tails = ordinary(like, rng, _shape_of(like, 19, 33))
    # One outlier, whose xhat is nearly as large as it can be, sqrt(33).
    tails.x.reshape(-1, 33)[0, -1] += 32.0
    yield tails._replace(name="19 rows of 33" if like.x.ndim > 1 else "a row of 33")
    # Few enough bits to be shifted and scaled exactly in all four dtypes.
    drawn = np.round(np.clip(rng.standard_normal(base.x.shape), -3, 3) * 8) / 8
    x, eps, number = drawn.astype(base.x.dtype), base.eps, base.x.dtype.type
    if base.kind == "layer":
        yield base._replace(name="x + 4", x=x + number(4))
    if takes_eps and eps > 0:
        yield base._replace(name="4 x and 16 eps", x=number(4) * x, eps=16 * eps)
        yield base._replace(name="x / 4 and eps / 16", x=x / number(4), eps=eps / 16)
    x, dy = (a.reshape(-1, base.n) for a in (base.x, base.dy))
    if (count := len(x)) > 1:
        half = slice((count + 1) // 2)
        for name, rows in (("the last row alone", slice(-1, None)), ("the first rows alone", half)):
            shape = _shape_of(base, *x[rows].shape)
            yield base._replace(name=name, x=x[rows].reshape(shape), dy=dy[rows].reshape(shape))
    if base.x.ndim == 2:
        yield base._replace(name="one more leading axis", x=x[:, None], dy=dy[:, None])
        yield base._replace(name="no leading axis", x=x[0], dy=dy[0])


def hard_inputs(like: Case, rng: Generator) -> Iterator[Case]:
    """Yield the hard inputs that exist in the dtype of `like`; code may refuse any of them."""
    dtype, form, eps = like.x.dtype, format_of(like.x.dtype), like.eps
    # Nothing beyond the bounds of float64; four digits of what is coarser, for forms whose roundings
    # they do not count.
    usual = 1e-4 * (dtype != np.float64)
    # No form is called wrong where the cube of rstd, which some have, overflows, nor in float16,
    # where squares of 256 do.
    tolerated = math.inf if max(eps**-1.5 if eps else 0.0, 1e20) > form.largest else usual
    for n in (1, 2, 3):
        shape = _shape_of(like, 4, n)
        # A row of one element has no spread at all: with eps = 0, nothing is defined.
        if n > 1 or eps > 0:
            x, dy = (rng.standard_normal(shape).astype(a.dtype) for a in (like.x, like.dy))
            gamma, beta = (_parameter(p, n, rng) for p in (like.gamma, like.beta))
            small = like._replace(name=f"n = {n}", tolerated=tolerated)
            yield small._replace(x=x, gamma=gamma, beta=beta, dy=dy)
    base = ordinary(like, rng, few(like, 4))._replace(tolerated=tolerated, is_hard=True)
    wide = rng.standard_normal(base.x.shape).astype(dtype).astype(np.float64)
    for offset in ("1e2", "1e4", "1e6"):
        x = (wide + float(offset)).astype(dtype)
        # An offset at which the elements are hardly a few different numbers is another problem.
        if np.max(np.abs(x.astype(np.float64) - float(offset) - wide)) < 2.0**-3:
            yield base._replace(name=f"offset {offset}", x=x)
    # Squares that overflow or underflow in the dtype.
    power = 2.0 ** ((form.emax + 1) // 2 + 4)
    huge = (power * wide).astype(dtype)
    yield base._replace(name="huge values", x=huge, tolerated=math.inf)
    if eps > 0:
        yield base._replace(name="tiny values", x=(wide / power).astype(dtype))
        yield base._replace(name="rows of 123.456", x=np.full(wide.shape, 123.456, dtype))
        # Zeros, as padding is, and other constants, near sqrt(eps) and of few bits, so that a variance
        # by whatever formula keeps its digits. dx is rstd (g - mean(g)) there.
        constants = np.ldexp([0.0, 1.0, -2.0, 4.0], np.frexp(np.sqrt(eps))[1])
        rows = np.resize(constants, (*wide.shape[:-1], 1)) + 0 * wide
        yield base._replace(name="constant rows", x=rows.astype(dtype), is_hard=False)
    if base.gamma is not None:
        zeros = base.gamma.copy()
        zeros[::3] = 0
        base = base._replace(x=wide.astype(dtype), tolerated=usual, is_hard=False)
        yield base._replace(name="gamma with zeros", gamma=zeros)
        yield base._replace(name="gamma = 0", gamma=0 * zeros)


def judge_case(operation: Operation, case: Case) -> tuple[Verdict, str]:
    """Return verdict and message of one problem: what is beyond rounding fails, lost digits are noted."""
    try:
        judged = judge(operation, case).values()
    except FaultError as fault:
        # A restriction that the program states itself, not a wrong gradient.
        return "NOTE", f"{fault}; x is {shape_text(case.x.shape)} there"
    for each in judged:
        # Rounding explains whatever came, NaN too, where the bound is infinite.
        known = np.isfinite(each.careless)
        if (wrong := (each.z > 1) & known).any() and each.error > case.tolerated:
            where = name_pattern(wrong.reshape(each.shape))
            off = f"{each.name} is off by {each.error:.1e} of what it is made of: {where}"
            return "FAIL", each.not_finite or off
    worst = max(judged, key=lambda each: each.error / each.expected.u)
    u = worst.expected.u
    # A digit more than the sums of a plain program lose. It loses to an offset what a careful one
    # keeps: to be known, not blamed.
    kept = worst.error < 10 * unit(max(worst.value.shape), u)
    if kept or (worst.right and not case.is_hard):
        return "PASS", ""
    digits = max(0, int(-math.log10(min(worst.error, 1))))
    return "NOTE", f"{worst.name} keeps {digits} of {-math.log10(u):.0f} digits on such data"
