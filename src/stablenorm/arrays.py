"""
Conversion, checks and allocation of NumPy arrays; `stablenorm.cuda` has the same names for CuPy's.

The protocols of an array tell whether it is on a CUDA device; no CUDA library is loaded to ask.
"""

import contextlib
import math
import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from stablenorm import memory
from stablenorm.formats import NATIVE, check_dtype
from stablenorm.records import Array
from stablenorm.scalars import shown

# DLPack's kinds of memory: on a CUDA device, and moved by CUDA between host and device.
_CUDA_KINDS = frozenset((2, 13))


def on_cuda_device(value: Any) -> bool:
    """Tell whether the elements of `value` are in the memory of a CUDA device."""
    if isinstance(value, (np.ndarray, np.generic)):
        return False
    # An attribute of another library may raise any exception.
    with contextlib.suppress(Exception):
        return value.__dlpack_device__()[0] in _CUDA_KINDS
    with contextlib.suppress(Exception):
        return value.__cuda_array_interface__ is not None
    return False


def is_lazy(value: Any) -> bool:
    """Tell whether `value` is a Dask array, without loading Dask."""
    return type(value).__module__.startswith("dask.array")


def is_lazy_cache(value: Any) -> bool:
    """Tell whether `value` is the cache of a forward on a Dask array."""
    # A record of another length has no x.
    return not isinstance(value, tuple) and is_lazy(getattr(value, "x", None))


def convert(name: str, value: Any) -> Array:
    """Return an argument as an array, its dtype checked, in the byte order of this machine."""
    if type(value) is np.ndarray and value.dtype in NATIVE:
        return value
    refuse_others(name, value)
    if on_cuda_device(value):
        raise TypeError(mixed(name, value, "in host memory"))
    try:
        array = np.asarray(value)
    except ValueError as error:
        msg = f"{name} must be an array, or nested lists with rows of one length, got others"
        raise ValueError(msg) from error
    check_dtype(name, array)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def refuse_others(name: str, value: Any) -> None:
    """Raise if an argument is a masked array or a Dask array."""
    if isinstance(value, np.ma.MaskedArray):
        msg = f"{name} must be a plain array, got a masked one, whose mask would be ignored"
        raise TypeError(msg)
    if is_lazy(value):
        msg = (
            f"{name} must be in memory here, got a Dask array; pass {name}.compute(), or make x a "
            "Dask array, too, where the function takes them"
        )
        raise TypeError(msg)


def target(name: str, array: Any, shape: tuple[int, ...], _: np.dtype[Any]) -> Array:
    """Return `array`; raise unless a result of this shape can be written into it, rounded to its dtype."""
    if on_cuda_device(array):
        raise TypeError(mixed(name, array, "in host memory"))
    if not isinstance(array, np.ndarray):
        msg = f"{name} must be a NumPy array to write into, got {type(array).__name__}"
        raise TypeError(msg)
    refuse_others(name, array)
    check_dtype(name, array)
    check_target(name, array, shape, array.dtype.newbyteorder("="))
    if not array.flags.writeable:
        msg = f"{name} must be writeable, got a read-only array"
        raise ValueError(msg)
    check_distinct(name, array)
    return array


