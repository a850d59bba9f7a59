"""
How many bits of y each method in common use loses on a row: closed forms of what a sweep found.

A method is its mean and its rstd. With those, ``y_hat = (x - mean_hat) * rstd_hat`` is off by a
shift, the error of the mean, and by a factor, the error of rstd. As the deviations of a row sum to
zero, the RMS error over the row is exactly ``hypot((mean_hat - mean) rstd_hat, std (rstd_hat -
rstd))``; what the elements are rounded by on their own comes on top, and is below one bit.

Bits lost: log2 of the RMS error of the row over ``u max(rms(y), smallest normal)``, u = 2**-p the
rounding unit of the data's p-bit dtype, between 0 and p. One correct rounding loses none; p means
that nothing of y is left. A constant row, whose y is 0, is measured against 1, the size that
normalized data has. The RMS and not the worst element: that one is a draw from the tail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_sweep import Sweep, working_dtype
from stablenorm.analysis.families import Format, format_of

# Beyond, the square of a std overflows.
_LARGE = 2.0**500


class Rows(NamedTuple):
    """What the predictions share: a sweep, the length of a row, the dtype, eps, the exact rstd."""

    sweep: Sweep
    n: int
    dtype: Any
    eps: float
    rstd: Array


class Method(NamedTuple):
    """
    A way to compute a layer norm, or to keep what its backward needs.

    `statistics` returns its mean and rstd of each row. "{working}" in `title` stands for float32,
    or float64 for such data.
    """

    name: str
    title: str
    statistics: Callable[[Rows], tuple[Array, Array]]


def _working(rows: Rows, *numbers: Array) -> list[Any]:
    kind = working_dtype(rows.dtype)
    return [number.astype(kind) for number in numbers] + [kind(rows.n), kind(rows.eps), kind(1)]


def _two_pass(rows: Rows) -> tuple[Array, Array]:
    sweep = rows.sweep
    total, squares, n, eps, one = _working(rows, sweep.total, sweep.centered_squares)
    return total / n, one / np.sqrt(squares / n + eps)


def _welford(rows: Rows) -> tuple[Array, Array]:
    sweep = rows.sweep
    mean, m2, n, eps, one = _working(rows, sweep.welford_mean, sweep.welford_m2)
    return mean, one / np.sqrt(m2 / n + eps)


def _one_pass(rows: Rows) -> tuple[Array, Array]:
    sweep = rows.sweep
    total, squares, n, eps, one = _working(rows, sweep.total, sweep.squares)
    mean = total / n
    return mean, one / np.sqrt((squares / n - mean * mean) + eps)


def _saved_single(rows: Rows) -> tuple[Array, Array]:
    mean = rows.sweep.mean + rows.sweep.mean_lo
    return mean.astype(np.float32), rows.rstd.astype(np.float32)


def _saved_bfloat16(rows: Rows) -> tuple[Array, Array]:
    mean, rstd = (v.astype(ml_dtypes.bfloat16) for v in _saved_single(rows))
    return mean.astype(np.float32), rstd.astype(np.float32)


def _half(rows: Rows) -> tuple[Array, Array]:
    sweep = rows.sweep
    total, squares, n, *_ = _working(rows, sweep.total, sweep.centered_squares)
    mean, var, eps = (_to_half(v) for v in (total / n, squares / n, np.float32(rows.eps)))
    # In float32, rounded after each operation: what float16 arithmetic returns, and faster.
    root = _to_half(np.sqrt(_to_half(var + eps)))
    return mean, _to_half(np.float32(1) / root)


def _to_half(v: Any) -> Any:
    # Float64 by way of float32, as the statistics are held there.
    return v.astype(np.float32).astype(np.float16).astype(np.float32)


_ALL = (
    Method("two-pass", "{working} two-pass", _two_pass),
    Method("welford", "{working} Welford", _welford),
    Method("one-pass", "{working} E[x^2] - E[x]^2", _one_pass),
    Method("saved float32", "mean and rstd saved as float32", _saved_single),
    Method("saved bfloat16", "mean and rstd saved as bfloat16", _saved_bfloat16),
    Method("float16", "mean, var and eps held in float16", _half),
)
METHODS = {method.name: method for method in _ALL}


def title_of(name: str, dtype: Any) -> str:
    """Say what a method is, for data of a dtype."""
    return METHODS[name].title.format(working=np.dtype(working_dtype(dtype)).name)


def root_of(sweep: Sweep, eps: float) -> Array:
    """Return ``sqrt(var + eps)``."""
    if eps == 0:
        return sweep.std
    with np.errstate(all="ignore"):
        if not (sweep.std >= _LARGE).any():
            return np.sqrt(sweep.std * sweep.std + eps)
        return np.hypot(sweep.std, np.sqrt(eps))


def lost_bits(sweep: Sweep, n: int, dtype: Any, eps: float) -> Array:
    """
    Return the bits of y lost on each row by each method: (methods, rows), float32.

    NaN where no layer norm has a result: a row that is not finite, or constant with eps 0.
    """
    dtype = np.dtype(dtype)
    form = _format_of(dtype)
    out = np.empty((len(METHODS), len(sweep.std)), np.float32)
    with np.errstate(all="ignore"):
        root = root_of(sweep, eps)
        rows = Rows(sweep, n, dtype, eps, 1 / root)
        # Not std * rstd: of float64 subnormals, rstd overflows.
        size = sweep.std / root
        unit = np.maximum(size, 2.0**form.emin) * 2.0**-form.p
        unit[sweep.std == 0] = 2.0**-form.p
        # Half of the smallest float64 is none.
        unit = np.maximum(unit, 5e-324)
        without = np.isnan(size)
        largest = max(sweep.highest.max(initial=0.0), -sweep.lowest.min(initial=0.0))
        ends_overflow = largest > 0.49 * _largest(working_dtype(dtype))
        for place, method in zip(out, METHODS.values(), strict=True):
            place[:] = _lost(rows, method, unit, form.p, ends_overflow)
        if without.any():
            out[:, without] = np.nan
    return out


def _lost(rows: Rows, method: Method, unit: Array, p: int, ends_overflow: bool) -> Array:
    sweep, working = rows.sweep, working_dtype(rows.dtype)
    mean, rstd = method.statistics(rows)
    wide_rstd = rstd.astype(np.float64)
    shift = ((mean.astype(np.float64) - sweep.mean) - sweep.mean_lo) * wide_rstd / unit
    scale = (wide_rstd - rows.rstd) * sweep.std / unit
    # 1/4: the elements' own roundings, each up to a half, and the last one.
    bits = 0.5 * np.log2(shift * shift + scale * scale + 0.25)
    # Beyond p bits nothing is left, and NaN is less than that.
    lost = np.where(bits < p, np.maximum(bits, 0.0), p)
    if ends_overflow:
        # Deviations that overflow are infinite in y.
        for end in (sweep.highest, sweep.lowest):
            lost[~np.isfinite(end.astype(working) - mean.astype(working))] = p
    return lost


@functools.cache
def _format_of(dtype: Any) -> Format:
    return format_of(dtype)


@functools.cache
def _largest(dtype: Any) -> float:
    return format_of(dtype).largest
