r"""
Elements of y, dx, dgamma and dbeta in integers: what double-double leaves undecided.

A row is integers X times ``2**scale``, and eps an integer E times ``2**t``. With

- ``C = n X - sum(X)``, so that ``x - mean = C 2**scale / n``, and
- ``V = (n sum(X**2) - sum(X)**2) 4**(scale - q) + n**2 E 2**(t - 2 q)``, q the largest integer that
  makes it one, so that ``var + eps = V 4**q / n**2``:

    xhat = C 2**(scale - q) / sqrt(V)
    dx   = ((n G - sum(G)) V - C sum(G C) 4**(scale - q)) 2**(r - q) / sqrt(V**3)

where ``g = gamma * dy = G 2**r``. So every element is a rational number, beta, plus integers times
powers of two over square roots of integers: one of y and dx, one for each row of dgamma.

Each root is enclosed by one integer square root. If both ends of the sum round alike, that is the
element. If not, terms whose radicands differ by the square of a rational are merged. Square roots
of integers of which no two do so are linearly independent over the rationals (Besicovitch, J. London
Math. Soc. 15 (1940) 3). So what is left is a rational, or irrational and no tie, nor zero: more
bits decide it.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from operator import lshift, mul
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import Format, format_of
from stablenorm.types import Array

# Of a root: what is no tie and no exact result is decided by these nearly always.
_BITS = 256

# For `_kind`: 30 of them, so that among 2**15 radicands hardly two are compared in vain.
_PRIMES = [p for p in range(3, 128, 2) if all(p % d for d in range(3, p, 2))]


class Root(NamedTuple):
    """``1 / sqrt(radicand)``, which lies from ``floor`` to ``floor + 1`` in units of ``2**-bits``."""

    radicand: int
    bits: int
    floor: int


# An integer, an exponent of two, and the root that they are multiplied by.
Term = tuple[int, int, Root]


def _root(radicand: int, bits: int = _BITS) -> Root:
    bits += radicand.bit_length() // 2
    return Root(radicand, bits, math.isqrt((1 << 2 * bits) // radicand))


# ---- floats as integers ----


def _integers(values: Array) -> tuple[list[int], int]:
    """Return float64 `values` as integers and one exponent of two."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    some = whole != 0
    if not some.any():
        return [0] * len(values), 0
    least = exponent[some].min()
    # Without the zeros that all of them end in: short integers are quicker.
    every = int(np.bitwise_or.reduce(whole))
    zeros = (every & -every).bit_length() - 1
    shifts = np.where(some, exponent - least, 0).tolist()
    return list(map(lshift, (whole >> zeros).tolist(), shifts)), int(least) - 53 + zeros


def _integer(value: float) -> tuple[int, int]:
    mantissa, exponent = math.frexp(value)
    return int(math.ldexp(mantissa, 53)), exponent - 53


