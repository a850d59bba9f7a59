"""Arithmetic that the checkers share: roundings, sizes and random cotangents."""

from typing import Any

import numpy as np

from stablenorm.formats import format_of
from stablenorm.types import Array

# Stands for a bound of 0: nothing is 0 times as large.
TINIEST = 2.0**-1074


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Return u, the largest relative error of one rounding to `dtype`."""
    return 2.0 ** -format_of(dtype).digits


def tiniest(dtype: np.dtype[Any]) -> float:
    """Return the smallest positive number of `dtype`."""
    return float(np.nextafter(dtype.type(0), dtype.type(1)))


def flat(a: Array) -> Array:
    """Return an array as one row of float64."""
    return a.astype(np.float64).reshape(-1)


def rms(values: Array, axis: int | None = None) -> Array:
    """Return the root mean square along an axis, kept; None is all axes. Squares may overflow."""
    largest = float(np.max(np.abs(values), initial=0.0)) or 1.0
    squares = np.mean(np.square(values / largest), axis=axis, keepdims=axis is not None)
    return np.asarray(largest * np.sqrt(squares))


def draw(size: int, rng: np.random.Generator) -> Array:
    """Draw a cotangent: signed, no zeros, and the same in all four dtypes."""
    # Signed, since many maps annihilate the ones; multiples of 1/16 below 4, so that each dtype
    # holds a number and three times its size exactly.
    u = np.round(rng.standard_normal(size) * 16).clip(-63, 63) / 16
    return np.where(u == 0, 0.0625, u)
