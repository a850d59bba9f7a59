"""
What is known of each row of x: statistics, condition numbers, bits lost by each method, marks.

A method is its mean and its rstd. With those, ``y_hat = (x - mean_hat) * rstd_hat`` has two errors:
a shift, from the error of the mean, and a factor, from the error of rstd. The deviations of a row
sum to zero, so the RMS error over the row is exactly ``hypot((mean_hat - mean) rstd_hat, std
(rstd_hat - rstd))``. Rounding the elements one by one adds less than a bit.

Bits lost: log2 of the RMS error of the row over ``u max(rms(y), smallest normal)``, where u = 2**-p
is the rounding unit of the data's p-bit dtype, between 0 and p. One correct rounding loses none; p
means that nothing of y is left. A constant row, whose y is 0, is measured against 1, the size of
normalized data. RMS and not the worst element, which is a draw from the tail.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm.testing.families import format_of
from stablenorm.types import Array

# "{working}" stands for the dtype that the methods compute in: float32, or float64 for float64.
TITLES = {
    "two-pass": "{working} two-pass",
    "welford": "{working} Welford",
    "one-pass": "{working} E[x^2] - E[x]^2",
    "saved float32": "mean and rstd saved as float32",
    "saved bfloat16": "mean and rstd saved as bfloat16",
    "float16": "mean, var and eps held in float16",
}

# What can be special about a row, and what it means for such rows.
MARKS = {
    "not finite": "they hold NaN or infinity: y is NaN",
    "undefined": "constant, and eps is 0: y is 0/0, NaN",
    "constant": "all elements equal: y is beta",
    "var below eps": "eps decides the scale of y",
    "dominating outlier": "one element has more than half of the variance",
    "sum overflows": "the sum of x overflows {working}",
    "squares overflow": "the sum of x^2 overflows {working}",
    "deviations overflow": "the sum of (x - mean)^2 overflows {working}",
    "squares underflow": "var is below the normal numbers of {working}",
    "float16 overflows": "mean or var is beyond the range of float16",
}
# How a row's marks are kept: one bit each.
BITS = {name: np.uint16(1 << place) for place, name in enumerate(MARKS)}

# Elements described at a time. Of fewer, calling NumPy takes as long as the arithmetic; the buffers
# of more, 24 bytes each for float32, no longer stay near the second-level cache.
_STRIP = 1 << 16

# float64 data beyond these limits is scaled first: squares would overflow or lose digits. All data
# of 32 and fewer bits lies within.
_TINY, _HUGE = 2.0**-400, 2.0**400

# In a row of fewer elements, one has most of the variance for no special reason.
_FEW = 8


class PerRow(NamedTuple):
    """
    Numbers of every row, each an array of length rows.

    Attributes
    ----------
    mean, std, condition_y, condition_dx, eps_share : array
        As in `Row`.
    lost : array
        Bits lost, (methods, rows), in the order of `Diagnosis.methods`.
    marks : array
        uint16: bit k is set for the k-th of `Summary.marks`.
    """

    mean: Array
    std: Array
    condition_y: Array
    condition_dx: Array
    eps_share: Array
    lost: Array
    marks: Array


class Statistics(NamedTuple):
    """
    What each row is described by; arrays of length rows.

    Exact, to float64: `mean + mean_lo`, the standard deviation `std`, the smallest and the largest
    element; mean and std are NaN where a row is not finite. Then in the precision that a method
    computes in, rounded at every step: the sums of x, of x^2 and of (x - mean)^2 in NumPy's order
    (pairwise), and Welford's mean and sum of squared deviations.
    """

    mean: Array
    mean_lo: Array
    std: Array
    lowest: Array
    highest: Array
    total: Array
    squares: Array
    centered_squares: Array
    welford_mean: Array
    welford_squares: Array


class Buffers(NamedTuple):
    """
    Memory for the strips of rows, used again for each: new pages would cost more than arithmetic.

    `x` is (rows, n) in the dtype that methods compute in, `deviations` the same in float64; the
    others are as large as `x`.
    """

    x: Array
    deviations: Array
    products: Array
    means: Array
    squares: Array


def make_buffers(rows: int, n: int, dtype: Any) -> Buffers:
    """Return buffers for so many rows of `dtype`."""
    kind = working_dtype(dtype)
    return Buffers(
        np.empty((rows, n), kind),
        np.empty((rows, n)),
        *(np.empty(rows * n, kind) for _ in range(3)),
    )


def measure_rows(x: Any, dtype: Any, eps: float) -> PerRow:
    """Return what is known of the rows of `x`, (rows, n), as if they were of `dtype`."""
    rows, n = x.shape
    step = min(max(1, _STRIP // n), rows)
    buffers = make_buffers(step, n, dtype)
    with np.errstate(all="ignore"):
        strips = []
        for start in range(0, max(rows, 1), max(step, 1)):
            strip = x[start : start + step]
            # Contiguous, so that sums are formed in the same order whatever the layout. What is too
            # large for a narrower dtype becomes infinite, and is reported as such.
            buffers.x[: len(strip)] = strip.astype(dtype, copy=False)
            strips.append(describe_rows(len(strip), buffers))
        found = Statistics._make(map(np.concatenate, zip(*strips, strict=True)))
        root = _root(found.std, eps)
        return PerRow(
            found.mean,
            found.std,
            *_conditions(found, root, n, eps),
            _lost_bits(found, root, n, dtype, eps),
            _marks(found, n, eps),
        )


def names_of(marks: int) -> tuple[str, ...]:
    """Return the names of one row's marks."""
    return tuple(name for name, bit in BITS.items() if marks & bit)


