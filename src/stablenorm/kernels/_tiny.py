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
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._narrow import _two_sum, sums_size
from stablenorm.kernels._vectors import (
    LOAD_COLUMNS,
    STORE_COLUMNS,
    WIDTH,
    ZEROS,
    address,
    fma,
    itemsize,
    load,
    load_column,
    load_everywhere,
    load_some,
    negative,
    pointer,
    pointer_at,
    prefetch,
    splat,
    square_root,
    store,
    store_column,
    store_some,
    sum_rows,
)

# The longest rows for which this is faster than `_narrow`. Forward: at n = 64 by 1.15 for float32
# and 1.3 for bfloat16, in the caches and beyond them; with AVX2 alone by 1.0 and 1.35. Not at 64,
# though: a single row of 64 takes 370 ns here, 108 there. Backward: at
# 40 by 1.02 and 1.2, beyond the caches by 1.2 of both; with AVX2 alone by 0.9 and 1.2.
# (2-core AMD EPYC 9005, November 2026, as all figures of this file.)
LONGEST_FORWARD, LONGEST_BACKWARD = 63, 40

# Vectors in flight. With two, the forward took 1.15 to 1.35 times as long, with one 1.5 to 2.2
# times: sums over columns are chains, each addition waiting for the one before.
_VECTORS = 4
GROUP = _VECTORS * WIDTH

# Bytes from one vector of a column to the next, and from one column to the next, in float64.
_VECTOR, _COLUMN = 8 * WIDTH, 8 * GROUP

# Bytes ahead that lines are asked for, or a group where that is more: a time of 100 ns at n = 1.
# From 512 to 4096 nothing differed by more than the noise, but n = 1, where less is better.
_AHEAD = 1024

# Bytes of results in the first-level cache that are then copied out past it. From 4 to 16 KiB
# nothing differed by more than the noise; the columns need the rest.
_STAGE = 1 << 13

_one, _group = ZEROS[1], ZEROS[_VECTORS]
_load_two, _load_four = LOAD_COLUMNS[2], LOAD_COLUMNS[4]
_store_two, _store_four = STORE_COLUMNS[2], STORE_COLUMNS[4]

# Division by zero gives what IEEE 754 says, not an exception.
_compiled = njit(error_model="numpy")


@_compiled
def _moved(place, offset):
    return pointer_at(address(place) + offset, place)


@_compiled
def _as(place, like):
    return pointer_at(address(place), like)


# ---- rows to columns and back ----


@_compiled
def _load_rows(x, stride, n, vectors, columns):
    """Write so many vectors of rows of `x` as columns of float64."""
    width, one = itemsize(x), _one()
    for vector in range(vectors):
        begin, to = vector * WIDTH * stride, _moved(columns, vector * _VECTOR)
        if n >= 4:
            # The last four may be some of the four before: the same numbers, once more.
            for col in range(0, n, 4):
                first = min(col, n - 4)
                _load_four(x, begin + first * width, stride, _moved(to, first * _COLUMN), _COLUMN)
        elif n > 1:
            for col in range(n - 1):
                _load_two(x, begin + col * width, stride, _moved(to, col * _COLUMN), _COLUMN)
        elif stride == width:
            store(to, 0, 0, load(x, begin, 0, one))
        else:
            store(to, 0, 0, load_column(x, begin, stride, one))


@_compiled
def _store_rows(columns, vectors, n, y, stride):
    """Write columns of the type of `y` as so many vectors of its rows."""
    width, one = itemsize(y), _one()
    apart = GROUP * width
    for vector in range(vectors):
        begin, source = vector * WIDTH * stride, _moved(columns, vector * WIDTH * width)
        if n >= 4:
            for col in range(0, n, 4):
                first = min(col, n - 4)
                _store_four(y, begin + first * width, stride, _moved(source, first * apart), apart)
        elif n > 1:
            for col in range(n - 1):
                _store_two(y, begin + col * width, stride, _moved(source, col * apart), apart)
        elif stride == width:
            store(y, begin, 0, load(source, 0, 0, one))
        else:
            store_column(y, begin, stride, load(source, 0, 0, one))


@_compiled
def _copy_rows(x, stride, rows, n, y, y_stride):
    """Copy rows between places of the same type."""
    width, one = itemsize(x), _one()
    for row in range(rows):
        for col in range(0, n, WIDTH):
            count = min(n - col, WIDTH)
            elements = load_some(x, row * stride + col * width, 0, count, one)
            store_some(y, row * y_stride + col * width, 0, count, elements)


@_compiled
def _copy_padded(x, stride, rows, n, to):
    """Copy fewer than eight rows, and after them rows of zeros, to be contiguous."""
    size = n * itemsize(x)
    for col in range(n):
        store(to, col * WIDTH * itemsize(x), 0, _one())
    _copy_rows(x, stride, rows, n, to, size)


