"""
The methods that `diagnose` speaks of, computed: every operation rounded as they round it.

Sums are formed in the order of `_diagnose_sweep`. They are here so that predictions can be held
against what the methods return; nothing here is used to predict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_sweep import lane_sum, lane_welford, working_dtype
from stablenorm.analysis.families import format_of


def simulate(name: str, x: Array, eps: float) -> Array:
    """
    Return y of `x`, (rows, n), without gamma and beta, as the method `name` computes it.

    It is rounded to the dtype of `x` in the end. The saved statistics are correctly rounded, and
    y is what a backward would rebuild from them.
    """
    with np.errstate(all="ignore"):
        working = x.astype(working_dtype(x.dtype))
        mean, rstd = _STATISTICS[name](working, eps)
        center, scale = (v[:, None].astype(working.dtype) for v in (mean, rstd))
        return ((working - center) * scale).astype(x.dtype)


def measured_bits(y: Array, exact: Array, constant: Array) -> Array:
    """Return the bits of `y` lost on each row, against `exact`: what `lost_bits` predicts."""
    form = format_of(y.dtype)
    with np.errstate(all="ignore"):
        error = _rms(y.astype(np.float64) - exact)
        size = np.where(constant, 1.0, np.maximum(_rms(exact), 2.0**form.emin))
        # Half of the smallest float64 is none.
        bits = np.log2(error / np.maximum(2.0**-form.p * size, 5e-324))
    return np.where(bits < form.p, np.maximum(bits, 0.0), form.p)


def _rms(v: Array) -> Array:
    """Return the root mean square of each row; scaled, as squares of small errors underflow."""
    largest = np.abs(v).max(axis=1, keepdims=True)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale[:, 0] * np.sqrt(np.square(v / scale).mean(axis=1))


def _two_pass(x: Array, eps: float) -> tuple[Array, Array]:
    mean, var = _mean_var(x)
    return mean, x.dtype.type(1) / np.sqrt(var + x.dtype.type(eps))


def _mean_var(x: Array) -> tuple[Array, Array]:
    n = x.dtype.type(x.shape[1])
    mean = lane_sum(x) / n
    deviations = x - mean[:, None]
    return mean, lane_sum(deviations * deviations) / n


def _welford(x: Array, eps: float) -> tuple[Array, Array]:
    mean, m2 = lane_welford(x)
    var = m2 / x.dtype.type(x.shape[1])
    return mean, x.dtype.type(1) / np.sqrt(var + x.dtype.type(eps))


def _one_pass(x: Array, eps: float) -> tuple[Array, Array]:
    n = x.dtype.type(x.shape[1])
    mean = lane_sum(x) / n
    var = lane_sum(x * x) / n - mean * mean
    return mean, x.dtype.type(1) / np.sqrt(var + x.dtype.type(eps))


def _saved(dtype: Any) -> Callable[[Array, float], tuple[Array, Array]]:
    def statistics(x: Array, eps: float) -> tuple[Array, Array]:
        # Scaled to [1, 2): squares of float64 may overflow.
        power = np.frexp(np.abs(x).max(axis=1).astype(np.float64))[1][:, None]
        scaled = np.ldexp(x.astype(np.longdouble), -power)
        mean = scaled.mean(axis=1, keepdims=True)
        deviations = scaled - mean
        mean = mean + deviations.mean(axis=1, keepdims=True)
        var = np.square(scaled - mean).mean(axis=1, keepdims=True)
        rstd = 1 / np.sqrt(np.ldexp(var, 2 * power) + np.longdouble(eps))
        numbers = (np.ldexp(mean, power)[:, 0], rstd[:, 0])
        single = [number.astype(np.float32).astype(dtype) for number in numbers]
        return single[0], single[1]

    return statistics


def _half(x: Array, eps: float) -> tuple[Array, Array]:
    mean, var = (v.astype(np.float16) for v in _mean_var(x))
    return mean, np.float16(1) / np.sqrt(var + np.float16(eps))


_STATISTICS: dict[str, Callable[[Array, float], tuple[Array, Array]]] = {
    "two-pass": _two_pass,
    "welford": _welford,
    "one-pass": _one_pass,
    "saved float32": _saved(np.float32),
    "saved bfloat16": _saved(ml_dtypes.bfloat16),
    "float16": _half,
}
