"""
float64: the equations of `reference` in double-double, rounded once.

A number is a pair of vectors, ``high + low`` with |low| at most half an ulp of high. Sums and
products use the error-free transformations of Knuth and Dekker (`_two_sum`, `_product`, the
latter with the fused multiply-add), and are exact to about 2**-104; Joldes, Muller and Popescu,
ACM TOMS 44 (2017) 15, has the bounds.

Pairs have the range of float64, so squares of 1e200 overflow, and the low parts of products
below 1e-290 vanish. Rows that could come near either are left alone and reported as `hard`:
`cpu` hands them to the reference, whose numbers carry exponents.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from stablenorm.kernels._memory import LINE, fence, stream_bytes
from stablenorm.kernels._narrow import (
    PLAIN,
    STAGED,
    STREAMED,
    _expect_edges,
    _staged_rows,
    _two_sum,
    _way_out,
    _whole_lines,
)
from stablenorm.kernels._vectors import (
    SWAPPED,
    WIDTH,
    ZEROS,
    address,
    first_lane,
    fma,
    itemsize,
    keep,
    larger,
    load,
    load_some,
    magnitude,
    negative,
    pointer,
    pointer_at,
    prefetch,
    smaller_nonzero,
    splat,
    square_root,
    store,
    store_some,
    stream,
)

# Rows whose largest |x| or |dy|, or smallest |dy| but for zeros, is beyond this are hard. Within,
# no product of three numbers, nor its last 106 bits, leaves the range of float64:
# 3 * 200 + 3 * 53 + 106 < 1022.
LARGEST, SMALLEST = 2.0**200, 2.0**-200

# Columns that one lane sums before the partial sum is put aside: 128 of them.
_SPAN = 1024

# The second word of the mean's rest is kept where it exceeds 2**-100 of the least that mean|xhat|
# can be, std / sqrt(n): a quarter of what the contract allows.
_TAIL_MATTERS = 2.0**200

# As long as the squared rest is no larger part of var, subtracting it costs no digit.
_MOST_OF_VAR = 2.0**-6

_one = ZEROS[1]
_swap4, _swap2, _swap1 = SWAPPED[4], SWAPPED[2], SWAPPED[1]
_compiled = njit(error_model="numpy")


# ---- pairs ----


@_compiled
def _fast_two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error, given ``|a| >= |b|``."""
    total = a + b
    return total, b - (total - a)


@_compiled
def _product(a, b):
    """Return ``fl(a * b)`` and its exact error."""
    product = a * b
    return product, fma(a, b, negative(product))


@_compiled
def _add(a, a_low, b, b_low):
    """Return the sum of two pairs."""
    total, error = _two_sum(a, b)
    low, low_error = _two_sum(a_low, b_low)
    total, error = _fast_two_sum(total, error + low)
    return _fast_two_sum(total, error + low_error)


@_compiled
def _accumulate(a, a_low, b, b_low):
    """Add a pair to a running sum, whose low part gathers what rounding takes from the high one."""
    total, error = _two_sum(a, b)
    return total, a_low + (error + b_low)


@_compiled
def _multiply(a, a_low, b, b_low):
    """Return the product of two pairs."""
    product, error = _product(a, b)
    return _fast_two_sum(product, fma(a, b_low, fma(a_low, b, error)))


@_compiled
def _divide(a, a_low, n):
    """Return a pair divided by `n`."""
    quotient = a / n
    rest = fma(negative(quotient), n, a) + a_low
    return _fast_two_sum(quotient, rest / n)


@_compiled
def _over_lanes(v, v_low):
    """Return the sum of the lanes of a pair, in all lanes."""
    v, v_low = _fast_two_sum(v, v_low)
    v, v_low = _add(v, v_low, _swap4(v), _swap4(v_low))
    v, v_low = _add(v, v_low, _swap2(v), _swap2(v_low))
    return _add(v, v_low, _swap1(v), _swap1(v_low))


@_compiled
def _reciprocal_root(v, v_low):
    """Return ``(v + v_low)**-0.5``: a Newton step of second order from float64's own."""
    one = splat(1.0, v)
    start = one / square_root(v)
    square, square_low = _product(start, start)
    product, error = _product(v, square)
    error = error + fma(v, square_low, v_low * square)
    # About 2**-52; the subtraction is exact.
    delta = (one - product) - error
    half_delta = splat(0.5, v) * delta
    correction = fma(splat(0.375, v) * delta, delta, half_delta)
    return _fast_two_sum(start, start * correction)


