"""The checks of arguments, each once, and the table of features that cannot be combined."""

import math
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import numpy as np

from stablenorm.arrays import (
    is_lazy_cache,
    normalize_axes,
    normalized_shape,
    refuse_others,
    show_axes,
)  # fmt: skip
from stablenorm.backends import arrays_of
from stablenorm.records import NAMES, Array, Cache, Gradients, Norm, Shape, check_record, new_norm
from stablenorm.scalars import check_eps, real

# The faster constructor of a NamedTuple.
_new = tuple.__new__


def checked_norm(convert: Any, norm: Norm, x_shape: Shape, axes: Shape) -> Norm:
    """Return `norm` with gamma and beta as arrays and eps as a float; raise if an option is wrong."""
    shape = normalized_shape(x_shape, axes)
    # Anything may have been given.
    gamma: Any = norm.gamma
    beta: Any = norm.beta
    if isinstance(gamma, (int, float, tuple)) or isinstance(beta, float):
        refuse_misplaced(norm)
    if gamma is not None:
        gamma = convert("gamma", gamma)
        if gamma.shape != shape:
            check_parameter("gamma", gamma, shape, x_shape, axes)
    if beta is not None:
        beta = convert("beta", beta)
        if beta.shape != shape:
            check_parameter("beta", beta, shape, x_shape, axes)
    eps, offset = check_eps(norm.eps), norm.gamma_offset
    rounding: Any = norm.rounding
    if type(offset) is not float:
        offset = real("gamma_offset", offset)
    if not math.isfinite(offset):
        msg = f"gamma_offset must be finite, got {norm.gamma_offset}"
        raise ValueError(msg)
    if offset and gamma is None:
        msg = f"gamma must be given with gamma_offset={offset}, got None; leave gamma_offset away"
        raise ValueError(msg)
    if not isinstance(rounding, str) or rounding not in ("fast", "nearest"):
        msg = f'rounding must be "fast" or "nearest", got {shorten(repr(rounding), 60)}'
        raise ValueError(msg)
    return new_norm((gamma, beta, eps, norm.kind, offset, rounding))


def refuse_misplaced(norm: Norm) -> None:
    """Raise if gamma or beta is what other libraries have in its place: normalized_shape, or eps."""
    # Anything may have been given.
    values: tuple[Any, Any] = norm.gamma, norm.beta
    gamma, beta = values
    call = f"write {norm.kind}_norm(x, gamma{', beta' * (norm.kind == 'layer')}, eps=1e-5)"
    if all(isinstance(length, int) for length in (gamma if isinstance(gamma, tuple) else (gamma,))):
        msg = f"normalized_shape has no place here, got {gamma}; {call}: axis= names axes"
        raise TypeError(msg)
    for name, place, value in (("gamma", "second", gamma), ("beta", "third", beta)):
        if isinstance(value, float):
            msg = f"the {place} argument is {name}, an array, got {value}; eps is a keyword: {call}"
            raise TypeError(msg)


def check_parameter(name: str, array: Array, shape: Shape, x_shape: Shape, axes: Shape) -> None:
    """Raise unless the shape of gamma or beta is that of the normalized axes after others that fit x."""
    leading, cure = array.ndim - len(axes), ""
    if leading > 0 and array.shape[leading:] == shape:
        lengths = tuple([length for i, length in enumerate(x_shape) if i not in axes])
        if fits(array.shape[:leading], lengths):
            return
        cure = f", or that after axes that broadcast against {lengths}"
    over = f"x normalized over axis {show_axes(axes)}{cure}"
    msg = f"{name} must have shape {shape} to match {over}, got {array.shape}"
    raise ValueError(msg)


def fits(leading: Shape, lengths: Shape) -> bool:
    """Tell whether axes broadcast against axes of these lengths."""
    for one, length in zip(reversed(leading), reversed(lengths), strict=False):
        if one not in (1, length):
            return False
    return len(leading) <= len(lengths)


def of_shape(
    convert: Any, name: str, value: Any, shape: Shape, of: str = "x", dtype: Any = None
) -> Any:
    """Return an argument as an array of a shape, that of the array called `of`; of a dtype, if one is given."""
    array = convert(name, value)
    if array.shape != shape:
        cure = "; pass the gradient of that y" * (name == "dy")
        if array.size == math.prod(shape):
            cure = f"; pass {name}.reshape{shape}"
        elif fits(array.shape, shape):
            cure = f"; pass np.broadcast_to({name}, {shape})"
        msg = f"{name} must have shape {shape}, that of {of}, got {array.shape}{cure}"
        raise ValueError(msg)
    return array if dtype is None or array.dtype == dtype else widened(name, array, dtype)


