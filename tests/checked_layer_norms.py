"""Plain layer norms for the gradient checker: a right one, and mistakes in its backward."""

import numpy as np


def forward(x, gamma, beta, eps=1e-5):
    """Two passes in the dtype given, nothing clever: what most people write."""
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + x.dtype.type(eps))
    xhat = centered * rstd
    y = xhat if gamma is None else gamma * xhat
    return y if beta is None else y + beta, (xhat, rstd, gamma)


def backward(dy, cache):
    xhat, rstd, gamma = cache
    g = dy if gamma is None else gamma * dy
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    leading = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(leading), dy.sum(leading)


def data(seed, shape=(4, 8), offset=0.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = offset + rng.standard_normal(shape)
    gamma = rng.choice([-1.0, 1.0], shape[-1]) * (0.5 + rng.random(shape[-1]))
    return tuple(a.astype(dtype) for a in (x, gamma, rng.standard_normal(shape[-1])))


def exact(x, gamma, dy, eps=1e-5):
    """Return dx from re-centred rows; its error, u times a few, is far below what is measured."""
    centered = x - x.mean(-1, keepdims=True)
    centered -= centered.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    q = gamma * dy
    q = q - q.mean(-1, keepdims=True)
    xhat = centered * rstd
    return rstd * (q - xhat * np.mean(q * xhat, -1, keepdims=True))


def replace(values, position, changed):
    return tuple(changed if i == position else v for i, v in enumerate(values))


def no_mean_g(dy, cache):
    xhat, rstd, gamma = cache
    g = gamma * dy
    wrong = rstd * (g - xhat * (g * xhat).mean(-1, keepdims=True))
    return replace(backward(dy, cache), 0, wrong)


def no_xhat_term(dy, cache):
    _, rstd, gamma = cache
    g = gamma * dy
    return replace(backward(dy, cache), 0, rstd * (g - g.mean(-1, keepdims=True)))


def gamma_twice(dy, cache):
    _, dgamma, dbeta = backward(dy, cache)
    return backward(cache[2] * dy, cache)[0], dgamma, dbeta


def gamma_after(dy, cache):
    xhat, rstd, gamma = cache
    right = backward(dy, cache)
    return replace(right, 0, gamma * backward(dy, (xhat, rstd, None))[0])


def dgamma_without_rstd(dy, cache):
    xhat, rstd, _ = cache
    return replace(backward(dy, cache), 1, (dy * xhat / rstd).sum(0))


def last_row_dropped(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[-1] = 0
    return replace(backward(dy, cache), 0, dx)


def one_sign(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[0, 0] *= -1
    return replace(backward(dy, cache), 0, dx)


def one_percent(dy, cache):
    dx = backward(dy, cache)[0].copy()
    dx[0, 0] *= 1.01
    return replace(backward(dy, cache), 0, dx)


def scaled_rstd(factor):
    """Make a backward from a wrong rstd; xhat = centered * rstd takes part in it."""

    def wrong(dy, cache):
        xhat, rstd, gamma = cache
        change = factor(rstd, xhat.shape[-1])
        return replace(
            backward(dy, cache), 0, backward(dy, (xhat * change, rstd * change, gamma))[0]
        )

    return wrong


def n_minus_one_in_mean_g(dy, cache):
    xhat, rstd, gamma = cache
    g, n = gamma * dy, dy.shape[-1]
    mean = g.sum(-1, keepdims=True) / (n - 1)
    wrong = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True))
    return replace(backward(dy, cache), 0, wrong)


def mean_in_bfloat16(dy, cache):
    # The mean of n standard normal elements, n = 8 to 768, is about 0.1: 8 bits of that.
    xhat, rstd, gamma = cache
    return replace(backward(dy, cache), 0, backward(dy, (xhat + 1e-4, rstd, gamma))[0])


BUGS = {
    "no mean(g)": (no_mean_g, 0),
    "no xhat term": (no_xhat_term, 0),
    "gamma twice": (gamma_twice, 0),
    "gamma after the projection": (gamma_after, 0),
    "dgamma without rstd": (dgamma_without_rstd, 1),
    "last row dropped": (last_row_dropped, 0),
    "one sign": (one_sign, 0),
    "one percent": (one_percent, 0),
    "n - 1 in var": (scaled_rstd(lambda _, n: np.sqrt((n - 1) / n)), 0),
    "n - 1 in mean(g)": (n_minus_one_in_mean_g, 0),
    "eps outside the root": (
        scaled_rstd(lambda r, _: 1 / (np.sqrt(1 - 1e-5 * r * r) + 1e-5 * r)),
        0,
    ),
    "eps omitted": (scaled_rstd(lambda r, _: 1 / np.sqrt(1 - 1e-5 * r * r)), 0),
    "rstd in float32": (scaled_rstd(lambda r, _: np.float32(r) / r), 0),
    "mean in bfloat16": (mean_in_bfloat16, 0),
}
