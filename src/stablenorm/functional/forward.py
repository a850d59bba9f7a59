"""The forward: kernels do a plain call at once; any other is checked, made plain and handed to a backend."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import normalize_axes, on_cuda_device
from stablenorm.backends import arrays_of, choose, choose_cuda, plain, run
from stablenorm.call import Forward
from stablenorm.functional.checks import (
    checked_norm,
    of_shape,
    refuse_cuda,
    refuse_overlap,
)
from stablenorm.functional.layout import layout_of, lead_of
from stablenorm.functional.masks import check_where
from stablenorm.functional.plain import BLOCK, run_plain
from stablenorm.reference.blocks import add
from stablenorm.types import Array, Cache, Norm, check_eps

# Makes a NamedTuple in half the time.
_new = tuple.__new__


def forward(
    x: ArrayLike,
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
        )
        if found is not None:
            return found
        if type(x) is np.ndarray and x.ndim and where is None:
            found = _reworded(x, norm, axis, out, keep, residual, threads)
            if found is not None:
                return found
    name = choose_cuda(backend) if on_cuda_device(x) else choose(backend)
    arrays = arrays_of(name)
    x = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checked_norm(arrays, norm, x.shape, axes, name)
    total = None
    if residual is not None:
        refuse_cuda("residual", name)
        residual = of_shape(arrays, "residual", residual, x.shape)
        total = arrays.empty(x.shape, x.dtype, x)
    if out is None:
        y = arrays.empty(x.shape, x.dtype, x)
    else:
        y = arrays.target("out", out, x.shape, x.dtype)
        others = {"x": x, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
        needed = keep and residual is None
        refuse_overlap(arrays, "out", y, others, but=None if needed else "x")
    if where is not None:
        refuse_cuda("where", name)
        where = check_where(where, x.shape, axes, norm.rounding)
    call = Forward(x, norm, y, keep, residual, total, where, 1, threads)
    statistics = _do(call, axes, name)
    if not keep:
        return y, None
    kept = x if total is None else total
    return y, _new(Cache, (kept, norm, axes, statistics, name, where))


def _reworded(
    x: Array, norm: Norm, axis: Any, out: Any, keep: bool, residual: Any, threads: int | None
) -> tuple[Array, Any] | None:
    """Try the kernels with other spellings of axis and eps made the usual ones, and a small x with gaps copied."""
    if normalize_axes(axis, x.ndim) != (x.ndim - 1,):
        return None
    norm, rows = norm._replace(eps=check_eps(norm.eps)), x
    if out is None is residual and x.nbytes <= BLOCK and x.dtype.isnative:
        rows = np.ascontiguousarray(x)
    found: tuple[Array, Any] | None = plain("forward")(
        rows, norm, -1, out, None, keep, residual, None, threads
    )
    if found is None or rows is x or not keep:
        return found
    # The cache refers to x, not to the copy.
    return found[0], found[1]._replace(x=x)


def _do(call: Forward, axes: tuple[int, ...], name: str) -> Any:
    """Do a call on the user's arrays; return the statistics in the order of x's rows."""
    x, norm = call[:2]
    if name == "cuda":
        rows = arrays_of(name).rows
        return run("forward", name, call._replace(x=rows(x, axes), y=rows(call.y, axes)))
    if call.where is not None and call.residual is not None:
        # cache.x holds the sum for rows that do not count, too.
        add(x, call.residual, call.total)
        call = call._replace(x=call.total, residual=None, total=None)
    # Without elements there is nothing to cut.
    if x.size:
        layout = layout_of(x.shape, axes, *(lead_of(each, x.ndim, axes) for each in norm[:2]))
        seen = [layout.parameter(each) for each in norm[:2]]
        call = call._replace(norm=_new(Norm, (*seen, *norm[2:])))
    else:
        layout = layout_of(x.shape, axes)
        call = call._replace(norm=norm._replace(gamma=None, beta=None, gamma_offset=0.0))
    found = run_plain("forward", name, call, layout)
    numbers = layout.numbers() if call.keep else None
    return found if numbers is None else found.of_rows(np.argsort(numbers))
