"""
Arrays on a CUDA device as the public functions and the launch see them.

Every question about memory layout (does this array have a view as rows, do two overlap) is put to
NumPy: an array of NumPy's with the same address and strides, whose elements are never touched.
"""

import contextlib
import math
import types
from typing import Any, NamedTuple

import numpy as np

from stablenorm import arrays as host
from stablenorm.arrays import check_distinct, check_target, mixed, on_cuda_device
from stablenorm.cuda.driver import held, import_cupy
from stablenorm.formats import check_dtype
from stablenorm.types import Array


class Folded(NamedTuple):
    """An array, and the axes that make up its rows; without axes all of it is one row."""

    array: Any
    axes: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, n)."""
        array, axes = self
        lengths = array.shape
        n = lengths[axes[0]] if len(axes) == 1 else math.prod(lengths[axis] for axis in axes)
        return array.size // n, n


class Matrix(NamedTuple):
    """Rows of contiguous elements on the device, `stride` elements apart."""

    pointer: int
    stride: int
    # If the rows are a copy: the copy, (rows, n), and the array as it is, the axes of its rows last.
    copy: Any = None
    original: Any = None

    def put_back(self) -> None:
        """Write rows that are a copy to where they belong."""
        if self.copy is not None:
            self.original[...] = self.copy.reshape(self.original.shape)


NOWHERE = Matrix(0, 0)


def matrix(cupy: Any, folded: Folded | None, shape: tuple[int, int], read: bool) -> Matrix:
    """
    Return the rows of an array, (rows, n).

    If they have gaps, they are those of a copy, whose elements are set if the array is to be `read`.
    """
    if folded is None:
        return NOWHERE
    array, axes = folded
    last = array.ndim - len(axes)
    if array.flags.c_contiguous and axes[0] == last:
        return Matrix(array.data.ptr, shape[1])
    places = tuple(range(last, array.ndim))
    seen, itemsize = np.moveaxis(_ghost(array), axes, places), array.dtype.itemsize
    # Unlike reshape, this never copies. (np.reshape(copy=False) needs NumPy 2.1.)
    with contextlib.suppress(AttributeError):
        seen.shape = shape
        between, within = seen.strides
        if (shape[1] == 1 or within == itemsize) and between % itemsize == 0:
            return Matrix(array.data.ptr, between // itemsize)
    moved = cupy.moveaxis(array, axes, places) if axes else array
    rows = cupy.ascontiguousarray(moved).reshape(shape) if read else cupy.empty(shape, array.dtype)
    return Matrix(rows.data.ptr, shape[1], held(cupy, rows), moved)


def _ghost(array: Any) -> Array:
    """Return an array of NumPy's with the address, shape and strides of one on the device."""
    claim = {
        "version": 3,
        # No device array begins at 0 but an empty one, for which any other address will do.
        "data": (array.data.ptr or array.dtype.itemsize, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=claim))


def overlap(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` share memory; where that is too hard to decide, whether they may."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        # Nearly all are, and their addresses tell it, at a tenth of the time.
        first, second = a.data.ptr, b.data.ptr
        return bool(first < second + b.nbytes and second < first + a.nbytes)
    return host.overlap(_ghost(a), _ghost(b))


def same_elements(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` are the same view of the same memory."""
    return a is b or (a.dtype == b.dtype and host.same_elements(_ghost(a), _ghost(b)))


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
