"""
The CPU kernels: `reference.forward` and `reference.backward`, compiled by Numba.

Here the record of a call becomes the arrays of a job. Rows are dealt out in tiles whose number and bounds depend on the
shape alone, so that no bit depends on the number of threads. `rows` has the equations of float16,
bfloat16 and float32, `wide` those of calls of which something is float64.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from stablenorm import reference
from stablenorm.arrays import Rows, SomeRows, as_matrix
from stablenorm.call import Backward, Forward, Jvp
from stablenorm.cpu import extreme
from stablenorm.cpu.jobs import (
    BY_NUMBERS,
    CLEARED,
    COPY,
    DONE,
    NO_MEMORY,
    REFERENCE,
    Plan,
    do,
    do_each,
    make_plan,
)
from stablenorm.cpu.layout import PAST_CACHES, blocks, row_strides
from stablenorm.cpu.pool import pool_for
from stablenorm.cpu.record import AT
from stablenorm.cpu.tiles import STRAIGHT, STREAMED
from stablenorm.reference.counted import (
    fill_others,
    joined,
    spread,
    whole_and_partial,
)
from stablenorm.reference.doubledouble import two_sum
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.types import Array, Gradients, Statistics, any_float64

_new = tuple.__new__
_NOTHING_KEPT: Any = (None,) * 7
_NOTHING_ELSE: Any = (None,) * 6

# Elements of a y that is written to be forgotten: 1 MiB, which stays in a second-level cache, and work for
# all threads.
_BLOCK = 1 << 18


def forward(call: Forward) -> Any:
    """Do what `reference.forward` does."""
    if call.samples is not None:
        found = _at_once(call)
        if found is None:
            each = [forward(call.sample(i)) for i in range(call.samples)]
            found = joined(each) if call.keep else None
        return found
    if call.where is not None:
        return _forward_counted(call)
    if call.y is None:
        return _statistics(call)
    return _forward(call)[0]


def backward(call: Backward) -> Any:
    """Do what `reference.backward` does; that does what is rare."""
    if not _is_for_kernels(call):
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


def jvp(call: Jvp) -> Any:
    """Do what `reference.jvp` does; that does what is masked, and rows that are not contiguous."""
    tx, x, norm, statistics, tgamma, tbeta, ty, where = call
    wide, strides = statistics.rstd_lo is not None, row_strides(tx, x, ty)
    # What a forward kept of which nothing was float64 is too little for double-double.
    if where is not None or strides == () or (not wide and any_float64(tx, tgamma, tbeta)):
        return NotImplemented
    table = np.zeros((4, x.shape[-1]))
    table[0] = 1.0 if norm.gamma is None else norm.gamma.ravel()
    table[0], table[1] = two_sum(table[0], np.array(norm.gamma_offset))
    for row, tangent in zip(table[2:], (tgamma, tbeta), strict=True):
        if tangent is not None:
            row[:] = tangent.ravel()
    if wide and extreme.any_of(table[[0, 2, 3]]):
        return NotImplemented
    pulled, options = (tx.dtype, None, None, wide), (norm.kind, 0.0, "fast", "jvp")
    plan = make_plan(x.shape, strides, x.dtype, (None, None), pulled, options)
    marks = extreme.marks_of(statistics) if wide else None
    kept = *statistics[:5], marks, *(None,) * 7
    if _do(plan, (x, ty, tx, None, None, *kept, table, None)) == REFERENCE:
        return NotImplemented
    if marks is not None:
        extreme.write_ty(call, marks)
    return None


# ---- calls in parts ----


def _at_once(call: Forward) -> Statistics | None:
    """Do all samples by one job, if they can, and had better, be done so."""
    x, y = call.x, call.y
    if y is None or call.where is not None or not _are_blocks(x, y, call.residual, call.total):
        return None
    wide = call.norm.rounding == "nearest" or any_float64(x, *call.norm[:2])
    # Of wide rows that are extreme, x is needed once more.
    if wide and _may_share(x, y):
        return None
    return _forward(call)[0]  # type: ignore[no-any-return]


def _backward_at_once(call: Backward) -> bool:
    """Do all samples by one job, if they can, and had better, be done so; tell whether they were."""
    dy, x, _, statistics, out = call[:5]
    if call.where is not None or not _are_blocks(dy, x, out.dx, call.dsum):
        return False
    wide = statistics.rstd_lo is not None
    if out.dx is not None and _may_share(dy, out.dx) if wide else any_float64(dy):
        return False
    marks = extreme.marks_of(statistics) if wide else None
    nearest = call.norm.rounding == "nearest"
    undecided = np.zeros((len(x), 2, x.shape[-1]), np.uint8) if nearest else None
    if not _backward(call, marks, undecided)[0]:
        return False
    return not any(flags is not None and flags.any() for flags in (marks, undecided))


def _are_blocks(*arrays: Any) -> bool:
    """Tell whether there are several samples, each of some rows."""
    return 0 not in arrays[0].shape and len(arrays[0]) > 1


def _forward_counted(call: Forward) -> Statistics | None:
    """Do the rows that count: those of which all does by a kernel, the others by the reference."""
    if call.residual is not None:
        total = reference.equations.add(call.x, call.residual, call.total)
        call = call._replace(x=total, residual=None, total=None)
    parts, found, cleared = whole_and_partial(call.where), [], False
    for part in parts:
        some = part.forward(call)
        if part.elements is not None:
            found.append(reference.forward(some))
        elif call.y is None:
            found.append(_statistics(some))
        else:
            statistics, cleared = _forward(some, alone=len(parts) == 1)
            found.append(statistics)
    if not cleared:
        fill_others(call.y, parts)
    rows = as_matrix(call.where).shape[0]
    return spread(found, parts, rows) if call.keep else None


def _backward_counted(call: Backward) -> None:
    """Do the rows that count, as `_forward_counted` does, and merge their sums."""
    parts = whole_and_partial(call.where)
    if len(parts) == 1 and parts[0].elements is None:
        if not _backward_rows(parts[0].backward(call), alone=call.dsum is None):
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


def _statistics(call: Forward) -> Statistics:
    """Return the statistics alone: y goes into a block of memory, again and again."""
    x = as_matrix(call.x)
    step = max(1, _BLOCK // x.shape[1])
    room = np.empty((min(step, x.shape[0]), x.shape[1]), x.dtype)
    found = []
    for start in range(0, max(x.shape[0], 1), step):
        block = x[start : start + step]
        found.append(_forward(call._replace(x=block, y=room[: len(block)]))[0])
    return joined(found, np.concatenate)


# ---- all rows of a call, or of one part of it ----


def _forward(call: Forward, alone: bool = False) -> tuple[Any, bool]:
    """Do a forward; return the statistics, and whether, being `alone`, it cleared all other rows."""
    x, norm, y, keep, residual, total, _, samples, threads = call
    gamma, beta, eps, kind, gamma_offset, rounding = norm
    nearest, rms, source, plus = rounding == "nearest", kind == "rms", None, None
    if residual is not None:
        plus, source = residual, x
        narrow = not (nearest or any_float64(x, gamma, beta)) and plus.dtype == x.dtype
        if narrow and row_strides(x, plus, total, y) != ():
            x = total
        elif samples:
            return None, False
        else:
            x, source, plus = reference.equations.add(x, residual, total), None, None
    if nearest and _may_share(x, y):
        # Rows that are undecided are computed once more.
        x = np.array(as_matrix(x)[:])
    (gamma, gamma_dtype), (beta, beta_dtype) = _flat(gamma), _flat(beta)
    dtypes, strides = (gamma_dtype, beta_dtype), row_strides(None, x, y)
    options: tuple[Any, ...] = (kind, gamma_offset, rounding)
    if plus is not None:
        strides, options = row_strides(None, x, y, source, plus), (*options, "plus")
    plan = make_plan(x.shape[1:] if samples else x.shape, strides, x.dtype, dtypes, None, options)
    state, wide, rows = plan[3:]
    kept, room = _NOTHING_KEPT, np.empty
    clear = alone and state == BY_NUMBERS
    if samples:
        rows = x.shape[:2]
    elif clear and not wide:
        # The statistics are of all rows, as y is; those of the others are 0.
        rows, room = x.matrix.shape[0], np.zeros
    if wide:
        spread = np.zeros(rows) if nearest else None
        means = (None,) * 3 if rms else tuple(np.empty(rows) for _ in range(3))
        both = np.empty(rows), np.empty(rows)
        kept = *means[:2], *both, means[2], np.empty(rows, np.uint8), spread
    elif keep and rms:
        kept = None, None, room(rows), None, None, None, None
    elif keep:
        kept = room(rows), room(rows), room(rows), None, None, None, None
    arrays = x, y, None, gamma, beta, *kept, *_NOTHING_ELSE, source, plus
    state = (
        do_each(plan, arrays, eps, threads) if samples else _do(plan, arrays, eps, threads, clear)
    )
    if state == REFERENCE:
        call = Forward(x, norm, y, keep)
        return None if samples else reference.forward(call), False
    if not wide:
        # As NamedTuples make themselves, without the keyword handling, which takes twice as long.
        return _new(Statistics, (*kept, None)), state == CLEARED
    tails, marks, spread = kept[4:]
    found = _new(Statistics, (*kept[:5], None, spread, None))
    # Counting takes a quarter of the time of any(), which is 1.3 microseconds of a small call.
    if np.count_nonzero(marks):
        if samples:
            return None, False
        found = extreme.forward(call._replace(x=as_matrix(x), y=as_matrix(y)), found, marks)
    # Dropped where no row needs it, as in the reference.
    found = found if rms or np.count_nonzero(tails) else found._replace(mean_tail=None)
    return found, state == CLEARED


def _backward_rows(call: Backward, alone: bool = False) -> bool:
    """Do a backward; tell whether, being `alone`, it cleared all other rows of dx."""
    dy, _, norm, statistics, (dx, dgamma, dbeta) = call[:5]
    if norm.rounding == "nearest":
        return _backward_nearest(call, alone)
    summing = dgamma is not None or dbeta is not None
    if statistics.rstd_lo is None:
        # What the forward kept, as nothing of it was float64, is too little for double-double.
        if dy.dtype.type is not np.float64:
            done, cleared = _backward(call, None, None, alone)
            if done:
                return cleared
        reference.backward(call)
        return False
    if summing and dx is not None and _may_share(dy, dx):
        # Extreme rows need all of dy for the sums. So these first: then dx may overwrite it.
        _backward_rows(call._replace(out=Gradients(None, dgamma, dbeta), dsum=None))
        return _backward_rows(call._replace(out=Gradients(dx, None, None)), alone)
    marks = extreme.marks_of(statistics)
    done, cleared = _backward(call, marks, None, alone)
    if not done:
        reference.backward(call)
        return False
    if summing and np.count_nonzero(marks):
        reference.backward(call._replace(out=Gradients(None, dgamma, dbeta)))
    if dx is not None:
        extreme.write_dx(call, marks)
    return cleared


def _backward_nearest(call: Backward, alone: bool) -> bool:
    if call.out.dx is not None and _may_share(call.dy, call.out.dx):
        call = call._replace(dy=np.array(as_matrix(call.dy)[:]))
    marks, undecided = extreme.marks_of(call.statistics), np.zeros((2, call.x.shape[-1]), np.uint8)
    done, cleared = _backward(call, marks, undecided, alone)
    if not done:
        reference.backward(call)
        return False
    extreme.decide(call, marks, undecided)
    return cleared


def _is_for_kernels(call: Backward) -> bool:
    return (
        call.dmean is None
        and call.drstd is None
        and (call.dsum is None or call.dsum.dtype == call.x.dtype)
        and call.sums != "exact"
    )


def _may_share(a: Any, b: Any) -> bool:
    a, b = (each.matrix if type(each) is SomeRows else each for each in (a, b))
    # Of `Rows` NumPy cannot tell.
    return isinstance(b, Rows) or np.may_share_memory(a, b)


def _backward(
    call: Backward, marks: Array | None, undecided: Array | None, alone: bool = False
) -> tuple[bool, bool]:
    """
    Compute what is wanted, but for rows that are marked.

    Return whether that could be done, else nothing is; and whether, being `alone`, it cleared all other rows.
    """
    dy, x, norm, (mean, mean_lo, rstd, rstd_lo, tail, _, spread, _), out, plus = call[:6]
    dx, dgamma, dbeta = cast(Any, out)
    gamma, _, _, kind, gamma_offset, rounding = norm
    (gamma, dtype), strides = _flat(gamma), row_strides(dy, x, dx)
    (of_gamma, dgamma_dtype), (of_beta, dbeta_dtype) = _flat(dgamma), _flat(dbeta)
    pulled = dy.dtype, dgamma_dtype, dbeta_dtype, rstd_lo is not None
    options: tuple[Any, ...] = (kind, gamma_offset, rounding)
    if plus is not None:
        strides, options = row_strides(dy, x, dx, None, plus), (*options, "plus")
    shape = x.shape[1:] if call.samples else x.shape
    plan = make_plan(shape, strides, x.dtype, (dtype, None), pulled, options)
    arrays = (
        x, dx, dy, gamma, None, mean, mean_lo, rstd, rstd_lo, tail, marks, spread,
        None, of_gamma, of_beta, undecided, call.old, None, None, plus,
    )  # fmt: skip
    if call.samples:
        state = do_each(plan, arrays, 0.0, call.threads)
    else:
        state = _do(plan, arrays, 0.0, call.threads, alone and dx is not None)
    if state == REFERENCE:
        return False, False
    if of_gamma is not dgamma:
        dgamma[...] = of_gamma
    if of_beta is not dbeta:
        dbeta[...] = of_beta
    return True, state == CLEARED


def _do(
    plan: Plan, arrays: Any, eps: float = 0.0, threads: int | None = None, clear: bool = False
) -> int:
    """Do a call; return DONE or REFERENCE; of numbered rows CLEARED if all others were cleared, to `clear` them."""
    words, most, small, state, _, _ = plan
    given, done = arrays, DONE
    if state == BY_NUMBERS:
        given, words = _by_numbers(plan, arrays, clear)
        state, done = DONE, CLEARED if words[AT.all_rows] else DONE
    if state == DONE:
        pool, helpers = pool_for(most, small, threads) if most else (None, 0)
        state = do(given, eps, words, pool, helpers)
        if state == DONE:
            return done
    if state == COPY:
        return _do_in_blocks(plan, arrays, eps, threads)
    if state == NO_MEMORY:
        raise MemoryError
    return state


def _by_numbers(plan: Plan, arrays: Any, clear: bool) -> tuple[Any, Any]:
    """Return the arrays of which these are some rows, with the numbers of these, and the words of the plan."""
    found, words = list(arrays), plan.words.copy()
    for i in (AT.x, AT.out, AT.dy, AT.plus):
        found[i] = None if arrays[i] is None else arrays[i].matrix
    found[AT.numbers], out = arrays[AT.x].numbers, found[AT.out]
    if clear and plan.rows:
        words[AT.all_rows] = out.shape[0]
        if not plan.wide and out.nbytes >= PAST_CACHES:
            words[AT.way] = STREAMED
    return tuple(found), words


def _do_in_blocks(plan: Plan, arrays: Any, eps: float, threads: int | None) -> int:
    """Gather rows that are not contiguous, some at a time; the sums over rows go on."""
    x: Any = as_matrix(arrays[0])
    out, dy = map(as_matrix, arrays[1:3])
    parameters, kept, totals = arrays[3:5], arrays[5:12], arrays[13:17]
    plus: Any = as_matrix(arrays[-1])
    n, sums, words = x.shape[1], None, plan.words.copy()
    words[AT.x_stride] = words[AT.out_stride] = n * x.dtype.itemsize
    words[AT.dy_stride] = 0 if dy is None else n * dy.dtype.itemsize
    words[AT.plus_stride] = words[AT.x_stride]
    words[AT.way], words[AT.over_input] = STRAIGHT, True
    plan, tile_rows = plan._replace(words=words, state=DONE), int(words[AT.tile_rows])
    if any(total is not None for total in totals[:2]):
        sums = np.empty((words[AT.tiles], words[AT.sums_bytes]), np.uint8)
    for block in blocks(plan.rows, n, tile_rows):
        # Rows that are extreme are still needed, where the result overwrites them.
        result = _part(out, block)
        here = None if sums is None else sums[block.start // tile_rows :]
        some, added = (_part(word, block) for word in kept), _part(plus, block)
        given = _part(x, block), result, _part(dy, block), *parameters, *some
        words[AT.rows] = block.stop - block.start
        if _do(plan, (*given, here, *(None,) * 6, added), eps, threads) == REFERENCE:
            return REFERENCE
        if out is not None:
            out[block] = result
    if sums is None:
        return DONE
    # Of no rows: to add up the sums.
    words[AT.rows] = 0
    return _do(plan, (None, None, sums, *parameters, *kept, sums, *totals, *(None,) * 3))


def _part(array: Any, rows: slice) -> Array | None:
    return None if array is None else np.ascontiguousarray(array[rows])


def _flat(parameter: Any) -> tuple[Any, Any]:
    """Return `parameter`, or a copy, with its elements in order, and its dtype."""
    if parameter is None:
        return None, None
    if not parameter.flags.c_contiguous:
        parameter = np.ascontiguousarray(parameter)
    return parameter, parameter.dtype
