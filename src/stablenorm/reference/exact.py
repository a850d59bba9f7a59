r"""
Rows of y and dx, and columns of dgamma and dbeta, by integers, each element rounded once: the lowest rung.

A row is integers X times ``2**scale``, and eps an integer E times ``2**t``. With

- ``C = n X - sum(X)``, so that ``x - mean = C 2**scale / n``, and
- ``V = (n sum(X**2) - sum(X)**2) 4**(scale - q) + n**2 E 2**(t - 2 q)``, q the largest integer that
  makes it one, so that ``var + eps = V 4**q / n**2``:

    xhat = C 2**(scale - q) / sqrt(V)
    dx   = ((n G - sum(G)) V - C sum(G C) 4**(scale - q)) 2**(r - q) / sqrt(V**3)

where ``g = gamma * dy = G 2**r``. For RMS norm, sum(X) and sum(G) are 0. So every element is a
rational number plus integers times powers of two over square roots of integers: one root for y and
dx, one for each row of dgamma.

An integer square root encloses each root. If both ends of the enclosure round alike, that is the
element. If not, terms whose radicands differ by the square of a rational are merged. Square roots of
integers of which no two do so are linearly independent over the rationals (Besicovitch, J. London
Math. Soc. 15 (1940) 3). So the merged sum is rational, and compared exactly, or irrational, and no
tie: more bits decide it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from operator import lshift, mul
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import Format, format_of
from stablenorm.types import Array, Norm

# Bits of a root and of a factor at first: enough for everything but ties and exact results.
_BITS, _FIRST = 128, 192

# Primes for `_kind`: by 30 of them, hardly two of 2**15 radicands are compared in vain.
_PRIMES = [p for p in range(3, 128, 2) if all(p % d for d in range(3, p, 2))]


class Root(NamedTuple):
    """``1 / sqrt(radicand)``, which lies from `floor` to ``floor + 1`` in units of ``2**-bits``."""

    radicand: int
    bits: int
    floor: int
    # The square root of the radicand where that is an integer, and 0 elsewhere.
    whole: int


# An integer, and the root that it is multiplied by.
Term = tuple[int, Root]


def root_of(radicand: int, bits: int = _BITS) -> Root:
    whole = math.isqrt(radicand)
    bits += whole.bit_length()
    floor = math.isqrt((1 << 2 * bits) // radicand)
    return Root(radicand, bits, floor, whole if whole * whole == radicand else 0)


# ---- float64 numbers as integers ----


def integers_of(values: Array) -> tuple[list[int], int]:
    """Return integers and one exponent of two for all."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    # Strip the zero bits that all of them end in: short integers are quicker.
    every = int(np.bitwise_or.reduce(whole))
    zeros = max((every & -every).bit_length() - 1, 0)
    least = exponent[whole != 0].min(initial=2000)
    shifts = np.where(whole == 0, 0, exponent - least).tolist()
    return list(map(lshift, (whole >> zeros).tolist(), shifts)), int(least) - 53 + zeros


