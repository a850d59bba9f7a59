"""Arrays as exact rationals, the numbers of a dtype around one, and arrays to normalize."""

from fractions import Fraction

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64")]
NAMES = ["y", "dx", "dgamma", "dbeta"]


def fractions(array):
    return [Fraction(v) for v in np.asarray(array).astype(np.float64).tolist()]


def neighbours(value, dtype):
    """The two numbers of `dtype` around a finite value, found by walking the grid."""
    near = np.array(float(value)).astype(dtype)
    below = above = near
    if Fraction(float(near)) > value:
        below = np.nextafter(near, dtype.type(-np.inf))
    elif Fraction(float(near)) < value:
        above = np.nextafter(near, dtype.type(np.inf))
    return below, above


def sample(dtype, rows, n, rng, offset=0.0):
    x = (offset + rng.standard_normal((rows, n))).astype(dtype)
    gamma = (1 + 0.1 * rng.standard_normal(n)).astype(dtype)
    beta = (0.1 * rng.standard_normal(n)).astype(dtype)
    dy = rng.standard_normal((rows, n)).astype(dtype)
    return x, gamma, beta, dy