def working_dtype(dtype: Any) -> Any:
    """Return the type that layer norms of such data are computed in."""
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def title_of(method: str, dtype: Any) -> str:
    """Return what a method is called, for data of a dtype."""
    return TITLES[method].format(working=np.dtype(working_dtype(dtype)).name)


# ---- statistics ----


def describe_rows(rows: int, buffers: Buffers) -> Statistics:
    """Return the statistics of the first rows of ``buffers.x``."""
    x, deviations = buffers.x[:rows], buffers.deviations[:rows]
    deviations[:] = x
    mean = deviations.mean(axis=1)
    deviations -= mean[:, None]
    mean_lo = deviations.mean(axis=1)
    var = np.square(deviations, out=deviations).mean(axis=1) - mean_lo * mean_lo
    std = np.sqrt(np.maximum(var, 0.0))

    lowest, highest = (end.astype(np.float64) for end in (x.min(axis=1), x.max(axis=1)))
    total = x.sum(axis=1)
    products = buffers.products[: x.size].reshape(x.shape)
    squares = np.square(x, out=products).sum(axis=1)
    np.subtract(x, (total / x.dtype.type(x.shape[1]))[:, None], out=products)
    centered_squares = np.square(products, out=products).sum(axis=1)
    parts = welford(x, buffers)

    # Rounding of the mean leaves deviations in a row of one value: it has none.
    constant = lowest == highest
    spoilt = ~(np.isfinite(lowest) & np.isfinite(highest))
    if x.dtype == np.float64:
        largest = np.maximum(np.abs(lowest), np.abs(highest))
        extreme = ~((var > _TINY) & (largest < _HUGE)) & ~spoilt & ~constant
        hard = np.flatnonzero(extreme)
        if hard.size:
            mean[hard], mean_lo[hard], std[hard] = _scaled(x[hard], largest[hard])
    mean = np.where(spoilt, np.nan, np.where(constant, lowest, mean))
    mean_lo[constant] = std[constant] = 0.0
    std[spoilt] = np.nan
    return Statistics(mean, mean_lo, std, lowest, highest, total, squares, centered_squares, *parts)


def _scaled(x: Array, largest: Array) -> tuple[Array, Array, Array]:
    """Return mean, its rest and std of float64 rows of extreme size."""
    power = np.frexp(largest)[1]
    scaled = np.ldexp(x, -power[:, None])
    mean = scaled.mean(axis=1)
    centered = scaled - mean[:, None]
    mean_lo = centered.mean(axis=1)
    # The deviations may be as much smaller again.
    spread = np.frexp(np.abs(centered).max(axis=1))[1]
    small = np.ldexp(centered - mean_lo[:, None], -spread[:, None])
    std = np.ldexp(np.sqrt((small * small).mean(axis=1)), spread + power)
    return np.ldexp(mean, power), np.ldexp(mean_lo, power), std


