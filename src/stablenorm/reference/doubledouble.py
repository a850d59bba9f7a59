"""
Double-double numbers with an exponent: ``(hi + lo) * 2**exponent``, elementwise on arrays.

About 106 significant bits at any magnitude, for float64 data, whose statistics and gradients
float64 itself cannot round correctly. `Wide` has just the operators that the equations of
`reference` use, so that these are written once for float64 and for `Wide`.

The exponent is 0, or an int32 array that broadcasts against `hi`. It is there for range alone:
squares of 1e200, the product of a subnormal with 1e300, the sum of 768 largest floats. Data of
ordinary size never carries one.

Error-free sums and products are those of Dekker (1971) and Knuth; the operations on pairs and
their bounds, with u = 2**-53 (addition 3 u**2, product 5 u**2 relative), follow Joldes, Muller
and Popescu, ACM TOMS 44 (2017) 15.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.reference.rounding import round_sum_to
from stablenorm.types import Array

# Between these powers of two no product of three elements, nor its last 106 bits, leaves the
# range of float64: 3 * 200 + 3 * 53 + 106 < 1022.
_MODERATE = 200

# Below every exponent that a sum or product of float64 can have: what zero gets.
_NOTHING = -1 << 20

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


def two_prod(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``fl(a * b)`` and its exact error, barring underflow. NumPy has no FMA ufunc."""
    product = a * b
    a_head, a_tail = _split(a)
    b_head, b_tail = _split(b)
    error = ((a_head * b_head - product) + a_head * b_tail + a_tail * b_head) + a_tail * b_tail
    return product, error


