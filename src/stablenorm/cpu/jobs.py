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
from stablenorm.cpu.layout import NUMBERED, OWN_CACHE, PAST_CACHES, backward_rows, forward_rows
from stablenorm.cpu.memory import LINE, bits_of, float_of, further, inner, pasted, pointer_at, width
from stablenorm.cpu.nearest import digits_of, is_exact, put_decided, sums_bound, total_error
from stablenorm.cpu.pool import MOST_HELPERS, pool_for, run
from stablenorm.cpu.processor import call, restore, set_default
from stablenorm.cpu.record import ARRAYS, AT, PLACE, Call, address_of, float64_at, read_record
from stablenorm.cpu.sums import add_offset, add_to, fill, merge, put_sums, round_sums, widen
from stablenorm.cpu.tiles import STAGED, STRAIGHT, STREAMED, padded
from stablenorm.cpu.wide import LARGEST, SMALLEST
from stablenorm.threads import SMALL, get_num_threads

# A sample of more elements, the time of ten calls, is worth all threads, unless several wait for each.
_LARGE, _SEVERAL = 1 << 18, 4

# What the job returns: done; nothing done, since results may not overwrite the input; nothing done,
# since gamma, beta or eps is of extreme size; nothing done, for want of memory. Of a plan: by numbers. Of a
# call by numbers: done, and all other rows cleared.
DONE, COPY, REFERENCE, NO_MEMORY, BY_NUMBERS, CLEARED = range(6)

# Bytes of a record, in whole lines.
_RECORD = 8 * len(AT) + -8 * len(AT) % LINE

# Columns of the tiles' sums that are added up at a time, and so stay in the first-level cache.
_BLOCK = 512

# An element in double-double takes as long as so many others.
_COST = 4

# Fewer elements than this, 2 microseconds of work, are shared with nobody.
_LEAST_SHARED = 1 << 13

_malloc = types.ExternalFunction("malloc", types.intp(types.intp))
_free = types.ExternalFunction("free", types.void(types.intp))


class Plan(NamedTuple):
    """What is known of a call from its dtypes, shape and strides."""

    words: Any = None
    # Threads that there is work for, besides the caller; whether it is too little to wake any.
    helpers: int = 0
    small: bool = False
    # COPY where the elements of rows are not one behind the other, BY_NUMBERS of some rows of contiguous
    # arrays, REFERENCE where float16 is not to be had; else DONE.
    state: int = REFERENCE
    wide: bool = False
    rows: int = 0


_known = set(ELEMENTS).issuperset


