"""Arrays on a CUDA device as the public functions see them, and as kernels do: rows of unit stride."""

import contextlib
import types
from typing import Any

import numpy as np

from stablenorm import arrays as host
from stablenorm.arrays import check_distinct, check_target, mixed, on_cuda_device
from stablenorm.cuda.driver import held, import_cupy
from stablenorm.formats import check_dtype
from stablenorm.types import Array


def as_rows(cupy: Any, array: Any, axes: tuple[int, ...], n: int, read: bool) -> tuple[Any, int]:
    """
    See an array as rows of `n`, the elements along `axes`; all of it as one row if it has no other axes.

    Return it, and how many elements apart its rows lie. If rows have gaps, return a new array, with the elements of
    the old one if that is to be `read`.
    """
    if array.flags.c_contiguous and axes[0] >= array.ndim - len(axes):
        return array, n
    moved, itemsize = _rows_last(cupy, array, axes), array.dtype.itemsize
    with contextlib.suppress(AttributeError):
        rows = moved.view()
        # Unlike reshape, this never copies.
        rows.shape = (-1, n)
        between, within = rows.strides
        if (n == 1 or within == itemsize) and between % itemsize == 0:
            return rows, between // itemsize
    copy = cupy.ascontiguousarray(moved) if read else cupy.empty(moved.shape, array.dtype)
    return held(cupy, copy.reshape(-1, n)), n


def put_back(cupy: Any, array: Any, axes: tuple[int, ...], rows: Any) -> None:
    """Write what `as_rows` made of an array back into it, unless it is a view."""
    if rows.data.ptr != array.data.ptr:
        moved = _rows_last(cupy, array, axes)
        moved[...] = rows.reshape(moved.shape)


def _rows_last(cupy: Any, array: Any, axes: tuple[int, ...]) -> Any:
    last = array.ndim - len(axes)
    return cupy.moveaxis(array, axes, tuple(range(last, array.ndim))) if last else array


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