@_compiled
def _copy_statistics(source, apart, rows, to, to_apart):
    """Copy mean, mean_lo and rstd, each `apart` from the next, of some rows."""
    for which in range(3):
        for row in range(rows):
            to[which * to_apart + row] = source[which * apart + row]


# ---- lines asked for early ----


@_compiled
def _ahead(x, stride, n):
    """Return how far off the lines are that `_expect` shall ask for; 0 unless contiguous."""
    if stride != n * itemsize(x):
        return 0
    group = GROUP * stride
    return max(group, _AHEAD - _AHEAD % group)


@_compiled
def _expect(x, ahead, col):
    """
    Ask for as many bytes as a column of a group has.

    Spread over the columns, so that memory is busy throughout: all lines of a group at once made
    rows of 32 take 1.8 times as long beyond the caches.
    """
    if ahead:
        size = GROUP * itemsize(x)
        for line in range(0, size, LINE):
            prefetch(x, ahead + col * size + line, 0, _one())


@_compiled
def _expect_statistics(statistics, apart):
    """Ask for those of rows to come: at n = 1 most of what is read, and up to 1.8 times faster."""
    for which in range(3):
        for line in range(0, _COLUMN, LINE):
            prefetch(statistics, 8 * which * apart + _AHEAD + line, 0, _one())


# ---- memory that a tile works in ----


