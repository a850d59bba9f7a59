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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.arrays import convert, empty_like, is_lazy_cache, rows
from stablenorm.control import with_default_control
from stablenorm.functional import checks
from stablenorm.functional.layout import layout_of
from stablenorm.functional.operations import backward, forward
from stablenorm.records import NAMES, Array, Cache, Norm
from stablenorm.reference.equations import blocks, round_to, sum_rows, widened


class _Rows(NamedTuple):
    """Some rows of a cache in float64, and functions of rows: J, and the mean over the elements that count."""

    xhat: Array
    rstd: Array
    jacobian: Callable[[Array], Array]
    mean: Callable[[Array], Array]


def _rows_of(cache: Cache, x: Array, mask: Array | None) -> _Rows:
    """Return some rows of a cache, by a plain forward in float64."""
    norm = Norm(eps=cache.norm.eps, kind=cache.norm.kind)
    xhat, of_rows = forward(x.astype(np.float64), norm, -1, None, cache.backend, True, None, mask)
    counts: Any = x.shape[1]
    if mask is not None:
        counts = np.maximum((mask & np.ones(x.shape, bool)).sum(axis=1, keepdims=True), 1)

    def jacobian(v: Array) -> Any:
        return backward(v, of_rows, norm.kind, ("x",), None, None, None, False).dx

    def mean(v: Array) -> Any:
        return np.add.reduce(v, axis=1, keepdims=True) / counts

    return _Rows(xhat, of_rows.rstd, jacobian, mean)


def _only(v: Array, counts: Array | None) -> Array:
    """Return `v` in float64, with 0 for elements that do not count."""
    v = v.astype(np.float64)
    return v if counts is None else np.where(counts, v, 0.0)


def _by_blocks(cache: Cache, inputs: Sequence[Array], count: int, function: Any) -> list[Array]:
    """Return `count` arrays like x, made of rows of inputs like x, block by block, and rounded once."""
    layout = layout_of(cache.x.shape, cache.axis)
    mask = layout.mask(cache.where)
    results = [empty_like(cache.x) for _ in range(count)]
    x, *read = (rows(array, layout) for array in (cache.x, *inputs))
    made = [rows(result, layout, False) for result in results]
    for block in blocks(layout.shape):
        counts = None if mask is None else mask[block]
        of = _rows_of(cache, x[block], counts)
        values = function(of, *(_only(array[block], counts) for array in read))
        for target, value in zip(made, values, strict=True):
            target[block] = round_to(_only(value, counts), target.dtype)
    for target, result in zip(made, results, strict=True):
        layout.put_back(target, result)
    return results


@with_default_control
def jvp(kind: str, tx: Any, cache: Cache, tgamma: Any, tbeta: Any) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    cache, tx, *others = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    gamma = widened(cache.norm.gamma, 1.0) + cache.norm.gamma_offset
    tgamma, tbeta = (widened(tangent, 0.0) for tangent in others)

    def push(of: _Rows, tx: Array) -> tuple[Array]:
        return (gamma * of.jacobian(tx) + tgamma * of.xhat + tbeta,)

    return _by_blocks(cache, [tx], 1, push)[0]


@with_default_control
def double_backward(
    kind: str, ddx: Any, dy: Any, cache: Cache, ddgamma: Any, ddbeta: Any
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma."""
    of_x, of_parameters = {"ddx": ddx, "dy": dy}, {"ddgamma": ddgamma, "ddbeta": ddbeta}
    cache, ddx, dy, *others = _checked("double_backward", kind, cache, of_x, of_parameters)
    gamma = widened(cache.norm.gamma, 1.0) + cache.norm.gamma_offset
    (tgamma, tbeta), terms = (widened(tangent, 0.0) for tangent in others), list[Array]()

    def pull(of: _Rows, ddx: Array, dy: Array) -> tuple[Array, Array]:
        xhat, mean, g = of.xhat, of.mean, gamma * dy
        pushed, pulled = of.jacobian(ddx), of.jacobian(g)
        terms.append(sum_rows(dy * pushed))
        if kind == "layer":
            # For the means of products that follow: the reason of `project`.
            g, ddx = g - mean(g), ddx - mean(ddx)
        bent = mean(g * xhat) * pushed + mean(ddx * xhat) * pulled + xhat * mean(ddx * pulled)
        dx = -of.rstd * bent
        if others[0] is not None:
            dx += of.jacobian(dy * tgamma)
        return gamma * pushed + tgamma * xhat + tbeta, dx

    ddy, dx = _by_blocks(cache, [ddx, dy], 2, pull)
    dgamma = cache.norm.gamma
    if dgamma is not None:
        dgamma = round_to(sum_rows(np.stack(terms)), dgamma.dtype).reshape(dgamma.shape)
    return ddy, dx, dgamma


def _checked(
    operation: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return the cache, arguments like x, and those like gamma and beta."""
    if is_lazy_cache(cache):
        checks.check_combinations({operation: True, checks.DASK: True})
    cache = checks.checked_cache(cache, None, kind, operation)
    checks.check_features(cache.norm, cache.axis, cache.backend, **{operation: True})
    checked = [checks.of_shape(convert, *pair, cache.x.shape) for pair in of_x.items()]
    likes = cache.norm.gamma, cache.norm.beta
    for (called, value), name, like in zip(of_parameters.items(), NAMES[1:], likes, strict=True):
        if value is not None and like is None:
            msg = f"{called} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        given = value is not None
        checked.append(checks.of_shape(convert, called, value, like.shape, name) if given else None)
    return [cache, *checked]
