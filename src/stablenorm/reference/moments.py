r"""
Layer norm of rows that lie in parts: `moments` of some columns each, which are merged.

A part knows, of each of its rows, a float64 k close to the mean of its columns, and

    s1 = sum(x - k)        s2 = sum((x - k)**2)

Parts are merged at one k for all, the merged mean rounded to float64. With d = k_old - k_new and m columns,

    s1 += m d              s2 += d (s1_old + s1_new)

Nothing large cancels: s1 is less than an ulp of k for each element, and s2 grows at most eightfold on its
way. Then ``mean = k + s1 / n``, ``var = (s2 - s1**2 / n) / n``.

The backward has g = gamma dy in the place of x, and the sums

    t1 = sum(g - k)        t2 = sum((g - l) xhat)        t3 = sum(xhat)

that become ``t1 + m d``, ``t2 + d t3`` and t3. Since xhat of a whole row has the sum 0,
``mean((g - mean(g)) xhat) = t2 / n`` whatever l is. With k in its place, t2 of a part would be far larger than
that of the row where an outlier of x is beside the only g that is not 0. So l is close to the mean
of g weighted with ``abs(xhat)``. RMS norm has k = l = s1 = t1 = 0.

By default x of at most 32 bits is summed in float64. What is merged, and t1 to t3, are double-double. With
rounding="nearest" all is, and is `Bounded`. Elements that the bounds leave undecided are told by their
rows: the caller does these rows anew as a whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.control import default_control
from stablenorm.reference.bounded import Bounded
from stablenorm.reference.doubledouble import Wide
from stablenorm.reference.equations import (
    _blocks,
    _lifter,
    _mean,
    _parameter,
    _round,
    _RowSum,
    _scale,
)
from stablenorm.reference.nearest import _UNIT, _split
from stablenorm.reference.partial import PARTIAL, as_partial
from stablenorm.types import Array, Norm, any_float64

_FLOAT64 = np.dtype(np.float64)
_LARGEST = np.finfo(_FLOAT64).max


class Moments(NamedTuple):
    """Of some columns of each row: k, of g k and l, and the sums, PARTIAL, two of x or three of g."""

    columns: int
    k: Array
    sums: Array


class Whole(NamedTuple):
    """Of whole rows: mean - k as PARTIAL, and rstd, or, of g, mean((g - mean(g)) xhat)."""

    k: Array
    shift: Array
    factor: Array


@default_control()
def moments(x: Array, norm: Norm) -> Moments:
    """Return the moments of (rows, m), some columns of x."""
    lift = _arithmetic(norm, x)
    found = _no_moments(x.shape, 1, 2)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            values = lift(x[rows])
            if norm.kind == "layer":
                found.k[0, rows] = k = _near_mean(values, lift)
                values = values - lift(k[:, None])
                found.sums[0, rows] = packed(_mean(values, 1))
            found.sums[1, rows] = packed(_mean(values * values, 1))
    return found


@default_control()
def moments_of_g(dy: Array, x: Array, norm: Norm, of_x: Whole) -> Moments:
    """Return the moments of ``gamma * dy``, some columns of it, and xhat."""
    lift = Bounded.exactly if norm.rounding == "nearest" else Wide.exactly
    lift_g = _arithmetic(norm, x, dy)
    scale = _scale(norm, lift_g)
    found = _no_moments(x.shape, 2, 3)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            g = _g(dy[rows], scale, lift_g)
            g = g if isinstance(g, Wide) else lift(g)
            xhat, _ = _xhat(x, rows, of_x, lift)
            if norm.kind == "layer":
                k = _near_mean(g, lift)
                centered = g - lift(k[:, None])
                near = _finite(k + _weighted_mean(centered, xhat))
                found.k[:, rows] = k, near
                found.sums[0, rows] = packed(_mean(centered, 1))
                found.sums[2, rows] = packed(_mean(xhat, 1))
                g = g - lift(near[:, None])
            found.sums[1, rows] = packed(_mean(g * xhat, 1))
    return found


@default_control()
def merged(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all columns together, added in the order given."""
    parts = [part for part in parts if part.columns] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    columns = sum(part.columns for part in parts)
    with np.errstate(all="ignore"):
        means = (
            Bounded.exactly(part.k[0]) * Bounded.exactly(part.columns) + unpacked(part.sums[0])
            for part in parts
        )
        k = _finite(_round(_sum(means).divided(columns), _FLOAT64))
        moved = [_moved(part, k) for part in parts]
        sums = [packed(_sum(each)) for each in zip(*moved, strict=True)]
    return Moments(columns, np.broadcast_to(k, parts[0].k.shape), np.stack(sums))


