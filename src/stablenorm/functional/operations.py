"""
The forward, the backward, forward mode and second order.

Kernels do a plain call at once; any other is checked, made plain and handed to a backend.
"""

from typing import Any

import numpy as np

from stablenorm.arrays import convert, empty_like, is_lazy_cache, normalize_axes, on_cuda_device
from stablenorm.backends import arrays_of, choose, plain, run
from stablenorm.call import Backward, DoubleBackward, Forward, Jvp
from stablenorm.control import with_default_control
from stablenorm.functional import checks
from stablenorm.functional.layout import Lead, lead_of
from stablenorm.functional.plain import BLOCK, run_plain
from stablenorm.reference.blocks import add
from stablenorm.types import NAMES, Array, Cache, Gradients, Norm, Shape, check_eps, real


def forward(
    x: Any, norm: Norm, axis: Any, out: Any, backend: str | None, keep: bool,
    residual: Any, where: Any, threads: int | None = None,
) -> tuple[Array, Any]:  # fmt: skip
    """Return y and the cache, None without `keep`; then y may overwrite x."""
    # Any backend needs the kernels loaded: they set the control word.
    kernels = plain("forward")
    if backend is None or backend == "native":
        done: tuple[Array, Any] | None = kernels(
            x, norm, axis, out, backend, keep, residual, where, threads
        ) or _reworded(x, norm, axis, out, keep, residual, where, threads)
        if done is not None:
            return done
    return _forward(x, norm, axis, out, backend, keep, residual, where, threads)


