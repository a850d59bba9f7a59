r"""
Layer normalization and its gradients: the equations, in NumPy, on (rows, n).

Everything else in the package is a faster implementation of these equations, a public interface to
them, or a tool that checks them. What is assumed here is checked by the callers: x and dy are
(rows, n), gamma and beta (n,) or None, and the dtypes are the four floating ones.

Forward, for one row x of n elements::

    mean = sum(x) / n
    var  = sum((x - mean)**2) / n
    rstd = (var + eps)**(-1/2)
    xhat = (x - mean) * rstd
    y    = gamma * xhat + beta

Backward, given dy, the gradient of a scalar with respect to y::

    g      = gamma * dy
    dx     = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dgamma = sum over rows of dy * xhat
    dbeta  = sum over rows of dy

RMS norm is the same with the mean, and in the backward mean(g), set to 0.

docs/explanation/derivation.md derives these lines, and a test checks its steps symbolically. Three facts
shape the code:

- gamma comes *before* the means. They mix the elements of a row, and each element must have its own
  gamma by then. Applying gamma to the result is right for batch normalization, and wrong here.
- The Jacobian of xhat, ``rstd * (I - 1 1'/n - xhat xhat'/n)``, is symmetric and holds with
  eps. So the same `project` serves the backward (applied to g) and the jvp (applied to a
  tangent).
- Because mean(xhat) = 0, ``mean(g * xhat) = mean((g - mean(g)) * xhat)``. In floating point the right
  side is better: with a large mean(g) the products g * xhat are large and cancel, but their
  rounding errors remain. So g is centered first.

Forward mode and the gradient of the backward: J is the symmetric Jacobian of xhat, the backward without gamma. Given
tangents tx, tgamma and tbeta of x, gamma and beta::

    ty = gamma * J tx + tgamma * xhat + tbeta

Given cotangents ddx, ddgamma and ddbeta of what the backward makes of dy, x and gamma::

    ddy    = gamma * J ddx + ddgamma * xhat + ddbeta
    dgamma = sum over rows of dy * J ddx
    dx     = J (ddgamma * dy) - rstd * (mean(g * xhat) * J ddx
                                        + mean(ddx * xhat) * J g + xhat * mean(ddx * J g))

`functional.derivatives` computes them, of y and dx of plain calls in float64.

Precision
---------
Everything is computed in float64 and rounded once. The mean is corrected by the mean of what subtracting it leaves: this
makes constant rows exact, and rows whose elements differ in their last bit accurate; the rounding of the mean alone costs
such a row of float32 374 ulp (docs/explanation/error-analysis.md). Sums over rows are pairwise. So float16, bfloat16 and
float32 data keep the accuracy contract, and float64 data that of good float64 code, a few ulp. `uncertified` does rows
whose products could leave the range of float64 with integers, and with rounding="nearest" all.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.records import Array, Norm, Statistics, bfloat16

FLOAT64 = np.dtype(np.float64)

# Elements of a block: 256 KiB in float64, so that the five or so temporaries of the backward fit
# a 1 to 2 MiB second-level cache. The fastest of 2**11 to 2**18 forward and backward together, by
# 2 to 140 % (float32, (8192, 768), Intel Xeon, 2026-11-21).
BLOCK = 1 << 15


def forward(x: Array, norm: Norm) -> tuple[Array, Statistics]:
    """Return y of float64 rows, and their statistics."""
    centered, mean, mean_lo = center(x, norm.kind)
    var = row_mean(centered * centered)
    # v - v is NaN for infinity, which spoils the whole row of an RMS norm.
    v = var + norm.eps
    rstd = 1.0 / np.sqrt(v) + (v - v)
    y = centered * rstd
    if norm.gamma is not None:
        y *= norm.gamma
    if norm.beta is not None:
        y += norm.beta
    return y, Statistics(mean, mean_lo, rstd)


def backward(dy: Array, xhat: Array, rstd: Array, norm: Norm) -> Array:
    """Return dx of float64 rows; the terms of dgamma and dbeta are ``dy * xhat`` and dy."""
    g = dy if norm.gamma is None else dy * norm.gamma
    return project(g, xhat, norm.kind) * rstd


def project(v: Array, xhat: Array, kind: str = "layer") -> Array:
    """Remove from each row of `v` its part along `xhat`, and for "layer" that along the ones."""
    if kind == "layer":
        # Center first: then mean(v * xhat) is safe however large mean(v) is.
        v = v - row_mean(v)
    rest: Array = v - xhat * row_mean(v * xhat)
    return rest


def center(x: Array, kind: str) -> tuple[Array, Any, Any]:
    """Return x less its row mean, the mean, and the rest of it; RMS norm has no mean."""
    if kind == "rms":
        return x, None, None
    mean = row_mean(x)
    # The sum has lost some ulp of the mean: this is the float64 nearest to it.
    mean += row_mean(x - mean)
    centered = x - mean
    # The mean's own rounding is an error that all elements of a row share: the worst of all errors where the spread
    # is near one ulp.
    rest = row_mean(centered)
    return centered - rest, mean, rest


def restore(x: Array, statistics: Statistics) -> Array:
    """Return xhat of float64 rows from their statistics, of shape (rows, 1)."""
    if statistics.mean is not None:
        x = x - statistics.mean - statistics.mean_lo
    return x * statistics.rstd


def widened(vector: Array | None, default: Any = None) -> Any:
    """Return gamma, beta or the like as a vector of float64; the default for None."""
    return default if vector is None else vector.reshape(-1).astype(np.float64)


def row_mean(v: Array) -> Array:
    """Return the mean of each row, (rows, 1)."""
    mean: Array = np.add.reduce(v, axis=-1, keepdims=True) / v.shape[-1]
    return mean


def sum_rows(v: Array) -> Array:
    """Return the sum of all rows, added by halves, whose error grows like log2(rows)."""
    while len(v) > 1:
        half = len(v) // 2
        v = np.concatenate([v[:half] + v[len(v) - half :], v[half : len(v) - half]])
    total: Array = np.add.reduce(v, 0)
    return total


def blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Return the slices of rows that are done together, at least one."""
    rows, n = shape
    step = max(1, BLOCK // n)
    return (slice(start, start + step) for start in range(0, max(rows, 1), step))


@np.errstate(all="ignore")
def round_to(value: Array, dtype: np.dtype[Any], low: Any = None) -> Array:
    """
    Round ``value + low`` (None: 0), of which `value` is the sum rounded to float64, once to `dtype`.

    Two roundings, to float32 and then to bfloat16, go wrong near a midpoint of the latter. Rounding to odd in between
    cures it: an inexact value gets a last bit that is set, and is no midpoint of a type at least two bits narrower
    (Boldo and Melquiond, IEEE Trans. Comput. 57 (2008) 462).
    """
    if dtype.type is np.float64:
        return value
    if low is not None:
        # Take the neighbour beyond `low` if `value` is inexact and even.
        even = (value.view(np.uint64) & np.uint64(1)) == 0
        beyond = np.nextafter(value, np.copysign(np.inf, low))
        value = np.where(even & (low != 0) & np.isfinite(value), beyond, value)
    if dtype == bfloat16:
        # Keep 10 bits, two more than bfloat16 has; float32 holds them.
        lost = np.int64((1 << 43) - 1)
        bits = value.view(np.int64)
        value = ((bits | ((bits & lost) + lost)) & ~lost).view(np.float64)
    # One rounding, in NumPy and in hardware: float64 -> float32 and float64 -> float16.
    narrow: Array = value.astype(dtype)
    return narrow