@default_control()
def of_x(total: Moments, eps: float) -> Whole:
    """Return what all columns need of x, given the moments of all of them."""
    first, second = map(unpacked, total.sums)
    with np.errstate(all="ignore"):
        shift = first.divided(total.columns)
        var = (second - first * shift).divided(total.columns)
        rstd = (var + Bounded.exactly(eps)).rsqrt()
        return Whole(total.k[0], packed(shift), packed(rstd))


@default_control()
def statistics(of_x: Whole) -> tuple[Array, Array]:
    """Return the mean and rstd of each row in one float64."""
    with np.errstate(all="ignore"):
        mean = (Wide.exactly(of_x.k) + unpacked(of_x.shift).value).round_to(_FLOAT64)
        return mean, unpacked(of_x.factor).value.round_to(_FLOAT64)


@default_control()
def of_g(total: Moments) -> Whole:
    """Return what all columns need of g, given the moments of all of them."""
    first, along, _ = (packed(unpacked(each).divided(total.columns)) for each in total.sums)
    return Whole(total.k[0], first, along)


@default_control()
def forward(x: Array, norm: Norm, of_x: Whole, y: Array) -> Array:
    """Write some columns of y; return of which rows an element is undecided."""
    lift = _arithmetic(norm, x)
    scale, shift = _scale(norm, lift), _parameter(norm.beta, lift)
    undecided = np.zeros(len(x), bool)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            result, _ = _xhat(x, rows, of_x, lift)
            if scale is not None:
                result = result * scale
            if shift is not None:
                result = result + shift
            y[rows], undecided[rows] = _finished(result, y.dtype)
    undecided &= np.isfinite(of_x.factor["high"])
    return undecided


@default_control()
def backward(dy: Array, x: Array, norm: Norm, of_x: Whole, of_g: Whole, dx: Array) -> Array:
    """Write some columns of dx; return of which rows an element is undecided."""
    lift = _arithmetic(norm, x, dy)
    scale = _scale(norm, lift)
    undecided = np.zeros(len(x), bool)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            g = _g(dy[rows], scale, lift)
            xhat, rstd = _xhat(x, rows, of_x, lift)
            g = g - lift(of_g.k[rows, None]) - _taken(of_g.shift[rows, None], lift)
            result = (g - xhat * _taken(of_g.factor[rows, None], lift)) * rstd
            dx[rows], undecided[rows] = _finished(result, dx.dtype)
    for whole in (of_x, of_g):
        undecided &= np.isfinite(whole.factor["high"])
    return undecided


@default_control()
def dgamma(dy: Array, x: Array, norm: Norm, of_x: Whole) -> Array:
    """Return dgamma of some columns as PARTIAL."""
    lift, total, special = _arithmetic(norm, x, dy), _RowSum(), np.zeros(x.shape[1])
    if not x.size:
        return np.zeros(x.shape[1], PARTIAL)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            xhat, _ = _xhat(x, rows, of_x, lift)
            cotangent = dy[rows]
            if lift == Bounded.exactly:
                cotangent, infinite = _split(cotangent)
                # Of an infinite dy, the sign of xhat counts.
                special += np.where(infinite == 0, 0.0, infinite * xhat.sign()).sum(axis=0)
            total.add(lift(cotangent) * xhat)
        found = packed(total.total())
    infinite = special != 0
    # A sum with a NaN stays NaN.
    total_high = found["high"][infinite] + special[infinite]
    found[infinite] = np.zeros((), PARTIAL)
    found["high"][infinite] = total_high
    return found


# ---- arithmetic ----


def _arithmetic(norm: Norm, *arrays: Array) -> Any:
    if norm.rounding == "nearest":
        return Bounded.exactly
    return _lifter(any_float64(*arrays, norm.gamma, norm.beta))


def _g(dy: Array, scale: Any, lift: Any) -> Any:
    """Return ``gamma * dy``, rounded as it is for dx: equal numbers stay equal to their mean."""
    g = lift(dy)
    return g if scale is None else g * scale


