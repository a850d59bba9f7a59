"""
The sums of sixteen rows: exact ones, and those that methods in use form, rounded as they are there.

A row is read from memory once, and from the cache again, two rows at a time; what is left in its
sixteen columns waits until sixteen rows can be folded together.
"""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import math

from stablenorm.kernels._inner import inlined, inner
from stablenorm.kernels._memory import LINE
from stablenorm.kernels._sweep_fold import (
    PITCH,
    ROWS,
    keep,
    row_largest,
    row_smallest,
    row_sums,
    row_welford,
)
from stablenorm.kernels._sweep_lanes import (
    COLUMNS,
    DOUBLES,
    fill,
    fold_sum,
    load_columns,
    narrow,
    smaller,
    wide,
)
from stablenorm.kernels._sweep_rows import put, where_less
from stablenorm.kernels._vector_memory import (
    address,
    itemsize,
    load_everywhere,
    pointer_at,
    prefetch,
)
from stablenorm.kernels._vectors import ZEROS, first_lane, fma, larger, magnitude

# Numbers that a row is described by, in the order of the twin's fields; of sixteen rows, each is a
# vector of float64, and so many bytes from the next.
NUMBERS, APART = 10, 8 * ROWS

# Where the sums of the first of sixteen rows wait to be folded: bytes from the beginning.
_SQUARES, _LOWEST, _HIGHEST, _MEANS, _M2S, _CENTERED, _RESTS, _EXACT = (
    PITCH * ROWS * place for place in range(8)
)
WAITING = PITCH * ROWS * 8

_one = ZEROS[1]


@inlined
def of_row(base, pitch, row):
    """Return where the numbers of a row are, that lie `pitch` bytes from one row to the next."""
    return pointer_at(address(base) + pitch * row, base)


@inlined
def _element(x, at):
    return first_lane(load_everywhere(x, at, _one()))


@inlined
def _ask(x, at):
    """Ask for the columns of a row to come: there, as here, memory is to be kept busy."""
    prefetch(x, at, 0, _one())
    if itemsize(x) * COLUMNS > LINE:
        prefetch(x, at + LINE, 0, _one())


@inlined
def _take_in(v, portion, total, squares, lowest, highest, means, m2s):
    """Return the sums with sixteen more elements."""
    delta = v - means
    means = means + delta * portion
    return (
        total + v,
        squares + v * v,
        smaller(lowest, v),
        larger(highest, v),
        means,
        m2s + delta * (v - means),
    )


@inlined
def _keep_sums(waiting, squares, lowest, highest, means, m2s):
    keep(waiting, _SQUARES, squares)
    keep(waiting, _LOWEST, lowest)
    keep(waiting, _HIGHEST, highest)
    keep(waiting, _MEANS, means)
    keep(waiting, _M2S, m2s)


@inlined
def _with_tail(x, at, n, total, like):
    """Return the sum of a row, given that of its whole vectors."""
    for col in range(n - n % COLUMNS, n):
        total = narrow(total + _element(x, at + col * itemsize(x)), like)
    return total


