"""
The closed form: layer and RMS norm and their gradients by this checker's own formulas, with bounds.

All is float64 from re-centered rows, so an offset costs nothing. A right program is within the first bound
if it takes the variance of centered x, and within the second if it takes E[x^2] - E[x]^2, which
loses as many digits again to an offset. Beyond both bounds it is wrong.
The problems for the comparison follow below.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from stablenorm.check.differences import name_pattern
from stablenorm.check.operation import FaultError, Operation, as_array, rms, tiniest, unit_roundoff
from stablenorm.check.results import Verdict
from stablenorm.formats import format_of
from stablenorm.output import shape_text
from stablenorm.records import Array, Shape

# The spread of the rows that reveal eps: its square, 1e-12, is at most any usual eps.
_SPREAD = 2.0**-20
# The most elements of a problem made here; fewer rows keep to it. 8 rows of 4096: one call of a plain
# program takes a millisecond.
_ELEMENTS = 2**15


class Case(NamedTuple):
    """One problem over the last axis, in the dtypes and shapes in which the functions get it."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    # "layer" or "rms".
    kind: str = "layer"
    gamma_offset: float = 0.0
    name: str = ""

    @property
    def n(self) -> int:
        """The elements of a row."""
        return int(self.x.shape[-1])

    def rows(self, a: Array) -> Array:
        """See an array of the shape of x as (rows, n), in float64."""
        return np.asarray(a).astype(np.float64).reshape(-1, self.n)


def row_mean(a: Array) -> Array:
    """Return the mean over the last axis, which is kept."""
    return np.asarray(np.mean(a, axis=-1, keepdims=True))


def unit(n: int, u: float) -> float:
    """Return the relative error of one element after `n` additions and a few operations."""
    # Random walk of a plain sum: N. J. Higham, T. Mary, SIAM J. Sci. Comput. 41 (2019) A2815.
    return float((4 + np.sqrt(n) / 2) * u)


def statistics(x: Array, eps: float, kind: str = "layer") -> tuple[Array, Array, Array]:
    """Return xhat, s = 1 / rstd, and mean (0 for "rms") of finite float64 rows."""
    mean = row_mean(x) * (kind == "layer")
    # The rounding error of the mean: under an offset it exceeds all other errors.
    rest = row_mean(x - mean) * (kind == "layer")
    centered = x - mean - rest
    # No square overflows.
    s = np.hypot(rms(centered, -1), np.sqrt(eps))
    return centered / s, s, mean + rest


