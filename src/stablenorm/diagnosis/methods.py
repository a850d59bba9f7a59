"""
Each row of x: its statistics, condition numbers, the bits lost by each method, its marks.

A method is its mean and its rstd. Its ``y_hat = (x - mean_hat) * rstd_hat`` then has two errors:
a shift, from the error of the mean, and a factor, from the error of rstd. The deviations of a row
sum to zero, so the RMS error over the row is exactly ``hypot((mean_hat - mean) rstd_hat, std
(rstd_hat - rstd))``. Rounding the elements one by one adds less than a bit. In RMS norm the mean is
0, and std stands for ``sqrt(mean(x^2))``.

The RMS decides, in the units of `stablenorm.diagnose`: the worst element is a draw from the tail.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import BFLOAT16, format_of
from stablenorm.records import Array


class PerRow(NamedTuple):
    """
    Numbers of every row, each an array whose last axis is the rows.

    Attributes
    ----------
    mean, std, condition_y : array
        Mean and standard deviation, NaN if a row is not finite; in an RMS norm 0 and the root mean square. Factor by
        which a relative error of x grows in y.
    lost : array
        Bits lost, (methods, rows), in the order of `Diagnosis.lost`.
    marks : array
        Whether a row has a mark, (marks, rows), in the order of `Diagnosis.marks`.
    """

    mean: Array
    std: Array
    condition_y: Array
    lost: Array
    marks: Array


class Statistics(NamedTuple):
    """Statistics of rows, arrays of length rows, for losses and marks; also n and eps."""

    # Float64; mean and std are NaN where a row is not finite.
    mean: Array
    mean_lo: Array
    std: Array
    # The means of x, x^2 and (x - mean)^2, rounded at every step in the dtype of the methods. In an
    # RMS norm the means of x are 0, and var_hat is the mean of x^2 held in float16.
    mean_hat: Array
    mean_square: Array
    var_hat: Array
    n: int
    eps: float


# The methods: name, description in a layer norm, description in an RMS norm, which has no two passes.
_METHODS = (
    ("two-pass", "two passes, the usual formula", ""),
    ("one-pass", "E[x^2] - E[x]^2", "mean(x^2), the usual formula"),
    ("saved float32", "mean and rstd saved as float32", "rstd saved as float32"),
    ("saved bfloat16", "mean and rstd saved as bfloat16", "rstd saved as bfloat16"),
    ("float16", "mean, var and eps held in float16", "x^2, its mean and eps held in float16"),
)
METHODS = {
    kind: {name: titles[i] for name, *titles in _METHODS if titles[i]}
    for i, kind in enumerate(("layer", "rms"))
}

# Marks of special rows: the name, the meaning, and the test of rows. The first two have no y.
_MARKS: tuple[tuple[str, str, Callable[[Statistics], Any]], ...] = (
    ("not finite", "they hold NaN or infinity: y is NaN", lambda s: np.isnan(s.std)),
    ("undefined", "their variance and eps are 0: y is 0/0, NaN", lambda s: s.std + s.eps == 0),
    ("constant", "all elements equal, in an RMS norm 0: y is beta", lambda s: s.std == 0),
    ("below eps", "eps decides the scale of y", lambda s: (s.std > 0) & (s.std < np.sqrt(s.eps))),
    ("overflow", "the sum of x or of x^2 overflows",
     lambda s: ~np.isfinite(s.mean_hat + s.mean_square)),
)  # fmt: skip
SPECIAL = {name: meaning for name, meaning, _ in _MARKS}


@np.errstate(all="ignore")
def measure_rows(x: Array, eps: float, kind: str) -> PerRow:
    """Measure the rows of `x`, (rows, n); bits lost are NaN where there is no y."""
    form = format_of(x.dtype)
    # The dtype that layer norms of such data are computed in.
    working = np.result_type(x, np.float32)
    stats = _describe(np.require(x, working, ("C", "A")), eps, kind == "layer")
    root = np.hypot(stats.std, np.sqrt(eps))
    # std / root twice, not var / (var + eps), nor std * rstd: float64 may overflow.
    size = stats.std / root
    in_y = np.hypot(1.0, stats.mean / stats.std)

    methods = _methods(stats, 1 / root)
    mean, rstd = np.array([methods[name] for name in METHODS[kind]], np.float64).swapaxes(0, 1)
    size = np.where((stats.std == 0) & (eps > 0), 1.0, size)
    # At least 5e-324: half of the smallest float64 would be 0.
    unit = np.maximum(np.maximum(size, 2.0**form.emin) * 2.0**-form.digits, 5e-324)
    shift = ((mean - stats.mean) - stats.mean_lo) * rstd / unit
    factor = (rstd - 1 / root) * stats.std / unit
    # 1/4 is for the rounding of the elements, each up to a half.
    bits = 0.5 * np.log2(shift * shift + factor * factor + 0.25)
    # At most p bits can be lost; NaN, too, counts as p.
    bits = np.where(bits < form.digits, np.maximum(bits, 0.0), form.digits)
    lost = np.where(np.isnan(size), np.nan, bits).astype(np.float32)

    marks = np.array([has(stats) for *_, has in _MARKS])
    # A row with NaN or infinity gets the first mark and no other.
    marks[1:, marks[0]] = False
    return PerRow(stats.mean, stats.std, in_y, lost, marks)


def _describe(x: Array, eps: float, is_layer: bool) -> Statistics:
    """Return the statistics of the rows of `x`, C-ordered float32 or float64."""
    # NumPy forms each sum as several running sums.
    n, mean_square = x.shape[1], np.vecdot(x, x) / x.shape[1]
    if is_layer:
        mean_hat = x.sum(axis=1) / n
        deviations = x - mean_hat[:, None]
        var_hat = np.vecdot(deviations, deviations) / n
    else:
        mean_hat = np.zeros_like(mean_square)
        var_hat = _to_half(np.square(x)).sum(axis=1, dtype=x.dtype) / n
    lowest, highest = (end.astype(np.float64) for end in (x.min(axis=1), x.max(axis=1)))
    # Scale to about 1, by a power of two: squares of float64 would overflow or underflow.
    power = np.frexp(np.maximum(highest, -lowest))[1]
    scale = np.ldexp(1.0, -np.clip(power, -1000, 1000))
    wide = x * scale[:, None]
    mean = is_layer * np.einsum("ij->i", wide) / n
    wide -= mean[:, None]
    mean_lo = is_layer * np.einsum("ij->i", wide) / n
    var = np.vecdot(wide, wide) / n - mean_lo * mean_lo
    mean, mean_lo, std = mean / scale, mean_lo / scale, np.sqrt(np.maximum(var, 0.0)) / scale
    # A row of one value has no deviations, but rounding of the mean makes some.
    constant = (lowest == highest) & (is_layer | (lowest == 0))
    mean[constant] = lowest[constant]
    mean_lo[constant] = std[constant] = 0.0
    spoilt = ~(np.isfinite(lowest) & np.isfinite(highest))
    mean[spoilt] = std[spoilt] = np.nan
    return Statistics(mean, mean_lo, std, mean_hat, mean_square, var_hat, n, eps)


def _methods(stats: Statistics, rstd: Array) -> dict[str, tuple[Array, Array]]:
    """Return the mean and rstd of the rows by each method."""
    mean, var = stats.mean_hat, stats.var_hat
    saved = np.array((stats.mean + stats.mean_lo, rstd)).astype(np.float32)
    half_mean, half_var, half_eps = (_to_half(v) for v in (mean, var, np.float32(stats.eps)))
    # float16 is emulated in float32, rounded after each operation: the same results, and faster.
    return {
        "two-pass": (mean, 1 / np.sqrt(var + stats.eps)),
        "one-pass": (mean, 1 / np.sqrt(stats.mean_square - mean * mean + stats.eps)),
        "saved float32": tuple(saved),
        "saved bfloat16": tuple(saved.astype(BFLOAT16.dtype)),
        "float16": (half_mean, _to_half(1 / _to_half(np.sqrt(_to_half(half_var + half_eps))))),
    }


def _to_half(v: Any) -> Any:
    """Round to float16 and return float32; float64 is rounded to float32 first, as statistics are."""
    return v.astype(np.float32).astype(np.float16).astype(np.float32)