@functools.lru_cache(2048)
def make_plan(shape: Any, strides: Any, x: Any, parameters: Any, pulled: Any, options: Any) -> Plan:
    """
    Return how a call is done: forward or, given what is `pulled` back, backward.

    `strides` are what `row_strides` returns of dy, x and the result. `x` is a dtype, as `parameters`
    are, of gamma and beta, None of what is missing; `pulled` are those of dy, dgamma and dbeta, and
    whether the forward was done in double-double. `options` are the kind, gamma_offset and rounding of
    the norm, then "plus" if a residual or dsum is to be added, or "jvp".
    """
    kind, gamma_offset, rounding, *others = options
    nearest, offset, plus = rounding == "nearest", gamma_offset != 0.0, "plus" in others
    numbered = strides == NUMBERED
    dy, *totals, wide = pulled or (None, None, None, nearest)
    # Not `==` below: to NumPy its float64 equals None.
    if not _known((x, *parameters, dy, *totals)):
        return Plan()
    if dy is None:
        given = (each for each in (x, *parameters) if each is not None)
        wide = nearest or any(each.type is np.float64 for each in given)
    rows, n, of = math.prod(shape[:-1]), shape[-1], wide_tiles if wide else tiles
    gamma, beta = (ELEMENTS[each] for each in parameters)
    row_bytes = n * x.itemsize
    if dy is None:
        tile_rows, dy_bytes = forward_rows(rows, n), 0
        how = (nearest, kind, offset) if wide else (numbered, plus, kind)
        do_tile = of.forward_tile(ELEMENTS[x], *how)
    else:
        tile_rows, dy_bytes = backward_rows(rows, n), n * dy.itemsize
        summing = any(each is not None for each in totals)
        how = (plus, nearest, kind, offset) if wide else (numbered, plus, kind)
        jvp = "jvp" in others
        do_tile = of.backward_tile(ELEMENTS[dy], ELEMENTS[x], summing, *how, jvp)
    dy_stride, x_stride, out_stride, *more = (not numbered and strides) or (
        dy_bytes,
        *[row_bytes] * 4,
    )
    source_stride, plus_stride = more or (0, 0)
    straight = wide or out_stride != row_bytes
    streamed = rows * row_bytes >= PAST_CACHES and not straight
    scratch_bytes, tiles_ = of.scratch_bytes(n, dy is not None), -(-rows // tile_rows)
    words = Call(
        rows=rows, n=n, dy_stride=dy_stride, x_stride=x_stride, out_stride=out_stride,
        source_stride=source_stride, plus_stride=plus_stride,
        tile_rows=tile_rows, tiles=tiles_, do_tile=do_tile,
        widen_gamma=_widener(gamma), widen_beta=_widener(beta),
        round_dgamma=_rounder(ELEMENTS[totals[0]], nearest),
        round_dbeta=_rounder(ELEMENTS[totals[1]], nearest),
        sums_bytes=8 * (6 if nearest else 4) * padded.py_func(n),
        scratch_bytes=scratch_bytes + -scratch_bytes % LINE,
        shared_bytes=_RECORD + 2 * LINE + 8 * (2 + offset) * padded.py_func(n) + 24 * _BLOCK,
        gamma_offset=int(np.float64(gamma_offset).view(np.int64)),
        way=STREAMED if streamed else STRAIGHT, ahead=rows * row_bytes > OWN_CACHE,
        # Of wide rows that are extreme, all of x is needed once more.
        over_input=not straight or (wide and dy is not None),
    )  # fmt: skip
    elements = rows * n * (_COST if wide else 1)
    helpers = 0 if elements < _LEAST_SHARED else min(tiles_ - 1, MOST_HELPERS)
    state = BY_NUMBERS if numbered else COPY if strides == () else DONE
    return Plan(np.array(words), helpers, elements < SMALL, state, wide, rows)


# ---- what is compiled ----


@address_of_compiled
def _widener(element: Any) -> Any:
    def widen_all(source, to, n):
        """Copy n elements at an address into float64 at another."""
        widen(pointer_at(source, element), float64_at(to), n)

    return widen_all


@address_of_compiled
def _rounder(element: Any, nearest: bool) -> Any:
    # Sums that are merged with others are four words, and not rounded.
    partial = element == "partial"
    word, words = (np.float64, 4) if partial else (element, 1)

    def round_all(record, which, _):
        """Add up the tiles' dgamma (0) or dbeta (1), and round them."""
        p = read_record(record)
        out = pointer_at(p.dbeta if which else p.dgamma, word)
        apart = 8 * padded(p.n)
        if p.tiles == 1 and not nearest and not partial and p.old == 0:
            part = p.sums + 2 * which * apart
            round_sums(float64_at(part), float64_at(part + apart), p.n, out)
            return
        high = float64_at(record + p.shared_bytes - 2 * LINE - 24 * _BLOCK)
        low, size = further(high, 8 * _BLOCK), further(high, 16 * _BLOCK)
        for start in range(0, p.n, _BLOCK):
            count = min(_BLOCK, p.n - start)
            fill(high, 3 * _BLOCK, 0.0)
            for tile in range(p.tiles):
                sums = p.sums + tile * p.sums_bytes + 8 * start
                part = sums + 2 * which * apart
                if nearest:
                    add_to(size, float64_at(sums + (4 + which) * apart), count)
                merge(float64_at(part), high, low, count)
                merge(float64_at(part + apart), high, low, count)
            if p.old != 0:
                merge(float64_at(p.old + 8 * (which * p.n + start)), high, low, count)
            to = further(out, start * words * width(out))
            if nearest:
                _find_errors(p, (high, low, size), start, count, to, which)
            if partial:
                put_sums(high, low, size if nearest else None, count, to)
            elif nearest:
                _decide_sums(p, (high, low, size), start, count, to, which)
            else:
                round_sums(high, low, count, to)

    return round_all


@pasted
def _find_errors(p, sums, start, count, out, which):
    """Replace the sizes of sums by bounds of their errors."""
    _, low, size = sums
    most, last, more, tiles_, rows = 0.0, 0.0, 0.0, p.tiles, p.tiles * p.tile_rows
    for tile in range(p.tiles):
        ranges = float64_at(p.sums + tile * p.sums_bytes + 8 * (5 * padded(p.n) + p.n))
        most, last, more = max(most, ranges[0]), max(last, ranges[1]), more + ranges[2]
    if p.old != 0:
        # As a tile more, of one row.
        old = float64_at(p.old + 8 * (which * p.n + start))
        tiles_, rows = tiles_ + 1, rows + 1
        for j in range(count):
            part = abs(old[j])
            size[j] += part
            if part > 0.0:
                most, last = max(most, part), max(last, digits_of(out) / part)
    bound = sums_bound(p.n, p.tile_rows, tiles_)
    exact = which and is_exact(float(rows), most, last)
    more = more if which else 0.0
    for j in range(count):
        size[j] = 0.0 if exact else total_error(low[j], bound * (size[j] + more))


@pasted
def _decide_sums(p, sums, start, count, out, which):
    high, low, error = sums
    undecided = pointer_at(p.undecided + which * p.n + start, np.uint8)
    for j in range(count):
        # There is one NaN, whatever that of an old value is.
        known = high[j] == high[j] and put_decided(out, j, high[j], low[j], error[j])
        undecided[j] = not known


@inner
def _is_moderate(parameter, n, least):
    """Tell whether all of n float64 are 0 or between `least` and the largest in size."""
    moderate = True
    for j in range(n):
        size = abs(parameter[j])
        moderate = moderate and (size == 0.0 or least <= size <= LARGEST)
    return moderate


@inner
def _prepare(function, source, to, n, neutral):
    """Copy gamma or beta into float64; without it, write what changes nothing."""
    if source == 0:
        fill(float64_at(to), n, neutral)
    else:
        call(function, source, to, n)


def _do(arrays, eps, words, pool, helpers):
    """
    Do a call, or one for each of several samples; return DONE, or what kept it from beginning.

    `arrays` are in the order of `Call`, `words` those of a plan, `pool` those of the pool.
    """
    p = read_record(address_of(words))
    x, out, dy = address_of(arrays[0]), address_of(arrays[1]), address_of(arrays[2])
    in_place = out == (dy if dy != 0 else x)
    if in_place and p.over_input == 0:
        return COPY
    own_bytes = p.shared_bytes + p.scratch_bytes
    if (p.round_dgamma | p.round_dbeta) != 0 and address_of(arrays[AT.sums]) == 0:
        own_bytes += p.sums_bytes * p.tiles
    # Of samples, each thread needs all of that.
    more = LINE + _RECORD + own_bytes * helpers if p.samples else p.scratch_bytes * helpers
    memory = _malloc(own_bytes + more)
    if memory == 0:
        return NO_MEMORY
    word, done = set_default(), DONE
    record = (memory + LINE - 1) & -LINE
    plan, to = pointer_at(address_of(words), np.int64), pointer_at(record, np.int64)
    for i in range(ARRAYS, len(AT)):
        to[i] = plan[i]
    for i in range(ARRAYS):
        to[i] = address_of(arrays[i])
    p = read_record(record)
    p.eps = np.int64(bits_of(eps))
    if in_place:
        p.way = STAGED
    if p.samples:
        # Behind the words of the plan; and then whether all are done.
        p.apart, p.own_bytes = address_of(words) + 8 * len(AT), own_bytes
        run(p.do_sample, record, p.samples, address_of(pool), helpers)
    else:
        done = _do_rows(record, address_of(pool), helpers)
    _free(memory)
    restore(word)
    return done


@inner
def _do_rows(record, pool, helpers):
    """Do a call, given its record and the memory behind it; return DONE or REFERENCE."""
    p = read_record(record)
    gamma, dy, eps = record + _RECORD, p.dy, float_of(p.eps)
    beta = gamma + 8 * padded(p.n)
    _prepare(p.widen_gamma, p.gamma, gamma, p.n, 1.0)
    if p.gamma_offset != 0:
        low = float64_at(beta + 8 * padded(p.n))
        add_offset(float64_at(gamma), float_of(p.gamma_offset), low, p.n)
    if dy == 0:
        _prepare(p.widen_beta, p.beta, beta, p.n, -0.0)
    p.gamma, p.beta = gamma, beta
    p.scratch = record + p.shared_bytes - LINE
    if p.sums == 0:
        p.sums = p.scratch + p.scratch_bytes * (1 + helpers)
    if p.marks and not (
        _is_moderate(float64_at(gamma), p.n, SMALLEST)
        and (dy != 0 or _is_moderate(float64_at(beta), p.n, 0.0))
        and (eps == 0.0 or SMALLEST <= eps <= LARGEST)
    ):
        return REFERENCE
    tiles_ = (p.rows + p.tile_rows - 1) // p.tile_rows
    run(p.do_tile, record, tiles_, pool, helpers)
    if p.dgamma:
        call(p.round_dgamma, record, 0, 0)
    if p.dbeta:
        call(p.round_dbeta, record, 1, 0)
    return DONE


@address_of_compiled
def sampler() -> Any:
    """Return what does the call of a sample, as a thread alone would: its bits are the same."""

    def do_sample(record, number, me):
        p = read_record(record)
        own = record + _RECORD + me * p.own_bytes
        apart = pointer_at(p.apart, np.int64)
        given, to = pointer_at(record, np.int64), pointer_at(own, np.int64)
        for i in range(len(AT)):
            # What is missing is missing of all samples.
            to[i] = given[i] + number * apart[i] if i < ARRAYS and given[i] != 0 else given[i]
        if _do_rows(own, 0, 0) != DONE:
            apart[ARRAYS] = REFERENCE

    return do_sample


_ARRAYS = types.UniTuple(PLACE, ARRAYS)
do = compiled(_do, types.int64(_ARRAYS, types.float64, PLACE, PLACE, types.int64))


def do_each(plan: Plan, arrays: Any, eps: float, threads: int | None) -> int:
    """Do the call of each sample, dealt out to the threads as wholes; return DONE or REFERENCE."""
    x, count = arrays[0], len(arrays[0])
    few = x.size > _LARGE * count and count < _SEVERAL * (threads or get_num_threads())
    if plan.state != DONE or few:
        return REFERENCE
    apart = (0 if each is None else each.strides[0] for each in arrays)
    words = np.array((*plan.words, *apart, DONE))
    words[AT.samples], words[AT.do_sample] = count, sampler()
    # As one call would of all; results that may overwrite the input may go past the caches, but wide ones.
    words[AT.ahead] = x.nbytes > OWN_CACHE
    if x.nbytes >= PAST_CACHES and words[AT.over_input] and not plan.wide:
        words[AT.way] = STREAMED
    most = 0 if x.size < _LEAST_SHARED else min(count - 1, MOST_HELPERS)
    pool, helpers = pool_for(most, x.size < SMALL, threads) if most else (None, 0)
    state = do(arrays, eps, words, pool, helpers)
    return DONE if state == DONE == words[len(AT) + ARRAYS] else REFERENCE
