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
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from stablenorm.formats import format_of
from stablenorm.reference.doubledouble import Pair, round_to, two_sum
from stablenorm.reference.exact import Root, Row, integers_of, nearest, root_of, split
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
        least, most = (round_to(value + Pair(e, zero), dtype) for e in (0.0 - error, error))
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
    A sum over rows: ``2**unit`` times the sum of each factor over the square root of its radicand.

    `terms` maps radicands to factors. `extended` is 0, or what infinities and NaN add up to. Sums over different rows can
    be added.
    """

    unit: int
    terms: dict[int, int]
    extended: float = 0.0

    @classmethod
    def of_numbers(cls, values: Array) -> Self:
        """Return the sum of float64 numbers, dbeta."""
        finite, extended = split(values)
        integers, unit = integers_of(finite)
        return cls(unit, {1: sum(integers)}, float(extended.sum()))

    @classmethod
    def of_products(cls, dy: Array, x: Array, rows: Sequence[Row]) -> Self:
        """Return dgamma of one column of some rows."""
        finite, odd = split(dy)
        (factors, exponent), (values, scale) = integers_of(finite), integers_of(x)
        shifts = [exponent + row.shift for row in rows]
        unit, extended = min(shifts, default=0), 0.0
        # Rows of the same numbers have the same root.
        terms: dict[int, int] = {}
        every = zip(factors, values, rows, shifts, odd.tolist(), strict=True)
        for factor, value, row, shift, infinite in every:
            places = scale - row.scale
            integer = value << places if places >= 0 else value >> -places
            centered = row.n * integer - row.total
            if infinite:
                extended += infinite * ((centered > 0) - (centered < 0))
            elif term := factor * centered << shift - unit:
                terms[row.radicand] = terms.get(row.radicand, 0) + term
        return cls(unit, terms, extended)

    def __add__(self, other: "ExactSum") -> "ExactSum":
        unit, terms = min(self.unit, other.unit), dict[int, int]()
        for part in (self, other):
            for radicand, factor in part.terms.items():
                terms[radicand] = terms.get(radicand, 0) + (factor << part.unit - unit)
        return ExactSum(unit, terms, self.extended + other.extended)

    def rounded(self, dtype: np.dtype[Any], roots: dict[int, Root]) -> float:
        """Return the sum rounded to `dtype`; `roots` collects roots that other sums may share."""
        if self.extended:
            # There is one NaN.
            return math.nan if math.isnan(self.extended) else self.extended
        terms = []
        for radicand, factor in self.terms.items():
            if factor:
                roots[radicand] = root = roots.get(radicand) or root_of(radicand)
                terms.append((factor, root))
        return nearest(terms, self.unit, format_of(dtype))


NOTHING: Any = ExactSum(0, {})


def decided(values: Array, exact: Iterable[tuple[Any, ExactSum]]) -> Array:
    """Return rounded sums, but at some places exact ones, rounded."""
    result, roots = values.copy(), dict[int, Root]()
    for place, total in exact:
        result[place] = total.rounded(values.dtype, roots)
    return result


def with_exact(values: Array, exact: Array) -> Array:
    """Return rounded sums, but those that have an exact sum, not 0, by that."""
    return decided(values, ((place, exact[place]) for place in zip(*exact.nonzero(), strict=True)))