@_compiled
def _space(columns, size):
    """Return memory for so many columns of a group, in float64, and `size` bytes."""
    return np.empty((LINE + columns * _COLUMN + size) // 8 + 1, np.float64)


@_compiled
def _after(columns, space):
    """Return the place after so many columns; the first begins a line."""
    begin = address(space)
    return pointer_at(begin + -begin % LINE + columns * _COLUMN, space)


@_compiled
def _staged_rows(n, width, streaming, stride):
    """Return how many rows are computed before they are copied out; 0 if they need not be."""
    if not streaming or stride != n * width:
        return 0
    return max(_STAGE // (n * width) // GROUP, 1) * GROUP


# ---- forward ----


@_compiled
def _forward_rows(
    x, stride, n, gamma, beta, eps, like, vectors, ahead, statistics, apart,
    columns, results, y, y_stride,
):  # fmt: skip
    """Normalize as many rows as `like` has lanes; write statistics, each `apart` from the next."""
    width, four = itemsize(y), itemsize(gamma)
    _load_rows(x, stride, n, vectors, columns)
    length = splat(float(n), like)
    total = like
    for col in range(n):
        _expect(x, ahead, col)
        total = total + load(columns, col * _COLUMN, _VECTOR, like)
    mean = total / length
    total, squares = like, like
    for col in range(n):
        c = load(columns, col * _COLUMN, _VECTOR, like) - mean
        total = total + c
        squares = fma(c, c, squares)
    mean_lo = total / length
    # mean_lo is a rounding error of the mean: what its square takes off var is as small.
    var = squares / length - mean_lo * mean_lo
    rstd = splat(1.0, like) / square_root(var + splat(eps, like))
    shift = negative(mean_lo * rstd)
    store(statistics, 0, _VECTOR, mean)
    store(statistics, 8 * apart, _VECTOR, mean_lo)
    store(statistics, 16 * apart, _VECTOR, rstd)
    for col in range(n):
        xhat = fma(load(columns, col * _COLUMN, _VECTOR, like) - mean, rstd, shift)
        scale = load_everywhere(gamma, col * four, like)
        result = fma(xhat, scale, load_everywhere(beta, col * four, like))
        store(results, col * GROUP * width, WIDTH * width, result)
    _store_rows(results, vectors, n, y, y_stride)


@_compiled
def _forward_chunk(x, stride, rows, n, gamma, beta, eps, statistics, all_rows, space, y, y_stride):
    """Normalize rows of `x` to `y`, where the first of these is to go."""
    group, one = _group(), _one()
    columns, results = _after(0, space), _as(_after(n, space), y)
    ahead = _ahead(x, stride, n)
    row = 0
    while row + GROUP <= rows:
        _forward_rows(
            _moved(x, row * stride), stride, n, gamma, beta, eps, group, _VECTORS, ahead,
            _moved(statistics, 8 * row), all_rows, columns, results,
            _moved(y, row * y_stride), y_stride,
        )  # fmt: skip
        row += GROUP
    while row < rows:
        count = min(rows - row, WIDTH)
        source, source_stride = _moved(x, row * stride), stride
        target, target_stride = _moved(y, row * y_stride), y_stride
        kept, apart = _moved(statistics, 8 * row), all_rows
        if count < WIDTH:
            padded = _after(2 * n, space)
            _copy_padded(source, stride, count, n, _as(padded, x))
            source, source_stride = _as(padded, x), n * itemsize(x)
            target, target_stride = _as(padded, y), n * itemsize(y)
            kept, apart = _after(3 * n, space), WIDTH
        _forward_rows(
            source, source_stride, n, gamma, beta, eps, one, 1, 0, kept, apart,
            columns, results, target, target_stride,
        )  # fmt: skip
        if count < WIDTH:
            _copy_rows(target, target_stride, count, n, _moved(y, row * y_stride), y_stride)
            _copy_statistics(kept, apart, count, _moved(statistics, 8 * row), all_rows)
        row += count


@_compiled
def forward_tile(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, y, y_stride, streaming
):
    """Do what `_narrow.forward_tile` does."""
    size = n * itemsize(y)
    staged = _staged_rows(n, itemsize(y), streaming, y_stride)
    # Columns and results, padded rows, their statistics; then the stage.
    before = 3 * n + 1
    space = _space(before, staged * size)
    chunk = staged or max(stop - first, 1)
    for begin in range(first, stop, chunk):
        rows = min(chunk, stop - begin)
        out = _moved(y, begin * y_stride)
        out_here = _as(_after(before, pointer(space)), y) if staged else out
        _forward_chunk(
            _moved(x, begin * stride), stride, rows, n, gamma, beta, eps,
            _moved(statistics, 8 * begin), all_rows, pointer(space), out_here, y_stride,
        )  # fmt: skip
        if staged:
            stream_bytes(address(out), address(out_here), rows * size)
    if streaming:
        fence()


# ---- backward ----


@_compiled
def _accumulate(sums, col, v):
    """
    Add `v` to the sums of a column, one for each lane of a row of `v`.

    `sums` holds eight sums, then what rounding took from them, then those of the next column.
    """
    one = _one()
    at = 2 * _VECTOR * col
    total, error = _two_sum(load(sums, at, 0, one), sum_rows(v))
    store(sums, at, 0, total)
    store(sums, at + _VECTOR, 0, load(sums, at + _VECTOR, 0, one) + error)


@_compiled
def _write_sums(lanes, n, sums):
    """Add the lanes of each column, one after the other, into the layout of `_narrow`."""
    one = _one()
    for col in range(0, n, WIDTH):
        total, rest = one, one
        for lane in range(WIDTH):
            at = 2 * _VECTOR * col + 8 * lane
            total, error = _two_sum(total, load_column(lanes, at, 2 * _VECTOR, one))
            rest = rest + (error + load_column(lanes, at + _VECTOR, 2 * _VECTOR, one))
        store(sums, 16 * col, 0, total)
        store(sums, 16 * col + _VECTOR, 0, rest)


@_compiled
def _write_both_sums(space, lanes_after, n, sums):
    """Write dgamma's and dbeta's. `space` is the array: Numba frees it after its last use."""
    lanes = _after(lanes_after, pointer(space))
    _write_sums(lanes, n, sums)
    _write_sums(_moved(lanes, _bytes_of_lanes(n)), n, _moved(sums, 8 * sums_size(n)))


@_compiled
def _bytes_of_lanes(n):
    """Return the bytes of the sums of n columns, whole eights of them."""
    return 2 * _VECTOR * (n + -n % WIDTH)


@_compiled
def _backward_rows(
    dy, dy_stride, x, x_stride, n, gamma, like, vectors, dy_ahead, x_ahead, statistics, apart,
    columns, cotangents, wanted, summing, dgamma, dbeta, results, dx, dx_stride,
):  # fmt: skip
    """Pull back as many rows as `like` has lanes, given statistics, each `apart` from the next."""
    width, four = itemsize(dx), itemsize(gamma)
    _load_rows(dy, dy_stride, n, vectors, cotangents)
    _load_rows(x, x_stride, n, vectors, columns)
    length = splat(float(n), like)
    mean = load(statistics, 0, _VECTOR, like)
    rstd = load(statistics, 16 * apart, _VECTOR, like)
    shift = negative(load(statistics, 8 * apart, _VECTOR, like) * rstd)
    total = like
    for col in range(n):
        _expect(dy, dy_ahead, col)
        cotangent = load(cotangents, col * _COLUMN, _VECTOR, like)
        total = fma(cotangent, load_everywhere(gamma, col * four, like), total)
        if summing:
            _accumulate(dbeta, col, cotangent)
    minus_mean_g = negative(total / length)
    total = like
    for col in range(n):
        _expect(x, x_ahead, col)
        at = col * _COLUMN
        cotangent = load(cotangents, at, _VECTOR, like)
        xhat = fma(load(columns, at, _VECTOR, like) - mean, rstd, shift)
        # Centred first: then the products are as small as their sum.
        centered = fma(cotangent, load_everywhere(gamma, col * four, like), minus_mean_g)
        total = fma(centered, xhat, total)
        if summing:
            _accumulate(dgamma, col, cotangent * xhat)
        store(columns, at, _VECTOR, xhat)
        store(cotangents, at, _VECTOR, centered)
    if wanted:
        slope = total / length
        for col in range(n):
            at = col * _COLUMN
            xhat, centered = load(columns, at, _VECTOR, like), load(cotangents, at, _VECTOR, like)
            result = fma(negative(xhat), slope, centered) * rstd
            store(results, col * GROUP * width, WIDTH * width, result)
        _store_rows(results, vectors, n, dx, dx_stride)


@_compiled
def _backward_chunk(
    dy, dy_stride, x, x_stride, rows, n, gamma, statistics, all_rows,
    space, wanted, summing, dgamma, dx, dx_stride,
):  # fmt: skip
    """Pull back rows to `dx`, where the first of these is to go."""
    group, one = _group(), _one()
    columns, cotangents, results = _after(0, space), _after(n, space), _as(_after(2 * n, space), dx)
    dbeta = _moved(dgamma, _bytes_of_lanes(n))
    dy_ahead, x_ahead = _ahead(dy, dy_stride, n), _ahead(x, x_stride, n)
    row = 0
    while row + GROUP <= rows:
        kept = _moved(statistics, 8 * row)
        _expect_statistics(kept, all_rows)
        _backward_rows(
            _moved(dy, row * dy_stride), dy_stride, _moved(x, row * x_stride), x_stride, n, gamma,
            group, _VECTORS, dy_ahead, x_ahead, kept, all_rows, columns, cotangents, wanted,
            summing, dgamma, dbeta, results, _moved(dx, row * dx_stride), dx_stride,
        )  # fmt: skip
        row += GROUP
    while row < rows:
        count = min(rows - row, WIDTH)
        cotangent, cotangent_stride = _moved(dy, row * dy_stride), dy_stride
        source, source_stride = _moved(x, row * x_stride), x_stride
        target, target_stride = _moved(dx, row * dx_stride), dx_stride
        kept, apart = _moved(statistics, 8 * row), all_rows
        if count < WIDTH:
            padded_x, padded_dy = _after(3 * n, space), _after(4 * n, space)
            _copy_padded(source, x_stride, count, n, _as(padded_x, x))
            _copy_padded(cotangent, dy_stride, count, n, _as(padded_dy, dy))
            cotangent, cotangent_stride = _as(padded_dy, dy), n * itemsize(dy)
            source, source_stride = _as(padded_x, x), n * itemsize(x)
            target, target_stride = _as(padded_x, dx), n * itemsize(dx)
            padded = _after(5 * n, space)
            # With an rstd of zero nothing becomes NaN in the rows of zeros, whatever eps.
            store(padded, 0, _VECTOR, _group())
            _copy_statistics(kept, all_rows, count, padded, WIDTH)
            kept, apart = padded, WIDTH
        _backward_rows(
            cotangent, cotangent_stride, source, source_stride, n, gamma, one, 1, 0, 0, kept, apart,
            columns, cotangents, wanted, summing, dgamma, dbeta, results, target, target_stride,
        )  # fmt: skip
        if count < WIDTH and wanted:
            _copy_rows(target, target_stride, count, n, _moved(dx, row * dx_stride), dx_stride)
        row += count


@_compiled
def backward_tile(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    dx, dx_stride, wanted, streaming, sums, summing,
):  # fmt: skip
    """Do what `_narrow.backward_tile` does."""
    size = n * itemsize(dx)
    staged = _staged_rows(n, itemsize(dx), streaming and wanted, dx_stride)
    # Columns of x and dy, results, padded rows of both, their statistics; then sums; the stage.
    before = 5 * n + 1
    space = _space(before, 2 * _bytes_of_lanes(n) + staged * size)
    dgamma = _after(before, pointer(space))
    for at in range(2 * _bytes_of_lanes(n) // 8):
        dgamma[at] = 0.0
    chunk = staged or max(stop - first, 1)
    for begin in range(first, stop, chunk):
        rows = min(chunk, stop - begin)
        out = _moved(dx, begin * dx_stride)
        lanes = _after(before, pointer(space))
        out_here = _as(_moved(lanes, 2 * _bytes_of_lanes(n)), dx) if staged else out
        _backward_chunk(
            _moved(dy, begin * dy_stride), dy_stride, _moved(x, begin * x_stride), x_stride,
            rows, n, gamma, _moved(statistics, 8 * begin), all_rows,
            pointer(space), wanted, summing, lanes, out_here, dx_stride,
        )  # fmt: skip
        if staged:
            stream_bytes(address(out), address(out_here), rows * size)
    if summing:
        _write_both_sums(space, before, n, sums)
    if streaming:
        fence()
