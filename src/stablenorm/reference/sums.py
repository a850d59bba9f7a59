"""
Sums over rows that are not rounded yet: their one representation.

A *partial sum* is an element of `PARTIAL`, ``high + low``, and differs from the sum over some rows by at most `error`: 0 if it
is exact, NaN if the error is unknown, as with rounding="fast", and infinite if only an exact sum can decide. Kernels write
partial sums of the rows that they are given; `merged` adds up those of several calls, as of chunks of a Dask array, and
counts each rounding; `rounded` rounds them once and tells which are *uncertified*: their errors leave open what they round
to. A sum that is not finite is uncertified, too, as it may have left the range of float64 only in between. Uncertified sums
are computed again as an `exact.Number`.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm.control import with_default_control
from stablenorm.records import Array
from stablenorm.reference.equations import round_to

_WORDS = "high", "low", "error"
PARTIAL = np.dtype([(name, "f8") for name in _WORDS])

# The last bits of the words of lesser sums may be below the smallest float64.
_TINY = 2.0**-900

# More than the roundings of the few additions that an error is made of.
_MORE = 1.0 + 2.0**-50

# More than what a sum of two words and an error takes from its result.
_OF_SUM = 2.0**-103


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``fl(a + b)`` and its exact error (Knuth)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def as_partial(high: Array, low: Any = 0.0, error: Any = 0.0) -> Array:
    """Return partial sums of these words; `low` and `error` are 0 where `high` is not finite."""
    total, finite = np.empty(high.shape, PARTIAL), np.isfinite(high)
    total["high"] = high
    total["low"], total["error"] = np.where(finite, low, 0.0), np.where(finite, error, 0.0)
    return total


@with_default_control
def merged(*parts: Array) -> Array:
    """Return the sums over the rows of all, arrays of PARTIAL or of exact numbers, element by element."""
    if parts[0].dtype == object:
        return functools.reduce(operator.add, parts)
    words: list[Sequence[Array]] = [[part[name] for name in _WORDS] for part in parts]
    return as_partial(*functools.reduce(_sum, words))


def _sum(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    """Return the words of a sum."""
    (high, low, error), (high_b, low_b, error_b) = a, b
    total, rest = two_sum(high, high_b)
    low, lost = two_sum(low, low_b)
    low, last = two_sum(low, rest)
    high, low = two_sum(total, low)
    # The low word of an infinite sum is NaN, until `as_partial` sees it.
    high = np.where(np.isfinite(total), high, total)
    return high, low, (error + error_b + np.abs(lost) + np.abs(last)) * _MORE


@with_default_control
def rounded(total: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return partial sums rounded once to `dtype`, and which of them are uncertified."""
    high, low, error = (total[name] for name in _WORDS)
    error = np.where(error > 0, error + _OF_SUM * np.abs(high), 0.0)
    # 0.0 - error: with -error an exact -0 would stay one.
    ends = (two_sum(high, low + e) for e in (0.0 - error, error))
    least, most = (round_to(first, dtype, rest) for first, rest in ends)
    bits, finite = f"u{dtype.itemsize}", np.isfinite(high)
    uncertified = (least.view(bits) != most.view(bits)) | np.isinf(error) | ~finite
    uncertified |= (np.abs(high) < _TINY) & (high != 0)
    # There is one NaN.
    least[~finite] = np.where(np.isnan(high), np.nan, high)[~finite]
    return least, uncertified
