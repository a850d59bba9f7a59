"""
What Python calls: from arrays to the record of a call, then tiles on all threads that take part.

There is one such function. What depends on dtypes is compiled apart, as C functions whose addresses
are among the words of a `Plan`, and named by its types.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import types

from stablenorm.cpu import tiles, wide_tiles
from stablenorm.cpu.compiling import ELEMENTS, address_of_compiled, compiled
from stablenorm.cpu.layout import OWN_CACHE, PAST_CACHES, backward_rows, forward_rows
from stablenorm.cpu.memory import LINE, bits_of, further, pasted, pointer_at, width
from stablenorm.cpu.nearest import is_exact, put_decided, sums_bound, total_error
from stablenorm.cpu.pool import MOST_HELPERS, run
from stablenorm.cpu.processor import call, restore, set_default
from stablenorm.cpu.record import ARRAYS, AT, PLACE, Call, address_of, float64_at, read_record
from stablenorm.cpu.sums import add_to, fill, merge, round_sums, widen
from stablenorm.cpu.tiles import STAGED, STRAIGHT, STREAMED, padded
from stablenorm.cpu.wide import LARGEST, SMALLEST, is_moderate
from stablenorm.threads import SMALL

# What the job returns: done; nothing done, since results may not overwrite the input; nothing done,
# since gamma, beta or eps is of extreme size; nothing done, for want of memory.
DONE, COPY, REFERENCE, NO_MEMORY = range(4)

# Bytes of a record, in whole lines.
_RECORD = 8 * len(AT) + -8 * len(AT) % LINE

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


_BY_REFERENCE = Plan(None, 0, False, REFERENCE, False, 0, 0, 0)

_known = set(ELEMENTS).issuperset


def _plan(part: Call, dtype: Any, strides: Any, wide: bool) -> Plan:
    """Fill in what both directions share, given the dtype of x."""
    rows, n = part.rows, part.n
    row_bytes = n * dtype.itemsize
    *_, x_stride, out_stride = strides or (row_bytes, row_bytes)
    straight = wide or out_stride != row_bytes
    streamed = rows * row_bytes >= PAST_CACHES and not straight
    tiles_ = -(-rows // part.tile_rows)
    whole = part._replace(
        x_stride=x_stride, out_stride=out_stride, tiles=tiles_,
        way=STREAMED if streamed else STRAIGHT, ahead=rows * row_bytes > OWN_CACHE,
        over_input=part.over_input or not straight,
        scratch_bytes=part.scratch_bytes + -part.scratch_bytes % LINE,
        shared_bytes=_RECORD + 2 * LINE + 16 * padded.py_func(n) + 24 * _BLOCK,
    )  # fmt: skip
    elements = rows * n * (_COST if wide else 1)
    helpers = 0 if elements < _LEAST_SHARED else min(tiles_ - 1, MOST_HELPERS)
    state, small = COPY if strides == () else DONE, elements < SMALL
    return Plan(np.array(whole), helpers, small, state, wide, rows, part.tile_rows, tiles_)


# An element in double-double takes as long as so many others.
_COST = 4

# Fewer elements than this, 2 microseconds of work, are shared with nobody.
_LEAST_SHARED = 1 << 13


@functools.lru_cache(1024)
def forward_plan(
    x_dtype: Any, gamma_dtype: Any, beta_dtype: Any, shape: Any, strides: Any, nearest: bool = False
) -> Plan:
    """
    Return how the forward of such arrays is done; None stands for the dtype of what is missing.

    `strides` are what `row_strides` returns of x and y.
    """
    if not _known((x_dtype, gamma_dtype, beta_dtype)):
        return _BY_REFERENCE
    # Not `==`: to NumPy its float64 equals None.
    given = (each for each in (x_dtype, gamma_dtype, beta_dtype) if each is not None)
    wide = nearest or any(each.type is np.float64 for each in given)
    rows, n, of = math.prod(shape[:-1]), shape[-1], wide_tiles if wide else tiles
    rounding = (nearest,) if wide else ()
    part = Call(
        rows=rows, n=n, tile_rows=forward_rows(rows, n),
        do_tile=of.forward_tile(ELEMENTS[x_dtype], *rounding),
        widen_gamma=_widener(ELEMENTS[gamma_dtype]), widen_beta=_widener(ELEMENTS[beta_dtype]),
        # Of wide rows that are extreme, all of x is needed once more.
        scratch_bytes=of.scratch_bytes(n, False), over_input=False,
    )  # fmt: skip
    return _plan(part, x_dtype, strides, wide)


@functools.lru_cache(1024)
def backward_plan(
    inputs: Any, totals: Any, wide: bool, shape: Any, strides: Any, nearest: bool = False
) -> Plan:
    """
    Return how the backward of such arrays is done.

    `inputs` are the dtypes of dy, x and gamma, `totals` those of dgamma and dbeta, None where they
    are not wanted. `strides` are those of dy, x and dx.
    """
    if not _known((*inputs, *totals)):
        return _BY_REFERENCE
    dy_dtype, x_dtype, gamma_dtype = inputs
    summing = any(each is not None for each in totals)
    rows, n, of = math.prod(shape[:-1]), shape[-1], wide_tiles if wide else tiles
    rounding = (nearest,) if wide else ()
    part = Call(
        rows=rows, n=n, dy_stride=strides[0] if strides else n * dy_dtype.itemsize,
        tile_rows=backward_rows(rows, n),
        do_tile=of.backward_tile(ELEMENTS[dy_dtype], ELEMENTS[x_dtype], summing, *rounding),
        widen_gamma=_widener(ELEMENTS[gamma_dtype]),
        round_dgamma=_rounder(ELEMENTS[totals[0]], nearest),
        round_dbeta=_rounder(ELEMENTS[totals[1]], nearest),
        scratch_bytes=of.scratch_bytes(n, True), over_input=wide,
    )  # fmt: skip
    return _plan(part, x_dtype, strides, wide)


def sums_size(tiles: int, n: int, nearest: bool) -> int:
    """Return the float64 that hold dgamma and dbeta of so many tiles, and their bounds."""
    return (6 if nearest else 4) * padded.py_func(n) * tiles


# ---- what is compiled ----


@address_of_compiled
def _widener(element: Any) -> Any:
    def widen_all(source, to, n):
        """Copy n elements at an address into float64 at another."""
        widen(pointer_at(source, element), float64_at(to), n)

    return widen_all


@address_of_compiled
def _rounder(element: Any, nearest: bool) -> Any:
    def round_all(record, which, _):
        """Add up the tiles' dgamma (0) or dbeta (1), and round them."""
        p = read_record(record)
        out = pointer_at(p.dbeta if which else p.dgamma, element)
        apart = 8 * padded(p.n)
        high = float64_at(record + p.shared_bytes - 2 * LINE - 24 * _BLOCK)
        low, size = further(high, 8 * _BLOCK), further(high, 16 * _BLOCK)
        for start in range(0, p.n, _BLOCK):
            count = min(_BLOCK, p.n - start)
            fill(high, 3 * _BLOCK, 0.0)
            for tile in range(p.tiles):
                sums = p.sums + tile * apart * (6 if p.spread else 4) + 8 * start
                part = sums + 2 * which * apart
                if p.spread:
                    add_to(size, float64_at(sums + (4 + which) * apart), count)
                merge(float64_at(part), high, low, count)
                merge(float64_at(part + apart), high, low, count)
            to = further(out, start * width(out))
            if nearest:
                _decide_sums(p, (high, low, size), start, count, to, which)
            else:
                round_sums(high, low, count, to)

    return round_all


