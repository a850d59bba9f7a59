"""The problems on which a norm is compared with its closed form."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from stablenorm.check.closed_form import Case, judge, unit
from stablenorm.check.compare import name_pattern
from stablenorm.check.operation import FaultError, Operation
from stablenorm.check.results import FindingVerdict
from stablenorm.formats import format_of
from stablenorm.text import shape_text
from stablenorm.types import Array

# Elements of a battery's case: rows are left out beyond it. 8 rows of 4096, where one call of a
# plain program takes a millisecond.
_ELEMENTS, ROWS = 2**15, 8


class Trial(NamedTuple):
    """One problem and its name; the code may refuse it."""

    name: str
    case: Case
    # A relative error that is not called wrong: of float64 none beyond the bounds; of what is coarser
    # four digits, for forms whose roundings they do not count; all where plain squares overflow.
    tolerated: float | None = None
    # A careful program keeps digits on such data that a plain one loses: that is noted.
    is_hard: bool = False


def example(shape: tuple[int, ...], rng: Generator) -> tuple[Array, Array, Array]:
    """Return x, gamma of both signs and nothing special, and beta, in float64."""
    n = shape[-1]
    x, signs = rng.standard_normal(shape), rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0))
    return x, signs * (1 + 0.5 * rng.random(n)), 0.5 + rng.random(n)


def ordinary(like: Case, rng: Generator, most: int | None = None) -> Case:
    """
    Return a case of the shapes and dtypes of `like` in which every mistake would show.

    With `most`, of so many rows at most, if there is an axis of rows at all.

    Rows have different spreads, some so small that eps counts, and means that no narrow type
    holds; gamma has both signs and is nowhere 0 or 1, beta nowhere 0.
    """
    shape = like.x.shape
    if most is not None and len(shape) > 1:
        # Code may insist on as many axes as the data have.
        rows = max(1, min(like.x.size // like.n, most, _ELEMENTS // like.n))
        shape = (*(1,) * (len(shape) - 2), rows, like.n)
    count = max(1, math.prod(shape[:-1]))
    # From 2^-5: its var is 1e-3, of which the usual eps of 1e-5 is 1 %.
    spread = np.exp2(rng.uniform(-5, 1, (count, 1)))
    if count > 1:
        spread[rng.integers(count)] = 2.0**-5
    x = spread * (rng.standard_normal((count, like.n)) + rng.uniform(-1, 1, (count, 1)))
    gamma, beta = (_parameter(p, like.n, rng) for p in (like.gamma, like.beta))
    dy = rng.standard_normal(shape).astype(like.dy.dtype)
    return like._replace(x=x.reshape(shape).astype(like.x.dtype), gamma=gamma, beta=beta, dy=dy)


def _parameter(like: Array | None, n: int, rng: Generator) -> Array | None:
    """Return a gamma or beta of both signs, nowhere near 0, for rows of n."""
    if like is None:
        return None
    signs = rng.permutation(np.resize([1.0, -1.0], n))
    return (signs * rng.uniform(0.5, 1.5, n)).astype(like.dtype)


def invariances(base: Case, rng: Generator, *, takes_eps: bool) -> Iterator[Trial]:
    """Yield equivalent problems: shifted, scaled, some of the rows, other leading axes."""
    kind = base.x.dtype.type
    # Few enough bits to be shifted and scaled exactly in all four dtypes.
    drawn = np.clip(rng.standard_normal(base.x.shape), -3, 3)
    here = base._replace(x=(np.round(drawn * 8) / 8).astype(base.x.dtype))
    if base.kind == "layer":
        yield Trial("x + 4", here._replace(x=here.x + kind(4)), 0)
    if takes_eps and base.eps > 0:
        yield Trial("4 x and 16 eps", here._replace(x=kind(4) * here.x, eps=16 * base.eps), 0)
        yield Trial("x / 4 and eps / 16", here._replace(x=here.x / kind(4), eps=base.eps / 16), 0)
    x, dy = (a.reshape(-1, base.n) for a in (base.x, base.dy))
    if len(x) > 1:
        half = (len(x) + 1) // 2
        yield Trial("the last row alone", _of_rows(base, x[-1:], dy[-1:]), 0)
        yield Trial("the first rows alone", _of_rows(base, x[:half], dy[:half]), 0)
    if base.x.ndim == 2:
        yield Trial("one more leading axis", base._replace(x=x[:, None], dy=dy[:, None]), 0)
        yield Trial("no leading axis", base._replace(x=x[0], dy=dy[0]), 0)


def _of_rows(base: Case, x: Array, dy: Array) -> Case:
    """Return a case of some rows, with as many axes as the data have: code may insist on them."""
    if base.x.ndim == 1:
        return base._replace(x=x[0], dy=dy[0])
    shape = (*(1,) * (base.x.ndim - 2), *x.shape)
    return base._replace(x=x.reshape(shape), dy=dy.reshape(shape))


def tails(like: Case, rng: Generator) -> Trial:
    """Return a case with more rows and columns than blocks have, and some left over."""
    # Blocks are of 2, 4, 8, 16 or 32 nearly always.
    lead = (*(1,) * (like.x.ndim - 2), 19) if like.x.ndim > 1 else ()
    case = ordinary(like._replace(x=np.zeros((*lead, 33), like.x.dtype)), rng)
    # One outlier, whose xhat is nearly as large as it can be, sqrt(33).
    case.x[..., -1] = case.x[..., -1] + (np.arange(math.prod(lead)) == 0).reshape(lead) * 32.0
    return Trial("19 rows of 33" if lead else "a row of 33", case, 0)


def hard_inputs(like: Case, rng: Generator) -> Iterator[Trial]:
    """Yield the hard inputs that exist in the dtype of `like`; code may refuse any of them."""
    # No form is called wrong where the cube of rstd, which some have, overflows, nor in float16,
    # where squares of 256 do.
    form = format_of(like.x.dtype)
    cube = like.eps**-1.5 if like.eps else 0.0
    tolerated = math.inf if max(cube, 1e20) > form.largest else None
    for n in (1, 2, 3):
        # A row of one element has no spread at all: with eps = 0, nothing is defined.
        if n > 1 or like.eps > 0:
            x, dy = (rng.standard_normal((4, n)).astype(a.dtype) for a in (like.x, like.dy))
            gamma, beta = (_parameter(p, n, rng) for p in (like.gamma, like.beta))
            case = _of_rows(like._replace(gamma=gamma, beta=beta), x, dy)
            yield Trial(f"n = {n}", case, tolerated)
    base = ordinary(like, rng, 4)
    base = base._replace(x=rng.standard_normal(base.x.shape).astype(like.x.dtype))
    for name, x in _hard_x(base).items():
        allowed = math.inf if name == "huge values" else tolerated
        yield Trial(name, base._replace(x=x), allowed, is_hard=name != "constant rows")
    if base.gamma is not None:
        zeros = base.gamma.copy()
        zeros[::3] = 0
        yield Trial("gamma with zeros", base._replace(gamma=zeros))
        yield Trial("gamma = 0", base._replace(gamma=0 * zeros))


def _hard_x(base: Case) -> dict[str, Array]:
    """Return offsets, constant rows, and squares that overflow or underflow in the dtype."""
    dtype, wide = base.x.dtype, base.x.astype(np.float64)
    found = {}
    for offset in ("1e2", "1e4", "1e6"):
        moved = (wide + float(offset)).astype(dtype)
        # An offset at which the elements are hardly a few different numbers is another problem.
        if np.max(np.abs(moved.astype(np.float64) - float(offset) - wide)) < 2.0**-3:
            found[f"offset {offset}"] = moved
    power = 2.0 ** ((format_of(dtype).emax + 1) // 2 + 4)
    found["huge values"] = (power * wide).astype(dtype)
    if base.eps > 0:
        found["tiny values"] = (wide / power).astype(dtype)
        found["rows of 123.456"] = np.full(wide.shape, 123.456).astype(dtype)
        # Zeros, as padding is, and other constants, near sqrt(eps) and of few bits, so that a variance
        # by whatever formula keeps its digits. dx is rstd (g - mean(g)) there.
        constants = np.ldexp([0.0, 1.0, -2.0, 4.0], np.frexp(np.sqrt(base.eps))[1])
        rows = np.resize(constants, (wide.size // base.n, 1))
        found["constant rows"] = np.repeat(rows, base.n, axis=1).reshape(wide.shape).astype(dtype)
    return found


def judge_trial(operation: Operation, trial: Trial) -> tuple[FindingVerdict, str]:
    """Return verdict and message of one trial: what is beyond rounding fails, lost digits are noted."""
    try:
        judged = judge(operation, trial.case).values()
    except FaultError as fault:
        # A restriction that the program states itself, not a wrong gradient.
        return "NOTE", f"{fault}; x is {shape_text(trial.case.x.shape)} there"
    is_narrow = trial.case.x.dtype != np.float64
    tolerated = 1e-4 * is_narrow if trial.tolerated is None else trial.tolerated
    for each in judged:
        # Rounding explains whatever came, NaN too, where the bound is infinite.
        known = np.isfinite(each.bounds.careless)
        if (wrong := (each.z > 1) & known).any() and each.error > tolerated:
            where = name_pattern(wrong.reshape(each.shape))
            off = f"{each.name} is off by {each.error:.1e} of what it is made of: {where}"
            return "FAIL", each.not_finite or off
    worst = max(judged, key=lambda each: each.error / each.expected.u)
    u = worst.expected.u
    # A digit more than the sums of a plain program lose. It loses to an offset what a careful one
    # keeps: to be known, not blamed.
    kept = worst.error < 10 * unit(max(worst.bounds.value.shape), u)
    if kept or (worst.right and not trial.is_hard):
        return "PASS", ""
    digits = max(0, int(-math.log10(min(worst.error, 1))))
    return "NOTE", f"{worst.name} keeps {digits} of {-math.log10(u):.0f} digits on such data"
