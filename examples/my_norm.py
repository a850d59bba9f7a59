"""
A layer norm with a common mistake in its backward, for ``stablenorm check examples/my_norm.py``.

The check names the mistake; put your own two functions in its place.
"""

import numpy as np


def layer_norm_forward(x, gamma, beta, eps):
    """Return y and what the backward needs."""
    centered = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + eps)
    xhat = centered * rstd
    return gamma * xhat + beta, (gamma, xhat, rstd)


def layer_norm_backward(dy, cache):
    """Return dx, dgamma and dbeta."""
    gamma, xhat, rstd = cache
    g = gamma * dy
    # The mistake: g less its mean belongs here, not g.
    dx = rstd * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    rows = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)