class Wide:
    """``(hi + lo) * 2**exponent``, elementwise; immutable by convention."""

    __slots__ = ("exponent", "hi", "lo")

    # An ndarray on the left must leave the operation to us.
    __array_ufunc__ = None

    def __init__(self, hi: Array, lo: Array, exponent: Array | int = 0) -> None:
        self.hi, self.lo, self.exponent = hi, lo, exponent

    @classmethod
    def exactly(cls, value: Array | float) -> Wide:
        """Lift float64 `value`, exactly; give it exponents only if one element needs them."""
        value = np.asarray(value, dtype=np.float64)
        mantissa, exponent = np.frexp(value)
        if np.abs(exponent).max(initial=0) <= _MODERATE:
            return cls(value, np.zeros_like(value))
        return cls(mantissa, np.zeros_like(value), exponent.astype(np.int32))

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return self.hi.shape

    def __neg__(self) -> Wide:
        return Wide(-self.hi, -self.lo, self.exponent)

    def __add__(self, other: Wide) -> Wide:
        a, b = self, other
        exponent: Array | int = 0
        if not (isinstance(a.exponent, int) and isinstance(b.exponent, int)):
            exponent = np.maximum(a.magnitude(), b.magnitude())
            a, b = a.scaled_to(exponent), b.scaled_to(exponent)
        hi, error = two_sum(a.hi, b.hi)
        lo, lo_error = two_sum(a.lo, b.lo)
        hi, error = _fast_two_sum(hi, error + lo)
        hi, lo = _fast_two_sum(hi, error + lo_error)
        return Wide(hi, lo, exponent)

    def __sub__(self, other: Wide) -> Wide:
        return self + -other

    def __mul__(self, other: Wide) -> Wide:
        hi, error = two_prod(self.hi, other.hi)
        hi, lo = _fast_two_sum(hi, error + (self.hi * other.lo + self.lo * other.hi))
        return Wide(hi, lo, self.exponent + other.exponent)

    def __getitem__(self, index: Any) -> Wide:
        exponent = self.exponent
        if not isinstance(exponent, int):
            exponent = np.broadcast_to(exponent, self.hi.shape)[index]
        return Wide(self.hi[index], self.lo[index], exponent)

    def magnitude(self) -> Array:
        """Return each element's binary exponent, far below all others for zero."""
        exponent = np.frexp(self.hi)[1] + np.asarray(self.exponent, dtype=np.int32)
        return np.where(self.hi == 0, _NOTHING, exponent).astype(np.int32)

    def scaled_to(self, exponent: Array | int) -> Wide:
        """Return the same numbers carried with `exponent`; bits far below it are lost."""
        shift = self.exponent - np.asarray(exponent, dtype=np.int32)
        return Wide(np.ldexp(self.hi, shift), np.ldexp(self.lo, shift), exponent)

    def moderate(self) -> Wide:
        """Return the same numbers, carried so that a product of three of them stays in range."""
        exponent = np.frexp(self.hi)[1]
        if np.abs(exponent).max(initial=0) <= _MODERATE:
            return self
        return self.scaled_to(self.exponent + exponent)

    def mean(self, count: Any = None) -> Wide:
        """
        Average over the last axis, kept as an axis of length 1, by a tree of fixed shape.

        `count` is the number of elements, or, one for each row, of those that may not be 0.
        """
        return self._sum(axis=-1).divided(self.hi.shape[-1] if count is None else count)

    def sum_rows(self) -> Wide:
        """Sum over the first axis, kept as an axis of length 1, by a tree of fixed shape."""
        total = self._sum(axis=0)
        # Of one row that is the row itself, a view of dy: dx may be written over it.
        return Wide(total.hi.copy(), total.lo, total.exponent)

    def _sum(self, axis: int) -> Wide:
        total = self
        if not isinstance(self.exponent, int):
            total = self.scaled_to(self.magnitude().max(axis=axis, keepdims=True))
        exponent, total = total.exponent, Wide(total.hi, total.lo)
        while (width := total.hi.shape[axis]) > 1:
            half = (width + 1) // 2
            first, second, rest = (
                (slice(None),) * (axis % total.hi.ndim) + (part,)
                for part in (slice(width - half), slice(half, None), slice(width - half, half))
            )
            pairs = total[first] + total[second]
            if width % 2:
                middle = total[rest]
                pairs = Wide(
                    np.concatenate([pairs.hi, middle.hi], axis),
                    np.concatenate([pairs.lo, middle.lo], axis),
                )
            total = pairs
        return Wide(total.hi, total.lo, exponent)

    def divided(self, count: Any) -> Wide:
        """Divide by integers."""
        divisor = np.asarray(count, np.float64)
        quotient = self.hi / divisor
        product, error = two_prod(quotient, divisor)
        rest = ((self.hi - product) - error) + self.lo
        return Wide(*_fast_two_sum(quotient, rest / divisor), self.exponent)

    def rsqrt(self) -> Wide:
        """Return ``self**-0.5``, of 0 infinity; one Newton step, of second order, from float64's own."""
        none = self.hi == 0
        half = np.where(none, 0, (self.magnitude() + 1) // 2)
        v = self.scaled_to(2 * half)
        v.exponent = 0
        start = 1.0 / np.sqrt(v.hi)
        one = Wide(np.ones_like(start), np.zeros_like(start))
        # delta = 1 - v start**2 is about 2**-52; start * (1 + delta/2 + 3/8 delta**2) has
        # an error of order delta**3.
        delta = one - v * Wide(*two_prod(start, start))
        correction = Wide(0.5 * delta.hi, 0.5 * delta.lo + 0.375 * delta.hi * delta.hi)
        root = Wide(start, np.zeros_like(start)) * (one + correction)
        root.hi[none], root.lo[none] = np.inf, 0.0
        exponent = -half
        if np.abs(exponent).max(initial=0) <= _MODERATE:
            return Wide(np.ldexp(root.hi, exponent), np.ldexp(root.lo, exponent))
        return Wide(root.hi, root.lo, exponent)

    def round_to(self, dtype: np.dtype[Any]) -> Array:
        """Round once to `dtype`."""
        return round_sum_to(self.hi, self.lo, self.exponent, dtype)

    def round_within(self, error: Wide, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Round the numbers that are `error` below and above; return where they differ, too."""
        zero = np.zeros_like(error.hi)
        # Not -error: of an exact -0, 0.0 - error makes a 0.
        low = (self + Wide(0.0 - error.hi, zero, error.exponent)).round_to(dtype)
        high = (self + Wide(error.hi, zero, error.exponent)).round_to(dtype)
        bits = f"u{dtype.itemsize}"
        return low, high, low.view(bits) != high.view(bits)
