"""
The CPU kernels in C++: `reference.forward` and `reference.backward`, compiled ahead of time.

They check nothing: that is done above. Rows are dealt out in tiles that depend on the shape alone, so that no bit
depends on the number of threads; all additions are written out, so that none depends on the processor.
rows.h and back_rows.h have the equations of float16, bfloat16 and float32, pair_rows.h those of calls of which
something is float64, and of the rows and columns that bounds of the former leave open with rounding="nearest". What these leave
open goes to the reference.

STABLENORM_INSTRUCTIONS names the instruction set to use, one of `INSTRUCTIONS`; by default the best.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple, cast

import numpy as np

from stablenorm import memory, reference
from stablenorm.arrays import Rows, SomeRows, as_matrix
from stablenorm.call import Backward, Forward
from stablenorm.reference.counted import (
    Counted,
    fill_others,
    joined,
    spread,
    whole_and_partial,
)
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.threads import get_num_threads
from stablenorm.types import NAMES, Array, Cache, Gradients, Statistics, any_float64

try:
    from stablenorm import _core
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

_core.prepare(Statistics, Cache, Gradients, NAMES, get_num_threads, memory.default_limit)
memory.use(_core)

# What `functional` does, or None and nothing of it if the call is not a plain one.
plain_forward, plain_backward = _core.plain_forward, _core.plain_backward

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


def forward(call: Forward) -> Any:
    """Do what `reference.forward` does."""
    if call.samples is not None:
        found = _at_once(call)
        if found is not None:
            return found
        each = [forward(call.sample(i)) for i in range(call.samples)]
        return joined(each) if call.keep else None
    if call.where is not None:
        return _forward_counted(call)
    return _forward(call)


def _at_once(call: Forward) -> Statistics | None:
    """Do all samples by one job, if they can, and had better, be done so."""
    x, y = call.x, call.y
    again = call.norm.rounding == "nearest" or any_float64(x, *call.norm[:2])
    # Of rows that are left open, x is needed once more.
    if y is None or call.where is not None or _are_few(call) or (again and _may_share(x, y)):
        return None
    return _forward(call)  # type: ignore[no-any-return]


def _forward_counted(call: Forward) -> Statistics | None:
    """Do the rows that count: those of which all does by a kernel, the others by the reference."""
    if call.residual is not None:
        total = reference.equations.add(call.x, call.residual, call.total)
        call = call._replace(x=total, residual=None, total=None)
    parts, found, clear = whole_and_partial(call.where), [], False
    for part in parts:
        some = part.forward(call)
        if part.elements is None:
            clear = len(parts) == 1 and _is_clearable(some.y)
            found.append(_forward(some, clear))
        else:
            found.append(reference.forward(some))
    if not clear:
        fill_others(call.y, parts)
    return spread(found, parts, as_matrix(call.where).shape[0]) if call.keep else None


def _forward(call: Forward, clear: bool = False) -> Any:
    """Do a forward of all rows, or with `clear` of some while the others of y are cleared; None if samples cannot."""
    x, (gamma, beta, eps, kind, gamma_offset, rounding), y, keep, residual, total, *_ = call
    samples, layer, nearest = call.samples or 0, kind == "layer", rounding == "nearest"
    source, wide = None, any_float64(x, gamma, beta)
    if residual is not None:
        source, x = x, total
    if nearest and y is not None and residual is None and _may_share(x, y):
        # Rows that are undecided are computed once more. The sum with a residual is in memory of its own.
        x = np.array(as_matrix(x)[:])
    shape = x.shape[: 2 if samples else 1]
    if not samples and len(x.shape) != 2:
        shape = (x.size // x.shape[-1],)
    marks: Any = None
    mean = rest = rstd = rstd_lo = tail = spread_ = None
    if wide or keep:
        rstd = np.empty(shape)
        if layer:
            mean, rest = np.empty(shape), np.empty(shape)
    if wide:
        rstd_lo = np.empty(shape)
        tail = np.empty(shape) if layer else None
    if wide or nearest:
        marks = np.empty(shape, np.uint8)
        spread_ = np.empty(shape) if nearest else None
    if not _core.forward(
        _seen(x), _seen(y), _seen(source), _seen(residual),
        _flat(gamma, samples), _flat(beta, samples), eps, gamma_offset, not layer, nearest, wide,
        y.matrix.shape[0] if clear else 0, mean, rest, rstd, rstd_lo, tail, marks, spread_,
        call.threads or get_num_threads(), samples,
    ):  # fmt: skip
        if samples:
            return None
        if clear:
            fill_others(y.matrix, [Counted(y.numbers, None)])
        # Samples and blocks of one call have the same words, whoever made them.
        kept = reference.forward(call)
        return kept if wide or not keep else kept._replace(rstd_lo=None, mean_tail=None)
    kept = _new(Statistics, (mean, rest, rstd, rstd_lo, tail, None, spread_, None))
    if marks is None:
        return kept
    # Counting takes a quarter of the time of any().
    if np.count_nonzero(marks):
        if samples:
            return None
        kept = _forward_marked(call._replace(x=x, residual=None, total=None), kept, marks)
    # Dropped where no row needs it, as in the reference.
    return kept._replace(mean_tail=None) if tail is not None and not tail.any() else kept


def _forward_marked(call: Forward, kept: Statistics, marks: Any) -> Statistics:
    """Write y of the marked rows; return the statistics of all, with the marks."""
    rows = np.flatnonzero(marks)
    some: Statistics = reference.forward(Counted(rows, None).forward(call))
    # Of rows that are merely undecided, the statistics are as good as these.
    extreme = marks[rows] == _EXTREME
    if not extreme.any():
        return kept
    rows, some, exponent = rows[extreme], some.of_rows(extreme), None
    for i in (0, 1, 2, 3, 4, 6):
        if (row := kept[i]) is not None:
            row[rows] = 0.0 if (word := some[i]) is None else word
    if some.exponent is not None:
        exponent = np.zeros((len(marks), 2), np.int16)
        exponent[rows] = some.exponent
    return kept._replace(exponent=exponent, extreme=(marks == _EXTREME).view(np.uint8))


# ---- backward ----


def backward(call: Backward) -> Any:
    """Do what `reference.backward` does; that does what is rare."""
    if call.dmean is not None or call.drstd is not None or call.sums == "exact":
        return NotImplemented
    if call.samples is not None:
        if not _backward_at_once(call):
            for i in range(call.samples):
                backward(call.sample(i))
    elif call.where is not None:
        _backward_counted(call)
    else:
        _backward_rows(call)
    return None


def _backward_at_once(call: Backward) -> bool:
    """Do all samples by one job, if they can, and had better, be done so; tell whether they were."""
    dy, dx, wide = call.dy, call.out.dx, call.statistics.rstd_lo is not None
    again = wide or call.norm.rounding == "nearest"
    if call.where is not None or _are_few(call) or (not wide and any_float64(dy)):
        return False
    if again and dx is not None and _may_share(dy, dx):
        return False
    marks = _marks_of(call.statistics) if again else None
    left = _backward(call, marks, wide)
    if left is None or (marks is not None and marks.any()):
        return False
    return left.undecided is None or not left.undecided.any()


def _backward_counted(call: Backward) -> None:
    """Do the rows that count, as `_forward_counted` does, and merge their sums."""
    parts = whole_and_partial(call.where)
    if len(parts) == 1 and parts[0].elements is None:
        some = parts[0].backward(call)
        clear = call.dsum is None and _is_clearable(some.out.dx)
        _backward_rows(some, clear)
        if not clear:
            fill_others(call.out.dx, parts, call.dsum)
        return
    sums = []
    for i, part in enumerate(parts):
        totals = [None if each is None else np.zeros(each.shape, PARTIAL) for each in call.out[1:]]
        some = part.backward(call)
        # Old values are added once.
        old = call.old if i == 0 else None
        some = some._replace(out=Gradients(some.out.dx, *totals), sums="pairs", old=old)
        (_backward_rows if part.elements is None else reference.backward)(some)
        sums.append(totals)
    for result, *totals in zip(call.out[1:], *sums, strict=True):
        if result is not None:
            total = merged(*totals)
            result[...] = total if call.sums == "pairs" else rounded(total, result.dtype)[0]
    fill_others(call.out.dx, parts, call.dsum)


def _backward_rows(call: Backward, clear: bool = False, in_pairs: bool = False) -> None:
    """Do a backward of all rows, or with `clear` of some while the others of dx are cleared."""
    dy, nearest = call.dy, call.norm.rounding == "nearest"
    wide = in_pairs or call.statistics.rstd_lo is not None
    dx: Any = call.out.dx
    if nearest and dx is not None and _may_share(dy, dx):
        # Rows that are undecided are computed once more.
        call = call._replace(dy=np.array(as_matrix(dy)[:]))
    marks: Any = _marks_of(call.statistics) if wide or nearest else None
    if nearest:
        wide = wide or any_float64(dy) or bool(np.count_nonzero(marks))
    # Else, what a forward kept of which nothing was float64 is too little for double-double.
    possible = wide or not any_float64(dy)
    left = _backward(call, marks, wide, clear) if possible else None
    if left is None:
        if clear:
            fill_others(dx.matrix, [Counted(dx.numbers, None)])
        reference.backward(call)
        return
    if marks is not None and np.count_nonzero(marks):
        _backward_marked(call, marks, left)
    if left.undecided is not None:
        _decide(call, left.undecided, wide)


class _Left(NamedTuple):
    """What a backward leaves open."""

    # Of each column, four words: its sums over rows that are not marked. Only where some are.
    sums: Any
    # Of each column of dgamma and of dbeta, whether it is undecided; None of "fast".
    undecided: Any


def _backward(call: Backward, marks: Any, wide: bool, clear: bool = False) -> _Left | None:
    """Do all but the rows that are marked, in the end; return what is left open, None if nothing is done."""
    dy, x, norm, statistics, out, dsum = call[:6]
    dx, dgamma, dbeta = cast(Any, out)
    mean, rest, rstd, rstd_lo, tail, _, spread_, _ = statistics
    samples, n, totals = call.samples or 0, x.shape[-1], (dgamma, dbeta)
    nearest = norm.rounding == "nearest"
    sums = undecided = None
    if dgamma is not None or dbeta is not None:
        sums = np.empty((2, n, 4)) if (wide or nearest) and not samples else None
        undecided = np.zeros((samples, 2, n) if samples else (2, n), np.uint8) if nearest else None
    flat = [_flat(total, samples) for total in totals]
    if not _core.backward(
        _seen(x), _seen(dx), _seen(dy), _seen(dsum), _flat(norm.gamma, samples), norm.eps,
        norm.gamma_offset, norm.kind != "layer", nearest, wide, dx.matrix.shape[0] if clear else 0,
        mean, rest, rstd, rstd_lo, tail, marks, spread_, *flat, undecided, call.old, sums,
        call.threads or get_num_threads(), samples,
    ):  # fmt: skip
        return None
    for total, written in zip(totals, flat, strict=True):
        if total is not None and written is not total:
            total[...] = written
    return _Left(sums, undecided)


def _backward_marked(call: Backward, marks: Any, left: _Left) -> None:
    """Write dx of the marked rows, and the sums, to which those over the extreme rows are added."""
    rows, extreme = np.flatnonzero(marks), np.flatnonzero(marks == _EXTREME)
    dx, *totals = call.out
    if left.sums is not None and len(extreme):
        parts = [None if total is None else np.zeros(total.shape, PARTIAL) for total in totals]
        some = Counted(extreme, None).backward(call)._replace(out=Gradients(None, *parts))
        reference.backward(some._replace(dsum=None, old=None, sums="pairs"))
        for i, (total, part) in enumerate(zip(totals, parts, strict=True)):
            if total is None or part is None:
                continue
            both = merged(left.sums[i].view(PARTIAL).reshape(part.shape), part)
            if call.sums == "pairs":
                total[...] = both
                continue
            total[...], undecided = rounded(both, total.dtype)
            if left.undecided is not None:
                left.undecided[i] = undecided.ravel()
    if dx is not None:
        some = Counted(rows, None).backward(call)
        reference.backward(some._replace(out=Gradients(some.out.dx, None, None)))


def _decide(call: Backward, undecided: Any, wide: bool) -> None:
    """Round correctly the columns of dgamma and dbeta that are undecided: in double-double, then by the reference."""
    if not np.count_nonzero(undecided):
        return
    columns, (_, *totals) = np.flatnonzero(undecided.any(axis=0)), call.out
    found: Any
    if wide:
        some = call._replace(out=Gradients(None, *totals))
        found = reference.nearest.columns_of_sums(some, columns)
    else:
        # Kernels have tried that; what is left are ties, and sums over rows that are extreme.
        again = [None if total is None else np.empty_like(total) for total in totals]
        _backward_rows(call._replace(out=Gradients(None, *again)), in_pairs=True)
        found = [None if total is None else total.flat[columns] for total in again]
    for total, values in zip(totals, found, strict=True):
        if total is not None:
            total.flat[columns] = values


# ---- what is handed over ----


def _marks_of(statistics: Statistics) -> Array:
    """Return the marks of rows that are extreme by what the forward found."""
    marks: Array = ~(statistics.rstd <= _LARGEST)
    if statistics.extreme is not None:
        marks |= statistics.extreme != 0
    if statistics.mean is not None:
        marks |= ~(np.abs(statistics.mean) < np.inf)
    if statistics.exponent is not None:
        marks |= statistics.exponent.any(axis=-1)
    if statistics.spread is not None:
        # Of a forward that was all the reference's: no kernel has seen that x is tiny under eps.
        marks |= (statistics.spread > 0.0) & (statistics.spread < _SMALLEST)
    return marks.astype(np.uint8)


def _are_few(call: Forward | Backward) -> bool:
    """Tell whether samples are done one by one: of one, of none, or of large ones that few threads wait for."""
    x, count = call.x, len(call.x)
    threads = call.threads or get_num_threads()
    return 0 in x.shape or count < 2 or (x.size > _LARGE * count and count < _SEVERAL * threads)


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


def _is_clearable(y: Any) -> bool:
    """Tell whether kernels can clear all rows between these."""
    return type(y) is SomeRows and len(y.numbers) > 0


def _flat(parameter: Any, samples: int = 0) -> Any:
    """Return `parameter`, or a copy, with its elements in order, of each sample."""
    if parameter is None or parameter.flags.c_contiguous:
        return parameter
    if samples and parameter.strides[-1] == parameter.itemsize:
        return parameter
    return np.ascontiguousarray(parameter)
