"""
Masks: the rows in which something counts go to a backend, as a matrix of their own.

Rows of which all elements count are an ordinary call, those of which some do are for the reference: the bits of
a row do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenorm.arrays import Rows, SomeRows, as_matrix, is_lazy, lazy
from stablenorm.backends import implementation
from stablenorm.reference.partial import PARTIAL, merged, rounded
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
    if all(seen.shape[i] == 1 for i in axes):
        return seen.copy()
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
        return call(x, norm, y, residual)  # type: ignore[no-any-return]
    if residual is not None:
        x = implementation("add", "numpy")(x, *residual)
    where, x, y = map(as_matrix, (where, x, y))
    counted, parts = _parts(where)
    found: list[Any] = []
    for numbers, elements in parts:
        given = select_rows(x, numbers), norm, select_rows(y, numbers, alone=len(parts) == 1)
        if elements is None:
            found.append(call(*given))
        else:
            found.append(implementation("forward_where", "numpy")(*given, elements))
    _fill(y, given[2] if len(parts) == 1 else None, ~counted)
    return None if None in found else _spread(found, [each[0] for each in parts], len(counted))


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
    counted, parts = _parts(where)
    sums = []
    for numbers, elements in parts:
        found = out._replace(dx=select_rows(dx, numbers, alone=len(parts) == 1))
        if len(parts) > 1:
            # Sums over some of the rows, which are rounded once, at the end.
            found = Gradients(found.dx, *map(_partial, out[1:]))
            sums.append(found[1:])
        some = extra
        if extra is not NOTHING_EXTRA or elements is not None:
            dmean, drstd = (None if each is None else each[numbers] for each in extra[1:3])
            old = None if len(sums) > 1 else extra.old
            some = Extra(select_rows(dsum, numbers), dmean, drstd, elements, old)
        call(
            select_rows(dy, numbers),
            select_rows(x, numbers),
            norm,
            statistics.of_rows(numbers),
            found,
            some,
        )
    for each, *both in zip(out[1:], *sums, strict=True) if sums else ():
        if each is not None:
            total = merged(*both)
            each[...] = total if each.dtype == PARTIAL else rounded(total, each.dtype)[0]
    if dx is not None:
        _fill(dx, found.dx if len(parts) == 1 else None, ~counted, dsum)


def _partial(like: Array | None) -> Array | None:
    return None if like is None else np.zeros(like.shape, PARTIAL)


def select_rows(matrix: Any, numbers: Array, *, alone: bool = True) -> Any:
    """
    Return rows of a matrix: a view where their numbers, which ascend, follow one another.

    If `alone`, the backend may zero all other rows.
    """
    if matrix is None or len(numbers) == matrix.shape[0]:
        return matrix
    run = len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1
    if run and not isinstance(matrix, Rows):
        return matrix[numbers[0] : numbers[-1] + 1]
    return SomeRows(matrix, numbers, not alone)


def _parts(where: Any) -> tuple[Array, list[tuple[Array, Any]]]:
    """
    Return which rows have something that counts; and the numbers of those of which all and of which some does.

    With the latter, as matrix, which elements do; with the former None. There is at least one of the two.
    """
    where = where[:]
    if where.shape[1] == 1:
        return where[:, 0], [(np.flatnonzero(where), None)]
    counted: Array = where.any(axis=1)
    whole = where.all(axis=1)
    some = np.flatnonzero(counted & ~whole)
    parts: list[tuple[Array, Any]] = [(np.flatnonzero(whole), None)]
    if len(some):
        parts = [each for each in (*parts, (some, select_rows(where, some))) if len(each[0])]
    return counted, parts


def _spread(found: list[Statistics], numbers: list[Array], rows: int) -> Statistics:
    """Return statistics of all rows, given those of rows of these numbers, or all; 0 for the others."""
    if len(found[0].rstd) == rows:
        return found[0]
    words: list[Any] = []
    for each in zip(*found, strict=True):
        some = next((word for word in each if word is not None), None)
        whole = None if some is None else np.zeros((rows, *some.shape[1:]), some.dtype)
        for where, word in zip(numbers, each, strict=True):
            if word is not None and whole is not None:
                whole[where] = word
        words.append(whole)
    return Statistics._make(words)


def _fill(matrix: Any, some: Any, missing: Array, source: Any = None) -> None:
    """Write into the missing rows what reaches them: 0, or those of `source`, rounded."""
    if type(some) is SomeRows and some.others_done:
        return
    numbers = np.flatnonzero(missing)
    n = matrix.shape[1]
    for start in range(0, len(numbers), step := max(1, _CLEARED // n)):
        part = numbers[start : start + step]
        zeros = np.broadcast_to(np.zeros((), matrix.dtype), (len(part), n))
        if source is None:
            select_rows(matrix, part)[:] = zeros
        else:
            implementation("add", "numpy")(
                select_rows(source, part), zeros, select_rows(matrix, part)
            )
