"""
What is known of each row of x: statistics, condition numbers, bits lost by each method, marks.

A method is its mean and its rstd. With those, ``y_hat = (x - mean_hat) * rstd_hat`` has two errors:
a shift, from the error of the mean, and a factor, from the error of rstd. The deviations of a row
sum to zero, so the RMS error over the row is exactly ``hypot((mean_hat - mean) rstd_hat, std
(rstd_hat - rstd))``. Rounding the elements one by one adds less than a bit.

Bits lost are log2 of that, in rounding errors of y: see `stablenorm.diagnose`. RMS and not the worst
element, which is a draw from the tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, format_of
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

# Elements of a part of Welford's: enough for vector instructions, few enough for a running sum.
PART = 64

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
    element; mean and std are NaN where a row is not finite. Then in the dtype that methods compute
    in, rounded at every step: the sums of x, of x^2 and of (x - mean)^2, and Welford's mean and sum
    of squared deviations.
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


def measure_rows(x: Any, dtype: np.dtype[Any], eps: float) -> PerRow:
    """Return what is known of the rows of `x`, (rows, n), as if they were of `dtype`."""
    with np.errstate(all="ignore"):
        # What is too large for a narrower dtype becomes infinite, and is reported as such.
        rows = np.ascontiguousarray(x.astype(dtype, copy=False), working_format(dtype).dtype)
        found, n = describe_rows(rows), x.shape[1]
        root = _root(found.std, eps)
        return PerRow(
            found.mean,
            found.std,
            *_conditions(found, root, n, eps),
            _lost_bits(found, root, n, format_of(dtype), eps),
            _marks(found, n, eps),
        )


def names_of(marks: int) -> tuple[str, ...]:
    """Return the names of one row's marks."""
    return tuple(name for name, bit in BITS.items() if marks & bit)


def working_format(dtype: np.dtype[Any]) -> Format:
    """Return the format that layer norms of such data are computed in."""
    return FLOAT64 if dtype == FLOAT64.dtype else FLOAT32


def title_of(method: str, dtype: np.dtype[Any]) -> str:
    """Return what a method is called, for data of a dtype."""
    return TITLES[method].format(working=working_format(dtype).dtype.name)


# ---- statistics ----


def describe_rows(x: Array) -> Statistics:
    """Return the statistics of the rows of `x`, C-ordered float32 or float64."""
    working, wide = np.empty((5, len(x)), x.dtype), np.empty((3, len(x)))
    _sums_of(x.dtype)(x, working, wide)
    mean, mean_lo, var = wide
    var -= mean_lo * mean_lo
    std = np.sqrt(np.maximum(var, 0.0))
    lowest, highest = (end.astype(np.float64) for end in (x.min(axis=1), x.max(axis=1)))
    # Rounding of the mean leaves deviations in a row of one value: it has none.
    constant = lowest == highest
    spoilt = ~(np.isfinite(lowest) & np.isfinite(highest))
    if x.dtype == np.float64:
        largest = np.maximum(np.abs(lowest), np.abs(highest))
        extreme = ~((var > _TINY) & (largest < _HUGE)) & ~spoilt & ~constant
        hard = np.flatnonzero(extreme)
        if hard.size:
            mean[hard], mean_lo[hard], std[hard] = _scaled(x[hard], largest[hard])
    mean[constant] = lowest[constant]
    mean_lo[constant] = std[constant] = 0.0
    mean[spoilt] = std[spoilt] = np.nan
    return Statistics(mean, mean_lo, std, lowest, highest, *working)


@functools.cache
def _sums_of(dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], None]:
    """Return `sum_rows`, compiled if Numba is there."""
    try:
        from stablenorm.diagnosis.compiled import compiled_sums  # noqa: PLC0415

        return compiled_sums(dtype)
    except Exception:  # noqa: BLE001  # a broken Numba raises whatever it likes
        return sum_rows


