"""The backward of `_narrow`."""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inlined, inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._narrow import GROUP, SPAN, SPANS, TURN, eight
from stablenorm.kernels._sums import accumulate, sums_size
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load,
    load_some,
    pointer,
    pointer_at,
    prefetch,
    store,
    store_some,
    stream,
)
from stablenorm.kernels._vectors import (
    ZEROS,
    add_in_order,
    count_rows,
    fma,
    in_rows,
    keep,
    minus,
    negative,
    of_rows,
    row_totals,
    splat,
)
from stablenorm.kernels._way_out import (
    STAGED,
    STREAMED,
    expect_edges,
    staged_rows,
    way_out,
    whole_lines,
)

_one, _four = ZEROS[1], ZEROS[4]


@inlined
def _centered(column, mean, width):
    """Return x - mean: of 16 bits, whose conversions other units are busy with, by `minus`."""
    return minus(column, mean) if width == 2 else column - mean


@inlined
def _sum_span_of_g(dy, at, stride, start, stop, ahead, gamma, columns, like, summing, dbeta, fresh):
    """
    Do what `_sum_g` does for columns ``[start, stop)``, whole vectors.

    `columns` has one row if all rows of `like` are of these columns, and as many as `like` if each
    is of those a span after the one before: then `dbeta` is None.
    """
    width, four = itemsize(dy), itemsize(gamma)
    part = like
    for col in range(start, stop, WIDTH):
        if col * width % TURN == 0:
            prefetch(dy, ahead + col * width, stride, like)
        cotangent = load(dy, at + col * width, stride, like)
        scale = in_rows(load(gamma, col * four, SPAN * four, columns), like)
        part = fma(cotangent, scale, part)
        if dbeta is not None and summing:
            accumulate(dbeta, col, cotangent, fresh)
    return part


