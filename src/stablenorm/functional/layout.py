"""
The map from arrays of the shape of x to plain rows; `arrays.rows` and its like for CuPy's see an array as such rows, or copy it.

The *lead* of gamma, beta or a sum over rows is the shape of x without the normalized axes, with 1 for each axis along which it
is the same: (B, 1) for x of (B, T, D) and a gamma for each of B samples.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from stablenorm.types import Array, Shape

Lead = Shape


class Layout(NamedTuple):
    """The order of the axes of x, those that count rows first; their lengths; and the shape of the rows."""

    order: Shape
    lengths: Shape
    # The lengths of the axes that count rows.
    leading: Shape
    shape: tuple[int, int]

    def put_back(self, rows: Any, array: Any) -> None:
        """Write new rows, which own their memory, to the array that they stand for."""
        if rows is not None and rows.flags.owndata:
            array.transpose(self.order)[...] = rows.reshape(self.lengths)

    def mask(self, where: Array | None) -> Any:
        """Return the rows of a mask in x's dimensions: (rows, n), or (rows, 1) of whole rows."""
        if where is None or not where.size:
            return None
        return where.transpose(self.order).reshape(self.shape[0], -1)

    def lead_of(self, parameter: Array | None) -> Lead:
        """Return the lead of gamma or beta."""
        own = () if parameter is None else parameter.shape[: len(self.leading) - len(self.order)]
        return (1,) * (len(self.leading) - len(own)) + own

    def samples(self, lead: Lead) -> Array:
        """Return for each row the number of its gamma, beta or sum in their lead."""
        numbers = np.arange(math.prod(lead)).reshape(lead)
        return (numbers + np.zeros(self.leading, int)).reshape(-1)

    def of_samples(self, parameter: Array | None, lead: Lead) -> Any:
        """Return gamma or beta as (samples, n); None if there are none."""
        n = self.shape[1]
        if parameter is None or not math.prod(lead):
            return None
        if math.prod(lead) > 1:
            parameter = np.broadcast_to(parameter, lead + self.lengths[len(lead) :])
        return parameter.reshape(-1, n)


@functools.lru_cache(256)
def layout_of(shape: Shape, axes: Shape) -> Layout:
    """Return the layout of an x whose `axes` are normalized."""
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    leading, last = (tuple(shape[axis] for axis in part) for part in (others, axes))
    rows = math.prod(leading), math.prod(last)
    return Layout(others + axes, leading + last, leading, rows)
