"""The backward: what was given is checked, made one record, and handed to a backend."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import Arrays, is_plain
from stablenorm.backends import arrays_of, plain, run
from stablenorm.call import Backward
from stablenorm.functional import samples
from stablenorm.functional.checks import (
    asked_names,
    check_cache,
    checked_out,
    has_leading,
    of_shape,
    refuse_overlap,
)
from stablenorm.functional.combinations import CUDA, NEAREST, refuse
from stablenorm.types import NAMES, Array, Cache, Gradients

_new = tuple.__new__

# A backward without rare options: dsum to samples of its record.
_NOTHING: Any = (None, None, None, None, None, "rounded", None)


class BackwardOptions(NamedTuple):
    """The keywords of a backward, as they were given."""

    wrt: Sequence[str] = NAMES
    out: Sequence[Array | None] | None = None
    # Arrays, of Dask too.
    dsum: Any = None
    sum_axes: int | tuple[int, ...] | None = None
    dmean: Any = None
    drstd: Any = None
    accumulate: bool = False
    threads: int | None = None


def backward(dy: ArrayLike, cache: Cache, kind: str, options: BackwardOptions) -> Gradients:
    """Return the requested gradients, given what the user gave."""
    found: Gradients | None = plain("backward")(dy, cache, kind, options)
    if found is not None:
        return found
    call, lead = prepared(dy, cache, kind, options)
    do(call, cache, lead, options.accumulate)
    return call.out


def prepared(
    dy: ArrayLike, cache: Cache, kind: str, options: BackwardOptions
) -> tuple[Backward, samples.Lead | None]:
    """Return the record of a backward, of arrays as they were given, and the lead of its sums, if asked for."""
    wrt, out, dsum, sum_axes, dmean, drstd, accumulate, threads = options
    check_cache(cache, dy, kind)
    x, norm, axes, statistics, name, where = cache
    arrays = arrays_of(name)
    # What is plain is in host memory: no dy for a cache that is on a device.
    if name == "cuda" or not is_plain(dy, x.shape):
        dy = arrays.convert("dy", dy)
    if dy.shape != x.shape:
        msg = f"dy must have shape {x.shape} to match the y of this cache, got {dy.shape}"
        raise ValueError(msg)
    rare = _NOTHING
    if dsum is not None or dmean is not None or drstd is not None or where is not None:
        dsum, dmean, drstd = _checked_extra(arrays, cache, (dsum, dmean, drstd))
        rare = dsum, dmean, drstd, where, None, "rounded", None
    lead = None
    gamma, beta = norm[:2]
    if sum_axes is not None:
        _refuse_cuda("sum_axes", name)
        lead, kept = samples.check_sum_axes(sum_axes, cache)
        gamma, beta = (samples.sums_like(each, kept, axes) for each in (gamma, beta))
    asked = asked_names(wrt)
    likes = (
        x if "x" in asked else None,
        gamma if "gamma" in asked else None,
        beta if "beta" in asked else None,
    )
    if accumulate:
        _refuse_cuda("accumulate", name)
    if out is None and not accumulate:
        gradients = _new(Gradients, [_empty(arrays, like, x) for like in likes])
    else:
        inputs = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
        gradients = _checked_gradients(arrays, likes, checked_out(out, likes, accumulate), inputs)
    return _new(Backward, (dy, x, norm, statistics, gradients, *rare, threads)), lead


def do(
    call: Backward, cache: Cache, lead: samples.Lead | None = None, accumulate: bool = False
) -> None:
    """Do a call whose arrays are as they were given."""
    axes, name = cache.axis, cache.backend
    if lead is not None or has_leading(call.norm, axes):
        _do_samples(call, cache, lead, accumulate)
        return
    if accumulate:
        call = call._replace(old=_old_sums(call.out))
    rows = arrays_of(name).rows
    given = call.dy, call.x, call.out.dx, call.dsum, call.where
    dy, x, dx, dsum, where = seen = [None if each is None else rows(each, axes) for each in given]
    if any(one is not other for one, other in zip(seen, given, strict=True)):
        out = call.out._replace(dx=dx)
        call = call._replace(dy=dy, x=x, out=out, dsum=dsum, where=where)
    run("backward", name, call)


def _do_samples(call: Backward, cache: Cache, lead: samples.Lead | None, accumulate: bool) -> None:
    """Do a call in which gamma, beta or the sums have leading axes; `lead` is that of the sums, if asked for."""
    ndim, axes, out = call.x.ndim, cache.axis, call.out
    of_gamma, of_beta = (samples.lead_of(each, ndim, axes) for each in call.norm[:2])
    cuts = [of_gamma, lead or of_gamma, lead or of_beta]
    if out.dgamma is not None:
        cuts[0] = cuts[1]
    # What is cut alike in one pass; that with dx, which may overwrite dy, comes last.
    passes: dict[samples.Lead, list[Any]] = {}
    for which in (1, 2, 0):
        if out[which] is not None:
            wanted = passes.pop(cuts[which], [None] * 3)
            wanted[which] = out[which]
            passes[cuts[which]] = wanted
    for cut, wanted in passes.items():
        some = call._replace(out=Gradients(*wanted))
        if wanted[0] is None is wanted[1]:
            # dbeta needs no gamma, and may be cut otherwise.
            some = some._replace(norm=call.norm._replace(gamma=None, gamma_offset=0.0))
        parts = samples.Samples(call.x.shape, axes, cut)
        seen = parts.backward(some)
        if accumulate:
            seen = seen._replace(old=_old_sums(seen.out, parts.count))
        run("backward", cache.backend, seen)
        parts.put_back(seen, some)


def _old_sums(out: Gradients, *count: int) -> Array | None:
    """Return what dgamma and dbeta hold, of each sample, in float64; 0 for one that is not wanted."""
    if out.dgamma is None is out.dbeta or 0 in count:
        return None
    totals = (np.zeros(1) if each is None else each.reshape(*count, -1) for each in out[1:])
    both = np.broadcast_arrays(*(each.astype(np.float64) for each in totals))
    return np.stack(both, axis=-2)


def _refuse_cuda(feature: str, backend: str) -> None:
    if backend == "cuda":
        refuse(feature, CUDA)


def _checked_extra(arrays: Arrays, cache: Cache, given: tuple[Any, ...]) -> list[Array | None]:
    """Return what else is added to dx: dsum, and dmean and drstd, one float64 for each row."""
    x, norm, axes, _, backend = cache[:5]
    of_rows = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    found: list[Array | None] = []
    for name, value in zip(("dsum", "dmean", "drstd"), given, strict=True):
        if value is None:
            found.append(None)
            continue
        _refuse_cuda(name, backend)
        if name == "dsum":
            found.append(of_shape(arrays, name, value, x.shape))
            continue
        if norm.rounding == "nearest":
            refuse(name, NEAREST)
        array = of_shape(arrays, name, value, of_rows, "cache.rstd")
        found.append(array.astype(float).reshape(-1))
    return found


def _empty(arrays: Arrays, like: Array | None, x: Array) -> Array | None:
    return None if like is None else arrays.empty(like.shape, like.dtype, x)


def _checked_gradients(
    arrays: Arrays,
    likes: tuple[Array | None, ...],
    out: tuple[Any, ...],
    inputs: dict[str, Any],
) -> Gradients:
    """Return the arrays to write into: those of `out`, checked, or new ones; None if not asked for."""
    found: list[Array | None] = []
    for name, like, array in zip(NAMES, likes, out, strict=True):
        if like is None or array is None:
            found.append(_empty(arrays, like, inputs["x"]))
            continue
        called = f"out.d{name}"
        checked = arrays.target(called, array, like.shape, like.dtype)
        refuse_overlap(arrays, called, checked, inputs, but="dy" if name == "x" else None)
        # New ones are not among these: nothing that was given can share memory with them.
        inputs[called] = checked
        found.append(checked)
    return Gradients._make(found)
