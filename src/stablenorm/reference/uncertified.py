"""
The lowest rung: integers finish the rows and columns that float64 and pairs cannot certify.

With ``rounding="nearest"``, kernels send rows and columns here whose bounds contain a midpoint, ties above all; the NumPy
backend sends all. With any rounding, both send the rows that are out of the range of pairs.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from stablenorm.call import Backward, Forward
from stablenorm.control import with_default_control
from stablenorm.formats import format_of
from stablenorm.reference import exact
from stablenorm.reference.blocks import BLOCK
from stablenorm.reference.doubledouble import PARTIAL, as_partial, merged, rounded
from stablenorm.reference.equations import FLOAT64
from stablenorm.reference.exact import Root, Row, integers_of, nearest, root_of
from stablenorm.types import Array, Statistics


@np.errstate(all="ignore")
def finish_forward(call: Forward, rows: Array, stats: Statistics | None) -> None:
    """Write y of these rows, of any sample, and the statistics of rows out of range, whose rstd_lo is NaN."""
    out: Any = None if stats is None else stats.out_of_range
    for i in rows.tolist():
        columns, row, x = _row_of(call, i, call.x)
        if call.y is not None:
            gamma, beta = _parameters(call, i, columns)
            call.y[i] = 0
            call.y[i, columns] = _affine(row, gamma, beta, call.y.dtype)
        if stats is None or not out[i]:
            continue
        mean, stats.rstd[i] = (x[0], np.inf) if row is None else exact.statistics(row)
        for word, value in ((stats.mean, mean), (stats.mean_lo, 0.0), (stats.mean_tail, 0.0)):
            if word is not None:
                word[i] = value


@np.errstate(all="ignore")
def finish_sums(call: Backward, columns: Array, unsummed: Array, partial: Any) -> None:
    """
    Write the uncertified `columns` of dgamma and dbeta, two rows of bool.

    With `unsummed` rows, write all columns: `partial` are the sums over all rows but these.
    """
    for k, total in enumerate((call.dgamma, call.dbeta)):
        if total is None:
            continue
        is_partial, uncertified = total.dtype == PARTIAL, columns[k]
        if unsummed.size:
            part = _with_rows(call, k, unsummed, partial[k])
            if is_partial:
                total[...] = part
                continue
            total[...], uncertified = rounded(part, total.dtype)
            # A sum of 0 may lack terms that underflowed.
            uncertified |= part["high"] == 0
        if is_partial:
            # The caller merges these, finds them uncertified, and asks for exact sums.
            total["error"][uncertified] = np.inf
        else:
            total[...] = decided(total, exact_sums(call, k, np.flatnonzero(uncertified)))


def _with_rows(call: Backward, which: int, rows: Array, partial: Array) -> Array:
    """Add the terms of some rows to partial sums, dgamma (0) or dbeta (1)."""
    call = call._replace(norm=call.norm._replace(gamma_offset=0.0))
    for i in rows.tolist():
        columns, row, dy = _row_of(call, i, call.dy)
        high, low = np.zeros((2, call.x.shape[1]))
        if which == 1:
            high[columns] = dy
        else:
            # dy xhat in two words: y with dy in the place of gamma, then what rounding took from it.
            high[columns] = first = _affine(row, dy, np.zeros_like(dy), FLOAT64)
            low[columns] = _affine(row, dy, -first, FLOAT64)
        error = np.abs(high) * 2.0**-104 + 2.0**-1070 if which == 0 else 0.0
        partial = merged(partial, as_partial(high, low, error))
    return partial


@np.errstate(all="ignore")
def write_dx(call: Backward, rows: Array) -> None:
    """Write dx of some rows, of any sample."""
    for i in rows.tolist():
        columns, row, dy = _row_of(call, i, call.dy)
        gamma, _ = _parameters(call, i, columns)
        dx = np.zeros(call.x.shape[1]) if call.dsum is None else call.dsum[i].astype(np.float64)
        extra = (0.0 if summand is None else summand[i] for summand in (call.dmean, call.drstd))
        added = [split(summand) for summand in (dx[columns], *extra)]
        dx = dx.astype(call.dx.dtype)
        if row is not None and np.isfinite(gamma).all() and np.isfinite(dy).all():
            finite, infinite = zip(*added, strict=True)
            result = exact.dx_row(dy, row, gamma, dx.dtype, finite)
            extended = infinite[0] + infinite[1]
            if infinite[2]:
                extended = extended - infinite[2] * exact.signs(row)
            dx[columns] = np.where(extended == 0, result, extended)
        else:
            dx[columns] = np.nan
        call.dx[i] = dx


def exact_sums(call: Backward, which: int, columns: Array) -> Iterator["tuple[int, ExactSum]"]:
    """Yield columns of dgamma (0) or dbeta (1), and their exact sums."""
    dy, x = call[:2]
    known: dict[int, Any] = {}
    lost = _lost_rows(call) if which == 0 and columns.size else np.zeros(len(x), bool)
    step = max(1, BLOCK // max(len(x), 1))
    for block in (columns[start : start + step] for start in range(0, len(columns), step)):
        counted = True if call.where is None else call.where[:, block]
        values = np.where(lost[:, None], np.nan, dy[:, block].astype(np.float64))
        values = np.where(counted, values, 0.0)
        others = np.where(counted, x[:, block].astype(np.float64), 0.0)
        are_nan: Any = np.isnan(values).any(axis=0).tolist()
        pairs = zip(block.tolist(), values.T, others.T, are_nan, strict=True)
        for j, column, other, is_nan in pairs:
            if is_nan:
                yield j, ExactSum(0, {}, np.nan)
                continue
            if which == 1:
                yield j, ExactSum.of_numbers(column)
                continue
            # Rows with infinity decide alone.
            infinite = np.isinf(column)
            rows = np.flatnonzero(infinite if infinite.any() else column).tolist()
            for i in rows:
                if i not in known:
                    # For many rows, integers would fill the memory.
                    known[i] = _row_of(call, i, keep=False)[1]
            yield j, ExactSum.of_products(column[rows], other[rows], [known[i] for i in rows])


# ---- one row ----


def _row_of(call: Any, i: int, *arrays: Array, keep: bool = True) -> tuple[Any, ...]:
    """Return the columns of a row that count, the row, None if it has no norm, and elements of arrays in float64."""
    counted = slice(None) if call.where is None else call.where[i]
    x, *others = (array[i, counted].astype(np.float64) for array in (call.x, *arrays))
    row = exact.Row(x, call.norm, keep) if np.isfinite(x).all() else None
    # A row without variance has no norm if eps is 0.
    return counted, row if row and row.radicand else None, *others


def _lost_rows(call: Backward) -> Array:
    """Tell which rows have no norm. An infinite rstd does not tell: it may have left the range of float64."""
    lost: Array = ~np.isfinite(call.statistics.rstd)
    for i in np.flatnonzero(lost).tolist():
        lost[i] = _row_of(call, i)[1] is None
    return lost


def _parameters(call: Any, i: int, counted: Any) -> list[Array]:
    """Return gamma and beta of a row."""
    n, values = call.x.shape[1], []
    for parameter, default in zip(call.norm[:2], (1.0, 0.0), strict=True):
        rows = np.full((1, n), default) if parameter is None else parameter.reshape(-1, n)
        # Each sample has its own.
        values.append(rows[i * len(rows) // len(call.x), counted].astype(np.float64))
    return values


def _affine(row: exact.Row | None, gamma: Array, beta: Array, dtype: np.dtype[Any]) -> Array:
    """Return y of a row; infinite gamma and beta, and NaN, follow the extended reals."""
    if row is None:
        return np.full(len(gamma), np.nan, dtype)
    (scale, far), (shift, away) = split(gamma), split(beta)
    result = exact.y_row(row, scale, shift, dtype)
    if far.any() or away.any():
        # The sign of xhat decides that of an infinite product; 0 * inf is NaN, of which there is one.
        extended = np.where(far == 0, 0.0, far * exact.signs(row)) + away
        odd = (far != 0) | (away != 0)
        result[odd] = np.where(np.isnan(extended), np.nan, extended)[odd]
    return result


def split(values: Any) -> tuple[Array, Array]:
    """Return the finite values, with 0 for the others, and the infinities and NaN, with 0 for the finite ones."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0.0), np.where(finite, 0.0, values)


