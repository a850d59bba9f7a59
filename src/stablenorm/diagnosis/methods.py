"""
What is known of each row of x: statistics, condition numbers, bits lost by each method, marks.

A method is its mean and its rstd. With those, ``y_hat = (x - mean_hat) * rstd_hat`` has two errors:
a shift, from the error of the mean, and a factor, from the error of rstd. The deviations of a row
sum to zero, so the RMS error over the row is exactly ``hypot((mean_hat - mean) rstd_hat, std
(rstd_hat - rstd))``. Rounding the elements one by one adds less than a bit. In RMS norm the mean is 0,
and std stands for ``sqrt(mean(x^2))``.

Bits lost are log2 of that, in rounding errors of y: see `stablenorm.diagnose`. RMS and not the worst
element, which is a draw from the tail.
"""

from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format, format_of
from stablenorm.types import Array

# The methods for a layer norm and, where there is one, for an RMS norm. "{working}" stands for the
# dtype that they compute in: float32, or float64 for float64.
_TITLES = {
    "two-pass": ("{working} two-pass",),
    "one-pass": ("{working} E[x^2] - E[x]^2", "{working} mean(x^2)"),
    "saved float32": ("mean and rstd saved as float32", "rstd saved as float32"),
    "saved bfloat16": ("mean and rstd saved as bfloat16", "rstd saved as bfloat16"),
    "float16": ("mean, var and eps held in float16", "x^2, its mean and eps held in float16"),
}
_KINDS = "layer", "rms"
METHODS = {
    kind: {name: titles[i] for name, titles in _TITLES.items() if len(titles) > i}
    for i, kind in enumerate(_KINDS)
}

