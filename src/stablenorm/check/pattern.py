"""Where a gradient is wrong: an element, a row, a column, or several places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stablenorm.types import Array


def name_pattern(differs: Callable[[Array], bool], shape: tuple[int, ...]) -> str:
    """
    Find the wrong element, row or column by halving: some 2 log2(size) questions.

    `differs` tells of elements, given by flat indices, whether any of them is wrong.
    """
    n = shape[-1] if shape else 1
    size = int(np.prod(shape))
    rows, columns = np.arange(size // n), np.arange(n)

    def wrong(some_rows: Array, some_columns: Array) -> bool:
        where = (some_rows[:, None] * n + some_columns).reshape(-1)
        return bool(where.size) and differs(where)

    row = _halve(lambda part: wrong(part, columns), rows)
    if row is None:
        return "not located: too small for a part"
    if not wrong(rows[rows != row], columns):
        inside = np.array([row])
        column = _halve(lambda part: wrong(inside, part), columns)
        if column is None or (n > 1 and wrong(inside, columns[columns != column])):
            return _row(row, shape)
        place = np.unravel_index(row * n + column, shape) if shape else ()
        return f"element {tuple(int(i) for i in place)}"
    column = _halve(lambda part: wrong(rows, part), columns)
    if column is None or wrong(rows, columns[columns != column]):
        return "several places"
    return f"column {column}"


def _halve(wrong: Callable[[Array], bool], parts: Array) -> int | None:
    """Find a wrong part by halving: one question for each bit of its number."""
    while len(parts) > 1:
        first, second = np.array_split(parts, 2)
        # If not in the first half, then in the second: asked at the end.
        parts = first if wrong(first) else second
    return int(parts[0]) if wrong(parts) else None


def _row(row: int, shape: tuple[int, ...]) -> str:
    if row == int(np.prod(shape[:-1])) - 1:
        return "last row"
    if len(shape) <= 2:
        return f"row {row}"
    return f"row ({', '.join(str(int(i)) for i in np.unravel_index(row, shape[:-1]))})"
