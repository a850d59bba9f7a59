"""
Sums of multiples of square roots of rationals: enclosed, then compared exactly if undecided.

Every element of every quantity is such a sum; the rational ones among its terms are multiples of
``sqrt(1)``. A block of elements is a sequence of `Part`, a term of each element. Square roots of
positive integers, no two of which differ by a rational factor, are linearly independent over the
rationals (Besicovitch, J. London Math. Soc. 15 (1940) 3). So `merge` adds up terms that differ by a
rational factor. The sum is then either rational, and compared exactly, or irrational, and a finite
precision separates it from any rational number.
"""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

import numpy as np

from stablenorm.oracle.rounding import Array, Interval, Vector

T = TypeVar("T")

# Bits of a square root. An element is enclosed to about 250 bits less its cancellation. Ties, exact
# zeros and exact results stay undecided and go to `settle`.
ROOT_BITS = 256

# The pair (vector, square) stands for the numbers ``vector * sqrt(square)``.
Part = tuple[Vector, Fraction]
RATIONAL = Fraction(1)
# The number sum(coefficient * sqrt(radicand)): the coefficients by their radicands.
Surd = dict[int, Fraction]


def enclose_root(square: Fraction, bits: int) -> Interval:
    """Enclose the square root of a positive rational, exactly if it has few enough bits."""
    p, q = square.as_integer_ratio()
    shift = max(bits + (q.bit_length() - p.bit_length()) // 2, 0)
    ratio, rest = divmod(p << 2 * shift, q)
    root = math.isqrt(ratio)
    if rest or root * root != ratio:
        return Interval(root, 1, -shift)
    zeros = (root & -root).bit_length() - 1
    return Interval(root >> zeros, 0, zeros - shift)


def enclose(parts: Iterable[Part], n: int, bits: int = ROOT_BITS) -> list[Interval]:
    """Enclose the `n` sums of the parts, each square root to so many bits."""
    lows, widths, finest = enclose_all(parts, n, bits)
    return [Interval(low, width, finest) for low, width in zip(lows, widths, strict=True)]


def enclose_all(parts: Iterable[Part], n: int, bits: int = ROOT_BITS) -> tuple[Array, Array, int]:
    """Return the lower ends and the widths of `enclose`, and their common exponent."""
    lows, widths, finest = np.zeros(n, object), np.zeros(n, object), 0
    for vector, square in parts:
        low, width, exponent = enclose_root(vector.unit**2 * square, bits)
        coarser, shift = max(finest - exponent, 0), max(exponent - finest, 0)
        low, width, integers = low << shift, width << shift, vector.integers
        # A negative multiple is lowest at the upper end of the root.
        lows = (lows << coarser) + integers * low + np.minimum(integers, 0) * width
        widths = (widths << coarser) + abs(integers) * width
        finest = min(finest, exponent)
    return lows, widths, finest


def exactly(parts: Iterable[Part], columns: list[int]) -> list[Surd]:
    """Return the sums of the parts in these columns."""
    sums: dict[int, Array] = {}
    for vector, square in parts:
        p, q = (vector.unit**2 * square).as_integer_ratio()
        # sqrt(p / q) = sqrt(p q) / q. Powers of 4 in p q leave the root, so that rows that differ by a
        # power of two share a term.
        fours = (((p * q) & -(p * q)).bit_length() - 1) // 2
        radicand, scale = p * q >> 2 * fours, Fraction(2**fours, q)
        sums[radicand] = sums.get(radicand, 0) + vector.integers[columns] * scale
    return [{radicand: c[i] for radicand, c in sums.items() if c[i]} for i in range(len(columns))]


def merge(number: Surd) -> Surd:
    """Merge the terms that differ by a rational factor; the rational ones are those of 1."""
    merged: Surd = {}
    for radicand, coefficient in number.items():
        for other in (1, *merged, radicand):
            # sqrt(radicand) = sqrt(other) * sqrt(other * radicand) / other.
            root = math.isqrt(other * radicand)
            if root * root == other * radicand:
                merged[other] = merged.get(other, 0) + coefficient * Fraction(root, other)
                break
    return {radicand: c for radicand, c in merged.items() if c}


def settle(number: Surd, verdict: Callable[[Interval], T | None]) -> T:
    """Raise the precision until the verdict on the enclosure of a number is not None."""
    # The first try nearly always decides.
    bits = 2 * ROOT_BITS
    while True:
        tops = (np.array([c.numerator], object) for c in number.values())
        units = (Fraction(1, c.denominator) for c in number.values())
        parts = zip(map(Vector, tops, units), map(Fraction, number), strict=True)
        if (decided := verdict(enclose(parts, 1, bits)[0])) is not None:
            return decided
        # Merging takes long where there are many terms, and is seldom needed.
        number, bits = merge(number), 2 * bits
