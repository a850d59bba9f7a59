"""
The layer norm that everybody writes, a two-pass formula in the precision of its input, and its RMS norm.

Tables measure it beside ours. Its weak points are the rounded mean, squares that overflow or
underflow, and sums over rows in the dtype of the data.
"""

import numpy as np

from stablenorm.records import Array

Maybe = Array | None
Cache = tuple[Maybe, Array, Array]


def plain_forward(
    x: Array, gamma: Maybe = None, beta: Maybe = None, eps: float = 1e-5, kind: str = "layer"
) -> tuple[Array, Cache]:
    """
    Normalize the last axis of `x` in float32, or float64 if `x` has that.

    16-bit types are computed in float32, as most implementations do. y has the dtype of `x`; the
    cache, for `plain_backward`, is gamma, xhat and rstd. Kind "rms" subtracts no mean; "one-pass" is
    a layer norm whose variance is E[x^2] - E[x]^2.
    """
    dtype = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        centered = x.astype(dtype)
        mean = 0 if kind == "rms" else centered.mean(axis=-1, keepdims=True)
        if kind == "one-pass":
            var = (centered**2).mean(axis=-1, keepdims=True) - mean**2
        if kind != "rms":
            centered = centered - mean
        if kind != "one-pass":
            var = (centered**2).mean(axis=-1, keepdims=True)
        rstd = 1 / np.sqrt(var + dtype(eps))
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


def harder_rows(x: Array, kind: str = "layer") -> dict[str, Array]:
    """
    Return copies of the rows of `x`, by name: with std 1 and a large mean or, for kind "rms", a large size.

    Copies that the dtype of `x` cannot hold are left out.
    """
    with np.errstate(all="ignore"):
        wide = plain_forward(x.astype(np.float64), eps=0.0)[0]
        # A constant row stays one.
        wide = np.nan_to_num(wide, posinf=0.0, neginf=0.0)
        changes = (0.0, 1e2, 1e4, 1e6) if kind == "layer" else (1.0, 1e10, 1e20, 1e30)
        changed = (wide + change if kind == "layer" else wide * change for change in changes)
        copies = zip(changes, (rows.astype(x.dtype) for rows in changed), strict=True)
        return {f"{change:g}": rows for change, rows in copies if np.isfinite(rows).all()}
