"""
Sums over rows that are not rounded yet: their one representation, by two records.

A *partial sum* is an element of `PARTIAL`, ``high + low``, and differs from the sum over some rows by at most `error`: 0 if it
is exact, NaN if the error is unknown, as with rounding="fast", and infinite if only an exact sum can decide. Kernels write
partial sums of the rows that they are given; `merged` adds up those of several calls (chunks of a Dask array, rows of equal
masks, micro-batches), counting each rounding, and `rounded` rounds them once and tells which are *uncertified*: their errors
leave open what they round to. A sum that is not finite is uncertified, too, as it may have left the range of float64 only in
between.

An *exact sum*, `ExactSum`, is a sum of integers over square roots of integers. Uncertified sums are computed again as such,
one column at a time, merged by `+`, and rounded.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from stablenorm.control import with_default_control
from stablenorm.formats import format_of
from stablenorm.reference.equations import round_to
from stablenorm.reference.exact import Root, Row, integers_of, nearest, root_of
from stablenorm.types import Array

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
    """
    Return the sums over the rows of all, arrays of PARTIAL or of exact sums, element by element.

    They are added in their order. A sum that is not finite is as in float64.
    """
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
    # The sum is that of `high`, `rest` and these; two words have room for two.
    lower, lost = two_sum(lower, lowest)
    low, last = two_sum(rest, lower)
    error = (error + error_b + (np.abs(lost) + np.abs(last))) * _MORE
    high, low = two_sum(high, low)
    # The low word of an infinite sum is NaN, until `as_partial` sees it.
    return np.where(np.isfinite(total), high, total), low, error


@with_default_control
def rounded(total: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return partial sums rounded once to `dtype`, and which of them are uncertified."""
    finite = np.isfinite(total["high"])
    high, low, error = (np.where(finite, total[name], 0.0) for name in _WORDS)
    error = np.where(error > 0, error + _OF_SUM * np.abs(high), 0.0)
    # 0.0 - error: with -error an exact -0 would stay one.
    ends = (two_sum(high, low + e) for e in (0.0 - error, error))
    least, most = (round_to(first, dtype, rest) for first, rest in ends)
    bits = f"u{dtype.itemsize}"
    uncertified = (least.view(bits) != most.view(bits)) | np.isinf(error) | ~finite
    uncertified |= (np.abs(high) < _TINY) & (high != 0)
    least[~finite] = total["high"][~finite]
    # There is one NaN.
    least[np.isnan(least)] = np.nan
    return least, uncertified


# ---- exact sums ----


def split(values: Any) -> tuple[Array, Array]:
    """Return the finite values, with 0 for the others, and the infinities and NaN, with 0 for the finite ones."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.where(finite, 0.0, values)


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


@with_default_control
def decide(values: Array, exact: Iterable[tuple[Any, ExactSum]]) -> None:
    """Write exact sums, rounded, to their places among rounded ones."""
    roots = dict[int, Root]()
    for place, total in exact:
        values[place] = total.rounded(values.dtype, roots)