def widened(name: str, array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array of a narrower floating type in another, exactly; raise if it is not narrower."""
    if array.dtype == dtype:
        return array
    if array.dtype.itemsize < dtype.itemsize:
        return array.astype(dtype)
    msg = (
        f"{name} must have dtype {dtype} or a narrower one, got {array.dtype}; "
        f"pass {name}.astype(x.dtype)"
    )
    raise TypeError(msg)


def checked_cache(cache: Any, dy: Any, kind: str, operation: str = "backward") -> Any:
    """Return `cache`, the argument of `operation`; raise unless it is one of this kind of norm, and whole."""
    forward, backward = f"{kind}_norm_forward", f"{kind}_norm_{operation}"
    if not isinstance(cache, Cache) and not is_lazy_cache(cache):
        first = "dy" if operation == "backward" else "..."
        cure = f"write y, cache = {forward}(...), then {backward}({first}, cache)"
        if isinstance(dy, Cache):
            cure = f"the two are swapped, write {backward}(dy, cache)"
        elif isinstance(cache, tuple) and any(isinstance(part, Cache) for part in cache):
            cure = f"this is all that {forward} returned, write y, cache = {forward}(...)"
        msg = f"cache must be the Cache that {forward} returns, got {type(cache).__name__}; {cure}"
        raise TypeError(msg)
    if isinstance(cache, Cache):
        check_record(cache)
        norm = checked_norm(arrays_of(cache.backend).convert, cache.norm, cache.x.shape, cache.axis)
        cache = _new(Cache, (cache.x, norm, *cache[2:]))
    if cache.norm.kind != kind:
        msg = f"cache must be of {forward}; pass this one to {cache.norm.kind}_norm_{operation}"
        raise ValueError(msg)
    return cache


def summed(sum_axes: Any, cache: Cache) -> tuple[Norm, Shape]:
    """Return the norm of a cache with a gamma and a beta for each sum over `sum_axes`, and the shape of the sums."""
    x, axes, norm = cache.x, cache.axis, cache.norm
    over = () if sum_axes == () else normalize_axes(sum_axes, x.ndim, "sum_axes")
    if set(over) & set(axes):
        msg = (
            f"sum_axes must name axes of x, but not what is normalized, axis {show_axes(axes)}; "
            f"got {sum_axes}"
        )
        raise ValueError(msg)
    order = [axis for axis in range(x.ndim) if axis not in axes] + list(axes)
    lengths = tuple([1 if axis in over else x.shape[axis] for axis in order])
    pair = []
    for name, parameter in (("gamma", norm.gamma), ("beta", norm.beta)):
        if parameter is not None and not fits(parameter.shape, lengths):
            msg = f"sum_axes must name no axis along which {name} varies, got {sum_axes}"
            raise ValueError(msg)
        pair.append(parameter if parameter is None else np.broadcast_to(parameter, lengths))
    shape = tuple([x.shape[axis] for axis in order if axis not in over])
    return norm._replace(gamma=pair[0], beta=pair[1]), shape


def check_where(where: Any, shape: Shape, axes: Shape, rounding: str) -> Array:
    """Return a copy of a mask in x's dimensions; if it does not vary along `axes`, of length 1."""
    if type(where) is not np.ndarray:
        refuse_others("where", where)
    try:
        mask = np.asarray(where)
    except ValueError:
        msg = "where must be an array of bool, got lists of unequal length; fill them up with False"
        raise ValueError(msg) from None
    check_mask(mask, shape)
    mask = mask.reshape((1,) * (len(shape) - mask.ndim) + mask.shape)
    counts: Any = np.logical_or.reduce(mask, axes, keepdims=True)
    every = np.logical_and.reduce(mask, axes, keepdims=True)
    is_whole = bool(np.logical_and.reduce(counts == every, None))
    if not is_whole and rounding == "nearest":
        check_combinations({"where that varies inside a row": True, NEAREST: True})
    lengths = list(shape)
    for axis in axes if is_whole else ():
        lengths[axis] = 1
    return (counts if is_whole else mask) | np.zeros(lengths, bool)


def check_mask(mask: Any, shape: Shape) -> None:
    """Raise unless `mask` is of bool and broadcasts to this shape."""
    if mask.dtype != np.bool_:
        msg = f"where must be an array of bool, got {mask.dtype}; of numbers, write where=mask != 0"
        raise TypeError(msg)
    if not fits(mask.shape, shape):
        cure = "; for whole rows pass where[..., None]" * (mask.shape == shape[: mask.ndim])
        msg = f"where must broadcast to the shape of x, {shape}, got {mask.shape}{cure}"
        raise ValueError(msg)


def asked_names(wrt: object) -> tuple[str, ...]:
    """Return the names in `wrt`."""
    names = tuple(wrt) if np.iterable(wrt) and not isinstance(wrt, str) else (wrt,)
    for name in names:
        if not (isinstance(name, str) and name in NAMES):
            named = str(name)[1:]
            cure = f"; write wrt={named!r}" * (named in NAMES)
            msg = f"wrt must name some of 'x', 'gamma', 'beta', got {shorten(repr(name), 60)}{cure}"
            raise ValueError(msg)
    return names


def results_in(
    arrays: Any, outs: Sequence[Any], likes: dict[str, Any], inputs: dict[str, Any], over: str
) -> list[Any]:
    """Return `outs`, checked, or new arrays like these; the first may be the input `over`."""
    results: list[Any] = []
    for (name, like), out in zip(likes.items(), outs, strict=True):
        if like is None or out is None:
            results.append(None if like is None else arrays.empty_like(like))
            continue
        target = arrays.target(name, out, like.shape, like.dtype)
        for other, there in inputs.items():
            # Compare elements last: arrays hardly ever overlap.
            if there is None or not arrays.overlap(target, there):
                continue
            if results or other != over or not arrays.same_elements(target, there):
                msg = (
                    f"{name} must not share memory with {other}, which is still needed; pass a copy"
                )
                raise ValueError(msg)
        inputs[name] = target
        results.append(target)
    return results


def checked_gradients(
    arrays: Any, out: Any, likes: dict[str, Any], inputs: dict[str, Any], accumulate: bool
) -> Gradients:
    """Return the arrays to write gradients into; None for those that wrt leaves out."""
    needs = "out must have three entries, for dx, dgamma and dbeta, got"
    if hasattr(out, "dtype") or not (out is None or np.iterable(out)):
        msg = f"{needs} {type(out).__name__}; for dx alone pass out=(dx, None, None)"
        raise TypeError(msg)
    outs = (None, None, None) if out is None else tuple(out)
    if len(outs) != len(NAMES):
        msg = f"{needs} {len(outs)}"
        raise ValueError(msg)
    for (name, like), array in zip(likes.items(), outs, strict=True):
        if accumulate and name != "out.dx" and like is not None and array is None:
            msg = f"{name} must be the array to add to with accumulate=True, got None"
            raise ValueError(msg)
    return _new(Gradients, results_in(arrays, outs, likes, inputs, over="dy"))


CUDA, DASK = "arrays on a CUDA device", "a Dask array"
NEAREST, LEADING = 'rounding="nearest"', "leading axes of gamma or beta"
_DERIVATIVES = "jvp", "double_backward"

# Features, the feature that excludes them, the reason and the cure; the documentation shows this table.
REFUSED: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("residual", "where", "dsum", "sum_axes", "accumulate", "RMS norm", "gamma_offset", NEAREST,
      LEADING, *_DERIVATIVES),
     CUDA, "its kernel has no place for it", "copy them to the host, as x.get() does"),
    (("where that varies inside a row", "accumulate"),
     NEAREST, "the sums of parts are rounded to float64 first", 'use rounding="fast"'),
    (_DERIVATIVES, NEAREST, "its error is not bounded there", 'use rounding="fast"'),
    (_DERIVATIVES, LEADING, "each part has a gamma of its own",
     "leave them out of the forward, and apply them to its y"),
    (("out",), DASK, "it has no memory", "dask.array.store(result, out) writes into arrays"),
    (("sum_axes",), DASK, "sums are over all chunks",
     "for gradients of each sample, give gamma and beta leading axes"),
    (("accumulate",), DASK, "sums are over all chunks", "add dgamma and dbeta to others yourself"),
    (_DERIVATIVES, DASK, "they are for arrays in memory", "call forward on x.compute()"),
)  # fmt: skip


def check_features(norm: Norm, axes: Shape, backend: str, **given: Any) -> None:
    """Raise if what a norm on the arrays of a backend has cannot be combined with given keywords."""
    gamma, beta = norm.gamma, norm.beta
    features = {
        CUDA: backend == "cuda",
        "RMS norm": norm.kind == "rms",
        "gamma_offset": norm.gamma_offset != 0,
        NEAREST: norm.rounding == "nearest",
        LEADING: max(getattr(gamma, "ndim", 0), getattr(beta, "ndim", 0)) > len(axes),
    }
    check_combinations(features | given)


def check_combinations(features: dict[str, Any]) -> None:
    """Raise ValueError if two of the features that are there, not None nor False, are in the table together."""
    # `is not`, since `!=` of an array is an array.
    present = set()
    for name, value in features.items():
        if value is not None and value is not False:
            present.add(name)
    for refused, other, reason, cure in REFUSED:
        for feature in refused if other in present else ():
            if feature in present:
                msg = f"{feature} cannot be combined with {other}: {reason}; {cure}"
                raise ValueError(msg)
