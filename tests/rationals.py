"""Arrays as exact rationals, the numbers of a dtype around one, and arrays to normalize."""

from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
NAMES = ["y", "dx", "dgamma", "dbeta"]
UINT = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def fractions(array):
    return [Fraction(v) for v in np.asarray(array).astype(np.float64).tolist()]


def square_root(value, digits):
    """The square root of a rational to so many digits, by decimal arithmetic."""
    with localcontext() as context:
        context.prec = digits + 10
        context.Emax, context.Emin = 10**6, -(10**6)
        root = (Decimal(value.numerator) / Decimal(value.denominator)).sqrt()
        return Fraction(root)


def neighbours(value, dtype):
    """The two numbers of `dtype` around a finite value, found by walking the grid."""
    near = np.array(float(value)).astype(dtype)
    below = above = near
    if Fraction(float(near)) > value:
        below = np.nextafter(near, dtype.type(-np.inf))
    elif Fraction(float(near)) < value:
        above = np.nextafter(near, dtype.type(np.inf))
    return below, above


def nearest(value, dtype):
    """The number of `dtype` next to a finite value, ties to even."""
    below, above = neighbours(value, dtype)
    to_below, to_above = value - Fraction(float(below)), Fraction(float(above)) - value
    if to_below == to_above:
        bits = int(np.asarray(below).view(UINT[dtype.itemsize]))
        return below if bits % 2 == 0 else above
    return below if to_below < to_above else above


def sample(dtype, rows, n, rng, offset=0.0):
    x = (offset + rng.standard_normal((rows, n))).astype(dtype)
    gamma = (1 + 0.1 * rng.standard_normal(n)).astype(dtype)
    beta = (0.1 * rng.standard_normal(n)).astype(dtype)
    dy = rng.standard_normal((rows, n)).astype(dtype)
    return x, gamma, beta, dy
