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

    def numbers(self, lead: Lead) -> Array:
        """Return for each row the number of its gamma, beta or sum in their lead."""
        numbers = np.arange(math.prod(lead)).reshape(lead)
        return (numbers + np.zeros(self.leading, int)).reshape(-1)


@functools.lru_cache(256)
def layout_of(shape: Shape, axes: Shape) -> Layout:
    """Return the layout of an x whose `axes` are normalized."""
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    leading, last = (tuple(shape[axis] for axis in part) for part in (others, axes))
    rows = math.prod(leading), math.prod(last)
    return Layout(others + axes, leading + last, leading, rows)
