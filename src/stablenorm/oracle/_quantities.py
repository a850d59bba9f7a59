"""
y, dx, dgamma and dbeta block by block: enclosures, exact elements, and the S of the contract.

A block of y or dx is a row; dgamma and dbeta are one block each.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from stablenorm.oracle._formats import Array, power, read_rows
from stablenorm.oracle._judge import Block
from stablenorm.oracle._rows import Row, dx_magnitudes, dx_terms, enclose, read_row, y_terms
from stablenorm.oracle._surds import Surd

# An integer times a power of two.
Dyadic = tuple[int, int]


class Vector(NamedTuple):
    """The numbers ``integers * 2**exponent``."""

    integers: list[int]
    exponent: int


class Inputs(NamedTuple):
    """What a layer norm and its gradients are made of; x and dy are (rows, n) float64 matrices."""

    x: Array
    gamma: Vector
    beta: Vector
    eps: Fraction
    dy: Array | None

    def row(self, index: int) -> Row | None:
        """Return one row; None where it has no variance and eps is 0."""
        ((integers, scale),) = read_rows(self.x[index : index + 1])
        return read_row(integers, scale, self.eps)

    def every_row(self) -> Iterator[Row | None]:
        """Yield each row; None where it has no variance and eps is 0."""
        for integers, scale in read_rows(self.x):
            yield read_row(integers, scale, self.eps)

    def cotangent(self) -> Array:
        """Return dy, which everything but y needs."""
        if self.dy is None:
            msg = "dy must be given to exact_layer_norm for dx, dgamma and dbeta, got None"
            raise ValueError(msg)
        return self.dy

    def g(self, dy: Vector) -> Vector:
        """Return ``gamma * dy`` for a row of dy."""
        products = [a * b for a, b in zip(self.gamma.integers, dy.integers, strict=True)]
        return Vector(products, self.gamma.exponent + dy.exponent)


def blocks(inputs: Inputs, name: str) -> Iterator[Block | None]:
    """Yield the blocks of a quantity; None for one that is undefined."""
    if name == "y":
        for row in inputs.every_row():
            yield None if row is None else _y_block(inputs, row)
    elif name == "dx":
        for row, dy in zip(inputs.every_row(), _vectors(inputs.cotangent()), strict=True):
            yield None if row is None else Block(*enclose(dx_terms(row, *inputs.g(dy))))
    elif name == "dgamma":
        yield _dgamma_block(inputs)
    else:
        yield _dbeta_block(inputs)


def _vectors(matrix: Array) -> Iterator[Vector]:
    """Yield the rows of a matrix."""
    for integers, exponent in read_rows(matrix):
        yield Vector(integers, exponent)


def _y_block(inputs: Inputs, row: Row) -> Block:
    """Enclose y of a row."""
    return Block(*enclose(y_terms(row, *inputs.gamma), *inputs.beta))


def _dgamma_block(inputs: Inputs) -> Block | None:
    """Enclose the sum over rows of ``dy * xhat``."""
    n = inputs.x.shape[1]
    total, widths, unit = [0] * n, [0] * n, 0
    for row, dy in zip(inputs.every_row(), _vectors(inputs.cotangent()), strict=True):
        if row is None:
            return None
        # The finest unit so far; only a row with a finer one moves the sums.
        low, width, exponent = enclose(y_terms(row, *dy))
        if exponent < unit:
            total, widths = ([v << unit - exponent for v in sums] for sums in (total, widths))
            unit = exponent
        shift = exponent - unit
        total = [a + (b << shift) for a, b in zip(total, low, strict=True)]
        widths = [a + (b << shift) for a, b in zip(widths, width, strict=True)]
    return Block(total, widths, unit)


def _dbeta_block(inputs: Inputs) -> Block:
    """Return the sums over rows of dy, which are integers in a common unit."""
    columns = list(_vectors(inputs.cotangent().T))
    unit = min(column.exponent for column in columns)
    sums = [sum(column.integers) << column.exponent - unit for column in columns]
    return Block(sums, [0] * len(sums), unit)


def surds(inputs: Inputs, name: str, block: int, columns: list[int]) -> list[Surd]:
    """Return elements of a defined block exactly."""
    if not columns:
        return []
    n = inputs.x.shape[1]
    if name == "dbeta":
        low, _, exponent = _dbeta_block(inputs)
        return [Surd(low[i] * power(exponent), n, {}) for i in columns]
    if name == "dgamma":
        return _dgamma_surds(inputs, columns)
    row = _defined(inputs.row(block))
    if name == "y":
        terms = y_terms(row, *inputs.gamma)
        offset, divisor = inputs.beta, 1
    else:
        terms = dx_terms(row, *_g_of(inputs, block))
        offset, divisor = Vector([0] * n, 0), row.radicand
    radicand, coefficient = row.surd()
    coefficient *= power(terms.exponent) / divisor
    added = power(offset.exponent)
    return [
        Surd(offset.integers[i] * added, n, {radicand: terms.integers[i] * coefficient})
        for i in columns
    ]


def _dgamma_surds(inputs: Inputs, columns: list[int]) -> list[Surd]:
    """Return elements of dgamma; rows with the same square root share a term."""
    sums: list[dict[int, Fraction]] = [{} for _ in columns]
    for row, dy in zip(inputs.every_row(), _vectors(inputs.cotangent()), strict=True):
        radicand, coefficient = _defined(row).surd()
        terms = y_terms(_defined(row), *dy)
        coefficient *= power(terms.exponent)
        for i, found in zip(columns, sums, strict=True):
            if terms.integers[i]:
                found[radicand] = found.get(radicand, 0) + terms.integers[i] * coefficient
    n = inputs.x.shape[1]
    return [Surd(Fraction(0), n, {r: c for r, c in s.items() if c}) for s in sums]


def _defined(row: Row | None) -> Row:
    """Return a row that the caller knows to be defined."""
    if row is None:
        msg = "var + eps must be positive, got a row where it is 0"
        raise ValueError(msg)
    return row


def _g_of(inputs: Inputs, index: int) -> Vector:
    """Return g of one row."""
    (dy,) = _vectors(inputs.cotangent()[index : index + 1])
    return inputs.g(dy)


def magnitudes(inputs: Inputs, name: str, block: int, columns: list[int]) -> list[Dyadic]:
    """
    Return S of the contract for elements of a defined block, to a relative 2**-200 or so.

    With m the mean of |xhat| over the row, S is ``|gamma| (|xhat| + m) + |beta|`` for y,
    ``rstd (|g| + mean|g| + (|xhat| + m) mean|(g - mean g) xhat|)`` for dx, and the sums over rows
    of ``|dy| (|xhat| + m)`` and ``|dy|`` for dgamma and dbeta.
    """
    if name == "dbeta":
        return [_sum_of_magnitudes(inputs, column) for column in columns]
    if name == "dgamma":
        sums = [(0, 0)] * len(columns)
        for row, dy in zip(inputs.every_row(), _vectors(inputs.cotangent()), strict=True):
            parts = _spreads(_defined(row), dy, columns)
            sums = [_add(*pair) for pair in zip(sums, parts, strict=True)]
        return sums
    row = _defined(inputs.row(block))
    if name == "y":
        beta = [(abs(inputs.beta.integers[i]), inputs.beta.exponent) for i in columns]
        parts = _spreads(row, inputs.gamma, columns)
        return [_add(*pair) for pair in zip(parts, beta, strict=True)]
    g = _g_of(inputs, block)
    root, found = dx_terms(row, *g).root, dx_magnitudes(row, g.integers)
    return [(found[i] * root.lower // row.n, g.exponent + root.exponent) for i in columns]


def _sum_of_magnitudes(inputs: Inputs, column: int) -> Dyadic:
    """Return the sum of |dy| over a column."""
    (dy,) = _vectors(inputs.cotangent().T[column : column + 1])
    return sum(map(abs, dy.integers)), dy.exponent


def _spreads(row: Row, factor: Vector, columns: list[int]) -> list[Dyadic]:
    """Return ``|factor| (|xhat| + mean|xhat|)`` of a row."""
    root, deviations = row.root(), row.deviations()
    exponent = factor.exponent + row.scale + root.exponent
    return [
        (abs(factor.integers[i]) * deviations[i] * root.lower // row.n, exponent) for i in columns
    ]


def _add(first: Dyadic, second: Dyadic) -> Dyadic:
    """Add two dyadic numbers."""
    unit = min(first[1], second[1])
    return (first[0] << first[1] - unit) + (second[0] << second[1] - unit), unit


def scale_of_g(inputs: Inputs, block: int) -> Dyadic:
    """Return ``rstd max|g|`` of a defined row."""
    row, g = _defined(inputs.row(block)), _g_of(inputs, block)
    root = row.root()
    return row.n * root.lower * max(map(abs, g.integers)), g.exponent + root.exponent