@_compiled
def _is_moderate(largest):
    return largest <= LARGEST and (largest >= SMALLEST or largest == 0.0)


# ---- forward ----


@_compiled
def _load_columns(x, at, col, count):
    """Return eight columns, or the first `count` and zeros."""
    at = at + col * itemsize(x)
    if count == WIDTH:
        return load(x, at, 0, _one())
    return load_some(x, at, 0, count, _one())


@_compiled
def _sum(x, at, stride, n):
    """Return the sum of a row, in all lanes, to float64's own precision, and the largest |x|."""
    width, zero = itemsize(x), _one()
    total, largest = zero, zero
    for start in range(0, n, _SPAN):
        part = zero
        for col in range(start, min(start + _SPAN, n), WIDTH):
            # A third of the lines of the next row; `_narrow` says why.
            if col * width % (3 * LINE) == 0:
                prefetch(x, at + stride + col * width, 0, zero)
            v = _load_columns(x, at, col, min(n - col, WIDTH))
            part = part + v
            largest = larger(largest, magnitude(v))
        total = total + part
    total, _ = _over_lanes(total, zero)
    return total, _largest_lane(largest)


@_compiled
def _largest_lane(v):
    v = larger(v, _swap4(v))
    v = larger(v, _swap2(v))
    return larger(v, _swap1(v))


