"""Masks: which rows have elements that count. Only these are computed; y, dx and the statistics of others are 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from stablenorm.arrays import Rows, SomeRows, as_matrix
from stablenorm.call import Backward, Forward, part
from stablenorm.reference.equations import add
from stablenorm.types import Array, Statistics

# Elements that are cleared at a time: the memory of a list of rows is all that this takes.
_CLEARED = 1 << 16


class Counted(NamedTuple):
    """Some rows of a mask: their numbers, which ascend, and which of their elements count (None: all)."""

    numbers: Array
    elements: Any

    def of(self, matrix: Any) -> Any:
        """Return these rows of a matrix, None of None."""
        return select_rows(as_matrix(matrix), self.numbers)

    def forward(self, call: Forward) -> Forward:
        """Return the forward of these rows."""
        return call._replace(x=self.of(call.x), y=self.of(call.y), where=self.elements)

    def backward(self, call: Backward) -> Backward:
        """Return the backward of these rows."""
        return call._replace(
            dy=self.of(call.dy),
            x=self.of(call.x),
            statistics=call.statistics.of_rows(self.numbers),
            out=call.out._replace(dx=self.of(call.out.dx)),
            dsum=self.of(call.dsum),
            dmean=part(call.dmean, self.numbers),
            drstd=part(call.drstd, self.numbers),
            where=self.elements,
        )


def counted(where: Any) -> Counted:
    """Return all rows of which something counts."""
    where = as_matrix(where)[:]
    numbers = np.flatnonzero(where.any(axis=1))
    return Counted(numbers, None if where.shape[1] == 1 else where[numbers])


def whole_and_partial(where: Any) -> list[Counted]:
    """Return the rows of which all counts, and those of which some does: at least one of the two."""
    where = as_matrix(where)[:]
    if where.shape[1] == 1:
        return [counted(where)]
    whole = where.all(axis=1)
    some = np.flatnonzero(where.any(axis=1) & ~whole)
    parts = [Counted(np.flatnonzero(whole), None), Counted(some, where[some])]
    return [each for each in parts if len(each.numbers)] or parts[:1]


def select_rows(matrix: Any, numbers: Array) -> Any:
    """Return rows of a matrix: a view where their numbers follow one another."""
    if matrix is None or len(numbers) == matrix.shape[0]:
        return matrix
    run = len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1
    if run and not isinstance(matrix, Rows):
        return matrix[numbers[0] : numbers[-1] + 1]
    return SomeRows(matrix, numbers)


def fill_others(matrix: Any, parts: list[Counted], source: Any = None) -> None:
    """Write into all other rows what reaches them: 0, or those of `source`, rounded."""
    if matrix is None:
        return
    matrix, source = as_matrix(matrix), as_matrix(source)
    others = np.ones(matrix.shape[0], bool)
    for each in parts:
        others[each.numbers] = False
    numbers, n = np.flatnonzero(others), matrix.shape[1]
    for start in range(0, len(numbers), step := max(1, _CLEARED // n)):
        some = numbers[start : start + step]
        zeros = np.broadcast_to(np.zeros((), matrix.dtype), (len(some), n))
        if source is None:
            select_rows(matrix, some)[:] = zeros
        else:
            add(select_rows(source, some), cast(Any, zeros), select_rows(matrix, some))


def spread(found: list[Statistics], parts: list[Counted], rows: int) -> Statistics:
    """Return the statistics of all rows, given those of parts of them, or of all; 0 for the others."""
    if len(found[0].rstd) == rows:
        return found[0]
    words: list[Any] = []
    for each in zip(*found, strict=True):
        some = next((word for word in each if word is not None), None)
        whole = None if some is None else np.zeros((rows, *some.shape[1:]), some.dtype)
        for rows_, word in zip(parts, each, strict=True):
            if word is not None and whole is not None:
                whole[rows_.numbers] = word
        words.append(whole)
    return Statistics._make(words)


def joined(found: list[Statistics], join: Callable[..., Array] = np.stack) -> Statistics:
    """Return the statistics of all samples, (samples, rows), given those of each; of blocks by another `join`."""
    words: list[Any] = []
    for each in zip(*found, strict=True):
        some = next((word for word in each if word is not None), None)
        if some is None:
            words.append(None)
            continue
        # What some rows need no word for is 0.
        full = [
            np.zeros((len(one.rstd), *some.shape[1:]), some.dtype) if word is None else word
            for one, word in zip(found, each, strict=True)
        ]
        words.append(join(full))
    return Statistics._make(words)
