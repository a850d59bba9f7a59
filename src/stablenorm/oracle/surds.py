"""
Exact comparisons of sums of square roots with rationals: for the elements that enclosures leave open.

Every element of y, dx and dgamma is a rational plus a sum of rational multiples of square roots.
Square roots of positive integers, no two of which differ by a rational factor, are linearly
independent over the rationals (Besicovitch, J. London Math. Soc. 15 (1940) 3). So once terms that
differ by a rational factor are merged, what is left is either rational, and compared exactly, or
irrational, and then some finite precision separates it from any rational number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from stablenorm.oracle.rounding import Interval, T, power

# A first try that nearly always decides; it doubles until it does.
FIRST_BITS = 512


@dataclass(frozen=True, slots=True)
class Surd:
    """The number ``rational + sum(coefficient * sqrt(n / radicand))`` over the items of `terms`."""

    rational: Fraction
    n: int
    terms: dict[int, Fraction]

    def enclose(self, bits: int) -> Interval:
        """Enclose the number, each square root to about `bits` bits; exactly if it is dyadic."""
        low = high = self.rational
        for radicand, coefficient in self.terms.items():
            shift = bits + (radicand.bit_length() + 1) // 2
            root = math.isqrt((self.n << 2 * shift) // radicand)
            ends = [coefficient * Fraction(root + k, 1 << shift) for k in (0, 1)]
            low += min(ends)
            high += max(ends)
        size, places = max(abs(low), abs(high)), low.denominator.bit_length() - 1
        if low == high and low.denominator == 1 << places:
            return Interval(low.numerator, 0, -places)
        unit = size.numerator.bit_length() - size.denominator.bit_length() - bits
        first = math.floor(low / power(unit))
        return Interval(first, math.ceil(high / power(unit)) - first, unit)

    def settled(self) -> "Surd":
        """Merge the terms that differ by a rational factor, and those that are rational."""
        rational = self.rational
        merged: dict[int, Fraction] = {}
        for radicand, coefficient in self.terms.items():
            # sqrt(n / radicand) = sqrt(n * radicand) / radicand.
            root = _exact_root(self.n * radicand)
            if root is not None:
                rational += coefficient * Fraction(root, radicand)
                continue
            for other in merged:
                # sqrt(n / radicand) = sqrt(n / other) * sqrt(other * radicand) / radicand.
                root = _exact_root(other * radicand)
                if root is not None:
                    merged[other] += coefficient * Fraction(root, radicand)
                    break
            else:
                merged[radicand] = coefficient
        return Surd(rational, self.n, {r: c for r, c in merged.items() if c})

    def decide(self, verdict: Callable[[Interval], T | None]) -> T:
        """Raise the precision until `verdict` of the enclosure is not None."""
        found = verdict(self.enclose(FIRST_BITS))
        if found is not None:
            return found
        number, bits = self.settled(), FIRST_BITS
        while (found := verdict(number.enclose(bits))) is None:
            bits *= 2
        return found

    def value_to(self, bits: int) -> Fraction:
        """Return a rational within a relative ``2**-bits``, and the number itself if rational."""

        def verdict(interval: Interval) -> Fraction | None:
            low, width, exponent = interval
            close = width << bits <= min(abs(low), abs(low + width)) and low * (low + width) >= 0
            return low * power(exponent) if close else None

        number = self.settled()
        return number.decide(verdict) if number.terms else number.rational


def _exact_root(integer: int) -> int | None:
    """Return the square root of `integer` if it is a perfect square."""
    root = math.isqrt(integer)
    return root if root * root == integer else None