@with_default_control
def _forward(
    x: Any, norm: Norm, axis: Any, out: Any, backend: str | None, keep: bool,
    residual: Any, where: Any, threads: int | None,
) -> tuple[Array, Any]:  # fmt: skip
    """Check a forward, make it plain, and hand it to a backend."""
    name = choose(backend, on_cuda_device(x))
    arrays = arrays_of(name)
    x = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checks.checked_norm(arrays.convert, norm, x.shape, axes)
    keywords = {"residual": residual is not None, "where": where is not None}
    checks.check_combinations(checks.features_of(norm, axes, name), **keywords)
    total: Any = None
    if residual is not None:
        residual = checks.of_shape(arrays.convert, "residual", residual, x.shape)
        total = arrays.empty_like(x)
    named = {"x": x, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
    over = "" if keep and residual is None else "x"
    (y,) = checks.results_in(arrays, (out,), {"out": x}, named, over)
    if where is not None:
        where = checks.check_where(where, x.shape, axes, norm.rounding)
    call = Forward(x, norm, y, keep, residual, total, where, 1, threads)
    if where is not None and residual is not None:
        # cache.x holds the sum for rows that do not count, too.
        add(x, residual, total)
        call = call._replace(x=total, residual=None, total=None)
    if name == "cuda":
        statistics = run(name, call._replace(x=(x, axes), y=(y, axes)))
    else:
        if not x.size:
            # Without elements there is nothing to cut.
            call = call._replace(norm=norm._replace(gamma=None, beta=None, gamma_offset=0.0))
        leads = (lead_of(parameter, x.ndim, axes) for parameter in call.norm[:2])
        statistics = run_plain(name, call, axes, *leads)
    source = x if total is None else total
    return y, Cache(source, norm, axes, statistics, name, where) if keep else None


def _reworded(
    x: Any, norm: Norm, axis: Any, out: Any, keep: bool, residual: Any, where: Any, threads: Any
) -> Any:
    """Try the kernels with the usual spellings of axis and numbers, and with a copy of a small x with gaps."""
    may_be_plain = type(x) is np.ndarray and x.ndim > 0 and where is None
    if not may_be_plain or normalize_axes(axis, x.ndim) != (x.ndim - 1,):
        return None
    checks.refuse_misplaced(norm)
    if type(norm.eps) is not float:
        norm = norm._replace(eps=check_eps(norm.eps))
    if type(norm.gamma_offset) is not float:
        norm = norm._replace(gamma_offset=real("gamma_offset", norm.gamma_offset))
    is_small = out is None is residual and x.nbytes <= BLOCK and x.dtype.isnative
    rows = np.ascontiguousarray(x) if is_small else x
    done: Any = plain("forward")(rows, norm, -1, out, None, keep, residual, None, threads)
    if done is None or rows is x or not keep:
        return done
    # The cache refers to x, not to the copy.
    return done[0], done[1]._replace(x=x)


def backward(
    dy: Any, cache: Cache, kind: str, wrt: Any, out: Any,
    dsum: Any, sum_axes: Any, dmean: Any, drstd: Any, accumulate: bool,
) -> Gradients:  # fmt: skip
    """Return the requested gradients."""
    # Kernels know tuples alone.
    if type(wrt) is not tuple and isinstance(wrt, (str, list)):
        wrt = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    out = tuple(out) if type(out) is list else out
    gradients: Gradients | None = plain("backward")(
        dy, cache, kind, wrt, out, dsum, sum_axes, dmean, drstd, accumulate, None
    )
    if gradients is not None:
        return gradients
    return _backward(dy, cache, kind, wrt, out, dsum, sum_axes, dmean, drstd, accumulate)


@with_default_control
def _backward(
    dy: Any, cache: Cache, kind: str, wrt: Any, out: Any,
    dsum: Any, sum_axes: Any, dmean: Any, drstd: Any, accumulate: bool,
) -> Gradients:  # fmt: skip
    """Check a backward, make it plain, and hand it to a backend."""
    cache = checks.checked_cache(cache, dy, kind)
    x, norm, axes, statistics, name, where = cache
    arrays, accumulate = arrays_of(name), bool(accumulate)
    of_statistics = {"dmean": dmean, "drstd": drstd}
    keywords = {"dsum": dsum, "sum_axes": sum_axes, "accumulate": accumulate, **of_statistics}
    checks.check_combinations(checks.features_of(norm, axes, name), **keywords)
    dy = checks.of_shape(arrays.convert, "dy", dy, x.shape, "the y of this cache")
    dsum = checks.of_shape(arrays.convert, "dsum", dsum, x.shape, optional=True)
    of_rows = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    for called, value in of_statistics.items():
        array = checks.of_shape(arrays.convert, called, value, of_rows, "cache.rstd", optional=True)
        if array is not None:
            of_statistics[called] = array.astype(float).reshape(-1)
    lead, parameters = checks.check_sum_axes(sum_axes, cache)
    asked = checks.asked_names(wrt)
    three = zip(NAMES, (x, *parameters), strict=True)
    likes = {f"out.d{which}": like if which in asked else None for which, like in three}
    named = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    gradients = checks.checked_gradients(arrays, out, likes, named, accumulate)
    sums = "added" if accumulate else "rounded"
    others: Any = {"dsum": dsum, "where": where, "sums": sums, **of_statistics}
    call = Backward(dy, x, norm, statistics, *gradients, **others)
    if name == "cuda" and x.size:
        run(name, call._replace(dy=(dy, axes), x=(x, axes), dx=(call.dx, axes)))
    else:
        run_passes(name, call, axes, lead)
    return gradients


@with_default_control
def run_passes(backend: str, call: Backward, axes: Shape, lead: Lead | None = None) -> None:
    """Do a backward: one pass for gradients of the same lead. The last pass writes dx, which may overwrite dy."""
    if not call.x.size:
        # A sum over no rows is 0; old values, partial sums and exact sums stay.
        for total in (call.dgamma, call.dbeta):
            if total is not None and call.sums == "rounded":
                total[...] = 0
        return
    norm = call.norm._replace(beta=None)
    of_gamma, of_beta = (lead_of(parameter, call.x.ndim, axes) for parameter in call.norm[:2])
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


@with_default_control
def jvp(kind: str, tx: Any, cache: Cache, tgamma: Any, tbeta: Any) -> Array:
    """Return ty."""
    of_parameters = {"tgamma": tgamma, "tbeta": tbeta}
    tangent, first, second, mask = _checked("jvp", kind, cache, {"tx": tx}, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    ty = empty_like(x)
    run_plain(backend, Jvp(tangent, x, norm, statistics, first, second, ty, mask), axes)
    return ty


@with_default_control
def double_backward(
    kind: str, ddx: Any, dy: Any, cache: Cache, ddgamma: Any, ddbeta: Any
) -> tuple[Array, Array, Array | None]:
    """Return ddy, dx and dgamma."""
    of_x, of_parameters = {"ddx": ddx, "dy": dy}, {"ddgamma": ddgamma, "ddbeta": ddbeta}
    ddx, dy, first, second, mask = _checked("double_backward", kind, cache, of_x, of_parameters)
    x, norm, axes, statistics, backend, _ = cache
    dgamma = None if norm.gamma is None else empty_like(norm.gamma)
    results = empty_like(x), empty_like(x), dgamma
    call = DoubleBackward(ddx, dy, x, norm, statistics, first, second, *results, mask)
    run_plain(backend, call, axes)
    return results


def _checked(
    operation: str, kind: str, cache: Any, of_x: dict[str, Any], of_parameters: dict[str, Any]
) -> list[Any]:
    """Return arguments like x, those like gamma and beta, and the mask in the shape of x."""
    if is_lazy_cache(cache):
        checks.check_combinations((operation, checks.DASK))
    cache = checks.checked_cache(cache, None, kind, operation)
    features = checks.features_of(cache.norm, cache.axis, cache.backend)
    checks.check_combinations((operation, *features))
    checked: list[Any] = [checks.of_shape(convert, *pair, cache.x.shape) for pair in of_x.items()]
    parameters = zip(of_parameters.items(), NAMES[1:], cache.norm[:2], strict=True)
    for (called, value), name, like in parameters:
        if value is not None and like is None:
            msg = f"{called} must be None, since this cache has no {name}; pass one to the forward"
            raise ValueError(msg)
        shape = np.shape(like)
        checked.append(checks.of_shape(convert, called, value, shape, name, optional=True))
    where = None if cache.where is None else np.broadcast_to(cache.where, cache.x.shape)
    return [*checked, where]