class Row:
    """A row as the module docstring names it; `shift` is ``scale - q``."""

    __slots__ = ("integers", "n", "norm", "q", "radicand", "scale", "shift", "total")

    def __init__(self, x: Array, norm: Norm, keep: bool = True) -> None:
        self.norm, (self.integers, self.scale) = norm, integers_of(x)
        self.n, self.total = len(x), sum(self.integers) if norm.kind == "layer" else 0
        squares = sum(map(mul, self.integers, self.integers))
        numerator, denominator = norm.eps.as_integer_ratio()
        t = 1 - denominator.bit_length()
        self.q = min(self.scale, t // 2) if numerator else self.scale
        self.shift = self.scale - self.q
        self.radicand = (self.n * squares - self.total**2) << 2 * self.shift
        self.radicand += self.n**2 * numerator << max(t - 2 * self.q, 0)
        if not keep:
            self.integers = []


# ---- rows ----


def statistics(row: Row) -> tuple[float, float]:
    """Return the mean, 0 of RMS norm, and rstd of a row, each rounded once to float64."""
    form = format_of(np.dtype(np.float64))
    mean = nearest([(row.total, root_of(row.n**2))], row.scale, form)
    return mean, nearest([(row.n, root_of(row.radicand))], -row.q, form)


def signs(row: Row) -> Array:
    """Return the signs of xhat: -1, 0 or 1."""
    return np.array([np.sign(row.n * integer - row.total) for integer in row.integers], float)


def y_row(row: Row, gamma: Array, beta: Array, dtype: np.dtype[Any]) -> Array:
    """Return y of a row, rounded once."""
    scale, exponent = integers_of(gamma)
    factors = [g * (row.n * v - row.total) for g, v in zip(scale, row.integers, strict=True)]
    return _rounded(beta, factors, root_of(row.radicand), exponent + row.shift, dtype)


def dx_row(dy: Array, row: Row, gamma: Array, dtype: np.dtype[Any], dsum: Array) -> Array:
    """Return dx of a row, plus dsum; each element is rounded once."""
    (scale, exponent), (cotangent, r) = integers_of(gamma), integers_of(dy)
    n, radicand, integers = row.n, row.radicand, row.integers
    g = list(map(mul, scale, cotangent))
    total = sum(g) if row.norm.kind == "layer" else 0
    inner = n * sum(map(mul, g, integers)) - total * row.total << 2 * row.shift
    # The part of (n g - total) V - (n X - row.total) inner that all elements share.
    same = row.total * inner - total * radicand
    along, inner, unit = n * radicand, n * inner, r + exponent - row.q
    factors = [along * v - inner * integer + same for v, integer in zip(g, integers, strict=True)]
    return _rounded(dsum, factors, root_of(radicand**3), unit, dtype)


def _rounded(
    offset: Array, factors: list[int], root: Root, unit: int, dtype: np.dtype[Any]
) -> Array:
    """Round ``offset + factor * root * 2**unit``, each once."""
    (offsets, place), form = integers_of(offset), format_of(dtype)
    # The first bits of factors nearly always decide; numbers out of range have thousands.
    size = max(map(int.bit_length, factors), default=0)
    cut = max(size - _FIRST, 0)
    least = min(unit + cut - root.bits, place)
    shift = unit + cut - root.bits - least
    numbers = [
        (number << place - least) + ((factor >> cut) * root.floor << shift)
        for number, factor in zip(offsets, factors, strict=True)
    ]
    # The cut factor and the floor of the root are each less than 1 too small.
    error = 2 << max(size - cut, root.floor.bit_length()) + shift
    quick = dtype == np.float64
    result = _floats(numbers, error, least) if quick else np.full(len(factors), np.nan)
    lowest, one = min(unit, place), root_of(1)
    for j in np.flatnonzero(np.isnan(result)).tolist():
        value = None
        # A rational sum is often a tie, which no enclosure decides.
        if not root.whole:
            value = _round(numbers[j] - error, numbers[j] + error, least, form)
        if value is None:
            terms = [(factors[j] << unit - lowest, root)]
            if offsets[j]:
                terms.append((offsets[j] << place - lowest, one))
            value = nearest(terms, lowest, form)
        result[j] = value
    return result.astype(dtype)


# ---- rounding ----


def _floats(numbers: list[int], error: int, unit: int) -> Array:
    """Round what is within `error` of `numbers`, times ``2**unit``; NaN where the ends round differently."""
    if max(map(int.bit_length, [*numbers, error])) > 1000:
        # Such an integer may have no float64; of others, Python makes the nearest.
        return np.full(len(numbers), np.nan)
    low, high = (np.fromiter((v + end for v in numbers), float) for end in (-error, error))
    result = np.ldexp(low, unit)
    # A subnormal result would be rounded twice.
    return np.where((low == high) & (np.abs(result) >= 2.0**-1022), result, np.nan)


def nearest(terms: Sequence[Term], unit: int, form: Format) -> float:
    """Round the sum of `terms`, times ``2**unit``, to a format."""
    bits, merged = _BITS, None
    while (value := _round(*_enclosed(terms, unit), form)) is None:
        if merged is None:
            merged, unit = _merged(terms, unit)
        else:
            bits *= 2
        terms = [(factor, root_of(radicand, bits)) for factor, radicand in merged]
    return value


def _enclosed(terms: Sequence[Term], unit: int) -> tuple[int, int, int]:
    """Return integers below and above the sum, the same where it is exact, and their unit."""
    bits = max([root.bits for _, root in terms], default=0)
    low = high = 0
    for factor, (radicand, places, floor, whole) in terms:
        if radicand == 1:
            least = most = factor << places
        elif whole:
            least, rest = divmod(factor << places, whole)
            most = least + 1 if rest else least
        else:
            least = factor * floor
            least, most = (least, least + factor) if factor > 0 else (least + factor, least)
        low += least << bits - places
        high += most << bits - places
    return low, high, unit - bits


def _round(low: int, high: int, unit: int, form: Format) -> float | None:
    """Round an enclosed number to a format, ties to even; None if the ends round differently."""
    negative = low + high < 0
    if negative:
        low, high = -high, -low
    if low < 0 or low == 0 < high:
        return None
    # The grid at the lower end is no coarser than that at the upper.
    top = low.bit_length() + unit
    ulp = (top if top > form.emin else form.emin + 1) - form.digits
    places = ulp - 1 - unit
    if places > 0:
        halves = low >> places
        same, sharp = high >> places == halves, halves << places == low
    else:
        halves, same, sharp = low << -places, low == high, True
    # A lower end on a midpoint leaves open whether the number is a tie.
    if not same or (sharp and halves & 1 and low < high):
        return None
    steps = halves >> 1 if sharp and halves & 3 == 1 else halves + 1 >> 1
    # Zero is finite whatever its unit.
    finite = not steps or steps.bit_length() + ulp <= form.emax + 1
    value = math.ldexp(steps, ulp) if finite else math.inf
    return -value if negative else value


def _merged(terms: Sequence[Term], unit: int) -> tuple[list[tuple[int, int]], int]:
    """Return factors and independent radicands of the sum, 1 of its rational part if that is dyadic; and their unit."""
    rational = Fraction(0)
    kinds: dict[tuple[int, ...], dict[int, Fraction]] = {}
    for factor, (radicand, _, _, whole) in terms:
        if whole:
            rational += Fraction(factor, whole)
            continue
        alike = kinds.setdefault(_kind(radicand), {})
        for other in alike:
            root = math.isqrt(other * radicand)
            if root * root == other * radicand:
                # 1 / sqrt(radicand) = root / radicand / sqrt(other).
                alike[other] += Fraction(factor * root, radicand)
                break
        else:
            alike[radicand] = Fraction(factor)
    merged = [
        (factor.numerator, radicand * factor.denominator**2)
        for alike in kinds.values()
        for radicand, factor in alike.items()
        if factor
    ]
    whole, divisor = rational.as_integer_ratio()
    if divisor & (divisor - 1):
        # A rational that is not dyadic is no tie either.
        return [*merged, (whole, divisor**2)], unit
    places = divisor.bit_length() - 1
    others = [(factor << places, radicand) for factor, radicand in merged]
    return [(whole, 1), *others], unit - places


def _kind(radicand: int) -> tuple[int, ...]:
    """Return an invariant of all radicands that differ by the square of a rational."""
    residues = []
    for p in _PRIMES:
        while radicand % (p * p) == 0:
            radicand //= p * p
        # Euler's criterion: 1 of squares modulo p, p - 1 of others.
        residues.append(pow(radicand, p // 2, p))
    return tuple(residues)
