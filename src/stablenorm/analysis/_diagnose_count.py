"""How rows are counted, and ranked; and what a collector of them works with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_conditions import BIT, MARKS
from stablenorm.analysis._diagnose_methods import METHODS
from stablenorm.analysis._diagnose_predict import PerRow, Room, measured_rows
from stablenorm.analysis._diagnose_sweep import sweep_rows

# Powers of two that condition numbers are counted by; beyond is counted with the last: float64 of
# 2**1000 and a spread of 1 is no rarer than that.
_POWERS = 64

# Rank of what has no y at all, above any number of bits.
_NO_RESULT = {"undefined": 2048.0, "not finite": 4096.0}


class Counts(NamedTuple):
    """
    What is counted of all rows.

    How many have each mark; lose so many bits by each method; have y and dx of a condition number
    of such a power of 2. Then the largest condition numbers, and the largest loss by each method.
    """

    of_marks: Array
    of_bits: Array
    powers: Array
    largest: Array


class Instruments(NamedTuple):
    """
    What a collector works with: these functions, or fast copies.

    `measure` takes rows, the `limits` for them, and eps, and writes what is known of them into the
    room that it is given; `add` adds that to the fields of `Counts`, and returns the ranks of the
    rows.
    """

    measure: Callable[[Array, Array, float, Room], None]
    add: Callable[..., Array]


def no_counts(p: int) -> Counts:
    """Return the counts of no rows, for a dtype of `p` bits."""
    return Counts(
        np.zeros(len(MARKS), np.int64),
        np.zeros((len(METHODS), p + 1), np.int64),
        np.zeros((2, _POWERS), np.int64),
        np.zeros(2 + len(METHODS)),
    )


def measure_rows(x: Array, _limits: Array, eps: float, into: Room) -> None:
    """Write what is known of the rows of `x`."""
    write_rows(into, slice(None), measured_rows(sweep_rows(x), x, eps))


def write_rows(into: Room, rows: Any, found: PerRow) -> None:
    """Write what is known of some rows."""
    for room, one in zip(into.per_row(), found, strict=True):
        room[..., rows] = one


def count_rows(
    found: PerRow, of_marks: Array, of_bits: Array, powers: Array, largest: Array
) -> Array:
    """Add rows to the counts; return their ranks."""
    for place in range(len(MARKS)):
        of_marks[place] += np.count_nonzero(found.marks & np.uint16(1 << place))
    unknown = np.isnan(found.lost[0])
    for place, known in enumerate(found.lost[:, ~unknown]):
        if known.size:
            # To the nearest, and faster than by rint.
            counts = np.bincount((known + 0.5).astype(np.intp), minlength=of_bits.shape[1])
            of_bits[place] += counts
            largest[2 + place] = max(largest[2 + place], float(known.max()))
    for place, condition in enumerate((found.condition_y, found.condition_dx)):
        # Constant rows, of which nothing else is to be said, have none.
        known = condition[np.isfinite(condition)]
        if known.size:
            largest[place] = max(largest[place], float(known.max()))
            # The exponent's bits; below 1 counts as 1. Four times as fast as frexp.
            power = (np.maximum(known, 1.0).view(np.int64) >> 52) - 1023
            powers[place] += np.bincount(np.minimum(power, _POWERS - 1), minlength=_POWERS)
    return _ranked(found)


def _ranked(found: PerRow) -> Array:
    """Rank rows: without a result, then by bits that a two-pass loses, then by kappa."""
    # Less than a bit for any condition number, infinity too, so bits come first.
    rank: Array = np.rint(found.lost[0].astype(np.float64)) + (
        1.0 - 1.0 / np.maximum(found.condition_y, 1.0)
    )
    for name, above in _NO_RESULT.items():
        rank[(found.marks & np.uint16(BIT[name])) != 0] = above
    return rank


PLAIN = Instruments(measure_rows, count_rows)
