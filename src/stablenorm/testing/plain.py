"""
The layer norm that everybody writes, a two-pass formula in the precision of its input, and its RMS norm.

Tables measure it beside ours. Its weak points are the rounded mean, squares that overflow or
underflow, and sums over rows in the dtype of the data.
"""

import numpy as np

from stablenorm.types import Array

Maybe = Array | None
Cache = tuple[Maybe, Array, Array]


def plain_forward(
    x: Array, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5, kind: str = "layer"
) -> tuple[Array, Cache]:
    """
    Normalize the last axis of `x` in float32, or float64 if `x` has that.

    16-bit types are computed in float32, as most implementations do. y has the dtype of `x`; the
    cache, for `plain_backward`, is gamma, xhat and rstd. Kind "rms" subtracts no mean.
    """
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        centered = x.astype(dtype)
        if kind == "layer":
            centered = centered - centered.mean(axis=-1, keepdims=True)
        rstd = 1 / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + dtype(eps))
        xhat = centered * rstd
        y = xhat if gamma is None else gamma.astype(dtype) * xhat
        if beta is not None:
            y = y + beta.astype(dtype)
        return y.astype(x.dtype), (gamma, xhat, rstd)


def plain_backward(dy: Array, cache: Cache, kind: str = "layer") -> tuple[Array, Array, Array]:
    """Pull `dy` back through `plain_forward`: dx, dgamma and dbeta, of the dtype of `dy`."""
    gamma, xhat, rstd = cache
    with np.errstate(all="ignore"):
        wide = dy.astype(xhat.dtype)
        g = wide if gamma is None else gamma.astype(xhat.dtype) * wide
        along = (g * xhat).mean(axis=-1, keepdims=True)
        if kind == "layer":
            g = g - g.mean(axis=-1, keepdims=True)
        rows = tuple(range(dy.ndim - 1))
        dx = (rstd * (g - xhat * along)).astype(dy.dtype)
        dgamma, dbeta = (wide * xhat).sum(axis=rows), wide.sum(axis=rows)
        return dx, dgamma.astype(dy.dtype), dbeta.astype(dy.dtype)
