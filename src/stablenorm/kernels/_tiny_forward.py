"""The forward of `_tiny`."""

from __future__ import annotations

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import fence, stream_bytes
from stablenorm.kernels._tiny import (
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
    load_everywhere,
    pointer,
    store,
)
from stablenorm.kernels._vectors import ZEROS, fma, negative, splat, square_root

_one, _group = ZEROS[1], ZEROS[VECTORS]


@inner
def _forward_rows(
    x, stride, n, gamma, beta, eps, like, vectors, ahead, statistics, apart,
    columns, results, y, y_stride,
):  # fmt: skip
    """Normalize as many rows as `like` has lanes; write statistics, each `apart` from the next."""
    width, four = itemsize(y), itemsize(gamma)
    load_rows(x, stride, n, vectors, columns)
    length = splat(float(n), like)
    total = like
    for col in range(n):
        expect(x, ahead, col)
        total = total + load(columns, col * COLUMN, VECTOR, like)
    mean = total / length
    total, squares = like, like
    for col in range(n):
        c = load(columns, col * COLUMN, VECTOR, like) - mean
        total = total + c
        squares = fma(c, c, squares)
    mean_lo = total / length
    # mean_lo is a rounding error of the mean: what its square takes off var is as small.
    var = squares / length - mean_lo * mean_lo
    rstd = splat(1.0, like) / square_root(var + splat(eps, like))
    shift = negative(mean_lo * rstd)
    store(statistics, 0, VECTOR, mean)
    store(statistics, 8 * apart, VECTOR, mean_lo)
    store(statistics, 16 * apart, VECTOR, rstd)
    for col in range(n):
        xhat = fma(load(columns, col * COLUMN, VECTOR, like) - mean, rstd, shift)
        scale = load_everywhere(gamma, col * four, like)
        result = fma(xhat, scale, load_everywhere(beta, col * four, like))
        store(results, col * GROUP * width, WIDTH * width, result)
    store_rows(results, vectors, n, y, y_stride)


@inner
def _forward_chunk(x, stride, rows, n, gamma, beta, eps, statistics, all_rows, space, y, y_stride):
    """Normalize rows of `x` to `y`, where the first of these is to go."""
    group, one = _group(), _one()
    columns, results = after(0, space), as_pointer(after(n, space), y)
    ahead = far_ahead(x, stride, n)
    row = 0
    while row + GROUP <= rows:
        _forward_rows(
            moved(x, row * stride), stride, n, gamma, beta, eps, group, VECTORS, ahead,
            moved(statistics, 8 * row), all_rows, columns, results,
            moved(y, row * y_stride), y_stride,
        )  # fmt: skip
        row += GROUP
    while row < rows:
        count = min(rows - row, WIDTH)
        source, source_stride = moved(x, row * stride), stride
        target, target_stride = moved(y, row * y_stride), y_stride
        kept, apart = moved(statistics, 8 * row), all_rows
        if count < WIDTH:
            padded = after(2 * n, space)
            copy_padded(source, stride, count, n, as_pointer(padded, x))
            source, source_stride = as_pointer(padded, x), n * itemsize(x)
            target, target_stride = as_pointer(padded, y), n * itemsize(y)
            kept, apart = after(3 * n, space), WIDTH
        _forward_rows(
            source, source_stride, n, gamma, beta, eps, one, 1, 0, kept, apart,
            columns, results, target, target_stride,
        )  # fmt: skip
        if count < WIDTH:
            copy_rows(target, target_stride, count, n, moved(y, row * y_stride), y_stride)
            copy_statistics(kept, apart, count, moved(statistics, 8 * row), all_rows)
        row += count


@inner
def forward_tile(
    x, stride, first, stop, n, gamma, beta, eps, statistics, all_rows, y, y_stride, streaming
):
    """Do what `_narrow_forward.forward_tile` does."""
    size = n * itemsize(y)
    staged = staged_rows(n, itemsize(y), streaming, y_stride)
    # Columns and results, padded rows, their statistics; then the stage.
    before = 3 * n + 1
    space = working_space(before, staged * size)
    chunk = staged or max(stop - first, 1)
    for begin in range(first, stop, chunk):
        rows = min(chunk, stop - begin)
        out = moved(y, begin * y_stride)
        out_here = as_pointer(after(before, pointer(space)), y) if staged else out
        _forward_chunk(
            moved(x, begin * stride), stride, rows, n, gamma, beta, eps,
            moved(statistics, 8 * begin), all_rows, pointer(space), out_here, y_stride,
        )  # fmt: skip
        if staged:
            stream_bytes(address(out), address(out_here), rows * size)
    if streaming:
        fence()
