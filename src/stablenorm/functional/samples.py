"""
Gamma and beta with leading axes, and gradients summed over some axes: one ordinary call for each part of x.

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
from stablenorm.functional import masks
from stablenorm.types import (
    NOTHING_EXTRA,
    Array,
    Cache,
    Extra,
    Gradients,
    Norm,
    Residual,
    Statistics,
)

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


def old_sums(out: Gradients) -> Array | None:
    """Return what dgamma and dbeta hold, in float64; 0 for one that is not wanted."""
    sizes = [total.size for total in out[1:] if total is not None]
    if not sizes:
        return None
    old = np.zeros((2, sizes[0]))
    for row, total in zip(old, out[1:], strict=True):
        if total is not None:
            row[:] = total.reshape(-1).astype(np.float64)
    return old


def forward(
    call: Callable[..., Any], x: Array, norm: Norm, axes: Axes, y: Array,
    residual: Residual | None, where: Array | None,
) -> Any:  # fmt: skip
    """Write y; return the statistics of all rows, or None where `call` returns none."""
    if not x.size:
        # Of no rows there may be no parts, but there are statistics.
        norm = norm._replace(gamma=None, beta=None, gamma_offset=0.0)
    parts = _Parts(x, axes, *(_lead(each, x, axes) for each in norm[:2]))
    arrays = [parts.of_x(each) for each in (x, y, where, *(residual or ()))]
    gamma, beta = (parts.of_parameter(each) for each in norm[:2])
    found = []
    for place in parts:
        some = _new(Norm, (_at(gamma, place), _at(beta, place), *norm[2:]))
        rows = [None if each is None else as_rows(each[place], parts.axes) for each in arrays]
        given = (Residual(*rows[3:]),) if residual else ()
        found.append(masks.forward(call, rows[2], rows[0], some, rows[1], *given))
    return parts.joined(found)


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
    x, norm, axes, statistics, _, where = cache[:6]
    parts = _Parts(x, axes, cut)
    if out.dx is None is out.dgamma:
        # dbeta needs no gamma, and may be cut otherwise.
        norm = norm._replace(gamma=None, gamma_offset=0.0)
    gamma = parts.of_parameter(norm.gamma)
    totals = [parts.of_sum(each) for each in out[1:]]
    arrays = [parts.of_x(each) for each in (dy, x, out.dx, extra.dsum, where)]
    words = [parts.of_rows(each) for each in statistics]
    dmean, drstd = (parts.of_rows(each) for each in extra[1:3])
    for place in parts:
        some = _new(Norm, (_at(gamma, place), None, *norm[2:]))
        kept = _new(Statistics, [_at(each, place) for each in words])
        rows = [None if each is None else as_rows(each[place], parts.axes) for each in arrays]
        found = _new(Gradients, (rows[2], *(_at(each, place) for each in totals)))
        here = extra
        if extra is not NOTHING_EXTRA:
            here = Extra(rows[3], _at(dmean, place), _at(drstd, place))
        if accumulate:
            here = here._replace(old=old_sums(found))
        masks.backward(call, rows[4], rows[0], rows[1], some, kept, found, here)


def _lead(parameter: Array | None, x: Array, axes: Axes) -> Lead:
    if parameter is None:
        return (1,) * (x.ndim - len(axes))
    return (1,) * (x.ndim - parameter.ndim) + parameter.shape[: parameter.ndim - len(axes)]


def _at(array: Array | None, place: tuple[int, ...]) -> Any:
    return None if array is None else array[place]


class _Parts:
    """
    The places of the parts of x, cut along the axes where one of `leads` is not 1.

    The methods return views, in which a place is what the first axes have; None of None.
    """

    def __init__(self, x: Array, axes: Axes, *leads: Lead) -> None:
        self._lengths = lengths_of(x.shape, axes)
        self._cut = [i for i, length in enumerate(np.broadcast_shapes(*leads)) if length != 1]
        self._uncut = [i for i in range(len(self._lengths)) if i not in self._cut]
        self._places = tuple(self._lengths[i] for i in self._cut)
        others = [axis for axis in range(x.ndim) if axis not in axes]
        self._of_x = [others[i] for i in self._cut]
        self._normalized = tuple(x.shape[axis] for axis in axes)
        # The normalized axes of a part.
        self.axes = tuple(axis - sum(cut < axis for cut in self._of_x) for axis in axes)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self._places))

    def of_x(self, array: Array | None) -> Any:
        """See what has the shape of x."""
        return array if array is None else np.moveaxis(array, self._of_x, range(len(self._cut)))

    def of_parameter(self, array: Array | None) -> Any:
        """See gamma or beta, the same one at places where it does not vary."""
        if array is None:
            return None
        missing = (1,) * (len(self._lengths) + len(self._normalized) - array.ndim)
        lead = missing + array.shape
        own = array.reshape(*(lead[i] for i in self._cut), *self._normalized)
        return np.broadcast_to(own, self._places + self._normalized)

    def of_sum(self, array: Array | None) -> Any:
        """See the gradient of a parameter, which has elements of its own at each place."""
        return array if array is None else array.reshape(self._places + self._normalized)

    def of_rows(self, word: Array | None) -> Any:
        """See what has an element, or several, for each row."""
        if word is None:
            return None
        tail = word.shape[1:]
        moved = np.moveaxis(word.reshape(self._lengths + tail), self._cut, range(len(self._cut)))
        rows = math.prod(self._lengths[i] for i in self._uncut)
        return np.ascontiguousarray(moved).reshape(*self._places, rows, *tail)

    def joined(self, found: list[Any]) -> Any:
        """Return the statistics of all rows, given those of each part in their order."""
        if found[0] is None:
            return None
        words: list[Any] = []
        for each in zip(*found, strict=True):
            some = [word for word in each if word is not None]
            if not some:
                words.append(None)
                continue
            # What some rows need no word for is 0.
            whole = np.stack([np.zeros_like(some[0]) if word is None else word for word in each])
            lengths = *self._places, *(self._lengths[i] for i in self._uncut), *whole.shape[2:]
            moved = np.moveaxis(whole.reshape(lengths), range(len(self._cut)), self._cut)
            words.append(np.ascontiguousarray(moved).reshape(-1, *whole.shape[2:]))
        return Statistics(*words)
