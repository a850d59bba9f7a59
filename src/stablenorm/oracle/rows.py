"""
Rows in integers: statistics, and y, dx, dgamma as integers times one irrational factor a row.

With ``x = X 2**scale`` (X integers) and ``C = n X - sum(X)``:

- ``x - mean = C 2**scale / n`` and ``var = sum(C**2) 4**scale / n**3``;
- ``var + eps = V 4**half / n**3`` with an integer V, called `radicand`;
- ``w = rstd / n = 2**-half sqrt(n / V)``, so that ``xhat = C 2**scale w``.

With ``g = gamma * dy = G 2**j``, using that C sums to zero and that ``n w**2 = n**2 / (V 4**half)``:

    dx = n w (g - mean(g) - xhat mean(g xhat))
       = w / V 2**j ((n G - sum(G)) V - C n sum(G C) 4**(scale - half))

The factor of T = (...) is the same for a whole row: dx is zero, and has its sign, where T does.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from stablenorm.oracle.rounding import Array, Exactly, Interval, Vector, power, read_rows
from stablenorm.oracle.surds import Surd

# Bits of the square root. An element is enclosed to about 250 bits less its cancellation; what that
# leaves open (a tie, an exact zero, an exact result) goes to `Surd`.
ROOT_BITS = 256


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

    def root(self, divisor: int) -> Interval:
        """Enclose ``w / divisor``."""
        shift = ROOT_BITS + (self.radicand.bit_length() + 1) // 2
        ratio, rest = divmod(self.n << 2 * shift, self.radicand)
        lower = math.isqrt(ratio)
        if divisor == 1:
            exact = rest == 0 and lower * lower == ratio
            return Interval(lower, 0 if exact else 1, -shift - self.half)
        # 2**more <= divisor, so that the width of w adds at most one unit to that of the floor.
        more = divisor.bit_length() - 1
        return Interval((lower << more) // divisor, 2, -shift - self.half - more)

    def affine(self, factor: Vector, offset: Vector | None = None) -> "Terms":
        """Return ``factor * xhat + offset``."""
        return Terms(self, factor.times(Vector(self.centered, self.scale)), 1, offset)

    def dx(self, g: Vector) -> "Terms":
        """Return dx."""
        n, v, total = self.n, self.radicand, sum(g.integers)
        inner = sum(a * c for a, c in zip(g.integers, self.centered, strict=True))
        factor = n * inner << 2 * (self.scale - self.half)
        pairs = zip(g.integers, self.centered, strict=True)
        return Terms(
            self, Vector([(n * a - total) * v - c * factor for a, c in pairs], g.exponent), v
        )

    def deviations(self) -> list[int]:
        """Return ``n |C| + sum |C|``: n times ``|xhat| + mean|xhat|`` in the unit of C."""
        spread = sum(map(abs, self.centered))
        return [self.n * abs(c) + spread for c in self.centered]

    def affine_size(self, factor: Vector, offset: Vector | None = None) -> "Terms":
        """Return ``|factor| (|xhat| + mean|xhat|) + |offset|``."""
        products = factor.magnitudes().times(Vector(self.deviations(), self.scale))
        return Terms(self, products, self.n, offset and offset.magnitudes())

    def dx_size(self, g: Vector) -> "Terms":
        """Return ``rstd (|g| + mean|g| + (|xhat| + mean|xhat|) mean|(g - mean g) xhat|)``."""
        n, v = self.n, self.radicand
        total, spread = sum(g.integers), sum(map(abs, g.integers))
        pairs = zip(g.integers, self.centered, strict=True)
        factor = sum(abs((n * a - total) * c) for a, c in pairs) << 2 * (self.scale - self.half)
        both = zip(g.integers, self.deviations(), strict=True)
        integers = [(n * abs(a) + spread) * n * v + d * factor for a, d in both]
        return Terms(self, Vector(integers, g.exponent), n * v)


class Terms(NamedTuple):
    """Numbers ``multiples * w / divisor + offset`` of a row."""

    row: Row
    multiples: Vector
    divisor: int
    offset: Vector | None = None

    def intervals(self) -> list[Interval]:
        """Enclose each number."""
        factor = self.row.root(self.divisor)
        place = self.multiples.exponent + factor.exponent
        offset = self.offset or Vector([0] * self.row.n, place)
        unit = min(place, offset.exponent)
        low, width = factor.low << place - unit, factor.width << place - unit
        high, shift = low + width, offset.exponent - unit
        return [
            Interval((t * low if t >= 0 else t * high) + (b << shift), abs(t) * width, unit)
            for t, b in zip(self.multiples.integers, offset.integers, strict=True)
        ]

    def exactly(self, columns: list[int]) -> Iterator[tuple[Fraction, int, Fraction]]:
        """Yield (offset, radicand, c): the number is ``offset + c sqrt(n / radicand)``."""
        # w = 2**-half sqrt(n / V); what is a power of 4 in V leaves it, so that rows that differ
        # by a power of two have the same root.
        radicand = self.row.radicand
        fours = ((radicand & -radicand).bit_length() - 1) // 2
        unit = power(self.multiples.exponent - self.row.half - fours) / self.divisor
        offset = self.offset or Vector([0] * self.row.n, 0)
        for i in columns:
            rational = offset.integers[i] * power(offset.exponent)
            yield rational, radicand >> 2 * fours, self.multiples.integers[i] * unit


def read_row(vector: Vector, eps: Fraction) -> Row | None:
    """Return the row, or None where var + eps is zero: xhat is undefined."""
    integers, scale = vector
    n, total = len(integers), sum(integers)
    centered = [n * v - total for v in integers]
    squares = sum(c * c for c in centered)
    if squares == 0 and eps == 0:
        return None
    # A float's denominator is a power of two; the exponent is made even for the square root.
    places = eps.denominator.bit_length() - 1
    half = min(scale, -((places + 1) // 2))
    offset = eps.numerator * n**3 << -places - 2 * half
    return Row(centered, scale, (squares << 2 * (scale - half)) + offset, half)


# ---- all rows, block by block: a block of y or dx is a row; dgamma and dbeta are one each ----


class Inputs(NamedTuple):
    """What a layer norm and its gradients are made of; x and dy are (rows, n) float64 matrices."""

    x: Array
    gamma: Vector
    beta: Vector
    eps: Fraction
    dy: Array | None

    def block(self, name: str, index: int) -> "Inputs":
        """Return what one block of a quantity is made of."""
        if name in {"dgamma", "dbeta"}:
            return self
        dy = None if self.dy is None else self.dy[[index]]
        return self._replace(x=self.x[[index]], dy=dy)

    def cotangent(self) -> Array:
        """Return dy, which everything but y needs."""
        if self.dy is None:
            msg = "dy must be given to exact_layer_norm for dx, dgamma and dbeta, got None"
            raise ValueError(msg)
        return self.dy

    def terms(self, name: str, sizes: bool = False) -> Iterator[Terms | None]:
        """
        Yield y, dx, or its part of dgamma, for each row; None where it is undefined.

        Or, if `sizes`, S of the contract: the sum of the magnitudes that each is made of.
        """
        cotangents = itertools.repeat(None) if name == "y" else read_rows(self.cotangent())
        for x, dy in zip(read_rows(self.x), cotangents, strict=False):
            row = read_row(x, self.eps)
            if row is None:
                yield None
                continue
            affine, dx = (row.affine_size, row.dx_size) if sizes else (row.affine, row.dx)
            if dy is None:
                yield affine(self.gamma, self.beta)
            else:
                yield affine(dy) if name == "dgamma" else dx(self.gamma.times(dy))

    def blocks(self, name: str, sizes: bool = False) -> Iterator[list[Interval] | None]:
        """Enclose what `terms` yields, block by block; None for one that is undefined."""
        if name == "dbeta":
            dy, n = self.cotangent(), self.x.shape[1]
            (all_of_it,) = read_rows((np.abs(dy) if sizes else dy).reshape(1, -1))
            integers, exponent = all_of_it
            yield [Interval(sum(integers[column::n]), 0, exponent) for column in range(n)]
        elif name == "dgamma":
            yield self._dgamma(sizes)
        else:
            for terms in self.terms(name, sizes):
                yield None if terms is None else terms.intervals()

    def _dgamma(self, sizes: bool) -> list[Interval] | None:
        total = [Interval(0, 0, 0)] * self.x.shape[1]
        for terms in self.terms("dgamma", sizes):
            if terms is None:
                return None
            total = [one.plus(other) for one, other in zip(total, terms.intervals(), strict=True)]
        return total

    def exactly(self, name: str, index: int) -> Exactly:
        """Return the function that gives elements of a block, by their columns, exactly."""
        return lambda columns: self.block(name, index).surds(name, columns) if columns else []

    def surds(self, name: str, columns: list[int]) -> list[Surd]:
        """Return elements, by their columns, of the one block that is made of these inputs."""
        n = self.x.shape[1]
        if name == "dbeta":
            dy = read_rows(self.cotangent().T[columns])
            return [Surd(sum(integers) * power(exponent), n, {}) for integers, exponent in dy]
        rationals = [Fraction(0)] * len(columns)
        # Rows with the same square root share a term.
        sums: list[dict[int, Fraction]] = [{} for _ in columns]
        for terms in self.terms(name):
            if terms is None:
                msg = f"{name} must be defined there, got a row of zero variance and eps = 0"
                raise ValueError(msg)
            for place, (offset, radicand, coefficient) in enumerate(terms.exactly(columns)):
                rationals[place] += offset
                sums[place][radicand] = sums[place].get(radicand, 0) + coefficient
        return [
            Surd(rational, n, {radicand: c for radicand, c in found.items() if c})
            for rational, found in zip(rationals, sums, strict=True)
        ]
