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
from stablenorm.functional.layout import layout_of
from stablenorm.records import NAMES, Array, Cache, Gradients, Norm

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
    arrays, total = arrays_of(name), None
    x = source = y_like = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checks.checked_norm(arrays.convert, norm, x.shape, axes)
    checks.check_features(norm, axes, name, residual=residual, where=where)
    if residual is not None:
        residual = checks.of_shape(arrays.convert, "residual", residual, x.shape)
        # The wider of both is what is normalized.
        if residual.dtype.itemsize > x.dtype.itemsize:
            x = x.astype(residual.dtype)
        residual = checks.widened("residual", residual, x.dtype)
        source = total = arrays.empty_like(x)
    named = {"x": y_like, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
    over = "" if keep and residual is None else "x"
    (y,) = checks.results_in(arrays, (out,), {"out": y_like}, named, over)
    if where is not None:
        where = checks.check_where(where, x.shape, axes, norm.rounding)
    layout = layout_of(x.shape, axes)
    rows = arrays.rows(x, layout)
    of_y = arrays.rows(y, layout, False, rows)
    of_total = None
    if residual is not None:
        residual, of_total = arrays.rows(residual, layout), arrays.rows(total, layout, False)
    call = _new(Forward, (rows, norm, of_y, keep, residual, of_total, threads))
    statistics = keywords.forward(name, call, layout, where)
    layout.put_back(of_y, y)
    if of_total is not None:
        layout.put_back(of_total, total)
    return y, _new(Cache, (source, norm, axes, statistics, name, where)) if keep else None


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
    x, arrays = cache.x, arrays_of(cache.backend)
    given = {"dsum": dsum, "sum_axes": sum_axes, "accumulate": bool(accumulate)}
    checks.check_features(cache.norm, cache.axis, cache.backend, **given)
    dy = checks.of_shape(arrays.convert, "dy", dy, x.shape, "the y of this cache", dtype=x.dtype)
    if dsum is not None:
        dsum = checks.of_shape(arrays.convert, "dsum", dsum, x.shape, dtype=x.dtype)
    likes: dict[str, Any] = {
        "out.dx": x, "out.dgamma": cache.norm.gamma, "out.dbeta": cache.norm.beta,
    }  # fmt: skip
    if sum_axes is not None:
        norm, shape = checks.summed(sum_axes, cache)
        cache = cache._replace(norm=norm)
        for name in ("out.dgamma", "out.dbeta"):
            like = likes[name]
            likes[name] = like if like is None else np.empty(shape, like.dtype)
    if wrt is not NAMES:
        asked = checks.asked_names(wrt)
        for which, name in zip(NAMES, likes, strict=True):
            likes[name] = likes[name] if which in asked else None
    named = {"x": x, "gamma": cache.norm.gamma, "dy": dy, "dsum": dsum}
    gradients = into = checks.checked_gradients(arrays, out, likes, named, accumulate)
    if accumulate:
        wide = (v if v is None else np.zeros(v.shape) for v in gradients[1:])
        into = Gradients(gradients.dx, *wide)
    run_backward(dy, cache, into, dsum)
    if accumulate:
        keywords.accumulate(gradients, into)
    return gradients


def run_backward(
    dy: Array, cache: Cache, gradients: Gradients, dsum: Array | None, threads: int | None = None
) -> None:
    """Do a backward into gradients of checked arrays; sums over rows of `reference.sums.PARTIAL` are not rounded."""
    arrays, layout = arrays_of(cache.backend), layout_of(cache.x.shape, cache.axis)
    dx, results, sums = gradients.dx, list[Any](gradients[1:]), list[Any]()
    for result in results:
        sums.append(result if result is None else arrays.contiguous(result))
    if cache.x.size:
        x, rows = arrays.rows(cache.x, layout), arrays.rows(dy, layout)
        of_dx = dx if dx is None else arrays.rows(dx, layout, False, rows)
        of_dsum = dsum if dsum is None else arrays.rows(dsum, layout)
        fields = rows, x, cache.norm, cache.statistics, of_dx, *sums, of_dsum, threads
        keywords.backward(cache.backend, _new(Backward, fields), layout, cache.where)
        if of_dx is not None:
            layout.put_back(of_dx, dx)
    else:
        for total in sums:
            if total is not None:
                # A sum over no rows.
                total[...] = np.zeros((), total.dtype)
    for result, total in zip(results, sums, strict=True):
        if total is not result:
            result[...] = total