class Row:
    """A row in integers, as the module docstring names them; `shift` is ``scale - q``."""

    __slots__ = ("integers", "n", "q", "radicand", "scale", "shift", "total")

    def __init__(self, x: Array, eps: float) -> None:
        self.integers, self.scale = _integers(x)
        self.n, self.total = len(x), sum(self.integers)
        squares = sum(map(mul, self.integers, self.integers))
        numerator, denominator = eps.as_integer_ratio()
        t = 1 - denominator.bit_length()
        self.q = min(self.scale, t // 2) if numerator else self.scale
        self.shift = self.scale - self.q
        self.radicand = (self.n * squares - self.total**2) << 2 * self.shift
        self.radicand += self.n**2 * numerator << max(t - 2 * self.q, 0)

    def centered(self, column: int) -> int:
        """Return C of one element, which has the sign of xhat."""
        return self.n * self.integers[column] - self.total


class RowOfColumn(NamedTuple):
    """What an element of dgamma needs of each row."""

    n: int
    total: int
    scale: int
    shift: int
    root: Root


# ---- the elements ----


def _places(wanted: Array) -> Iterator[tuple[int, list[int]]]:
    """Yield the rows in which a mask is set somewhere, and where."""
    for i in np.flatnonzero(wanted.any(axis=1)).tolist():
        yield i, np.flatnonzero(wanted[i]).tolist()


def signs(x: Array, wanted: Array) -> Array:
    """Return the signs of xhat, where `wanted` is set: -1, 0 or 1; x is float64, as all below."""
    found: list[int] = []
    for i, columns in _places(wanted):
        centered = map(Row(x[i], 0.0).centered, columns)
        found += [(c > 0) - (c < 0) for c in centered]
    return np.array(found, np.float64)


def y_elements(
    x: Array, gamma: Array, beta: Array, eps: float, wanted: Array, dtype: np.dtype[Any]
) -> Array:
    """Return y where `wanted` is set."""
    found, form = [], format_of(dtype)
    scale, offset = gamma.tolist(), beta.tolist()
    for i, columns in _places(wanted):
        row = Row(x[i], eps)
        root = _root(row.radicand)
        for j in columns:
            factor, exponent = _integer(scale[j])
            term = factor * row.centered(j), exponent + row.shift, root
            found.append(_nearest(_integer(offset[j]), [term], form))
    return np.array(found).astype(dtype)


def dx_elements(
    dy: Array, x: Array, gamma: Array, eps: float, wanted: Array, dtype: np.dtype[Any]
) -> Array:
    """Return dx where `wanted` is set."""
    found, form = [], format_of(dtype)
    scale, exponent = _integers(gamma)
    for i, columns in _places(wanted):
        row = Row(x[i], eps)
        root = _root(row.radicand**3)
        cotangent, r = _integers(dy[i])
        g, places = list(map(mul, scale, cotangent)), r + exponent - row.q
        total = sum(g)
        inner = row.n * sum(map(mul, g, row.integers)) - total * row.total << 2 * row.shift
        for j in columns:
            factor = (row.n * g[j] - total) * row.radicand - row.centered(j) * inner
            found.append(_nearest((0, 0), [(factor, places, root)], form))
    return np.array(found).astype(dtype)


def rows_of_columns(x: Array, eps: float) -> list[RowOfColumn]:
    """Return what elements of dgamma need of these rows, which have a layer norm."""
    rows = (Row(each, eps) for each in x)
    return [RowOfColumn(r.n, r.total, r.scale, r.shift, _root(r.radicand)) for r in rows]


def dgamma_element(dy: Array, x: Array, rows: Sequence[RowOfColumn], dtype: np.dtype[Any]) -> float:
    """Return dgamma of one column, given all rows."""
    terms = []
    for cotangent, value, row in zip(dy.tolist(), x.tolist(), rows, strict=True):
        factor, exponent = _integer(cotangent)
        integer, places = _integer(value)
        integer, places = row.n * integer, places - row.scale
        centered = (integer << places if places >= 0 else integer >> -places) - row.total
        terms.append((factor * centered, exponent + row.shift, row.root))
    return _nearest((0, 0), terms, format_of(dtype))


def dbeta_element(dy: Array, dtype: np.dtype[Any]) -> float:
    """Return dbeta of one column."""
    integers, exponent = _integers(dy)
    return _nearest((sum(integers), exponent), [], format_of(dtype))


# ---- rounding ----


def _nearest(offset: tuple[int, int], terms: Sequence[Term], form: Format) -> float:
    """Round ``offset[0] * 2**offset[1]`` plus the sum of `terms` to a format."""
    found = _round(*_enclosed(offset, terms), form)
    if found is not None:
        return found
    offset, merged = _merged(offset, terms)
    bits = _BITS
    while True:
        terms = [(factor, exponent, _root(radicand, bits)) for factor, exponent, radicand in merged]
        if (found := _round(*_enclosed(offset, terms), form)) is not None:
            return found
        bits *= 2


def _enclosed(offset: tuple[int, int], terms: Sequence[Term]) -> tuple[int, int, int]:
    """Return integers below and above the sum, the same where it is exact, and their unit."""
    unit = min([offset[1], *(exponent - root.bits for _, exponent, root in terms)])
    low = high = offset[0] << offset[1] - unit
    for factor, exponent, root in terms:
        places = exponent - root.bits - unit
        low += (factor * root.floor + min(factor, 0)) << places
        high += (factor * root.floor + max(factor, 0)) << places
    return low, high, unit


def _round(low: int, high: int, unit: int, form: Format) -> float | None:
    """Round what is enclosed to a format, ties to even; None where that is open."""
    negative = low + high < 0
    if negative:
        low, high = -high, -low
    if low < 0 or low == 0 < high:
        return None
    # Of the grid at the lower end, which is no coarser than that at the upper.
    ulp = max(low.bit_length() + unit, form.emin + 1) - form.digits
    places = ulp - 1 - unit
    if places > 0:
        halves, rest = low >> places, low & (1 << places) - 1
        same = high >> places == halves
    else:
        halves, rest, same = low << -places, 0, low == high
    # On a midpoint, the lower end leaves open whether all is a tie.
    if not same or (low < high and rest == 0 and halves & 1):
        return None
    steps = halves >> 1 if rest == 0 and halves & 3 == 1 else halves + 1 >> 1
    finite = steps.bit_length() + ulp <= form.emax + 1
    value = math.ldexp(steps, ulp) if finite else math.inf
    return -value if negative else value


def _merged(
    offset: tuple[int, int], terms: Sequence[Term]
) -> tuple[tuple[int, int], list[tuple[int, int, int]]]:
    """Return the sum with what is rational in the offset, and radicands that are independent."""
    unit = min(exponent for _, exponent, _ in terms)
    totals: dict[int, int] = {}
    for number, exponent, root in terms:
        totals[root.radicand] = totals.get(root.radicand, 0) + (number << exponent - unit)
    # What is rational is a multiple of 1 / sqrt(1).
    rational = offset[0] * Fraction(2) ** (offset[1] - unit)
    kinds: dict[tuple[int, ...], dict[int, Fraction]] = {_kind(1): {1: rational}}
    for radicand, total in totals.items():
        if total == 0:
            continue
        alike = kinds.setdefault(_kind(radicand), {})
        for other in alike:
            middle = math.isqrt(other * radicand)
            if middle * middle == other * radicand:
                # 1 / sqrt(radicand) = middle / radicand / sqrt(other).
                alike[other] += Fraction(total * middle, radicand)
                break
        else:
            alike[radicand] = Fraction(total)
    offset, merged = (0, 0), []
    for radicand, factor in (item for alike in kinds.values() for item in alike.items()):
        top, bottom = (factor * Fraction(2) ** unit).as_integer_ratio()
        if radicand == 1 and bottom & (bottom - 1) == 0:
            # A dyadic rational: the only kind that can be a tie.
            offset = top, 1 - bottom.bit_length()
        elif top:
            merged.append((top, 0, radicand * bottom**2))
    return offset, merged


def _kind(radicand: int) -> tuple[int, ...]:
    """Return what is the same for all radicands that differ by the square of a rational."""
    found = []
    for p in _PRIMES:
        while radicand % (p * p) == 0:
            radicand //= p * p
        # Euler's criterion: 1 of squares modulo p, p - 1 of others.
        found.append(pow(radicand, p // 2, p))
    return tuple(found)
