"""
What Python calls: from arrays to the record of a call, then tiles on all threads that take part.

There is one such function. What depends on dtypes is compiled apart, as C functions whose addresses
are among the words of a `Plan`, and named by its types.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from stablenorm.cpu import tiles, wide_tiles
from stablenorm.cpu.compiling import ELEMENTS, STAMP, compiled, compiled_c
from stablenorm.cpu.layout import OWN_CACHE, PAST_CACHES, backward_rows, forward_rows
from stablenorm.cpu.memory import (
    HALF_IN_HARDWARE,
    LINE,
    bits_of,
    further,
    pasted,
    pointer_at,
    width,
)
from stablenorm.cpu.pool import MOST_HELPERS, run
from stablenorm.cpu.processor import call, restore, set_default
from stablenorm.cpu.record import (
    ARRAYS,
    BETA,
    EPS,
    GAMMA,
    PLACE,
    SCRATCH,
    SIZE,
    SUMS,
    WAY,
    Call,
    address_of,
    float64_at,
    read_record,
)
from stablenorm.cpu.sums import fill, merge, round_sums, widen
from stablenorm.cpu.tiles import STAGED, STRAIGHT, STREAMED, padded
from stablenorm.cpu.wide import LARGEST, SMALLEST, is_moderate
from stablenorm.formats import FLOAT16
from stablenorm.threads import SMALL

_padded: Any = padded.py_func

# What the job returns: done; nothing done, since results may not overwrite the input; nothing done,
# since gamma, beta or eps is of extreme size; nothing done, for want of memory.
DONE, COPY, REFERENCE, NO_MEMORY = range(4)

# Bytes of a record, in whole lines.
_RECORD = SIZE + -SIZE % LINE

# Columns of the tiles' sums that are added up at a time, and so stay in the first-level cache.
_BLOCK = 512

_malloc = types.ExternalFunction("malloc", types.intp(types.intp))
_free = types.ExternalFunction("free", types.void(types.intp))


class Plan(NamedTuple):
    """What is known of a call from its dtypes, shape and strides."""

    words: Any
    # Threads that there is work for, besides the caller; whether it is too little to wake any.
    helpers: int
    small: bool
    # COPY where the elements of rows are not one behind the other, REFERENCE where float16 is not
    # to be had; else DONE.
    state: int
    wide: bool
    rows: int
    tile_rows: int
    tiles: int

    def of_rows(self, rows: int) -> Any:
        """Return the words for so many of the rows, contiguous, with sums that the caller has."""
        words = self.words.copy()
        words[ARRAYS] = rows
        return words


_BY_REFERENCE = Plan(None, 0, False, REFERENCE, False, 0, 0, 0)


def _lacks_half(dtypes: Any) -> bool:
    return not HALF_IN_HARDWARE and FLOAT16.dtype in [each for each in dtypes if each is not None]


def _plan(part: Call, strides: Any) -> Plan:
    """Fill in what both directions share."""
    state = COPY if strides == () else DONE
    elements = part.rows * part.n * (_COST if part.wide else 1)
    each = part.scratch_bytes + -part.scratch_bytes % LINE
    tiles_ = -(-part.rows // part.tile_rows)
    whole = part._replace(
        scratch_bytes=each,
        tiles=tiles_,
        shared_bytes=_RECORD + 2 * LINE + 16 * _padded(part.n) + 16 * _BLOCK,
    )
    helpers = 0 if elements < _LEAST_SHARED else min(tiles_ - 1, MOST_HELPERS)
    return Plan(
        np.array(whole), helpers, elements < SMALL, state, bool(part.wide), part.rows,
        part.tile_rows, tiles_,
    )  # fmt: skip


# An element in double-double takes as long as so many others.
_COST = 4

# Fewer elements than this, 2 microseconds of work, are shared with nobody.
_LEAST_SHARED = 1 << 13


@functools.lru_cache(1024)
def forward_plan(x_dtype: Any, gamma_dtype: Any, beta_dtype: Any, shape: Any, strides: Any) -> Plan:
    """
    Return how the forward of such arrays is done; None stands for the dtype of what is missing.

    `strides` are what `row_strides` returns of x and y.
    """
    if _lacks_half((x_dtype, gamma_dtype, beta_dtype)):
        return _BY_REFERENCE
    rows, n, row_bytes = _sizes(shape, x_dtype)
    # Not `==`: to NumPy its float64 equals None.
    given = (each for each in (x_dtype, gamma_dtype, beta_dtype) if each is not None)
    wide = any(each.type is np.float64 for each in given)
    of = wide_tiles if wide else tiles
    x_stride, out_stride = strides or (row_bytes, row_bytes)
    gaps = out_stride != row_bytes
    streamed = rows * row_bytes >= PAST_CACHES and not (wide or gaps)
    part = Call(
        rows=rows, n=n, x_stride=x_stride, out_stride=out_stride, tile_rows=forward_rows(rows, n),
        do_tile=of.forward_tile(ELEMENTS[x_dtype]),
        widen_gamma=_widener(gamma_dtype), widen_beta=_widener(beta_dtype),
        scratch_bytes=of.scratch_bytes(n, False), way=STREAMED if streamed else STRAIGHT,
        # Of wide rows that are extreme, all of x is needed once more.
        over_input=not (wide or gaps), ahead=rows * row_bytes > OWN_CACHE, wide=wide,
    )  # fmt: skip
    return _plan(part, strides)


@functools.lru_cache(1024)
def backward_plan(
    inputs: tuple[Any, Any, Any],
    outputs: tuple[bool, Any, Any],
    wide: bool,
    shape: Any,
    strides: Any,
) -> Plan:
    """
    Return how the backward of such arrays is done.

    `inputs` are the dtypes of dy, x and gamma, `outputs` whether dx is wanted and the dtypes of
    dgamma and dbeta, None where they are not. `strides` are those of dy, x and dx.
    """
    if _lacks_half((*inputs, *outputs[1:])):
        return _BY_REFERENCE
    (dy_dtype, x_dtype, gamma_dtype), (wanted, *totals) = inputs, outputs
    rows, n, row_bytes = _sizes(shape, x_dtype)
    summing = any(each is not None for each in totals)
    of = wide_tiles if wide else tiles
    dy_stride, x_stride, out_stride = strides or (n * dy_dtype.itemsize, row_bytes, row_bytes)
    gaps = out_stride != row_bytes
    streamed = rows * row_bytes >= PAST_CACHES and not (wide or gaps)
    part = Call(
        rows=rows, n=n, x_stride=x_stride, out_stride=out_stride, dy_stride=dy_stride,
        tile_rows=backward_rows(rows, n),
        do_tile=of.backward_tile(ELEMENTS[dy_dtype], ELEMENTS[x_dtype], summing),
        widen_gamma=_widener(gamma_dtype),
        round_dgamma=_rounder(totals[0]), round_dbeta=_rounder(totals[1]),
        scratch_bytes=of.scratch_bytes(n, True), way=STREAMED if streamed else STRAIGHT,
        over_input=wide or not gaps, wanted=wanted, ahead=rows * row_bytes > OWN_CACHE, wide=wide,
    )  # fmt: skip
    plan = _plan(part, strides)
    plan.words[Call._fields.index("sums_bytes")] = 8 * sums_size(plan.tiles, n) if summing else 0
    return plan


def _sizes(shape: Any, dtype: Any) -> tuple[int, int, int]:
    n = shape[-1]
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, n, n * dtype.itemsize


def sums_size(tiles: int, n: int) -> int:
    """Return the float64 that hold dgamma and dbeta of so many tiles."""
    return 4 * _padded(n) * tiles


# ---- what is compiled ----


@functools.cache
def _widener(dtype: Any) -> int:
    """Return the address of what copies n elements at an address into float64 at another."""
    if dtype is None:
        return 0
    element, stamp = ELEMENTS[dtype], STAMP

    def widen_all(source, to, n):
        if stamp == "":
            return
        widen(pointer_at(source, element), float64_at(to), n)

    return compiled_c(widen_all, f"widen_{element.__name__}")


@functools.cache
def _rounder(dtype: Any) -> int:
    """Return the address of what adds up the tiles' dgamma (0) or dbeta (1), and rounds them."""
    if dtype is None:
        return 0
    element, stamp = ELEMENTS[dtype], STAMP

    def round_all(record, which, _):
        if stamp == "":
            return
        p = read_record(record)
        out = pointer_at(p.dbeta if which else p.dgamma, element)
        apart = 8 * padded(p.n)
        high = float64_at(record + p.shared_bytes - 2 * LINE - 16 * _BLOCK)
        low = further(high, 8 * _BLOCK)
        if p.tiles == 1:
            part = p.sums + 2 * which * apart
            round_sums(float64_at(part), float64_at(part + apart), p.n, out)
            return
        for start in range(0, p.n, _BLOCK):
            count = min(_BLOCK, p.n - start)
            fill(high, 2 * _BLOCK, 0.0)
            for tile in range(p.tiles):
                part = p.sums + (4 * tile + 2 * which) * apart + 8 * start
                merge(float64_at(part), high, low, count)
                merge(float64_at(part + apart), high, low, count)
            round_sums(high, low, count, further(out, start * width(out)))

    return compiled_c(round_all, f"round_{element.__name__}")


