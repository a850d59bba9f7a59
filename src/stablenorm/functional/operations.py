"""
The forward and the backward.

Kernels do a plain call at once; any other is checked, seen as rows, and done as `keywords` composes it of plain calls.
"""

from typing import Any

import numpy as np

from stablenorm.arrays import normalize_axes, on_cuda_device
from stablenorm.backends import arrays_of, choose, kernels
from stablenorm.call import Backward, Forward
from stablenorm.control import with_default_control
from stablenorm.functional import checks, keywords
from stablenorm.functional.layout import Lead, layout_of
from stablenorm.threads import get_num_threads
from stablenorm.types import NAMES, Array, Cache, Gradients, Norm


def forward(
    x: Any, norm: Norm, axis: Any, out: Any, backend: str | None, keep: bool,
    residual: Any, where: Any, threads: int | None = None,
) -> tuple[Array, Any]:  # fmt: skip
    """Return y and the cache, None without `keep`; then y may overwrite x."""
    # Any backend needs the kernels loaded: they set the control word.
    plain = kernels().plain_forward
    if backend is None or backend == "native":
        done: Any = plain(x, norm, axis, out, backend, keep, residual, where, threads, None)
        if done is not None:
            return done  # type: ignore[no-any-return]
    return _forward(x, norm, axis, out, backend, keep, residual, where, threads)


@with_default_control
def _forward(
    x: Any, norm: Norm, axis: Any, out: Any, backend: str | None, keep: bool,
    residual: Any, where: Any, threads: int | None,
) -> tuple[Array, Any]:  # fmt: skip
    """Check a forward, see its arrays as rows, and do it by parts."""
    name = choose(backend, on_cuda_device(x))
    arrays = arrays_of(name)
    x = y_like = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checks.checked_norm(arrays.convert, norm, x.shape, axes)
    given = {"residual": residual is not None, "where": where is not None}
    checks.check_combinations(checks.features_of(norm, axes, name), **given)
    layout, total = layout_of(arrays, x.shape, axes), None
    if residual is not None:
        residual = checks.of_shape(arrays.convert, "residual", residual, x.shape)
        # The wider of both is what is normalized.
        if residual.dtype.itemsize > x.dtype.itemsize:
            x = x.astype(residual.dtype)
        residual = checks.widened("residual", residual, x.dtype)
        total = arrays.empty_like(x)
    named = {"x": y_like, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
    over = "" if keep and residual is None else "x"
    (y,) = checks.results_in(arrays, (out,), {"out": y_like}, named, over)
    if where is not None:
        where = checks.check_where(where, x.shape, axes, norm.rounding)
    rows = layout.read(x)
    call = Forward(rows, norm, layout.room(y, rows), keep, threads=threads or get_num_threads())
    if total is not None:
        call = call._replace(residual=layout.read(residual), total=layout.room(total))
    statistics = keywords.forward(name, call, layout, layout.mask(where))
    layout.put(call.y, y)
    if total is not None:
        layout.put(call.total, total)
    source = x if total is None else total
    return y, Cache(source, norm, axes, statistics, name, where) if keep else None


def backward(
    dy: Any, cache: Cache, kind: str, wrt: Any, out: Any, dsum: Any, sum_axes: Any, accumulate: bool
) -> Gradients:
    """Return the requested gradients."""
    # Kernels know tuples alone.
    if type(wrt) is not tuple and isinstance(wrt, (str, list)):
        wrt = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    out = tuple(out) if type(out) is list else out
    gradients: Gradients | None = None
    if sum_axes is None and not accumulate:
        gradients = kernels().plain_backward(dy, cache, kind, wrt, out, dsum, None, None)
    if gradients is not None:
        return gradients
    return _backward(dy, cache, kind, wrt, out, dsum, sum_axes, accumulate)


@with_default_control
def _backward(
    dy: Any, cache: Any, kind: str, wrt: Any, out: Any, dsum: Any, sum_axes: Any, accumulate: bool
) -> Gradients:
    """Check a backward, see its arrays as rows, and do it by parts."""
    cache = checks.checked_cache(cache, dy, kind)
    x, norm, axes, name = cache.x, cache.norm, cache.axis, cache.backend
    arrays, accumulate = arrays_of(name), bool(accumulate)
    given = {"dsum": dsum, "sum_axes": sum_axes, "accumulate": accumulate}
    checks.check_combinations(checks.features_of(norm, axes, name), **given)
    dy = checks.of_shape(arrays.convert, "dy", dy, x.shape, "the y of this cache")
    dsum = checks.of_shape(arrays.convert, "dsum", dsum, x.shape, optional=True)
    dy, dsum = checks.widened("dy", dy, x.dtype), checks.widened("dsum", dsum, x.dtype)
    lead, shape = checks.check_sum_axes(sum_axes, cache, layout_of(arrays, x.shape, axes))
    asked = checks.asked_names(wrt)
    likes: Any = {"out.dx": x, "out.dgamma": norm.gamma, "out.dbeta": norm.beta}
    for which, called in zip(NAMES, likes, strict=True):
        if which not in asked:
            likes[called] = None
        elif lead is not None and which != "x" and likes[called] is not None:
            likes[called] = np.empty(shape, likes[called].dtype)
    named = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    gradients = checks.checked_gradients(arrays, out, likes, named, accumulate)
    run_backward(dy, cache, gradients, dsum, lead, accumulate=accumulate)
    return gradients


@with_default_control
def run_backward(
    dy: Array, cache: Cache, gradients: Gradients, dsum: Array | None, lead: Lead | None = None, *,
    accumulate: bool = False, partial: bool = False, threads: int | None = None,
) -> None:  # fmt: skip
    """Do a backward into gradients of checked arrays."""
    dx, dgamma, dbeta = gradients
    if not cache.x.size:
        # A sum over no rows is 0; old values and partial sums stay.
        for total in (dgamma, dbeta):
            if total is not None and not (accumulate or partial):
                total[...] = 0
        return
    layout, call, mask = rows_of(dy, cache, threads)
    if dsum is not None:
        call = call._replace(dsum=layout.read(dsum))
    if dx is not None:
        call = call._replace(dx=layout.room(dx, call.dy))
    call = call._replace(dgamma=dgamma, dbeta=dbeta, partial=partial)
    keywords.backward(cache.backend, call, layout, mask, lead, accumulate)
    if dx is not None:
        layout.put(call.dx, dx)


def rows_of(dy: Array, cache: Cache, threads: int | None) -> Any:
    """Return the layout of a cache, a backward of its rows, and the rows of its mask."""
    layout = layout_of(arrays_of(cache.backend), cache.x.shape, cache.axis)
    rows = layout.read(dy), layout.read(cache.x), cache.norm, cache.statistics
    return layout, Backward(*rows, threads=threads or get_num_threads()), layout.mask(cache.where)
