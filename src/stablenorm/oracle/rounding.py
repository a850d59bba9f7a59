"""
The four binary formats, the way between arrays of floats and integers, and verdicts on intervals.

A format is recognised by the name of the dtype, so that bfloat16 needs no import here. A verdict is
None if the interval cannot decide it; `surds.settle` then encloses the element anew.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# An error is known when its relative width is below the last bit of a float64, with some to spare.
ERROR_BITS = 60


class Format(NamedTuple):
    """A binary format: the bits of its significands, and the exponents of its smallest and largest ulp."""

    precision: int
    # The ulp of the subnormals.
    finest: int
    # The ulp of the largest finite numbers. Above them the grid continues with it.
    coarsest: int

    def ulp_exponent(self, top: int) -> int:
        """Exponent of the ulp at a number in [2**(top-1), 2**top)."""
        # Comparisons, here and below: calls of min and max were a fifth of the oracle's time.
        ulp = top - self.precision
        if self.finest <= ulp <= self.coarsest:
            return ulp
        return self.finest if ulp < self.finest else self.coarsest


FORMATS = {
    "float16": Format(11, -24, 5),
    "bfloat16": Format(8, -133, 120),
    "float32": Format(24, -149, 104),
    "float64": Format(53, -1074, 971),
}


def require(is_right: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raise the error with this message unless `is_right`."""
    if not is_right:
        raise error(message)


def format_of(dtype: npt.DTypeLike, name: str) -> Format:
    """Return the format of `dtype`; `name` is the argument to blame if it is not a known one."""
    kind = np.dtype(dtype).name
    require(kind in FORMATS, f"{name} must be {', '.join(FORMATS)}, got {kind}", TypeError)
    return FORMATS[kind]


# ---- integers times powers of two ----


class Interval(NamedTuple):
    """The numbers from ``low`` to ``low + width``, integers in units of ``2**exponent``."""

    low: int
    width: int
    exponent: int


@dataclass(frozen=True, slots=True)
class Vector:
    """The numbers ``integers * unit``: an array of Python's integers, and a positive unit."""

    integers: Array
    unit: Fraction

    def __add__(self, other: "Vector") -> "Vector":
        """Return the sums, element by element."""
        (p, q), (r, s) = self.unit.as_integer_ratio(), other.unit.as_integer_ratio()
        # The greatest number that both units are multiples of.
        unit = Fraction(math.gcd(p, r), math.lcm(q, s))
        a, b = self.unit // unit, other.unit // unit
        return Vector(a * self.integers + b * other.integers, unit)

    def __mul__(self, other: "Vector | Fraction") -> "Vector":
        """Return the products, element by element, or with one number."""
        if isinstance(other, Fraction):
            return Vector(self.integers * other.numerator, self.unit / other.denominator)
        return Vector(self.integers * other.integers, self.unit * other.unit)

    def __abs__(self) -> "Vector":
        """Return the magnitudes."""
        return Vector(abs(self.integers), self.unit)

    def total(self) -> Fraction:
        """Return the sum."""
        return Fraction(self.integers.sum()) * self.unit


def read(values: Array) -> Vector:
    """Return float64 `values` as integers and a power of two."""
    fractions, exponents = np.frexp(values)
    finest = int(exponents.min(initial=1024))
    significands = np.ldexp(fractions, 53).astype(np.int64).astype(object)
    integers = significands << (exponents - finest).astype(object)
    # Drop the trailing zeros that all integers share: short integers are quicker.
    ends = np.bitwise_or.reduce(integers, initial=0)
    zeros = max((ends & -ends).bit_length() - 1, 0)
    return Vector(integers >> zeros, Fraction(2) ** (finest - 53 + zeros))


# ---- verdicts ----


def nearest(interval: Interval | None, fmt: Format) -> float | None:
    """Round to `fmt`, ties to even; NaN without an interval, None if it cannot decide."""
    if interval is None:
        return math.nan
    low, width, exponent = interval
    ulp = fmt.ulp_exponent(low.bit_length() + exponent)
    shift = ulp - exponent
    if shift < 1:
        # A half of the ulp is a unit.
        low, width, shift = low << 1 - shift, width << 1 - shift, 1
    steps, half = low >> shift, 1 << shift - 1
    rest = low - (steps << shift)
    # An interval cannot decide if it reaches a midpoint, or zero and so two signs. It may cross a
    # power of two: on either grid the nearest is the power of two between them. (Above a negative
    # one the grid is twice as fine.)
    has_both_signs = low < 0 <= low + width
    if width and (has_both_signs or 2 * width >= half or rest <= half <= rest + width):
        return None
    steps += rest > half or (rest == half and steps & 1)
    if steps == 0:
        return -0.0 if low < 0 else 0.0
    if abs(steps) >> fmt.precision and ulp >= fmt.coarsest:
        return -math.inf if steps < 0 else math.inf
    return math.ldexp(steps, ulp)


# An element's error in ulp, whether it is misrounded, and the error again: error * 2**exponent.
Verdict = tuple[float, bool, int, int]
# The verdict on NaN and wrong infinities: an error beyond all quotients of errors and S.
WRONG: Verdict = math.inf, True, 1, 1 << 14


def quotient(p: int, q: int, exponent: int) -> float:
    """Return ``p / q * 2**exponent``, rounded once; inf beyond the range of float64, and if q = 0."""
    try:
        return (p << max(exponent, 0)) / (q << max(-exponent, 0))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def judge(
    fmt: Format, values: list[float], place: int, interval: Interval | None
) -> Verdict | None:
    """
    Judge one of the values, numbers of `fmt`; None if the interval cannot decide.

    Without an interval the exact value is undefined: only NaN is right.
    """
    value = values[place]
    if interval is None or math.isnan(value):
        return (0.0, False, 0, 0) if interval is None and math.isnan(value) else WRONG
    rounded = nearest(interval, fmt)
    if rounded is None:
        return None
    if math.isinf(value):
        # An infinity is right where the exact value rounds to it.
        return (0.5, False, 0, 0) if rounded == value else WRONG
    low, width, exponent = interval
    top = low.bit_length()
    # Zero lies in no binade: its ulp is the smallest subnormal.
    ulp = fmt.ulp_exponent(top + exponent) if low else fmt.finest
    number, denominator = value.as_integer_ratio()
    power = 1 - denominator.bit_length()
    unit = min(exponent, power)
    error = abs((number << power - unit) - (low << exponent - unit))
    # Undecided: the interval reaches another binade, or its width blurs the error.
    blur = width << ERROR_BITS + exponent - unit
    if width and ((low + width).bit_length() != top or error <= blur):
        return None
    return quotient(error, 1, unit - ulp), rounded != value, error, unit
