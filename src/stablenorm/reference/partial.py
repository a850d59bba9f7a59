"""
Sums over the rows of parts of x, which callers merge and round once, at the end: as pairs with bounds, or exact.

A partial sum is ``high + low`` and differs from the exact sum by at most `error`: 0 if it is exact, NaN if the error is
unknown, as for rounding="fast". Merging two counts each rounding: digits that the result cannot hold go into its error. A
sum that is not finite may have left the range of float64 only in between: it is uncertified, and asked for as `ExactSum`.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from stablenorm.formats import format_of
from stablenorm.reference.doubledouble import Pair, two_sum
from stablenorm.reference.exact import Root, Row, integers_of, nearest, root_of
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


# ---- exact sums ----


@dataclasses.dataclass(frozen=True, slots=True)
class ExactSum:
    """
    A sum over rows: ``2**unit`` times `offset` plus each factor over the square root of its radicand.

    `terms` maps radicands to factors. Sums over different rows can be added.
    """

    unit: int
    offset: int
    terms: dict[int, int]

    @classmethod
    def of_numbers(cls, values: Array) -> Self:
        """Return the sum of float64 numbers, dbeta."""
        integers, unit = integers_of(values)
        return cls(unit, sum(integers), {})

    @classmethod
    def of_products(cls, dy: Array, x: Array, rows: Sequence[Row]) -> Self:
        """Return dgamma of one column of some rows."""
        (factors, exponent), (values, scale) = integers_of(dy), integers_of(x)
        shifts = [exponent + row.shift for row in rows]
        unit = min(shifts, default=0)
        # Rows of the same numbers have the same root.
        terms: dict[int, int] = {}
        for factor, value, row, shift in zip(factors, values, rows, shifts, strict=True):
            places = scale - row.scale
            integer = value << places if places >= 0 else value >> -places
            if term := factor * (row.n * integer - row.total) << shift - unit:
                terms[row.radicand] = terms.get(row.radicand, 0) + term
        return cls(unit, 0, terms)

    def __add__(self, other: "ExactSum | float") -> "ExactSum | float":
        if not isinstance(other, ExactSum):
            # `other` is infinite or NaN.
            return other
        unit, offset, terms = min(self.unit, other.unit), 0, dict[int, int]()
        for part in (self, other):
            places = part.unit - unit
            offset += part.offset << places
            for radicand, factor in part.terms.items():
                terms[radicand] = terms.get(radicand, 0) + (factor << places)
        return ExactSum(unit, offset, terms)

    __radd__ = __add__

    def rounded(self, dtype: np.dtype[Any], roots: dict[int, Root]) -> float:
        """Return the sum rounded to `dtype`; `roots` collects roots that other sums may share."""
        terms = []
        for radicand, factor in self.terms.items():
            if factor:
                roots[radicand] = root = roots.get(radicand) or root_of(radicand)
                terms.append((factor, root))
        return nearest(self.offset, terms, self.unit, format_of(dtype))


NOTHING: Any = ExactSum(0, 0, {})


def round_sum(total: ExactSum | float, dtype: np.dtype[Any], roots: dict[int, Root]) -> float:
    """Round a sum; infinite sums and NaN are floats. There is one NaN."""
    if isinstance(total, ExactSum):
        return total.rounded(dtype, roots)
    return math.nan if math.isnan(total) else float(total)
