r"""
Rows of y and dx, and columns of dgamma and dbeta, by integers, each element rounded once: the lowest rung.

A *number* here is a sum of integers over square roots of integers, in units of ``2**-1126``, of which every float64 is a
multiple. With the integers X of a row, ``x = unit * X`` and

- ``C = n X - sum(X)``, so that ``x - mean = unit * C / n``, and
- ``p = s**2 (n sum(X**2) - sum(X)**2 + n**2 eps / unit**2)``, s an integer that makes it one, so that
  ``var + eps = unit**2 / n**2 * p / s**2``:

    xhat = s C / sqrt(p)
    dx   = s / unit * ((n g - sum(g)) p - s**2 C sum(g C)) / sqrt(p**3)

where ``g = gamma * dy``. For RMS norm, sum(X) and sum(g) are 0. So y and dx have one root, and dgamma has one for each row.

An integer square root encloses each root. If both ends of the enclosure of a number round alike, that is the result. If
not, terms whose radicands differ by the square of a rational are merged. Square roots of integers of which no two do so are
linearly independent over the rationals (Besicovitch, J. London Math. Soc. 15 (1940) 3). So the merged sum is rational, and
compared exactly, or irrational, and no tie: more bits decide it.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from operator import lshift, mul
from typing import Any, Self

import numpy as np

from stablenorm.formats import format_of
from stablenorm.records import Array, Norm
from stablenorm.reference.equations import FLOAT64, round_to

# The least exponent of a float64 with 53 digits, and the bits after the point of numbers.
_LEAST = -1073
BITS = 53 - _LEAST

# Bits of a root at first: enough for everything but ties and exact results.
_OF_ROOT = 128


class Number(dict[int, Any]):
    """A number: its factors by their radicands. That of 0 is what infinities and NaN add up to, which then is the number."""

    def __iadd__(self, other: dict[int, Any]) -> Self:
        for radicand, factor in other.items():
            self[radicand] = self.get(radicand, 0) + factor
        return self

    def __add__(self, other: dict[int, Any]) -> "Number":
        return Number(self).__iadd__(other)


def integers_of(values: Array, least: int = _LEAST) -> list[int]:
    """Return float64 numbers in units of ``2**(least - 53)``, 0 for infinities and NaN; none has a lesser exponent."""
    mantissas, exponents = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    return list(map(lshift, whole.tolist(), (exponents - least).tolist()))


def plus(numbers: list[Number], values: Array) -> list[Number]:
    """Add float64 numbers to numbers, and return these."""
    terms = zip(integers_of(values), values.tolist(), strict=True)
    for number, (integer, value) in zip(numbers, terms, strict=True):
        number += {1: integer} if math.isfinite(value) else {0: value}  # noqa: PLW2901 - in place
    return numbers


def numbers_of(values: Array) -> list[Number]:
    """Return float64 numbers."""
    return plus([Number() for _ in values], values)


class Row:
    """A row as the module docstring names it; p is 0 for a row that has no norm."""

    def __init__(self, x: Array, norm: Norm):
        self.x, self.n, self.is_layer, self.p = x, len(x), norm.kind == "layer", 0
        wide = x.astype(np.float64)
        self.least, self.is_finite = int(np.frexp(wide)[1].min()), bool(np.isfinite(wide).all())
        if not self.is_finite:
            return
        integers = integers_of(wide, self.least)
        # Rows that differ by a factor have the same root.
        self.common = math.gcd(*integers) or 1
        integers = [v // self.common for v in integers]
        self.total, exponent = sum(integers) if self.is_layer else 0, self.least - 53
        self.unit, (eps, below) = self.common * Fraction(2) ** exponent, norm.eps.as_integer_ratio()
        half = max(exponent + below.bit_length() // 2, 0)
        self.s = self.common << half if eps else 1
        self.p = self.s**2 * (self.n * sum(map(mul, integers, integers)) - self.total**2)
        self.p += self.n**2 * eps << 2 * (half - exponent) - below.bit_length() + 1

    def centered(self, columns: Any) -> list[int]:
        """Return C of some columns."""
        integers = integers_of(self.x[columns].astype(np.float64), self.least)
        return [self.n * (v // self.common) - self.total for v in integers]

    def times_xhat(self, values: Array, columns: Any = slice(None)) -> list[Number]:
        """Return the products of float64 numbers and xhat of some columns."""
        if not self.p:
            return [Number({0: math.nan}) for _ in values]
        centered = self.centered(columns)
        both = zip(integers_of(values), centered, strict=True)
        products = [Number({self.p: self.s * v * c}) for v, c in both]
        for i in np.flatnonzero(~np.isfinite(values)).tolist():
            # An infinity takes the sign of xhat; times 0 it is NaN.
            products[i] = Number({0: float(values[i]) * ((centered[i] > 0) - (centered[i] < 0))})
        return products

    def dx(self, dy: Array, gamma: Array) -> list[Number]:
        """Return dx of the row."""
        if not (self.p and np.isfinite(gamma).all() and np.isfinite(dy).all()):
            return [Number({0: math.nan}) for _ in dy]
        n, p, g = self.n, self.p, list(map(mul, integers_of(gamma), integers_of(dy)))
        centered, total = self.centered(slice(None)), sum(g) if self.is_layer else 0
        inner = self.s**2 * sum(map(mul, g, centered))
        # A product of two numbers has twice the bits after the point: half of them are a factor of what is below.
        above, below = (self.s / self.unit / 2**BITS).as_integer_ratio()
        root, both = p**3 * below**2, zip(g, centered, strict=True)
        return [Number({root: above * ((n * v - total) * p - c * inner)}) for v, c in both]

    def statistics(self) -> tuple[float, float, float]:
        """Return the mean, what rounding takes from it, and rstd, each rounded once to float64."""
        if not self.is_finite:
            return math.nan, math.nan, math.nan
        total, below = (self.total * self.unit / self.n).as_integer_ratio()
        exact = [Number({below**2: total << BITS})]
        mean = nearest(exact, FLOAT64)
        (rest,) = nearest(plus(exact, -mean), FLOAT64)
        if not self.p:
            return mean[0], rest, math.inf
        above, below = (self.n * self.s / self.unit).as_integer_ratio()
        rstd = Number({self.p * below**2: above << BITS})
        return mean[0], rest, nearest([rstd], FLOAT64)[0]


# ---- rounding ----


def nearest(numbers: Sequence[Number], dtype: np.dtype[Any]) -> Array:
    """Round each number once, to nearest, ties to even."""
    result: Array = np.empty(len(numbers), dtype)
    places, bits, digits = np.arange(len(numbers)), _OF_ROOT, format_of(dtype).digits + 5
    while len(places):
        ends = np.array([_enclosed(number, bits, digits) for number in numbers])
        low, high = (round_to(end.copy(), dtype) for end in ends.T)
        result[places] = low
        of_bits = f"u{dtype.itemsize}"
        uncertain = np.flatnonzero(low.view(of_bits) != high.view(of_bits))
        places, bits = places[uncertain], 2 * bits
        numbers = [_merged(numbers[i]) for i in uncertain.tolist()]
    # There is one NaN.
    result[np.isnan(result)] = np.nan
    return result


def _enclosed(number: Number, bits: int, digits: int) -> tuple[float, float]:
    """Return a number rounded to odd, once from below and once from above; the same if it is exact."""
    if 0 in number:
        return number[0], number[0]
    places = bits + max(number, default=0).bit_length() // 2
    middle = error = 0
    for radicand, factor in number.items():
        root, rest = _root(radicand, places)
        middle += factor * root
        error += abs(factor) * rest
    places += BITS
    return _to_odd(middle - error, places, digits), _to_odd(middle + error, places, digits)


def _to_odd(number: int, places: int, digits: int) -> float:
    """Return ``number / 2**places`` in float64; with more than the digits, the last is odd, as in `round_to`."""
    cut = max(number.bit_length() - digits, 0)
    kept = number >> cut
    kept |= kept << cut != number
    point = places - cut
    # A quotient of integers is rounded once, also if it is subnormal.
    return kept / (1 << point) if point > 0 else float(np.ldexp(float(kept), -point))


@functools.lru_cache(1 << 14)
def _root(radicand: int, places: int) -> tuple[int, int]:
    """Return ``2**places / sqrt(radicand)`` rounded down, and 1, or 0 if that is exact."""
    root = math.isqrt((1 << 2 * places) // radicand)
    return root, int(root * root * radicand != 1 << 2 * places)


def _merged(number: Number) -> Number:
    """Return a number as a sum over radicands of which no two differ by the square of a rational."""
    factors = {1: Fraction(0)}
    for radicand, factor in number.items():
        for other in (*factors, radicand):
            root = math.isqrt(other * radicand)
            if root * root == other * radicand:
                # 1 / sqrt(radicand) = root / radicand / sqrt(other).
                factors[other] = factors.get(other, Fraction(0)) + Fraction(factor * root, radicand)
                break
    return Number({key * f.denominator**2: f.numerator for key, f in factors.items() if f})