@_compiled
def _sum_centered(x, at, stride, n, mean):
    """Return the sums of x - mean and of its square, as pairs."""
    width, zero = itemsize(x), _one()
    minus_mean = negative(mean)
    total, total_low, squares, squares_low = zero, zero, zero, zero
    for start in range(0, n, _SPAN):
        part, part_low, part_squares, part_squares_low = zero, zero, zero, zero
        for col in range(start, min(start + _SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(x, at + stride + LINE + col * width, 0, zero)
            count = min(n - col, WIDTH)
            c, c_low = _two_sum(_load_columns(x, at, col, count), minus_mean)
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            part, part_low = _accumulate(part, part_low, c, c_low)
            square, error = _product(c, c)
            error = fma(c + c, c_low, error)
            part_squares, part_squares_low = _accumulate(
                part_squares, part_squares_low, square, error
            )
        total, total_low = _add(total, total_low, part, part_low)
        squares, squares_low = _add(squares, squares_low, part_squares, part_squares_low)
    total, total_low = _over_lanes(total, total_low)
    squares, squares_low = _over_lanes(squares, squares_low)
    return total, total_low, squares, squares_low


@_compiled
def _sum_squares(x, at, n, mean, rest, rest_low):
    """Return the sum of ``(x - mean - rest)**2`` as a pair."""
    zero = _one()
    squares, squares_low = zero, zero
    for start in range(0, n, _SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + _SPAN, n), WIDTH):
            count = min(n - col, WIDTH)
            c, c_low = _two_sum(_load_columns(x, at, col, count), negative(mean))
            c, c_low = _add(c, c_low, negative(rest), negative(rest_low))
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            square, error = _product(c, c)
            part, part_low = _accumulate(part, part_low, square, fma(c + c, c_low, error))
        squares, squares_low = _add(squares, squares_low, part, part_low)
    return _over_lanes(squares, squares_low)


@_compiled
def _xhat(v, mean, mean_lo, mean_tail, rstd, rstd_lo):
    """
    Return ``(v - mean - mean_lo - mean_tail) * (rstd + rstd_lo)`` as a pair.

    Here and in `_centered_g` the low part may exceed half an ulp of the high one, by a few bits:
    what follows takes products and sums of these, where that costs nothing.
    """
    c, c_low = _two_sum(v, negative(mean))
    c, error = _two_sum(c, negative(mean_lo))
    c_low = (error + c_low) - mean_tail
    product, error = _product(c, rstd)
    return product, fma(c, rstd_lo, fma(c_low, rstd, error))


@_compiled
def _affine(v, v_low, gamma, beta):
    """Return ``gamma * (v + v_low) + beta``, rounded once."""
    product, error = _product(v, gamma)
    error = fma(v_low, gamma, error)
    total, rest = _two_sum(product, beta)
    return total + (rest + error)


@_compiled
def _normalize_span(
    x, at, stride, start, stop, gamma, beta, mean, mean_lo, tail, rstd, rstd_lo, y, to, streaming
):
    """Write y of columns ``[start, stop)``."""
    width, zero = itemsize(x), _one()
    for col in range(start, stop, WIDTH):
        if col * width % (3 * LINE) < LINE:
            prefetch(x, at + stride + 2 * LINE + col * width, 0, zero)
        count = min(stop - col, WIDTH)
        xhat, low = _xhat(_load_columns(x, at, col, count), mean, mean_lo, tail, rstd, rstd_lo)
        result = _affine(
            xhat, low, _load_columns(gamma, 0, col, count), _load_columns(beta, 0, col, count)
        )
        if count < WIDTH:
            store_some(y, to + col * width, 0, count, result)
        elif streaming:
            stream(y, to + col * width, 0, result)
        else:
            store(y, to + col * width, 0, result)


@_compiled
def _forward_row(x, at, stride, n, gamma, beta, eps, numbers, all_rows, tails, y, to, streaming):
    """Normalize one row; tell whether it is hard, and then write nothing."""
    zero = _one()
    count = splat(float(n), zero)
    total, largest = _sum(x, at, stride, n)
    if not _is_moderate(first_lane(largest)):
        return True
    mean = total / count
    if not abs(first_lane(mean)) <= LARGEST:
        return True
    rest, rest_low, squares, squares_low = _sum_centered(x, at, stride, n, mean)
    rest, rest_low = _divide(rest, rest_low, count)
    square, square_low = _multiply(rest, rest_low, rest, rest_low)
    var, var_low = _divide(squares, squares_low, count)
    var, var_low = _add(var, var_low, negative(square), negative(square_low))
    if not first_lane(square) <= _MOST_OF_VAR * first_lane(var):
        # Neighbouring floats: the error of the mean is larger than their spread. It must be less
        # than an ulp, for the rest to have all its digits below; and the difference of squares
        # has lost what it takes digits to hold.
        mean = mean + rest
        rest, rest_low, _, _ = _sum_centered(x, at, stride, n, mean)
        rest, rest_low = _divide(rest, rest_low, count)
        squares, squares_low = _sum_squares(x, at, n, mean, rest, rest_low)
        var, var_low = _divide(squares, squares_low, count)
    v, v_low = _add(var, var_low, splat(eps, zero), zero)
    if not first_lane(v) > 0.0:
        return True
    rstd, rstd_lo = _reciprocal_root(v, v_low)
    tail = first_lane(rest_low)
    if tail * tail * _TAIL_MATTERS * n <= first_lane(var):
        tail = 0.0
    numbers[0] = first_lane(mean)
    numbers[all_rows] = first_lane(rest)
    numbers[2 * all_rows] = first_lane(rstd)
    numbers[3 * all_rows] = first_lane(rstd_lo)
    tails[0] = tail
    mean_tail = splat(tail, zero)
    head, whole = 0, n
    if streaming:
        _expect_edges(y, to + n * itemsize(y), 0, n, zero)
        head, whole = _whole_lines(address(y) + to, n, itemsize(y))
        _normalize_span(
            x, at, stride, 0, head, gamma, beta, mean, rest, mean_tail, rstd, rstd_lo,
            y, to, False,
        )  # fmt: skip
    _normalize_span(
        x, at, stride, head, whole, gamma, beta, mean, rest, mean_tail, rstd, rstd_lo,
        y, to, streaming,
    )  # fmt: skip
    _normalize_span(
        x, at, stride, whole, n, gamma, beta, mean, rest, mean_tail, rstd, rstd_lo, y, to, False
    )
    return False


@_compiled
def forward_tile(
    x,
    stride,
    first,
    stop,
    n,
    gamma,
    beta,
    eps,
    numbers,
    all_rows,
    tails,
    y,
    y_stride,
    streaming,
    hard,
):
    """
    Normalize rows ``[first, stop)`` of `x` into `y`, but for those marked in `hard`.

    `numbers` points to mean, mean_lo, rstd and rstd_lo of `all_rows` rows, `tails` to mean_tail.
    """
    width = itemsize(y)
    way = _way_out(n, width, y, y_stride, streaming)
    chunk = min(_staged_rows(n, width, way), stop - first)
    stage = np.empty(chunk * n * width if way == STAGED else 1, np.uint8)
    for begin in range(first, stop, chunk):
        end = min(begin + chunk, stop)
        written = end - begin
        for row in range(begin, end):
            out, to = y, row * y_stride
            if way == STAGED:
                out, to = pointer_at(address(pointer(stage)), y), (row - begin) * n * width
            kept = pointer_at(address(numbers) + 8 * row, numbers)
            if _forward_row(
                x, row * stride, stride, n, gamma, beta, eps, kept, all_rows,
                pointer_at(address(tails) + 8 * row, tails), out, to, way == STREAMED,
            ):  # fmt: skip
                hard[row] = 1
                written -= 1
        if way == STAGED:
            marks = pointer_at(address(hard) + begin, hard)
            _copy_out(stage, begin, end, n * width, written, y, y_stride, marks)
    if streaming:
        fence()


@_compiled
def _copy_out(stage, begin, end, row_bytes, written, out, stride, hard):
    """Copy staged rows ``[begin, end)`` to `out`, without those marked in `hard`."""
    source, to = address(pointer(stage)), address(out)
    if written == end - begin:
        stream_bytes(to + begin * stride, source, written * row_bytes)
        return
    for row in range(begin, end):
        if not hard[row - begin]:
            stream_bytes(to + row * stride, source + (row - begin) * row_bytes, row_bytes)


# ---- backward ----


@_compiled
def _accumulate_in(sums, col, v, v_low):
    """Add a pair to the eight sums from `col` on, laid out as `_narrow._accumulate` says."""
    zero = _one()
    at, low_at = 16 * col, 16 * col + 8 * WIDTH
    total, low = _accumulate(load(sums, at, 0, zero), load(sums, low_at, 0, zero), v, v_low)
    store(sums, at, 0, total)
    store(sums, low_at, 0, low)


@_compiled
def _mean_g(dy, at, stride, n, gamma, summing, dbeta):
    """
    Return the mean of ``g = gamma * dy`` as a pair, and whether the size of all dy is moderate.

    Adds dy to `dbeta`.
    """
    width, zero = itemsize(dy), _one()
    total, total_low = zero, zero
    largest, smallest = zero, splat(LARGEST, zero)
    for start in range(0, n, _SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + _SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(dy, at + stride + col * width, 0, zero)
            count = min(n - col, WIDTH)
            cotangent = _load_columns(dy, at, col, count)
            size = magnitude(cotangent)
            largest, smallest = larger(largest, size), smaller_nonzero(smallest, size)
            g, g_low = _product(cotangent, _load_columns(gamma, 0, col, count))
            part, part_low = _accumulate(part, part_low, g, g_low)
            if summing:
                _accumulate_in(dbeta, col, cotangent, zero)
        total, total_low = _add(total, total_low, part, part_low)
    total, total_low = _over_lanes(total, total_low)
    total, total_low = _divide(total, total_low, splat(float(n), zero))
    # A NaN is neither larger nor smaller than anything, but the sum shows it.
    moderate = (
        first_lane(_largest_lane(largest)) <= LARGEST
        and -first_lane(_largest_lane(negative(smallest))) >= SMALLEST
        and abs(first_lane(total)) < np.inf
    )
    return total, total_low, moderate


@_compiled
def _centered_g(cotangent, gamma, mean_g, mean_g_low):
    """Return ``gamma * dy - mean(g)`` as a pair."""
    g, g_low = _product(cotangent, gamma)
    c, error = _two_sum(g, negative(mean_g))
    return c, error + (g_low - mean_g_low)


@_compiled
def _keep_factors(factors, col, xhat, xhat_low, c, c_low):
    at = 32 * col
    store(factors, at, 0, xhat)
    store(factors, at + 8 * WIDTH, 0, xhat_low)
    store(factors, at + 16 * WIDTH, 0, c)
    store(factors, at + 24 * WIDTH, 0, c_low)


@_compiled
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
    for start in range(0, n, _SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + _SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(x, x_at + x_stride + col * width, 0, zero)
                prefetch(x, x_at + x_stride + LINE + col * width, 0, zero)
            count = min(n - col, WIDTH)
            cotangent = _load_columns(dy, dy_at, col, count)
            column = _load_columns(x, x_at, col, count)
            largest = larger(largest, magnitude(column))
            xhat, xhat_low = _xhat(column, mean, mean_lo, tail, rstd, rstd_lo)
            c, c_low = _centered_g(
                cotangent, _load_columns(gamma, 0, col, count), mean_g, mean_g_low
            )
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            _keep_factors(factors, col, xhat, xhat_low, c, c_low)
            product, error = _product(c, xhat)
            error = fma(c, xhat_low, fma(c_low, xhat, error))
            part, part_low = _accumulate(part, part_low, product, error)
            if summing:
                term, term_low = _product(cotangent, xhat)
                _accumulate_in(dgamma, col, term, fma(cotangent, xhat_low, term_low))
        total, total_low = _add(total, total_low, part, part_low)
    total, total_low = _over_lanes(total, total_low)
    slope, slope_low = _divide(total, total_low, splat(float(n), zero))
    return slope, slope_low, _largest_lane(largest)


@_compiled
def _dx(factors, col, slope, slope_low, rstd, rstd_lo):
    """Return ``rstd * (g - mean(g) - xhat * slope)`` of eight columns, rounded once."""
    at, zero = 32 * col, _one()
    xhat, xhat_low = load(factors, at, 0, zero), load(factors, at + 8 * WIDTH, 0, zero)
    c, c_low = load(factors, at + 16 * WIDTH, 0, zero), load(factors, at + 24 * WIDTH, 0, zero)
    along, error = _product(xhat, slope)
    along_low = fma(xhat, slope_low, fma(xhat_low, slope, error))
    c, error = _two_sum(c, negative(along))
    c_low = error + (c_low - along_low)
    product, error = _product(c, rstd)
    return product + fma(c, rstd_lo, fma(c_low, rstd, error))


@_compiled
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


@_compiled
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
    if not _is_moderate(first_lane(largest)):
        return True
    if wanted:
        _write_dx(
            n, factors, slope, slope_low, rstd, rstd_lo, dx, to, streaming,
            x, x_at + x_stride, dy, dy_at + dy_stride,
        )  # fmt: skip
    return False


@_compiled
def _rows_in_block(n):
    """Return how many rows are pulled back before they are copied out: what 512 KiB hold."""
    return max(min((1 << 16) // n, 64), 2)


@_compiled
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
    way = _way_out(n, width, dx, dx_stride, streaming and wanted)
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
            _copy_out(stage, begin, end, n * width, written, dx, dx_stride, pointer(hard))
    if streaming:
        fence()
    return any_hard


@_compiled
def find_hard(dy, dy_stride, x, x_stride, rows, n, hard):
    """Mark the rows that `backward_tile` would."""
    zero = _one()
    for row in range(rows):
        largest, most, least, total = zero, zero, splat(LARGEST, zero), zero
        for col in range(0, n, WIDTH):
            count = min(n - col, WIDTH)
            largest = larger(largest, magnitude(_load_columns(x, row * x_stride, col, count)))
            size = magnitude(_load_columns(dy, row * dy_stride, col, count))
            most, least, total = larger(most, size), smaller_nonzero(least, size), total + size
        total, _ = _over_lanes(total, zero)
        if not (
            _is_moderate(first_lane(_largest_lane(largest)))
            and first_lane(_largest_lane(most)) <= LARGEST
            and -first_lane(_largest_lane(negative(least))) >= SMALLEST
            and first_lane(total) < np.inf
        ):
            hard[row] = 1


@_compiled
def all_moderate(parameter, n, least):
    """Tell whether all of n elements are 0 or, in size, between `least` and `LARGEST`."""
    zero = _one()
    largest, smallest, total = zero, splat(LARGEST, zero), zero
    for col in range(0, n, WIDTH):
        size = magnitude(_load_columns(parameter, 0, col, min(n - col, WIDTH)))
        largest, smallest = larger(largest, size), smaller_nonzero(smallest, size)
        total = total + size
    total, _ = _over_lanes(total, zero)
    return (
        first_lane(_largest_lane(largest)) <= LARGEST
        and -first_lane(_largest_lane(negative(smallest))) >= least
        # A NaN is neither larger nor smaller than anything, but the sum shows it.
        and first_lane(total) < np.inf
    )
