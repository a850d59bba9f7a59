"""
The short way for what most calls have: float32, C order, the last axis, gamma and beta.

On few elements, finding that out and calling the backend takes 2 microseconds, all that
`functional` checks otherwise another 3, as much as a layer norm of 64 elements takes in all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stablenorm import _recycling
from stablenorm._threads import SMALL
from stablenorm._types import Array, Cache, Gradients, Statistics
from stablenorm.backends import BACKENDS, choose

_FLOAT32 = np.dtype(np.float32)
_ndarray = np.ndarray
_new_tuple: Any = tuple.__new__


def forward_plain(
    x: Any,
    gamma: Any,
    beta: Any,
    eps: Any,
    axis: Any,
    out: Any,
    backend: str | None,
    in_place: bool,
) -> tuple[Array, Any, str] | None:
    """
    Do what `functional._forward` does for the arguments that most calls have, or return None for others.

    Returns y, the first three statistics, and the name of the backend.
    """
    if not (
        axis == -1
        and type(x) is type(gamma) is type(beta) is _ndarray
        and x.dtype is gamma.dtype is beta.dtype is _FLOAT32
        and type(eps) is float
        and 0.0 <= eps < math.inf
    ):
        return None
    shape, size = x.shape, x.size
    if size < SMALL and shape and gamma.ndim == beta.ndim == 1:
        y: Array
        if out is None:
            y = np.empty(shape, _FLOAT32)
        elif _can_be_written(out, shape):
            y = out
        else:
            return None
        name = choose(backend)
        numbers = BACKENDS[name].forward_small(x, gamma, beta, eps, y, in_place)
        return None if numbers is None else (y, numbers, name)
    lengths = gamma.shape
    if not (
        out is None
        and size
        and len(lengths) == 1
        and lengths == beta.shape == shape[-1:]
        and x.flags.c_contiguous
        and gamma.flags.c_contiguous
        and beta.flags.c_contiguous
    ):
        return None
    name = choose(backend)
    y = _recycling.empty(shape, _FLOAT32)
    rows = y
    if len(shape) != 2:
        folded = (size // lengths[0], lengths[0])
        x, rows = x.reshape(folded), y.reshape(folded)
    return y, BACKENDS[name].forward(x, gamma, beta, eps, rows), name


def _can_be_written(out: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether that is such an array: where its elements are, compiled code finds out."""
    return bool(
        type(out) is _ndarray
        and out.dtype is _FLOAT32
        and out.shape == shape
        and out.flags.writeable
    )


def plain_cache(x: Any, gamma: Any, numbers: Any, name: str) -> Cache:
    """Return the cache of what `forward_plain` has returned."""
    # As NamedTuples make themselves, without the keyword handling, which takes twice as long.
    words = (numbers[0], numbers[1], numbers[2], None, None, None)
    statistics = _new_tuple(Statistics, words)
    return _new_tuple(Cache, (x, gamma, _FLOAT32, (x.ndim - 1,), statistics, name))


def backward_plain(dy: Any, cache: Cache, out: Any) -> Gradients | None:
    """Do all of `layer_norm_backward` for what most calls have, or return None for others."""
    x, gamma, beta_dtype, axis, statistics, name = cache
    if not (
        beta_dtype is _FLOAT32
        and type(dy) is type(x) is type(gamma) is _ndarray
        and dy.dtype is x.dtype is gamma.dtype is _FLOAT32
    ):
        return None
    shape, lengths, size = x.shape, gamma.shape, x.size
    if not (
        size
        and len(lengths) == 1
        and axis == (len(shape) - 1,)
        and lengths == shape[-1:]
        and dy.shape == shape
    ):
        return None
    chosen = BACKENDS[name]
    if size < SMALL:
        lengths_of_each = (shape, lengths, lengths)
        found = out
        if out is None:
            found = [np.empty(each, _FLOAT32) for each in lengths_of_each]
        elif not (isinstance(out, tuple) and len(out) == len(lengths_of_each)) or not all(
            map(_can_be_written, out, lengths_of_each)
        ):
            return None
        small = _new_tuple(Gradients, found)
        return small if chosen.backward_small(dy, x, gamma, statistics, *small) else None
    if out is not None or not (
        dy.flags.c_contiguous and x.flags.c_contiguous and gamma.flags.c_contiguous
    ):
        return None
    dx: Array = _recycling.empty(shape, _FLOAT32)
    dgamma, dbeta = np.empty(lengths, _FLOAT32), np.empty(lengths, _FLOAT32)
    rows = dx
    if len(shape) != 2:
        folded = (size // lengths[0], lengths[0])
        dy, x, rows = dy.reshape(folded), x.reshape(folded), dx.reshape(folded)
    chosen.backward(dy, x, gamma, statistics, Gradients(rows, dgamma, dbeta))
    return _new_tuple(Gradients, (dx, dgamma, dbeta))
