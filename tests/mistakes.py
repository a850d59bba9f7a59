"""
Backward passes that are wrong in known ways, and right ones written differently.

They test instruments: a gradient checker must find every mistake and accept every variant. All work
on (..., n), normalized over the last axis, in the dtype of their arguments, and share one plain
two-pass `forward`, or `rms_forward`, whose cache the wrong backwards misuse. A mistake spoils one
gradient and leaves the other two right, so a test can ask where the checker found it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.records import Array, bfloat16

Gradients = tuple[Array, Array, Array]
Forward = Callable[[Array, Array, Array, float], tuple[Array, Any]]
Backward = Callable[[Array, Any], Gradients]


class Cache(NamedTuple):
    """The arrays that the plain forward stores for a backward."""

    x: Array
    gamma: Array
    eps: float
    mean: Array
    var: Array
    rstd: Array
    xhat: Array


class Mistake(NamedTuple):
    """A wrong backward, the sentence that a checker should say, and the argument whose gradient is spoiled."""

    backward: Backward
    diagnosis: str
    argument: str = "x"


def row_mean(a: Array) -> Array:
    return np.asarray(a.mean(axis=-1, keepdims=True))


def _sum_rows(a: Array) -> Array:
    return np.asarray(a.reshape(-1, a.shape[-1]).sum(axis=0))


def forward(
    x: Array, gamma: Array, beta: Array, eps: float = 1e-5, *, center: bool = True
) -> tuple[Array, Cache]:
    """Normalize over the last axis in two passes, in the dtype of `x`; return y and the cache."""
    mean = row_mean(x) * center
    centered = x - mean
    var = row_mean(centered * centered)
    rstd = 1 / np.sqrt(var + float(eps))
    xhat = centered * rstd
    return gamma * xhat + beta, Cache(x, gamma, float(eps), mean, var, rstd, xhat)


# Divides by the root mean square of the last axis; the cache has mean 0.
rms_forward = partial(forward, center=False)


def _with_dx(make: Callable[[Array, Cache], Array]) -> Backward:
    """Build a backward whose dx is ``make(g, cache)``, with the right dgamma and dbeta."""
    return lambda dy, c: (make(c.gamma * dy, c), _sum_rows(dy * c.xhat), _sum_rows(dy))


def _dx(g: Array, xhat: Array, rstd: Array, *, center: bool = True) -> Array:
    return np.asarray(rstd * (g - row_mean(g) * center - xhat * row_mean(g * xhat)))


_rms_dx = partial(_dx, center=False)

# The right backwards, in the plain form, for the caches of both forwards.
backward = _with_dx(lambda g, c: _dx(g, c.xhat, c.rstd))
rms_backward = _with_dx(lambda g, c: _rms_dx(g, c.xhat, c.rstd))


def _spoiled_dx(where: Any, factor: float) -> Backward:
    """Build a backward that multiplies a part of the right dx, seen as (rows, n)."""

    def make(g: Array, cache: Cache) -> Array:
        # C order, whatever the order of dy: the reshape below must be a view.
        dx = np.ascontiguousarray(_dx(g, cache.xhat, cache.rstd))
        dx.reshape(-1, dx.shape[-1])[where] *= factor
        return dx

    return _with_dx(make)


def _with_rstd(make: Callable[[Cache], Array], project: Callable[..., Array] = _dx) -> Backward:
    """Build a backward that recomputes rstd, and from it xhat, for dx."""
    return _with_dx(lambda g, c: project(g, (c.x - c.mean) * make(c), make(c)))


# fmt: off
MISTAKES: dict[str, Mistake] = {
    "mean(g) missing": Mistake(rms_backward, "the mean of g is missing from dx"),
    "xhat term missing": Mistake(
        _with_dx(lambda g, c: c.rstd * (g - row_mean(g))), "the xhat term is missing from dx"),
    "gamma applied twice": Mistake(
        _with_dx(lambda g, c: _dx(c.gamma * g, c.xhat, c.rstd)), "gamma is applied twice in dx"),
    "dgamma without rstd": Mistake(
        lambda dy, c: (backward(dy, c)[0], _sum_rows(dy * (c.x - c.mean)), _sum_rows(dy)),
        "dgamma lacks rstd", "gamma"),
    "last row of dx is 0": Mistake(_spoiled_dx(-1, 0), "the last row of dx is zero"),
    "dx[0, 0] sign": Mistake(_spoiled_dx((0, 0), -1), "element (0, 0) of dx has the wrong sign"),
    "dx[0, 0] * 1.01": Mistake(
        _spoiled_dx((0, 0), 1.01), "element (0, 0) of dx is off by a factor of 1.01"),
    "n-1 in var": Mistake(
        _with_rstd(lambda c: 1 / np.sqrt(c.var * (c.x.shape[-1] / (c.x.shape[-1] - 1)) + c.eps)),
        "the variance is divided by n - 1 in dx"),
    "n-1 in mean(g)": Mistake(
        _with_dx(lambda g, c: c.rstd * (
            g - g.sum(axis=-1, keepdims=True) / (g.shape[-1] - 1) - c.xhat * row_mean(g * c.xhat))),
        "the mean of g is divided by n - 1 in dx"),
    "rstd = 1/(sqrt(var)+eps)": Mistake(
        _with_rstd(lambda c: 1 / (np.sqrt(c.var) + c.eps)), "rstd is 1 / (sqrt(var) + eps) in dx"),
    "eps omitted": Mistake(
        _with_rstd(lambda c: 1 / np.sqrt(c.var)), "eps is missing from rstd in dx"),
    "rstd rounded to f32": Mistake(
        _with_rstd(lambda c: c.rstd.astype(np.float32).astype(c.rstd.dtype)),
        "rstd is kept in float32 in dx"),
    "mean rounded to bf16": Mistake(
        _with_dx(lambda g, c: _dx(g, (c.x - c.mean.astype(bfloat16).astype(c.x.dtype)) * c.rstd, c.rstd)),
        "the mean is kept in bfloat16 in the xhat term in dx"),
}

RMS_MISTAKES: dict[str, Mistake] = {
    "mean(g) subtracted": Mistake(backward, "the mean of g is subtracted in dx"),
    "mean(x) subtracted": Mistake(
        _with_dx(lambda g, c: _rms_dx(g, (c.x - row_mean(c.x)) * c.rstd, c.rstd)),
        "the mean of x is subtracted in the xhat term in dx"),
    "xhat term missing": Mistake(
        _with_dx(lambda g, c: c.rstd * g), "the xhat term is missing from dx"),
    "xhat term not divided by n": Mistake(
        _with_dx(lambda g, c: c.rstd * (g - c.xhat * (g * c.xhat).sum(axis=-1, keepdims=True))),
        "the xhat term is not divided by n in dx"),
    "rstd^2, not rstd^3": Mistake(
        _with_dx(lambda g, c: c.rstd * g - c.x * c.rstd**2 * row_mean(g * c.x)),
        "the xhat term lacks rstd in dx"),
    "gamma after the projection": Mistake(
        _with_dx(lambda g, c: c.gamma * _rms_dx(g / c.gamma, c.xhat, c.rstd)),
        "gamma is applied after the projection in dx"),
    "dgamma without rstd": Mistake(
        lambda dy, c: (rms_backward(dy, c)[0], _sum_rows(dy * c.x), _sum_rows(dy)),
        "dgamma lacks rstd", "gamma"),
}
# fmt: on


# ---- right, written differently, in the dtype of the arguments ----


def _chain_rule(g: Array, cache: Cache) -> Array:
    """The textbook form, through dvar and dmean."""
    centered, rstd = cache.x - cache.mean, cache.rstd
    dvar = (g * centered * -0.5 * rstd**3).sum(axis=-1, keepdims=True)
    dmean = (-g * rstd).sum(axis=-1, keepdims=True) + dvar * -2 * row_mean(centered)
    return np.asarray(g * rstd + (dvar * 2 * centered + dmean) / g.shape[-1])


def _n_times_dy(g: Array, cache: Cache) -> Array:
    """All terms times n, divided by n at the end."""
    n = g.shape[-1]
    total, slope = (a.sum(axis=-1, keepdims=True) for a in (g, g * cache.xhat))
    return np.asarray(cache.rstd / n * (n * g - total - cache.xhat * slope))


def _expanded(dy: Array, cache: Cache, *, center: bool = True) -> Gradients:
    """The form of fused kernels, with sums over centered x: dx = a g + b centered + c."""
    n, g, centered, a = dy.shape[-1], cache.gamma * dy, cache.x - cache.mean, cache.rstd
    b = -(a**3) * (g * centered).sum(axis=-1, keepdims=True) / n
    c = -a * g.sum(axis=-1, keepdims=True) / n * center
    return a * g + b * centered + c, _sum_rows(dy * centered * a), _sum_rows(dy)


def _blocked(dy: Array, cache: Cache) -> Gradients:
    """Sums in blocks of 5 rows or columns, added up."""
    g, xhat, n = cache.gamma * dy, cache.xhat, dy.shape[-1]
    starts = range(5, n, 5), range(5, dy.size // n, 5)
    total, slope = (
        sum(part.sum(axis=-1, keepdims=True) for part in np.split(a, starts[0], axis=-1)) / n
        for a in (g, g * xhat)
    )
    dgamma, dbeta = (
        sum(part.sum(axis=0) for part in np.split(a.reshape(-1, n), starts[1]))
        for a in (dy * xhat, dy)
    )
    return cache.rstd * (g - total - xhat * slope), dgamma, dbeta


VARIANTS: dict[str, tuple[Forward, Backward]] = {
    "plain": (forward, backward),
    "textbook chain rule": (forward, _with_dx(_chain_rule)),
    "N dy form": (forward, _with_dx(_n_times_dy)),
    "expanded": (forward, _expanded),
    "blocked": (forward, _blocked),
}
RMS_VARIANTS: dict[str, tuple[Forward, Backward]] = {
    "plain": (rms_forward, rms_backward),
    "expanded": (rms_forward, partial(_expanded, center=False)),
}
