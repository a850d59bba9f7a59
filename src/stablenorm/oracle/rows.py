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

import math
from collections.abc import Iterable, Iterator
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

    def root(self) -> Interval:
        """Enclose w: the one square root of the row."""
        shift = ROOT_BITS + (self.radicand.bit_length() + 1) // 2
        ratio, rest = divmod(self.n << 2 * shift, self.radicand)
        lower = math.isqrt(ratio)
        exact = rest == 0 and lower * lower == ratio
        return Interval(lower, 0 if exact else 1, -shift - self.half)

    def surd(self) -> tuple[int, Fraction]:
        """Return (radicand, coefficient) with ``w = coefficient * sqrt(n / radicand)``."""
        # Powers of four leave the radicand, so that rows that differ by a power of two share it.
        fours = ((self.radicand & -self.radicand).bit_length() - 1) // 2
        return self.radicand >> 2 * fours, power(-self.half - fours)

    def deviations(self) -> list[int]:
        """Return ``n |C| + sum |C|``: n times ``|xhat| + mean|xhat|`` in the unit of C."""
        spread = sum(map(abs, self.centered))
        return [self.n * abs(c) + spread for c in self.centered]

    def affine(self, factor: Vector, offset: Vector | None = None) -> "Terms":
        """Return ``factor * xhat + offset``."""
        products = factor.times(Vector(self.centered, self.scale))
        return Terms(self, products, self.root(), 1, offset)

    def dx(self, g: Vector) -> "Terms":
        """Return dx."""
        n, v = self.n, self.radicand
        total = sum(g.integers)
        inner = sum(a * c for a, c in zip(g.integers, self.centered, strict=True))
        factor = n * inner << 2 * (self.scale - self.half)
        pairs = zip(g.integers, self.centered, strict=True)
        integers = [(n * a - total) * v - c * factor for a, c in pairs]
        return Terms(self, Vector(integers, g.exponent), self.root_over_radicand(), v)

    def root_over_radicand(self) -> Interval:
        """Enclose w / V."""
        root = self.root()
        # 2**shift <= V, so that the width of w adds less than one unit to that of the floor.
        shift = self.radicand.bit_length() - 1
        return Interval((root.low << shift) // self.radicand, 2, root.exponent - shift)

    def xhat_magnitudes(self, factor: Vector, columns: Iterable[int]) -> list[Interval]:
        """Return ``|factor| (|xhat| + mean|xhat|)``, to a relative 2**-200 or so."""
        root, deviations = self.root(), self.deviations()
        exponent = factor.exponent + self.scale
        integers = (abs(factor.integers[i]) * deviations[i] for i in columns)
        return [_divided(root.times(integer, exponent), self.n) for integer in integers]

    def dx_magnitudes(self, g: Vector, columns: Iterable[int]) -> list[Interval]:
        """Return ``rstd (|g| + mean|g| + (|xhat| + mean|xhat|) mean|(g - mean g) xhat|)``."""
        n, v = self.n, self.radicand
        total, spread = sum(g.integers), sum(map(abs, g.integers))
        pairs = zip(g.integers, self.centered, strict=True)
        mixed = sum(abs((n * a - total) * c) for a, c in pairs)
        factor = mixed << 2 * (self.scale - self.half)
        root, deviations = self.root_over_radicand(), self.deviations()
        integers = (
            (n * abs(g.integers[i]) + spread) * n * v + deviations[i] * factor for i in columns
        )
        return [_divided(root.times(integer, g.exponent), n) for integer in integers]


class Terms(NamedTuple):
    """Numbers ``multiples * w / divisor + offset`` of a row; `factor` encloses ``w / divisor``."""

    row: Row
    multiples: Vector
    factor: Interval
    divisor: int
    offset: Vector | None = None

    def intervals(self) -> list[Interval]:
        """Enclose each number."""
        integers, place = self.multiples[0], self.multiples.exponent + self.factor.exponent
        offset = self.offset or Vector([0] * self.row.n, place)
        unit = min(place, offset.exponent)
        low, width = self.factor.low << place - unit, self.factor.width << place - unit
        high, shift = low + width, offset.exponent - unit
        return [
            Interval((t * low if t >= 0 else t * high) + (b << shift), abs(t) * width, unit)
            for t, b in zip(integers, offset.integers, strict=True)
        ]

    def surds(self, columns: Iterable[int]) -> list[Surd]:
        """Return some of the numbers exactly."""
        radicand, coefficient = self.row.surd()
        coefficient *= power(self.multiples.exponent) / self.divisor
        integers, offset = self.multiples.integers, self.offset or Vector([0] * self.row.n, 0)
        unit = power(offset.exponent)
        return [
            Surd(offset.integers[i] * unit, self.row.n, {radicand: integers[i] * coefficient})
            for i in columns
        ]


def _divided(number: Interval, n: int) -> Interval:
    """Return the lower end divided by n, rounded down."""
    return Interval(number.low // n, 0, number.exponent)


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


def mean_var(vector: Vector) -> tuple[Fraction, Fraction]:
    """Return mean and variance."""
    integers, scale = vector
    n, total = len(integers), sum(integers)
    squares = sum((n * v - total) ** 2 for v in integers)
    return Fraction(total, n) * power(scale), Fraction(squares, n**3) * power(2 * scale)


# ---- all rows, block by block: a block of y or dx is a row; dgamma and dbeta are one each ----

_ZERO = Interval(0, 0, 0)


class Inputs(NamedTuple):
    """What a layer norm and its gradients are made of; x and dy are (rows, n) float64 matrices."""

    x: Array
    gamma: Vector
    beta: Vector
    eps: Fraction
    dy: Array | None

    def vector(self, index: int) -> Vector:
        """Return one row of x."""
        return next(read_rows(self.x[[index]]))

    def row(self, index: int) -> Row | None:
        """Return one row; None where it has no variance and eps is 0."""
        return read_row(self.vector(index), self.eps)

    def cotangent(self) -> Array:
        """Return dy, which everything but y needs."""
        if self.dy is None:
            msg = "dy must be given to exact_layer_norm for dx, dgamma and dbeta, got None"
            raise ValueError(msg)
        return self.dy

    def g(self, index: int) -> Vector:
        """Return ``gamma * dy`` of one row."""
        return self.gamma.times(next(read_rows(self.cotangent()[[index]])))

    def pairs(self) -> Iterator[tuple[Row | None, Vector]]:
        """Yield each row with that of dy."""
        for x, dy in zip(read_rows(self.x), read_rows(self.cotangent()), strict=True):
            yield read_row(x, self.eps), dy

    def blocks(self, name: str) -> Iterator[list[Interval] | None]:
        """Enclose the elements of a quantity, block by block; None for one that is undefined."""
        if name == "y":
            for x in read_rows(self.x):
                row = read_row(x, self.eps)
                yield None if row is None else row.affine(self.gamma, self.beta).intervals()
        elif name == "dx":
            for row, dy in self.pairs():
                yield None if row is None else row.dx(self.gamma.times(dy)).intervals()
        elif name == "dgamma":
            yield self._dgamma()
        else:
            yield self._dbeta()

    def _dgamma(self) -> list[Interval] | None:
        total = [_ZERO] * self.x.shape[1]
        for row, dy in self.pairs():
            if row is None:
                return None
            terms = row.affine(dy).intervals()
            total = [one.plus(other) for one, other in zip(total, terms, strict=True)]
        return total

    def _dbeta(self) -> list[Interval]:
        columns = read_rows(self.cotangent().T)
        return [Interval(sum(integers), 0, exponent) for integers, exponent in columns]

    def exactly(self, name: str, block: int) -> Exactly:
        """Return the function that gives elements of a block exactly."""
        return lambda columns: self.surds(name, block, columns) if columns else []

    def surds(self, name: str, block: int, columns: list[int]) -> list[Surd]:
        """Return elements of a defined block exactly."""
        n = self.x.shape[1]
        if name == "dbeta":
            sums = self._dbeta()
            return [Surd(sums[i].low * power(sums[i].exponent), n, {}) for i in columns]
        if name == "dgamma":
            return self._dgamma_surds(columns)
        row = _defined(self.row(block))
        terms = row.affine(self.gamma, self.beta) if name == "y" else row.dx(self.g(block))
        return terms.surds(columns)

    def _dgamma_surds(self, columns: list[int]) -> list[Surd]:
        """Return elements of dgamma; rows with the same square root share a term."""
        sums: list[dict[int, Fraction]] = [{} for _ in columns]
        for row, dy in self.pairs():
            for found, term in zip(sums, _defined(row).affine(dy).surds(columns), strict=True):
                for radicand, coefficient in term.terms.items():
                    found[radicand] = found.get(radicand, 0) + coefficient
        n = self.x.shape[1]
        return [Surd(Fraction(0), n, {r: c for r, c in s.items() if c}) for s in sums]

    def magnitudes(self, name: str, block: int, columns: list[int]) -> list[Interval]:
        """
        Return S of the contract for elements of a defined block, to a relative 2**-200 or so.

        With m the mean of |xhat| over the row, S is ``|gamma| (|xhat| + m) + |beta|`` for y,
        ``rstd (|g| + mean|g| + (|xhat| + m) mean|(g - mean g) xhat|)`` for dx, and the sums over
        rows of ``|dy| (|xhat| + m)`` and ``|dy|`` for dgamma and dbeta.
        """
        if name == "dbeta":
            rows = read_rows(np.abs(self.cotangent()).T[columns])
            return [Interval(sum(integers), 0, exponent) for integers, exponent in rows]
        if name == "dgamma":
            sums = [_ZERO] * len(columns)
            for row, dy in self.pairs():
                parts = _defined(row).xhat_magnitudes(dy, columns)
                sums = [one.plus(other) for one, other in zip(sums, parts, strict=True)]
            return sums
        row = _defined(self.row(block))
        if name == "dx":
            return row.dx_magnitudes(self.g(block), columns)
        parts = row.xhat_magnitudes(self.gamma, columns)
        beta = Vector(list(map(abs, self.beta.integers)), self.beta.exponent)
        return [one.plus(beta.at(i)) for i, one in zip(columns, parts, strict=True)]


def _defined(row: Row | None) -> Row:
    """Return a row that the caller knows to be defined."""
    if row is None:
        msg = "var + eps must be positive, got a row where it is 0"
        raise ValueError(msg)
    return row