@inlined
def _sum_g(dy, at, stride, n, gamma, like, spans, summing, dbeta, fresh):
    """
    Return the sum of ``g = gamma * dy`` of each row; add dy to `dbeta`, or, if `fresh`, to zeros.

    `spans` as in `_narrow_forward._sum`, but not if `summing`: four spans wait longer for the
    memory of their sums than one for its additions.
    """
    width, four = itemsize(dy), itemsize(gamma)
    ahead = at + count_rows(like) * stride
    one = _one()
    total, done = like, 0
    if spans is not None and not summing:
        done = n - n % SPANS
        for start in range(0, done, SPANS):
            parts = _sum_span_of_g(
                dy, at, SPAN * width, start, start + SPAN, ahead, gamma, spans, spans,
                False, None, False,
            )  # fmt: skip
            total = add_in_order(total, parts)
    for start in range(done, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = _sum_span_of_g(
            dy, at, stride, start, whole, ahead, gamma, one, like, summing, dbeta, fresh
        )
        if whole < stop:
            count = stop - whole
            cotangent = load_some(dy, at + whole * width, stride, count, like)
            scale = in_rows(load_some(gamma, whole * four, 0, count, one), like)
            part = fma(cotangent, scale, part)
            if summing:
                accumulate(dbeta, whole, cotangent, fresh)
        total = total + part
    return row_totals(total)


@inlined
def _sum_span_of_projection(
    dy, dy_at, dy_stride, x, x_at, x_stride, start, stop, dy_ahead, x_ahead, gamma, columns,
    mean, shift, rstd, minus_mean_g, like, summing, dgamma, fresh,
):  # fmt: skip
    """Do what `_sum_projection` does for columns ``[start, stop)``, as `_sum_span_of_g` does."""
    dy_width, x_width, four = itemsize(dy), itemsize(x), itemsize(gamma)
    part = like
    for col in range(start, stop, WIDTH):
        if col * dy_width % TURN == 0:
            prefetch(dy, dy_ahead + col * dy_width, dy_stride, like)
        if col * x_width % TURN == 0:
            prefetch(x, x_ahead + col * x_width, x_stride, like)
        cotangent = load(dy, dy_at + col * dy_width, dy_stride, like)
        column = load(x, x_at + col * x_width, x_stride, like)
        xhat = fma(_centered(column, mean, x_width), rstd, shift)
        # Centred first: then the products are as small as their sum.
        scale = in_rows(load(gamma, col * four, SPAN * four, columns), like)
        part = fma(fma(cotangent, scale, minus_mean_g), xhat, part)
        if dgamma is not None and summing:
            accumulate(dgamma, col, cotangent * xhat, fresh)
    return part


@inlined
def _sum_projection(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, numbers, like, spans,
    summing, dgamma, fresh,
):  # fmt: skip
    """
    Return the sum of ``(g - mean(g)) * xhat`` of each row; add dy * xhat to `dgamma`.

    `spans` and `fresh` as in `_sum_g`.
    """
    dy_width, x_width, four = itemsize(dy), itemsize(x), itemsize(gamma)
    dy_ahead = dy_at + count_rows(like) * dy_stride + LINE
    x_ahead = x_at + count_rows(like) * x_stride + LINE
    one = _one()
    mean, shift = of_rows(numbers, like), of_rows(eight(numbers, 1), like)
    rstd, mean_g = of_rows(eight(numbers, 2), like), of_rows(eight(numbers, 3), like)
    minus_mean_g = negative(mean_g)
    total, done = like, 0
    if spans is not None and not summing:
        done = n - n % SPANS
        for start in range(0, done, SPANS):
            parts = _sum_span_of_projection(
                dy, dy_at, SPAN * dy_width, x, x_at, SPAN * x_width, start, start + SPAN,
                dy_ahead, x_ahead, gamma, spans,
                in_rows(mean, spans), in_rows(shift, spans), in_rows(rstd, spans),
                in_rows(minus_mean_g, spans), spans, False, None, False,
            )  # fmt: skip
            total = add_in_order(total, parts)
    for start in range(done, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = _sum_span_of_projection(
            dy, dy_at, dy_stride, x, x_at, x_stride, start, whole, dy_ahead, x_ahead, gamma, one,
            mean, shift, rstd, minus_mean_g, like, summing, dgamma, fresh,
        )  # fmt: skip
        if whole < stop:
            count = stop - whole
            cotangent = load_some(dy, dy_at + whole * dy_width, dy_stride, count, like)
            column = load_some(x, x_at + whole * x_width, x_stride, count, like)
            xhat = fma(_centered(column, mean, x_width), rstd, shift)
            scale = in_rows(load_some(gamma, whole * four, 0, count, one), like)
            part = fma(keep(fma(cotangent, scale, minus_mean_g), count), keep(xhat, count), part)
            if summing:
                accumulate(dgamma, whole, cotangent * xhat, fresh)
        total = total + part
    return row_totals(total)


@inner
def _project(cotangent, c, gamma, shift, rstd, mean_g, slope, like):
    """Return ``rstd * (g - mean(g) - xhat * mean((g - mean(g)) * xhat))``, `c` being x - mean."""
    xhat = fma(c, rstd, shift)
    centered = fma(cotangent, in_rows(gamma, like), negative(mean_g))
    return fma(negative(xhat), slope, centered) * rstd


@inner
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
        c = _centered(column, mean, x_width)
        result = _project(cotangent, c, scale, shift, rstd, mean_g, slope, like)
        store_some(dx, to + col * x_width, to_stride, count, result)


@inlined
def _write_dx(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, numbers, like, dx, to, to_stride, streaming
):
    """Write dx, given mean, shift, rstd, mean(g) and mean((g - mean(g)) * xhat) of the rows."""
    dy_width, x_width, four, one = itemsize(dy), itemsize(x), itemsize(gamma), _one()
    dy_ahead = dy_at + count_rows(like) * dy_stride + 2 * LINE
    x_ahead = x_at + count_rows(like) * x_stride
    mean, shift = of_rows(numbers, like), of_rows(eight(numbers, 1), like)
    rstd, mean_g = of_rows(eight(numbers, 2), like), of_rows(eight(numbers, 3), like)
    slope = of_rows(eight(numbers, 4), like)
    head, whole = 0, n - n % WIDTH
    if streaming:
        expect_edges(dx, to + count_rows(like) * to_stride, to_stride, n, like)
        head, whole = whole_lines(address(dx) + to, n, x_width)
        _write_edge(
            dy, dy_at, dy_stride, x, x_at, x_stride, 0, head, gamma,
            mean, shift, rstd, mean_g, slope, like, dx, to, to_stride,
        )  # fmt: skip
    for col in range(head, whole, WIDTH):
        if (col - head) * dy_width % TURN == 0:
            prefetch(dy, dy_ahead + (col - head) * dy_width, dy_stride, like)
        if (col - head) * x_width % TURN == 0:
            # The first pass did not touch x: its share of the lines is left to this one.
            x_next = x_ahead + (col - head) * x_width
            prefetch(x, x_next, x_stride, like)
            prefetch(x, x_next + 2 * LINE, x_stride, like)
        cotangent = load(dy, dy_at + col * dy_width, dy_stride, like)
        column = load(x, x_at + col * x_width, x_stride, like)
        scale = load(gamma, col * four, 0, one)
        c = _centered(column, mean, x_width)
        result = _project(cotangent, c, scale, shift, rstd, mean_g, slope, like)
        if streaming:
            stream(dx, to + col * x_width, to_stride, result)
        else:
            store(dx, to + col * x_width, to_stride, result)
    _write_edge(
        dy, dy_at, dy_stride, x, x_at, x_stride, whole, n, gamma,
        mean, shift, rstd, mean_g, slope, like, dx, to, to_stride,
    )  # fmt: skip


@inlined
def _backward_rows(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, like, spans, statistics, all_rows,
    scratch, wanted, summing, fresh, dgamma, dbeta, dx, to, to_stride, streaming,
):  # fmt: skip
    """Pull back as many rows as `like` has."""
    # A lane for each row, as in `_narrow_forward`.
    one, rows = _one(), count_rows(like)
    length = splat(float(n), one)
    rstd = load_some(statistics, 16 * all_rows, 0, rows, one)
    mean_lo = load_some(statistics, 8 * all_rows, 0, rows, one)
    store(scratch, 0, 0, load_some(statistics, 0, 0, rows, one))
    store(eight(scratch, 1), 0, 0, negative(mean_lo * rstd))
    store(eight(scratch, 2), 0, 0, rstd)
    sums = _sum_g(dy, dy_at, dy_stride, n, gamma, like, spans, summing, dbeta, fresh)
    store(eight(scratch, 3), 0, 0, sums / length)
    sums = _sum_projection(
        dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, scratch, like, spans,
        summing, dgamma, fresh,
    )  # fmt: skip
    if wanted:
        store(eight(scratch, 4), 0, 0, sums / length)
        _write_dx(
            dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, scratch, like,
            dx, to, to_stride, streaming,
        )  # fmt: skip


@inner
def backward_tile(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    dx, dx_stride, wanted, streaming, sums, summing,
):  # fmt: skip
    """
    Pull back rows ``[first, stop)``: into `dx`, if `wanted`, and, if `summing`, into `sums`.

    `sums` points to the sums for dgamma and then those for dbeta, `sums_size(n)` float64 each.
    """
    width = itemsize(dx)
    way = way_out(n, width, dx, dx_stride, streaming and wanted)
    chunk = staged_rows(n, width, way)
    space = np.empty(5 * WIDTH, np.float64)
    stage = np.empty(chunk * n * width if way == STAGED else 1, np.uint8)
    sums_of_dbeta = pointer_at(address(sums) + 8 * sums_size(n), sums)
    # The first rows write these: with zeros to add to, a row of 1024 took 0.8 us instead of 0.6.
    for at in range(2 * sums_size(n) if summing and first == stop else 0):
        sums[at] = 0.0
    for begin in range(first, stop, chunk):
        end = min(begin + chunk, stop)
        out, out_stride = address(dx) + begin * dx_stride, dx_stride
        if way == STAGED:
            out, out_stride = address(pointer(stage)), n * width
        _backward_chunk(
            dy, dy_stride, x, x_stride, begin, end, n, gamma, statistics, all_rows,
            pointer(space), wanted, summing, begin == first, sums, sums_of_dbeta,
            pointer_at(out, dx), out_stride, way == STREAMED,
        )  # fmt: skip
        if way == STAGED:
            stream_bytes(address(dx) + begin * dx_stride, out, (end - begin) * n * width)
    if streaming:
        fence()


@inner
def _backward_chunk(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    scratch, wanted, summing, fresh, dgamma, dbeta, dx, dx_stride, streaming,
):  # fmt: skip
    """Pull back rows ``[first, stop)`` to `dx`, where the first of these is to go."""
    four, one = _four(), _one()
    row = first
    # However long they are: beyond the second-level cache it is the sums, 32 bytes a column, that are
    # dear, and four rows go over them once (n = 32768: 22 ms instead of 34, 131072: 33 of 38).
    while row + GROUP <= stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _backward_rows(
            dy, row * dy_stride, dy_stride, x, row * x_stride, x_stride, n, gamma, four,
            None, kept, all_rows, scratch, wanted, summing, fresh and row == first,
            dgamma, dbeta, dx, (row - first) * dx_stride, dx_stride, streaming,
        )  # fmt: skip
        row += GROUP
    while row < stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _backward_rows(
            dy, row * dy_stride, dy_stride, x, row * x_stride, x_stride, n, gamma, one,
            four, kept, all_rows, scratch, wanted, summing, fresh and row == first,
            dgamma, dbeta, dx, (row - first) * dx_stride, dx_stride, streaming,
        )  # fmt: skip
        row += 1