@inner
def _read_once(x, at, other, ahead, n, like, numbers, others, waiting, others_waiting):
    """
    Sum two rows as they are: write the sum, which is needed next, and keep what is folded later.

    Two, since Welford's next mean waits for the one before, ten cycles for sixteen elements.
    """
    width, whole = itemsize(x), n - n % COLUMNS
    total, squares, means, m2s = like, like, like, like
    total_2, squares_2, means_2, m2s_2 = like, like, like, like
    lowest, highest = fill(math.inf, like), fill(-math.inf, like)
    lowest_2, highest_2 = lowest, highest
    for chunk in range(whole // COLUMNS):
        col = chunk * COLUMNS
        _ask(x, at + ahead + col * width)
        _ask(x, other + ahead + col * width)
        portion = fill(1.0 / (chunk + 1), like)
        v, w = load_columns(x, at + col * width, like), load_columns(x, other + col * width, like)
        total, squares, lowest, highest, means, m2s = _take_in(
            v, portion, total, squares, lowest, highest, means, m2s
        )
        total_2, squares_2, lowest_2, highest_2, means_2, m2s_2 = _take_in(
            w, portion, total_2, squares_2, lowest_2, highest_2, means_2, m2s_2
        )
    _keep_sums(waiting, squares, lowest, highest, means, m2s)
    _keep_sums(others_waiting, squares_2, lowest_2, highest_2, means_2, m2s_2)
    numbers[5 * ROWS] = _with_tail(x, at, n, fold_sum(total), like)
    others[5 * ROWS] = _with_tail(x, other, n, fold_sum(total_2), like)


@inner
def _exact_mean(x, at, n):
    """Return the mean of a row whose sum overflows the precision that it is computed in."""
    width, total = itemsize(x), 0.0
    for col in range(n):
        total += _element(x, at + col * width)
    return total / n


@inner
def _read_again(x, at, n, like, numbers, waiting):
    """
    Sum the deviations from the mean that a two-pass would take: write that, and keep the sums.

    What it is off by is their mean: the exact statistics need no sum of their own before.
    """
    width, whole = itemsize(x), n - n % COLUMNS
    working_mean = narrow(numbers[5 * ROWS] / n, like)
    mean = working_mean
    if not abs(mean) < math.inf:
        mean = _exact_mean(x, at, n)
    numbers[0] = mean
    squares, rests, exact = like, wide(like), wide(like)
    center, working_center = fill(mean, rests), fill(working_mean, like)
    for col in range(0, whole, COLUMNS):
        v = load_columns(x, at + col * width, like)
        c, centered = wide(v) - center, v - working_center
        rests = rests + c
        exact = fma(c, c, exact)
        squares = squares + centered * centered
    keep(waiting, _CENTERED, squares)
    keep(waiting, _RESTS, rests)
    keep(waiting, _EXACT, exact)


@inner
def _fold(waiting, numbers, n, like):
    """Fold what is kept of sixteen rows, and write it; of what is exact, the sums."""
    full = DOUBLES()
    put(numbers, 1 * APART, row_sums(waiting, _RESTS, full))
    put(numbers, 2 * APART, row_sums(waiting, _EXACT, full))
    put(numbers, 3 * APART, row_smallest(waiting, _LOWEST, like))
    put(numbers, 4 * APART, row_largest(waiting, _HIGHEST, like))
    put(numbers, 6 * APART, row_sums(waiting, _SQUARES, like))
    put(numbers, 7 * APART, row_sums(waiting, _CENTERED, like))
    means, m2s = row_welford(waiting, _MEANS, _M2S, float(n // COLUMNS), like)
    put(numbers, 8 * APART, means)
    put(numbers, 9 * APART, m2s)


@inner
def _add_tail(x, at, n, like, numbers):
    """Add the elements that are left over to the folded sums of a row."""
    mean, working_mean = numbers[0], narrow(numbers[5 * ROWS] / n, like)
    rests, exact = numbers[1 * ROWS], numbers[2 * ROWS]
    low, high = numbers[3 * ROWS], numbers[4 * ROWS]
    squares, centered_squares = numbers[6 * ROWS], numbers[7 * ROWS]
    welford, m2 = numbers[8 * ROWS], numbers[9 * ROWS]
    for col in range(n - n % COLUMNS, n):
        v = _element(x, at + col * itemsize(x))
        c, centered = v - mean, narrow(v - working_mean, like)
        rests += c
        exact += c * c
        # Not min and max: NaN is passed over.
        low, high = v if v < low else low, v if v > high else high  # noqa: FURB136
        squares = narrow(squares + narrow(v * v, like), like)
        centered_squares = narrow(centered_squares + narrow(centered * centered, like), like)
        delta = narrow(v - welford, like)
        portion = narrow(1.0 / float(col + 1), like)
        welford = narrow(welford + narrow(delta * portion, like), like)
        m2 = narrow(m2 + narrow(delta * narrow(v - welford, like), like), like)
    numbers[1 * ROWS], numbers[2 * ROWS] = rests, exact
    numbers[3 * ROWS], numbers[4 * ROWS] = low, high
    numbers[6 * ROWS], numbers[7 * ROWS] = squares, centered_squares
    numbers[8 * ROWS], numbers[9 * ROWS] = welford, m2


@inner
def _finish(numbers, n):
    """Turn the sums of deviations of sixteen rows into mean, its rest and variance."""
    full = DOUBLES()
    count, infinite = fill(float(n), full), fill(math.inf, full)
    mean = load_columns(numbers, 0, full)
    rest = load_columns(numbers, 1 * APART, full) / count
    # Infinite or NaN where the row is: so without a rest.
    rounded = where_less(magnitude(mean), infinite, mean + rest, mean)
    put(numbers, 0, rounded)
    put(numbers, 1 * APART, (mean - rounded) + rest)
    put(numbers, 2 * APART, load_columns(numbers, 2 * APART, full) / count - rest * rest)


@inner
def describe_rows(x, first, last, stride, ahead, n, like, numbers, waiting):
    """
    Write the numbers, (NUMBERS, 16), of sixteen rows, of which `first` to `last` are there.

    `waiting` is room of `WAITING` bytes; memory is asked for `ahead` bytes before it is needed.
    """
    for row in range(first, last + 1, 2):
        # Where there is no second one, the last twice.
        other = min(row + 1, last)
        at, beside = row * stride, other * stride
        to, others = of_row(numbers, 8, row - first), of_row(numbers, 8, other - first)
        here, there = of_row(waiting, PITCH, row - first), of_row(waiting, PITCH, other - first)
        _read_once(x, at, beside, ahead, n, like, to, others, here, there)
        _read_again(x, at, n, like, to, here)
        _read_again(x, beside, n, like, others, there)
    # Of those that are not there, what is folded is whatever the room held.
    _fold(waiting, numbers, n, like)
    if n % COLUMNS != 0:
        for row in range(first, last + 1):
            _add_tail(x, row * stride, n, like, of_row(numbers, 8, row - first))
    _finish(numbers, n)
