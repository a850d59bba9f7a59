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
from stablenorm.types import NAMES, Array, Cache, Gradients, Norm, Shape

# The faster constructor of a NamedTuple.
_new = tuple.__new__


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
    name = choose(backend, type(x) is not np.ndarray and on_cuda_device(x))
    arrays = arrays_of(name)
    x = y_like = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checks.checked_norm(arrays.convert, norm, x.shape, axes)
    checks.check_features(norm, axes, name, residual=residual, where=where)
    layout, total, rows_of_total = layout_of(x.shape, axes), None, None
    if residual is not None:
        residual = checks.of_shape(arrays.convert, "residual", residual, x.shape)
        # The wider of both is what is normalized.
        if residual.dtype.itemsize > x.dtype.itemsize:
            x = x.astype(residual.dtype)
        residual = checks.widened("residual", residual, x.dtype)
        total = arrays.empty_like(x)
    if out is None:
        y = arrays.empty_like(y_like)
    else:
        named = {"x": y_like, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
        over = "" if keep and residual is None else "x"
        (y,) = checks.results_in(arrays, (out,), {"out": y_like}, named, over)
    if where is not None:
        where = checks.check_where(where, x.shape, axes, norm.rounding)
    rows, _ = arrays.rows(x, layout)
    rows_of_y, is_view = arrays.rows(y, layout, False, None if out is None else rows)
    if total is not None:
        residual, _ = arrays.rows(residual, layout)
        rows_of_total, is_sum = arrays.rows(total, layout, False)
    call = _new(Forward, (rows, norm, rows_of_y, keep, residual, rows_of_total, threads))
    statistics = keywords.forward(name, call, layout, where)
    if not is_view:
        y.transpose(layout.order)[...] = rows_of_y.reshape(layout.lengths)
    if total is not None and rows_of_total is not None and not is_sum:
        total.transpose(layout.order)[...] = rows_of_total.reshape(layout.lengths)
    source = x if total is None else total
    fields = (source, norm, axes, statistics, name, where)
    return y, _new(Cache, fields) if keep else None


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
    checks.check_features(norm, axes, name, **given)
    dy = checks.of_shape(arrays.convert, "dy", dy, x.shape, "the y of this cache", dtype=x.dtype)
    if dsum is not None:
        dsum = checks.of_shape(arrays.convert, "dsum", dsum, x.shape, dtype=x.dtype)
    lead: Lead | None = None
    shape: Shape = ()
    if sum_axes is not None:
        lead, shape = checks.check_sum_axes(sum_axes, cache, layout_of(x.shape, axes))
    asked = NAMES if wrt is NAMES else checks.asked_names(wrt)
    likes: Any = {"out.dx": x, "out.dgamma": norm.gamma, "out.dbeta": norm.beta}
    for which, called in zip(NAMES, likes, strict=True):
        if which not in asked:
            likes[called] = None
        elif lead is not None and which != "x" and likes[called] is not None:
            likes[called] = np.empty(shape, likes[called].dtype)
    named = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    if out is None and not accumulate:
        made = []
        for like in likes.values():
            made.append(like if like is None else arrays.empty_like(like))
        gradients = _new(Gradients, made)
    else:
        gradients = checks.checked_gradients(arrays, out, likes, named, accumulate)
    into = None if out is None else dy
    run_backward(dy, cache, gradients, dsum, lead, into, accumulate)
    return gradients


def run_backward(
    dy: Array, cache: Cache, gradients: Gradients, dsum: Array | None, lead: Lead | None = None,
    over: Array | None = None, accumulate: bool = False, partial: bool = False,
    threads: int | None = None,
) -> None:  # fmt: skip
    """Do a backward into gradients of checked arrays, of which dx may lie over `over`."""
    dx, dgamma, dbeta = gradients
    if not cache.x.size:
        # A sum over no rows is 0; old values and partial sums stay.
        for total in (dgamma, dbeta):
            if total is not None and not (accumulate or partial):
                total[...] = 0
        return
    arrays, layout = arrays_of(cache.backend), layout_of(cache.x.shape, cache.axis)
    rows_of_dx, is_view = (None, True) if dx is None else arrays.rows(dx, layout, False, over)
    (rows, _), (x, _) = arrays.rows(dy, layout), arrays.rows(cache.x, layout)
    of_dsum = None if dsum is None else arrays.rows(dsum, layout)[0]
    results = rows_of_dx, dgamma, dbeta, of_dsum
    fields = rows, x, cache.norm, cache.statistics, *results, partial, threads
    call = _new(Backward, fields)
    keywords.backward(cache.backend, call, layout, cache.where, lead, accumulate)
    if dx is not None and rows_of_dx is not None and not is_view:
        dx.transpose(layout.order)[...] = rows_of_dx.reshape(layout.lengths)