def check_target(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise unless a result of this shape and dtype can be written into `array`."""
    if array.shape != shape:
        msg = f"{name} must have shape {shape}, got {array.shape}"
        raise ValueError(msg)
    if array.dtype != dtype:
        msg = f"{name} must have dtype {dtype}, got {array.dtype}"
        raise TypeError(msg)


def check_distinct(name: str, array: Any) -> None:
    """Raise if elements may share memory: each axis of a slice steps over all that the shorter steps reach."""
    reach = array.dtype.itemsize
    both = zip(map(abs, array.strides), array.shape, strict=True)
    for step, length in sorted(pair for pair in both if pair[1] > 1 and array.size):
        if step < reach:
            msg = f"{name} must have an element of its own for each result, got strides {array.strides}"
            raise ValueError(msg)
        reach += step * (length - 1)


def mixed(name: str, value: Any, others: str) -> str:
    """Return the message that `value` is not in the memory of the other arguments."""
    kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return (
        f"{name} must be {others}, like the other arguments, got {kind}; cupy.asarray copies an "
        "array to the device, its method get back"
    )


def empty_like(like: Array) -> Array:
    """Return a new array, in C order, of the shape and dtype of another."""
    new = memory.empty if like.nbytes >= memory.LARGE else np.empty
    return new(like.shape, like.dtype)


# ---- rows ----

contiguous = np.ascontiguousarray


def rows(array: Array, layout: Any, read: bool = True, over: Array | None = None) -> Array:
    """
    Return an array as plain rows by a layout, if its strides allow a view; `over` tells what a view may not lie over.

    Else they are a copy; or, unless `read`, new rows for results. These own their memory.
    """
    # A memmap becomes a plain view.
    moved = np.asarray(array).transpose(layout.order)
    try:
        view = moved.reshape(layout.shape, copy=False)
        is_apart = over is None or not np.may_share_memory(view, over)
        if is_apart and (view.shape[1] == 1 or view.strides[1] == view.itemsize):
            return view
    except ValueError:
        pass
    new = memory.empty if array.nbytes >= memory.LARGE else np.empty
    try:
        made = new(layout.shape, array.dtype)
    except MemoryError:
        msg = (
            f"a copy of {array.nbytes} bytes must fit in memory, to normalize an array of strides "
            f"{array.strides}; normalize parts of it, or the last axis of an array in C order"
        )
        raise MemoryError(msg) from None
    if read:
        made.reshape(layout.lengths)[...] = moved
    return made


# ---- axes ----


def normalize_axes(
    axis: int | tuple[int, ...] | None, ndim: int, name: str = "axis"
) -> tuple[int, ...]:
    """Return the argument `name`, all axes if None, as a sorted tuple of distinct axes in ``range(ndim)``."""
    if type(axis) is int and -ndim <= axis < ndim:
        # One axis takes a twentieth of the time of the code below.
        return (axis % ndim,)
    chosen = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    try:
        axes = sorted(normalize_axis_index(operator.index(one), ndim) for one in chosen)
    except TypeError:
        cure = "; pass a tuple" * isinstance(axis, (list, np.ndarray))
        msg = f"{name} must be an int or a tuple of ints, got {axis!r:.60}{cure}"
        raise TypeError(msg) from None
    except (np.exceptions.AxisError, OverflowError):
        msg = f"{name} must name axes of x, which has {ndim} dimensions, got {shown_axis(axis)}"
        raise ValueError(msg) from None
    if not axes or len(set(axes)) < len(axes):
        msg = f"{name} must name at least one axis, each once, got {axis}"
        raise ValueError(msg)
    return tuple(axes)


def shown_axis(axis: Any) -> str:
    """Write an axis, or axes, of any size."""
    return f"({', '.join(map(shown_axis, axis))})" if isinstance(axis, tuple) else shown(axis)


def normalized_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of `axes`, or raise ValueError where there is nothing to normalize."""
    lengths = (shape[axes[0]],) if len(axes) == 1 else tuple([shape[axis] for axis in axes])
    if 0 in lengths:
        msg = f"x must have at least one element along axis {show_axes(axes)}, got shape {shape}"
        raise ValueError(msg)
    return lengths


def show_axes(axes: tuple[int, ...]) -> str:
    """Write axes as a user would: one axis as an int."""
    return str(axes[0]) if len(axes) == 1 else str(axes)


# Whether two views overlap is exponential to decide in the worst case; this many candidate
# solutions settle every slice. (NumPy's stubs know only its two special values.)
_OVERLAP_WORK: Any = 10_000


def as_rows(array: Array, axes: tuple[int, ...]) -> Array:
    """See `array` as (rows, n), n the elements along `axes`; a copy where its strides do not allow a view."""
    moved = np.moveaxis(array, axes, range(array.ndim - len(axes), array.ndim))
    return moved.reshape(-1, math.prod(array.shape[axis] for axis in axes))


def overlap(a: Array, b: Array) -> bool:
    """Tell whether `a` and `b` share memory; where that is too hard to decide, whether they may."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=_OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


def same_elements(a: Array, b: Array) -> bool:
    """Tell whether `a` and `b` are the same view of the same memory, element for element."""
    places = ((v.__array_interface__["data"][0], v.shape, v.strides, v.dtype) for v in (a, b))
    return a is b or next(places) == next(places)
