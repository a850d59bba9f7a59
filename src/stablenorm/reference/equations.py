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

RMS norm is the same with the mean, and in the backward mean(g), set to 0. Gamma may
be stored less a `gamma_offset`, which is added first. With a mask, n is the number
of elements of the row that count, means and sums are over these, and y and dx are 0 elsewhere. The
cotangents of the statistics (dmean, drstd) and of the residual stream (dsum) add to dx before it is rounded::

    dx += dsum + dmean / n - drstd * rstd**2 * xhat / n

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

Precision
---------
float16, bfloat16 and float32 data are computed in float64 and rounded once. float64 data are computed by the same
lines on `Pair`, double-double numbers. In both, the reference corrects the mean by the mean of what subtracting it leaves. This
makes constant rows exact, and rows whose elements differ in their last bit accurate
(docs/explanation/error-analysis.md). `blocks` runs these lines on blocks of rows, and `uncertified` does rows whose
products could leave the range of float64 with integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm.reference.doubledouble import Pair, round_to, sum_rows

FLOAT64 = np.dtype(np.float64)


def row_mean(v: Any, count: Any = None) -> Any:
    """Return the mean of each row, over n or, if all others are 0, over `count` elements."""
    if isinstance(v, Pair):
        columns = sum_rows(Pair(v.high.T, v.low.T))
        total: Any = Pair(columns.high.T, columns.low.T)
    else:
        total = np.add.reduce(v, axis=-1, keepdims=True)
    return total / (v.shape[-1] if count is None else count)


def forward(
    x: Any, eps: Any, scale: Any, shift: Any, kind: str, mean: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """Return y and rows of the statistics (mean, mean_lo, rstd), and var; x may be written over."""
    centered, first, rest = center(x, kind, mean)
    var = mean(centered * centered)
    rstd = rsqrt(var + eps)
    y = centered
    for factor in (rstd, scale):
        if factor is not None:
            y *= factor
    if shift is not None:
        y += shift
    return y, (first, rest, rstd), var


def backward(
    dy: Any, xhat: Any, rstd: Any, scale: Any, kind: str, mean: Callable[[Any], Any]
) -> Any:
    """Return dx; the terms of dgamma and dbeta are ``dy * xhat`` and dy."""
    g = dy if scale is None else dy * scale
    return project(g, xhat, kind, mean) * rstd


def project(v: Any, xhat: Any, kind: str = "layer", mean: Callable[[Any], Any] = row_mean) -> Any:
    """Remove from each row of `v` its part along `xhat`, and for "layer" that along the ones."""
    if kind == "layer":
        # Center first: then mean(v * xhat) is safe however large mean(v) is.
        v = v - mean(v)
    return v - xhat * mean(v * xhat)


def center(x: Any, kind: str, mean: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return x less its row mean, the mean in float64, and the rest of it; RMS norm has no mean."""
    if kind == "rms":
        return x, None, None
    first = round_to(mean(x), FLOAT64)
    x -= Pair.exactly(first) if isinstance(x, Pair) else first
    # The mean's own rounding is an error that all elements of a row share: the worst of all errors where the spread
    # is near one ulp.
    rest = mean(x)
    x -= rest
    return x, first, rest


def restore(x: Any, mean: Any, mean_lo: Any, rstd: Any) -> Any:
    """Return xhat from x and the statistics of its rows; x may be written over."""
    if mean is not None:
        x -= Pair.exactly(mean) if isinstance(x, Pair) else mean
        x -= mean_lo
    x *= rstd
    return x


def rsqrt(v: Any) -> Any:
    """Return ``v**-0.5``; NaN for infinity, which spoils the whole row of an RMS norm."""
    return v.rsqrt() if isinstance(v, Pair) else 1.0 / np.sqrt(v) + (v - v)
