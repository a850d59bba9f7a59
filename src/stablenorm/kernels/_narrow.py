"""
float16, bfloat16 and float32: the equations of `reference`, in float64, rounded once.

Four rows are in flight at a time: they share what is read of gamma, beta and the sums over rows,
and their divisions and square roots overlap. Each row is read from memory once: its later passes
find it in the caches, and while they run, the rows to come are asked for. A row's own arithmetic
is the same whether it is one of four or alone.

Parameters are float32 here, which holds the 16-bit types exactly. Strides are in bytes.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._vectors import (
    WIDTH,
    ZEROS,
    address,
    fma,
    in_rows,
    itemsize,
    keep,
    load,
    load_some,
    negative,
    of_rows,
    pointer,
    pointer_at,
    prefetch,
    prefetch_to_write,
    row_totals,
    store,
    store_some,
    stream,
    sum_rows,
)

# Columns that one lane sums one after the other, 128 of them, before the partial sum is put
# aside: an error of at most 2**-46 of what is summed, where a row of 65 536 would allow 2**-40.
SPAN = 1024

# Rows in flight. Eight gained nothing at any n, and need registers that only AVX-512 has.
GROUP = 4

# Longer rows go one by one: four of them, x and dy and the sums, no longer fit a second-level
# cache of 1 MiB.
LONGEST_IN_GROUP = 16384

# Each of the three passes over a row asks for a third of the lines of the rows to come, so that
# memory is busy throughout: one third in each was 35 % faster beyond the caches than none, all
# in one pass 20 to 30 %. (2-core AMD EPYC 9005, November 2026, float32, n = 1024.)
_TURN = 3 * LINE

_one, _four = ZEROS[1], ZEROS[4]

# Division by zero gives what IEEE 754 says, not an exception.
_compiled = njit(error_model="numpy")


@_compiled
def _sum(x, at, stride, n, like, to):
    """Write the sum of each row."""
    width = itemsize(x)
    ahead = at + GROUP * stride
    total = like
    for start in range(0, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = like
        for col in range(start, whole, WIDTH):
            if col * width % _TURN == 0:
                prefetch(x, ahead + col * width, stride, like)
            part = part + load(x, at + col * width, stride, like)
        if whole < stop:
            part = part + load_some(x, at + whole * width, stride, stop - whole, like)
        total = total + part
    row_totals(total, to)


@_compiled
def _sum_centered(x, at, stride, n, mean, like, to, to_squares):
    """Write the sums of x - mean and of its square of each row."""
    width = itemsize(x)
    ahead = at + GROUP * stride + LINE
    total, total_squares = like, like
    center = of_rows(mean, like)
    for start in range(0, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part, part_squares = like, like
        for col in range(start, whole, WIDTH):
            if col * width % _TURN == 0:
                prefetch(x, ahead + col * width, stride, like)
            c = load(x, at + col * width, stride, like) - center
            part = part + c
            part_squares = fma(c, c, part_squares)
        if whole < stop:
            count = stop - whole
            c = keep(load_some(x, at + whole * width, stride, count, like) - center, count)
            part = part + c
            part_squares = fma(c, c, part_squares)
        total = total + part
        total_squares = total_squares + part_squares
    row_totals(total, to)
    row_totals(total_squares, to_squares)


@_compiled
def _whole_lines(at, n, width):
    """
    Return the columns from and to which a row that begins at address `at` fills whole lines.

    Only these may be streamed: the rest shares its line with a neighbouring row, and a line
    half streamed and half stored goes to memory twice.
    """
    head = min(-at % LINE // width, n)
    return head, n - (n - head) % (LINE // width)


@_compiled
def _expect_edges(out, at, stride, n, like):
    """
    Ask for the lines that rows to come share with their neighbours, if they do.

    A store waits for its line, and all later stores, streamed ones too, wait behind it.
    """
    if (address(out) + at) % LINE:
        prefetch_to_write(out, at, stride, like)
        prefetch_to_write(out, at + n * itemsize(out), stride, like)


@_compiled
def _affine(v, gamma, beta, like):
    return fma(v, in_rows(gamma, like), in_rows(beta, like))


@_compiled
def _normalize_edge(
    x, at, stride, start, stop, center, shift, rstd, gamma, beta, like, y, to, to_stride
):
    """Do what `_normalize` does for columns ``[start, stop)``, which need not be eight."""
    width, four, one = itemsize(x), itemsize(gamma), _one()
    for col in range(start, stop, WIDTH):
        count = min(stop - col, WIDTH)
        column = load_some(x, at + col * width, stride, count, like)
        result = _affine(
            fma(column - center, rstd, shift),
            load_some(gamma, col * four, 0, count, one),
            load_some(beta, col * four, 0, count, one),
            like,
        )
        store_some(y, to + col * width, to_stride, count, result)


@_compiled
def _normalize(x, at, stride, n, numbers, gamma, beta, like, y, to, to_stride, streaming):
    """Write ``gamma * ((x - mean) * rstd + shift) + beta``."""
    width, four, one = itemsize(x), itemsize(gamma), _one()
    ahead = at + GROUP * stride + 2 * LINE
    center = of_rows(numbers, like)
    shift, rstd = of_rows(_part(numbers, 1), like), of_rows(_part(numbers, 2), like)
    head, whole = 0, n - n % WIDTH
    if streaming:
        _expect_edges(y, to + GROUP * to_stride, to_stride, n, like)
        head, whole = _whole_lines(address(y) + to, n, width)
        _normalize_edge(
            x, at, stride, 0, head, center, shift, rstd, gamma, beta, like, y, to, to_stride
        )
    for col in range(head, whole, WIDTH):
        if (col - head) * width % _TURN == 0:
            prefetch(x, ahead + (col - head) * width, stride, like)
        xhat = fma(load(x, at + col * width, stride, like) - center, rstd, shift)
        result = _affine(
            xhat, load(gamma, col * four, 0, one), load(beta, col * four, 0, one), like
        )
        if streaming:
            stream(y, to + col * width, to_stride, result)
        else:
            store(y, to + col * width, to_stride, result)
    _normalize_edge(
        x, at, stride, whole, n, center, shift, rstd, gamma, beta, like, y, to, to_stride
    )


@_compiled
def _forward_rows(
    x, at, stride, n, gamma, beta, eps, like, rows, statistics, all_rows, scratch,
    y, to, to_stride, streaming,
):  # fmt: skip
    """Normalize as many rows as `like` has."""
    means, sums, squares = scratch, _part(scratch, 1), _part(scratch, 2)
    _sum(x, at, stride, n, like, sums)
    for row in range(rows):
        means[row] = sums[row] / n
    _sum_centered(x, at, stride, n, means, like, sums, squares)
    for row in range(rows):
        mean_lo = sums[row] / n
        # mean_lo is a rounding error of the mean: what its square takes off var is as small.
        var = squares[row] / n - mean_lo * mean_lo
        rstd = 1.0 / math.sqrt(var + eps)
        statistics[row] = means[row]
        statistics[all_rows + row] = mean_lo
        statistics[2 * all_rows + row] = rstd
        sums[row] = -(mean_lo * rstd)
        squares[row] = rstd
    _normalize(x, at, stride, n, scratch, gamma, beta, like, y, to, to_stride, streaming)


@_compiled
def _part(scratch, index):
    """Return the `index`-th eight float64 of `scratch`."""
    return pointer_at(address(scratch) + 64 * index, scratch)


# How results reach memory: by ordinary stores; row by row past the caches; or, where rows are
# short or begin at unlike places of their lines, through a stage of STAGE bytes that stays in
# the first-level cache and is then copied out past it.
PLAIN, STREAMED, STAGED = 0, 1, 2
STAGE = 1 << 14

# Shorter rows are staged: the two lines that a row shares with its neighbours cost too much.
_LONG_ENOUGH_TO_STREAM = 4096


@_compiled
def _way_out(n, width, out, stride, streaming):
    if not streaming:
        return PLAIN
    # Elements across the bounds of lines cannot be streamed at all: the processor would fault.
    aligned = address(out) % width == 0 and stride % LINE == 0
    if aligned and (address(out) % LINE == 0 or n * width >= _LONG_ENOUGH_TO_STREAM):
        return STREAMED
    return STAGED if stride == n * width else PLAIN


@_compiled
def _staged_rows(n, width, way):
    """Return how many rows are computed before they are copied out: whole groups."""
    if way != STAGED:
        return 1 << 60
    return max(STAGE // (n * width) // GROUP, 1) * GROUP


@_compiled
def forward_tile(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, y, y_stride, streaming
):
    """
    Normalize rows ``[first, stop)`` of `x` into `y`.

    `statistics` points to mean, mean_lo and rstd of `all_rows` rows. With `streaming`, y goes
    past the caches.
    """
    width = itemsize(y)
    way = _way_out(n, width, y, y_stride, streaming)
    chunk = _staged_rows(n, width, way)
    space = np.empty(3 * WIDTH, np.float64)
    stage = np.empty(chunk * n * width if way == STAGED else 1, np.uint8)
    for begin in range(first, stop, chunk):
        end = min(begin + chunk, stop)
        out, out_stride = address(y) + begin * y_stride, y_stride
        if way == STAGED:
            out, out_stride = address(pointer(stage)), n * width
        _forward_chunk(
            x, stride, begin, end, n, gamma, beta, eps, statistics, all_rows, pointer(space),
            pointer_at(out, y), out_stride, way == STREAMED,
        )  # fmt: skip
        if way == STAGED:
            stream_bytes(address(y) + begin * y_stride, out, (end - begin) * n * width)
    if streaming:
        fence()


@_compiled
def _forward_chunk(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, scratch,
    y, y_stride, streaming,
):  # fmt: skip
    """Normalize rows ``[first, stop)`` of `x` to `y`, where the first of these is to go."""
    four, one = _four(), _one()
    row = first
    while n <= LONGEST_IN_GROUP and row + GROUP <= stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _forward_rows(
            x, row * stride, stride, n, gamma, beta, eps, four, GROUP, kept, all_rows,
            scratch, y, (row - first) * y_stride, y_stride, streaming,
        )  # fmt: skip
        row += GROUP
    while row < stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _forward_rows(
            x, row * stride, stride, n, gamma, beta, eps, one, 1, kept, all_rows,
            scratch, y, (row - first) * y_stride, y_stride, streaming,
        )  # fmt: skip
        row += 1


# ---- backward ----


@_compiled
def _two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error (Knuth); nothing here may be reassociated."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


@_compiled
def _accumulate(sums, col, v, one):
    """
    Add the rows of `v` to the eight sums from `col` on.

    `sums` holds eight sums, then what rounding took from them, then the next eight: side by
    side, since addresses a multiple of 4096 apart make a load wait for an unrelated store.
    """
    at, rest_at = 16 * col, 16 * col + 8 * WIDTH
    total, error = _two_sum(load(sums, at, 0, one), sum_rows(v))
    store(sums, at, 0, total)
    store(sums, rest_at, 0, load(sums, rest_at, 0, one) + error)


@_compiled
def _sum_g(dy, at, stride, n, gamma, like, to, summing, dbeta):
    """Write the sum of ``g = gamma * dy`` of each row; add dy to `dbeta`."""
    width, four = itemsize(dy), itemsize(gamma)
    ahead = at + GROUP * stride
    one = _one()
    total = like
    for start in range(0, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = like
        for col in range(start, whole, WIDTH):
            if col * width % _TURN == 0:
                prefetch(dy, ahead + col * width, stride, like)
            cotangent = load(dy, at + col * width, stride, like)
            part = fma(cotangent, in_rows(load(gamma, col * four, 0, one), like), part)
            if summing:
                _accumulate(dbeta, col, cotangent, one)
        if whole < stop:
            count = stop - whole
            cotangent = load_some(dy, at + whole * width, stride, count, like)
            scale = in_rows(load_some(gamma, whole * four, 0, count, one), like)
            part = fma(cotangent, scale, part)
            if summing:
                _accumulate(dbeta, whole, cotangent, one)
        total = total + part
    row_totals(total, to)


@_compiled
def _sum_projection(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, numbers, like, to, summing, dgamma
):
    """Write the sum of ``(g - mean(g)) * xhat`` of each row; add dy * xhat to `dgamma`."""
    dy_width, x_width, four = itemsize(dy), itemsize(x), itemsize(gamma)
    dy_ahead, x_ahead = dy_at + GROUP * dy_stride + LINE, x_at + GROUP * x_stride + LINE
    one = _one()
    mean, shift = of_rows(numbers, like), of_rows(_part(numbers, 1), like)
    rstd, mean_g = of_rows(_part(numbers, 2), like), of_rows(_part(numbers, 3), like)
    minus_mean_g = negative(mean_g)
    total = like
    for start in range(0, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = like
        for col in range(start, whole, WIDTH):
            if col * dy_width % _TURN == 0:
                prefetch(dy, dy_ahead + col * dy_width, dy_stride, like)
            if col * x_width % _TURN == 0:
                prefetch(x, x_ahead + col * x_width, x_stride, like)
            cotangent = load(dy, dy_at + col * dy_width, dy_stride, like)
            xhat = fma(load(x, x_at + col * x_width, x_stride, like) - mean, rstd, shift)
            # Centred first: then the products are as small as their sum.
            centered = fma(cotangent, in_rows(load(gamma, col * four, 0, one), like), minus_mean_g)
            part = fma(centered, xhat, part)
            if summing:
                _accumulate(dgamma, col, cotangent * xhat, one)
        if whole < stop:
            count = stop - whole
            cotangent = load_some(dy, dy_at + whole * dy_width, dy_stride, count, like)
            column = load_some(x, x_at + whole * x_width, x_stride, count, like)
            xhat = fma(column - mean, rstd, shift)
            scale = in_rows(load_some(gamma, whole * four, 0, count, one), like)
            part = fma(keep(fma(cotangent, scale, minus_mean_g), count), keep(xhat, count), part)
            if summing:
                _accumulate(dgamma, whole, cotangent * xhat, one)
        total = total + part
    row_totals(total, to)


@_compiled
def _project(cotangent, column, gamma, mean, shift, rstd, mean_g, slope, like):
    """Return ``rstd * (g - mean(g) - xhat * mean((g - mean(g)) * xhat))``."""
    xhat = fma(column - mean, rstd, shift)
    centered = fma(cotangent, in_rows(gamma, like), negative(mean_g))
    return fma(negative(xhat), slope, centered) * rstd


@_compiled
def _write_edge(
    dy, dy_at, dy_stride, x, x_at, x_stride, start, stop, gamma,
    mean, shift, rstd, mean_g, slope, like, dx, to, to_stride,
):  # fmt: skip
    """Do what `_write_dx` does for columns ``[start, stop)``, which need not be eight."""
    dy_width, x_width, four, one = itemsize(dy), itemsize(x), itemsize(gamma), _one()
    for col in range(start, stop, WIDTH):
        count = min(stop - col, WIDTH)
        cotangent = load_some(dy, dy_at + col * dy_width, dy_stride, count, like)
        column = load_some(x, x_at + col * x_width, x_stride, count, like)
        scale = load_some(gamma, col * four, 0, count, one)
        result = _project(cotangent, column, scale, mean, shift, rstd, mean_g, slope, like)
        store_some(dx, to + col * x_width, to_stride, count, result)


@_compiled
def _write_dx(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, numbers, like, dx, to, to_stride, streaming
):
    """Write dx, given mean, shift, rstd, mean(g) and mean((g - mean(g)) * xhat) of the rows."""
    dy_width, x_width, four, one = itemsize(dy), itemsize(x), itemsize(gamma), _one()
    dy_ahead = dy_at + GROUP * dy_stride + 2 * LINE
    x_ahead = x_at + GROUP * x_stride
    mean, shift = of_rows(numbers, like), of_rows(_part(numbers, 1), like)
    rstd, mean_g = of_rows(_part(numbers, 2), like), of_rows(_part(numbers, 3), like)
    slope = of_rows(_part(numbers, 4), like)
    head, whole = 0, n - n % WIDTH
    if streaming:
        _expect_edges(dx, to + GROUP * to_stride, to_stride, n, like)
        head, whole = _whole_lines(address(dx) + to, n, x_width)
        _write_edge(
            dy, dy_at, dy_stride, x, x_at, x_stride, 0, head, gamma,
            mean, shift, rstd, mean_g, slope, like, dx, to, to_stride,
        )  # fmt: skip
    for col in range(head, whole, WIDTH):
        if (col - head) * dy_width % _TURN == 0:
            prefetch(dy, dy_ahead + (col - head) * dy_width, dy_stride, like)
        if (col - head) * x_width % _TURN == 0:
            # The first pass did not touch x: its share of the lines is left to this one.
            x_next = x_ahead + (col - head) * x_width
            prefetch(x, x_next, x_stride, like)
            prefetch(x, x_next + 2 * LINE, x_stride, like)
        cotangent = load(dy, dy_at + col * dy_width, dy_stride, like)
        column = load(x, x_at + col * x_width, x_stride, like)
        scale = load(gamma, col * four, 0, one)
        result = _project(cotangent, column, scale, mean, shift, rstd, mean_g, slope, like)
        if streaming:
            stream(dx, to + col * x_width, to_stride, result)
        else:
            store(dx, to + col * x_width, to_stride, result)
    _write_edge(
        dy, dy_at, dy_stride, x, x_at, x_stride, whole, n, gamma,
        mean, shift, rstd, mean_g, slope, like, dx, to, to_stride,
    )  # fmt: skip


@_compiled
def _backward_rows(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, like, rows, statistics, all_rows,
    scratch, wanted, summing, dgamma, dbeta, dx, to, to_stride, streaming,
):  # fmt: skip
    """Pull back as many rows as `like` has."""
    shift, rstd = _part(scratch, 1), _part(scratch, 2)
    mean_g, slope = _part(scratch, 3), _part(scratch, 4)
    for row in range(rows):
        scratch[row] = statistics[row]
        rstd[row] = statistics[2 * all_rows + row]
        shift[row] = -(statistics[all_rows + row] * rstd[row])
    _sum_g(dy, dy_at, dy_stride, n, gamma, like, mean_g, summing, dbeta)
    for row in range(rows):
        mean_g[row] /= n
    _sum_projection(
        dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, scratch, like, slope, summing, dgamma
    )
    if wanted:
        for row in range(rows):
            slope[row] /= n
        _write_dx(
            dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, scratch, like,
            dx, to, to_stride, streaming,
        )  # fmt: skip


@_compiled
def sums_size(n):
    """Return how many float64 hold n compensated sums: two each, whole vectors."""
    return 2 * (n + -n % WIDTH)


@_compiled
def backward_tile(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    dx, dx_stride, wanted, streaming, sums, summing,
):  # fmt: skip
    """
    Pull back rows ``[first, stop)``: into `dx`, if `wanted`, and, if `summing`, into `sums`.

    `sums` points to the sums for dgamma and then those for dbeta, `sums_size(n)` float64 each.
    They are compensated, so that their error does not grow with the number of rows.
    """
    width = itemsize(dx)
    way = _way_out(n, width, dx, dx_stride, streaming and wanted)
    chunk = _staged_rows(n, width, way)
    space = np.empty(5 * WIDTH, np.float64)
    stage = np.empty(chunk * n * width if way == STAGED else 1, np.uint8)
    sums_of_dbeta = pointer_at(address(sums) + 8 * sums_size(n), sums)
    for at in range(2 * sums_size(n) if summing else 0):
        sums[at] = 0.0
    for begin in range(first, stop, chunk):
        end = min(begin + chunk, stop)
        out, out_stride = address(dx) + begin * dx_stride, dx_stride
        if way == STAGED:
            out, out_stride = address(pointer(stage)), n * width
        _backward_chunk(
            dy, dy_stride, x, x_stride, begin, end, n, gamma, statistics, all_rows,
            pointer(space), wanted, summing, sums, sums_of_dbeta,
            pointer_at(out, dx), out_stride, way == STREAMED,
        )  # fmt: skip
        if way == STAGED:
            stream_bytes(address(dx) + begin * dx_stride, out, (end - begin) * n * width)
    if streaming:
        fence()


@_compiled
def _backward_chunk(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    scratch, wanted, summing, dgamma, dbeta, dx, dx_stride, streaming,
):  # fmt: skip
    """Pull back rows ``[first, stop)`` to `dx`, where the first of these is to go."""
    four, one = _four(), _one()
    row = first
    while n <= LONGEST_IN_GROUP and row + GROUP <= stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _backward_rows(
            dy, row * dy_stride, dy_stride, x, row * x_stride, x_stride, n, gamma, four,
            GROUP, kept, all_rows, scratch, wanted, summing, dgamma, dbeta,
            dx, (row - first) * dx_stride, dx_stride, streaming,
        )  # fmt: skip
        row += GROUP
    while row < stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _backward_rows(
            dy, row * dy_stride, dy_stride, x, row * x_stride, x_stride, n, gamma, one,
            1, kept, all_rows, scratch, wanted, summing, dgamma, dbeta,
            dx, (row - first) * dx_stride, dx_stride, streaming,
        )  # fmt: skip
        row += 1


@_compiled
def total_of_tiles(sums, tiles, n, which, out):
    """Write the sum over the tiles of dgamma, 0, or dbeta, 1, rounded once to the type of `out`."""
    one, width, size = _one(), itemsize(out), sums_size(n)
    for col in range(0, n, WIDTH):
        total, rest = one, one
        for tile in range(tiles):
            at = 8 * size * (2 * tile + which) + 16 * col
            total, error = _two_sum(total, load(sums, at, 0, one))
            rest = rest + (error + load(sums, at + 8 * WIDTH, 0, one))
        store_some(out, col * width, 0, min(n - col, WIDTH), total + rest)
