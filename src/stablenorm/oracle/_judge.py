"""
Errors and roundings of many elements that are enclosed between integers.

Elements whose enclosure does not decide are counted and handed to exact `Surd` arithmetic.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from stablenorm.oracle._formats import Array, Format, finish, split, to_parts
from stablenorm.oracle._surds import ERROR_BITS, Surd, judge, nearest

# Elements of a block by their columns, exactly.
Exactly = Callable[[list[int]], list[Surd]]


class Block(NamedTuple):
    """Elements between ``low`` and ``low + width``, integers in units of ``2**exponent``."""

    low: list[int]
    width: list[int]
    exponent: int


class Judged(NamedTuple):
    """
    Of each element: the error ``mantissa * 2**exponent``, whether misrounded, the ulp's exponent.

    In two parts because an error and its ulp may differ by more than the range of a float64.
    """

    mantissa: Array
    exponent: Array
    misrounded: Array
    ulp: Array

    def in_ulp(self) -> Array:
        """Return the errors in ulp."""
        with np.errstate(over="ignore", under="ignore"):
            return np.ldexp(self.mantissa, self.exponent - self.ulp)


def judge_block(block: Block, actual: Array, fmt: Format, exactly: Exactly) -> Judged:
    """Judge float64 `actual`, which holds numbers of `fmt`, against a block."""
    finite = np.isfinite(actual)
    mantissas, exponents = split(np.where(finite, actual, 0.0))
    errors: list[tuple[float, int]] = []
    ulps: list[int] = []
    # Left open: another binade or sign, or an error that the width blurs.
    blurred: list[bool] = []
    columns = zip(block.low, block.width, mantissas.tolist(), exponents.tolist(), strict=True)
    for low, width, mantissa, exponent in columns:
        top = low.bit_length()
        # Zero lies in no binade: its ulp is the smallest subnormal.
        ulps.append(fmt.ulp_exponent(top + block.exponent) if low else fmt.finest)
        shift = exponent - block.exponent
        if shift >= 0:
            error, scale = abs((mantissa << shift) - low), 0
        else:
            error, scale = abs(mantissa - (low << -shift)), -shift
        errors.append(to_parts(error, block.exponent - scale))
        blurred.append(
            width > 0
            and (
                (low + width).bit_length() != top
                or low < 0 <= low + width
                or error <= width << ERROR_BITS + scale
            )
        )
    judged = Judged(*_columns(errors), np.zeros(len(ulps), bool), np.array(ulps, np.int64))
    ratio = judged.in_ulp()
    judged.misrounded[:] = ratio > 0.5
    # A ratio is known to a relative 2**-52: one this near to a half may be a tie.
    tied = np.abs(ratio - 0.5) < 1e-12
    left_open = np.array(blurred, bool) | tied | np.isinf(actual)
    _settle(judged, np.flatnonzero(left_open & ~np.isnan(actual)), actual, fmt, exactly)
    # NaN equals nothing.
    judged.mantissa[np.isnan(actual)] = math.inf
    judged.misrounded[np.isnan(actual)] = True
    return judged


def _columns(pairs: list[tuple[float, int]]) -> tuple[Array, Array]:
    """Turn pairs into two arrays."""
    mantissa, exponent = zip(*pairs, strict=True)
    return np.array(mantissa), np.array(exponent, np.int64)


def _settle(judged: Judged, columns: Array, actual: Array, fmt: Format, exactly: Exactly) -> None:
    """Judge the elements of `columns` anew by exact arithmetic."""
    for i, number in zip(columns, exactly(columns.tolist()), strict=True):
        value = float(actual[i])
        if math.isfinite(value):
            error, misrounded, ulp = judge(number, Fraction(value), fmt)
        else:
            # An infinity is right where the exact value rounds to it.
            misrounded = nearest(number, fmt) != value
            error, ulp = (math.inf if misrounded else 0.5, fmt.coarsest), fmt.coarsest
        judged.mantissa[i], judged.exponent[i] = error
        judged.misrounded[i], judged.ulp[i] = misrounded, ulp


def judge_undefined(actual: Array) -> Judged:
    """Judge `actual` where the exact value is undefined: only NaN is right."""
    right, zeros = np.isnan(actual), np.zeros(actual.shape, np.int64)
    return Judged(np.where(right, 0.0, math.inf), zeros, ~right, zeros.copy())


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
        # Left open: a width that reaches a midpoint, or zero with its sign. Another binade is none
        # of these: on either grid the nearest is the power of two between them.
        sign_open = low < 0 <= low + width
        if width and (sign_open or shift <= 0 or width >= half or rest <= half <= rest + width):
            open_columns.append(i)
            continue
        steps += rest > half or (rest == half and steps & 1)
        rounded[i] = finish(steps, ulp, fmt, negative=low < 0)
    for i, number in zip(open_columns, exactly(open_columns), strict=True):
        rounded[i] = nearest(number, fmt)
    return rounded


def quotient(mantissa: float, exponent: int, divisor: int, unit: int) -> float:
    """Return ``mantissa * 2**exponent / (divisor * 2**unit)``; 0 / 0 is 0."""
    if mantissa == 0 or divisor == 0:
        return 0.0 if mantissa == 0 else math.inf
    lower, place = to_parts(divisor, unit)
    try:
        return math.ldexp(mantissa / lower, exponent - place)
    except OverflowError:
        return math.inf
