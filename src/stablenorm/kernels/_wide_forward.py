"""The forward of `_wide`."""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._inner import inner
from stablenorm.kernels._ir import WIDTH
from stablenorm.kernels._memory import LINE, fence
from stablenorm.kernels._pairs import (
    accumulated,
    add,
    divide,
    multiply,
    over_lanes,
    product_of,
    reciprocal_root,
    two_sum,
)
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
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
from stablenorm.kernels._wide import (
    LARGEST,
    SPAN,
    copy_out,
    is_moderate,
    largest_lane,
    load_columns,
    xhat_of,
)

# The second word of the mean's rest is kept where it exceeds 2**-100 of the least that mean|xhat|
# can be, std / sqrt(n): a quarter of what the contract allows.
_TAIL_MATTERS = 2.0**200

# As long as the squared rest is no larger part of var, subtracting it costs no digit.
_MOST_OF_VAR = 2.0**-6

_one = ZEROS[1]


@inner
def _sum(x, at, stride, n):
    """Return the sum of a row, in all lanes, to float64's own precision, and the largest |x|."""
    width, zero = itemsize(x), _one()
    total, largest = zero, zero
    for start in range(0, n, SPAN):
        part = zero
        for col in range(start, min(start + SPAN, n), WIDTH):
            # A third of the lines of the next row; `_narrow` says why.
            if col * width % (3 * LINE) == 0:
                prefetch(x, at + stride + col * width, 0, zero)
            v = load_columns(x, at, col, min(n - col, WIDTH))
            part = part + v
            largest = larger(largest, magnitude(v))
        total = total + part
    total, _ = over_lanes(total, zero)
    return total, largest_lane(largest)


@inner
def _sum_centered(x, at, stride, n, mean):
    """Return the sums of x - mean and of its square, as pairs."""
    width, zero = itemsize(x), _one()
    minus_mean = negative(mean)
    total, total_low, squares, squares_low = zero, zero, zero, zero
    for start in range(0, n, SPAN):
        part, part_low, part_squares, part_squares_low = zero, zero, zero, zero
        for col in range(start, min(start + SPAN, n), WIDTH):
            if col * width % (3 * LINE) == 0:
                prefetch(x, at + stride + LINE + col * width, 0, zero)
            count = min(n - col, WIDTH)
            c, c_low = two_sum(load_columns(x, at, col, count), minus_mean)
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            part, part_low = accumulated(part, part_low, c, c_low)
            square, error = product_of(c, c)
            error = fma(c + c, c_low, error)
            part_squares, part_squares_low = accumulated(
                part_squares, part_squares_low, square, error
            )
        total, total_low = add(total, total_low, part, part_low)
        squares, squares_low = add(squares, squares_low, part_squares, part_squares_low)
    total, total_low = over_lanes(total, total_low)
    squares, squares_low = over_lanes(squares, squares_low)
    return total, total_low, squares, squares_low


@inner
def _sum_squares(x, at, n, mean, rest, rest_low):
    """Return the sum of ``(x - mean - rest)**2`` as a pair."""
    zero = _one()
    squares, squares_low = zero, zero
    for start in range(0, n, SPAN):
        part, part_low = zero, zero
        for col in range(start, min(start + SPAN, n), WIDTH):
            count = min(n - col, WIDTH)
            c, c_low = two_sum(load_columns(x, at, col, count), negative(mean))
            c, c_low = add(c, c_low, negative(rest), negative(rest_low))
            if count < WIDTH:
                c, c_low = keep(c, count), keep(c_low, count)
            square, error = product_of(c, c)
            part, part_low = accumulated(part, part_low, square, fma(c + c, c_low, error))
        squares, squares_low = add(squares, squares_low, part, part_low)
    return over_lanes(squares, squares_low)


@inner
def _affine(v, v_low, gamma, beta):
    """Return ``gamma * (v + v_low) + beta``, rounded once."""
    product, error = product_of(v, gamma)
    error = fma(v_low, gamma, error)
    total, rest = two_sum(product, beta)
    return total + (rest + error)


@inner
def _normalize_span(
    x, at, stride, start, stop, gamma, beta, mean, mean_lo, tail, rstd, rstd_lo, y, to, streaming
):
    """Write y of columns ``[start, stop)``."""
    width, zero = itemsize(x), _one()
    for col in range(start, stop, WIDTH):
        if col * width % (3 * LINE) < LINE:
            prefetch(x, at + stride + 2 * LINE + col * width, 0, zero)
        count = min(stop - col, WIDTH)
        xhat, low = xhat_of(load_columns(x, at, col, count), mean, mean_lo, tail, rstd, rstd_lo)
        result = _affine(
            xhat, low, load_columns(gamma, 0, col, count), load_columns(beta, 0, col, count)
        )
        if count < WIDTH:
            store_some(y, to + col * width, 0, count, result)
        elif streaming:
            stream(y, to + col * width, 0, result)
        else:
            store(y, to + col * width, 0, result)


@inner
def _forward_row(x, at, stride, n, gamma, beta, eps, numbers, all_rows, tails, y, to, streaming):
    """Normalize one row; tell whether it is hard, and then write nothing."""
    zero = _one()
    count = splat(float(n), zero)
    total, largest = _sum(x, at, stride, n)
    if not is_moderate(first_lane(largest)):
        return True
    mean = total / count
    if not abs(first_lane(mean)) <= LARGEST:
        return True
    rest, rest_low, squares, squares_low = _sum_centered(x, at, stride, n, mean)
    rest, rest_low = divide(rest, rest_low, count)
    square, square_low = multiply(rest, rest_low, rest, rest_low)
    var, var_low = divide(squares, squares_low, count)
    var, var_low = add(var, var_low, negative(square), negative(square_low))
    if not first_lane(square) <= _MOST_OF_VAR * first_lane(var):
        # Neighbouring floats: the error of the mean is larger than their spread. It must be less
        # than an ulp, for the rest to have all its digits below; and the difference of squares
        # has lost what it takes digits to hold.
        mean = mean + rest
        rest, rest_low, _, _ = _sum_centered(x, at, stride, n, mean)
        rest, rest_low = divide(rest, rest_low, count)
        squares, squares_low = _sum_squares(x, at, n, mean, rest, rest_low)
        var, var_low = divide(squares, squares_low, count)
    v, v_low = add(var, var_low, splat(eps, zero), zero)
    if not first_lane(v) > 0.0:
        return True
    rstd, rstd_lo = reciprocal_root(v, v_low)
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
        expect_edges(y, to + n * itemsize(y), 0, n, zero)
        head, whole = whole_lines(address(y) + to, n, itemsize(y))
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


@inner
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
    way = way_out(n, width, y, y_stride, streaming)
    chunk = min(staged_rows(n, width, way), stop - first)
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
            copy_out(stage, begin, end, n * width, written, y, y_stride, marks)
    if streaming:
        fence()
