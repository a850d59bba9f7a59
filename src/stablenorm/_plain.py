"""
The short way for what most calls have: NumPy's own arrays in C order, the last axis.

Finding out all that `functional` checks takes 3 to 5 microseconds, and, for few float32, calling
the backend another 2: as much as a layer norm of 64 elements takes in all.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stablenorm import memory
from stablenorm.backends import choose, implementation, warn_if_slow
from stablenorm.formats import FORMATS
from stablenorm.threads import SMALL
from stablenorm.types import Array, Cache, Gradients, Statistics

_FLOAT32 = np.dtype(np.float32)
# In this machine's byte order.
_FLOATING = frozenset(each.dtype for each in FORMATS)
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

    Returns y, the statistics (of few float32, the first three as one array), and the backend's name.
    """
    if not (axis == -1 and type(x) is _ndarray and type(eps) is float and 0.0 <= eps < math.inf):
        return None
    dtype, shape, size = x.dtype, x.shape, x.size
    if (
        size < SMALL
        and dtype is _FLOAT32
        and type(gamma) is type(beta) is _ndarray
        and gamma.dtype is beta.dtype is _FLOAT32
        and shape
        and gamma.ndim == beta.ndim == 1
    ):
        y: Array
        if out is None:
            y = np.empty(shape, _FLOAT32)
        elif _can_be_written(out, shape):
            y = out
        else:
            return None
        name = choose(backend)
        small = implementation("forward_small", name)
        numbers = None if small is None else small(x, gamma, beta, eps, y, in_place)
        return None if numbers is None else (y, numbers, name)
    lengths = shape[-1:]
    if not (
        out is None
        and size
        and lengths
        and _is_plain(x, shape)
        and (gamma is None or _is_plain(gamma, lengths))
        and (beta is None or _is_plain(beta, lengths))
    ):
        return None
    name = choose(backend)
    warn_if_slow(name, x, gamma, beta)
    y = memory.empty(shape, dtype)
    rows = y
    if len(shape) != 2:
        folded = (size // lengths[0], lengths[0])
        x, rows = x.reshape(folded), y.reshape(folded)
    return y, implementation("forward", name)(x, gamma, beta, eps, rows), name


def _is_plain(array: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether that is NumPy's own array, of this shape, in C order, of a type computed with."""
    return bool(
        type(array) is _ndarray
        and array.dtype in _FLOATING
        and array.shape == shape
        and array.flags.c_contiguous
    )


def _can_be_written(out: Any, shape: tuple[int, ...]) -> bool:
    """Tell whether that is such an array: where its elements are, compiled code finds out."""
    return bool(
        type(out) is _ndarray
        and out.dtype is _FLOAT32
        and out.shape == shape
        and out.flags.writeable
    )


def plain_cache(x: Any, gamma: Any, beta: Any, statistics: Any, name: str) -> Cache:
    """Return the cache of what `forward_plain` has returned."""
    if type(statistics) is not Statistics:
        # As NamedTuples make themselves, without the keyword handling, which takes twice as long.
        words = (statistics[0], statistics[1], statistics[2], None, None, None)
        statistics = _new_tuple(Statistics, words)
    beta_dtype = None if beta is None else beta.dtype
    return _new_tuple(Cache, (x, gamma, beta_dtype, (x.ndim - 1,), statistics, name))


def backward_plain(dy: Any, cache: Cache, out: Any) -> Gradients | None:
    """Do all of `layer_norm_backward` for what most calls have, or return None for others."""
    x, gamma, beta_dtype, axis, statistics, name = cache
    if not (type(dy) is type(x) is _ndarray and dy.shape == x.shape and axis == (x.ndim - 1,)):
        return None
    shape, size = x.shape, x.size
    lengths = shape[-1:]
    if (
        0 < size < SMALL
        and beta_dtype is dy.dtype is x.dtype is _FLOAT32
        and type(gamma) is _ndarray
        and gamma.dtype is _FLOAT32
        and gamma.shape == lengths
    ):
        lengths_of_each = (shape, lengths, lengths)
        found = out
        if out is None:
            found = [np.empty(each, _FLOAT32) for each in lengths_of_each]
        elif not (isinstance(out, tuple) and len(out) == len(lengths_of_each)) or not all(
            map(_can_be_written, out, lengths_of_each)
        ):
            return None
        gradients = _new_tuple(Gradients, found)
        small = implementation("backward_small", name)
        written = small is not None and small(dy, x, gamma, statistics, *gradients)
        return gradients if written else None
    if not (
        out is None
        and size
        and _is_plain(dy, shape)
        and _is_plain(x, shape)
        and (gamma is None or _is_plain(gamma, lengths))
    ):
        return None
    dx: Array = memory.empty(shape, x.dtype)
    dgamma = None if gamma is None else np.empty(lengths, gamma.dtype)
    dbeta = None if beta_dtype is None else np.empty(lengths, beta_dtype)
    rows = dx
    if len(shape) != 2:
        folded = (size // lengths[0], lengths[0])
        dy, x, rows = dy.reshape(folded), x.reshape(folded), dx.reshape(folded)
    implementation("backward", name)(dy, x, gamma, statistics, Gradients(rows, dgamma, dbeta))
    return _new_tuple(Gradients, (dx, dgamma, dbeta))
