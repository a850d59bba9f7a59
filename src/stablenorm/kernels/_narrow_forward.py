"""The forward of `_narrow`."""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inlined, inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._narrow import (
    GROUP,
    LONGEST_AHEAD,
    LONGEST_IN_GROUP,
    SPAN,
    SPANS,
    TURN,
    eight,
)
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
    plus,
    row_totals,
    splat,
    square_root,
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
def _sum_span(x, at, stride, start, stop, ahead, like):
    """Return the sum of columns ``[start, stop)``, whole vectors, of each row."""
    width = itemsize(x)
    part = like
    for col in range(start, stop, WIDTH):
        if col * width % TURN == 0:
            prefetch(x, ahead + col * width, stride, like)
        column = load(x, at + col * width, stride, like)
        # Of 16 bits the conversions are what this waits for; of float32, each sum for the last.
        part = plus(part, column) if width == 2 else part + column
    return part


@inlined
def _sum(x, at, stride, n, like, spans):
    """
    Return the sum of each row.

    `spans` is None or, if there is one row, a value of four: as which its spans are loaded as long
    as there are four more.
    """
    width = itemsize(x)
    ahead = at + count_rows(like) * stride
    total, done = like, 0
    if spans is not None:
        done = n - n % SPANS
        for start in range(0, done, SPANS):
            parts = _sum_span(x, at, SPAN * width, start, start + SPAN, ahead, spans)
            total = add_in_order(total, parts)
    for start in range(done, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part = _sum_span(x, at, stride, start, whole, ahead, like)
        if whole < stop:
            column = load_some(x, at + whole * width, stride, stop - whole, like)
            part = plus(part, column) if width == 2 else part + column
        total = total + part
    return row_totals(total)


@inlined
def _sum_centered_span(x, at, stride, start, stop, ahead, mean, like):
    """Do what `_sum_centered` does for columns ``[start, stop)``, whole vectors."""
    width = itemsize(x)
    part, part_squares = like, like
    for col in range(start, stop, WIDTH):
        if col * width % TURN == 0:
            prefetch(x, ahead + col * width, stride, like)
        c = minus(load(x, at + col * width, stride, like), mean)
        part = part + c
        part_squares = fma(c, c, part_squares)
    return part, part_squares


@inlined
def _sum_centered(x, at, stride, n, mean, like, spans):
    """Return the sums of x - mean and of its square of each row; `spans` as in `_sum`."""
    width = itemsize(x)
    ahead = at + count_rows(like) * stride + LINE
    total, total_squares, done = like, like, 0
    center = of_rows(mean, like)
    if spans is not None:
        done = n - n % SPANS
        for start in range(0, done, SPANS):
            parts, parts_squares = _sum_centered_span(
                x, at, SPAN * width, start, start + SPAN, ahead, in_rows(center, spans), spans
            )
            total = add_in_order(total, parts)
            total_squares = add_in_order(total_squares, parts_squares)
    for start in range(done, n, SPAN):
        stop = min(start + SPAN, n)
        whole = stop - stop % WIDTH
        part, part_squares = _sum_centered_span(x, at, stride, start, whole, ahead, center, like)
        if whole < stop:
            count = stop - whole
            column = load_some(x, at + whole * width, stride, count, like)
            c = keep(minus(column, center), count)
            part = part + c
            part_squares = fma(c, c, part_squares)
        total = total + part
        total_squares = total_squares + part_squares
    return row_totals(total), row_totals(total_squares)


@inner
def _affine(v, gamma, beta, like):
    return fma(v, in_rows(gamma, like), in_rows(beta, like))


@inner
def _normalize_edge(
    x, at, stride, start, stop, center, shift, rstd, gamma, beta, like, y, to, to_stride
):
    """Do what `_normalize` does for columns ``[start, stop)``, which need not be eight."""
    width, four, one = itemsize(x), itemsize(gamma), _one()
    for col in range(start, stop, WIDTH):
        count = min(stop - col, WIDTH)
        column = load_some(x, at + col * width, stride, count, like)
        result = _affine(
            fma(minus(column, center), rstd, shift),
            load_some(gamma, col * four, 0, count, one),
            load_some(beta, col * four, 0, count, one),
            like,
        )
        store_some(y, to + col * width, to_stride, count, result)


@inlined
def _normalize(x, at, stride, n, numbers, gamma, beta, like, y, to, to_stride, streaming):
    """Write ``gamma * ((x - mean) * rstd + shift) + beta``."""
    width, four, one = itemsize(x), itemsize(gamma), _one()
    ahead = at + count_rows(like) * stride + 2 * LINE
    center = of_rows(numbers, like)
    shift, rstd = of_rows(eight(numbers, 1), like), of_rows(eight(numbers, 2), like)
    head, whole = 0, n - n % WIDTH
    if streaming:
        expect_edges(y, to + count_rows(like) * to_stride, to_stride, n, like)
        head, whole = whole_lines(address(y) + to, n, width)
        _normalize_edge(
            x, at, stride, 0, head, center, shift, rstd, gamma, beta, like, y, to, to_stride
        )
    for col in range(head, whole, WIDTH):
        if (col - head) * width % TURN == 0:
            prefetch(x, ahead + (col - head) * width, stride, like)
        xhat = fma(minus(load(x, at + col * width, stride, like), center), rstd, shift)
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


@inlined
def _measure_rows(x, at, stride, n, eps, like, spans, statistics, all_rows, numbers):
    """Write the statistics of as many rows as `like` has, and what `_normalize` needs of them."""
    # A lane for each row: one division for all takes the time of two.
    one, rows = _one(), count_rows(like)
    length = splat(float(n), one)
    mean = _sum(x, at, stride, n, like, spans) / length
    store(numbers, 0, 0, mean)
    sums, squares = _sum_centered(x, at, stride, n, numbers, like, spans)
    mean_lo = sums / length
    # mean_lo is a rounding error of the mean: what its square takes off var is as small.
    var = squares / length - mean_lo * mean_lo
    rstd = splat(1.0, one) / square_root(var + splat(eps, one))
    store(eight(numbers, 1), 0, 0, negative(mean_lo * rstd))
    store(eight(numbers, 2), 0, 0, rstd)
    store_some(statistics, 0, 0, rows, mean)
    store_some(statistics, 8 * all_rows, 0, rows, mean_lo)
    store_some(statistics, 16 * all_rows, 0, rows, rstd)


@inner
def forward_tile(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, y, y_stride, streaming
):
    """
    Normalize rows ``[first, stop)`` of `x` into `y`.

    `statistics` points to mean, mean_lo and rstd of `all_rows` rows. With `streaming`, y goes
    past the caches.
    """
    width = itemsize(y)
    way = way_out(n, width, y, y_stride, streaming)
    chunk = staged_rows(n, width, way)
    space = np.empty(6 * WIDTH, np.float64)
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


@inner
def _forward_chunk(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, scratch,
    y, y_stride, streaming,
):  # fmt: skip
    """Normalize rows ``[first, stop)`` of `x` to `y`, where the first of these is to go."""
    four, one = _four(), _one()
    row = first
    if n <= LONGEST_IN_GROUP:
        row += (stop - first) // GROUP * GROUP
    # Of short rows the next four are measured before these are normalized, so that there is work
    # while their sums, divisions and roots wait for one another.
    ahead = GROUP if n <= LONGEST_AHEAD else 0
    for next_row in range(first, row + ahead, GROUP):
        if next_row < row:
            kept = pointer_at(address(statistics) + 8 * next_row, statistics)
            numbers = eight(scratch, 3 * (next_row // GROUP % 2))
            _measure_rows(
                x, next_row * stride, stride, n, eps, four, None, kept, all_rows, numbers
            )  # fmt: skip
        this_row = next_row - ahead
        if this_row >= first:
            _normalize(
                x, this_row * stride, stride, n, eight(scratch, 3 * (this_row // GROUP % 2)),
                gamma, beta, four, y, (this_row - first) * y_stride, y_stride, streaming,
            )  # fmt: skip
    while row < stop:
        kept = pointer_at(address(statistics) + 8 * row, statistics)
        _measure_rows(x, row * stride, stride, n, eps, one, four, kept, all_rows, scratch)
        _normalize(
            x, row * stride, stride, n, scratch, gamma, beta, one,
            y, (row - first) * y_stride, y_stride, streaming,
        )  # fmt: skip
        row += 1
