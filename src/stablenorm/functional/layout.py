"""The map from arrays of the shape of x to plain rows; `arrays.rows` and its like for CuPy's see an array as such rows, or copy it."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from stablenorm.records import Array, Shape


class Layout(NamedTuple):
    """The order of the axes of x, those that count rows first; their lengths; and the shape of the rows."""

    order: Shape
    lengths: Shape
    # The lengths of the axes that count rows.
    leading: Shape
    shape: tuple[int, int]

    def put_back(self, rows: Any, array: Any) -> None:
        """Write new rows, which own their memory, to the array that they stand for."""
        if rows.flags.owndata:
            array.transpose(self.order)[...] = rows.reshape(self.lengths)

    def mask(self, where: Array | None) -> Any:
        """Return the rows of a mask in x's dimensions: (rows, n), or (rows, 1) of whole rows."""
        if where is None or not where.size:
            return None
        return where.transpose(self.order).reshape(self.shape[0], -1)

    def numbers(self, parameter: Array | None) -> Array:
        """Return for each row the number of its gamma, beta or sum."""
        own = () if parameter is None else parameter.shape[: len(self.leading) - len(self.order)]
        numbers = np.arange(math.prod(own)).reshape(own) + np.zeros(self.leading, int)
        return numbers.reshape(-1)


@functools.lru_cache(256)
def layout_of(shape: Shape, axes: Shape) -> Layout:
    """Return the layout of an x whose `axes` are normalized."""
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    leading, last = (tuple(shape[axis] for axis in part) for part in (others, axes))
    rows = math.prod(leading), math.prod(last)
    return Layout(others + axes, leading + last, leading, rows)