class _Part(NamedTuple):
    """Mean and sum of squared deviations, each (parts, rows), of parts of so many elements."""

    mean: Array
    squares: Array
    elements: int

    def some(self, start: int, stop: int) -> _Part:
        """Return some of the parts."""
        return _Part(self.mean[start:stop], self.squares[start:stop], self.elements)


def welford(x: Array, buffers: Buffers) -> tuple[Array, Array]:
    """
    Return the mean and the sum of squared deviations of each row of `x`, in its own precision.

    Welford's update as parallel code applies it (Chan, Golub, LeVeque 1979): parts are merged in
    pairs, first of one element each, then of two, and so on.
    """
    # Columns become rows, so that each half is one contiguous piece however short the rows are.
    mean, squares = (each[: x.size].reshape(x.T.shape) for each in (buffers.means, buffers.squares))
    mean[:], squares[:] = x.T, 0
    parts, rest = _Part(mean, squares, 1), None
    while (width := len(parts.mean)) > 1:
        half = width // 2
        if width % 2:
            odd = parts.some(width - 1, width)
            rest = odd if rest is None else _merged(odd, rest)
        parts = _merged(parts.some(0, half), parts.some(half, 2 * half))
    if rest is not None:
        parts = _merged(parts, rest)
    return parts.mean[0].copy(), parts.squares[0].copy()


def _merged(a: _Part, b: _Part) -> _Part:
    """Return both parts as one, in the memory of `a`; that of `b` is overwritten."""
    kind, elements = a.mean.dtype.type, a.elements + b.elements
    apart = np.subtract(b.mean, a.mean, out=b.mean)
    a.squares[:] += b.squares
    between = np.square(apart, out=b.squares)
    between *= kind(a.elements * b.elements / elements)
    a.squares[:] += between
    apart *= kind(b.elements / elements)
    a.mean[:] += apart
    return a._replace(elements=elements)


# ---- condition numbers ----


def _root(std: Array, eps: float) -> Array:
    """Return ``sqrt(var + eps)``."""
    if eps == 0:
        # The square of a float64 std may underflow.
        return std
    # Or overflow.
    return np.hypot(std, np.sqrt(eps)) if (std > _HUGE).any() else np.sqrt(std * std + eps)


def _conditions(found: Statistics, root: Array, n: int, eps: float) -> tuple[Array, Array, Array]:
    """
    Return the condition numbers of y and of dx in x, and the share that eps has of ``var + eps``.

    How many times the relative error of y (of dx) is that of x, by norms of the row. For y it is
    ``rms(x) / std`` whatever eps, for dx ``rms(x) std / (var + eps)`` if g is orthogonal to 1 and
    xhat, as a random one is nearly; the angle between centered g and xhat, t, adds a factor of up
    to ``1 + 2 / sin t``. Rows of one or two elements have no such g: their own formulas are used.
    """
    ratio, offset = found.std / root, found.mean / found.std
    in_y = np.sqrt(1 + offset * offset)
    # std / root twice, not var / (var + eps): squares of float64 may overflow.
    in_dx = in_y * ratio * ratio
    in_dx[found.std == 0] = 0.0
    share = np.square(np.sqrt(eps) / root)
    if n == 1:
        # y is beta and dx is 0, whatever x.
        return np.zeros_like(in_y), np.zeros_like(in_y), share
    if n == 2:
        # y is +-d / sqrt(d^2 + eps), a sign but for eps; dx is in proportion to (d^2 + eps)**-1.5.
        return np.where(found.std == 0, 1.0, in_y) * share, 3 * in_dx, share
    return in_y, in_dx, share


# ---- bits lost ----