@pasted
def _decide_sums(p, sums, start, count, out, which):
    high, low, size = sums
    bound = sums_bound(p.n, p.tile_rows, p.tiles)
    most, last = 0.0, 0.0
    for tile in range(p.tiles):
        ranges = further(float64_at(p.sums), 8 * ((6 * tile + 5) * padded(p.n) + p.n))
        most, last = max(most, ranges[0]), max(last, ranges[1])
    exact = which and is_exact(float(p.rows), most, last)
    undecided = pointer_at(p.undecided + which * p.n + start, np.uint8)
    for j in range(count):
        error = 0.0 if exact else total_error(low[j], bound * size[j])
        undecided[j] = not put_decided(out, j, high[j], low[j], error)


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

    def work(arrays, eps, words, pool, helpers):
        plan = pointer_at(address_of(words), np.int64)
        p = read_record(address_of(words))
        x, out, dy = address_of(arrays[0]), address_of(arrays[1]), address_of(arrays[2])
        in_place = out == (dy if dy != 0 else x)
        if in_place and p.over_input == 0:
            return COPY
        own_sums = (p.round_dgamma | p.round_dbeta) != 0 and address_of(arrays[AT.sums]) == 0
        sums = 0
        if own_sums:
            vectors = 6 if address_of(arrays[AT.spread]) else 4
            sums = 8 * vectors * padded(p.n) * p.tiles
        memory = _malloc(p.shared_bytes + p.scratch_bytes * (1 + helpers) + sums)
        if memory == 0:
            return NO_MEMORY
        word, done = set_default(), DONE
        record = (memory + LINE - 1) & -LINE
        to = pointer_at(record, np.int64)
        for i in range(ARRAYS, len(AT)):
            to[i] = plan[i]
        for i in range(ARRAYS):
            to[i] = address_of(arrays[i])
        gamma = record + _RECORD
        beta, scratch = gamma + 8 * padded(p.n), record + p.shared_bytes - LINE
        _prepare(p.widen_gamma, to[AT.gamma], gamma, p.n, 1.0)
        if dy == 0:
            _prepare(p.widen_beta, to[AT.beta], beta, p.n, -0.0)
        to[AT.gamma], to[AT.beta], to[AT.eps] = gamma, beta, np.int64(bits_of(eps))
        to[AT.scratch] = scratch
        if own_sums:
            to[AT.sums] = scratch + p.scratch_bytes * (1 + helpers)
        if in_place:
            to[AT.way] = STAGED
        p = read_record(record)
        if p.marks and _is_extreme(p, gamma, beta, eps):
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
