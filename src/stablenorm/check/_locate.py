"""Where a gradient is wrong: an element, a row, a column, everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stablenorm._types import Array
from stablenorm.check._compare import Comparer, Comparison

# Of so many parts chosen at random, all are wrong: then most are.
_PARTS = 3

Test = Callable[[Array, Array], bool]


def find_pattern(comparer: Comparer, comparisons: list[Comparison]) -> str:
    """Say where one argument differs; empty if nothing does."""
    failing = [c.where for c in comparisons if c.place is not None and c.z > 1]
    if not any(c.z > 1 for c in comparisons):
        return ""
    shape = comparer.task.array.shape
    n = shape[-1] if shape else 1
    elements = len(comparer.task.where)
    if elements == comparer.task.array.size:
        wrong = np.zeros(elements, dtype=bool)
        wrong[failing] = True
        return _from_map(wrong.reshape(-1, n), shape)
    # Nine in ten: a wrong factor leaves the few elements that are zero as they are.
    if len(failing) >= 0.9 * elements:
        return "everywhere"
    known = divmod(failing[0], n) if failing else None

    def differs(rows: Array, columns: Array) -> bool:
        where = (rows[:, None] * n + columns).reshape(-1)
        return comparer.probe(where, kinks=False).z > 1

    return _search(differs, shape, known, comparer.rng)


def _from_map(wrong: Array, shape: tuple[int, ...]) -> str:
    """Name the pattern in a (rows, n) map of what is wrong."""
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    count, total = int(wrong.sum()), wrong.size
    if count == 1:
        return _element(int(rows[0]), int(columns[0]), shape)
    if count >= 0.9 * total:
        return "everywhere"
    # Half of it: the rest may be too small to differ.
    if len(rows) == 1 < len(wrong) and 2 * count >= wrong.shape[1]:
        return _row(int(rows[0]), shape)
    if len(columns) == 1 < wrong.shape[1] and 2 * count >= len(wrong):
        return f"column {int(columns[0])}"
    if len(rows) < len(wrong) and 2 * count >= len(rows) * wrong.shape[1] and len(rows) <= 4:
        return "rows " + ", ".join(str(int(row)) for row in rows)
    if len(columns) < wrong.shape[1] and 2 * count >= len(columns) * len(wrong):
        return "columns " + _few(columns)
    return f"{count} of {total} elements"


def _few(numbers: Array) -> str:
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    return ", ".join(str(int(number)) for number in numbers[:4]) + more


def _element(row: int, column: int, shape: tuple[int, ...]) -> str:
    if not shape:
        return "element"
    leading = [int(i) for i in np.unravel_index(row, shape[:-1])] if len(shape) > 1 else []
    return f"element {(*leading, column)}"


def _row(row: int, shape: tuple[int, ...]) -> str:
    if row == int(np.prod(shape[:-1])) - 1:
        return "last row"
    if len(shape) <= 2:
        return f"row {row}"
    return f"row ({', '.join(str(int(i)) for i in np.unravel_index(row, shape[:-1]))})"


def _search(
    differs: Test, shape: tuple[int, ...], known: tuple[int, int] | None, rng: np.random.Generator
) -> str:
    """Find the wrong rows, then the wrong columns in them, halving what is left."""
    n = shape[-1]
    rows, columns = np.arange(int(np.prod(shape)) // n), np.arange(n)
    row, row_others = _narrow(
        lambda part: differs(part, columns), rows, None if known is None else known[0], rng
    )
    if row is None and not row_others:
        return "not located: too small for a part"
    inside = rows if row is None else np.array([row])
    hint = known[1] if known is not None and row == known[0] else None
    column, column_others = _narrow(lambda part: differs(inside, part), columns, hint, rng)
    if row is None:
        if column is None:
            return "everywhere"
        return f"column {column}" + (" and others" if column_others else "")
    if column is None:
        name = _row(row, shape)
    else:
        name = _element(row, column, shape)
        if column_others and len(rows) > 1:
            name += " and others in its row"
    return name + (" and others" if row_others or (column_others and len(rows) == 1) else "")


def _narrow(
    wrong: Callable[[Array], bool], parts: Array, known: int | None, rng: np.random.Generator
) -> tuple[int | None, bool]:
    """
    Return one wrong part, or None where most are, and whether there are others.

    (None, False): none was found.
    """
    if len(parts) == 1:
        return int(parts[0]), False
    others: Sequence[int] = [int(p) for p in rng.permutation(parts) if p != known][:_PARTS]
    failing = [part for part in others if wrong(np.array([part]))]
    if len(failing) == len(others) and (known is not None or len(parts) > 2):
        return None, True
    one = known if known is not None else failing[0] if failing else _halve(wrong, parts)
    if one is None:
        return None, False
    return one, bool(set(failing) - {one}) or wrong(parts[parts != one])


def _halve(wrong: Callable[[Array], bool], parts: Array) -> int | None:
    """Find a wrong part by halving: one question for each bit of its number."""
    if not wrong(parts):
        return None
    while len(parts) > 1:
        first, second = np.array_split(parts, 2)
        # If not in the first half, then in the second: asked at the end.
        parts = first if wrong(first) else second
    return int(parts[0]) if wrong(parts) else None