def _lost_bits(found: Statistics, root: Array, n: int, dtype: Any, eps: float) -> Array:
    """
    Return the bits of y lost on each row by each method: (methods, rows), float32.

    NaN where no layer norm has a result: a row that is not finite, or constant with eps 0.
    """
    form, working = format_of(dtype), working_dtype(dtype)
    exact_rstd = 1 / root
    # Not std * rstd: of float64 subnormals, rstd overflows.
    size = found.std / root
    size[(found.std == 0) & (eps > 0)] = 1.0
    # Half of the smallest float64 is 0.
    unit = np.maximum(np.maximum(size, 2.0**form.emin) * 2.0**-form.p, 5e-324)
    without = np.isnan(size)
    largest = max(found.highest.max(initial=0.0), -found.lowest.min(initial=0.0))
    ends_overflow = largest > 0.49 * format_of(working).largest
    methods = _methods(found, exact_rstd, n, eps)
    out = np.empty((len(TITLES), len(root)), np.float32)
    for lost, name in zip(out, TITLES, strict=True):
        mean, rstd = (each.astype(np.float64) for each in methods[name])
        shift = ((mean - found.mean) - found.mean_lo) * rstd / unit
        scale = (rstd - exact_rstd) * found.std / unit
        # 1/4: the elements' own roundings, each up to a half, and the last one.
        bits = 0.5 * np.log2(shift * shift + scale * scale + 0.25)
        # Beyond p bits nothing is left, and NaN is less than that.
        lost[:] = np.where(bits < form.p, np.maximum(bits, 0.0), form.p)
        if ends_overflow:
            # Deviations that overflow are infinite in y.
            for end in (found.highest, found.lowest):
                lost[~np.isfinite(end.astype(working) - mean.astype(working))] = form.p
        lost[without] = np.nan
    return out


def _methods(found: Statistics, rstd: Array, n: int, eps: float) -> dict[str, tuple[Array, Array]]:
    """Return the mean and the rstd of each row that each method computes, or keeps."""
    kind = found.total.dtype.type
    one, count, shift = kind(1), kind(n), kind(eps)
    mean = found.total / count
    var = found.centered_squares / count
    var_one_pass = found.squares / count - mean * mean
    saved = [v.astype(np.float32) for v in (found.mean + found.mean_lo, rstd)]
    half_mean, half_var, half_eps = (_to_half(v) for v in (mean, var, np.float32(eps)))
    # In float32, rounded after each operation: what float16 arithmetic returns, and faster.
    half_rstd = _to_half(np.float32(1) / _to_half(np.sqrt(_to_half(half_var + half_eps))))
    return {
        "two-pass": (mean, one / np.sqrt(var + shift)),
        "welford": (found.welford_mean, one / np.sqrt(found.welford_squares / count + shift)),
        "one-pass": (mean, one / np.sqrt(var_one_pass + shift)),
        "saved float32": (saved[0], saved[1]),
        "saved bfloat16": (
            saved[0].astype(ml_dtypes.bfloat16),
            saved[1].astype(ml_dtypes.bfloat16),
        ),
        "float16": (half_mean, half_rstd),
    }


def _to_half(v: Any) -> Any:
    # float64 by way of float32, as the statistics are held there.
    return v.astype(np.float32).astype(np.float16).astype(np.float32)


# ---- marks ----


def _marks(found: Statistics, n: int, eps: float) -> Array:
    """Return the marks of each row as bits of one uint16."""
    smallest, half = 2.0 ** format_of(found.total.dtype).emin, format_of(np.float16).largest
    std, mean = found.std, found.mean
    # Where NaN or infinity has spoilt a row, nothing else can be said of it.
    spoilt, constant = np.isnan(std), std == 0
    farthest = np.maximum(found.highest - mean, mean - found.lowest)
    where = {
        "not finite": spoilt,
        "undefined": constant & (eps == 0),
        "constant": constant,
        "var below eps": (std < np.sqrt(eps)) & ~constant,
        "dominating outlier": (farthest > std * np.sqrt(n / 2)) & (n >= _FEW) & ~constant,
        "sum overflows": ~np.isfinite(found.total) & ~spoilt,
        "squares overflow": ~np.isfinite(found.squares) & ~spoilt,
        "deviations overflow": ~np.isfinite(found.centered_squares) & ~spoilt,
        "squares underflow": (std < np.sqrt(smallest)) & ~constant,
        "float16 overflows": (np.abs(mean) > half) | (std > np.sqrt(half)),
    }
    marks = np.zeros(len(std), np.uint16)
    for name, rows in where.items():
        marks[rows] |= BITS[name]
    return marks
