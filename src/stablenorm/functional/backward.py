"""The backward: a plain call is the kernels' at once; any other is checked, made plain and handed to a backend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import Arrays
from stablenorm.backends import arrays_of, plain, run
from stablenorm.call import Backward
from stablenorm.functional.checks import (
    asked_names,
    check_cache,
    check_sum_axes,
    checked_out,
    of_shape,
    refuse_cuda,
    refuse_overlap,
    sums_like,
)
from stablenorm.functional.combinations import CUDA, NEAREST, refuse
from stablenorm.functional.layout import Lead, layout_of, lead_of
from stablenorm.functional.plain import run_plain
from stablenorm.reference.partial import NOTHING, PARTIAL
from stablenorm.types import NAMES, Array, Cache, Gradients

_RESULTS = "dx", "dgamma", "dbeta"


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
    out = tuple(out) if type(out) is list else out
    found: Gradients | None = plain("backward")(
        dy, cache, kind, wrt, out, dsum, sum_axes, dmean, drstd, accumulate, threads
    )
    if found is not None:
        return found
    check_cache(cache, dy, kind)
    arrays, (x, norm, axes, _, name, _) = arrays_of(cache.backend), cache
    dy = of_shape(arrays, "dy", dy, x.shape, "the y of this cache")
    dsum, dmean, drstd = _checked_extra(arrays, cache, (dsum, dmean, drstd))
    lead = None
    gamma, beta = norm[:2]
    if sum_axes is not None:
        refuse_cuda("sum_axes", name)
        lead, kept = check_sum_axes(sum_axes, cache)
        gamma, beta = (sums_like(each, kept, axes) for each in (gamma, beta))
    asked = asked_names(wrt)
    three = zip(NAMES, (x, gamma, beta), strict=True)
    likes = [like if each in asked else None for each, like in three]
    if accumulate:
        refuse_cuda("accumulate", name)
    inputs = {"x": x, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    given = checked_out(out, likes, accumulate)
    gradients = _checked_gradients(arrays, likes, given, inputs)
    call = Backward(dy, x, norm, cache.statistics, *gradients, dsum, dmean, drstd, threads=threads)
    if name == "cuda":
        rows = arrays.rows
        dx = None if call.dx is None else rows(call.dx, axes)
        run("backward", name, call._replace(dy=rows(dy, axes), x=rows(x, axes), dx=dx))
        return gradients
    run_passes(call, cache, lead, accumulate)
    return gradients


def run_passes(call: Backward, cache: Cache, lead: Lead | None, accumulate: bool) -> None:
    """
    Do a call on the user's arrays: one pass for each way of cutting x into samples.

    `lead` is the lead of the sums if sum_axes was passed. The pass with dx, which may overwrite dy, comes last.
    """
    ndim, axes = call.x.ndim, cache.axis
    if not call.x.size:
        # A sum over no rows is 0; old values, partial sums and exact sums stay.
        for total in (call.dgamma, call.dbeta):
            if total is not None and call.sums == "rounded" and not accumulate:
                total[...] = np.zeros((), total.dtype)
        return
    of_gamma, of_beta = (lead_of(each, ndim, axes) for each in call.norm[:2])
    leads = [of_gamma, lead or of_gamma, lead or of_beta]
    if call.dgamma is not None:
        leads[0] = leads[1]
    passes: dict[Lead, list[str]] = {}
    for which, name in ((1, "dgamma"), (2, "dbeta"), (0, "dx")):
        if getattr(call, name) is not None:
            passes[leads[which]] = [*passes.pop(leads[which], []), name]
    for cut, names in passes.items():
        some: Any = {name: getattr(call, name) if name in names else None for name in _RESULTS}
        _run_pass(call._replace(**some), cache, cut, accumulate)


def _run_pass(call: Backward, cache: Cache, cut: Lead, accumulate: bool) -> None:
    layout = layout_of(call.x.shape, cache.axis, cut)
    # dbeta needs no gamma, and may be cut otherwise.
    only_beta = call.dx is None is call.dgamma
    gamma = None if only_beta else layout.parameter(call.norm.gamma)
    offset = 0.0 if only_beta else call.norm.gamma_offset
    norm = call.norm._replace(gamma=gamma, beta=None, gamma_offset=offset)
    numbers = layout.numbers()
    if numbers is not None:
        words = call.statistics.of_rows(numbers)
        extra = {name: getattr(call, name) for name in ("dmean", "drstd")}
        extra = {name: None if each is None else each[numbers] for name, each in extra.items()}
        call = call._replace(statistics=words, **extra)
    shape = (layout.samples, layout.shape[1]) if layout.samples > 1 else layout.shape[1:]
    given = call.dgamma, call.dbeta
    seen = [None if each is None else np.ascontiguousarray(each).reshape(shape) for each in given]
    old = None
    if accumulate and (call.dgamma is not None or call.dbeta is not None):
        old = [None if each is None else each.copy() for each in seen]
    dgamma, dbeta = seen
    seen_call = call._replace(norm=norm, dgamma=dgamma, dbeta=dbeta, where=cache.where)
    run_plain("backward", cache.backend, seen_call, layout, old)
    for total, room in zip(given, seen, strict=True):
        if total is not None and room is not None and not np.may_share_memory(total, room):
            total[...] = room.reshape(total.shape)


# ---- partial sums, for callers that merge the sums of blocks of rows ----


def partial_sums(
    dy: ArrayLike,
    cache: Cache,
    wrt: Sequence[str] = NAMES,
    *,
    dsum: ArrayLike | None = None,
    threads: int | None = None,
) -> Gradients:
    """Return dx, and dgamma and dbeta as PARTIAL, for `partial.merged`."""
    asked = asked_names(wrt)
    sums = [
        None if parameter is None or name not in asked else np.zeros(parameter.shape, PARTIAL)
        for name, parameter in zip(NAMES[1:], cache.norm[:2], strict=True)
    ]
    return _sums(dy, cache, "x" in asked, sums, "pairs", dsum, threads)


def exact_sums(
    dy: ArrayLike, cache: Cache, columns: Sequence[Array | None], threads: int | None = None
) -> tuple[Any, Any]:
    """
    Return the exact sums of some columns of dgamma and of dbeta, of a cache with rounding="nearest".

    `columns` are two arrays of bool, or None. The sums are arrays of objects of these shapes, for `partial.merged`; without
    a True nothing is computed.
    """
    sums = [None if each is None else np.where(each, NOTHING, 0) for each in columns]
    if any(each is not None and each.any() for each in columns):
        _sums(dy, cache, False, sums, "exact", None, threads)
    return sums[0], sums[1]


def _sums(
    dy: Any, cache: Cache, with_dx: bool, sums: list[Any], how: str, dsum: Any, threads: int | None
) -> Gradients:
    if cache.backend == "cuda":
        refuse("sums over some of the rows", CUDA)
    arrays, x = arrays_of(cache.backend), cache.x
    check_cache(cache, dy, cache.norm.kind)
    dy = of_shape(arrays, "dy", dy, x.shape, "the y of this cache")
    dsum, _, _ = _checked_extra(arrays, cache, (dsum, None, None))
    dx = arrays.empty(x.shape, x.dtype, x) if with_dx else None
    first, second = sums
    call = Backward(
        dy, x, cache.norm, cache.statistics, dx, first, second, dsum, sums=how, threads=threads
    )
    run_passes(call, cache, None, False)
    return Gradients(dx, sums[0], sums[1])


# ---- checks ----


def _checked_extra(arrays: Arrays, cache: Cache, given: tuple[Any, ...]) -> list[Any]:
    """Return dsum, dmean and drstd, which are added to dx; the latter two as one float64 for each row."""
    x, norm, axes, _, backend = cache[:5]
    of_rows = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    found: list[Array | None] = []
    for name, value in zip(("dsum", "dmean", "drstd"), given, strict=True):
        if value is None:
            found.append(None)
            continue
        refuse_cuda(name, backend)
        if name == "dsum":
            found.append(of_shape(arrays, name, value, x.shape))
            continue
        if norm.rounding == "nearest":
            refuse(name, NEAREST)
        array = of_shape(arrays, name, value, of_rows, "cache.rstd")
        found.append(array.astype(float).reshape(-1))
    return found


def _checked_gradients(
    arrays: Arrays, likes: Sequence[Array | None], out: tuple[Any, ...], inputs: dict[str, Any]
) -> Gradients:
    """Return the arrays to write into: those of `out`, checked, or new ones; None for gradients that wrt leaves out."""
    found: list[Array | None] = []
    for name, like, array in zip(NAMES, likes, out, strict=True):
        if like is None or array is None:
            x = inputs["x"]
            found.append(None if like is None else arrays.empty(like.shape, like.dtype, x))
            continue
        called = f"out.d{name}"
        checked = arrays.target(called, array, like.shape, like.dtype)
        refuse_overlap(arrays, called, checked, inputs, but="dy" if name == "x" else None)
        # A new array shares memory with no argument.
        inputs[called] = checked
        found.append(checked)
    return Gradients._make(found)
