"""What `axis` means: any array seen as independent rows; every shape error is raised here."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from stablenorm._types import Array


def normalize_axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return `axis` as a sorted tuple of distinct axes in ``range(ndim)``."""
    if type(axis) is int and axis == -1 and ndim:
        # What nearly everybody asks for, at a twentieth of the time of what follows.
        return (ndim - 1,)
    given = axis if isinstance(axis, tuple) else (axis,)
    try:
        axes = sorted(normalize_axis_index(operator.index(one), ndim) for one in given)
    except TypeError:
        msg = f"axis must be an int or a tuple of ints, got {axis!r}"
        raise TypeError(msg) from None
    except np.exceptions.AxisError:
        msg = f"axis must name axes of x, which has {ndim} dimensions, got {axis}"
        raise ValueError(msg) from None
    if not axes or len(set(axes)) < len(axes):
        msg = f"axis must name at least one axis, each once, got {axis}"
        raise ValueError(msg)
    return tuple(axes)


def normalized_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of `axes`, or raise ValueError where there is nothing to normalize."""
    lengths = (shape[axes[0]],) if len(axes) == 1 else tuple(shape[axis] for axis in axes)
    if 0 in lengths:
        msg = f"x must have at least one element along axis {show_axes(axes)}, got shape {shape}"
        raise ValueError(msg)
    return lengths


def show_axes(axes: tuple[int, ...]) -> str:
    """Spell axes as their user would: an int where there is one."""
    return str(axes[0]) if len(axes) == 1 else str(axes)


# Whether two views overlap is exponential to decide in the worst case; this many candidate
# solutions settle every slice. (NumPy's stubs know only its two special values.)
_OVERLAP_WORK: Any = 10_000


class Rows:
    """
    An array seen as (rows, n): slices of rows are read and written as C-ordered blocks.

    Only for layouts that have no such view: one row block is gathered at a time, so the extra
    memory is one block, where a reshape would copy the whole array.
    """

    def __init__(self, moved: Array, leading: int) -> None:
        self._moved = moved
        self._lead = moved.shape[:leading]
        self.dtype = moved.dtype
        self.shape = (math.prod(self._lead), math.prod(moved.shape[leading:]))

    def _index(self, rows: slice) -> tuple[Array, ...]:
        return np.unravel_index(np.arange(*rows.indices(self.shape[0])), self._lead)

    def __getitem__(self, rows: slice) -> Array:
        return self._moved[self._index(rows)].reshape(-1, self.shape[1])

    def __setitem__(self, rows: slice, block: Array) -> None:
        index = self._index(rows)
        self._moved[index] = block.reshape(len(block), *self._moved.shape[len(self._lead) :])


def as_rows(array: Array, axes: tuple[int, ...]) -> Array | Rows:
    """See `array` as (rows, n), n the elements along `axes`, without copying it."""
    if len(axes) == 1 and axes[0] == array.ndim - 1 and array.flags.c_contiguous:
        return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])
    leading = array.ndim - len(axes)
    moved = np.moveaxis(array, axes, range(leading, array.ndim))
    if not leading:
        # One row: without an axis to count it, `Rows` would have nothing to index.
        moved, leading = moved[np.newaxis], 1
    shape = math.prod(moved.shape[:leading]), math.prod(moved.shape[leading:])
    view = moved.view()
    try:
        # Unlike reshape, this never copies. (np.reshape(copy=False) needs NumPy 2.1.)
        _set_shape(view, shape)
    except AttributeError:
        return Rows(moved, leading)
    return view


def _set_shape(view: Array, shape: tuple[int, ...]) -> None:
    view.shape = shape


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
    if a is b or not np.may_share_memory(a, b):
        return a is b

    def place(v: Array) -> tuple[Any, ...]:
        return v.__array_interface__["data"][0], v.shape, v.strides, v.dtype

    return place(a) == place(b)
