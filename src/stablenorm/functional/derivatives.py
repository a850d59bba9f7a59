"""Forward mode and second order, for both norms: arguments are checked, made a record, and handed to a backend."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST, is_lazy_cache
from stablenorm.call import DoubleBackward, Jvp
from stablenorm.functional.checks import check_cache, of_shape
from stablenorm.functional.combinations import DASK, check_combinations, features_of
from stablenorm.functional.plain import run_plain
from stablenorm.types import Array, Cache

# Arrays are NumPy's: caches on a CUDA device are refused.
_of_shape = partial(of_shape, HOST)


def jvp(
    kind: str, tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None, tbeta: ArrayLike | None
) -> Array:
    """Return ty."""
    _check_cache(cache, kind, "jvp")
    x, tangent = cache.x, _of_shape("tx", tx, cache.x.shape)
    tangents = _of_parameters(cache, "t", tgamma, tbeta)
    ty = HOST.empty(x.shape, x.dtype, x)
    call = Jvp(tangent, x, cache.norm, cache.statistics, *tangents, ty, cache.where)
    _run(call, cache)
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
    _check_cache(cache, kind, "double_backward")
    x, norm = cache[:2]
    given = _of_shape("ddx", ddx, x.shape), _of_shape("dy", dy, x.shape), x
    cotangents = _of_parameters(cache, "dd", ddgamma, ddbeta)
    ddy, dx = (HOST.empty(x.shape, x.dtype, x) for _ in range(2))
    dgamma = None if norm.gamma is None else HOST.empty(norm.gamma.shape, norm.gamma.dtype, x)
    call = DoubleBackward(*given, norm, cache.statistics, *cotangents, ddy, dx, dgamma, cache.where)
    _run(call, cache)
    return ddy, dx, dgamma


def _run(call: Any, cache: Cache) -> None:
    """Do a call as rows; these operations take a mask of the shape of x."""
    where = None if call.where is None else np.broadcast_to(call.where, call.x.shape)
    run_plain(cache.backend, call._replace(where=where), cache.axis)


def _check_cache(cache: Any, kind: str, what: str) -> None:
    """Raise if ``{kind}_norm_{what}`` cannot use a cache."""
    if is_lazy_cache(cache):
        check_combinations((what, DASK))
    check_cache(cache, None, kind, what)
    check_combinations((what, *features_of(cache.norm, cache.axis, cache.backend)))


def _of_parameters(
    cache: Cache, prefix: str, gamma: ArrayLike | None, beta: ArrayLike | None
) -> tuple[Any, Any]:
    """Return the tangents or cotangents that belong to gamma and beta, checked."""
    checked: list[Array | None] = []
    for name, value, like in zip(("gamma", "beta"), (gamma, beta), cache.norm[:2], strict=True):
        if value is None:
            checked.append(None)
        elif like is None:
            msg = f"{prefix}{name} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        else:
            checked.append(_of_shape(f"{prefix}{name}", value, like.shape, name))
    return checked[0], checked[1]
