"""The backward of `_tiny`."""

from __future__ import annotations

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._sums import sums_size, two_sum
from stablenorm.kernels._tiny import (
    AHEAD,
    COLUMN,
    GROUP,
    VECTOR,
    VECTORS,
    after,
    as_pointer,
    copy_padded,
    copy_rows,
    copy_statistics,
    expect,
    far_ahead,
    load_rows,
    moved,
    staged_rows,
    store_rows,
    working_space,
)
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load,
    load_column,
    load_everywhere,
    pointer,
    prefetch,
    store,
)
from stablenorm.kernels._vectors import ZEROS, fma, negative, splat, sum_rows

_one, _group = ZEROS[1], ZEROS[VECTORS]


@inner
def _accumulate(sums, col, v):
    """
    Add `v` to the sums of a column, one for each lane of a row of `v`.

    `sums` holds eight sums, then what rounding took from them, then those of the next column.
    """
    one = _one()
    at = 2 * VECTOR * col
    total, error = two_sum(load(sums, at, 0, one), sum_rows(v))
    store(sums, at, 0, total)
    store(sums, at + VECTOR, 0, load(sums, at + VECTOR, 0, one) + error)


@inner
def _write_sums(lanes, n, sums):
    """Add the lanes of each column, one after the other, into the layout of `_sums`."""
    one = _one()
    for col in range(0, n, WIDTH):
        total, rest = one, one
        for lane in range(WIDTH):
            at = 2 * VECTOR * col + 8 * lane
            total, error = two_sum(total, load_column(lanes, at, 2 * VECTOR, one))
            rest = rest + (error + load_column(lanes, at + VECTOR, 2 * VECTOR, one))
        store(sums, 16 * col, 0, total)
        store(sums, 16 * col + VECTOR, 0, rest)


@inner
def _write_both_sums(space, lanes_after, n, sums):
    """Write dgamma's and dbeta's. `space` is the array: Numba frees it after its last use."""
    lanes = after(lanes_after, pointer(space))
    _write_sums(lanes, n, sums)
    _write_sums(moved(lanes, _bytes_of_lanes(n)), n, moved(sums, 8 * sums_size(n)))


@inner
def _bytes_of_lanes(n):
    """Return the bytes of the sums of n columns, whole eights of them."""
    return 2 * VECTOR * (n + -n % WIDTH)


@inner
def _expect_statistics(statistics, apart):
    """Ask for those of rows to come: at n = 1 most of what is read, and up to 1.8 times faster."""
    for which in range(3):
        for line in range(0, COLUMN, LINE):
            prefetch(statistics, 8 * which * apart + AHEAD + line, 0, _one())


@inner
def _backward_rows(
    dy, dy_stride, x, x_stride, n, gamma, like, vectors, dy_ahead, x_ahead, statistics, apart,
    columns, cotangents, wanted, summing, dgamma, dbeta, results, dx, dx_stride,
):  # fmt: skip
    """Pull back as many rows as `like` has lanes, given statistics, each `apart` from the next."""
    width, four = itemsize(dx), itemsize(gamma)
    load_rows(dy, dy_stride, n, vectors, cotangents)
    load_rows(x, x_stride, n, vectors, columns)
    length = splat(float(n), like)
    mean = load(statistics, 0, VECTOR, like)
    rstd = load(statistics, 16 * apart, VECTOR, like)
    shift = negative(load(statistics, 8 * apart, VECTOR, like) * rstd)
    total = like
    for col in range(n):
        expect(dy, dy_ahead, col)
        cotangent = load(cotangents, col * COLUMN, VECTOR, like)
        total = fma(cotangent, load_everywhere(gamma, col * four, like), total)
        if summing:
            _accumulate(dbeta, col, cotangent)
    minus_mean_g = negative(total / length)
    total = like
    for col in range(n):
        expect(x, x_ahead, col)
        at = col * COLUMN
        cotangent = load(cotangents, at, VECTOR, like)
        xhat = fma(load(columns, at, VECTOR, like) - mean, rstd, shift)
        # Centred first: then the products are as small as their sum.
        centered = fma(cotangent, load_everywhere(gamma, col * four, like), minus_mean_g)
        total = fma(centered, xhat, total)
        if summing:
            _accumulate(dgamma, col, cotangent * xhat)
        store(columns, at, VECTOR, xhat)
        store(cotangents, at, VECTOR, centered)
    if wanted:
        slope = total / length
        for col in range(n):
            at = col * COLUMN
            xhat, centered = load(columns, at, VECTOR, like), load(cotangents, at, VECTOR, like)
            result = fma(negative(xhat), slope, centered) * rstd
            store(results, col * GROUP * width, WIDTH * width, result)
        store_rows(results, vectors, n, dx, dx_stride)


