"""
The four binary formats, and the way between arrays of floats and Python integers.

A format is recognised by the name of the dtype, so that bfloat16 needs no import here.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Format(NamedTuple):
    """A binary format: `precision` in bits, exponents of its smallest and largest binade."""

    precision: int
    emin: int
    emax: int

    @property
    def finest(self) -> int:
        """Exponent of the smallest subnormal: no ulp is below it."""
        return self.emin - self.precision + 1

    @property
    def coarsest(self) -> int:
        """Exponent of the ulp of the largest finite numbers; the grid goes on with it above."""
        return self.emax - self.precision + 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return math.ldexp(2**self.precision - 1, self.coarsest)

    def ulp_exponent(self, top: int) -> int:
        """Exponent of the ulp at a number in [2**(top-1), 2**top)."""
        return min(max(top - self.precision, self.finest), self.coarsest)


FORMATS = {
    "float16": Format(11, -14, 15),
    "bfloat16": Format(8, -126, 127),
    "float32": Format(24, -126, 127),
    "float64": Format(53, -1022, 1023),
}


def format_of(dtype: npt.DTypeLike, name: str) -> Format:
    """Return the format of `dtype`; `name` is the argument to blame if it is not a known one."""
    found = FORMATS.get(np.dtype(dtype).name)
    if found is None:
        msg = f"{name} must be {', '.join(FORMATS)}, got {np.dtype(dtype).name}"
        raise TypeError(msg)
    return found


def split(values: Array) -> tuple[Array, Array]:
    """Split finite float64 `values` into odd int64 mantissas (or 0) and exponents."""
    fraction, exponent = np.frexp(values)
    mantissa = np.ldexp(fraction, 53).astype(np.int64)
    # The lowest set bit is a power of two, which frexp reads exactly; 0 counts as having bit 0.
    lowest = np.where(mantissa == 0, 1, mantissa & -mantissa)
    zeros = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1
    return mantissa >> zeros, np.where(mantissa == 0, 0, exponent - 53 + zeros)


def read_rows(matrix: Array) -> Iterator[tuple[list[int], int]]:
    """Yield each row of a (rows, n) float64 matrix as integers and one exponent of two."""
    if matrix.shape[1] == 0:
        yield from (([], 0) for _ in range(matrix.shape[0]))
        return
    # 2**15 elements: enough to forget NumPy's overhead on short rows, little memory on long ones.
    block = max(1, 2**15 // matrix.shape[1])
    for start in range(0, matrix.shape[0], block):
        mantissa, exponent = split(matrix[start : start + block])
        # A zero has no say in the common exponent.
        lifted = np.where(mantissa == 0, np.iinfo(np.int64).max, exponent)
        common = np.where((mantissa == 0).all(axis=1), 0, lifted.min(axis=1))
        shift = np.where(mantissa == 0, 0, exponent - common[:, None])
        top = np.frexp(mantissa.astype(np.float64))[1] + shift
        # 63 bits and a sign fit into int64; then NumPy shifts, else Python's integers do.
        small = top.max(axis=1) <= 63
        for row in range(mantissa.shape[0]):
            if small[row]:
                yield (mantissa[row] << shift[row]).tolist(), int(common[row])
            else:
                pairs = zip(mantissa[row].tolist(), shift[row].tolist(), strict=True)
                yield [m << s for m, s in pairs], int(common[row])


def to_parts(integer: int, exponent: int) -> tuple[float, int]:
    """Return ``integer * 2**exponent`` as a float of at most 64 bits and an exponent of two."""
    # 64 bits are more than a float64 holds, and an integer that small converts always.
    excess = max(integer.bit_length() - 64, 0)
    return float(integer >> excess), exponent + excess


def power(exponent: int) -> Fraction:
    """Return 2**exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def top_exponent(value: Fraction, fmt: Format) -> int:
    """Return the integer with ``2**(top-1) <= |value| < 2**top``; for 0 below all of `fmt`."""
    if value == 0:
        return fmt.finest
    top = value.numerator.bit_length() - value.denominator.bit_length() + 1
    return top if abs(value) >= power(top - 1) else top - 1


def finish(steps: int, exponent: int, fmt: Format, *, negative: bool) -> float:
    """Return ``steps * 2**exponent``, on the grid of `fmt`, as a float; inf above its range."""
    if steps == 0:
        return -0.0 if negative else 0.0
    if abs(steps) >> fmt.precision and exponent >= fmt.coarsest:
        return -math.inf if negative else math.inf
    return math.ldexp(steps, exponent)


def round_ratio(value: Fraction, fmt: Format) -> float:
    """Round a rational to `fmt`, ties to even; the result is exact as a Python float."""
    exponent = fmt.ulp_exponent(top_exponent(value, fmt))
    return finish(round(value / power(exponent)), exponent, fmt, negative=value < 0)
