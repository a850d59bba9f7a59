"""Blocks of rows in, one summary out: what is kept does not grow with the number of rows."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_advice import advice
from stablenorm.analysis._diagnose_conditions import MARKS, names_of
from stablenorm.analysis._diagnose_count import Counts, Instruments, no_counts
from stablenorm.analysis._diagnose_methods import METHODS
from stablenorm.analysis._diagnose_predict import PerRow, limits, room_for
from stablenorm.analysis.families import format_of


@dataclass(frozen=True)
class Row:
    """
    One row, and what would become of it.

    Attributes
    ----------
    index : int
        Among the rows, counted in C order over the axes that are not normalized.
    mean, std : float
        Of the row; NaN if it is not finite.
    condition_y, condition_dx : float
        How many times larger a relative error of x is in y and in dx.
    eps_share : float
        ``eps / (var + eps)``.
    lost : dict of str to float
        Bits of y lost by each method, as in `Diagnosis.methods`.
    marks : tuple of str
        What is special about it, as in `Summary.marks`.
    advice : str
        The same in a sentence.
    """

    index: int
    mean: float
    std: float
    condition_y: float
    condition_dx: float
    eps_share: float
    lost: dict[str, float]
    marks: tuple[str, ...]
    advice: str


class Summary(NamedTuple):
    """
    All rows together.

    Attributes
    ----------
    rows : int
        How many.
    marks : dict of str to int
        For each thing that can be special about a row, how many are.
    lost : dict of str to array
        For each method, how many rows lose 0, 1, ..., p bits, rounded.
    condition_y, condition_dx : array
        How many rows have a condition number in [2^k, 2^(k+1)); below 1 counts as k = 0.
        Constant rows are not counted: theirs is infinite for y.
    largest_condition_y, largest_condition_dx : float
        Of all rows that have a finite one.
    largest_lost : dict of str to float
        For each method, the bits that its worst row loses.
    """

    rows: int
    marks: dict[str, int]
    lost: dict[str, Array]
    condition_y: Array
    condition_dx: Array
    largest_condition_y: float
    largest_condition_dx: float
    largest_lost: dict[str, float]


class Block(NamedTuple):
    """Some rows, and what is found of them."""

    x: Array
    found: PerRow
    rank: Array
    counts: Counts


class Collector:
    """Takes blocks of rows, one after the other."""

    def __init__(
        self, n: int, dtype: Any, eps: float, instruments: Instruments, top: int, keep: int
    ) -> None:
        self._eps, self._instruments = eps, instruments
        self._limits = limits(n, np.dtype(dtype), eps)
        self._top = top
        self._rows = 0
        # For so many rows: those of a file may be too many.
        self._kept = room_for(keep)
        self._worst: list[tuple[float, int, Row]] = []
        self._p = format_of(dtype).p
        self._counts = no_counts(self._p)

    def measure(self, x: Array, first: int) -> Block:
        """Return what is known of rows, (rows, n), of the dtype, from `first` on; any thread may."""
        rows, keeps = len(x), len(self._kept.marks)
        into = self._kept.rows(first, first + rows) if keeps else room_for(rows)
        self._instruments.measure(x, self._limits, self._eps, into)
        found, counts = into.per_row(), no_counts(self._p)
        return Block(x, found, self._instruments.add(found, *counts), counts)

    def add(self, block: Block) -> None:
        """Take the next rows, and what is known of them."""
        for total, part in zip(self._counts[:-1], block.counts[:-1], strict=True):
            np.add(total, part, out=total)
        np.maximum(self._counts.largest, block.counts.largest, out=self._counts.largest)
        if self._top:
            self._rank(block.found, block.x, block.rank)
        self._rows += len(block.x)

    def _rank(self, found: PerRow, x: Array, rank: Array) -> None:
        """Keep the rows of the highest rank, of equals the first ones."""
        least = self._worst[0][0] if len(self._worst) == self._top else -1.0
        rows = np.flatnonzero(rank > least)
        if rows.size > self._top:
            # Of equals, the first ones: stable.
            rows = rows[np.argsort(-rank[rows], kind="stable")[: self._top]]
        for row in sorted(map(int, rows)):
            index = self._rows + row
            entry = (float(rank[row]), -index, self._row(found, x[row], row, index))
            if len(self._worst) < self._top:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heappushpop(self._worst, entry)

    def _row(self, found: PerRow, x: Array, row: int, index: int) -> Row:
        lost = dict(zip(METHODS, map(float, found.lost[:, row]), strict=True))
        names = names_of(int(found.marks[row]))
        mean, std = float(found.mean[row]), float(found.std[row])
        in_y, in_dx, share = found.condition_y[row], found.condition_dx[row], found.eps_share[row]
        said = advice(index, x, mean, std, self._eps, names, lost)
        return Row(index, mean, std, float(in_y), float(in_dx), float(share), lost, names, said)

    def worst(self) -> tuple[Row, ...]:
        """Return the worst rows, the worst first."""
        return tuple(row for _, _, row in sorted(self._worst, key=lambda e: e[:2], reverse=True))

    def summary(self) -> Summary:
        """Return what was counted."""
        of_marks, of_bits, powers, largest = self._counts
        return Summary(
            self._rows,
            dict(zip((mark.name for mark in MARKS), map(int, of_marks), strict=True)),
            dict(zip(METHODS, of_bits, strict=True)),
            powers[0],
            powers[1],
            float(largest[0]),
            float(largest[1]),
            dict(zip(METHODS, map(float, largest[2:]), strict=True)),
        )

    def per_row(self) -> PerRow:
        """Return the numbers of the rows that were to be kept."""
        return self._kept.per_row()
