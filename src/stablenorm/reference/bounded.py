"""
`Wide` numbers that carry a bound of their error: for rounding="nearest".

Each operation adds the bounds of its operands and its own error, relative to the result (Joldes, Muller
and Popescu, ACM TOMS 44 (2017) 15): of a sum 3, of a product 7, of a quotient by an integer 4, of the
root 16, in units of 2**-106. An eighth more, at least, is taken, which makes up for the rounding of
the bounds themselves. What is seen to be exact adds nothing. docs/explanation/error-analysis.md.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stablenorm.reference.doubledouble import Wide
from stablenorm.types import Array

# What bounds are counted in.
UNIT = 2.0**-106

# Above it, the error of a product of single words is a float64 too. Below it, added to each bound.
_SMALLEST = 2.0**-900

# The largest error of an argument of a root, in parts of it, for which the error is half as large.
_SMALL = 2.0**-26


class Bounded(Wide):
    """A `Wide`, and a bound of its error in units of 2**-106; immutable by convention."""

    __slots__ = ("bound",)

    def __init__(self, value: Wide, bound: Wide | None = None) -> None:
        super().__init__(value.hi, value.lo, value.exponent)
        zero = np.broadcast_to(0.0, np.shape(value.hi))
        self.bound = Wide(zero, zero) if bound is None else bound

    @classmethod
    def exactly(cls, value: Array | float) -> Bounded:
        """Lift float64 `value`, exactly."""
        return cls(Wide.exactly(value))

    def __neg__(self) -> Bounded:
        return Bounded(super().__neg__(), self.bound)

    def __add__(self, other: Any) -> Bounded:
        total = super().__add__(other)
        exact = (self.hi == 0) | (other.hi == 0)
        if isinstance(total.exponent, int):
            exact |= (self.lo == 0) & (other.lo == 0)
        own = _scaled(total, np.where(exact, 0.0, 4.0))
        return Bounded(total, _plus(self.bound, other.bound, own))

    def __mul__(self, other: Any) -> Bounded:
        product = super().__mul__(other)
        exact = (self.lo == 0) & (other.lo == 0) & (np.abs(product.hi) > _SMALLEST)
        exact |= (self.hi == 0) | (other.hi == 0)
        own = np.where(exact, 0.0, 8.0 * np.abs(product.hi) + _SMALLEST)
        most = _plus(self, _scaled(self.bound, UNIT))
        parts = _times(most, other.bound), _times(other, self.bound)
        return Bounded(product, _plus(*parts, Wide(own, np.zeros_like(own), product.exponent)))

    def __getitem__(self, index: Any) -> Bounded:
        return Bounded(super().__getitem__(index), self.bound[index])

    @property
    def value(self) -> Wide:
        """The same numbers without bounds."""
        return Wide(self.hi, self.lo, self.exponent)

    def mean(self, count: Any = None) -> Bounded:
        """Average over the last axis, or divide its sum by `count`."""
        return self._total(-1).divided(self.hi.shape[-1] if count is None else count)

    def sum_rows(self) -> Bounded:
        """Sum over the first axis, kept as an axis of length 1."""
        return self._total(0)

    def divided(self, count: Any) -> Bounded:
        """Divide by integers."""
        quotient = super().divided(count)
        own = _scaled(quotient, np.where(np.equal(count, 1), 0.0, 5.0))
        return Bounded(quotient, _plus(_scaled(self.bound, 1.0 / count), own))

    def rsqrt(self) -> Bounded:
        """Return ``self**-0.5``."""
        root = super().rsqrt()
        share = self.bound.scaled_to(self.exponent).hi / np.abs(self.hi)
        share = np.where(share * UNIT < _SMALL, 0.51 * share + 20.0, np.inf)
        return Bounded(root, _scaled(root, share))

    def ends(self, dtype: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Round both ends of the bounds to `dtype`, and tell where that leaves the numbers undecided."""
        low, high, undecided = self.value.round_within(_scaled(self.bound, UNIT), dtype)
        # Of an infinite bound both ends are NaN.
        return low, high, undecided | ~np.isfinite(self.bound.hi)

    def _total(self, axis: int) -> Bounded:
        total = self._sum(axis)
        height = (self.hi.shape[axis] - 1).bit_length()
        sizes = _plus(self.bound, _scaled(self, 4.0 * height))
        if not isinstance(sizes.exponent, int):
            sizes = sizes.scaled_to(sizes.magnitude().max(axis=axis, keepdims=True))
        bound = np.add.reduce(sizes.hi, axis=axis, keepdims=True)
        # Of one row, the words are views of what was given.
        value = Wide(total.hi.copy(), total.lo, total.exponent)
        return Bounded(value, size_of(Wide(bound, bound, sizes.exponent)))


# ---- of bounds a float64 and an exponent are enough ----


def size_of(v: Wide) -> Wide:
    return Wide(np.abs(v.hi), np.zeros_like(v.hi), v.exponent)


def _scaled(v: Wide, factor: Array | float) -> Wide:
    return size_of(Wide(v.hi * factor, v.lo, v.exponent))


def _times(a: Wide, b: Wide) -> Wide:
    return size_of(Wide(a.hi * b.hi, b.lo, a.exponent + b.exponent))


def _plus(*parts: Wide) -> Wide:
    """Return the sum of the magnitudes."""
    exponent: Array | int = 0
    if not all(isinstance(part.exponent, int) for part in parts):
        exponent = np.maximum.reduce(np.broadcast_arrays(*(part.magnitude() for part in parts)))
        parts = tuple(part.scaled_to(exponent) for part in parts)
    total = functools.reduce(np.add, (np.abs(part.hi) for part in parts))
    return Wide(total, np.zeros_like(total), exponent)