# ---- sums over rows ----


@dataclasses.dataclass(frozen=True, slots=True)
class ExactSum:
    """
    A sum over rows: ``2**unit`` times the sum of each factor over the square root of its radicand.

    `terms` maps radicands to factors. `extended` is 0, or what infinities and NaN add up to. Sums over different rows can
    be added.
    """

    unit: int
    terms: dict[int, int]
    extended: float = 0.0

    @classmethod
    def of_numbers(cls, values: Array) -> Self:
        """Return the sum of float64 numbers, dbeta."""
        finite, extended = split(values)
        integers, unit = integers_of(finite)
        return cls(unit, {1: sum(integers)}, float(extended.sum()))

    @classmethod
    def of_products(cls, dy: Array, x: Array, rows: Sequence[Row]) -> Self:
        """Return dgamma of one column of some rows."""
        finite, odd = split(dy)
        (factors, exponent), (values, scale) = integers_of(finite), integers_of(x)
        shifts = [exponent + row.shift for row in rows]
        unit, extended = min(shifts, default=0), 0.0
        # Rows of the same numbers have the same root.
        terms: dict[int, int] = {}
        every = zip(factors, values, rows, shifts, odd.tolist(), strict=True)
        for factor, value, row, shift, infinite in every:
            places = scale - row.scale
            integer = value << places if places >= 0 else value >> -places
            centered = row.n * integer - row.total
            if infinite:
                extended += infinite * ((centered > 0) - (centered < 0))
            elif term := factor * centered << shift - unit:
                terms[row.radicand] = terms.get(row.radicand, 0) + term
        return cls(unit, terms, extended)

    def __add__(self, other: "ExactSum") -> "ExactSum":
        unit, terms = min(self.unit, other.unit), dict[int, int]()
        for part in (self, other):
            for radicand, factor in part.terms.items():
                terms[radicand] = terms.get(radicand, 0) + (factor << part.unit - unit)
        return ExactSum(unit, terms, self.extended + other.extended)

    def rounded(self, dtype: np.dtype[Any], roots: dict[int, Root]) -> float:
        """Return the sum rounded to `dtype`; `roots` collects roots that other sums may share."""
        if self.extended:
            # There is one NaN.
            return math.nan if math.isnan(self.extended) else self.extended
        terms = []
        for radicand, factor in self.terms.items():
            if factor:
                roots[radicand] = root = roots.get(radicand) or root_of(radicand)
                terms.append((factor, root))
        return nearest(terms, self.unit, format_of(dtype))


NOTHING: Any = ExactSum(0, {})


def decided(values: Array, exact: Iterable[tuple[Any, ExactSum]]) -> Array:
    """Return rounded sums, but at some places exact ones, rounded."""
    result, roots = values.copy(), dict[int, Root]()
    for place, total in exact:
        result[place] = total.rounded(values.dtype, roots)
    return result


@with_default_control
def with_exact(values: Array, exact: Array) -> Array:
    """Return rounded sums, but those that have an exact sum, not 0, by that."""
    return decided(values, ((place, exact[place]) for place in zip(*exact.nonzero(), strict=True)))
