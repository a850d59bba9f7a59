"""
What functions take besides: a residual, a mask, a dsum, each folded into a norm of x alone.

A function that takes one of them is turned into one without it that computes the same norm of x,
so that every layer of the check exercises it: x arrives as a sum, or beside elements that do not count,
or half of dx as a dsum.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stablenorm.check.operation import FaultError
from stablenorm.types import Array

Functions = tuple[Callable[..., Any], Callable[..., Any]]

# Filler for masked elements; any value that changes the result if it is read.
_JUNK = 1.75


def exercise(takes: Sequence[str], forward: Callable[..., Any], backward: Any) -> Functions:
    """Return functions without the keywords that `takes` names, each of which they then try."""
    if isinstance(takes, str) or not set(takes) <= _WAYS.keys():
        msg = f"takes must be a sequence of {', '.join(_WAYS)}, got {takes!r}"
        raise ValueError(msg)
    for name, way in _WAYS.items():
        if name in takes:
            forward, backward = way(forward, backward)
    return forward, backward


def _with_dsum(forward: Callable[..., Any], backward: Callable[..., Any]) -> Functions:
    """Return half of the dx that comes with dx itself as dsum."""

    def pull(dy: Array, cache: Any) -> Any:
        dx = np.array(backward(dy, cache)[0])
        both, *sums = backward(dy, cache, dsum=dx.copy())
        if np.any(dx != 0) and np.array_equal(both, dx):
            msg = "dx with a dsum is dx alone"
            raise FaultError(msg)
        return np.asarray(both) / 2, *sums

    return forward, pull


def _with_residual(forward: Callable[..., Any], backward: Callable[..., Any]) -> Functions:
    """Give every other element of x as a residual, 0 in its place: their sum is x, exactly."""

    def call(x: Array, *others: Any, **options: Any) -> Any:
        residual = x.copy()
        residual[..., ::2] = 0
        return forward(x - residual, *others, residual=residual, **options)

    return call, backward


def _with_where(forward: Callable[..., Any], backward: Callable[..., Any]) -> Functions:
    """Give rows of twice the length, one half of which counts; and, of several, one more that does not."""

    def call(x: Array, gamma: Any, beta: Any, eps: float, **options: Any) -> Any:
        where = _mask(x.shape)
        twice = (None if a is None else np.concatenate([a, a]) for a in (gamma, beta))
        y, cache = forward(_spread(x, where), *twice, eps, where=where, **options)
        return _gathered("y", y, where, x.shape), (cache, where, x.shape)

    def pull(dy: Array, cache: Any, **options: Any) -> Any:
        own, where, shape = cache
        dx, *others = backward(_spread(dy, where), own, **options)
        sums = (None if a is None else np.add(*np.split(np.asarray(a), 2)) for a in others)
        return _gathered("dx", dx, where, shape), *sums

    return call, pull


def _mask(shape: tuple[int, ...]) -> Array:
    """Return which elements count: the halves of the rows take turns; of the row more, if any, none."""
    turns = np.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1, 1) % 2
    where = np.repeat(turns == [[0], [1]], shape[-1], axis=-1).reshape(*shape[:-1], -1)
    return np.concatenate([where, np.zeros_like(where[:1])]) if len(shape) > 1 else where


def _spread(a: Array, where: Array) -> Array:
    """Return `a` where its elements count, and something else elsewhere."""
    found = np.full(where.shape, _JUNK, a.dtype)
    found[where] = a.reshape(-1)
    return found


def _gathered(name: str, array: Any, where: Array, shape: tuple[int, ...]) -> Array:
    """Return what counts; FaultError if the rest is not 0."""
    array = np.asarray(array)
    if array.shape != where.shape or np.any(array[~where] != 0):
        msg = f"{name} must have the shape of x, and be 0 where the mask is False"
        raise FaultError(msg)
    found: Array = array[where].reshape(shape)
    return found


# In this order: a dsum of the shape of x is the innermost.
_WAYS: dict[str, Callable[[Callable[..., Any], Callable[..., Any]], Functions]] = {
    "dsum": _with_dsum,
    "residual": _with_residual,
    "where": _with_where,
}
