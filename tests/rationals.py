"""Arrays as exact rationals, and the numbers of a dtype around one."""

from fractions import Fraction

import numpy as np


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
