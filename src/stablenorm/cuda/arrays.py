"""
Arrays on a CUDA device as the public functions and the launch see them.

Every question about memory layout (does this array have a view as rows, do two overlap) is put to
NumPy: an array of NumPy's with the same address and strides, whose elements are never touched.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stablenorm import arrays as host
from stablenorm.arrays import check_distinct, check_target, mixed, on_cuda_device
from stablenorm.cuda.errors import misaligned
from stablenorm.formats import check_dtype
from stablenorm.types import Array

ON_DEVICE = "on a CUDA device"


class Folded(NamedTuple):
    """An array, and the axes that make up its rows: what `read` and `write` turn into a `Matrix`."""

    array: Any
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, n)."""
        lengths = self.array.shape
        n = math.prod(lengths[axis] for axis in self.axes)
        return math.prod(lengths) // n, n

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        return self.array.dtype


class Matrix(NamedTuple):
    """
    Rows of contiguous elements on the device, `stride` elements apart, the first at `pointer`.

    `array` holds the memory. It is a copy, (rows, n), if `copied`.
    """

    array: Any
    pointer: int
    stride: int
    copied: bool


class _Ghost:
    """Lays claim to memory that NumPy is told about but must never read."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            # No device array begins at 0 but an empty one, for which any other address will do.
            "data": (array.data.ptr or array.dtype.itemsize, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


def ghost(array: Any) -> Array:
    """Return an array of NumPy's with the address, shape and strides of one on the device."""
    return np.asarray(_Ghost(array))


def overlap(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` share memory; where that is too hard to decide, whether they may."""
    return host.overlap(ghost(a), ghost(b))


def same_elements(a: Any, b: Any) -> bool:
    """Tell whether `a` and `b` are the same view of the same memory."""
    return a is b or (a.dtype == b.dtype and host.same_elements(ghost(a), ghost(b)))


def convert(cupy: Any, name: str, value: Any) -> Any:
    """Return `value`, which is on a device, as an array of CuPy's, its dtype checked."""
    if type(value) is not cupy.ndarray and not isinstance(value, cupy.ndarray):
        if not on_cuda_device(value):
            raise TypeError(mixed(name, value, ON_DEVICE))
        value = _imported(cupy, name, value)
    check_dtype(name, value)
    if value.data.ptr % value.dtype.itemsize:
        raise misaligned(name, value.data.ptr, value.dtype.itemsize)
    return value


def _imported(cupy: Any, name: str, value: Any) -> Any:
    """Return an array of CuPy's in the memory of another library's."""
    try:
        if hasattr(value, "__dlpack__"):
            return cupy.from_dlpack(value)
        # Void elements of two bytes are what bfloat16 is called there, and anything else.
        if value.__cuda_array_interface__["typestr"][1:] == "V2":
            msg = (
                f"{name} must say that its elements are bfloat16, got typestr V2; pass an array "
                "that speaks DLPack, or cupy.asarray(...).view(ml_dtypes.bfloat16)"
            )
            raise TypeError(msg)
        return cupy.asarray(value)
    except (BufferError, RuntimeError, ValueError) as error:
        # A tensor that wants its gradient recorded, one that is conjugated, another kind of memory.
        msg = f"{name} must be readable as an array of CuPy's, got {type(value).__name__}: {error}"
        raise TypeError(msg) from error


def target(cupy: Any, name: str, array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return `array` as one of CuPy's to write a result of this shape and dtype into."""
    if not on_cuda_device(array):
        raise TypeError(mixed(name, array, ON_DEVICE))
    if not isinstance(array, cupy.ndarray):
        array = _imported(cupy, name, array)
    check_target(name, array, shape, dtype)
    check_distinct(name, array)
    return array


def view(folded: Folded) -> Matrix | None:
    """Return the rows in place, or None where only a copy has contiguous rows."""
    array, axes = folded
    n, itemsize = folded.shape[1], array.dtype.itemsize
    if array.flags.c_contiguous and axes == tuple(range(array.ndim - len(axes), array.ndim)):
        return Matrix(array, array.data.ptr, n, False)
    rows = host.as_rows(ghost(array), axes)
    if not isinstance(rows, np.ndarray):
        return None
    between, within = rows.strides
    if (n > 1 and within != itemsize) or between % itemsize:
        return None
    return Matrix(array, array.data.ptr, between // itemsize, False)


def gathered(cupy: Any, folded: Folded) -> Any:
    """Return a copy with contiguous rows, (rows, n)."""
    moved = _moved(cupy, folded)
    return cupy.ascontiguousarray(moved).reshape(folded.shape)


def scatter(cupy: Any, rows: Any, folded: Folded) -> None:
    """Write (rows, n) back to where they belong."""
    moved = _moved(cupy, folded)
    moved[...] = rows.reshape(moved.shape)


def _moved(cupy: Any, folded: Folded) -> Any:
    array, axes = folded
    return cupy.moveaxis(array, axes, tuple(range(array.ndim - len(axes), array.ndim)))
