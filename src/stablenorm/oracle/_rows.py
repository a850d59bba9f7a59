"""
One row in integers: its statistics, and y, dx, dgamma as integers times one irrational factor.

With ``x = X 2**scale`` (X integers) and ``C = n X - sum(X)``:

- ``x - mean = C 2**scale / n`` and ``var = sum(C**2) 4**scale / n**3``;
- ``var + eps = V 4**half / n**3`` with an integer V, called `radicand`;
- ``w = rstd / n = 2**-half sqrt(n / V)``, so that ``xhat = C 2**scale w``.

With ``g = gamma * dy = G 2**j``, using that C sums to zero and that ``n w**2 = n**2 / (V 4**half)``:

    dx = n w (g - mean(g) - xhat mean(g xhat))
       = w / V 2**j ((n G - sum(G)) V - C n sum(G C) 4**(scale - half))

The factor of T = (...) is the same for a whole row: dx is zero, and has its sign, where T does.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from stablenorm.oracle._formats import power

# Bits of the square root. An element is enclosed to about 250 bits less its cancellation; what that
# leaves open (a tie, an exact zero, an exact result) goes to `Surd`.
ROOT_BITS = 256


class Root(NamedTuple):
    """An irrational factor, in ``[lower, lower + slack] * 2**exponent``."""

    lower: int
    slack: int
    exponent: int


class Terms(NamedTuple):
    """A row of numbers ``integers * 2**exponent * root``."""

    integers: list[int]
    exponent: int
    root: Root


@dataclass(frozen=True, slots=True)
class Row:
    """The integers of one row, as the module docstring names them."""

    centered: list[int]
    scale: int
    radicand: int
    half: int

    @property
    def n(self) -> int:
        """Elements of the row."""
        return len(self.centered)

    def root(self) -> Root:
        """Enclose w: the one square root of the row."""
        shift = ROOT_BITS + (self.radicand.bit_length() + 1) // 2
        quotient, rest = divmod(self.n << 2 * shift, self.radicand)
        lower = math.isqrt(quotient)
        exact = rest == 0 and lower * lower == quotient
        return Root(lower, 0 if exact else 1, -shift - self.half)

    def surd(self) -> tuple[int, Fraction]:
        """Return (radicand, coefficient) with ``w = coefficient * sqrt(n / radicand)``."""
        # Powers of four leave the radicand, so that rows that differ by a power of two share it.
        fours = ((self.radicand & -self.radicand).bit_length() - 1) // 2
        return self.radicand >> 2 * fours, power(-self.half - fours)

    def deviations(self) -> list[int]:
        """Return ``n |C| + sum |C|``: n times ``|xhat| + mean|xhat|`` in the unit of C."""
        spread = sum(map(abs, self.centered))
        return [self.n * abs(c) + spread for c in self.centered]


def read_row(integers: list[int], scale: int, eps: Fraction) -> Row | None:
    """Return the row ``integers * 2**scale``, or None where var + eps is zero: xhat is undefined."""
    n = len(integers)
    total = sum(integers)
    centered = [n * v - total for v in integers]
    squares = sum(c * c for c in centered)
    if squares == 0 and eps == 0:
        return None
    # A float's denominator is a power of two; the exponent is made even for the square root.
    places = eps.denominator.bit_length() - 1
    half = min(scale, -((places + 1) // 2))
    offset = eps.numerator * n**3 << -places - 2 * half
    return Row(centered, scale, (squares << 2 * (scale - half)) + offset, half)


def mean_var(integers: list[int], scale: int) -> tuple[Fraction, Fraction]:
    """Return mean and variance of the row ``integers * 2**scale``."""
    n, total = len(integers), sum(integers)
    squares = sum((n * v - total) ** 2 for v in integers)
    return Fraction(total, n) * power(scale), Fraction(squares, n**3) * power(2 * scale)


def y_terms(row: Row, gamma: list[int], exponent: int) -> Terms:
    """Return gamma * xhat."""
    integers = [a * c for a, c in zip(gamma, row.centered, strict=True)]
    return Terms(integers, exponent + row.scale, row.root())


def dx_terms(row: Row, g: list[int], exponent: int) -> Terms:
    """Return dx of ``g * 2**exponent``."""
    n, v = row.n, row.radicand
    total = sum(g)
    inner = sum(a * c for a, c in zip(g, row.centered, strict=True))
    factor = n * inner << 2 * (row.scale - row.half)
    integers = [(n * a - total) * v - c * factor for a, c in zip(g, row.centered, strict=True)]
    root = row.root()
    # w / V: 2**shift <= V, so that the slack of w adds less than one unit to that of the floor.
    shift = v.bit_length() - 1
    return Terms(integers, exponent, Root((root.lower << shift) // v, 2, root.exponent - shift))


def dx_magnitudes(row: Row, g: list[int]) -> list[int]:
    """Return n times S of dx in the unit of `dx_terms`."""
    n, v = row.n, row.radicand
    total, spread = sum(g), sum(map(abs, g))
    mixed = sum(abs((n * a - total) * c) for a, c in zip(g, row.centered, strict=True))
    factor = mixed << 2 * (row.scale - row.half)
    pairs = zip(g, row.deviations(), strict=True)
    return [(n * abs(a) + spread) * n * v + d * factor for a, d in pairs]


def enclose(
    terms: Terms, offset: list[int] | None = None, offset_exponent: int = 0
) -> tuple[list[int], list[int], int]:
    """Return lower ends, widths (both integers) and the exponent of their unit of terms + offset."""
    lower, slack, place = terms.root
    place += terms.exponent
    unit = place if offset is None else min(place, offset_exponent)
    lower, slack = lower << place - unit, slack << place - unit
    upper = lower + slack
    low = [t * lower if t >= 0 else t * upper for t in terms.integers]
    width = [abs(t) * slack for t in terms.integers]
    if offset is not None:
        shift = offset_exponent - unit
        low = [v + (b << shift) for v, b in zip(low, offset, strict=True)]
    return low, width, unit
