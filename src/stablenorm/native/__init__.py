"""
The CPU kernels in C++: `reference.forward` and `reference.backward`, compiled ahead of time.

They check nothing: that is done above. Rows are dealt out in tiles that depend on the shape alone, so that no bit
depends on the number of threads; all additions are written out, so that none depends on the processor.
rows.h has the equations of float16, bfloat16 and float32, pair_rows.h those of calls of which something is
float64 and of rounding="nearest". Rows and columns that these leave open go to the reference.

STABLENORM_INSTRUCTIONS names the instruction set to use, one of `INSTRUCTIONS`; by default the best.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.arrays import Rows, SomeRows, as_matrix
from stablenorm.reference.doubledouble import two_sum
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.threads import get_num_threads
from stablenorm.types import (
    NOTHING_EXTRA,
    Array,
    Extra,
    Gradients,
    Norm,
    Residual,
    Statistics,
    any_float64,
)

try:
    from stablenorm.native import _core
except ImportError as error:
    msg = (
        f"stablenorm's kernels in C++ are not built ({error}); install a wheel, or a C++17 compiler and "
        "then stablenorm"
    )
    raise ImportError(msg) from error

# Those that this processor has kernels for, the best first.
INSTRUCTIONS: list[str] = _core.instructions()

# The mark of a row that pairs of float64 are not for; of one of which merely an element is undecided, it is another.
_EXTREME = 1
# What is beyond these goes to the reference: no product of three numbers, nor its last 106 bits, leaves the
# range of float64.
_LARGEST, _SMALLEST = 2.0**200, 2.0**-200

# A sample of more elements is worth all threads, unless several wait for each.
_LARGE, _SEVERAL = 1 << 18, 4

# As NamedTuples make themselves, without the keyword handling, which takes twice as long.
_new = tuple.__new__


def use(instructions: str) -> None:
    """Use the kernels of an instruction set."""
    if instructions not in INSTRUCTIONS:
        msg = f"STABLENORM_INSTRUCTIONS must be one of {', '.join(INSTRUCTIONS)}, got {instructions!r}"
        raise ValueError(msg)
    _core.use(instructions)


if not INSTRUCTIONS:
    msg = "stablenorm's kernels in C++ need a processor with AVX2, FMA and F16C, which this one has not"
    raise ImportError(msg)
if "STABLENORM_INSTRUCTIONS" in os.environ:
    use(os.environ["STABLENORM_INSTRUCTIONS"])


# ---- forward ----


def forward(x: Any, norm: Norm, y: Any, residual: Residual | None = None) -> Statistics:
    """Do what `reference.forward` does."""
    return _forward(x, norm, y, residual)  # type: ignore[no-any-return]


def normalize(x: Any, norm: Norm, y: Any, residual: Residual | None = None) -> None:
    """Do what `forward` does, but for the statistics."""
    _forward(x, norm, y, residual, keep=False)


def forward_samples(
    x: Array, norm: Norm, y: Array, residual: Residual | None, keep: bool
) -> Statistics | None:
    """
    Do `forward` of (samples, rows, n), each with its gamma and beta; return the statistics of all.

    None if some have to be, or had better be, done one by one.
    """
    wide = norm.rounding == "nearest" or any_float64(x, *norm[:2])
    # Of wide rows that are left open, x is needed once more.
    if _had_better_be_alone(x) or (wide and _may_share(x, y)):
        return None
    found: Statistics | None = _forward(x, norm, y, residual, keep, len(x))
    return found


def _forward(
    x: Any, norm: Norm, y: Any, residual: Residual | None, keep: bool = True, samples: int = 0
) -> Any:
    gamma, beta, eps, kind, gamma_offset, rounding = norm
    given, source, plus = x, None, None
    if residual is not None:
        (plus, x), source = residual, x
    layer, nearest = kind == "layer", rounding == "nearest"
    wide = nearest or any_float64(x, gamma, beta)
    if nearest and _may_share(x, y):
        # Rows that are undecided are computed once more.
        x = np.array(as_matrix(x)[:])
    shape = x.shape[: 2 if samples else 1]
    if not samples and type(x) is np.ndarray:
        shape = (x.size // x.shape[-1],)
    mean = rest = rstd = rstd_lo = tail = marks = spread = None
    if wide or keep:
        rstd = np.empty(shape)
        if layer:
            mean, rest = np.empty(shape), np.empty(shape)
    if wide:
        rstd_lo, spread, marks = np.empty(shape), np.empty(shape), np.empty(shape, np.uint8)
        tail = np.empty(shape) if layer else None
    if not _core.forward(
        _seen(x), _seen(y), _seen(source), _seen(plus), _flat(gamma, samples), _flat(beta, samples),
        eps, gamma_offset, not layer, nearest, wide, _to_clear(y),
        mean, rest, rstd, rstd_lo, tail, marks, spread, get_num_threads(), samples,
    ):  # fmt: skip
        return None if samples else reference.forward(given, norm, y, residual)
    if type(y) is SomeRows and len(y.numbers):
        y.others_done = True
    kept = _new(Statistics, (mean, rest, rstd, rstd_lo, tail, None, spread if nearest else None))
    # Counting takes a quarter of the time of any().
    if wide and np.count_nonzero(marks):
        if samples:
            return None
        kept = _forward_marked(x, norm, y, kept, np.flatnonzero(marks), marks)
    # Dropped where no row needs it, as in the reference.
    return kept._replace(mean_tail=None) if layer and wide and not np.count_nonzero(tail) else kept


def _forward_marked(
    x: Any, norm: Norm, y: Any, kept: Statistics, rows: Array, marks: Any
) -> Statistics:
    """Write y of the marked rows; return the statistics of all."""
    some: Statistics = reference.forward(_select(x, rows), norm, _select(y, rows))
    # Of rows that are merely undecided, the statistics are as good as these.
    extreme = marks[rows] == _EXTREME
    if not extreme.any():
        return kept
    rows, some = rows[extreme], some.of_rows(extreme)
    for row, word in zip(kept[:5], some[:5], strict=True):
        if row is not None:
            row[rows] = 0.0 if word is None else word
    exponent = None
    if some.exponent is not None:
        exponent = np.zeros((len(marks), 2), np.int16)
        exponent[rows] = some.exponent
    spread = np.zeros(len(marks)) if kept.spread is None else kept.spread
    # By this the backward knows them: with eps, rstd need not tell that x is tiny.
    spread[rows] = np.nan
    return kept._replace(exponent=exponent, spread=spread)


# ---- backward ----


def backward(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients,
    extra: Extra = NOTHING_EXTRA,
) -> None:  # fmt: skip
    """Do what `reference.backward` does."""
    wide = statistics.rstd_lo is not None
    if norm.rounding == "nearest" and out.dx is not None and _may_share(dy, out.dx):
        # Rows that are undecided are computed once more.
        dy = np.array(as_matrix(dy)[:])
    marks = _marks_of(statistics) if wide else None
    # What a forward kept of which nothing was float64 is too little for double-double.
    possible = _is_for_kernels(extra, out) and (wide or dy.dtype.type is not np.float64)
    left = _backward(dy, x, norm, statistics, out, extra, marks) if possible else None
    if left is None:
        reference.backward(dy, x, norm, statistics, out, extra)
    elif marks is not None and np.count_nonzero(marks):
        _backward_marked(dy, x, norm, statistics, out, extra, marks, left)
    elif left.undecided is not None:
        _decide(dy, x, norm, out, extra, left.undecided)


def backward_samples(
    dy: Array, x: Array, norm: Norm, statistics: Statistics, out: Gradients, extra: Extra
) -> bool:
    """Do `backward` of (samples, rows, n), each by itself; tell whether that could be done."""
    wide = statistics.rstd_lo is not None
    again = out.dx is not None and _may_share(dy, out.dx) if wide else any_float64(dy)
    if again or _had_better_be_alone(x) or not _is_for_kernels(extra, out):
        return False
    marks = _marks_of(statistics) if wide else None
    left = _backward(dy, x, norm, statistics, out, extra, marks, len(x))
    if left is None or (marks is not None and marks.any()):
        return False
    return left.undecided is None or not left.undecided.any()


class _Left:
    """What a backward leaves open: columns that are undecided, and sums that are not rounded."""

    __slots__ = ("sums", "undecided")

    def __init__(self, sums: Any, undecided: Any) -> None:
        self.sums, self.undecided = sums, undecided


def _backward(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients, extra: Extra,
    marks: Any, samples: int = 0,
) -> _Left | None:  # fmt: skip
    """Do all but what is marked, in the end; return what is left open, None if nothing is done."""
    mean, rest, rstd, rstd_lo, tail, _, spread = statistics
    gamma, _, eps, kind, gamma_offset, rounding = norm
    dx, *totals = out
    n, wide, nearest = x.shape[-1], rstd_lo is not None, rounding == "nearest"
    summing = any(total is not None for total in totals)
    sums = np.empty((2, n, 4)) if wide and summing and not samples else None
    shape = (samples, 2, n) if samples else (2, n)
    undecided = np.zeros(shape, np.uint8) if nearest and summing else None
    flat = [_flat(total, samples) for total in totals]
    if not _core.backward(
        _seen(x), _seen(dx), _seen(dy), _seen(extra.dsum), _flat(gamma, samples), None,
        eps, gamma_offset, kind != "layer", nearest, wide, _to_clear(dx) if extra.dsum is None else 0,
        mean, rest, rstd, rstd_lo, tail, marks, spread,
        *flat, undecided, extra.old, sums, get_num_threads(), samples,
    ):  # fmt: skip
        return None
    for total, written in zip(totals, flat, strict=True):
        if total is not None and written is not total:
            total[...] = written
    if type(dx) is SomeRows and len(dx.numbers) and extra.dsum is None:
        dx.others_done = True
    return _Left(sums, undecided)


def _backward_marked(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients, extra: Extra,
    marks: Any, left: _Left,
) -> None:  # fmt: skip
    """Write dx of the marked rows, and sums over rows to which the extreme ones are added."""
    rows = np.flatnonzero(marks)
    extreme = rows[marks[rows] == _EXTREME]
    if left.sums is not None and len(extreme):
        parts = [None if total is None else np.zeros(total.shape, PARTIAL) for total in out[1:]]
        some = statistics.of_rows(extreme)
        given = _select(dy, extreme), _select(x, extreme), norm, some
        reference.backward(*given, Gradients(None, *parts))
        for i, (total, part) in enumerate(zip(out[1:], parts, strict=True)):
            if total is None or part is None:
                continue
            both = merged(left.sums[i].view(PARTIAL).reshape(part.shape), part)
            if total.dtype == PARTIAL:
                total[...] = both
            else:
                total[...], undecided = rounded(both, total.dtype)
                if left.undecided is not None:
                    left.undecided[i] = undecided.ravel()
    if out.dx is not None:
        if extra.dsum is not None:
            extra = extra._replace(dsum=_select(extra.dsum, rows))
        given = _select(dy, rows), _select(x, rows), norm, statistics.of_rows(rows)
        reference.backward(*given, Gradients(_select(out.dx, rows), None, None), extra)
    if left.undecided is not None:
        _decide(dy, x, norm, out, extra, left.undecided)


def _decide(dy: Any, x: Any, norm: Norm, out: Gradients, extra: Extra, undecided: Any) -> None:
    """Round correctly the columns of dgamma and dbeta that are undecided."""
    columns = np.flatnonzero(undecided.any(axis=0))
    if not len(columns):
        return
    totals = out[1:]
    dtypes = (None if total is None else total.dtype for total in totals)
    found = reference.columns_of_sums(dy, x, norm, columns, *dtypes, extra.old)
    for total, values in zip(totals, found, strict=True):
        if total is not None:
            total.flat[columns] = values


# ---- forward mode ----


def jvp(
    tx: Any, x: Any, norm: Norm, statistics: Statistics,
    tgamma: Array | None, tbeta: Array | None, ty: Any, where: Any = None,
) -> None:  # fmt: skip
    """Do what `reference.jvp` does; that does what is masked."""
    mean, rest, rstd, rstd_lo, tail, _, spread = statistics
    wide = rstd_lo is not None
    # What a forward kept of which nothing was float64 is too little for double-double.
    if where is None and (wide or not any_float64(tx, tgamma, tbeta)):
        table = np.zeros((4, x.shape[-1]))
        table[0] = 1.0 if norm.gamma is None else norm.gamma.ravel()
        table[0], table[1] = two_sum(table[0], np.array(norm.gamma_offset))
        for row, tangent in zip(table[2:], (tgamma, tbeta), strict=True):
            if tangent is not None:
                row[:] = tangent.ravel()
        marks = _marks_of(statistics) if wide else None
        if _core.backward(
            _seen(x), _seen(ty), _seen(tx), None, None, table, norm.eps, 0.0, norm.kind != "layer",
            False, wide, 0, mean, rest, rstd, rstd_lo, tail, marks, spread, *(None,) * 5,
            get_num_threads(), 0,
        ):  # fmt: skip
            if marks is not None and np.count_nonzero(marks):
                rows = np.flatnonzero(marks)
                given = _select(tx, rows), _select(x, rows), norm, statistics.of_rows(rows)
                reference.jvp(*given, tgamma, tbeta, _select(ty, rows))
            return
    reference.jvp(tx, x, norm, statistics, tgamma, tbeta, ty, where)


# ---- what is handed over ----


def _marks_of(statistics: Statistics) -> Array:
    """Return the marks of rows that are extreme by what the forward found."""
    marks: Array = ~(statistics.rstd <= _LARGEST)
    if statistics.mean is not None:
        marks |= ~(np.abs(statistics.mean) < np.inf)
    if statistics.exponent is not None:
        marks |= statistics.exponent.any(axis=-1)
    if (spread := statistics.spread) is not None:
        # Those that were marked; and of a forward that was all the reference's, those that would have been.
        marks |= ~(spread >= 0.0) | ((spread > 0.0) & (spread < _SMALLEST))
    return marks.astype(np.uint8)


def _is_for_kernels(extra: Extra, out: Gradients) -> bool:
    """Tell whether the kernels can add what is to be added, and hold the sums: exact ones they cannot."""
    exact = any(total is not None and total.dtype == object for total in out[1:])
    return extra.dmean is None is extra.drstd and extra.where is None and not exact


def _had_better_be_alone(x: Array) -> bool:
    return x.size > _LARGE * len(x) and len(x) < _SEVERAL * get_num_threads()


def _may_share(a: Any, b: Any) -> bool:
    a, b = (each.matrix if type(each) is SomeRows else each for each in (a, b))
    # Of `Rows` NumPy cannot tell.
    return isinstance(b, Rows) or np.may_share_memory(a, b)


def _seen(rows: Any) -> Any:
    """Return an array, or of rows an array, how many of its axes count them, and the numbers of some."""
    if rows is None or type(rows) is np.ndarray:
        return rows
    numbers = None
    if type(rows) is SomeRows:
        rows, numbers = rows.matrix, np.ascontiguousarray(rows.numbers)
    return (rows._moved, len(rows._lead), numbers) if type(rows) is Rows else (rows, -1, numbers)


def _to_clear(y: Any) -> int:
    """Return how many rows there are, if others than these are to be cleared."""
    return y.matrix.shape[0] if type(y) is SomeRows and not y.others_done and len(y.numbers) else 0


def _select(rows: Any, numbers: Array) -> SomeRows:
    """Return some rows of these."""
    if type(rows) is SomeRows:
        return SomeRows(rows.matrix, rows.numbers[numbers])
    return SomeRows(as_matrix(rows), numbers)


def _flat(parameter: Any, samples: int = 0) -> Any:
    """Return `parameter`, or a copy, with its elements in order, of each sample."""
    if parameter is None or parameter.flags.c_contiguous:
        return parameter
    if samples and parameter.strides[-1] == parameter.itemsize:
        return parameter
    return np.ascontiguousarray(parameter)
