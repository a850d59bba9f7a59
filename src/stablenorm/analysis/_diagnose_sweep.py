"""
What each row is described by, and the sweep over the rows in plain NumPy.

`stablenorm.kernels._sweep` is its fast copy: the sums that methods in use form are the same bit for
bit. They are formed as compiled code forms them: sixteen running sums, element i into sum i mod 16,
joined by halves (8, 4, 2, 1), and what is left over, n mod 16 elements, one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array

LANES = 16

# Of float64 rows: beyond, squares overflow or lose digits, and the row is described again, scaled.
# Everything of 32 and fewer bits lies within.
TINY, HUGE = 2.0**-400, 2.0**400


class Sweep(NamedTuple):
    """
    What is known of each row; all float64 of length rows.

    Exact, to float64: `mean + mean_lo`, the standard deviation `std`, the smallest and the largest
    element; NaN where a row is not finite. Then, rounded at every step to the precision that a
    method computes in: the sums of x, of x^2 and of (x - mean)^2; Welford's mean and sum.
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
    welford_m2: Array


def working_dtype(dtype: Any) -> Any:
    """Return what layer norms of such data are computed in: float32, or float64 for float64."""
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def sweep_rows(x: Array) -> Array:
    """Return, for `x` of shape (rows, n), the numbers that `described` takes: (10, rows)."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        mean = wide.mean(axis=1)
        centered = wide - mean[:, None]
        mean_lo = centered.mean(axis=1)
        var = (centered * centered).mean(axis=1) - mean_lo * mean_lo
        lowest = np.fmin.reduce(wide, axis=1, initial=np.inf)
        highest = np.fmax.reduce(wide, axis=1, initial=-np.inf)
        working = x.astype(working_dtype(x.dtype))
        total = lane_sum(working)
        squares = lane_sum(working * working)
        center = total / working.dtype.type(x.shape[1])
        deviations = working - center[:, None]
        centered_squares = lane_sum(deviations * deviations)
        means = lane_welford(working)
        numbers = (mean, mean_lo, var, lowest, highest, total, squares, centered_squares, *means)
        return np.stack([number.astype(np.float64) for number in numbers])


def lane_sum(v: Array) -> Array:
    """Return the sum of each row in the dtype of `v`, rounded at every step, in the order above."""
    rows, n = v.shape
    whole = n - n % LANES
    lanes = np.zeros((rows, LANES), v.dtype)
    for start in range(0, whole, LANES):
        lanes = lanes + v[:, start : start + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = lanes[:, 0]
    for col in range(whole, n):
        total = total + v[:, col]
    return total


def lane_welford(v: Array) -> tuple[Array, Array]:
    """Return Welford's mean, and sum of squared deviations, of each row, in the same order."""
    rows, n = v.shape
    kind = v.dtype.type
    whole = n - n % LANES
    mean, m2 = np.zeros((2, rows, LANES), v.dtype)
    for count, start in enumerate(range(0, whole, LANES), 1):
        column = v[:, start : start + LANES]
        delta = column - mean
        mean = mean + delta * (kind(1) / kind(count))
        m2 = m2 + delta * (column - mean)
    half_count = kind(whole // LANES) * kind(0.5)
    while mean.shape[1] > 1:
        half = mean.shape[1] // 2
        apart = mean[:, half:] - mean[:, :half]
        mean = mean[:, :half] + apart * kind(0.5)
        m2 = (m2[:, :half] + m2[:, half:]) + (apart * apart) * half_count
        half_count = half_count * kind(2)
    mean, m2 = mean[:, 0], m2[:, 0]
    for col in range(whole, n):
        delta = v[:, col] - mean
        mean = mean + delta * (kind(1) / kind(col + 1))
        m2 = m2 + delta * (v[:, col] - mean)
    return mean, m2


def described(numbers: Any, x: Array) -> Sweep:
    """Return the description of the rows of `x`, from what a sweep over it has returned."""
    mean, mean_lo, var, lowest, highest, *rest = numbers
    with np.errstate(all="ignore"):
        std = np.sqrt(np.maximum(var, 0.0))
        # A row of one value has no deviation at all, whatever rounding of its mean has left.
        constant = lowest == highest
        # Infinity shows in the ends, NaN, which those pass over, in the sums.
        spoilt = ~(np.isfinite(lowest) & np.isfinite(highest))
        if x.dtype == np.float64:
            largest = np.maximum(np.abs(lowest), np.abs(highest))
            extreme = ~((var > TINY) & (largest < HUGE)) & ~spoilt & ~constant
            hard = np.flatnonzero(extreme)
            if hard.size:
                mean, mean_lo = mean.copy(), mean_lo.copy()
                mean[hard], mean_lo[hard], std[hard] = _scaled(x[hard], largest[hard])
        spoilt |= ~np.isfinite(mean)
        std[constant] = 0.0
        flat = constant & ~spoilt
        mean = np.where(flat, lowest, np.where(spoilt, np.nan, mean))
        mean_lo = np.where(flat, 0.0, mean_lo)
        std[spoilt] = np.nan
    return Sweep(mean, mean_lo, std, lowest, highest, *rest)


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
