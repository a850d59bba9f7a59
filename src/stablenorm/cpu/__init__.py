"""
The CPU kernels: `reference.forward` and `reference.backward`, compiled by Numba.

They check nothing: that is done above. Rows are dealt out in tiles whose number and bounds depend on the
shape alone, so that no bit depends on the number of threads. `rows` has the equations of float16,
bfloat16 and float32, `wide` those of calls of which something is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm import reference
from stablenorm.arrays import Rows, SomeRows, as_matrix
from stablenorm.cpu import extreme
from stablenorm.cpu.jobs import (
    BY_NUMBERS,
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
from stablenorm.reference.doubledouble import two_sum
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

_new = tuple.__new__
_NOTHING_KEPT: Any = (None,) * 7
_NOTHING_ELSE: Any = (None,) * 6


def forward(x: Any, norm: Norm, y: Any, residual: Residual | None = None) -> Statistics:
    """Do what `reference.forward` does."""
    return _forward(x, norm, y, residual, True)  # type: ignore[no-any-return]


def normalize(x: Any, norm: Norm, y: Any, residual: Residual | None = None) -> None:
    """Do what `forward` does, but for the statistics."""
    _forward(x, norm, y, residual, False)


def forward_samples(
    x: Array, norm: Norm, y: Array, residual: Residual | None, keep: bool
) -> Statistics | None:
    """
    Do `forward` of (samples, rows, n), each with its gamma and beta; return the statistics of all.

    None if some have to be, or had better be, done one by one.
    """
    wide = norm.rounding == "nearest" or any_float64(x, *norm[:2])
    # Of wide rows that are extreme, x is needed once more.
    return None if wide and _may_share(x, y) else _forward(x, norm, y, residual, keep, 1)


def backward_samples(
    dy: Array, x: Array, norm: Norm, statistics: Statistics, out: Gradients, extra: Extra
) -> bool:
    """Do `backward` of (samples, rows, n), each by itself; tell whether that could be done."""
    wide = statistics.rstd_lo is not None
    again = out.dx is not None and _may_share(dy, out.dx) if wide else any_float64(dy)
    if again or not _is_for_kernels(extra, x):
        return False
    marks = extreme.marks_of(statistics) if wide else None
    nearest = norm.rounding == "nearest"
    undecided = np.zeros((len(x), 2, x.shape[-1]), np.uint8) if nearest else None
    if not _backward(dy, x, norm, statistics, out, marks, undecided, extra, 1):
        return False
    return not any(flags is not None and flags.any() for flags in (marks, undecided))


def _forward(
    x: Any, norm: Norm, y: Any, residual: Residual | None, keep: bool, each: int = 0
) -> Any:
    gamma, beta, eps, kind, gamma_offset, rounding = norm
    nearest, rms, source, plus = rounding == "nearest", kind == "rms", None, None
    if residual is not None:
        (plus, total), source = residual, x
        narrow = not (nearest or any_float64(x, gamma, beta)) and plus.dtype == x.dtype
        if narrow and row_strides(x, plus, total, y) != ():
            x = total
        elif each:
            return None
        else:
            x, source, plus = reference.add(x, *residual), None, None
    if nearest and _may_share(x, y):
        # Rows that are undecided are computed once more.
        x = np.array(as_matrix(x)[:])
    (gamma, gamma_dtype), (beta, beta_dtype) = _flat(gamma), _flat(beta)
    dtypes, strides = (gamma_dtype, beta_dtype), row_strides(None, x, y)
    options: tuple[Any, ...] = (kind, gamma_offset, rounding)
    if plus is not None:
        strides, options = row_strides(None, x, y, source, plus), (*options, "plus")
    shape = x.shape[1:] if each else x.shape
    plan = make_plan(shape, strides, x.dtype, dtypes, None, options)
    _, _, _, state, wide, rows = plan
    kept, room = _NOTHING_KEPT, np.empty
    if each:
        rows = x.shape[:2]
    elif state == BY_NUMBERS and not wide and not y.others_done:
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
    if (do_each if each else _do)(plan, arrays, eps) == REFERENCE:
        return None if each else reference.forward(x, norm, y)
    if not wide:
        # As NamedTuples make themselves, without the keyword handling, which takes twice as long.
        return _new(Statistics, kept)
    tails, marks, spread = kept[4:]
    found = _new(Statistics, (*kept[:5], None, spread))
    # Counting takes a quarter of the time of any(), which is 1.3 microseconds of a small call.
    if np.count_nonzero(marks):
        if each:
            return None
        found = extreme.forward(as_matrix(x), norm, as_matrix(y), found, marks)
    # Dropped where no row needs it, as in the reference.
    return found if rms or np.count_nonzero(tails) else found._replace(mean_tail=None)


def backward(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients,
    extra: Extra = NOTHING_EXTRA,
) -> None:  # fmt: skip
    """Do what `reference.backward` does."""
    if extra is not NOTHING_EXTRA and not _is_for_kernels(extra, x):
        reference.backward(dy, x, norm, statistics, out, extra)
        return
    if norm.rounding == "nearest":
        _backward_nearest(dy, x, norm, statistics, out, extra)
        return
    dx, dgamma, dbeta = out
    summing = dgamma is not None or dbeta is not None
    if statistics.rstd_lo is None:
        # What the forward kept, as nothing of it was float64, is too little for double-double.
        narrow = dy.dtype.type is not np.float64
        if not (narrow and _backward(dy, x, norm, statistics, out, None, extra=extra)):
            reference.backward(dy, x, norm, statistics, out, extra)
        return
    if summing and dx is not None and _may_share(dy, dx):
        # Extreme rows need all of dy for the sums. So these first: then dx may overwrite it.
        backward(dy, x, norm, statistics, Gradients(None, dgamma, dbeta), extra._replace(dsum=None))
        backward(dy, x, norm, statistics, Gradients(dx, None, None), extra)
        return
    marks = extreme.marks_of(statistics)
    if not _backward(dy, x, norm, statistics, out, marks, extra=extra):
        reference.backward(dy, x, norm, statistics, out, extra)
        return
    if summing and np.count_nonzero(marks):
        reference.backward(dy, x, norm, statistics, Gradients(None, dgamma, dbeta), extra)
    if dx is not None:
        extreme.write_dx(dy, x, norm, statistics, dx, marks, extra)


def jvp(
    tx: Any, x: Any, norm: Norm, statistics: Statistics,
    tgamma: Array | None, tbeta: Array | None, ty: Any, where: Any = None,
) -> None:  # fmt: skip
    """Do what `reference.jvp` does; that does what is masked, and rows that are not contiguous."""
    wide, strides = statistics.rstd_lo is not None, row_strides(tx, x, ty)
    # What a forward kept of which nothing was float64 is too little for double-double.
    if where is None and strides != () and (wide or not any_float64(tx, tgamma, tbeta)):
        table = np.zeros((4, x.shape[-1]))
        table[0] = 1.0 if norm.gamma is None else norm.gamma.ravel()
        table[0], table[1] = two_sum(table[0], np.array(norm.gamma_offset))
        for row, tangent in zip(table[2:], (tgamma, tbeta), strict=True):
            if tangent is not None:
                row[:] = tangent.ravel()
        pulled, options = (tx.dtype, None, None, wide), (norm.kind, 0.0, "fast", "jvp")
        plan = make_plan(x.shape, strides, x.dtype, (None, None), pulled, options)
        marks = extreme.marks_of(statistics) if wide else None
        kept = *statistics[:5], marks, *(None,) * 7
        if not (wide and extreme.any_of(table[[0, 2, 3]])) and (
            _do(plan, (x, ty, tx, None, None, *kept, table, None)) != REFERENCE
        ):
            if marks is not None:
                extreme.write_ty(tx, x, norm, statistics, (tgamma, tbeta), ty, marks)
            return
    reference.jvp(tx, x, norm, statistics, tgamma, tbeta, ty, where)


def _backward_nearest(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Gradients, extra: Extra
) -> None:
    if out.dx is not None and _may_share(dy, out.dx):
        dy = np.array(as_matrix(dy)[:])
    marks, undecided = extreme.marks_of(statistics), np.zeros((2, x.shape[-1]), np.uint8)
    if not _backward(dy, x, norm, statistics, out, marks, undecided, extra):
        reference.backward(dy, x, norm, statistics, out, extra)
        return
    extreme.decide(dy, x, norm, statistics, out, marks, undecided, extra)


def _is_for_kernels(extra: Extra, x: Any) -> bool:
    dsum, *others, _ = extra
    return all(each is None for each in others) and (dsum is None or dsum.dtype == x.dtype)


def _may_share(a: Any, b: Any) -> bool:
    a, b = (each.matrix if type(each) is SomeRows else each for each in (a, b))
    # Of `Rows` NumPy cannot tell.
    return isinstance(b, Rows) or np.may_share_memory(a, b)


def _backward(
    dy: Any, x: Any, norm: Norm, statistics: Statistics, out: Any, marks: Array | None,
    undecided: Array | None = None, extra: Extra = NOTHING_EXTRA, each: int = 0,
) -> bool:  # fmt: skip
    """Compute what is wanted, but for rows that are marked; False, and nothing done, if it cannot be."""
    (dx, dgamma, dbeta), (plus, _, _, _, old) = out, extra
    mean, mean_lo, rstd, rstd_lo, tail, _, spread = statistics
    gamma, _, _, kind, gamma_offset, rounding = norm
    (gamma, dtype), strides = _flat(gamma), row_strides(dy, x, dx)
    (of_gamma, dgamma_dtype), (of_beta, dbeta_dtype) = _flat(dgamma), _flat(dbeta)
    pulled = dy.dtype, dgamma_dtype, dbeta_dtype, rstd_lo is not None
    options: tuple[Any, ...] = (kind, gamma_offset, rounding)
    if plus is not None:
        strides, options = row_strides(dy, x, dx, None, plus), (*options, "plus")
    shape = x.shape[1:] if each else x.shape
    plan = make_plan(shape, strides, x.dtype, (dtype, None), pulled, options)
    arrays = (
        x, dx, dy, gamma, None, mean, mean_lo, rstd, rstd_lo, tail, marks, spread,
        None, of_gamma, of_beta, undecided, old, None, None, plus,
    )  # fmt: skip
    if (do_each if each else _do)(plan, arrays) == REFERENCE:
        return False
    if of_gamma is not dgamma:
        dgamma[...] = of_gamma
    if of_beta is not dbeta:
        dbeta[...] = of_beta
    return True


def _do(plan: Plan, arrays: Any, eps: float = 0.0) -> int:
    """Do a call; return DONE or REFERENCE."""
    words, most, small, state, _, _ = plan
    given = arrays
    if state == BY_NUMBERS:
        given, words = _by_numbers(plan, arrays)
        state = DONE
    if state == DONE:
        pool, helpers = pool_for(most, small) if most else (None, 0)
        state = do(given, eps, words, pool, helpers)
        if given is not arrays and state == DONE and words[AT.all_rows]:
            arrays[AT.out].others_done = True
    if state == COPY:
        return _do_in_blocks(plan, arrays, eps)
    if state == NO_MEMORY:
        raise MemoryError
    return state


def _by_numbers(plan: Plan, arrays: Any) -> tuple[Any, Any]:
    """Return the arrays of which these are some rows, with the numbers of these, and the words of the plan."""
    found, words = list(arrays), plan.words.copy()
    for i in (AT.x, AT.out, AT.dy, AT.plus):
        found[i] = None if arrays[i] is None else arrays[i].matrix
    found[AT.numbers], out = arrays[AT.x].numbers, found[AT.out]
    # What is added to dx reaches the other rows as well.
    if out is not None and plan.rows and arrays[AT.plus] is None and not arrays[AT.out].others_done:
        words[AT.all_rows] = out.shape[0]
        if not plan.wide and out.nbytes >= PAST_CACHES:
            words[AT.way] = STREAMED
    return tuple(found), words


def _do_in_blocks(plan: Plan, arrays: Any, eps: float = 0.0) -> int:
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
        if _do(plan, (*given, here, *(None,) * 6, added), eps) == REFERENCE:
            return REFERENCE
        if out is not None:
            out[block] = result
    if sums is None:
        return DONE
    # Of no rows: to add up the sums.
    words[AT.rows] = 0
    return _do(plan, (None, None, sums, *parameters, *kept, sums, *totals, *(None,) * 3), eps)


def _part(array: Any, rows: slice) -> Array | None:
    return None if array is None else np.ascontiguousarray(array[rows])


def _flat(parameter: Any) -> tuple[Any, Any]:
    """Return `parameter`, or a copy, with its elements in order, and its dtype."""
    if parameter is None:
        return None, None
    if not parameter.flags.c_contiguous:
        parameter = np.ascontiguousarray(parameter)
    return parameter, parameter.dtype
