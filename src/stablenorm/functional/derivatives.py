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

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import convert, empty_like, is_lazy_cache, rows
from stablenorm.call import Backward, Forward
from stablenorm.control import with_default_control
from stablenorm.functional import checks, keywords
from stablenorm.functional.layout import layout_of
from stablenorm.reference.equations import round_to, sum_rows
from stablenorm.types import NAMES, Array, Cache, Norm


class _Rows(NamedTuple):
    """The rows of a cache in float64, and functions of them."""

    xhat: Array
    rstd: Array
    # Gamma with its offset, (n,), or 1.
    gamma: Any
    jacobian: Callable[[Array], Array]
    # From an array like x to rows, with 0 for elements that do not count; and back, rounded once.
    read: Callable[[Array], Array]
    write: Callable[[Array], Array]
    # The mean of each row over the elements that count; it is of 0 at the others.
    mean: Callable[[Array], Array]


def _vector(value: Array | None) -> Any:
    """Return gamma, beta or a tangent of them in float64; None as 0."""
    return 0.0 if value is None else value.reshape(-1).astype(np.float64)


def _rows_of(cache: Cache) -> _Rows:
    """Return the rows of a cache, by a plain forward in float64."""
    layout, backend, where = layout_of(cache.x.shape, cache.axis), cache.backend, cache.where
    mask, norm = layout.mask(where), Norm(eps=cache.norm.eps, kind=cache.norm.kind)
    x = rows(cache.x, layout)[0].astype(np.float64)
    xhat = np.empty_like(x)
    statistics = keywords.forward(backend, Forward(x, norm, xhat), layout, where)
    counts: Any = x.shape[1]
    if mask is not None:
        counts = np.maximum(
            np.add.reduce(mask & np.ones(x.shape, bool), -1, keepdims=True, dtype=int), 1
        )

    def jacobian(v: Array) -> Array:
        dx = np.empty_like(x)
        keywords.backward(backend, Backward(v, x, norm, statistics, dx), layout, where)
        return dx

    def only(v: Array) -> Array:
        return v if mask is None else np.where(mask, v, 0.0)

    def write(v: Array) -> Array:
        result = empty_like(cache.x)
        values = round_to(only(v), result.dtype)
        result.transpose(layout.order)[...] = values.reshape(layout.lengths)
        return result

    return _Rows(
        xhat,
        statistics.rstd[:, None],
        1.0 if cache.norm.gamma is None else _vector(cache.norm.gamma) + cache.norm.gamma_offset,
        jacobian,
        lambda v: only(rows(v, layout)[0].astype(np.float64)),
        write,
        lambda v: np.add.reduce(v, axis=-1, keepdims=True) / counts,
    )


@with_default_control
def jvp(kind: str, tx: Any, cache: Cache, tgamma: Any, tbeta: Any) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    cache, tx, tgamma, tbeta = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    of = _rows_of(cache)
    moved = of.jacobian(of.read(tx))
    return of.write(of.gamma * moved + _vector(tgamma) * of.xhat + _vector(tbeta))


@with_default_control
def double_backward(
    kind: str, ddx: Any, dy: Any, cache: Cache, ddgamma: Any, ddbeta: Any
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma."""
    of_x, of_parameters = {"ddx": ddx, "dy": dy}, {"ddgamma": ddgamma, "ddbeta": ddbeta}
    checked = _checked("double_backward", kind, cache, of_x, of_parameters)
    cache, ddx, dy, ddgamma, ddbeta = checked
    of = _rows_of(cache)
    xhat, mean, dy, ddx = of.xhat, of.mean, of.read(dy), of.read(ddx)
    g = of.gamma * dy
    pushed, pulled = of.jacobian(ddx), of.jacobian(g)
    ddy = of.write(of.gamma * pushed + _vector(ddgamma) * xhat + _vector(ddbeta))
    dgamma = cache.norm.gamma
    if dgamma is not None:
        dgamma = round_to(sum_rows(dy * pushed), dgamma.dtype).reshape(dgamma.shape)
    if kind == "layer":
        # For the means of products that follow: the reason of `project`.
        g, ddx = g - mean(g), ddx - mean(ddx)
    bent = mean(g * xhat) * pushed + mean(ddx * xhat) * pulled + xhat * mean(ddx * pulled)
    dx = -of.rstd * bent
    if ddgamma is not None:
        dx += of.jacobian(dy * _vector(ddgamma))
    return ddy, of.write(dx), dgamma


def _checked(
    operation: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return the cache, arguments like x, and those like gamma and beta."""
    if is_lazy_cache(cache):
        checks.check_combinations((operation, checks.DASK))
    cache = checks.checked_cache(cache, None, kind, operation)
    checks.check_features(cache.norm, cache.axis, cache.backend, operation)
    checked = [checks.of_shape(convert, *pair, cache.x.shape) for pair in of_x.items()]
    likes = cache.norm.gamma, cache.norm.beta
    for (called, value), name, like in zip(of_parameters.items(), NAMES[1:], likes, strict=True):
        if value is not None and like is None:
            msg = f"{called} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        given = value is not None
        checked.append(checks.of_shape(convert, called, value, like.shape, name) if given else None)
    return [cache, *checked]
