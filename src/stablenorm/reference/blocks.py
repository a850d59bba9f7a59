"""
The equations on calls: blocks of rows, masks, statistics, sums over rows, and the rows that are out of range.

The backward makes xhat anew from x and repeats none of the forward's reductions; to keep xhat instead would take 8 bytes
an element (docs/explanation/complexity.md). Rows are taken in blocks of `BLOCK` elements, so that temporaries are a few
blocks, whatever the size of x. Sums over rows go through a tree whose shape depends on (rows, n) alone.

Forward mode, and the gradient of the backward: J is the symmetric Jacobian of xhat, the backward without gamma. For one
row, with ``scale = gamma + gamma_offset``, given tangents of x, gamma and beta::

    ty     = scale * J tx + tgamma * xhat + tbeta

The backward makes dx, dgamma and dbeta of dy, x and gamma. Given cotangents ddx, ddgamma and ddbeta of what it makes, and
with ``g = scale * dy``::

    ddy    = scale * J ddx + ddgamma * xhat + ddbeta
    dgamma = sum over rows of dy * J ddx
    dx     = J (ddgamma * dy) - rstd * (mean(g * xhat) * J ddx
                                        + mean(ddx * xhat) * J g + xhat * mean(ddx * J g))

docs/explanation/derivation.md derives these lines, D21, D29 and D30. Their results for float64 rows that are out of
range, beyond about 2**200 or below 2**-200, are NaN.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from stablenorm.call import Backward, DoubleBackward, Forward, Jvp
from stablenorm.reference import equations
from stablenorm.reference.doubledouble import (
    Pair,
    as_partial,
    merged,
    round_to,
    sum_rows,
    two_sum,
)
from stablenorm.reference.equations import restore, row_mean
from stablenorm.types import Array, Norm, Statistics, joined

# Elements of a block: 256 KiB in float64, so that the five or so temporaries of the backward fit
# a 1 to 2 MiB second-level cache. The fastest of 2**11 to 2**18 forward and backward together, by
# 2 to 140 % (float32, (8192, 768), Intel Xeon, 2026-11-21).
BLOCK = 1 << 15

# Products of three numbers within these, and their last 106 bits, stay in the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200

Lift = Callable[[Any], Any]


@np.errstate(all="ignore")
def forward(call: Forward) -> Statistics:
    """
    Normalize the rows of x into y (which may be x itself, or None); return the statistics.

    With a mask, only elements for which it is True count, at least one of each row. Rows that are out of range get no y,
    and NaN as rstd_lo.
    """
    x, norm, y = call[:3]
    lift = lifter(x)
    scale, shift, eps = scale_of(norm, lift), parameter(norm.beta, lift), lift(np.float64(norm.eps))
    statistics: list[Statistics] = []
    for rows in blocks(x.shape):
        counted = Counted(call.where, rows, x.shape[1])
        wide, words, var = equations.forward(
            lift(x[rows]), eps, scale, shift, norm.kind, counted.mean
        )
        statistics.append(_statistics(*words))
        out = np.zeros(len(x[rows]), bool)
        if statistics[-1].rstd_lo is not None:
            out = _squares_leave_range(var, eps, x[rows], norm.kind, counted)
            statistics[-1].rstd[out], statistics[-1].rstd_lo[out] = 0.0, np.nan
        if y is not None:
            # y may be x itself, which integers need for rows out of range.
            result = round_to(counted.only(wide), y.dtype)
            np.copyto(y[rows], result, where=~out[:, None])
    return joined(statistics)


@np.errstate(all="ignore")
def backward(call: Backward) -> None:
    """
    Pull dy back through `forward`, into those of dx, dgamma and dbeta that are not None.

    dx may be dy itself: each block of dy is read to the end before it is written.
    """
    dy, x, norm, statistics, dx_rows, dgamma, dbeta, dsum = call[:8]
    lift = lifter(x)
    scale = scale_of(norm, lift)
    sum_dgamma, sum_dbeta = RowSum(), RowSum()
    for rows in blocks(dy.shape):
        counted = Counted(call.where, rows, x.shape[1])
        cotangent = lift(dy[rows])
        if dx_rows is not None or dgamma is not None:
            xhat, rstd = rebuilt(lift(x[rows]), statistics, rows)
        if dgamma is not None:
            sum_dgamma.add(counted.only(cotangent * xhat))
        if dbeta is not None:
            sum_dbeta.add(counted.only(cotangent))
        if dx_rows is not None:
            dx = equations.backward(cotangent, xhat, rstd, scale, norm.kind, counted.mean)
            if call.drstd is not None:
                share = lift(call.drstd[rows, None]) / counted.count
                # In this order a product overflows only where dx does: |xhat| / n < 1.
                dx = dx - share * xhat * rstd * rstd
            if call.dmean is not None:
                dx = dx + lift(call.dmean[rows, None]) / counted.count
            dx = counted.only(dx)
            if dsum is not None:
                dx = dx + lift(dsum[rows])
            dx_rows[rows] = round_to(dx, dx_rows.dtype)
    for total, result in ((sum_dgamma, dgamma), (sum_dbeta, dbeta)):
        if result is not None:
            total.put(result, pairs=call.sums == "pairs")


@np.errstate(all="ignore")
def add(x: Array, residual: Array, total: Array) -> None:
    """Write ``x + residual``, rounded once, into `total`; arrays of one shape, of any layout."""
    # np.result_type knows no common type of float16 and bfloat16.
    if np.can_cast(x.dtype, total.dtype) and np.can_cast(residual.dtype, total.dtype):
        # One rounding, for 16 bits by way of float32: 24 bits are 2 * 11 + 2.
        np.add(x, residual, out=total, dtype=total.dtype)
        return
    step = max(1, BLOCK * len(x) // max(x.size, 1))
    for rows in (slice(start, start + step) for start in range(0, len(x), step)):
        both = two_sum(x[rows].astype(np.float64), residual[rows].astype(np.float64))
        total[rows] = round_to(Pair(*both), total.dtype)


# ---- forward mode and second order ----


@np.errstate(all="ignore")
def jvp(call: Jvp) -> None:
    """
    Push the tangents of x, gamma and beta (None: 0) through `forward`, into ty; 0 where the mask is False.

    Each element is within ``0.501 ulp + c * S`` of the exact one, c as for y, S the magnitudes that
    it is made of: with ``T(v) = rstd (|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|)``,
    ``|scale| T(tx) + |tgamma| (|xhat| + mean|xhat|) + |tbeta|``.
    """
    tx, x, norm, statistics, tgamma, tbeta, ty, where = call
    lift = lifter(x)
    parameters = scale_of(norm, lift), parameter(tgamma, lift), parameter(tbeta, lift)
    for rows in blocks(x.shape):
        counted = Counted(where, rows, x.shape[1])
        xhat, rstd = rebuilt(lift(x[rows]), statistics, rows)
        moved = equations.backward(lift(tx[rows]), xhat, rstd, None, norm.kind, counted.mean)
        ty[rows] = round_to(counted.only(_pushed(moved, xhat, *parameters)), ty.dtype)


@np.errstate(all="ignore")
def double_backward(call: DoubleBackward) -> None:
    """
    Pull ddx, ddgamma and ddbeta (None: 0) back through `backward`, into ddy, dx and dgamma.

    The errors are as for `jvp`: S of ddy is that of ty; of dgamma, the sum over rows of
    ``|dy| T(ddx)``; of dx, ``T(ddgamma * dy) + rstd (mean|g' xhat| T(ddx) + mean|ddx' xhat| T(g) +
    (|xhat| + mean|xhat|) mean(|ddx'| T(g)))``, g' and ddx' centered.
    """
    ddx, dy, x, norm, statistics, ddgamma, ddbeta, ddy, dx, dgamma, where = call
    lift = lifter(x)
    scale, *of_xhat = scale_of(norm, lift), parameter(ddgamma, lift), parameter(ddbeta, lift)
    sum_dgamma = RowSum()
    for rows in blocks(x.shape):
        counted = Counted(where, rows, x.shape[1])
        xhat, rstd = rebuilt(lift(x[rows]), statistics, rows)
        mean, only = counted.mean, counted.only
        jacobian = partial(
            equations.backward, xhat=xhat, rstd=rstd, scale=None, kind=norm.kind, mean=mean
        )
        cotangent, tangent = lift(dy[rows]), lift(ddx[rows])
        g = cotangent if scale is None else cotangent * scale
        pushed, pulled = jacobian(tangent), jacobian(g)
        ddy[rows] = round_to(only(_pushed(pushed, xhat, scale, *of_xhat)), ddy.dtype)
        if dgamma is not None:
            sum_dgamma.add(only(cotangent * pushed))
        if norm.kind == "layer":
            # For the means of products that follow: the reason of `project`.
            g, tangent = g - mean(g), tangent - mean(tangent)
        bent = mean(g * xhat) * pushed + mean(tangent * xhat) * pulled
        total = -(rstd * (bent + xhat * mean(tangent * pulled)))
        if of_xhat[0] is not None:
            total = total + jacobian(cotangent * of_xhat[0])
        dx[rows] = round_to(only(total), dx.dtype)
    if dgamma is not None:
        sum_dgamma.put(dgamma)


def _pushed(moved: Any, xhat: Any, scale: Any, tgamma: Any, tbeta: Any) -> Any:
    """Return the tangent of y, given that of xhat."""
    result = moved if scale is None else moved * scale
    if tgamma is not None:
        result = result + tgamma * xhat
    return result if tbeta is None else result + tbeta


# ---- range: the rows and parameters whose products could leave that of float64 ----


def needs_integers(call: Forward | Backward, beta: Array | None = None) -> bool:
    """Tell whether integers do all rows: with rounding="nearest", or if gamma or beta is out of range."""
    norm, pairs = call.norm, call.x.dtype == np.float64
    gamma = norm.gamma
    if pairs and gamma is not None:
        gamma = gamma.astype(np.float64) + norm.gamma_offset
    parameters = (gamma, SMALLEST if pairs else 0.0), (beta, 0.0)
    return norm.rounding == "nearest" or any(
        # float64 holds the products of narrower numbers, and leaves their infinities as they are.
        values is not None
        and (pairs or values.dtype == np.float64)
        and _outside(values, least).any()
        for values, least in parameters
    )


def out_of_range(call: Backward) -> Array:
    """Tell which rows of a backward could leave the range of float64."""
    dy, statistics = call.dy, call.statistics
    out, pairs = statistics.out_of_range, statistics.rstd_lo is not None
    if dy.dtype == np.float64 or pairs:
        for rows in blocks(dy.shape):
            counted = Counted(call.where, rows, dy.shape[1])
            out[rows] |= _outside(counted.only(dy[rows]), SMALLEST if pairs else 0.0).any(axis=1)
    return out


def _outside(values: Array, least: float) -> Array:
    """Tell which numbers are beyond LARGEST, as infinity is, or nearer to 0 than `least`."""
    size = np.abs(values.astype(np.float64))
    outside: Array = (size > LARGEST) | ((size < least) & (size != 0))
    return outside


def _squares_leave_range(var: Any, eps: Any, x: Array, kind: str, counted: "Counted") -> Array:
    """Tell which rows of pairs have squares that leave the range; rows with NaN or infinity have none."""
    size, v = var.high[:, 0], (var + eps).high[:, 0]
    within = (v >= SMALLEST**2) & (v <= LARGEST**2) & ((size >= SMALLEST**2) | (size == 0))
    # A square of 0 may have underflowed.
    x = counted.only(x)
    for i in np.flatnonzero(within & (size == 0)).tolist():
        values = x[i] if counted.where is None else x[i][counted.where[i]]
        within[i] = (values == (values[0] if kind == "layer" else 0)).all()
    outside: Array = ~within & np.isfinite(x).all(axis=1)
    return outside


# ---- from arrays to float64 or pairs ----


def lifter(x: Array) -> Lift:
    """Return the function that lifts an array exactly: to pairs if x is float64, else to float64."""
    if x.dtype == np.float64:
        return Pair.exactly
    # Copy always: blocks are calculated in place. In C order: NumPy's pairwise sums give other bits on other layouts.
    return lambda array: np.asarray(array).astype(np.float64, order="C")


def parameter(array: Array | None, lift: Lift) -> Any:
    """Return gamma, beta or a tangent of these as a row, None as None."""
    return None if array is None else lift(array.reshape(1, -1))


def scale_of(norm: Norm, lift: Lift) -> Any:
    """Return gamma, with its offset, as a row."""
    scale = parameter(norm.gamma, lift)
    return scale + lift(np.float64(norm.gamma_offset)) if norm.gamma_offset else scale


def blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Return the slices of rows that are done together, at least one."""
    rows, n = shape
    step = max(1, BLOCK // n)
    return (slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


class Counted:
    """The elements of some rows that count: all, or those for which `where` is True."""

    def __init__(self, where: Any, rows: slice, n: int) -> None:
        self.where, self.count = None, n
        if where is not None:
            self.where = where[rows]
            self.count = np.count_nonzero(self.where, axis=-1, keepdims=True)

    def only(self, v: Any) -> Any:
        """Return `v`, 0 in the place of elements that do not count, whatever they are."""
        if self.where is None:
            return v
        if isinstance(v, Pair):
            return Pair(self.only(v.high), self.only(v.low))
        return np.where(self.where, v, np.zeros((), v.dtype))

    def mean(self, v: Any) -> Any:
        """Return the mean of each row over the elements that count."""
        return row_mean(self.only(v), self.count)


# ---- statistics ----


def _statistics(mean: Any, mean_lo: Any, rstd: Any) -> Statistics:
    """Return the statistics of some rows, pairs as two words."""
    statistics = Statistics(mean, mean_lo, rstd)
    if isinstance(rstd, Pair):
        low, tail = (None, None) if mean is None else (mean_lo.high, mean_lo.low)
        statistics = Statistics(mean, low, rstd.high, rstd.low, tail)
    return statistics.of_rows((slice(None), 0))


def rebuilt(x: Any, statistics: Statistics, rows: slice) -> tuple[Any, Any]:
    """Return xhat and rstd of some rows from x and the statistics."""
    words: list[Any] = [None if word is None else word[rows, None] for word in statistics[:5]]
    mean, mean_lo, rstd, rstd_lo, tail = words
    if isinstance(x, Pair):
        rstd, mean_lo = Pair(rstd, rstd_lo), Pair(mean_lo, tail)
    return restore(x, mean, mean_lo, rstd), rstd


# ---- sums over rows ----


class RowSum:
    """
    Sums rows by pairs, in an order that depends on (rows, n) alone.

    Blocks are summed by halves; partial sums of equally many blocks are added as soon as there
    are two, as in a binary counter, so that log2(blocks) of them are held at a time and the
    error grows like log2(rows), not like rows as with ``sum(axis=0)``.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, Any]] = []

    def add(self, block: Any) -> None:
        """Add a block of rows."""
        total, count = sum_rows(block), 1
        while self._partial and self._partial[-1][0] == count:
            total = self._partial.pop()[1] + total
            count *= 2
        self._partial.append((count, total))

    def put(self, result: Array, pairs: bool = False) -> None:
        """Write the sum of all, rounded once; or add it to the partial sums in `result`."""
        _, total = self._partial[-1]
        for _, other in reversed(self._partial[:-1]):
            total = other + total
        if pairs:
            high, low = (total.high, total.low) if isinstance(total, Pair) else (total, 0.0)
            result[...] = merged(result, as_partial(high, low, np.nan)[0])
        else:
            result[...] = round_to(total, result.dtype)[0]