@inner
def _backward_chunk(
    dy, dy_stride, x, x_stride, rows, n, gamma, statistics, all_rows,
    space, wanted, summing, dgamma, dx, dx_stride,
):  # fmt: skip
    """Pull back rows to `dx`, where the first of these is to go."""
    group, one = _group(), _one()
    columns, cotangents, results = (
        after(0, space),
        after(n, space),
        as_pointer(after(2 * n, space), dx),
    )
    dbeta = moved(dgamma, _bytes_of_lanes(n))
    dy_ahead, x_ahead = far_ahead(dy, dy_stride, n), far_ahead(x, x_stride, n)
    row = 0
    while row + GROUP <= rows:
        kept = moved(statistics, 8 * row)
        _expect_statistics(kept, all_rows)
        _backward_rows(
            moved(dy, row * dy_stride), dy_stride, moved(x, row * x_stride), x_stride, n, gamma,
            group, VECTORS, dy_ahead, x_ahead, kept, all_rows, columns, cotangents, wanted,
            summing, dgamma, dbeta, results, moved(dx, row * dx_stride), dx_stride,
        )  # fmt: skip
        row += GROUP
    while row < rows:
        count = min(rows - row, WIDTH)
        cotangent, cotangent_stride = moved(dy, row * dy_stride), dy_stride
        source, source_stride = moved(x, row * x_stride), x_stride
        target, target_stride = moved(dx, row * dx_stride), dx_stride
        kept, apart = moved(statistics, 8 * row), all_rows
        if count < WIDTH:
            padded_x, padded_dy = after(3 * n, space), after(4 * n, space)
            copy_padded(source, x_stride, count, n, as_pointer(padded_x, x))
            copy_padded(cotangent, dy_stride, count, n, as_pointer(padded_dy, dy))
            cotangent, cotangent_stride = as_pointer(padded_dy, dy), n * itemsize(dy)
            source, source_stride = as_pointer(padded_x, x), n * itemsize(x)
            target, target_stride = as_pointer(padded_x, dx), n * itemsize(dx)
            padded = after(5 * n, space)
            # With an rstd of zero nothing becomes NaN in the rows of zeros, whatever eps.
            store(padded, 0, VECTOR, _group())
            copy_statistics(kept, all_rows, count, padded, WIDTH)
            kept, apart = padded, WIDTH
        _backward_rows(
            cotangent, cotangent_stride, source, source_stride, n, gamma, one, 1, 0, 0, kept, apart,
            columns, cotangents, wanted, summing, dgamma, dbeta, results, target, target_stride,
        )  # fmt: skip
        if count < WIDTH and wanted:
            copy_rows(target, target_stride, count, n, moved(dx, row * dx_stride), dx_stride)
        row += count


@inner
def backward_tile(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, statistics, all_rows,
    dx, dx_stride, wanted, streaming, sums, summing,
):  # fmt: skip
    """Do what `_narrow_backward.backward_tile` does."""
    size = n * itemsize(dx)
    staged = staged_rows(n, itemsize(dx), streaming and wanted, dx_stride)
    # Columns of x and dy, results, padded rows of both, their statistics; then sums; the stage.
    before = 5 * n + 1
    space = working_space(before, 2 * _bytes_of_lanes(n) + staged * size)
    dgamma = after(before, pointer(space))
    for at in range(2 * _bytes_of_lanes(n) // 8):
        dgamma[at] = 0.0
    chunk = staged or max(stop - first, 1)
    for begin in range(first, stop, chunk):
        rows = min(chunk, stop - begin)
        out = moved(dx, begin * dx_stride)
        lanes = after(before, pointer(space))
        out_here = as_pointer(moved(lanes, 2 * _bytes_of_lanes(n)), dx) if staged else out
        _backward_chunk(
            moved(dy, begin * dy_stride), dy_stride, moved(x, begin * x_stride), x_stride,
            rows, n, gamma, moved(statistics, 8 * begin), all_rows,
            pointer(space), wanted, summing, lanes, out_here, dx_stride,
        )  # fmt: skip
        if staged:
            stream_bytes(address(out), address(out_here), rows * size)
    if summing:
        _write_both_sums(space, before, n, sums)
    if streaming:
        fence()