def _near_mean(values: Any, lift: Any) -> Array:
    """Return a float64 close to the mean of each row: of equal elements, the element."""
    k = _round(_mean(values), _FLOAT64)
    if not isinstance(values, Wide):
        k += _mean(values - lift(k))
    return _finite(k[:, 0])


def _weighted_mean(v: Wide, xhat: Wide) -> Array:
    """Return the mean of each row with weights ``abs(xhat)``, about as float64 has it."""
    (words, unit), (weights, _) = _in_one_unit(v), _in_one_unit(xhat)
    weights = np.abs(weights)
    weights += ~weights.any(axis=1, keepdims=True)
    mean: Array = np.ldexp((words * weights).sum(axis=1) / weights.sum(axis=1), unit)
    return mean


def _in_one_unit(v: Wide) -> tuple[Array, Array]:
    """Return each row as float64 numbers of at most 1, and their binary exponents."""
    unit = v.magnitude().max(axis=1, keepdims=True)
    # In C order, since NumPy's sums give other bits on other layouts.
    return np.ascontiguousarray(v.scaled_to(unit).hi), unit[:, 0]


def _finite(k: Array) -> Array:
    """Return numbers near k that are not infinite, as the mean of gamma * dy may be."""
    return np.clip(k, -_LARGEST, _LARGEST)


def _xhat(x: Array, rows: slice, of_x: Whole, lift: Any) -> tuple[Any, Any]:
    """Return xhat and rstd of some rows."""
    rstd = _taken(of_x.factor[rows, None], lift)
    centered = lift(x[rows]) - lift(of_x.k[rows, None]) - _taken(of_x.shift[rows, None], lift)
    return centered * rstd, rstd


def _finished(result: Any, dtype: np.dtype[Any]) -> tuple[Array, Any]:
    """Return the result rounded, and which rows are not decided by that."""
    if not isinstance(result, Bounded):
        return _round(result, dtype), False
    values, undecided = result.nearest(dtype)
    # Of NaN, there is one.
    values[np.isnan(values)] = np.nan
    return values, undecided.any(axis=1)


def _moved(part: Moments, k: Array) -> tuple[Bounded, ...]:
    """Return the sums about another k."""
    first, second, *rest = map(unpacked, part.sums)
    by = Bounded.exactly(part.k) - Bounded.exactly(k)
    moved = first + by[0] * Bounded.exactly(part.columns)
    return moved, second + by[-1] * (rest[0] if rest else first + moved), *rest


def _sum(terms: Any) -> Any:
    """Return the sum of many, by pairs: of one after another, the error would grow with their number."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [a + b for a, b in pairs] + terms[len(terms) // 2 * 2 :]
    return terms[0]


# ---- what travels ----


def _no_moments(shape: tuple[int, ...], near: int, sums: int) -> Moments:
    rows, columns = shape
    return Moments(columns, np.zeros((near, rows)), np.zeros((sums, rows), PARTIAL))


def packed(v: Any) -> Array:
    """Return a column, or a row, as PARTIAL; its error is true of `Bounded` alone."""
    v = v if isinstance(v, Wide) else Wide(v, np.zeros_like(v))
    bound = v.bound if isinstance(v, Bounded) else Wide(np.zeros_like(v.hi), v.lo)
    found = as_partial(v, Wide(bound.hi * _UNIT, bound.lo, bound.exponent)).reshape(-1)
    # 0 says that the number is exact.
    inexact = (bound.hi != 0).reshape(-1)
    found["error"][inexact] = np.maximum(found["error"][inexact], 2.0**-1000)
    return found


def unpacked(partial: Array) -> Bounded:
    """Return what was `packed`."""
    high, low, error, exponent = (partial[name] for name in ("high", "low", "error", "exponent"))
    one = exponent.astype(np.int32) if exponent.any() else 0
    return Bounded(Wide(high, low, one), Wide(error / _UNIT, np.zeros_like(error), one))


def _taken(partial: Array, lift: Any) -> Any:
    """Return what was `packed`, in the arithmetic of `lift`."""
    v = unpacked(partial)
    if lift == Bounded.exactly:
        return v.moderate()
    if lift == Wide.exactly:
        return v.value.moderate()
    return np.ldexp(v.hi + v.lo, v.exponent)
