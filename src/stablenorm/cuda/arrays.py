"""Arrays on a CUDA device as the public functions see them, and as kernels do: rows of unit stride."""

import contextlib
import types
from typing import Any

import numpy as np

from stablenorm import arrays as host
from stablenorm.arrays import check_distinct, check_target, mixed, on_cuda_device
from stablenorm.cuda.driver import held, import_cupy
from stablenorm.formats import check_dtype
from stablenorm.records import Array


def rows(array: Any, layout: Any, read: bool = True, _: Any = None) -> Any:
    """
    Return an array as rows a whole number of elements apart, a view if its strides allow it.

    Else they are a copy or, unless `read`, new rows for results. A kernel may write over its input.
    """
    moved = array.transpose(layout.order)
    view = moved.view()
    with contextlib.suppress(AttributeError):
        # Unlike reshape, this never copies.
        view.shape = layout.shape
        between, within = view.strides
        if (layout.shape[1] == 1 or within == view.itemsize) and between % view.itemsize == 0:
            return view
    cupy = import_cupy()
    with array.device:
        made = held(cupy, cupy.empty(layout.shape, array.dtype))
    if read:
        made.reshape(layout.lengths)[...] = moved
    return made


def contiguous(array: Any) -> Any:
    """Return an array in C order."""
    if array.flags.c_contiguous:
        return array
    cupy = import_cupy()
    return held(cupy, cupy.ascontiguousarray(array))


def empty_like(like: Any) -> Any:
    """Return a new array, in C order, of the shape and dtype of another, and on its device."""
    with like.device:
        return import_cupy().empty(like.shape, like.dtype)


def overlap(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` share memory; where that is too hard to decide, whether they may."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        # Nearly all are, and their addresses tell it, at a tenth of the time.
        first, second = a.data.ptr, b.data.ptr
        return bool(first < second + b.nbytes and second < first + a.nbytes)
    return host.overlap(_ghost(a), _ghost(b))


def _ghost(array: Any) -> Array:
    """Return an array of NumPy's with the address, shape and strides of one on the device, never to be read."""
    claim = array.__cuda_array_interface__
    return np.asarray(types.SimpleNamespace(__array_interface__=claim))


def same_elements(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` are the same view of the same memory."""
    return host.same_elements(_ghost(a), _ghost(b))


def convert(name: str, value: Any) -> Any:
    """Return `value`, which is on a device, as an array of CuPy's, its dtype checked."""
    value = _imported(name, value)
    check_dtype(name, value)
    return value


def target(name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return `array` as one of CuPy's to write a result of this shape and dtype into."""
    array = _imported(name, array)
    check_target(name, array, shape, dtype)
    check_distinct(name, array)
    return array


def _imported(name: str, value: Any) -> Any:
    """Return an array of CuPy's in the memory of `value`."""
    cupy = import_cupy()
    if isinstance(value, cupy.ndarray):
        return value
    if not on_cuda_device(value):
        raise TypeError(mixed(name, value, "on a CUDA device"))
    read = cupy.from_dlpack if hasattr(value, "__dlpack__") else cupy.asarray
    try:
        return read(value)
    except (BufferError, RuntimeError, ValueError) as error:
        # A tensor that wants its gradient recorded, one that is conjugated, another kind of memory.
        msg = f"{name} must be readable as an array of CuPy's, got {type(value).__name__}: {error}"
        raise TypeError(msg) from error
