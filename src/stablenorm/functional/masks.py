"""
Masks: the rows in which something counts go to a backend, as a matrix of their own.

Where all elements of these rows count, that is the ordinary call: the bits of a row do not depend on the
other rows. Masks that vary within a row are for the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm.arrays import Rows, SomeRows, as_matrix, is_lazy, lazy
from stablenorm.backends import implementation
from stablenorm.types import NOTHING_EXTRA, Array, Extra, Gradients, Norm, Residual, Statistics

# Elements that are cleared at a time: the memory of a list of rows is all that this takes.
_CLEARED = 1 << 16


def check_where(where: Any, shape: tuple[int, ...], axes: tuple[int, ...], rounding: str) -> Array:
    """
    Return a mask of the dimensions of x, of length 1 along `axes` if it does not vary there.

    It is a copy: the statistics are of the rows that count now, whatever becomes of `where`.
    """
    if np.ma.isMaskedArray(where):
        msg = "where must be a plain array, got a masked one, whose mask would be ignored"
        raise TypeError(msg)
    if is_lazy(where):
        raise TypeError(lazy("where"))
    try:
        mask = np.asarray(where)
    except ValueError:
        msg = "where must be an array of bool, got lists of unequal length; fill them up with False"
        raise ValueError(msg) from None
    check_mask(mask, shape)
    mask = np.broadcast_to(mask, shape)
    # Of what is the same by construction, only the first.
    same = (slice(1 if i in axes and step == 0 else None) for i, step in enumerate(mask.strides))
    seen = mask[tuple(same)]
    some: Any = seen.any(axis=axes, keepdims=True)
    if np.array_equal(some, seen.all(axis=axes, keepdims=True)):
        return np.array(some)
    if rounding == "nearest":
        msg = 'where must not vary along axis with rounding="nearest" yet; use rounding="fast"'
        raise ValueError(msg)
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


def forward(
    call: Callable[..., Any],
    where: Any,
    x: Any,
    norm: Norm,
    y: Any,
    residual: Residual | None = None,
) -> Statistics | None:
    """
    Do `call`, the forward of a backend, on what counts; y and the statistics are 0 elsewhere.

    `where` is a matrix of one column, or as wide as x; None where all counts.
    """
    if where is None:
        found: Statistics | None = call(x, norm, y, residual)
        return found
    if residual is not None:
        x = implementation("add", "numpy")(x, *residual)
    where, x, y = map(as_matrix, (where, x, y))
    counted, numbers = _count(where)
    given = pick(x, numbers), norm, pick(y, numbers)
    if where.shape[1] == 1:
        found = call(*given)
    else:
        found = implementation("forward_where", "numpy")(*given, pick(where, numbers))
    _fill(y, given[2], ~counted)
    return None if found is None else _spread(found, numbers, len(counted))


def backward(
    call: Callable[..., Any],
    where: Any,
    dy: Any,
    x: Any,
    norm: Norm,
    statistics: Statistics,
    out: Gradients,
    extra: Extra = NOTHING_EXTRA,
) -> None:
    """Do `call`, the backward of a backend, on what counts; dx is dsum or 0 elsewhere."""
    if where is None:
        call(dy, x, norm, statistics, out, extra)
        return
    where, dy, x, dx, dsum = map(as_matrix, (where, dy, x, out.dx, extra.dsum))
    counted, numbers = _count(where)
    if extra is not NOTHING_EXTRA or where.shape[1] > 1:
        dmean, drstd = (None if each is None else each[numbers] for each in extra[1:3])
        elements = where if where.shape[1] > 1 else None
        extra = Extra(pick(dsum, numbers), dmean, drstd, pick(elements, numbers), extra.old)
    kept, found = statistics.of_rows(numbers), out._replace(dx=pick(dx, numbers))
    call(pick(dy, numbers), pick(x, numbers), norm, kept, found, extra)
    if dx is not None:
        _fill(dx, found.dx, ~counted, dsum)


def pick(matrix: Any, numbers: Array) -> Any:
    """Return rows of a matrix: a view where their numbers, which ascend, follow one another."""
    if matrix is None or len(numbers) == matrix.shape[0]:
        return matrix
    run = len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1
    if run and not isinstance(matrix, Rows):
        return matrix[numbers[0] : numbers[-1] + 1]
    return SomeRows(matrix, numbers)


def _count(where: Any) -> tuple[Array, Array]:
    """Return which rows have something that counts, and their numbers."""
    counted: Array = where[:].any(axis=1)
    return counted, np.flatnonzero(counted)


def _spread(found: Statistics, numbers: Array, rows: int) -> Statistics:
    """Return statistics of all rows, given those of rows of these numbers; 0 for the others."""
    if len(numbers) == rows:
        return found

    def spread(word: Array) -> Array:
        whole = np.zeros((rows, *word.shape[1:]), word.dtype)
        whole[numbers] = word
        return whole

    return Statistics._make(None if word is None else spread(word) for word in found)


def _fill(matrix: Any, some: Any, missing: Array, source: Any = None) -> None:
    """Write into the missing rows what reaches them: 0, or those of `source`, rounded."""
    if type(some) is SomeRows and some.cleared:
        return
    numbers = np.flatnonzero(missing)
    n = matrix.shape[1]
    for start in range(0, len(numbers), step := max(1, _CLEARED // n)):
        part = numbers[start : start + step]
        zeros = np.broadcast_to(np.zeros((), matrix.dtype), (len(part), n))
        if source is None:
            pick(matrix, part)[:] = zeros
        else:
            implementation("add", "numpy")(pick(source, part), zeros, pick(matrix, part))
