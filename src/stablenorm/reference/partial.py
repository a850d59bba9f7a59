"""
Sums over some of the rows: what calls on parts of x hand on, so that it is rounded once, at the end.

Such a sum is ``(high + low) * 2**exponent``, and differs from the exact one by at most
``error * 2**exponent``; an error of 0 says that it is exact. Merging two adds their words without a rounding
that is not counted: what the result cannot hold goes into its error.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm.reference.doubledouble import _NOTHING, Wide, two_sum
from stablenorm.types import Array

# Four words of eight bytes, with no room between. An error of NaN is an unknown one, of
# rounding="fast".
_WORDS = "high", "low", "error"
PARTIAL = np.dtype([*((name, "f8") for name in _WORDS), ("exponent", "i8")])

# What a shift takes from three words at most: half of the smallest float64 of each.
_LOST = 2.0**-1073

# More than the roundings of the few additions that an error is made of.
_MORE = 1.0 + 2.0**-50

# More than the 3 * 2**-106 that an addition of pairs takes from its result.
_OF_SUM = 2.0**-103


def as_partial(v: Any) -> Array:
    """Return float64 or `Wide` numbers as partial sums, of unknown errors."""
    v = v if isinstance(v, Wide) else Wide(v, np.zeros_like(v))
    return _made(v.hi, v.lo, np.nan, v.exponent)


def merged(*parts: Array) -> Array:
    """
    Return the sums over the rows of all, arrays of PARTIAL or of exact sums, element by element.

    They are added in their order. What is not finite is as in a sum of float64.
    """
    if parts[0].dtype == object:
        exact: Array = functools.reduce(operator.add, parts)
        return exact
    with np.errstate(all="ignore"):
        if not any(part["exponent"].any() for part in parts):
            each: list[Sequence[Array]] = [[part[name] for name in _WORDS] for part in parts]
            high, low, error = functools.reduce(_sum, each)
            # Else it is past the range of float64, perhaps only in between.
            if np.isfinite([high, low]).all() and not np.isinf(error).any():
                return _made(high, low, error, 0)
        return functools.reduce(_scaled_sum, parts)


def _scaled_sum(a: Array, b: Array) -> Array:
    exponent = np.maximum(_size(a).magnitude(), _size(b).magnitude())
    high, low, error = _sum(_scaled(a, exponent), _scaled(b, exponent))
    return _made(high, low, error, exponent)


def _sum(a: Sequence[Array], b: Sequence[Array]) -> Sequence[Array]:
    """Return the words of a sum, given those of two that are carried with one exponent."""
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
    # Of an infinite sum, what is left over is NaN.
    return np.where(np.isfinite(total), high, total), low, error


def rounded(total: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """
    Return the sums rounded once to `dtype`, and where their errors leave it open to what.

    An error of 0 or NaN leaves nothing open.
    """
    with np.errstate(all="ignore"):
        finite, some = np.isfinite(total["high"]), total["exponent"].any()
        exponent = total["exponent"].astype(np.int32) if some else 0
        high, low, error = (np.where(finite, total[name], 0.0) for name in _WORDS)
        error = np.where(error > 0, error + _OF_SUM * np.abs(high), 0.0)
        value = Wide(high, low, exponent)
        values, _, undecided = value.round_within(Wide(error, error, exponent), dtype)
        values[~finite] = total["high"][~finite]
        # There is one NaN.
        values[np.isnan(values)] = np.nan
        # Of an infinite error both ends are NaN.
        return values, undecided | np.isinf(error)


def _size(total: Array) -> Wide:
    """Return the larger of each sum and its error."""
    size = np.fmax(np.abs(total["high"]), total["error"])
    return Wide(size, size, total["exponent"])


def _scaled(total: Array, exponent: Array) -> tuple[Array, Array, Array]:
    """Return the words, carried with `exponent`; what that takes from them goes into the error."""
    shift = (total["exponent"] - exponent).astype(np.int32)
    words = [total[name] for name in _WORDS]
    high, low, error = scaled = [np.ldexp(word, shift) for word in words]
    lost = np.not_equal(np.ldexp(scaled, -shift), words).any(axis=0)
    return high, low, error + np.where(lost, _LOST, 0.0)


def _made(high: Array, low: Array, error: Any, exponent: Any) -> Array:
    total, finite = np.empty(high.shape, PARTIAL), np.isfinite(high)
    # Of zeros, it may be far below all others.
    exponent = np.where(np.asarray(exponent) > _NOTHING // 2, exponent, 0)
    total["high"] = high
    for name, word in (("low", low), ("error", error), ("exponent", exponent)):
        total[name] = np.where(finite, word, 0)
    return total