def sum_rows(x: Array, working: Array, wide: Array) -> None:
    """
    Write the sums over each row of `x`, in an order that is left to NumPy or the compiler.

    `working`, of the dtype of x, gets the last five of `Statistics`; `wide`, float64, gets the
    mean, and the means of ``x - mean`` and of its square.
    """
    n, kind = x.shape[1], x.dtype.type
    total, squares, centered_squares, center, spread = working
    x.sum(axis=1, out=total)
    np.square(x).sum(axis=1, out=squares)
    np.square(x - (total / kind(n))[:, None]).sum(axis=1, out=centered_squares)
    x.mean(axis=1, dtype=np.float64, out=wide[0])
    deviations = x - wide[0][:, None]
    deviations.mean(axis=1, out=wide[1])
    np.square(deviations, out=deviations).mean(axis=1, out=wide[2])
    # Welford's update for parts of a row (Chan, Golub, LeVeque 1979).
    for start in range(0, n, PART):
        part = x[:, start : start + PART]
        size = part.shape[1]
        mean = part.mean(axis=1)
        squares_of_part = np.square(part - mean[:, None]).sum(axis=1)
        if start == 0:
            center[:], spread[:] = mean, squares_of_part
            continue
        apart, both = mean - center, start + size
        center += apart * kind(size / both)
        spread += squares_of_part + apart * apart * kind(start * size / both)


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


def _lost_bits(found: Statistics, root: Array, n: int, form: Format, eps: float) -> Array:
    """
    Return the bits of y lost on each row by each method: (methods, rows), float32.

    NaN where no layer norm has a result: a row that is not finite, or constant with eps 0.
    """
    working, p = working_format(form.dtype), form.digits
    exact_rstd = 1 / root
    # Not std * rstd: of float64 subnormals, rstd overflows.
    size = found.std / root
    size[(found.std == 0) & (eps > 0)] = 1.0
    # Half of the smallest float64 is 0.
    unit = np.maximum(np.maximum(size, 2.0**form.emin) * 2.0**-p, 5e-324)
    without = np.isnan(size)
    # Deviations of these may overflow; then they are infinite in y.
    long = np.flatnonzero(np.maximum(found.highest, -found.lowest) > 0.49 * working.largest)
    out = np.empty((len(TITLES), len(root)), np.float32)
    for lost, (mean, rstd) in zip(out, _methods(found, exact_rstd, n, eps), strict=True):
        shift = ((mean - found.mean) - found.mean_lo) * rstd / unit
        scale = (rstd - exact_rstd) * found.std / unit
        # 1/4: the elements' own roundings, each up to a half, and the last one.
        bits = 0.5 * np.log2(shift * shift + scale * scale + 0.25)
        # Beyond p bits nothing is left, and NaN is less than that.
        lost[:] = np.where(bits < p, np.maximum(bits, 0.0), p)
        for end in (found.highest, found.lowest) if long.size else ():
            kind = working.dtype
            deviation = end[long].astype(kind) - mean[long].astype(kind)
            lost[long[~np.isfinite(deviation)]] = p
        lost[without] = np.nan
    return out


def _methods(found: Statistics, rstd: Array, n: int, eps: float) -> list[tuple[Array, Array]]:
    """Return the mean and rstd of each row that each method has, in float64; as in `TITLES`."""
    kind = found.total.dtype.type
    one, count, shift = kind(1), kind(n), kind(eps)
    mean = found.total / count
    var = found.centered_squares / count
    var_one_pass = found.squares / count - mean * mean
    saved = np.array((found.mean + found.mean_lo, rstd)).astype(np.float32)
    half_mean, half_var, half_eps = (_to_half(v) for v in (mean, var, np.float32(eps)))
    # In float32, rounded after each operation: what float16 arithmetic returns, and faster.
    half_rstd = _to_half(np.float32(1) / _to_half(np.sqrt(_to_half(half_var + half_eps))))
    pairs: list[Any] = [
        (mean, one / np.sqrt(var + shift)),
        (found.welford_mean, one / np.sqrt(found.welford_squares / count + shift)),
        (mean, one / np.sqrt(var_one_pass + shift)),
        saved,
        saved.astype(BFLOAT16.dtype),
        (half_mean, half_rstd),
    ]
    return [(mean.astype(np.float64), rstd.astype(np.float64)) for mean, rstd in pairs]


def _to_half(v: Any) -> Any:
    # float64 by way of float32, as the statistics are held there.
    return v.astype(np.float32).astype(np.float16).astype(np.float32)


# ---- marks ----


def _marks(found: Statistics, n: int, eps: float) -> Array:
    """Return the marks of each row as bits of one uint16."""
    smallest, half = 2.0 ** format_of(found.total.dtype).emin, FLOAT16.largest
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
