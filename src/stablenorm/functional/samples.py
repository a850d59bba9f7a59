"""
Gamma and beta with leading axes, and gradients summed over some axes: each part of x as by a call of its own.
A backend that can does all parts at once, as (parts, rows, n).

A *lead* has a length for each axis of x that is not normalized: that of x where a parameter, or a sum,
has elements of its own along it, else 1. Where a lead is not 1, x is cut into parts.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from stablenorm.arrays import as_rows, show_axes
from stablenorm.backends import implementation
from stablenorm.functional import masks
from stablenorm.types import Array, Cache, Extra, Gradients, Norm, Residual, Statistics

Lead = tuple[int, ...]
Axes = tuple[int, ...]

# As NamedTuples make themselves, in half the time.
_new = tuple.__new__


def lengths_of(shape: tuple[int, ...], axes: Axes) -> Lead:
    """Return the lengths of the axes that are not normalized."""
    return tuple(length for axis, length in enumerate(shape) if axis not in axes)


def fits(leading: tuple[int, ...], lengths: Lead) -> bool:
    """Tell whether leading axes of a parameter broadcast against axes of these lengths."""
    pairs = zip(reversed(leading), reversed(lengths), strict=False)
    return len(leading) <= len(lengths) and all(one in (1, length) for one, length in pairs)


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
        if not fits(_lead(parameter, x, axes), lead):
            msg = f"sum_axes must name no axis along which {name} varies, got {sum_axes}"
            raise ValueError(msg)
    return lead, tuple(length for is_summed, length in each if not is_summed)


def sums_like(parameter: Array | None, kept: tuple[int, ...], cache: Cache) -> Array | None:
    """Return an array, of no memory, of the shape and dtype of a gradient where axes are kept."""
    if parameter is None:
        return None
    normalized = parameter.shape[parameter.ndim - len(cache.axis) :]
    return np.broadcast_to(np.empty((), parameter.dtype), kept + normalized)


def old_sums(out: Gradients, *parts: int) -> Array | None:
    """Return what dgamma and dbeta hold, of each of so many parts, in float64; 0 for one not wanted."""
    if out.dgamma is None is out.dbeta:
        return None
    totals = (np.zeros(1) if each is None else each.reshape(*parts, -1) for each in out[1:])
    both = np.broadcast_arrays(*(each.astype(np.float64) for each in totals))
    return np.stack(both, axis=-2)


def forward(
    backend: str, keep: bool, x: Array, norm: Norm, axes: Axes, y: Array,
    residual: Residual | None, where: Array | None,
) -> Any:  # fmt: skip
    """Write y; return the statistics of all rows; without `keep`, nothing that counts."""
    if not x.size:
        # Of no rows there may be no parts, but there are statistics.
        norm = norm._replace(gamma=None, beta=None, gamma_offset=0.0)
    parts = _Parts(x, axes, *(_lead(each, x, axes) for each in norm[:2]))
    arrays = [parts.of_x(each) for each in (x, y, where, *(residual or ()))]
    gamma, beta = (parts.of_parameter(each) for each in norm[:2])
    call = implementation("forward" if keep else "normalize", backend)
    at_once, found = implementation("forward_samples", backend), []
    if at_once and where is None and (seen := parts.in_one(arrays)):
        added = Residual(*seen[3:]) if residual else None
        done = at_once(seen[0], _new(Norm, (gamma, beta, *norm[2:])), seen[1], added, keep)
        if done is not None:
            return parts.in_order(done)
    for number, place in enumerate(parts):
        some = _new(Norm, (_at(gamma, number), _at(beta, number), *norm[2:]))
        rows = [None if each is None else as_rows(each[place], parts.axes) for each in arrays]
        added = Residual(*rows[3:]) if residual else None
        found.append(masks.forward(call, rows[2], rows[0], some, rows[1], added))
    return None if found[0] is None else parts.joined(found)


def backward(
    call: Callable[..., Any], dy: Array, cache: Cache, out: Gradients, lead: Lead | None,
    extra: Extra, accumulate: bool,
) -> None:  # fmt: skip
    """Write the gradients of `out`; `lead` is that of the sums, by default of their parameters."""
    of_parameters = [_lead(each, cache.x, cache.axis) for each in cache.norm[:2]]
    cuts = [of_parameters[0], lead or of_parameters[0], lead or of_parameters[1]]
    if out.dgamma is not None:
        cuts[0] = cuts[1]
    # What is cut alike in one pass; that with dx, which may overwrite dy, comes last.
    passes: dict[Lead, list[Any]] = {}
    for which in (1, 2, 0):
        if out[which] is not None:
            wanted = passes.pop(cuts[which], [None] * 3)
            wanted[which] = out[which]
            passes[cuts[which]] = wanted
    for cut, wanted in passes.items():
        _pass(call, dy, cache, Gradients(*wanted), cut, extra, accumulate)


def _pass(
    call: Callable[..., Any], dy: Array, cache: Cache, out: Gradients, cut: Lead, extra: Extra,
    accumulate: bool,
) -> None:  # fmt: skip
    x, norm, axes, statistics, backend, where = cache[:6]
    parts = _Parts(x, axes, cut)
    if out.dx is None is out.dgamma:
        # dbeta needs no gamma, and may be cut otherwise.
        norm = norm._replace(gamma=None, gamma_offset=0.0)
    norm = _new(Norm, (parts.of_parameter(norm.gamma), None, *norm[2:]))
    totals: list[Any] = [each if each is None else each.reshape(parts.of_sums) for each in out[1:]]
    arrays = [parts.of_x(each) for each in (dy, x, out.dx, extra.dsum, where)]
    kept = _new(Statistics, map(parts.of_rows, statistics))
    dmean, drstd = map(parts.of_rows, extra[1:3])
    old = old_sums(Gradients(None, *totals), parts.count) if accumulate and parts.count else None
    at_once, done = implementation("backward_samples", backend), False
    if at_once and where is None and (seen := parts.in_one(arrays)):
        found = Gradients(seen[2], *totals)
        done = at_once(*seen[:2], norm, kept, found, Extra(seen[3], dmean, drstd, old=old))
    for number, place in enumerate(() if done else parts):
        some = norm._replace(gamma=_at(norm.gamma, number))
        rows = [None if each is None else as_rows(each[place], parts.axes) for each in arrays]
        found = _new(Gradients, (rows[2], *(_at(each, number) for each in totals)))
        here = Extra(rows[3], _at(dmean, number), _at(drstd, number), old=_at(old, number))
        masks.backward(call, rows[4], rows[0], rows[1], some, kept.of_rows(number), found, here)
    for total, room in zip(out[1:], totals, strict=True):
        # A copy, if it cannot be seen as (parts, n).
        if total is not None and not np.may_share_memory(total, room):
            total[...] = room.reshape(total.shape)


def _lead(parameter: Array | None, x: Array, axes: Axes) -> Lead:
    if parameter is None:
        return (1,) * (x.ndim - len(axes))
    return (1,) * (x.ndim - parameter.ndim) + parameter.shape[: parameter.ndim - len(axes)]


def _at(array: Array | None, number: int) -> Any:
    return None if array is None else array[number]


class _Parts:
    """
    The places of the parts of x, cut along the axes where one of `leads` is not 1.

    The methods return None of None, else views, in which a place is what the first axes have, or arrays
    of which the first axis counts the parts.
    """

    def __init__(self, x: Array, axes: Axes, *leads: Lead) -> None:
        self._lengths = lengths_of(x.shape, axes)
        self._cut = [i for i, length in enumerate(np.broadcast_shapes(*leads)) if length != 1]
        uncut = [i for i in range(len(self._lengths)) if i not in self._cut]
        self._places = tuple(self._lengths[i] for i in self._cut)
        self._rows = tuple(self._lengths[i] for i in uncut)
        others = [axis for axis in range(x.ndim) if axis not in axes]
        self._order = [*(others[i] for i in self._cut + uncut), *axes]
        self._normalized = tuple(x.shape[axis] for axis in axes)
        # The normalized axes of a part.
        self.axes = tuple(range(len(uncut), len(uncut) + len(axes)))
        self.count, n = math.prod(self._places), math.prod(self._normalized)
        self.of_sums, self._of_rows = (self.count, n), (self.count, math.prod(self._rows), n)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self._places))

    def of_x(self, array: Array | None) -> Any:
        """See what has the shape of x."""
        return array if array is None else array.transpose(self._order)

    def of_parameter(self, array: Array | None) -> Any:
        """Return gamma or beta of each part, the same elements of parts where it does not vary."""
        if array is None:
            return None
        missing = (1,) * (len(self._lengths) + len(self._normalized) - array.ndim)
        lead = missing + array.shape
        own = array.reshape(*(lead[i] for i in self._cut), *self._normalized)
        return np.broadcast_to(own, self._places + self._normalized).reshape(self.of_sums)

    def of_rows(self, word: Array | None) -> Any:
        """Return what has an element, or several, for each row."""
        if word is None:
            return None
        tail = word.shape[1:]
        moved = np.moveaxis(word.reshape(self._lengths + tail), self._cut, range(len(self._cut)))
        return np.ascontiguousarray(moved).reshape(*self._of_rows[:2], *tail)

    def in_one(self, arrays: list[Any]) -> list[Any] | None:
        """See what `of_x` returned as (parts, rows, n); None if that takes a copy, or is nothing or one."""
        if self.count < 2 or 0 in self._of_rows:
            return None
        views = [array if array is None else array.view() for array in arrays]
        try:
            for view in views:
                if view is not None:
                    view.shape = self._of_rows
        except AttributeError:
            return None
        return views

    def joined(self, found: list[Any]) -> Statistics:
        """Return the statistics of all rows, given those of each part."""
        words: list[Any] = []
        for each in zip(*found, strict=True):
            some = [word for word in each if word is not None]
            # What some rows need no word for is 0.
            full = [np.zeros_like(some[0]) if word is None else word for word in each if some]
            words.append(np.stack(full) if full else None)
        return self.in_order(Statistics(*words))

    def in_order(self, found: Statistics) -> Statistics:
        """Return statistics in the order of the rows of x, given them in that of parts."""
        words: list[Any] = []
        for word in found:
            if word is None:
                words.append(None)
                continue
            whole = word.reshape(*self._places, *self._rows, *word.shape[2:])
            moved = np.moveaxis(whole, range(len(self._cut)), self._cut)
            words.append(np.ascontiguousarray(moved).reshape(-1, *word.shape[2:]))
        return Statistics(*words)
