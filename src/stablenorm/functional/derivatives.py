"""
Forward mode and second order: the lines of `reference.equations`, over xhat and J of plain calls in float64, rounded once.

J, the Jacobian of xhat, is the backward without gamma:

>>> import numpy as np
>>> from stablenorm import layer_norm_backward, layer_norm_forward, layer_norm_jvp
>>> x, tx = np.random.default_rng(0).standard_normal((2, 3, 8))
>>> gamma, tgamma = np.random.default_rng(1).standard_normal((2, 8))
>>> _, cache = layer_norm_forward(x, gamma)
>>> xhat, plain = layer_norm_forward(x)
>>> ty = gamma * layer_norm_backward(tx, plain).dx + tgamma * xhat
>>> np.array_equal(layer_norm_jvp(tx, cache, tgamma), ty)
True
"""

from typing import Any

import numpy as np

from stablenorm.arrays import convert, empty_like, is_lazy_cache
from stablenorm.call import Backward, Forward
from stablenorm.control import with_default_control
from stablenorm.functional import checks, keywords
from stablenorm.functional.operations import rows_of
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.types import NAMES, Array, Cache, Norm


class _Rows:
    """The rows of a cache in float64, and what both functions make of them."""

    def __init__(self, cache: Cache) -> None:
        self.layout, call, self.mask = rows_of(cache.x, cache, None)
        self.plain, self.backend = Norm(eps=cache.norm.eps, kind=cache.norm.kind), cache.backend
        self.x, self.gamma = call.x.astype(np.float64), self.vector(cache.norm.gamma)
        if self.gamma is not None:
            self.gamma += cache.norm.gamma_offset
        self.xhat = np.empty_like(self.x)
        forward = Forward(self.x, self.plain, self.xhat, threads=call.threads)
        self.statistics = keywords.forward(self.backend, forward, self.layout, self.mask)
        self.rstd = self.statistics.rstd[:, None]

    def vector(self, value: Array | None) -> Array | None:
        """Return gamma, beta or a tangent of them in float64; None as None."""
        return None if value is None else value.reshape(-1).astype(np.float64)

    def read(self, value: Array) -> Array:
        """Return the rows of an array of the shape of x in float64, with 0 for elements that do not count."""
        return self.only(self.layout.read(value).astype(np.float64))

    def only(self, v: Array) -> Array:
        """Return `v` with 0 for elements that do not count."""
        only: Array = v if self.mask is None else np.where(self.mask, v, 0.0)
        return only

    def mean(self, v: Array) -> Array:
        """Return the mean of each row of `v` over the elements that count; it is 0 at the others."""
        counts: Any = self.layout.shape[1]
        if self.mask is not None:
            counts = np.maximum(np.add.reduce(self.only(np.ones_like(v)), -1, keepdims=True), 1)
        mean: Array = np.add.reduce(v, axis=-1, keepdims=True) / counts
        return mean

    def jacobian(self, v: Array) -> Array:
        """Return ``J v``."""
        dx: Array = np.empty_like(self.x)
        call = Backward(v, self.x, self.plain, self.statistics, dx)
        keywords.backward(self.backend, call, self.layout, self.mask)
        return dx

    def pushed(self, moved: Array, tgamma: Array | None, tbeta: Array | None, like: Array) -> Array:
        """Return the tangent of y, given that of xhat, like an array of the shape of x."""
        tangent = moved if self.gamma is None else moved * self.gamma
        if tgamma is not None:
            tangent = tangent + self.vector(tgamma) * self.xhat
        if tbeta is not None:
            tangent = tangent + self.vector(tbeta)
        return self.put(tangent, like)

    def put(self, rows: Array, like: Array) -> Array:
        """Return rows of float64, rounded once, as an array like another."""
        result = empty_like(like)
        self.layout.put(round_to(self.only(rows), like.dtype), result)
        return result


@with_default_control
def jvp(kind: str, tx: Any, cache: Cache, tgamma: Any, tbeta: Any) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    cache, tx, tgamma, tbeta = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    rows = _Rows(cache)
    return rows.pushed(rows.jacobian(rows.read(tx)), tgamma, tbeta, cache.x)


@with_default_control
def double_backward(
    kind: str, ddx: Any, dy: Any, cache: Cache, ddgamma: Any, ddbeta: Any
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma."""
    of_x, of_parameters = {"ddx": ddx, "dy": dy}, {"ddgamma": ddgamma, "ddbeta": ddbeta}
    cache, ddx, dy, ddgamma, ddbeta = _checked("double_backward", kind, cache, of_x, of_parameters)
    rows = _Rows(cache)
    xhat, mean, dy, ddx = rows.xhat, rows.mean, rows.read(dy), rows.read(ddx)
    g = dy if rows.gamma is None else dy * rows.gamma
    pushed, pulled = rows.jacobian(ddx), rows.jacobian(g)
    ddy, dgamma = rows.pushed(pushed, ddgamma, ddbeta, cache.x), cache.norm.gamma
    if dgamma is not None:
        dgamma = round_to(sum_rows(dy * pushed), dgamma.dtype).reshape(dgamma.shape)
    if kind == "layer":
        # For the means of products that follow: the reason of `project`.
        g, ddx = g - mean(g), ddx - mean(ddx)
    bent = mean(g * xhat) * pushed + mean(ddx * xhat) * pulled + xhat * mean(ddx * pulled)
    dx = -bent * rows.rstd
    if ddgamma is not None:
        dx = dx + rows.jacobian(dy * rows.vector(ddgamma))
    return ddy, rows.put(dx, cache.x), dgamma


def _checked(
    operation: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return the cache, arguments like x, and those like gamma and beta."""
    if is_lazy_cache(cache):
        checks.check_combinations((operation, checks.DASK))
    cache = checks.checked_cache(cache, None, kind, operation)
    features = checks.features_of(cache.norm, cache.axis, cache.backend)
    checks.check_combinations((operation, *features))
    checked = [checks.of_shape(convert, *pair, cache.x.shape) for pair in of_x.items()]
    likes = cache.norm.gamma, cache.norm.beta
    for (called, value), name, like in zip(of_parameters.items(), NAMES[1:], likes, strict=True):
        if value is not None and like is None:
            msg = f"{called} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        shape = np.shape(like)
        checked.append(checks.of_shape(convert, called, value, shape, name, optional=True))
    return [cache, *checked]
