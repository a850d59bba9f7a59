"""The forward: what was given is checked, made one record, and handed to a backend."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import normalize_axes, on_cuda_device
from stablenorm.backends import arrays_of, choose, choose_cuda, plain, run
from stablenorm.call import Forward
from stablenorm.functional.checks import (
    checked_norm,
    has_leading,
    of_shape,
    refuse_overlap,
)
from stablenorm.functional.combinations import CUDA, refuse
from stablenorm.functional.masks import check_where
from stablenorm.functional.samples import Samples, lead_of
from stablenorm.types import Array, Cache, Norm, Statistics

# As NamedTuples make themselves, in half the time.
_new = tuple.__new__


class ForwardOptions(NamedTuple):
    """The keywords of a forward, as they were given, but for those of the norm."""

    axis: int | tuple[int, ...] = -1
    out: Array | None = None
    backend: str | None = None
    # Whether a cache is wanted; without it, y may overwrite x.
    keep: bool = True
    # Arrays, of Dask too.
    residual: Any = None
    where: Any = None
    threads: int | None = None


def forward(x: ArrayLike, norm: Norm, options: ForwardOptions) -> tuple[Array, Any]:
    """Return y and the cache, given what the user gave."""
    axis, out, backend, keep, residual, where, threads = options
    if backend is None or backend == "native":
        found: tuple[Array, Any] | None = plain("forward")(x, norm, options)
        if found is not None:
            return found
    name = choose_cuda(backend) if on_cuda_device(x) else choose(backend)
    arrays = arrays_of(name)
    x = arrays.convert("x", x)
    axes = normalize_axes(axis, x.ndim)
    norm = checked_norm(arrays, norm, x.shape, axes, name)
    total = None
    if residual is not None:
        _refuse_cuda("residual", name)
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
        _refuse_cuda("where", name)
        where = check_where(where, x.shape, axes, norm.rounding)
    call = _new(Forward, (x, norm, y, keep, residual, total, where, None, threads))
    statistics = _do(call, axes, name)
    if not keep:
        return y, None
    kept = x if total is None else total
    return y, _new(Cache, (kept, norm, axes, statistics, name, where))


def _made_in_pairs(self: Cache) -> Statistics:
    """Return the statistics of a cache in double-double, which a float64 gamma calls for."""
    x, norm, axes, _, name, where = self
    ones = np.ones([x.shape[axis] for axis in axes])
    norm = norm._replace(gamma=ones, beta=None, gamma_offset=0.0)
    made: Statistics = _do(Forward(x, norm, None, where=where), axes, name)
    return made


# A cache knows nothing of backends, which are on a floor above its own.
Cache.made_in_pairs = _made_in_pairs  # type: ignore[method-assign]


def _do(call: Forward, axes: tuple[int, ...], name: str) -> Any:
    """Do a call whose arrays are as they were given; return the statistics in the order of x's rows."""
    x, norm, y, keep, residual, total, where, _, threads = call
    if has_leading(norm, axes) and x.size:
        leads = (lead_of(each, x.ndim, axes) for each in norm[:2])
        samples = Samples(x.shape, axes, *leads)
        seen = samples.forward(call)
        found = run("forward", name, seen)
        samples.put_back(seen, call)
        return samples.in_order(found) if keep else None
    rows = arrays_of(name).rows
    of_x, of_y, residual, total, where = (
        None if each is None else rows(each, axes) for each in (x, y, residual, total, where)
    )
    norm = _without_leading(norm, axes)
    seen = Forward(of_x, norm, of_y, keep, residual, total, where, None, threads)
    return run("forward", name, seen)


def _without_leading(norm: Norm, axes: tuple[int, ...]) -> Norm:
    """Return the norm of no rows: then nothing of gamma and beta counts but that they have no leading axes."""
    return (
        norm._replace(gamma=None, beta=None, gamma_offset=0.0) if has_leading(norm, axes) else norm
    )


def _refuse_cuda(feature: str, backend: str) -> None:
    if backend == "cuda":
        refuse(feature, CUDA)
