"""Forward mode and second order, for both norms: what is given is checked, and the reference or a kernel called."""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST, is_lazy_cache
from stablenorm.backends import implementation
from stablenorm.functional.calls import check_kind, of_shape
from stablenorm.functional.kept import restored
from stablenorm.types import Array, Cache, SampleNorm

# Nothing here is for arrays on a CUDA device, whose cache is refused.
_of_shape = partial(of_shape, HOST, backend="")


def jvp(
    kind: str, tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None, tbeta: ArrayLike | None
) -> Array:
    """Return ty, given what the user gave."""
    cache = _check_cache(cache, kind, "jvp")
    x, tangent = cache.x, _of_shape("tx", tx, cache.x.shape)
    parameters = _of_parameters(cache, "t", tgamma, tbeta)
    ty = HOST.empty(x.shape, x.dtype, x)
    tx_rows, x_rows, ty_rows = (HOST.rows(each, cache.axis) for each in (tangent, x, ty))
    implementation("jvp", cache.backend)(
        tx_rows, x_rows, cache.norm, cache.statistics, *parameters, ty_rows, _where(cache)
    )
    return ty


def double_backward(
    kind: str,
    ddx: ArrayLike,
    dy: ArrayLike,
    cache: Cache,
    ddgamma: ArrayLike | None,
    ddbeta: ArrayLike | None,
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma, given what the user gave."""
    cache = _check_cache(cache, kind, "double_backward")
    x, norm = cache[:2]
    given = _of_shape("ddx", ddx, x.shape), _of_shape("dy", dy, x.shape), x
    parameters = _of_parameters(cache, "dd", ddgamma, ddbeta)
    ddy, dx = (HOST.empty(x.shape, x.dtype, x) for _ in range(2))
    dgamma = None if norm.gamma is None else HOST.empty(norm.gamma.shape, norm.gamma.dtype, x)
    out = HOST.rows(ddy, cache.axis), HOST.rows(dx, cache.axis), dgamma
    implementation("double_backward", cache.backend)(
        *(HOST.rows(each, cache.axis) for each in given),
        norm,
        cache.statistics,
        *parameters,
        out,
        _where(cache),
    )
    return ddy, dx, dgamma


def _check_cache(cache: Any, kind: str, what: str) -> Cache:
    """Return `cache` with x and statistics, or say why ``{kind}_norm_{what}`` cannot use it."""
    forward = f"{kind}_norm_forward"
    if not isinstance(cache, Cache):
        cure = f"write y, cache = {forward}(...)"
        if is_lazy_cache(cache):
            cure = f"{what} is for arrays in memory, pass cache.compute()"
        msg = f"cache must be the Cache that {forward} returns, got {type(cache).__name__}; {cure}"
        raise TypeError(msg)
    norm = cache.norm
    check_kind(norm, kind, what)
    if cache.backend == "cuda":
        msg = f"cache must be of arrays in host memory for {what}; pass x.get() to {forward}"
        raise ValueError(msg)
    if norm.rounding != "fast":
        msg = (
            f'cache must be of rounding="fast", since {what} has no other yet, '
            f"got {norm.rounding!r}"
        )
        raise ValueError(msg)
    if type(norm) is SampleNorm:
        msg = (
            f"cache must be of a gamma and beta without leading axes, since {what} has no others yet; "
            "leave them out of the forward, and apply them to its y"
        )
        raise ValueError(msg)
    return cache if cache.save == "x" else restored(cache)


def _where(cache: Cache) -> Any:
    """Return the mask of a cache as rows of the length of those of x."""
    if cache.where is None:
        return None
    return HOST.rows(np.broadcast_to(cache.where, cache.x.shape), cache.axis)


def _of_parameters(
    cache: Cache, prefix: str, gamma: ArrayLike | None, beta: ArrayLike | None
) -> list[Array | None]:
    """Return the tangents or cotangents that belong to gamma and beta, checked."""
    checked: list[Array | None] = []
    for name, value, like in zip(("gamma", "beta"), (gamma, beta), cache.norm[:2], strict=True):
        if value is None:
            checked.append(None)
        elif like is None:
            msg = f"{prefix}{name} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        else:
            checked.append(_of_shape(f"{prefix}{name}", value, like.shape, of=name))
    return checked
