"""
Double-double numbers, ``high + low``, elementwise on arrays: about 106 significant bits.

Float64 itself cannot round the statistics and gradients of float64 data correctly. `Pair` has just the operators that
the equations of `reference` use, so that these are written once for float64 and for `Pair`. Pairs have the range of
float64: `blocks.out_of_range` finds the rows that could leave it.

Error-free sums and products are those of Dekker (1971) and Knuth; the operations on pairs and
their bounds, with u = 2**-53 (addition 3 u**2, product 5 u**2 relative), follow Joldes, Muller
and Popescu, ACM TOMS 44 (2017) 15.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from stablenorm.control import with_default_control
from stablenorm.types import Array, bfloat16

# Dekker's constant, 2**27 + 1.
_SPLITTER = 134217729.0


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``fl(a + b)`` and its exact error."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def _fast_two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``fl(a + b)`` and its exact error, given ``|a| >= |b|`` or ``a == 0``."""
    total = a + b
    return total, b - (total - a)


def _split(a: Array) -> tuple[Array, Array]:
    """Split `a` into two halves of at most 26 bits; exact below 2**996."""
    scaled = _SPLITTER * a
    head = scaled - (scaled - a)
    return head, a - head


def two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``fl(a * b)`` and its exact error, barring underflow. NumPy has no FMA ufunc."""
    product = a * b
    a_head, a_tail = _split(a)
    b_head, b_tail = _split(b)
    error = ((a_head * b_head - product) + a_head * b_tail + a_tail * b_head) + a_tail * b_tail
    return product, error


class Pair:
    """``high + low``, elementwise; immutable by convention."""

    __slots__ = ("high", "low")

    # An ndarray on the left must leave the operation to us.
    __array_ufunc__ = None

    def __init__(self, high: Array, low: Array) -> None:
        self.high, self.low = high, low

    @classmethod
    def exactly(cls, value: Array | float) -> Pair:
        """Lift float64 `value`, exactly."""
        value = np.asarray(value, dtype=np.float64)
        return cls(value, np.zeros_like(value))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    def __getitem__(self, index: Any) -> Pair:
        return Pair(self.high[index], self.low[index])

    def __neg__(self) -> Pair:
        return Pair(-self.high, -self.low)

    def __add__(self, other: Pair) -> Pair:
        high, error = two_sum(self.high, other.high)
        low, low_error = two_sum(self.low, other.low)
        high, error = _fast_two_sum(high, error + low)
        return Pair(*_fast_two_sum(high, error + low_error))

    def __sub__(self, other: Pair) -> Pair:
        return self + -other

    def __mul__(self, other: Pair) -> Pair:
        high, error = two_product(self.high, other.high)
        return Pair(*_fast_two_sum(high, error + (self.high * other.low + self.low * other.high)))

    def __truediv__(self, count: Any) -> Pair:
        """Divide by integers."""
        divisor = np.asarray(count, np.float64)
        quotient = self.high / divisor
        product, error = two_product(quotient, divisor)
        rest = ((self.high - product) - error) + self.low
        return Pair(*_fast_two_sum(quotient, rest / divisor))

    def rsqrt(self) -> Pair:
        """Return ``self**-0.5``, of 0 infinity; one Newton step, of second order, from float64's own."""
        start = 1.0 / np.sqrt(self.high)
        one = Pair.exactly(np.ones_like(start))
        # delta = 1 - v start**2 is about 2**-52; start * (1 + delta/2 + 3/8 delta**2) has
        # an error of order delta**3.
        delta = one - self * Pair(*two_product(start, start))
        correction = Pair(0.5 * delta.high, 0.5 * delta.low + 0.375 * delta.high * delta.high)
        root = Pair.exactly(start) * (one + correction)
        none = self.high == 0
        return Pair(np.where(none, np.inf, root.high), np.where(none, 0.0, root.low))


def sum_rows(block: Any) -> Any:
    """Sum the rows of a block, of float64 or pairs, by halves, to one row; no rows to 0."""
    if not block.shape[0]:
        return np.zeros((1, 1))
    while (rows := block.shape[0]) > 1:
        half = rows // 2
        total, middle = block[:half] + block[rows - half :], block[half : rows - half]
        if rows % 2 == 0:
            block = total
        elif isinstance(block, Pair):
            both = ([total.high, middle.high], [total.low, middle.low])
            block = Pair(*map(np.concatenate, both))
        else:
            block = np.concatenate([total, middle])
    return block


def round_to(value: Any, dtype: np.dtype[Any]) -> Array:
    """
    Round float64 or pairs, whose `high` is the sum rounded to float64, once to `dtype`; not copied if that is float64.

    Two roundings, to float32 and then to bfloat16, go wrong near a midpoint of the latter. Rounding to odd in between
    cures it: an inexact value gets a last bit that is set, and is no midpoint of a type at least two bits narrower
    (Boldo and Melquiond, IEEE Trans. Comput. 57 (2008) 462).
    """
    if isinstance(value, Pair):
        high, low = value.high, value.low
        if dtype.type is np.float64:
            return high
        # Round to odd first: where `high` is inexact and even, take its neighbour beyond `low`.
        even = (high.view(np.uint64) & np.uint64(1)) == 0
        beyond = np.nextafter(high, np.copysign(np.inf, low))
        value = np.where(even & (low != 0) & np.isfinite(high), beyond, high)
    if dtype == bfloat16:
        # Keep 10 bits, two more than bfloat16 has; float32 holds them.
        lost = np.int64((1 << 43) - 1)
        bits = value.view(np.int64)
        value = ((bits | ((bits & lost) + lost)) & ~lost).view(np.float64)
    # One rounding, in NumPy and in hardware: float64 -> float32 and float64 -> float16.
    narrow: Array = value.astype(dtype, copy=False)
    return narrow


# ---- partial sums: sums over the rows of parts of x, which callers merge and round once, at the end ----

# A partial sum is `high + low` and differs from the exact sum by at most `error`: 0 if it is exact, NaN if the error is
# unknown, as for rounding="fast". Merging two counts each rounding: digits that the result cannot hold go into its error.
# A sum that is not finite may have left the range of float64 only in between: it is uncertified, and asked for as
# `uncertified.ExactSum`.
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
    # The sum is that of `high`, `rest` and these; a pair has room for two words.
    lower, lost = two_sum(lower, lowest)
    low, last = two_sum(rest, lower)
    error = (error + error_b + (np.abs(lost) + np.abs(last))) * _MORE
    high, low = two_sum(high, low)
    # The low word of an infinite sum is NaN, until `as_partial` sees it.
    return np.where(np.isfinite(total), high, total), low, error


@with_default_control
def rounded(total: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the sums rounded once to `dtype`, and which of them are uncertified."""
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
