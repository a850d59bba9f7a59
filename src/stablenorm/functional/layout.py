"""
Arrays of any axes and strides as plain rows: views where that is possible, else whole copies.

The *lead* of gamma, beta or a sum over rows is the shape of x without the normalized axes, with 1 for each axis along which it
is the same: (B, 1) for x of (B, T, D) and a gamma for each of B samples.
"""

import functools
import math
from typing import Any, NamedTuple

from stablenorm.types import Array, Shape

Lead = Shape


class Layout(NamedTuple):
    """The map from arrays of the shape of x to plain rows, (rows, n)."""

    # The module for arrays of this kind: `stablenorm.arrays`, or that of CuPy's.
    arrays: Any
    # The axes of x: those that count rows, in their order, then the normalized ones; and their lengths.
    order: Shape
    lengths: Shape
    # The lengths of the axes that count rows.
    leading: Shape
    shape: tuple[int, int]

    def read(self, array: Array) -> Array:
        """Return the rows of an array: a view, or a copy."""
        rows: Array | None = self.arrays.see_rows(array, self.order, self.shape)
        if rows is None:
            rows = self._new(array)
            rows.reshape(self.lengths)[...] = array.transpose(self.order)
        return rows

    def room(self, array: Array, over: Array | None = None) -> Array:
        """Return rows for the results of an array: a view, or new ones, always if the view lies over other rows."""
        rows = self.arrays.see_rows(array, self.order, self.shape)
        if rows is not None and over is not None and not self.arrays.IN_PLACE:
            rows = None if self.arrays.share(rows, over) else rows
        return self._new(array) if rows is None else rows

    def put(self, rows: Array, array: Array) -> None:
        """Copy the rows of `room` to the array that they are for, unless they are a view of it."""
        if not self.arrays.share(rows, array):
            array.transpose(self.order)[...] = rows.reshape(self.lengths)

    def mask(self, where: Array | None) -> Any:
        """Return the rows of a mask in x's dimensions: (rows, n), or (rows, 1) of whole rows."""
        if where is None or not where.size:
            return None
        return where.transpose(self.order).reshape(self.shape[0], -1)

    def lead_of(self, parameter: Array | None) -> Lead:
        """Return the lead of gamma or beta, or of a sum of its shape."""
        leading = len(self.leading)
        own: Lead = ()
        if parameter is not None:
            own = parameter.shape[: parameter.ndim + leading - len(self.order)]
        return (1,) * (leading - len(own)) + own

    def _new(self, array: Array) -> Array:
        try:
            return self.arrays.empty(self.shape, array)  # type: ignore[no-any-return]
        except MemoryError:
            msg = (
                f"a copy of {array.nbytes} bytes must fit in memory, to normalize rows of strides "
                f"{array.strides}; normalize parts, or the last axis of an array in C order"
            )
            raise MemoryError(msg) from None


@functools.lru_cache(256)
def layout_of(arrays: Any, shape: Shape, axes: Shape) -> Layout:
    """Return the layout of an x whose `axes` are normalized."""
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    leading, last = (tuple(shape[axis] for axis in part) for part in (others, axes))
    rows = math.prod(leading), math.prod(last)
    return Layout(arrays, others + axes, leading + last, leading, rows)
