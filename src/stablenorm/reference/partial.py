"""
Partial sums over rows: what calls on parts of x hand on, so that the whole sum is rounded once, at the end.

A partial sum is ``high + low``, and differs from the exact one by at most `error`; an error of 0 says that it is exact,
NaN that it is unknown, as for rounding="fast". Merging two adds their words without a rounding that is not counted:
what the result cannot hold goes into its error. A sum that is not finite may have left the range of float64 only in
between: it is uncertified.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm.reference.doubledouble import Pair, two_sum
from stablenorm.types import Array

_WORDS = "high", "low", "error"
PARTIAL = np.dtype([(name, "f8") for name in _WORDS])

# The last bits of the words of lesser sums may be below the smallest float64.
_TINY = 2.0**-900

# More than the roundings of the few additions that an error is made of.
_MORE = 1.0 + 2.0**-50

# More than the 3 * 2**-106 that an addition of pairs takes from its result.
_OF_SUM = 2.0**-103


def as_partial(high: Array, low: Any, error: Any) -> Array:
    """Return partial sums of these words; `low` and `error` are 0 where `high` is not finite."""
    total, finite = np.empty(high.shape, PARTIAL), np.isfinite(high)
    total["high"] = high
    total["low"], total["error"] = np.where(finite, low, 0.0), np.where(finite, error, 0.0)
    return total


def merged(*parts: Array) -> Array:
    """
    Return the sums over the rows of all, arrays of PARTIAL or of exact sums, element by element.

    They are added in their order. A sum that is not finite is as in float64.
    """
    with np.errstate(all="ignore"):
        if parts[0].dtype == object:
            exact: Array = functools.reduce(operator.add, parts)
            return exact
        words: list[Sequence[Array]] = [[part[name] for name in _WORDS] for part in parts]
        return as_partial(*functools.reduce(_sum, words))


def _sum(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    """Return the words of a sum."""
    (high, low, error), (high_b, low_b, error_b) = a, b
    total, rest = two_sum(high, high_b)
    low, lower = two_sum(low, low_b)
    middle, lowest = two_sum(rest, low)
    high, rest = two_sum(total, middle)
    # The sum is that of `high`, `rest` and these; a pair has room for two words.
    lower, lost = two_sum(lower, lowest)
    low, last = two_sum(rest, lower)
    error = (error + error_b + (np.abs(lost) + np.abs(last))) * _MORE
    high, low = two_sum(high, low)
    # The low word of an infinite sum is NaN.
    finite = np.isfinite(total)
    return np.where(finite, high, total), np.where(finite, low, 0.0), np.where(finite, error, 0.0)


def rounded(total: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the sums rounded once to `dtype`, and which of them are uncertified."""
    with np.errstate(all="ignore"):
        finite = np.isfinite(total["high"])
        high, low, error = (np.where(finite, total[name], 0.0) for name in _WORDS)
        error = np.where(error > 0, error + _OF_SUM * np.abs(high), 0.0)
        value, zero = Pair(high, low), np.zeros_like(high)
        # 0.0 - error: with -error an exact -0 would stay one.
        least, most = ((value + Pair(e, zero)).round_to(dtype) for e in (0.0 - error, error))
        bits = f"u{dtype.itemsize}"
        uncertified = (least.view(bits) != most.view(bits)) | np.isinf(error) | ~finite
        uncertified |= (np.abs(high) < _TINY) & (high != 0)
        least[~finite] = total["high"][~finite]
        # There is one NaN.
        least[np.isnan(least)] = np.nan
        return least, uncertified
