"""
`_narrow` for rows of few elements: a vector holds one column of eight rows.

There, a short row fills a part of a vector, and pays for sums over lanes, a square root and
divisions of its own: at n = 1 an element took 30 times as long as at n = 64. Here, whatever is
computed per row is computed for eight rows by one instruction, and four such vectors are in
flight: a group of 32 rows.

A group is read once: its columns are kept as float64 in the first-level cache, where all passes
over it find them. All of it is read before any of it is written, so that results may replace what
they are computed from. Rows that do not fill a group go by eights, and the last few among rows of
zeros: the arithmetic of a row is the same in each case, and zeros add nothing to dgamma and dbeta.

This is what `_tiny_forward` and `_tiny_backward` share.
"""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE
from stablenorm.kernels._vector_memory import (
    LOAD_COLUMNS,
    STORE_COLUMNS,
    address,
    itemsize,
    load,
    load_column,
    load_some,
    pointer_at,
    prefetch,
    store,
    store_column,
    store_some,
)
from stablenorm.kernels._vectors import ZEROS

# The longest rows for which this is faster than `_narrow`. Forward: at n = 64 by 1.15 for float32
# and 1.3 for bfloat16, in the caches and beyond them; with AVX2 alone by 1.0 and 1.35. Not at 64,
# though: a single row of 64 takes 370 ns here, 108 there. Backward: at
# 40 by 1.02 and 1.2, beyond the caches by 1.2 of both; with AVX2 alone by 0.9 and 1.2.
# (2-core AMD EPYC 9005, November 2026, as all figures of this file.)
LONGEST_FORWARD, LONGEST_BACKWARD = 63, 40

# Vectors in flight. With two, the forward took 1.15 to 1.35 times as long, with one 1.5 to 2.2
# times: sums over columns are chains, each addition waiting for the one before.
VECTORS = 4
GROUP = VECTORS * WIDTH

# Bytes from one vector of a column to the next, and from one column to the next, in float64.
VECTOR, COLUMN = 8 * WIDTH, 8 * GROUP

# Bytes ahead that lines are asked for, or a group where that is more: a time of 100 ns at n = 1.
# From 512 to 4096 nothing differed by more than the noise, but n = 1, where less is better.
AHEAD = 1024

# Bytes of results in the first-level cache that are then copied out past it. From 4 to 16 KiB
# nothing differed by more than the noise; the columns need the rest.
_STAGE = 1 << 13

_one = ZEROS[1]
_load_two, _load_four = LOAD_COLUMNS[2], LOAD_COLUMNS[4]
_store_two, _store_four = STORE_COLUMNS[2], STORE_COLUMNS[4]


@inner
def moved(place, offset):
    return pointer_at(address(place) + offset, place)


@inner
def as_pointer(place, like):
    return pointer_at(address(place), like)


# ---- rows to columns and back ----


@inner
def load_rows(x, stride, n, vectors, columns):
    """Write so many vectors of rows of `x` as columns of float64."""
    width, one = itemsize(x), _one()
    for vector in range(vectors):
        begin, to = vector * WIDTH * stride, moved(columns, vector * VECTOR)
        if n >= 4:
            # The last four may be some of the four before: the same numbers, once more.
            for col in range(0, n, 4):
                first = min(col, n - 4)
                _load_four(x, begin + first * width, stride, moved(to, first * COLUMN), COLUMN)
        elif n > 1:
            for col in range(n - 1):
                _load_two(x, begin + col * width, stride, moved(to, col * COLUMN), COLUMN)
        elif stride == width:
            store(to, 0, 0, load(x, begin, 0, one))
        else:
            store(to, 0, 0, load_column(x, begin, stride, one))


@inner
def store_rows(columns, vectors, n, y, stride):
    """Write columns of the type of `y` as so many vectors of its rows."""
    width, one = itemsize(y), _one()
    apart = GROUP * width
    for vector in range(vectors):
        begin, source = vector * WIDTH * stride, moved(columns, vector * WIDTH * width)
        if n >= 4:
            for col in range(0, n, 4):
                first = min(col, n - 4)
                _store_four(y, begin + first * width, stride, moved(source, first * apart), apart)
        elif n > 1:
            for col in range(n - 1):
                _store_two(y, begin + col * width, stride, moved(source, col * apart), apart)
        elif stride == width:
            store(y, begin, 0, load(source, 0, 0, one))
        else:
            store_column(y, begin, stride, load(source, 0, 0, one))


@inner
def copy_rows(x, stride, rows, n, y, y_stride):
    """Copy rows between places of the same type."""
    width, one = itemsize(x), _one()
    for row in range(rows):
        for col in range(0, n, WIDTH):
            count = min(n - col, WIDTH)
            elements = load_some(x, row * stride + col * width, 0, count, one)
            store_some(y, row * y_stride + col * width, 0, count, elements)


@inner
def copy_padded(x, stride, rows, n, to):
    """Copy fewer than eight rows, and after them rows of zeros, to be contiguous."""
    size = n * itemsize(x)
    for col in range(n):
        store(to, col * WIDTH * itemsize(x), 0, _one())
    copy_rows(x, stride, rows, n, to, size)


@inner
def copy_statistics(source, apart, rows, to, to_apart):
    """Copy mean, mean_lo and rstd, each `apart` from the next, of some rows."""
    for which in range(3):
        for row in range(rows):
            to[which * to_apart + row] = source[which * apart + row]


# ---- lines asked for early ----


@inner
def far_ahead(x, stride, n):
    """Return how far off the lines are that `expect` shall ask for; 0 unless contiguous."""
    if stride != n * itemsize(x):
        return 0
    group = GROUP * stride
    return max(group, AHEAD - AHEAD % group)


@inner
def expect(x, ahead, col):
    """
    Ask for as many bytes as a column of a group has.

    Spread over the columns, so that memory is busy throughout: all lines of a group at once made
    rows of 32 take 1.8 times as long beyond the caches.
    """
    if ahead:
        size = GROUP * itemsize(x)
        for line in range(0, size, LINE):
            prefetch(x, ahead + col * size + line, 0, _one())


# ---- memory that a tile works in ----


@inner
def working_space(columns, size):
    """Return memory for so many columns of a group, in float64, and `size` bytes."""
    return np.empty((LINE + columns * COLUMN + size) // 8 + 1, np.float64)


@inner
def after(columns, space):
    """Return the place after so many columns; the first begins a line."""
    begin = address(space)
    return pointer_at(begin + -begin % LINE + columns * COLUMN, space)


@inner
def staged_rows(n, width, streaming, stride):
    """Return how many rows are computed before they are copied out; 0 if they need not be."""
    if not streaming or stride != n * width:
        return 0
    return max(_STAGE // (n * width) // GROUP, 1) * GROUP
