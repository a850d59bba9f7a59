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
from typing import TypeVar

from stablenorm.oracle.rounding import (
    ERROR_BITS,
    Format,
    power,
    round_ratio,
    to_parts,
    top_exponent,
)

T = TypeVar("T")

# A first try that nearly always decides; it doubles until it does.
FIRST_BITS = 512


@dataclass(frozen=True, slots=True)
class Surd:
    """The number ``rational + sum(coefficient * sqrt(n / radicand))`` over the items of `terms`."""

    rational: Fraction
    n: int
    terms: dict[int, Fraction]

    def bounds(self, bits: int) -> tuple[Fraction, Fraction]:
        """Enclose the number; each square root is known to about `bits` bits."""
        low = high = self.rational
        for radicand, coefficient in self.terms.items():
            shift = bits + (radicand.bit_length() + 1) // 2
            root = math.isqrt((self.n << 2 * shift) // radicand)
            ends = [coefficient * Fraction(root + k, 1 << shift) for k in (0, 1)]
            low += min(ends)
            high += max(ends)
        return low, high

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

    def decide(self, verdict: Callable[[Fraction, Fraction], T | None]) -> T:
        """Raise the precision until `verdict` of the enclosure is not None."""
        bits = FIRST_BITS
        found = verdict(*self.bounds(bits))
        if found is not None:
            return found
        number = self.settled()
        while found is None:
            found = verdict(*number.bounds(bits))
            bits *= 2
        return found

    def nearest(self, fmt: Format) -> float:
        """Return the correctly rounded number."""
        return self.decide(lambda low, high: _agreed(low, high, fmt))

    def judge(self, actual: Fraction, fmt: Format) -> tuple[tuple[float, int], bool, int]:
        """Return the error of `actual` in two parts, whether misrounded, the exponent of the ulp."""

        def verdict(low: Fraction, high: Fraction) -> tuple[tuple[float, int], bool, int] | None:
            ulp = fmt.ulp_exponent(top_exponent(low, fmt))
            rounded = _agreed(low, high, fmt)
            error = abs(actual - low)
            settled = (high - low) * power(ERROR_BITS) <= error
            if rounded is None or ulp != fmt.ulp_exponent(top_exponent(high, fmt)) or not settled:
                return None
            misrounded = math.isinf(rounded) or Fraction(rounded) != actual
            # 64 bits or more of the quotient, more than its float will hold.
            shift = 64 + error.denominator.bit_length() - error.numerator.bit_length()
            return to_parts(int(error * power(shift)), -shift), misrounded, ulp

        return self.decide(verdict)

    def value_to(self, bits: int) -> Fraction:
        """Return a rational within a relative ``2**-bits``, and the number itself if rational."""

        def verdict(low: Fraction, high: Fraction) -> Fraction | None:
            close = (high - low) * power(bits) <= min(abs(low), abs(high)) and low * high >= 0
            return low if close else None

        # Settled at once, so that a rational comes out as itself.
        return self.settled().decide(verdict)


def _exact_root(integer: int) -> int | None:
    """Return the square root of `integer` if it is a perfect square."""
    root = math.isqrt(integer)
    return root if root * root == integer else None


def _agreed(low: Fraction, high: Fraction, fmt: Format) -> float | None:
    """Round both ends; None if they differ, be it in the sign of a zero."""
    first, second = round_ratio(low, fmt), round_ratio(high, fmt)
    same = first == second and math.copysign(1.0, first) == math.copysign(1.0, second)
    return first if same else None
