"""
Gamma and beta with leading axes, and gradients summed over some axes: x seen as (samples, rows, n).

A *lead* has a length for each axis of x that is not normalized: that of x where a parameter, or a sum,
has elements of its own along it, else 1. Where a lead is not 1, x is cut into samples.
"""

import math
import operator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from stablenorm.arrays import show_axes
from stablenorm.call import Backward, Forward
from stablenorm.functional.checks import fits, lengths_of
from stablenorm.types import Array, Cache, Gradients, Norm, Statistics

Lead = tuple[int, ...]
Axes = tuple[int, ...]


def check_sum_axes(sum_axes: int | tuple[int, ...], cache: Cache) -> tuple[Lead, Lead]:
    """Return the lead of the sums, and the lengths of the axes that are kept."""
    x, norm, axes = cache[:3]
    try:
        given = sum_axes if isinstance(sum_axes, tuple) else (operator.index(sum_axes),)
        summed = normalize_axis_tuple(given, x.ndim)
    except TypeError:
        msg = f"sum_axes must be an int or a tuple of ints, got {sum_axes!r}"
        raise TypeError(msg) from None
    except ValueError:
        summed = axes
    if set(summed) & set(axes):
        msg = (
            f"sum_axes must name axes of x, which has {x.ndim} dimensions, each once, but not what "
            f"is normalized, axis {show_axes(axes)}; got {sum_axes}"
        )
        raise ValueError(msg)
    each = [(axis in summed, length) for axis, length in enumerate(x.shape) if axis not in axes]
    lead = tuple(1 if is_summed else length for is_summed, length in each)
    for name, parameter in zip(("gamma", "beta"), norm[:2], strict=True):
        if not fits(lead_of(parameter, x.ndim, axes), lead):
            msg = f"sum_axes must name no axis along which {name} varies, got {sum_axes}"
            raise ValueError(msg)
    return lead, tuple(length for is_summed, length in each if not is_summed)


def sums_like(parameter: Array | None, kept: tuple[int, ...], axes: Axes) -> Array | None:
    """Return an array, of no memory, of the shape and dtype of a gradient where axes are kept."""
    if parameter is None:
        return None
    normalized = parameter.shape[parameter.ndim - len(axes) :]
    return np.broadcast_to(np.empty((), parameter.dtype), kept + normalized)


def lead_of(parameter: Array | None, ndim: int, axes: Axes) -> Lead:
    """Return the lead of gamma or beta."""
    if parameter is None:
        return (1,) * (ndim - len(axes))
    return (1,) * (ndim - parameter.ndim) + parameter.shape[: parameter.ndim - len(axes)]


class Samples:
    """How arrays of the shape of x are seen as (samples, rows, n), cut where one of `leads` is not 1."""

    def __init__(self, shape: tuple[int, ...], axes: Axes, *leads: Lead) -> None:
        self._lengths = lengths_of(shape, axes)
        self._cut = [i for i, length in enumerate(np.broadcast_shapes(*leads)) if length != 1]
        uncut = [i for i in range(len(self._lengths)) if i not in self._cut]
        self._places = tuple(self._lengths[i] for i in self._cut)
        self._rows = tuple(self._lengths[i] for i in uncut)
        others = [axis for axis in range(len(shape)) if axis not in axes]
        self._order = [*(others[i] for i in self._cut + uncut), *axes]
        self._normalized = tuple(shape[axis] for axis in axes)
        self.count = math.prod(self._places)
        self._shape = self.count, math.prod(self._rows), math.prod(self._normalized)

    def forward(self, call: Forward) -> Forward:
        """See the arrays of a call, which are as they were given, as samples."""
        like_x = {
            name: self._of_x(getattr(call, name))
            for name in ("x", "y", "residual", "total", "where")
        }
        return call._replace(**like_x, norm=self._norm(call.norm), samples=self.count)

    def backward(self, call: Backward) -> Backward:
        """See the arrays of a call, which are as they were given, as samples."""
        like_x = {name: self._of_x(getattr(call, name)) for name in ("dy", "x", "dsum", "where")}
        of_rows = {name: self._of_rows(getattr(call, name)) for name in ("dmean", "drstd")}
        dx, *sums = call.out
        count, _, n = self._shape
        out = Gradients(
            self._of_x(dx), *(None if each is None else each.reshape(count, n) for each in sums)
        )
        kept = Statistics._make(map(self._of_rows, call.statistics))
        norm = self._norm(call.norm._replace(beta=None))
        return call._replace(
            **like_x, **of_rows, norm=norm, statistics=kept, out=out, samples=count
        )

    def put_back(self, seen: Any, call: Any) -> None:
        """Write the results of a call into those of the call as it was given, where the former are copies."""
        if isinstance(call, Forward):
            self._write(seen.y, call.y)
            self._write(seen.total, call.total)
            return
        self._write(seen.out.dx, call.out.dx)
        for total, room in zip(call.out[1:], seen.out[1:], strict=True):
            if total is not None and not np.may_share_memory(total, room):
                total[...] = room.reshape(total.shape)

    def _write(self, seen: Array | None, result: Array | None) -> None:
        if seen is not None and result is not None and not np.may_share_memory(seen, result):
            lengths = *self._places, *self._rows, *self._normalized
            result.transpose(self._order)[...] = seen.reshape(lengths)

    def in_order(self, found: Statistics) -> Statistics:
        """Return statistics in the order of the rows of x, given those of samples."""
        return Statistics._make(map(self._in_order, found))

    def _in_order(self, word: Array | None) -> Any:
        if word is None:
            return None
        whole = word.reshape(*self._places, *self._rows, *word.shape[2:])
        moved = np.moveaxis(whole, range(len(self._cut)), self._cut)
        return np.ascontiguousarray(moved).reshape(-1, *word.shape[2:])

    def _of_x(self, array: Array | None) -> Any:
        """See what has the shape of x, or is a mask of its rows; a copy, where it cannot be seen so."""
        if array is None:
            return None
        moved = array.transpose(self._order)
        return moved.reshape(*self._shape[:2], math.prod(moved.shape[len(self._lengths) :]))

    def _norm(self, norm: Norm) -> Norm:
        gamma, beta = map(self._of_parameter, norm[:2])
        return norm._replace(gamma=gamma, beta=beta)

    def _of_parameter(self, array: Array | None) -> Any:
        """Return gamma or beta of each sample, the same elements where it does not vary."""
        if array is None:
            return None
        missing = (1,) * (len(self._lengths) + len(self._normalized) - array.ndim)
        lead = missing + array.shape
        own = array.reshape(*(lead[i] for i in self._cut), *self._normalized)
        whole = np.broadcast_to(own, self._places + self._normalized)
        return whole.reshape(self._shape[::2])

    def _of_rows(self, word: Array | None) -> Any:
        """Return what has an element, or several, for each row."""
        if word is None:
            return None
        tail = word.shape[1:]
        moved = np.moveaxis(word.reshape(self._lengths + tail), self._cut, range(len(self._cut)))
        return np.ascontiguousarray(moved).reshape(*self._shape[:2], *tail)
