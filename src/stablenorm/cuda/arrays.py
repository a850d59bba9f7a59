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
    """An array, and the axes that make up its rows: what can be seen as a `Matrix`."""

    array: Any
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, n)."""
        array = self.array
        n = (
            array.shape[self.axes[0]]
            if len(self.axes) == 1
            else math.prod(map(array.shape.__getitem__, self.axes))
        )
        return array.size // n, n

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype

    def moved(self, cupy: Any) -> Any:
        """Return a view with the axes of the rows last."""
        ndim = self.array.ndim
        return cupy.moveaxis(self.array, self.axes, tuple(range(ndim - len(self.axes), ndim)))


class Matrix(NamedTuple):
    """Rows of contiguous elements on the device, `stride` elements apart."""

    pointer: int
    stride: int
    # (rows, n), if they are a copy.
    copy: Any = None


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
    try:
        if hasattr(value, "__dlpack__"):
            return cupy.from_dlpack(value)
        return cupy.asarray(value)
    except (BufferError, RuntimeError, ValueError) as error:
        # A tensor that wants its gradient recorded, one that is conjugated, another kind of memory.
        msg = f"{name} must be readable as an array of CuPy's, got {type(value).__name__}: {error}"
        raise TypeError(msg) from error


# ---- arguments of a launch ----


def matrix(cupy: Any, folded: Folded, read: bool) -> Matrix:
    """Return the rows of an array; if they have gaps, those of a copy, whose elements are set if it is `read`."""
    array, axes = folded
    if array.flags.c_contiguous and axes[0] == array.ndim - len(axes):
        return Matrix(array.data.ptr, folded.shape[1])
    seen, itemsize = _ghost(array), folded.dtype.itemsize
    seen = np.moveaxis(seen, axes, range(seen.ndim - len(axes), seen.ndim)).view()
    # Unlike reshape, this never copies. (np.reshape(copy=False) needs NumPy 2.1.)
    with contextlib.suppress(AttributeError):
        seen.shape = folded.shape
        between, within = seen.strides
        if (seen.shape[1] == 1 or within == itemsize) and between % itemsize == 0:
            return Matrix(array.data.ptr, between // itemsize)
    if read:
        rows = cupy.ascontiguousarray(folded.moved(cupy)).reshape(folded.shape)
    else:
        rows = cupy.empty(folded.shape, folded.dtype)
    return Matrix(rows.data.ptr, rows.shape[1], held(cupy, rows))


def put_back(cupy: Any, rows: Matrix, folded: Folded) -> None:
    """Write rows that were not the array's own to where they belong."""
    if rows.copy is not None:
        moved = folded.moved(cupy)
        moved[...] = rows.copy.reshape(moved.shape)


def flat(cupy: Any, array: Any) -> Any:
    """Return gamma or beta, contiguous."""
    if array is None or array.flags.c_contiguous:
        return array
    return held(cupy, cupy.ascontiguousarray(array))