# Marks of special rows, and what they mean.
_MARKS = {
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

_RMS_MARKS = {
    "not finite": _MARKS["not finite"],
    "undefined": "zero, and eps is 0: y is 0/0, NaN",
    "zero": "all elements zero: y is beta",
    "mean(x^2) below eps": "eps decides the scale of y",
    "dominating outlier": "one element has more than half of the sum of x^2",
    "squares overflow": _MARKS["squares overflow"],
    "squares underflow": "mean(x^2) is below the normal numbers of {working}",
    "float16 squares overflow": "the square of an element is beyond the range of float16",
}
SPECIAL = {"layer": _MARKS, "rms": _RMS_MARKS}

# In a row of fewer elements, one has most of the variance for no special reason.
_FEW = 8


class PerRow(NamedTuple):
    """
    Numbers of every row, each an array whose last axis is the rows.

    Attributes
    ----------
    mean, std, condition_y, condition_dx : array
        As in `Row`.
    lost : array
        Bits lost, (methods, rows), in the order of `Diagnosis.methods`.
    marks : array
        Whether a row has a mark, (marks, rows), in the order of `Summary.marks`.
    """

    mean: Array
    std: Array
    condition_y: Array
    condition_dx: Array
    lost: Array
    marks: Array


class Statistics(NamedTuple):
    """
    What each row is described by; arrays of length rows.

    Exact, to float64: `mean + mean_lo`, the standard deviation `std`, the smallest and the largest
    element; mean and std are NaN where a row is not finite. Then in the dtype that methods compute
    in, rounded at every step: the sums of x, of x^2 and of (x - mean)^2. Of RMS norm the mean and the sum
    of x are 0, and the last is the sum of x^2 held in float16.
    """

    mean: Array
    mean_lo: Array
    std: Array
    lowest: Array
    highest: Array
    total: Array
    squares: Array
    centered_squares: Array


def working_format(dtype: np.dtype[Any]) -> Format:
    """Return the format that layer norms of such data are computed in."""
    return FLOAT64 if dtype == FLOAT64.dtype else FLOAT32


def measure_rows(x: Any, dtype: np.dtype[Any], eps: float, kind: str = "layer") -> PerRow:
    """Return what is known of the rows of `x`, (rows, n), as if they were of `dtype`."""
    with np.errstate(all="ignore"):
        # Numbers too large for a narrower dtype become infinite, and are reported as such.
        narrowed = x.astype(dtype, copy=False)
        found = describe_rows(np.require(narrowed, working_format(dtype).dtype, ("C", "A")), kind)
        root = np.hypot(found.std, np.sqrt(eps))
        # std / root twice, not var / (var + eps): squares of float64 may overflow.
        ratio = found.std / root
        in_y = np.hypot(1.0, found.mean / found.std)
        in_dx = np.where(found.std == 0, 0.0, in_y * ratio * ratio)
        lost = _lost_bits(found, root, x.shape[1], format_of(dtype), eps, kind)
        marks = _marks(found, x.shape[1], eps, kind)
        return PerRow(found.mean, found.std, in_y, in_dx, lost, marks)


def describe_rows(x: Array, norm: str = "layer") -> Statistics:
    """Return the statistics of the rows of `x`, C-ordered float32 or float64."""
    n, kind, is_layer = x.shape[1], x.dtype.type, norm == "layer"
    # All are formed as several running sums.
    total, squares = x.sum(axis=1), np.vecdot(x, x)
    if is_layer:
        deviations = x - (total / kind(n))[:, None]
        centered_squares = np.vecdot(deviations, deviations)
    else:
        total = np.zeros_like(total)
        centered_squares = _to_half(np.square(x)).sum(axis=1, dtype=kind)
    lowest, highest = (end.astype(np.float64) for end in (x.min(axis=1), x.max(axis=1)))
    scale = np.ones(len(x))
    if kind is np.float64:
        # To about 1, by a power of two: squares of float64 would overflow or underflow.
        power = np.frexp(np.maximum(highest, -lowest))[1]
        scale = np.ldexp(1.0, -np.clip(power, -1000, 1000))
    wide = x.astype(np.float64) if kind is np.float32 else x * scale[:, None]
    mean = is_layer * np.einsum("ij->i", wide) / n
    wide -= mean[:, None]
    mean_lo = is_layer * np.einsum("ij->i", wide) / n
    var = np.vecdot(wide, wide) / n - mean_lo * mean_lo
    mean, mean_lo, std = mean / scale, mean_lo / scale, np.sqrt(np.maximum(var, 0.0)) / scale
    # Rounding of the mean leaves deviations in a row of one value: it has none.
    constant = (lowest == highest) & (is_layer | (lowest == 0))
    mean[constant] = lowest[constant]
    mean_lo[constant] = std[constant] = 0.0
    spoilt = ~(np.isfinite(lowest) & np.isfinite(highest))
    mean[spoilt] = std[spoilt] = np.nan
    return Statistics(mean, mean_lo, std, lowest, highest, total, squares, centered_squares)


def _lost_bits(
    found: Statistics, root: Array, n: int, form: Format, eps: float, kind: str
) -> Array:
    """
    Return the bits of y lost on each row by each method: (methods, rows), float32.

    NaN where no layer norm has a result: a row that is not finite, or constant with eps 0.
    """
    p, exact_rstd = form.digits, 1 / root
    # std / root, since std * rstd overflows for float64 subnormals.
    size = found.std / root
    size[(found.std == 0) & (eps > 0)] = 1.0
    # Half of the smallest float64 is 0.
    unit = np.maximum(np.maximum(size, 2.0**form.emin) * 2.0**-p, 5e-324)
    # RMS norm has no two passes.
    methods = _methods(found, exact_rstd, n, eps)[-len(METHODS[kind]) :]
    out = np.empty((len(methods), len(root)), np.float32)
    for lost, (mean, rstd) in zip(out, methods, strict=True):
        shift = ((mean - found.mean) - found.mean_lo) * rstd / unit
        factor = (rstd - exact_rstd) * found.std / unit
        # 1/4: the elements' own roundings, each up to a half, and the last one.
        bits = 0.5 * np.log2(shift * shift + factor * factor + 0.25)
        # Beyond p bits nothing is left, and NaN is less than that.
        lost[:] = np.where(bits < p, np.maximum(bits, 0.0), p)
        lost[np.isnan(size)] = np.nan
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
        (mean, one / np.sqrt(var_one_pass + shift)),
        saved,
        saved.astype(BFLOAT16.dtype),
        (half_mean, half_rstd),
    ]
    return [(mean.astype(np.float64), rstd.astype(np.float64)) for mean, rstd in pairs]


def _to_half(v: Any) -> Any:
    # float64 by way of float32, as the statistics are held there.
    return v.astype(np.float32).astype(np.float16).astype(np.float32)


def _marks(found: Statistics, n: int, eps: float, kind: str) -> Array:
    """Return whether each row has each mark: (marks, rows)."""
    smallest, half = 2.0 ** format_of(found.total.dtype).emin, FLOAT16.largest
    std, mean = found.std, found.mean
    # NaN or infinity spoils a row: it gets no other mark.
    spoilt, constant = np.isnan(std), std == 0
    farthest = np.maximum(found.highest - mean, mean - found.lowest)
    has = {
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
    has |= {
        "zero": constant,
        "mean(x^2) below eps": has["var below eps"],
        "float16 squares overflow": np.isinf(_to_half(np.square(farthest))) & ~spoilt,
    }
    return np.array([has[name] for name in SPECIAL[kind]])
