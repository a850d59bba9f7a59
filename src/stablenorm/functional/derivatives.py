"""Forward mode and second order, for both norms: arguments are checked, made a record, and handed to a backend."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST, is_lazy_cache
from stablenorm.call import DoubleBackward, Jvp
from stablenorm.functional.checks import check_cache, of_shape
from stablenorm.functional.combinations import DASK, check_combinations, features_of
from stablenorm.functional.plain import run_plain
from stablenorm.types import NAMES, Array, Cache


def jvp(
    kind: str, tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None, tbeta: ArrayLike | None
) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    tangent, first, second = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    ty = HOST.empty(x.shape, x.dtype, x)
    call = Jvp(tangent, x, norm, statistics, first, second, ty, _mask(cache))
    run_plain(backend, call, axes)
    return ty


def double_backward(
    kind: str,
    ddx: ArrayLike,
    dy: ArrayLike,
    cache: Cache,
    ddgamma: ArrayLike | None,
    ddbeta: ArrayLike | None,
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma."""
    of_x, of_parameters = {"ddx": ddx, "dy": dy}, {"ddgamma": ddgamma, "ddbeta": ddbeta}
    ddx, dy, first, second = _checked("double_backward", kind, cache, of_x, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    ddy, dx = (HOST.empty(x.shape, x.dtype, x) for _ in range(2))
    dgamma = None if norm.gamma is None else HOST.empty(norm.gamma.shape, norm.gamma.dtype, x)
    results = ddy, dx, dgamma
    call = DoubleBackward(ddx, dy, x, norm, statistics, first, second, *results, _mask(cache))
    run_plain(backend, call, axes)
    return results


def _mask(cache: Cache) -> Array | None:
    """Return the mask in the shape of x, which these operations take."""
    return None if cache.where is None else np.broadcast_to(cache.where, cache.x.shape)


def _checked(
    what: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return tangents or cotangents of the shape of x, then those of gamma and beta, if this cache can take them."""
    if is_lazy_cache(cache):
        check_combinations((what, DASK))
    check_cache(cache, None, kind, what)
    check_combinations((what, *features_of(cache.norm, cache.axis, cache.backend)))
    checked: list[Any] = [of_shape(HOST, *each, cache.x.shape) for each in of_x.items()]
    parameters = zip(of_parameters.items(), NAMES[1:], cache.norm[:2], strict=True)
    for (called, value), name, like in parameters:
        if value is not None and like is None:
            msg = f"{called} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        checked.append(None if value is None else of_shape(HOST, called, value, like.shape, name))
    return checked
