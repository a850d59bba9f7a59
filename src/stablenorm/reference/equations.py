r"""
Layer normalization and its gradients: the equations, in NumPy, on (rows, n).

Everything else in the package is a faster implementation of these equations, a public interface to
them, or a tool that checks them. What is assumed here is checked by the callers: x and dy are
(rows, n), gamma and beta (n,) or None, and the dtypes are the four floating ones.

Forward, for one row x of n elements::

    mean = sum(x) / n
    var  = sum((x - mean)**2) / n
    rstd = (var + eps)**(-1/2)
    xhat = (x - mean) * rstd
    y    = gamma * xhat + beta

Backward, given dy, the gradient of a scalar with respect to y::

    g      = gamma * dy
    dx     = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dgamma = sum over rows of dy * xhat
    dbeta  = sum over rows of dy

RMS norm is the same with the mean, and in the backward mean(g), set to 0. Gamma may
be stored less a `gamma_offset`, which is added first. With a mask, n is the number
of elements of the row that count, means and sums are over these, and y and dx are 0 elsewhere. What
comes from the gradients with respect to the statistics, or past the norm, is added before dx is rounded::

    dx += dsum + dmean / n - drstd * rstd**2 * xhat / n

docs/explanation/derivation.md derives these lines, and its steps are checked with symbols. Three facts
shape the code:

- gamma comes *before* the means. They mix the elements of a row, and each element must have its own
  gamma by then. Applying gamma to the result is right for batch normalization, and wrong here.
- The Jacobian of xhat, ``rstd * (I - 1 1'/n - xhat xhat'/n)``, is symmetric and exact with eps
  included. So the same `project` serves the backward (applied to g) and the jvp (applied to a
  tangent).
- Because mean(xhat) = 0, ``mean(g * xhat) = mean((g - mean(g)) * xhat)``. In floating point the right
  side is better: with a large mean(g) the products g * xhat are large and cancel, but their
  rounding errors remain. So g is centered first.

Precision
---------
x of float16, bfloat16 and float32 is computed in float64 and rounded once. For an x of float64, the same lines run
on `Pair`, double-double numbers. In both, the mean is corrected by the
mean of what is left after subtracting it. That makes constant rows exact and keeps the error of rows
that differ in their last bit only within the contract: docs/explanation/error-analysis.md.
Rows whose products could leave the range of float64 are `out_of_range`; `uncertified` does them with integers.

Memory
------
The forward keeps the mean and rstd of each row (`Statistics`), 24 bytes, or 40 with float64
data. The backward rebuilds xhat from x and repeats none of the forward's reductions. To keep xhat
instead would take 8 bytes per element: docs/explanation/complexity.md. The rows are taken in blocks of
`_BLOCK` elements, so that temporaries are a few blocks, whatever the size of x. Sums over rows go
through a tree whose shape depends on (rows, n) alone.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.reference.doubledouble import Pair
from stablenorm.reference.partial import as_partial, merged
from stablenorm.reference.rounding import round_to
from stablenorm.types import Array, Norm, Statistics

# Elements of a block: 256 KiB in float64, so that the five or so temporaries of the backward fit
# a 1 to 2 MiB second-level cache. The fastest of 2**11 to 2**18 forward and backward together, by
# 2 to 140 % (float32, (8192, 768), Intel Xeon, 2026-11-21).
_BLOCK = 1 << 15

# Products of three numbers within these, and their last 106 bits, stay in the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200


def _mean(v: Any, count: Any = None) -> Any:
    """Return the mean of each row: of all elements, or of `count`, where the others are 0."""
    if isinstance(v, Pair):
        return v.mean(count)
    return np.add.reduce(v, axis=-1, keepdims=True) / (v.shape[-1] if count is None else count)


def project(v: Any, xhat: Any, kind: str = "layer", mean: Callable[[Any], Any] = _mean) -> Any:
    """Remove from each row of `v` its part along `xhat`, and for "layer" that along the ones."""
    if kind == "layer":
        # First: then mean(v * xhat) is safe however large mean(v) is.
        v = v - mean(v)
    return v - xhat * mean(v * xhat)


class Normalized(NamedTuple):
    """Rows of xhat, and what is kept of them; mean is float64, None of RMS norm as is mean_lo."""

    xhat: Any
    mean: Any
    mean_lo: Any
    var: Any
    rstd: Any


def normalized(
    x: Any, eps: Any, lift: Callable[[Any], Any], kind: str, mean_of: Callable[[Any], Any] = _mean
) -> Normalized:
    """Normalize rows of numbers of any kind, which `lift` makes; `x` may be written over."""
    centered, mean, mean_lo = _center(x, lift, kind, mean_of)
    var = mean_of(centered * centered)
    rstd = _rsqrt(var + eps)
    centered *= rstd
    return Normalized(centered, mean, mean_lo, var, rstd)


def affine(xhat: Any, scale: Any, shift: Any) -> Any:
    """Scale and shift, each if it is not None; `xhat` may be written over."""
    if scale is not None:
        xhat *= scale
    if shift is not None:
        xhat += shift
    return xhat


def forward(call: Forward) -> Statistics:
    """
    Normalize the rows of x into y (which may be x itself, or None); return the statistics.

    With a mask, only elements for which it is True count, at least one of each row. No y is written of rows that are
    out of range; their rstd_lo is NaN.
    """
    x, norm, y = call[:3]
    lift = _lifter(x)
    scale, shift, eps = _scale(norm, lift), _parameter(norm.beta, lift), lift(np.float64(norm.eps))
    kept = _new_statistics(len(x), norm.kind, x.dtype == np.float64)
    with np.errstate(all="ignore"):
        for rows in _blocks(x.shape):
            counting = _Counting(call.where, rows, x.shape[1])
            found = normalized(lift(x[rows]), eps, lift, norm.kind, counting.mean)
            _keep(kept, rows, found)
            left = np.zeros(len(x[rows]), bool)
            if kept.rstd_lo is not None:
                left = _leaves_range(found, eps, x[rows], norm.kind, counting)
                kept.rstd[rows][left], kept.rstd_lo[rows][left] = 0.0, np.nan
            if y is not None:
                result = _round(counting.only(affine(found.xhat, scale, shift)), y.dtype)
                # y may be x itself, which the others need.
                np.copyto(y[rows], result, where=~left[:, None])
    return kept


def _leaves_range(found: Normalized, eps: Any, x: Array, kind: str, counting: "_Counting") -> Array:
    """Tell which rows of pairs, NaN and infinity aside, have squares that leave the range."""
    var, v = found.var.hi[:, 0], (found.var + eps).hi[:, 0]
    within = (v >= SMALLEST**2) & (v <= LARGEST**2) & ((var >= SMALLEST**2) | (var == 0))
    # A square of 0 may have vanished.
    x = counting.only(x)
    for i in np.flatnonzero(within & (var == 0)).tolist():
        some = x[i] if counting.where is None else x[i][counting.where[i]]
        within[i] = (some == (some[0] if kind == "layer" else 0)).all()
    left: Array = ~within & np.isfinite(x).all(axis=1)
    return left


def exceeds_range(*arrays: Array | None, least: float = 0.0) -> bool:
    """Tell whether a number, infinity included, is beyond LARGEST, or nearer to 0 than `least`."""
    sizes = (np.abs(each.astype(np.float64)) for each in arrays if each is not None)
    return any(bool(((size > LARGEST) | ((size < least) & (size != 0))).any()) for size in sizes)


def out_of_range(call: Backward) -> Array:
    """Tell which rows of a backward could leave the range of float64."""
    dy, kept = call.dy, call.statistics
    if dy.dtype != np.float64 and kept.rstd_lo is None:
        return np.zeros(len(dy), bool)
    out = np.zeros(len(dy), bool)
    least = 0.0 if kept.rstd_lo is None else SMALLEST
    for rows in _blocks(dy.shape):
        size = np.abs(_Counting(call.where, rows, dy.shape[1]).only(dy[rows].astype(np.float64)))
        out[rows] = ((size > LARGEST) | ((size < least) & (size != 0))).any(axis=1)
    return out if kept.rstd_lo is None else out | (np.isnan(kept.rstd_lo) & ~np.isnan(kept.rstd))


def add(x: Array, residual: Array, total: Array) -> None:
    """Write ``x + residual``, rounded once, into `total`; arrays of one shape, of any layout."""
    with np.errstate(all="ignore"):
        # np.result_type knows no common type of float16 and bfloat16.
        if np.can_cast(x.dtype, total.dtype) and np.can_cast(residual.dtype, total.dtype):
            # One rounding, for 16 bits by way of float32: 24 bits are 2 * 11 + 2.
            np.add(x, residual, out=total, dtype=total.dtype)
            return
        step = max(1, _BLOCK * len(x) // max(x.size, 1))
        for rows in (slice(start, start + step) for start in range(0, len(x), step)):
            both = Pair.exactly(x[rows]) + Pair.exactly(residual[rows])
            total[rows] = both.round_to(total.dtype)


def backward(call: Backward) -> None:
    """
    Pull dy back through `forward`, into those of dx, dgamma and dbeta that are not None.

    dx may be dy itself: each block of dy is read to the end before it is written.
    """
    dy, x, norm, statistics, dx_rows, dgamma, dbeta, dsum = call[:8]
    lift = _lifter(x)
    scale = _scale(norm, lift)
    sum_dgamma, sum_dbeta = _RowSum(), _RowSum()
    with np.errstate(all="ignore"):
        for rows in _blocks(dy.shape):
            counting = _Counting(call.where, rows, x.shape[1])
            cotangent = lift(dy[rows])
            if dx_rows is not None or dgamma is not None:
                xhat, rstd = _rebuild(lift(x[rows]), statistics, rows)
            if dgamma is not None:
                sum_dgamma.add(counting.only(cotangent * xhat))
            if dbeta is not None:
                sum_dbeta.add(counting.only(cotangent))
            if dx_rows is not None:
                g = cotangent if scale is None else cotangent * scale
                dx = project(g, xhat, norm.kind, counting.mean) * rstd
                if call.drstd is not None:
                    share = counting.share(lift(call.drstd[rows, None]))
                    # In this order a product overflows only where dx does: |xhat| / n < 1.
                    dx = dx - share * xhat * rstd * rstd
                if call.dmean is not None:
                    dx = dx + counting.share(lift(call.dmean[rows, None]))
                dx = counting.only(dx)
                if dsum is not None:
                    dx = dx + lift(dsum[rows])
                dx_rows[rows] = _round(dx, dx_rows.dtype)
        for total, result in ((sum_dgamma, dgamma), (sum_dbeta, dbeta)):
            if result is not None:
                total.put(result, pairs=call.sums == "pairs")


# ---- arithmetic: the same words for float64 and for Pair ----


def _lifter(x: Array) -> Callable[[Any], Any]:
    """Return what turns an array into the numbers to calculate with, exactly: the dtype of x decides."""
    if x.dtype == np.float64:
        return Pair.exactly
    # A copy always, since blocks are calculated in place; in C order, since NumPy's pairwise
    # sums give other bits on other layouts.
    return lambda array: np.asarray(array).astype(np.float64, order="C")


def _parameter(parameter: Array | None, lift: Callable[[Any], Any]) -> Any:
    return None if parameter is None else lift(parameter.reshape(1, -1))


def _scale(norm: Norm, lift: Callable[[Any], Any]) -> Any:
    scale = _parameter(norm.gamma, lift)
    return scale + lift(np.float64(norm.gamma_offset)) if norm.gamma_offset else scale


def _rsqrt(v: Any) -> Any:
    # inf - inf = NaN: an infinite RMS row becomes NaN.
    return v.rsqrt() if isinstance(v, Pair) else 1.0 / np.sqrt(v) + (v - v)


def _round(v: Any, dtype: np.dtype[Any]) -> Array:
    return v.round_to(dtype) if isinstance(v, Pair) else round_to(v, dtype)


def _center(
    x: Any,
    lift: Callable[[Any], Any],
    kind: str,
    mean_of: Callable[[Any], Any] = _mean,
) -> tuple[Any, Any, Any]:
    """Return x less its row mean, and the mean as a float64 and the rest; x and None for "rms"."""
    if kind == "rms":
        return x, None, None
    mean = _round(mean_of(x), np.dtype(np.float64))
    # `x` is this block's own copy: writing over it saves a pass over fresh memory.
    x -= lift(mean)
    centered = x
    # The float64 mean is off by its own rounding, which every element of a row shares: the
    # worst error of all where the spread is near one ulp.
    mean_lo = mean_of(centered)
    centered -= mean_lo
    return centered, mean, mean_lo


def _rebuild(x: Any, statistics: Statistics, rows: slice) -> tuple[Any, Any]:
    """Return xhat and rstd of some rows from x and the statistics."""
    words: list[Any] = [None if word is None else word[rows, None] for word in statistics[:5]]
    mean, mean_lo, rstd, rstd_lo, tail = words
    if not isinstance(x, Pair):
        if mean is not None:
            x -= mean
            x -= mean_lo
        x *= rstd
        return x, rstd
    scale = Pair(rstd, rstd_lo)
    if mean is not None:
        x = x - Pair.exactly(mean) - Pair(mean_lo, tail)
    return x * scale, scale


# ---- rows: blocks, what is kept of each, sums over them ----


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    rows, n = shape
    step = max(1, _BLOCK // max(n, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows if n else 0, step))


class _Counting:
    """Which elements of some rows count: all, or those for which `where` is True."""

    def __init__(self, where: Any, rows: slice, n: int) -> None:
        self.where = None if where is None else where[rows]
        self._count: Any = n
        if self.where is not None:
            self._count = np.count_nonzero(self.where, axis=-1, keepdims=True)

    def only(self, v: Any) -> Any:
        """Return `v`, 0 in the place of elements that do not count, whatever they are."""
        if self.where is None:
            return v
        if isinstance(v, Pair):
            return Pair(self.only(v.hi), self.only(v.lo))
        return np.where(self.where, v, 0.0)

    def mean(self, v: Any) -> Any:
        """Return the mean of each row over what counts."""
        return _mean(self.only(v), self._count)

    def share(self, column: Any) -> Any:
        """Return one number for each row, divided by the number of elements that count."""
        return column.divided(self._count) if isinstance(column, Pair) else column / self._count


def _new_statistics(rows: int, kind: str, pairs: bool) -> Statistics:
    mean, mean_lo, tail = np.empty((3, rows)) if kind == "layer" else (None, None, None)
    low = np.empty(rows) if pairs else None
    return Statistics(mean, mean_lo, np.empty(rows), low, tail if pairs else None)


def _keep(kept: Statistics, rows: slice, found: Normalized) -> None:
    """Write the statistics of some rows."""
    words: list[Any] = [found.mean, found.mean_lo, found.rstd, None, None]
    if isinstance(found.rstd, Pair):
        words[2:4] = found.rstd.hi, found.rstd.lo
        if found.mean is not None:
            words[1], words[4] = found.mean_lo.hi, found.mean_lo.lo
    for word, column in zip(kept, words, strict=False):
        if column is not None:
            word[rows] = column[:, 0]


class _RowSum:
    """
    Sums rows by pairs, in an order that depends on (rows, n) alone.

    Blocks are summed by halves; partial sums of equally many blocks are added as soon as there
    are two, as in a binary counter, so that log2(blocks) of them are held at a time and the
    error grows like log2(rows), not like rows as with ``sum(axis=0)``.
    """

    def __init__(self) -> None:
        self._partial: list[tuple[int, Any]] = []

    def add(self, block: Any) -> None:
        total, count = _sum_rows(block), 1
        while self._partial and self._partial[-1][0] == count:
            total = self._partial.pop()[1] + total
            count *= 2
        self._partial.append((count, total))

    def put(self, result: Array, pairs: bool = False) -> None:
        """Write the sum of all, rounded once; or add it to the partial sums in `result`."""
        if pairs:
            if self._partial:
                total = self.total()
                high, low = (total.hi, total.lo) if isinstance(total, Pair) else (total, 0.0)
                part = as_partial(high, low, np.nan)
                result[...] = merged(result, part.reshape(result.shape))
            return
        found = _round(self.total(), result.dtype) if self._partial else np.zeros((), result.dtype)
        result[...] = found.reshape(result.shape if found.ndim else ())

    def total(self) -> Any:
        """Return the sum of all, of at least one block, as one row."""
        total = self._partial[-1][1]
        for _, partial in reversed(self._partial[:-1]):
            total = partial + total
        return total


def _sum_rows(block: Any) -> Any:
    if isinstance(block, Pair):
        return block.sum_rows()
    while (rows := len(block)) > 1:
        half = (rows + 1) // 2
        pairs = block[:half].copy()
        pairs[: rows - half] += block[half:]
        block = pairs
    return block
