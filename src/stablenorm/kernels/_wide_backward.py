"""The backward of `_wide`."""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE, fence
from stablenorm.kernels._pairs import (
    accumulated,
    add,
    divide,
    over_lanes,
    product_of,
    two_sum,
)
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load,
    pointer,
    pointer_at,
    prefetch,
    store,
    store_some,
    stream,
)
from stablenorm.kernels._vectors import (
    ZEROS,
    first_lane,
    fma,
    keep,
    larger,
    magnitude,
    negative,
    smaller_nonzero,
    splat,
)
from stablenorm.kernels._way_out import PLAIN, STAGED, STREAMED, way_out
from stablenorm.kernels._wide import (
    LARGEST,
    SMALLEST,
    SPAN,
    copy_out,
    is_moderate,
    largest_lane,
    load_columns,
    xhat_of,
)

_one = ZEROS[1]


@inner
def _accumulate_in(sums, col, v, v_low):
    """Add a pair to the eight sums from `col` on, laid out as `_sums` says."""
    zero = _one()
    at, low_at = 16 * col, 16 * col + 8 * WIDTH
    total, low = accumulated(load(sums, at, 0, zero), load(sums, low_at, 0, zero), v, v_low)
    store(sums, at, 0, total)
    store(sums, low_at, 0, low)


