"""Blocks of rows in, one summary out: what is kept does not grow with the number of rows."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis._diagnose_advice import advice
from stablenorm.analysis._diagnose_conditions import BIT, MARKS, conditions, marks, names_of
from stablenorm.analysis._diagnose_methods import METHODS, lost_bits
from stablenorm.analysis._diagnose_sweep import described
from stablenorm.analysis.families import format_of

# Powers of two that condition numbers are counted by; beyond is counted with the last: float64 of
# 2**1000 and a spread of 1 is no rarer than that.
_POWERS = 64

# Rank of what has no y at all, above any number of bits.
_NO_RESULT = {"not finite": 4096.0, "undefined": 2048.0}


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


class Collector:
    """Takes blocks of rows, one after the other."""

    def __init__(
        self,
        n: int,
        dtype: Any,
        eps: float,
        sweep: Callable[[Array], Array],
        top: int,
        keep_rows: bool,
    ) -> None:
        self._n, self._dtype, self._eps, self._sweep = n, np.dtype(dtype), eps, sweep
        self._top, self._keep_rows = top, keep_rows
        self._rows = 0
        self._kept: list[PerRow] = []
        self._worst: list[tuple[float, int, Row]] = []
        self._marks = np.zeros(len(MARKS), np.int64)
        self._lost = np.zeros((len(METHODS), format_of(dtype).p + 1), np.int64)
        self._powers = np.zeros((2, _POWERS), np.int64)
        self._largest = [0.0, 0.0]
        self._largest_lost = np.zeros(len(METHODS))

    def measure(self, x: Array) -> PerRow:
        """Return what is known of rows, (rows, n), of the dtype; any thread may."""
        sweep = described(self._sweep(x), x)
        return PerRow(
            sweep.mean,
            sweep.std,
            *conditions(sweep, self._n, self._eps),
            lost_bits(sweep, self._n, self._dtype, self._eps),
            marks(sweep, self._n, self._dtype, self._eps),
        )

    def add(self, found: PerRow, x: Array) -> None:
        """Take the next rows, and what is known of them."""
        self._count(found)
        self._rank(found, x)
        if self._keep_rows:
            self._kept.append(found)
        self._rows += len(x)

    def _count(self, found: PerRow) -> None:
        for place in range(len(MARKS)):
            self._marks[place] += np.count_nonzero(found.marks & np.uint16(1 << place))
        unknown = np.isnan(found.lost[0])
        known_lost = found.lost[:, ~unknown] if unknown.any() else found.lost
        for place, known in enumerate(known_lost):
            if known.size:
                # To the nearest, and faster than by rint.
                counts = np.bincount((known + 0.5).astype(np.intp), minlength=len(self._lost[0]))
                self._lost[place] += counts
                self._largest_lost[place] = max(self._largest_lost[place], float(known.max()))
        for place, condition in enumerate((found.condition_y, found.condition_dx)):
            # Constant rows, of which nothing else is to be said, have none.
            finite = np.isfinite(condition)
            known = condition if finite.all() else condition[finite]
            if known.size:
                self._largest[place] = max(self._largest[place], float(known.max()))
                # The exponent's bits; below 1 counts as 1. Four times as fast as frexp.
                power = (np.maximum(known, 1.0).view(np.int64) >> 52) - 1023
                counted = np.bincount(np.minimum(power, _POWERS - 1), minlength=_POWERS)
                self._powers[place] += counted

    def _rank(self, found: PerRow, x: Array) -> None:
        """Keep the worst rows: without a result, then by bits that a two-pass loses, then by kappa."""
        if not self._top:
            return
        # Less than a bit for any condition number, infinity too, so bits come first.
        rank = np.rint(found.lost[0]) + (1.0 - 1.0 / np.maximum(found.condition_y, 1.0))
        for name, above in _NO_RESULT.items():
            without = (found.marks & np.uint16(BIT[name])) != 0
            if without.any():
                rank[without] = above
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
        return Summary(
            self._rows,
            dict(zip((mark.name for mark in MARKS), map(int, self._marks), strict=True)),
            dict(zip(METHODS, self._lost, strict=True)),
            self._powers[0],
            self._powers[1],
            self._largest[0],
            self._largest[1],
            dict(zip(METHODS, map(float, self._largest_lost), strict=True)),
        )

    def per_row(self) -> PerRow | None:
        """Return the numbers of every row, if they were to be kept."""
        if not self._keep_rows:
            return None
        if not self._kept:
            none = np.empty(0)
            lost = np.empty((len(METHODS), 0), np.float32)
            return PerRow(none, none, none, none, none, lost, np.empty(0, np.uint16))
        return PerRow._make(
            np.concatenate(parts, axis=-1) for parts in zip(*self._kept, strict=True)
        )
