"""
How an array of any layout is seen, read and written as plain rows.

A *lead* has one length for each axis of x that is not normalized: x's own if a parameter, or a sum, varies along the axis,
else 1. Axes whose length in the lead is not 1 cut x into samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm import memory
from stablenorm.types import Array

Lead = tuple[int, ...]


class Layout(NamedTuple):
    """How arrays of the shape of x are seen as rows: their axes in the order of samples, rows and elements."""

    order: tuple[int, ...]
    # The lengths of x along the axes in this order.
    lengths: tuple[int, ...]
    # How many of the axes count samples, and how many count samples or their rows.
    cut: int
    leading: int
    # Parts of x with a gamma, a beta or sums of their own.
    samples: int
    # (rows, n), the rows those of all samples.
    shape: tuple[int, int]
    # The shape of gamma, of beta and of sums over rows: (n,) or, with several samples, (samples, n).
    of_samples: tuple[int, ...]

    def view(self, array: Array) -> Array | None:
        """Return an array of the shape of x as (rows, n) without a copy; None if its rows are not plain."""
        if array.flags.c_contiguous and self.order == tuple(range(array.ndim)):
            return array.reshape(self.shape)
        moved = array.transpose(self.order)
        leading, last = moved.shape[: self.leading], moved.shape[self.leading :]
        if _step_of(leading, moved.strides) is None:
            return None
        if _step_of(last, moved.strides[self.leading :]) not in (0, array.itemsize):
            return None
        # Such axes merge without a copy.
        return moved.reshape(self.shape)

    def read(self, array: Array, rows: range | Array) -> Array:
        """Return a copy of some rows, (rows, n)."""
        moved, leading = self._moved(array)
        if not isinstance(rows, range):
            view = self.view(array)
            if view is not None:
                return np.take(view, rows, axis=0)
            return moved[np.unravel_index(rows, leading)].reshape(len(rows), self.shape[1])
        found = memory.empty((len(rows), self.shape[1]), array.dtype)
        for box, some in _boxes(leading, rows.start, rows.stop):
            found[some].reshape(moved[box].shape)[...] = moved[box]
        return found

    def write(self, array: Array, rows: range | Array, found: Array) -> None:
        """Write (rows, n) to where they belong."""
        moved, leading = self._moved(array)
        if isinstance(rows, range):
            for box, some in _boxes(leading, rows.start, rows.stop):
                moved[box] = found[some].reshape(moved[box].shape)
        else:
            index = np.unravel_index(rows, leading)
            moved[index] = found.reshape(len(rows), *moved.shape[len(leading) :])

    def _moved(self, array: Array) -> tuple[Array, tuple[int, ...]]:
        """Return a view with the axes in their order, and the lengths of the axes that count rows, at least one."""
        moved = array.transpose(self.order)
        return (moved, self.lengths[: self.leading]) if self.leading else (moved[np.newaxis], (1,))

    def numbers(self) -> Array | None:
        """Return which row of x, in C order, each row of this layout is; None if it is the same."""
        others = sorted(self.order[: self.leading])
        places = [others.index(axis) for axis in self.order[: self.leading]]
        if places == sorted(places):
            return None
        lengths = [self.lengths[self.order.index(axis)] for axis in others]
        return np.arange(self.shape[0]).reshape(lengths).transpose(places).reshape(-1)

    def parameter(self, array: Array | None) -> Any:
        """Return gamma or beta as (n,); with samples as (samples, n), the same elements where it does not vary."""
        if array is None or (array.ndim == 1 == self.samples and array.flags.c_contiguous):
            return array
        normalized = self.lengths[self.leading :]
        lead = (1,) * (len(self.order) - array.ndim) + array.shape
        others = sorted(self.order[: self.leading])
        own = [lead[others.index(axis)] for axis in self.order[: self.cut]]
        cut = np.ascontiguousarray(array).reshape(*own, *normalized)
        whole = np.broadcast_to(cut, self.lengths[: self.cut] + normalized)
        return whole.reshape(self.of_samples)


@functools.lru_cache(256)
def layout_of(shape: tuple[int, ...], axes: tuple[int, ...], *leads: Lead) -> Layout:
    """Return the layout of an x whose `axes` are normalized, cut where one of `leads` is not 1."""
    others = [axis for axis in range(len(shape)) if axis not in axes]
    lead = np.broadcast_shapes(*leads) if leads else (1,) * len(others)
    cut = [axis for axis, length in zip(others, lead, strict=True) if length != 1]
    order = *cut, *(axis for axis in others if axis not in cut), *axes
    lengths = tuple(shape[axis] for axis in order)
    rows, n = math.prod(lengths[: len(others)]), math.prod(lengths[len(others) :])
    samples = math.prod(lengths[: len(cut)])
    of_samples = (samples, n) if samples > 1 else (n,)
    return Layout(order, lengths, len(cut), len(others), samples, (rows, n), of_samples)


def lead_of(parameter: Array | None, ndim: int, axes: tuple[int, ...]) -> Lead:
    """Return the lead of gamma or beta."""
    if parameter is None:
        return (1,) * (ndim - len(axes))
    return (1,) * (ndim - parameter.ndim) + parameter.shape[: parameter.ndim - len(axes)]


def _step_of(lengths: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the stride of neighbouring axes merged into one, 0 for one element; None if they do not merge."""
    step, reach = 0, None
    for length, stride in zip(reversed(lengths), reversed(strides[: len(lengths)]), strict=True):
        if length == 1:
            continue
        if reach is None:
            step = stride
        elif stride != reach:
            return None
        reach = stride * length
    return step


def _boxes(lengths: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Any, slice]]:
    """Yield the boxes of leading axes that hold rows `start` to `stop`, in C order, each with its rows' places."""
    inner, place = math.prod(lengths[1:]), 0
    while start < stop:
        i, first = divmod(start, inner)
        if first == 0 and stop - start >= inner:
            count = stop // inner * inner - start
            yield (slice(i, i + count // inner),), slice(place, place + count)
        else:
            count = min(stop - start, inner - first)
            for box, some in _boxes(lengths[1:], first, first + count):
                yield (i, *box), slice(place + some.start, place + some.stop)
        start, place = start + count, place + count
