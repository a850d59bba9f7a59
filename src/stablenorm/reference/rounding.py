"""
Round once: from an exact sum of two float64 to one of the four floating types.

The wide value is ``hi + lo``, ``|lo| <= ulp(hi)/2``. Rounding `hi` alone, or float64 to float32
and then to 16 bits, rounds twice, which is wrong near a midpoint of the narrow type. Rounding to
odd in between cures it: an inexact value goes to the neighbour whose last bit is set, which is
never a midpoint of a format at least two bits narrower (Boldo and Melquiond, IEEE Trans. Comput.
57 (2008) 462).
"""

from typing import Any

import numpy as np

from stablenorm.types import Array, bfloat16


def round_to(value: Array, dtype: np.dtype[Any]) -> Array:
    """Round float64 `value` once to `dtype`; returns `value` itself if that is float64."""
    if dtype == bfloat16:
        return _to_odd_float32(value).astype(dtype)
    # One rounding, in NumPy and in hardware: float64 -> float32 and float64 -> float16.
    return value.astype(dtype, copy=False)


def round_sum_to(hi: Array, lo: Array, dtype: np.dtype[Any]) -> Array:
    """Round ``hi + lo`` once to `dtype`; `hi` is the sum rounded to float64."""
    if dtype.type is np.float64:
        return hi
    # To odd first: where `hi` is inexact and even, its neighbour beyond `lo`.
    even = (hi.view(np.uint64) & np.uint64(1)) == 0
    inexact = (lo != 0) & np.isfinite(hi)
    odd = np.where(even & inexact, np.nextafter(hi, np.copysign(np.inf, lo)), hi)
    return round_to(odd, dtype)


def _to_odd_float32(value: Array) -> Array:
    """Round float64 `value` to float32, to odd: toward zero, then set the last bit if inexact."""
    nearest = value.astype(np.float32)
    inexact = (nearest != value) & ~np.isnan(value)
    # Toward zero: back by one where the nearest lies beyond the value (an infinity included:
    # its neighbour is the largest finite float32, which is odd, and rounds to bfloat16's inf).
    beyond = inexact & (np.abs(nearest) > np.abs(value))
    truncated = nearest.view(np.uint32) - beyond.astype(np.uint32)
    odd: Array = truncated | inexact.astype(np.uint32)
    return odd.view(np.float32)
