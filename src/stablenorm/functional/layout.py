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
        if rows.flags.owndata:
            array.transpose(self.order)[...] = rows.reshape(self.lengths)

    def mask(self, where: Array) -> Any:
        """Return the rows of a mask in x's dimensions: (rows, n), or (rows, 1) of whole rows."""
        return where.transpose(self.order).reshape(self.shape[0], -1) if where.size else None

    def lead_of(self, *parameters: Array | None) -> Lead:
        """Return the lead of gamma, of beta, or of both together."""
        lead = (1,) * len(self.leading)
        for parameter in parameters:
            if parameter is not None and parameter.size != self.shape[1]:
                own = parameter.shape[: len(self.leading) - len(self.order)]
                lead = (np.zeros(lead, bool) | np.zeros(own, bool)).shape
        return lead

    def numbers(self, lead: Lead, within: Lead | None = None) -> Array:
        """Return for each row, or each place of another lead, the number of its gamma, beta or sum in a lead."""
        numbers = np.arange(math.prod(lead)).reshape(lead)
        return (numbers + np.zeros(self.leading if within is None else within, int)).reshape(-1)

    def of_samples(self, parameter: Array | None, lead: Lead) -> Any:
        """Return gamma or beta as (samples, n), a row for each place of a lead; None if there is none."""
        if parameter is None or not parameter.size:
            return None
        rows = parameter.reshape(-1, self.shape[1])
        return rows[self.numbers(self.lead_of(parameter), lead)]


@functools.lru_cache(256)
def layout_of(shape: Shape, axes: Shape) -> Layout:
    """Return the layout of an x whose `axes` are normalized."""
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    leading, last = (tuple(shape[axis] for axis in part) for part in (others, axes))
    rows = math.prod(leading), math.prod(last)
    return Layout(others + axes, leading + last, leading, rows)
