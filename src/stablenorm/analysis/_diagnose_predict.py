"""What is known of each row, from the numbers of a sweep: `PerRow`, and its plain NumPy."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from stablenorm._recycling import empty
from stablenorm._types import Array
from stablenorm.analysis._diagnose_conditions import conditions, marks
from stablenorm.analysis._diagnose_methods import METHODS, lost_bits
from stablenorm.analysis._diagnose_sweep import HUGE, TINY, described, working_dtype
from stablenorm.analysis.families import format_of

# Of fewer elements, one has most of the variance for no special reason.
_FEW = 8


class PerRow(NamedTuple):
    """
    Numbers of every row, each an array of length rows.

    Attributes
    ----------
    mean, std, condition_y, condition_dx, eps_share : array
        As in `Row`.
    lost : array
        Bits lost, (methods, rows), in the order of `Diagnosis.methods`.
    marks : array
        uint16: bit k is set for the k-th of `Summary.marks`.
    """

    mean: Array
    std: Array
    condition_y: Array
    condition_dx: Array
    eps_share: Array
    lost: Array
    marks: Array


class Room(NamedTuple):
    """
    What is known of rows as the instruments write it, each in the order of `PerRow`.

    `numbers` is (5, rows) float64, `lost` (methods, rows) float32, `marks` (rows,) uint16.
    """

    numbers: Array
    lost: Array
    marks: Array

    def rows(self, start: int, stop: int) -> Room:
        """Return the room of some of the rows."""
        return Room._make(each[..., start:stop] for each in self)

    def per_row(self) -> PerRow:
        """Return the same by name."""
        return PerRow._make([*self.numbers, self.lost, self.marks])


def room_for(rows: int) -> Room:
    """Return room for so many rows, with anything in it."""
    numbers = len(PerRow._fields) - len(Room._fields[1:])
    return Room(
        empty((numbers, rows), np.dtype(np.float64)),
        empty((len(METHODS), rows), np.dtype(np.float32)),
        empty((rows,), np.dtype(np.uint16)),
    )


def measured_rows(numbers: Any, x: Array, eps: float) -> PerRow:
    """Return what is known of the rows of `x`, of which a sweep has returned `numbers`."""
    sweep, n = described(numbers, x), x.shape[1]
    return PerRow(
        sweep.mean,
        sweep.std,
        *conditions(sweep, n, eps),
        lost_bits(sweep, n, x.dtype, eps),
        marks(sweep, n, x.dtype, eps),
    )


@functools.lru_cache(64)
def limits(n: int, dtype: Any, eps: float) -> Array:
    """Return what a compiled `measured_rows` has to know, in the order that it takes."""
    form, working = format_of(dtype), format_of(working_dtype(dtype))
    half = format_of(np.float16).largest
    with np.errstate(over="ignore", under="ignore"):
        half_eps = float(np.float16(np.float32(eps)))
    return np.array(
        [
            n,
            eps,
            form.p,
            2.0**form.emin,
            2.0**-form.p,
            # Below, nothing overflows, and no deviation does.
            min(0.49 * working.largest, HUGE),
            np.sqrt(eps),
            np.sqrt(n / 2) if n >= _FEW else np.inf,
            np.sqrt(2.0**working.emin),
            half,
            np.sqrt(half),
            half_eps,
            TINY,
        ]
    )
