"""The checks of a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm.arrays import is_lazy, lazy, refuse_masked
from stablenorm.functional.combinations import NEAREST, check_combinations
from stablenorm.types import Array


def check_where(where: Any, shape: tuple[int, ...], axes: tuple[int, ...], rounding: str) -> Array:
    """
    Return a mask of the dimensions of x, of length 1 along `axes` if it does not vary there.

    The mask is a copy: later changes of `where` change no gradient.
    """
    refuse_masked("where", where)
    if is_lazy(where):
        raise TypeError(lazy("where"))
    try:
        mask = np.asarray(where)
    except ValueError:
        msg = "where must be an array of bool, got lists of unequal length; fill them up with False"
        raise ValueError(msg) from None
    check_mask(mask, shape)
    mask = np.broadcast_to(mask, shape)
    # Along broadcast axes (stride 0) one element is enough.
    same = (slice(1 if i in axes and step == 0 else None) for i, step in enumerate(mask.strides))
    seen = mask[tuple(same)]
    if all(seen.shape[i] == 1 for i in axes):
        return seen.copy()
    some: Any = seen.any(axis=axes, keepdims=True)
    if np.array_equal(some, seen.all(axis=axes, keepdims=True)):
        return np.array(some)
    if rounding == "nearest":
        check_combinations(("where that varies inside a row", NEAREST))
    return mask.copy()


def check_mask(mask: Any, shape: tuple[int, ...]) -> None:
    """Raise unless `mask` is of bool and broadcasts to this shape."""
    if mask.dtype != np.bool_:
        msg = f"where must be an array of bool, got {mask.dtype}; of numbers, write where=mask != 0"
        raise TypeError(msg)
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or any(length not in (1, of_x) for length, of_x in pairs):
        msg = f"where must broadcast to the shape of x, {shape}, got {mask.shape}"
        raise ValueError(msg)
