"""
What is predicted of rows from the sweep's numbers, sixteen rows at a time: the ordinary ones.

A fast copy of `measured_rows` in `stablenorm.analysis._diagnose_predict`, which says what each
number is. A row that something is special about (not finite, constant, of extreme size) is marked
`HARD`, and described by that one.
"""
# mypy: ignore-errors
# What Numba compiles has the types that Numba infers.

from __future__ import annotations

import math

from stablenorm.kernels._inner import inlined, inner
from stablenorm.kernels._sweep_lanes import DOUBLES, fill, load_columns, wide
from stablenorm.kernels._sweep_rows import (
    bits_of,
    held_in_bfloat16,
    held_in_float16,
    if_less,
    put,
    root,
    singles_of,
    unless_less,
)
from stablenorm.kernels._sweep_sums import APART
from stablenorm.kernels._vectors import larger, magnitude

# The numbers and the losses that are written of each row; the limits that are read.
WRITTEN, LOSSES, LIMITS = 5, 6, 13

# Above the bits of the marks.
HARD = 1 << 15


@inlined
def _number(numbers, place, like):
    return load_columns(numbers, APART * place, like)


@inlined
def _shifted(mean_hat, rstd_hat, mean, mean_lo, rstd, std, inverse, p):
    """Return the bits lost with that mean and rstd."""
    shift = ((mean_hat - mean) - mean_lo) * rstd_hat * inverse
    scale = (rstd_hat - rstd) * std * inverse
    return bits_of(shift * shift + scale * scale + fill(0.25, mean), p)


@inner
def predict_rows(numbers, written, apart, losses, losses_apart, marks, limits, like):
    """
    Write what is predicted of sixteen rows, described by the columns of `numbers`.

    `apart` and `losses_apart` are the bytes from number to number of what is written.
    """
    full = DOUBLES()
    one, single = fill(1.0, full), singles_of(fill(1.0, full))
    mean, mean_lo = _number(numbers, 0, full), _number(numbers, 1, full)
    var = _number(numbers, 2, full)
    lowest, highest = _number(numbers, 3, full), _number(numbers, 4, full)
    std = root(var)
    # As the twin has it, to the bit: of float64 data, losses are of the size of its roundings.
    square_root = root(std * std + fill(limits[1], full))
    rstd, size = one / square_root, std / square_root
    inverse = one / (larger(size, fill(limits[3], full)) * fill(limits[4], full))
    offset = mean / std
    in_y = root(one + offset * offset)
    put(written, 0, mean)
    put(written, apart, std)
    put(written, 2 * apart, in_y)
    put(written, 3 * apart, in_y * size * size)
    put(written, 4 * apart, rstd * rstd * fill(limits[1], full))

    # The methods, in the order of the twin's; float32 is half as wide.
    n, eps, ones = fill(limits[0], like), fill(limits[1], like), fill(1.0, like)
    p = limits[2]
    center = _number(numbers, 5, like) / n
    square = _number(numbers, 7, like) / n
    mean_hat, rstd_hat = wide(center), wide(ones / root(square + eps))
    lost = _shifted(mean_hat, rstd_hat, mean, mean_lo, rstd, std, inverse, p)
    put(losses, 0, lost)
    m2 = _number(numbers, 9, like) / n
    rstd_hat = wide(ones / root(m2 + eps))
    welford = wide(_number(numbers, 8, like))
    lost = _shifted(welford, rstd_hat, mean, mean_lo, rstd, std, inverse, p)
    put(losses, losses_apart, lost)
    one_pass = (_number(numbers, 6, like) / n - center * center) + eps
    rstd_hat = wide(ones / root(one_pass))
    lost = _shifted(mean_hat, rstd_hat, mean, mean_lo, rstd, std, inverse, p)
    put(losses, 2 * losses_apart, lost)
    saved_mean, saved_rstd = singles_of(mean + mean_lo), singles_of(rstd)
    lost = _shifted(wide(saved_mean), wide(saved_rstd), mean, mean_lo, rstd, std, inverse, p)
    put(losses, 3 * losses_apart, lost)
    saved_mean, saved_rstd = held_in_bfloat16(saved_mean), held_in_bfloat16(saved_rstd)
    lost = _shifted(wide(saved_mean), wide(saved_rstd), mean, mean_lo, rstd, std, inverse, p)
    put(losses, 4 * losses_apart, lost)
    half_mean = held_in_float16(singles_of(center))
    half_var = held_in_float16(singles_of(square))
    half_eps = singles_of(fill(limits[11], full))
    half_root = held_in_float16(root(held_in_float16(half_var + half_eps)))
    half_rstd = held_in_float16(single / half_root)
    lost = _shifted(wide(half_mean), wide(half_rstd), mean, mean_lo, rstd, std, inverse, p)
    put(losses, 5 * losses_apart, lost)

    # The marks: bits of a sum that is exact.
    infinite = fill(math.inf, full)
    farthest = larger(highest - mean, mean - lowest)
    found = if_less(std, fill(limits[6], full), 8.0)
    found = found + if_less(std * fill(limits[7], full), farthest, 16.0)
    total = wide(_number(numbers, 5, like))
    squares = wide(_number(numbers, 6, like))
    centered = wide(_number(numbers, 7, like))
    found = found + unless_less(magnitude(total), infinite, 32.0)
    found = found + unless_less(magnitude(squares), infinite, 64.0)
    found = found + unless_less(magnitude(centered), infinite, 128.0)
    found = found + if_less(std, fill(limits[8], full), 256.0)
    half = if_less(fill(limits[9], full), magnitude(mean), 512.0)
    found = found + larger(half, if_less(fill(limits[10], full), std, 512.0))
    end = fill(limits[5], full)
    hard = unless_less(lowest, highest, 32768.0)
    hard = larger(hard, unless_less(larger(magnitude(lowest), magnitude(highest)), end, 32768.0))
    hard = larger(hard, unless_less(magnitude(mean), infinite, 32768.0))
    hard = larger(hard, unless_less(fill(limits[12], full), var, 32768.0))
    put(marks, 0, found + hard)