@pasted
def _prepare(function, source, to, n, neutral):
    """Copy gamma or beta into float64; without it, write what changes nothing."""
    if source == 0:
        fill(float64_at(to), n, neutral)
    else:
        call(function, source, to, n)


@pasted
def _is_extreme(p, gamma, beta, eps):
    return not (
        is_moderate(float64_at(gamma), p.n, SMALLEST)
        and (p.dy != 0 or is_moderate(float64_at(beta), p.n, 0.0))
        and (eps == 0.0 or SMALLEST <= eps <= LARGEST)
    )


@functools.cache
def job() -> Any:
    """
    Return the compiled function that does a call.

    It takes the arrays in the order of `Call`, eps, the words of a plan, those of the pool, and the
    number of helpers; it returns DONE or what kept it from beginning.
    """
    stamp = STAMP

    def work(arrays, eps, words, pool, helpers):
        plan = pointer_at(address_of(words), np.int64)
        p = read_record(address_of(words))
        source = address_of(arrays[2]) if address_of(arrays[2]) != 0 else address_of(arrays[0])
        in_place = address_of(arrays[1]) == source
        if (in_place and p.over_input == 0) or stamp == "":
            return COPY
        own_sums = p.sums_bytes if address_of(arrays[SUMS]) == 0 else 0
        memory = _malloc(p.shared_bytes + p.scratch_bytes * (1 + helpers) + own_sums)
        if memory == 0:
            return NO_MEMORY
        word, done = set_default(), DONE
        record = (memory + LINE - 1) & -LINE
        to = pointer_at(record, np.int64)
        for i in range(ARRAYS, len(p)):
            to[i] = plan[i]
        for i in range(ARRAYS):
            to[i] = address_of(arrays[i])
        gamma = record + _RECORD
        beta, scratch = gamma + 8 * padded(p.n), record + p.shared_bytes - LINE
        _prepare(p.widen_gamma, to[GAMMA], gamma, p.n, 1.0)
        if address_of(arrays[2]) == 0:
            _prepare(p.widen_beta, to[BETA], beta, p.n, -0.0)
        to[GAMMA], to[BETA], to[EPS] = gamma, beta, np.int64(bits_of(eps))
        to[SCRATCH] = scratch
        if own_sums:
            to[SUMS] = scratch + p.scratch_bytes * (1 + helpers)
        if in_place:
            to[WAY] = STAGED
        p = read_record(record)
        if p.wide and _is_extreme(p, gamma, beta, eps):
            done = REFERENCE
        else:
            tiles_ = (p.rows + p.tile_rows - 1) // p.tile_rows
            run(p.do_tile, record, tiles_, address_of(pool), helpers)
            if p.dgamma:
                call(p.round_dgamma, record, 0, 0)
            if p.dbeta:
                call(p.round_dbeta, record, 1, 0)
        _free(memory)
        restore(word)
        return done

    arrays = types.UniTuple(PLACE, ARRAYS)
    return compiled(work, types.int64(arrays, types.float64, PLACE, PLACE, types.int64))
