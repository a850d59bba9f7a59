"""
The backward, forward mode and second order.

Kernels do a plain backward at once; any other call is checked, made plain and handed to a backend.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import HOST, is_lazy_cache
from stablenorm.backends import arrays_of, plain, run
from stablenorm.call import Backward, DoubleBackward, Jvp
from stablenorm.functional.checks import (
    asked_names,
    check_cache,
    check_sum_axes,
    checked_gradients,
    of_shape,
)
from stablenorm.functional.combinations import DASK, check_combinations, features_of
from stablenorm.functional.layout import Lead, lead_of
from stablenorm.functional.plain import run_plain
from stablenorm.types import NAMES, Array, Cache, Gradients


def backward(
    dy: ArrayLike,
    cache: Cache,
    kind: str,
    wrt: Sequence[str] = NAMES,
    out: Sequence[Array | None] | None = None,
    dsum: Any = None,
    sum_axes: int | tuple[int, ...] | None = None,
    dmean: Any = None,
    drstd: Any = None,
    accumulate: bool = False,
    threads: int | None = None,
) -> Gradients:
    """Return the requested gradients."""
    # Kernels know tuples alone.
    if type(wrt) is not tuple and isinstance(wrt, (str, list)):
        wrt = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    out = tuple(out) if type(out) is list else out
    found: Gradients | None = plain("backward")(
        dy, cache, kind, wrt, out, dsum, sum_axes, dmean, drstd, accumulate, threads
    )
    if found is not None:
        return found
    check_cache(cache, dy, kind)
    x, norm, axes, statistics, name, where = cache
    arrays, accumulate = arrays_of(name), bool(accumulate)
    given = {"dsum": dsum, "dmean": dmean, "drstd": drstd, "sum_axes": sum_axes}
    check_combinations(features_of(norm, axes, name), **given, accumulate=accumulate)
    dy = of_shape(arrays, "dy", dy, x.shape, "the y of this cache")
    if dsum is not None:
        dsum = of_shape(arrays, "dsum", dsum, x.shape)
    of_rows = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    dmean, drstd = (
        None
        if each is None
        else of_shape(arrays, called, each, of_rows, "cache.rstd").astype(float).reshape(-1)
        for called, each in (("dmean", dmean), ("drstd", drstd))
    )
    lead, parameters = None, list(norm[:2])
    if sum_axes is not None:
        lead, parameters = check_sum_axes(sum_axes, cache)
    asked = asked_names(wrt)
    three = zip(NAMES, (x, *parameters), strict=True)
    likes = {f"out.d{each}": like if each in asked else None for each, like in three}
    named = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    gradients = checked_gradients(arrays, out, likes, named, accumulate)
    sums = "added" if accumulate else "rounded"
    call = Backward(
        dy, x, norm, statistics, *gradients, dsum, dmean, drstd, where, sums, threads=threads
    )
    if name == "cuda" and x.size:
        like_x = {"dy": dy, "x": x, "dx": call.dx}
        rows: Any = {n: arrays.rows(each, axes) for n, each in like_x.items() if each is not None}
        run(name, call._replace(**rows))
    else:
        run_passes(name, call, axes, lead)
    return gradients


def run_passes(
    backend: str, call: Backward, axes: tuple[int, ...], lead: Lead | None = None
) -> None:
    """Do a call: a pass for each way of cutting x; the last has dx, which may overwrite dy."""
    if not call.x.size:
        # A sum over no rows is 0; old values, partial sums and exact sums stay.
        for total in (call.dgamma, call.dbeta):
            if total is not None and call.sums == "rounded":
                total[...] = 0
        return
    norm = call.norm._replace(beta=None)
    of_gamma, of_beta = (lead_of(each, call.x.ndim, axes) for each in call.norm[:2])
    leads = {"dgamma": lead or of_gamma, "dbeta": lead or of_beta}
    leads["dx"] = of_gamma if call.dgamma is None else leads["dgamma"]
    passes: dict[Lead, list[str]] = {}
    for name, cut in leads.items():
        if getattr(call, name) is not None:
            passes[cut] = [*passes.pop(cut, []), name]
    for cut, names in passes.items():
        # dbeta alone needs no gamma, which may be cut otherwise.
        one = norm._replace(gamma=None, gamma_offset=0.0) if names == ["dbeta"] else norm
        others: Any = dict.fromkeys(leads.keys() - set(names))
        run_plain(backend, call._replace(norm=one, **others), axes, cut)


# ---- forward mode and second order ----


def jvp(
    kind: str, tx: ArrayLike, cache: Cache, tgamma: ArrayLike | None, tbeta: ArrayLike | None
) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    tangent, first, second, mask = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    ty = HOST.empty(x.shape, x.dtype, x)
    run_plain(backend, Jvp(tangent, x, norm, statistics, first, second, ty, mask), axes)
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
    ddx, dy, first, second, mask = _checked("double_backward", kind, cache, of_x, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    ddy, dx = (HOST.empty(x.shape, x.dtype, x) for _ in range(2))
    dgamma = None if norm.gamma is None else HOST.empty(norm.gamma.shape, norm.gamma.dtype, x)
    results = ddy, dx, dgamma
    call = DoubleBackward(ddx, dy, x, norm, statistics, first, second, *results, mask)
    run_plain(backend, call, axes)
    return results


def _checked(
    what: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return arguments like x, those like gamma and beta, and the mask in the shape of x."""
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
    where = None if cache.where is None else np.broadcast_to(cache.where, cache.x.shape)
    return [*checked, where]
