"""The forward: kernels do a plain call at once; any other is checked, made plain and handed to a backend."""

from typing import Any

import numpy as np

from stablenorm.arrays import normalize_axes, on_cuda_device
from stablenorm.backends import arrays_of, choose, plain, run
from stablenorm.call import Forward
from stablenorm.functional import checks
from stablenorm.functional.layout import lead_of
from stablenorm.functional.plain import BLOCK, run_plain
from stablenorm.reference.blocks import add
from stablenorm.types import Array, Cache, Norm, check_eps, real


def forward(
    x: Any,
    norm: Norm,
    axis: int | tuple[int, ...] | None = -1,
    out: Array | None = None,
    backend: str | None = None,
    keep: bool = True,
    residual: Any = None,
    where: Any = None,
    threads: int | None = None,
) -> tuple[Array, Any]:
    """Return y and the cache, None without `keep`; then y may overwrite x."""
    if backend is None or backend == "native":
        found: tuple[Array, Any] | None = plain("forward")(
            x, norm, axis, out, backend, keep, residual, where, threads
        ) or _reworded(x, norm, axis, out, keep, residual, where, threads)
        if found is not None:
            return found
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
        leads = (lead_of(each, x.ndim, axes) for each in call.norm[:2])
        statistics = run_plain(name, call, axes, *leads)
    if not keep:
        return y, None
    return y, Cache(x if total is None else total, norm, axes, statistics, name, where)


def _reworded(
    x: Any, norm: Norm, axis: Any, out: Any, keep: bool, residual: Any, where: Any, threads: Any
) -> Any:
    """Try the kernels with the usual spellings of axis and numbers, and with a copy of a small x with gaps."""
    if type(x) is not np.ndarray or x.ndim == 0 or where is not None:
        return None
    if normalize_axes(axis, x.ndim) != (x.ndim - 1,):
        return None
    rows = x
    if type(norm.eps) is not float:
        norm = norm._replace(eps=check_eps(norm.eps))
    if type(norm.gamma_offset) is not float:
        norm = norm._replace(gamma_offset=real("gamma_offset", norm.gamma_offset))
    if out is None is residual and x.nbytes <= BLOCK and x.dtype.isnative:
        rows = np.ascontiguousarray(x)
    found: Any = plain("forward")(rows, norm, -1, out, None, keep, residual, None, threads)
    if found is None or rows is x or not keep:
        return found
    # The cache refers to x, not to the copy.
    return found[0], found[1]._replace(x=x)
