"""
The common ways to normalize a row, in NumPy, for the tables and a picture.

Each function computes statistics, or a backward, and nothing else. Every operation rounds to float32.
Sums over a row are NumPy's pairwise ones; Welford's is sequential.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stablenorm.formats import parse
from stablenorm.records import Array

# (mean, var) of each row, as float32 columns.
Moments = Callable[[Array], tuple[Array, Array]]


def mean_of(v: Array) -> Array:
    """Return the row means, as a column of v's dtype."""
    mean: Array = v.mean(axis=-1, keepdims=True)
    return mean


def two_pass(x: Array) -> tuple[Array, Array]:
    """Return the mean, rounded, and the mean square of x less that mean."""
    mean = mean_of(x)
    return mean, mean_of(np.square(x - mean))


def one_pass(x: Array) -> tuple[Array, Array]:
    """Return the mean, and E[x^2] - E[x]^2."""
    mean = mean_of(x)
    return mean, mean_of(x * x) - mean * mean


def welford(x: Array) -> tuple[Array, Array]:
    """Return mean and variance, updated element by element."""
    mean = np.zeros((len(x), 1), x.dtype)
    squares = np.zeros_like(mean)
    for count in range(x.shape[1]):
        element = x[:, count : count + 1]
        before = element - mean
        mean = mean + before / x.dtype.type(count + 1)
        squares = squares + before * (element - mean)
    return mean, squares / x.dtype.type(x.shape[1])


MOMENTS: dict[str, Moments] = {"E[x^2] - E[x]^2": one_pass, "Welford": welford}


def normalize(x: Array, moments: Moments, eps: float) -> Array:
    """Return xhat in the dtype of x, from statistics in that dtype."""
    with np.errstate(all="ignore"):
        mean, var = moments(x)
        xhat: Array = (x - mean) / np.sqrt(var + x.dtype.type(eps))
    return xhat


def corrected(x: Array, eps: float) -> Array:
    """Return xhat by two passes in x's dtype; a second mean removes the rounding of the first."""
    with np.errstate(all="ignore"):
        centered = x - mean_of(x)
        centered = centered - mean_of(centered)
        xhat: Array = centered / np.sqrt(mean_of(np.square(centered)) + x.dtype.type(eps))
    return xhat


def backward_from(dtype: str, x: Array, g: Array, eps: float) -> Array:
    """Return dx in float64 from a mean that the forward kept in `dtype`."""
    wide, g = x.astype(np.float64), g.astype(np.float64)
    mean, var = two_pass(wide)
    rstd = 1 / np.sqrt(var + eps)
    xhat = (wide - mean.astype(parse(dtype)).astype(np.float64)) * rstd
    q = g - mean_of(g)
    dx: Array = rstd * (q - xhat * mean_of(q * xhat))
    return dx.astype(x.dtype)


def rounded_before_gamma(x: Array, gamma: Array, beta: Array, eps: float) -> Array:
    """Return y with xhat rounded to the dtype of x before gamma and beta are applied in float32."""
    xhat = normalize(x.astype(np.float32), two_pass, eps).astype(x.dtype)
    scale, value, shift = (part.astype(np.float32) for part in (gamma, xhat, beta))
    return (scale * value + shift).astype(x.dtype)
