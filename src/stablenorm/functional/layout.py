"""
Views and copies of arrays of any layout as plain rows.

A *lead* has one length for each axis of x that is not normalized: x's own if a parameter, or a sum, varies along the axis,
else 1. Axes whose length in the lead is not 1 cut x into samples.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm import memory
from stablenorm.types import Array, Shape

Lead = Shape

# Addresses a multiple of PAGE apart share a set of the first-level cache, of 8 lines. Strips of 16 elements take
# half to two thirds of the time of such copies, as of (8, 64, 32, 32) over axis 1; below CROWDED they save nothing.
PAGE, CROWDED, STRIP = 4096, 1 << 18, 16


class Layout(NamedTuple):
    """The map from arrays of the shape of x to rows, and from gamma and beta to those of the rows."""

    # The axes of x: those that count samples, those that count their rows, the normalized ones.
    order: Shape
    # The lengths of x along the axes that count rows, at least one, and along the normalized ones.
    leading: Shape
    last: Shape
    # The lead of all parameters and sums together, and its number of samples.
    lead: Lead
    samples: int
    # (rows, n), with the rows of all samples.
    shape: tuple[int, int]
    # The shape of gamma, beta and their gradients: (n,) or, with several samples, (samples, n).
    of_samples: Shape

    def moved(self, array: Array) -> Array:
        """Return an array of the shape of x as (rows, n) if its rows are plain; else with axes in this order."""
        # A memmap becomes a plain view.
        moved = np.asarray(array).transpose(self.order)
        if len(self.last) == moved.ndim:
            # NumPy has no more than 64 axes; of so many, one has length 1.
            moved = (moved if moved.ndim < 64 else moved.squeeze(moved.shape.index(1)))[np.newaxis]
        # A mask stays as it is: it may have length 1 along the normalized axes.
        if moved.dtype == np.bool_:
            return moved
        try:
            rows = moved.reshape(self.shape, copy=False)
        except ValueError:
            return moved
        return rows if is_plain(rows) else moved

    def read(self, moved: Array, rows: range | Array) -> Array:
        """Return a copy of some rows, (rows, n)."""
        leading = self.leading if moved.ndim > 2 else moved.shape[:1]
        if is_plain(moved) and not isinstance(rows, range):
            return np.take(moved, rows, axis=0)
        if not isinstance(rows, range):
            return moved[np.unravel_index(rows, leading)].reshape(len(rows), self.shape[1])
        copy = memory.empty((len(rows), self.shape[1]), moved.dtype)
        for box, places in _boxes(leading, rows.start, rows.stop):
            _copy(moved[box], copy[places].reshape(moved[box].shape))
        return copy

    def write(self, moved: Array, rows: range | Array, values: Array) -> None:
        """Write values of shape (rows, n) to their places."""
        leading = self.leading if moved.ndim > 2 else moved.shape[:1]
        if isinstance(rows, range):
            for box, places in _boxes(leading, rows.start, rows.stop):
                _copy(values[places].reshape(moved[box].shape), moved[box])
        else:
            index = np.unravel_index(rows, leading)
            moved[index] = values.reshape(len(rows), *moved.shape[len(leading) :])

    def numbers(self, shape: Shape) -> Array | None:
        """Return, for the rows of the layout, their row numbers in an x of this shape, in C order; None if equal."""
        axes = self.order[: len(self.order) - len(self.last)]
        if list(axes) == sorted(axes):
            return None
        lengths = [length if i in axes else 1 for i, length in enumerate(shape)]
        return np.arange(self.shape[0]).reshape(lengths).transpose(self.order).reshape(-1)

    def parameter(self, array: Array | None) -> Any:
        """Return gamma or beta as (n,); with samples as (samples, n), the same elements where it does not vary."""
        if array is None or (array.ndim == 1 == self.samples and array.flags.c_contiguous):
            return array
        whole = np.ascontiguousarray(array)
        if whole.size < self.samples * self.shape[1]:
            whole = np.broadcast_to(whole, self.lead + self.last)
        return whole.reshape(self.of_samples)


@functools.lru_cache(256)
def layout_of(shape: Shape, axes: Shape, *leads: Lead) -> Layout:
    """Return the layout of an x whose `axes` are normalized, cut where one of `leads` is not 1."""
    others = [axis for axis in range(len(shape)) if axis not in axes]
    # numpy.broadcast_shapes takes no more than 32 axes.
    lead = tuple(max(lengths) for lengths in zip((1,) * len(others), *leads, strict=True))
    cut = [axis for axis, length in zip(others, lead, strict=True) if length != 1]
    rest = [axis for axis in others if axis not in cut]
    leading, last = (tuple(shape[axis] for axis in part) for part in ((*cut, *rest), axes))
    rows, n = math.prod(leading), math.prod(last)
    samples = math.prod(leading[: len(cut)])
    of_samples = (samples, n) if samples > 1 else (n,)
    order = *cut, *rest, *axes
    return Layout(order, leading or (1,), last, lead, samples, (rows, n), of_samples)


def lead_of(parameter: Array | None, ndim: int, axes: Shape) -> Lead:
    """Return the lead of gamma or beta."""
    if parameter is None:
        return (1,) * (ndim - len(axes))
    return (1,) * (ndim - parameter.ndim) + parameter.shape[: parameter.ndim - len(axes)]


def is_plain(moved: Array) -> bool:
    """Tell whether an array is (rows, n) with unit stride within a row."""
    return moved.ndim == 2 and (moved.shape[1] == 1 or moved.strides[1] == moved.itemsize)


def _copy(source: Array, to: Array) -> None:
    """Copy an array; by strips if the cache lines that a transposing copy reads would evict one another."""
    axis = min(
        (i for i, n in enumerate(to.shape) if n > 1), key=lambda i: abs(to.strides[i]), default=0
    )
    crowding = to.shape[axis] * math.gcd(source.strides[axis], PAGE)
    step = STRIP if crowding >= CROWDED else max(to.shape[axis], 1)
    for j in range(0, to.shape[axis], step):
        strip = (slice(None),) * axis + (slice(j, j + step),)
        to[strip] = source[strip]


def _boxes(lengths: Shape, start: int, stop: int) -> Iterator[tuple[Any, slice]]:
    """Yield indices of the leading axes for rows `start` to `stop`, in C order, and slices of a copy of these rows."""
    inner, place = math.prod(lengths[1:]), 0
    while start < stop:
        i, first = divmod(start, inner)
        if first == 0 and stop - start >= inner:
            count = stop // inner * inner - start
            yield (slice(i, i + count // inner),), slice(place, place + count)
        else:
            count = min(stop - start, inner - first)
            for box, places in _boxes(lengths[1:], first, first + count):
                yield (i, *box), slice(place + places.start, place + places.stop)
        start, place = start + count, place + count
