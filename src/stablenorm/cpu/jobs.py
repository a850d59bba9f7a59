"""
What Python calls: from arrays to the record of a call, then tiles on all threads that take part.

One function for each set of dtypes. Their names and the digest of all sources are what the machine
code on disk is found by: each refers to `stamp`, and none to a compiled function in a variable, whose
identity changes with the process.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import types

from stablenorm.cpu import tiles, wide_tiles
from stablenorm.cpu.compiling import ELEMENTS, STAMP, array_type, compiled
from stablenorm.cpu.layout import OWN_CACHE, PAST_CACHES, backward_rows, forward_rows
from stablenorm.cpu.memory import LINE, address, bits_of, further, pasted, pointer, width
from stablenorm.cpu.pool import run
from stablenorm.cpu.processor import restore, set_default
from stablenorm.cpu.record import SIZE, Call, float64_at, write_record
from stablenorm.cpu.sums import clear, merge, round_sums, widen
from stablenorm.cpu.tiles import STAGED, padded, way_of
from stablenorm.cpu.wide import LARGEST, SMALLEST, is_moderate
from stablenorm.formats import FLOAT64

_padded: Any = padded.py_func
_VECTOR, _WORDS, _MARKS = types.float64[::1], types.int64[::1], types.uint8[::1]

# What a job returns: done; nothing done, since it needs arrays whose rows are contiguous; nothing
# done, since gamma, beta or eps is of extreme size.
DONE, COPY, REFERENCE = range(3)

# Bytes of a record, in whole lines.
_RECORD = SIZE + -SIZE % LINE

# Columns of the tiles' sums that are added up at a time, and so stay in the first-level cache.
_BLOCK = 512


class Plan(NamedTuple):
    """What is known of a call from its dtypes and shape."""

    job: Any
    wide: bool
    tile_rows: int
    tiles: int
    # float64 of scratch memory: of all threads, and of each.
    shared: int
    each: int
    # For the job: rows per tile, whether results go past the caches, the function that takes
    # tiles, and bytes per thread.
    words: Any

    def scratch(self, threads: int) -> Any:
        """Return scratch memory for so many threads."""
        return np.empty(self.shared + self.each * threads)


def _plan(
    job: Any, wide: bool, size: int, shape: Any, tile_rows: int, function: int, each: int
) -> Plan:
    rows, n = shape
    each += -each % LINE
    shared = (_RECORD + LINE) // 8 + 2 * _padded(n)
    nbytes = rows * n * size
    flags = nbytes >= PAST_CACHES, nbytes > OWN_CACHE
    words = np.array([tile_rows, flags[0], function, each, flags[1]])
    return Plan(job, wide, tile_rows, -(-rows // tile_rows), shared, each // 8, words)


@pasted
def _has_contiguous_rows(array):
    return array.strides[1] == width(pointer(array)) or array.shape[1] == 1


@pasted
def _has_gaps(array):
    return array.strides[0] != array.shape[1] * width(pointer(array)) and array.shape[0] > 1


@pasted
def _begin(scratch):
    """Return the address of the first line of `scratch`."""
    return (address(pointer(scratch)) + LINE - 1) & -LINE


# ---- forward ----


@functools.lru_cache(1024)
def forward_plan(x_dtype: Any, gamma_dtype: Any, beta_dtype: Any, shape: tuple[int, int]) -> Plan:
    """Return how the forward of such arrays is done."""
    wide = FLOAT64.dtype in (x_dtype, gamma_dtype, beta_dtype)
    of = wide_tiles if wide else tiles
    return _plan(
        _forward_job(x_dtype, gamma_dtype, beta_dtype),
        wide,
        x_dtype.itemsize,
        shape,
        forward_rows(*shape),
        of.forward_tiles(ELEMENTS[x_dtype]),
        of.scratch_bytes(shape[1], False),
    )


@functools.cache
def _forward_job(x_dtype: Any, gamma_dtype: Any, beta_dtype: Any) -> Any:
    stamp, wide = STAMP, FLOAT64.dtype in (x_dtype, gamma_dtype, beta_dtype)

    def forward(x, gamma, beta, eps, y, numbers, tails, marks, scratch, plan, pool, helpers):
        rows, n = x.shape
        way = way_of(address(pointer(y)), address(pointer(x)), plan[1] != 0 and not _has_gaps(y))
        if not (_has_contiguous_rows(x) and _has_contiguous_rows(y)) or stamp == "":
            return COPY
        if way == STAGED and (wide or _has_gaps(y)):
            return COPY
        word, done = set_default(), DONE
        if wide and not (
            is_moderate(pointer(gamma), n, SMALLEST)
            and is_moderate(pointer(beta), n, 0.0)
            and (eps == 0.0 or SMALLEST <= eps <= LARGEST)
        ):
            done = REFERENCE
        else:
            record, apart = _begin(scratch), 8 * padded(n)
            parameters = record + _RECORD
            widen(pointer(gamma), float64_at(parameters), n)
            widen(pointer(beta), float64_at(parameters + apart), n)
            call = Call(
                address(pointer(x)), address(pointer(y)), 0, parameters, parameters + apart,
                np.int64(bits_of(eps)), address(pointer(numbers)), numbers.strides[0],
                address(pointer(tails)), address(pointer(marks)), 0,
                x.strides[0], y.strides[0], 0, rows, n, plan[0],
                parameters + 2 * apart, plan[3], way, 1, plan[4],
            )  # fmt: skip
            write_record(call, record)
            run(plan[2], record, pool, helpers)
        restore(word)
        return done

    return compiled(
        forward,
        types.int64(
            array_type(x_dtype, 2), array_type(gamma_dtype, 1), array_type(beta_dtype, 1),
            types.float64, array_type(x_dtype, 2, out=True), types.float64[:, :], _VECTOR, _MARKS,
            _VECTOR, _WORDS, _WORDS, types.int64,
        ),
    )  # fmt: skip


# ---- backward ----


@functools.lru_cache(1024)
def backward_plan(
    dy_dtype: Any, x_dtype: Any, gamma_dtype: Any, wide: bool, summing: bool, shape: tuple[int, int]
) -> Plan:
    """Return how the backward of such arrays is done."""
    of = wide_tiles if wide else tiles
    return _plan(
        _backward_job(dy_dtype, x_dtype, gamma_dtype, wide),
        wide,
        x_dtype.itemsize,
        shape,
        backward_rows(*shape),
        of.backward_tiles(ELEMENTS[dy_dtype], ELEMENTS[x_dtype], summing),
        of.scratch_bytes(shape[1], True),
    )


@functools.cache
def _backward_job(dy_dtype: Any, x_dtype: Any, gamma_dtype: Any, wide: bool) -> Any:
    stamp = STAMP

    def backward(
        dy, x, gamma, numbers, tails, marks, dx, wanted, sums, scratch, plan, pool, helpers
    ):
        rows, n = x.shape
        way = way_of(address(pointer(dx)), address(pointer(dy)), plan[1] != 0 and not _has_gaps(dx))
        if not (_has_contiguous_rows(dy) and _has_contiguous_rows(x)) or stamp == "":
            return COPY
        if not _has_contiguous_rows(dx) or (way == STAGED and not wide and _has_gaps(dx)):
            return COPY
        word, done = set_default(), DONE
        if wide and not is_moderate(pointer(gamma), n, SMALLEST):
            done = REFERENCE
        else:
            record = _begin(scratch)
            parameters = record + _RECORD
            widen(pointer(gamma), float64_at(parameters), n)
            call = Call(
                address(pointer(x)), address(pointer(dx)), address(pointer(dy)), parameters, 0,
                0, address(pointer(numbers)), numbers.strides[0],
                address(pointer(tails)) if tails.size else 0, address(pointer(marks)), _begin(sums),
                x.strides[0], dx.strides[0], dy.strides[0], rows, n, plan[0],
                parameters + 8 * padded(n), plan[3], way, wanted, plan[4],
            )  # fmt: skip
            write_record(call, record)
            run(plan[2], record, pool, helpers)
        restore(word)
        return done

    backward.__name__ = "wide_backward" if wide else "backward"
    return compiled(
        backward,
        types.int64(
            array_type(dy_dtype, 2), array_type(x_dtype, 2), array_type(gamma_dtype, 1),
            types.float64[:, :], _VECTOR, _MARKS, array_type(x_dtype, 2, out=True), types.int64,
            _VECTOR, _VECTOR, _WORDS, _WORDS, types.int64,
        ),
    )  # fmt: skip


def sums_of(tiles: int, n: int) -> Any:
    """Return memory for dgamma and dbeta of so many tiles, and for adding them up."""
    return np.empty(4 * _padded(n) * tiles + 2 * _BLOCK + LINE // 8)


def sums_from(sums: Any, tile: int, n: int) -> Any:
    """Return the memory of `sums_of` from a tile on."""
    return sums[4 * _padded(n) * tile :]


@functools.cache
def total_job(dtype: Any) -> Any:
    """Return what adds up the tiles' dgamma and dbeta, those that have elements, and rounds them."""
    stamp = STAMP

    def total(sums, n, tiles, dgamma, dbeta):
        if stamp == "":
            return
        word = set_default()
        first, apart = _begin(sums), 8 * padded(n)
        high = float64_at(first + 4 * tiles * apart)
        low = further(high, 8 * _BLOCK)
        for start in range(0, n, _BLOCK):
            count = min(_BLOCK, n - start)
            for which in range(2):
                to = pointer(dbeta) if which else pointer(dgamma)
                if (dbeta.size if which else dgamma.size) == 0:
                    continue
                clear(high, 2 * _BLOCK)
                for tile in range(tiles):
                    part = first + (4 * tile + 2 * which) * apart + 8 * start
                    merge(float64_at(part), high, low, count)
                    merge(float64_at(part + apart), high, low, count)
                round_sums(high, low, count, further(to, start * width(to)))
        restore(word)

    out = array_type(dtype, 1, out=True)
    return compiled(total, types.void(_VECTOR, types.int64, types.int64, out, out))