@inner
def _mean_g(dy, at, stride, n, gamma, summing, dbeta):
    """
    Return the mean of ``g = gamma * dy`` as a pair, and whether the size of all dy is moderate.

    Adds dy to `dbeta`.
    """
    width, zero = itemsize(dy), _one()
    total, total_low = zero, zero
    largest, smallest = zero, splat(LARGEST, zero)
    for start in range(0, n, SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(dy, at + stride + col * width, 0, zero)
            count = min(n - col, WIDTH)
            cotangent = load_columns(dy, at, col, count)
            size = magnitude(cotangent)
            largest, smallest = larger(largest, size), smaller_nonzero(smallest, size)
            g, g_low = product_of(cotangent, load_columns(gamma, 0, col, count))
            part, part_low = accumulated(part, part_low, g, g_low)
            if summing:
                _accumulate_in(dbeta, col, cotangent, zero)
        total, total_low = add(total, total_low, part, part_low)
    total, total_low = over_lanes(total, total_low)
    total, total_low = divide(total, total_low, splat(float(n), zero))
    # A NaN is neither larger nor smaller than anything, but the sum shows it.
    moderate = (
        first_lane(largest_lane(largest)) <= LARGEST
        and -first_lane(largest_lane(negative(smallest))) >= SMALLEST
        and abs(first_lane(total)) < np.inf
    )
    return total, total_low, moderate


@inner
def _centered_g(cotangent, gamma, mean_g, mean_g_low):
    """Return ``gamma * dy - mean(g)`` as a pair."""
    g, g_low = product_of(cotangent, gamma)
    c, error = two_sum(g, negative(mean_g))
    return c, error + (g_low - mean_g_low)


@inner
def _keep_factors(factors, col, xhat, xhat_low, c, c_low):
    at = 32 * col
    store(factors, at, 0, xhat)
    store(factors, at + 8 * WIDTH, 0, xhat_low)
    store(factors, at + 16 * WIDTH, 0, c)
    store(factors, at + 24 * WIDTH, 0, c_low)


@inner
def _slope(
    dy, dy_at, x, x_at, x_stride, n, gamma, mean, mean_lo, tail, rstd, rstd_lo,
    mean_g, mean_g_low, summing, dgamma, factors,
):  # fmt: skip
    """
    Return the mean of ``(g - mean(g)) * xhat`` as a pair, and the largest |x|.

    Adds dy * xhat to `dgamma`, and leaves xhat and g - mean(g) in `factors`, four words each
    column: reading them back takes a third of the time of computing them again.
    """
    width, zero = itemsize(x), _one()
    total, total_low, largest = zero, zero, zero
    for start in range(0, n, SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(x, x_at + x_stride + col * width, 0, zero)
                prefetch(x, x_at + x_stride + LINE + col * width, 0, zero)
            count = min(n - col, WIDTH)
            cotangent = load_columns(dy, dy_at, col, count)
            column = load_columns(x, x_at, col, count)
            largest = larger(largest, magnitude(column))
            xhat, xhat_low = xhat_of(column, mean, mean_lo, tail, rstd, rstd_lo)
            c, c_low = _centered_g(
                cotangent, load_columns(gamma, 0, col, count), mean_g, mean_g_low
            )
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            _keep_factors(factors, col, xhat, xhat_low, c, c_low)
            product, error = product_of(c, xhat)
            error = fma(c, xhat_low, fma(c_low, xhat, error))
            part, part_low = accumulated(part, part_low, product, error)
            if summing:
                term, term_low = product_of(cotangent, xhat)
                _accumulate_in(dgamma, col, term, fma(cotangent, xhat_low, term_low))
        total, total_low = add(total, total_low, part, part_low)
    total, total_low = over_lanes(total, total_low)
    slope, slope_low = divide(total, total_low, splat(float(n), zero))
    return slope, slope_low, largest_lane(largest)


@inner
def _dx(factors, col, slope, slope_low, rstd, rstd_lo):
    """Return ``rstd * (g - mean(g) - xhat * slope)`` of eight columns, rounded once."""
    at, zero = 32 * col, _one()
    xhat, xhat_low = load(factors, at, 0, zero), load(factors, at + 8 * WIDTH, 0, zero)
    c, c_low = load(factors, at + 16 * WIDTH, 0, zero), load(factors, at + 24 * WIDTH, 0, zero)
    along, error = product_of(xhat, slope)
    along_low = fma(xhat, slope_low, fma(xhat_low, slope, error))
    c, error = two_sum(c, negative(along))
    c_low = error + (c_low - along_low)
    product, error = product_of(c, rstd)
    return product + fma(c, rstd_lo, fma(c_low, rstd, error))


@inner
def _write_dx(
    n, factors, slope, slope_low, rstd, rstd_lo, dx, to, streaming, x, x_next, dy, dy_next
):
    """Write a row of dx, and ask for what is left of the next row of x and dy."""
    dy_width, width, zero = itemsize(dy), itemsize(dx), _one()
    for col in range(0, n, WIDTH):
        if col * width % (3 * LINE) < LINE:
            prefetch(x, x_next + 2 * LINE + col * width, 0, zero)
            prefetch(dy, dy_next + LINE + col * dy_width, 0, zero)
            prefetch(dy, dy_next + 2 * LINE + col * dy_width, 0, zero)
        count = min(n - col, WIDTH)
        result = _dx(factors, col, slope, slope_low, rstd, rstd_lo)
        if count < WIDTH:
            store_some(dx, to + col * width, 0, count, result)
        elif streaming:
            stream(dx, to + col * width, 0, result)
        else:
            store(dx, to + col * width, 0, result)


@inner
def _backward_row(
    dy, dy_at, dy_stride, x, x_at, x_stride, n, gamma, numbers, all_rows, mean_tail,
    wanted, summing, dgamma, dbeta, factors, dx, to, streaming,
):  # fmt: skip
    """Pull back one row; tell whether it is hard, and then write nothing."""
    zero = _one()
    # A row that the reference normalized, of extreme size or without variance: NaN is hard.
    if not (abs(numbers[0]) <= LARGEST and numbers[2 * all_rows] <= LARGEST):
        return True
    mean, mean_lo = splat(numbers[0], zero), splat(numbers[all_rows], zero)
    rstd, rstd_lo = splat(numbers[2 * all_rows], zero), splat(numbers[3 * all_rows], zero)
    tail = splat(mean_tail, zero)
    mean_g, mean_g_low, moderate = _mean_g(dy, dy_at, dy_stride, n, gamma, summing, dbeta)
    if not moderate:
        return True
    slope, slope_low, largest = _slope(
        dy, dy_at, x, x_at, x_stride, n, gamma, mean, mean_lo, tail, rstd, rstd_lo,
        mean_g, mean_g_low, summing, dgamma, factors,
    )  # fmt: skip
    if not is_moderate(first_lane(largest)):
        return True
    if wanted:
        _write_dx(
            n, factors, slope, slope_low, rstd, rstd_lo, dx, to, streaming,
            x, x_at + x_stride, dy, dy_at + dy_stride,
        )  # fmt: skip
    return False


@inner
def _rows_in_block(n):
    """Return how many rows are pulled back before they are copied out: what 512 KiB hold."""
    return max(min((1 << 16) // n, 64), 2)


@inner
def backward_tile(
    dy, dy_stride, x, x_stride, first, stop, n, gamma, numbers, all_rows, tails, tailed,
    dx, dx_stride, wanted, streaming, sums, size, summing, known, knowing,
):  # fmt: skip
    """
    Pull back rows ``[first, stop)``, but for those that are hard; tell whether there are any.

    Rows marked in `known`, if `knowing`, are hard in any case. `tails` counts only if `tailed`.
    `sums` points to the compensated sums for dgamma and, `size` float64 on, those for dbeta; they
    are of no use if a row is hard. Rows half a block apart go one after the other, as they are
    added in pairs by the reference: what cancels there cancels here.
    """
    width = itemsize(dx)
    way = way_out(n, width, dx, dx_stride, streaming and wanted)
    if way == STREAMED and address(dx) % LINE:
        # `factors` is in whole vectors from the first column on, and so are the stores.
        way = STAGED if dx_stride == n * width else PLAIN
    block = _rows_in_block(n)
    # Of whole vectors, the last of which may be partly beyond the row.
    factors = np.empty(4 * (n + WIDTH), np.float64)
    stage = np.empty(min(block, stop - first) * n * width if way == STAGED else 1, np.uint8)
    hard = np.empty(block, np.uint8)
    any_hard = False
    dbeta = pointer_at(address(sums) + 8 * size, sums)
    for at in range(2 * size if summing else 0):
        sums[at] = 0.0
    for begin in range(first, stop, block):
        end = min(begin + block, stop)
        half = (end - begin + 1) // 2
        written = end - begin
        for turn in range(end - begin):
            in_block = turn // 2 + half * (turn % 2)
            row = begin + in_block
            out, to = dx, row * dx_stride
            if way == STAGED:
                out, to = pointer_at(address(pointer(stage)), dx), in_block * n * width
            hard[in_block] = (knowing and known[row] != 0) or _backward_row(
                dy, row * dy_stride, dy_stride, x, row * x_stride, x_stride, n, gamma,
                pointer_at(address(numbers) + 8 * row, numbers), all_rows,
                tails[row] if tailed else 0.0, wanted, summing, sums, dbeta,
                pointer(factors), out, to, way == STREAMED,
            )  # fmt: skip
            written -= hard[in_block]
        any_hard = any_hard or written < end - begin
        if way == STAGED:
            copy_out(stage, begin, end, n * width, written, dx, dx_stride, pointer(hard))
    if streaming:
        fence()
    return any_hard
