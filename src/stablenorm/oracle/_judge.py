"""
Errors and roundings of many elements that are enclosed between integers.

Elements whose enclosure does not decide are counted and handed to exact `Surd` arithmetic.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from stablenorm.oracle._formats import Array, Format, finish, power, split, to_float
from stablenorm.oracle._surds import ERROR_BITS, Surd, judge, nearest

# Elements of a block by their columns, exactly.
Exactly = Callable[[list[int]], list[Surd]]


class Block(NamedTuple):
    """Elements between ``low`` and ``low + width``, integers in units of ``2**exponent``."""

    low: list[int]
    width: list[int]
    exponent: int


class Judged(NamedTuple):
    """Of each element: error in ulp, whether misrounded, exponent of the ulp."""

    errors: Array
    misrounded: Array
    ulps: Array


def judge_block(block: Block, actual: Array, fmt: Format, exactly: Exactly) -> Judged:
    """Judge float64 `actual`, which holds numbers of `fmt`, against a block."""
    n = len(block.low)
    errors, misrounded, ulps = [0.0] * n, [False] * n, [0] * n
    finite = np.isfinite(actual)
    mantissas, exponents = split(np.where(finite, actual, 0.0))
    known = finite.tolist()
    open_columns = []
    columns = zip(block.low, block.width, mantissas.tolist(), exponents.tolist(), strict=True)
    for i, (low, width, mantissa, exponent) in enumerate(columns):
        top = low.bit_length()
        ulp = ulps[i] = fmt.ulp_exponent(top + block.exponent)
        shift = exponent - block.exponent
        if shift >= 0:
            error, unit = abs((mantissa << shift) - low), block.exponent
        else:
            error, unit, width = abs(mantissa - (low << -shift)), exponent, width << -shift
        errors[i] = ratio = to_float(error, unit - ulp)
        misrounded[i] = ratio > 0.5
        # Left open: another binade, an error that the width blurs, a ratio that may be a tie
        # (float64 gives it to 1e-16), anything not finite.
        if (
            (width and ((low + block.width[i]).bit_length() != top or error <= width << ERROR_BITS))
            or abs(ratio - 0.5) < 1e-12
            or not known[i]
        ):
            open_columns.append(i)
    for i, number in zip(open_columns, exactly(open_columns), strict=True):
        value = float(actual[i])
        if known[i]:
            errors[i], misrounded[i], ulps[i] = judge(number, Fraction(value), fmt)
        else:
            # NaN equals nothing; an infinity is right where the exact value rounds to it.
            right = nearest(number, fmt) == value
            errors[i], misrounded[i] = (0.5, False) if right else (math.inf, True)
    return Judged(np.array(errors), np.array(misrounded), np.array(ulps))


def judge_undefined(actual: Array) -> Judged:
    """Judge `actual` where the exact value is undefined: only NaN is right."""
    right = np.isnan(actual)
    return Judged(np.where(right, 0.0, math.inf), ~right, np.zeros(actual.shape, np.int64))


def round_block(block: Block, fmt: Format, exactly: Exactly) -> list[float]:
    """Round each element of a block to `fmt`, ties to even."""
    rounded = [0.0] * len(block.low)
    open_columns = []
    for i, (low, width) in enumerate(zip(block.low, block.width, strict=True)):
        ulp = fmt.ulp_exponent(low.bit_length() + block.exponent)
        shift = ulp - block.exponent
        if shift <= 0:
            steps, rest, half = low << -shift, 0, 1
        else:
            steps = low >> shift
            rest, half = low - (steps << shift), 1 << shift - 1
        # A width that reaches another grid, a midpoint or zero decides nothing.
        same_binade = (low + width).bit_length() == low.bit_length() and low * (low + width) >= 0
        if width and (shift <= 0 or not same_binade or rest <= half <= rest + width
                      or width >= half):
            open_columns.append(i)
            continue
        steps += rest > half or (rest == half and steps & 1)
        rounded[i] = finish(steps, ulp, fmt, negative=low < 0)
    for i, number in zip(open_columns, exactly(open_columns), strict=True):
        rounded[i] = nearest(number, fmt)
    return rounded


def exact_number(block: Block, column: int) -> Surd | None:
    """Return an element that its enclosure already gives exactly."""
    if block.width[column]:
        return None
    return Surd(block.low[column] * power(block.exponent), 1, {})