class Expected:
    """The four outputs of one case with their bounds; `u` is the precision they are judged by."""

    def __init__(self, case: Case, u: float):
        # `is_layer` is a factor: an RMS norm subtracts no means.
        self.case, self.u, self.is_layer = case, u, case.kind == "layer"
        x, self.dy = case.rows(case.x), case.rows(case.dy)
        self.xhat, self.s, self.mean = statistics(x, case.eps, case.kind)
        gamma, self.beta = (np.zeros(case.n) if a is None else case.rows(a)[0] for a in case[1:3])
        self.gamma = gamma + case.gamma_offset + (case.gamma is None)
        self.g = self.gamma * self.dy
        rounding = unit(case.n, u)
        self.centered, self.rstd = self.xhat * self.s, 1 / self.s
        self.var, offset = row_mean(np.square(self.centered)), row_mean(np.abs(x / self.s))
        # Bounds for a shift of xhat, which an RMS norm has not, and two for the relative error of rstd.
        shift = rounding * offset * self.is_layer
        stretch = np.stack([rounding + shift**2, rounding * (1 + offset**2) + shift**2])
        # At half or more, a first-order bound says nothing.
        lost = (shift > 0.5) | (stretch > 0.5)
        self._shift, self._stretch = (np.where(lost, np.inf, a) for a in (shift, stretch))

    def bounds_of(self, name: str, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Return one output, (rows, n) or (n,), two bounds of its error, and its magnitudes."""
        xhat, dy, gamma = self.xhat, self.dy, self.gamma
        of_xhat = (self._stretch + 2 * self.u) * np.maximum(np.abs(xhat), 1e-300) + self._shift
        if name == "dx":
            g = self.g
            value = (g - self.is_layer * row_mean(g) - xhat * row_mean(g * xhat)) / self.s
            bound, magnitude = (part / self.s for part in self.dx_bounds(g, xhat))
        elif name == "y":
            value, magnitude = gamma * xhat + self.beta, np.abs(gamma * xhat) + np.abs(self.beta)
            bound = 4 * self.u * magnitude + np.abs(gamma) * of_xhat
        else:
            # dbeta is a dgamma with an exact xhat of 1.
            factor, off = (xhat, of_xhat) if name == "dgamma" else (1.0, np.zeros((2, 1, 1)))
            value, magnitude = (np.sum(a, axis=0) for a in (dy * factor, np.abs(dy * factor)))
            bound = unit(len(dy), self.u) * magnitude + np.sum(np.abs(dy) * off, axis=-2)
        # A bound of NaN is no bound.
        return value, np.where(np.isnan(bound), np.inf, bound) + 4 * tiniest(dtype), magnitude

    def dx_bounds(self, g: Array, xhat: Array) -> tuple[Array, Array]:
        """Return how far off dx / rstd, made of g and xhat, may be, and its magnitudes."""
        size, slope = self.is_layer * row_mean(np.abs(g)), row_mean(np.abs(g * xhat))
        magnitude = np.abs(g) + size + np.abs(xhat) * slope
        bound = (3 * self._stretch + unit(self.case.n, self.u)) * magnitude
        # The mean of x off by a shift: once in xhat, once in mean(g xhat), and both.
        bound += self._shift * (slope + np.abs(xhat) * size + self._shift * size)
        return bound, magnitude


def excess(actual: Array, value: Array, bound: Array) -> Array:
    """Return the error in units of the bound; infinite for a NaN or infinity that should be finite."""
    error = np.abs(actual - value) / np.where(bound > 0, bound, 1e-300)
    z = np.where(np.isinf(bound) | (actual == value), 0.0, error)
    return np.where(np.isfinite(actual) & ~np.isnan(z), z, np.inf)


class Judged:
    """One output beside its closed form, as (rows, n) or (n,); `shape` is its own shape."""

    def __init__(self, name: str, output: Array, expected: Expected):
        self.name, self.expected = name, expected
        self.shape, self.dtype = output.shape, output.dtype
        self.value, bounds, magnitude = expected.bounds_of(name, output.dtype)
        self.actual = output.astype(np.float64).reshape(self.value.shape)
        # The error in units of both bounds; the first is taken where it holds everywhere.
        first, self.z = excess(self.actual, self.value, bounds)
        self.wrong, self.right = bool((self.z > 1).any()), bool((first <= 1).all())
        self.bound = bounds[0 if self.right else 1]
        size = float(np.sqrt(np.mean(np.square(magnitude))))
        # The value and all its terms may be 0.
        size = size if np.isfinite(size) and size > 0 else 1.0
        # Relative to the RMS of magnitudes: the largest error, and the smallest that would show everywhere.
        error = np.abs(self.actual - self.value)
        self.error = float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)) / size
        self.resolution = float(np.max(self.bound, initial=0.0)) / size

    @property
    def not_finite(self) -> str:
        """Say on which rows the output is NaN or infinite and should not be; empty if on none."""
        bad = ~np.isfinite(self.actual) & np.isfinite(self.bound)
        if not bad.any():
            return ""
        text: str = f"{self.name} is {'NaN' if np.isnan(self.actual[bad]).any() else 'infinite'}"
        # dgamma and dbeta are one row.
        if bad.ndim < 2 or bad.any(axis=-1).all():
            return f"{text} on all rows" if bad.ndim > 1 else text
        rows = np.flatnonzero(bad.any(axis=-1))
        listed = ", ".join(map(str, rows[:5])) + ", ..." * (len(rows) > 5)
        return f"{text} on row{'s' * (len(rows) > 1)} {listed} of {len(bad)}"


def run(operation: Operation, case: Case) -> tuple[Array, Any]:
    """Return y and cache; FaultError if y does not fit this case."""
    y, cache = operation.forward({"x": case.x, "gamma": case.gamma, "beta": case.beta}, case.eps)
    return as_array("the y of the forward", y, case.x.shape), cache


def judge(operation: Operation, case: Case) -> dict[str, Judged]:
    """Call both functions and compare the results with the closed form; FaultError if one is unusable."""
    y, cache = run(operation, case)
    gradients = operation.gradients(case.dy.copy(), cache)
    expected, judged = functools.cache(functools.partial(Expected, case)), {}
    names, arguments = ("y", "dx", "dgamma", "dbeta"), (case.x, *case[:3])
    for name, argument, actual in zip(names, arguments, (y, *gradients.values()), strict=True):
        if argument is not None and actual is not None:
            output = as_array(name, actual, argument.shape)
            # The coarsest dtype of its argument, x and dy; an output may be float32 besides, not less.
            u = max(unit_roundoff(a.dtype) for a in (case.x, case.dy, argument))
            u = max(u, min(unit_roundoff(output.dtype), 2.0**-24))
            judged[name] = Judged(name, output, expected(u))
    return judged


def read_eps(operation: Operation, case: Case) -> tuple[float, bool]:
    """Return the eps that the forward uses, and whether that is the one it is given."""
    row = (_SPREAD * np.resize([1.0, -1.0], case.n)).astype(case.x.dtype)
    probe = case._replace(x=np.broadcast_to(row, case.x.shape).copy())
    with suppress(FaultError):
        y, other = (run(operation, probe._replace(eps=e))[0] for e in (case.eps, 4 * case.eps + 1))
        if np.array_equal(y, other) and case.n > 1:
            of = Expected(probe, unit_roundoff(np.dtype(np.float64)))
            keep = of.gamma != 0
            centered, xhat = of.centered[0][keep], ((case.rows(y)[0] - of.beta) / of.gamma)[keep]
            slope = float(xhat @ centered) / float(centered @ centered)
            inside = slope**-2 - float(np.mean(centered**2)) if slope > 0 else case.eps
            # To the three digits in which such constants are written.
            written = float(f"{inside:.3g}")
            differs = abs(inside - case.eps) > 1e-3 * case.eps and 0 <= written < np.inf
            return (written if differs else case.eps), False
    return case.eps, True


def example(shape: Shape, rng: Generator) -> tuple[Array, Array, Array]:
    """Return x, gamma of both signs and nothing special, and beta, in float64."""
    n = shape[-1]
    x, signs = rng.standard_normal(shape), rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0))
    return x, signs * (1 + 0.5 * rng.random(n)), 0.5 + rng.random(n)


def ordinary(like: Case, rng: Generator, shape: Shape = ()) -> Case:
    """Return a case like `like`, of its shape or another, in which every mistake would show."""
    # Some rows are so narrow that eps counts; no narrow type holds their means.
    shape = shape or like.x.shape
    count, n = max(1, math.prod(shape[:-1])), shape[-1]
    # From 2^-5, whose square is 1e-3: the usual eps of 1e-5 is 1 % of that variance.
    spread = np.exp2(rng.uniform(-5, 1, (count, 1)))
    # The first and the last: a sum may hold one of them alone.
    spread[[0, -1]] = 2.0**-5 if count > 1 else spread[0]
    x = spread * (rng.standard_normal((count, n)) + rng.uniform(-1, 1, (count, 1)))
    gamma, beta = (_parameter(p, n, rng) for p in (like.gamma, like.beta))
    dy = rng.standard_normal(shape).astype(like.dy.dtype)
    return like._replace(x=x.reshape(shape).astype(like.x.dtype), gamma=gamma, beta=beta, dy=dy)


def _parameter(like: Array | None, n: int, rng: Generator) -> Array | None:
    """Return a gamma or beta of both signs, nowhere near 0, for rows of n."""
    if like is None:
        return None
    signs = rng.permutation(np.resize([1.0, -1.0], n))
    # Exact in float32: a class may keep its parameters in that.
    return (signs * rng.uniform(0.5, 1.5, n)).astype(np.float32).astype(like.dtype)


def _shape_of(like: Case, rows: int, n: int) -> Shape:
    """Return the shape of `rows` rows, with as many axes as the data have: code may require them."""
    return (*(1,) * (like.x.ndim - 2), rows, n) if like.x.ndim > 1 else (n,)


def few(like: Case, most: int = 8) -> Shape:
    """Return the shape of at most `most` rows of the data, without an axis of rows if they have none."""
    return _shape_of(like, max(1, min(like.x.size // like.n, most, _ELEMENTS // like.n)), like.n)


def equivalent(like: Case, base: Case, rng: Generator, *, takes_eps: bool) -> Iterator[Case]:
    """Yield problems with the same equations as `base`: tails, shifts, scales, fewer rows, other axes."""
    # Rows and columns beyond a block, of 2, 4, 8, 16 or 32 nearly always, and some left over.
    tails = ordinary(like, rng, _shape_of(like, 19, 33))
    # One outlier, whose xhat is nearly as large as it can be, sqrt(33).
    tails.x.reshape(-1, 33)[0, -1] += 32.0
    # A dy of another size, for code that clips it.
    name = "19 rows of 33" if like.x.ndim > 1 else "a row of 33"
    yield tails._replace(name=name, dy=64 * tails.dy)
    # Axes that are taken for one another.
    square = (like.n,) * like.x.ndim
    if like.x.ndim > 1 and math.prod(square) <= _ELEMENTS:
        yield ordinary(like, rng, square)._replace(name="all axes of one length")
    # Few enough bits to be shifted and scaled exactly in all four dtypes.
    drawn = np.round(np.clip(rng.standard_normal(base.x.shape), -3, 3) * 8) / 8
    x, eps = drawn.astype(base.x.dtype), base.eps
    if base.kind == "layer":
        yield base._replace(name="x + 4", x=x + 4)
    if takes_eps and eps > 0:
        yield base._replace(name="4 x and 16 eps", x=4 * x, eps=16 * eps)
        yield base._replace(name="x / 4 and eps / 16", x=x / 4, eps=eps / 16)
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
    """Yield hard inputs that exist in the dtype of `like`; code may refuse any of them."""
    dtype, form, eps = like.x.dtype, format_of(like.x.dtype), like.eps
    for n in (1, 2, 3):
        case = ordinary(like, rng, _shape_of(like, 4, n))._replace(name=f"n = {n}")
        # A row of one element has no spread at all: with eps = 0, nothing is defined.
        if n > 1:
            yield case
        elif eps > 0:
            # Sizes of about sqrt(eps): a larger x, whose mean is itself, would widen the bound.
            yield case._replace(x=(np.sqrt(eps) * rng.standard_normal(case.x.shape)).astype(dtype))
    base = ordinary(like, rng, few(like, 4))
    wide = rng.standard_normal(base.x.shape)
    if eps > 0:
        # The squares underflow.
        tiny = wide / 2.0 ** ((form.emax + 1) // 2 + 4)
        yield base._replace(name="tiny values", x=tiny.astype(dtype))
        # Zeros, as padding is, and other constants, near sqrt(eps) and of few bits, so that a variance
        # by whatever formula keeps its digits. dx is rstd (g - mean(g)) there.
        constants = np.ldexp([0.0, 1.0, -2.0, 4.0], np.frexp(np.sqrt(eps))[1])
        rows = np.resize(constants, (*wide.shape[:-1], 1)) + 0 * wide
        yield base._replace(name="constant rows", x=rows.astype(dtype))
    if base.gamma is not None:
        zeros = base.gamma.copy()
        zeros[::3] = 0
        base = base._replace(x=wide.astype(dtype))
        yield base._replace(name="gamma with zeros", gamma=zeros)
        yield base._replace(name="gamma = 0", gamma=0 * zeros)


def judge_case(operation: Operation, case: Case) -> tuple[Verdict, str]:
    """Return verdict and message of one problem: errors beyond rounding fail."""
    try:
        judged = judge(operation, case).values()
    except FaultError as fault:
        # The program states a restriction: its gradient is not wrong.
        return "NOTE", f"{fault}; x is {shape_text(case.x.shape)} there"
    # A coarser dtype than float64 must keep four digits: some programs round more often than the bounds
    # count, and where the cube of rstd overflows, which some compute, none is asked for.
    form = format_of(case.x.dtype)
    most = (
        1e-4 * (form.digits < 53)
        if form.largest > max(case.eps**-1.5 if case.eps else 0, 1e20)
        else math.inf
    )
    for one in judged:
        if one.wrong and one.error > most:
            where = name_pattern((one.z > 1).reshape(one.shape))
            off = f"{one.name} is off by {one.error:.1e} of what it is made of: {where}"
            return "FAIL", one.not_finite or off
    return "PASS", ""
