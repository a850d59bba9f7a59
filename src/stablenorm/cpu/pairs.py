"""
Double-double arithmetic: a number is a pair, ``high + low``, with |low| at most half an ulp of high.

Sums and products use the error-free transformations of Knuth and Dekker, the latter with the fused
multiply-add, and are exact to about 2**-104; Joldes, Muller and Popescu, ACM TOMS 44 (2017) 15, has
the bounds. Nothing here may be reassociated or contracted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from stablenorm.cpu.memory import (
    bits_of,
    call_llvm,
    emit,
    float_of,
    fma,
    inlined,
    pasted,
    put,
    width,
)

_I64, _F64 = ir.IntType(64), ir.DoubleType()


@emit(types.float64, types.float64, types.float64)
def minus(builder: Any, a: Any, b: Any) -> Any:
    """
    Return ``a - b``, made by the units that multiply.

    On many processors (AMD Zen) those that add and those that multiply are apart. Half of a sum's six
    operations each keep both at work. The bits are the same.
    """
    # 1.0, from where LLVM cannot see it: it would leave out a product with 1. "readnone" lets it be
    # made once, before the loop that uses it.
    hidden = ir.InlineAsm(ir.FunctionType(_I64, [_I64]), "", "=r,0")
    bits = builder.call(hidden, [_I64(0x3FF0000000000000)], attrs=("readnone", "nounwind"))
    one = builder.bitcast(bits, _F64)
    return call_llvm(builder, "llvm.fma.f64", _F64, [builder.fneg(b), one, a])


@inlined
def odd_sum(hi, lo):
    """
    Return ``hi + lo`` rounded to odd, given that `hi` is the sum rounded to nearest.

    Where `hi` is even and `lo` is not zero, that is the neighbour of `hi` on the side of `lo`.
    """
    bits = np.int64(bits_of(hi))
    away = (bits ^ np.int64(bits_of(lo))) >= 0
    moves = (lo != 0.0) & (bits & 1 == 0) & (abs(hi) < np.inf)
    return float_of(bits + (1 if away else -1)) if moves else hi


@inlined
def two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error."""
    total = a + b
    b_part = minus(total, a)
    return total, minus(a, total - b_part) + minus(b, b_part)


@inlined
def fast_two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error, given ``|a| >= |b|``."""
    total = a + b
    return total, b - (total - a)


@inlined
def two_product(a, b):
    """Return ``fl(a * b)`` and its exact error."""
    product = a * b
    return product, fma(a, b, -product)


@inlined
def add(a, a_low, b, b_low):
    """Return the sum of two pairs."""
    total, error = two_sum(a, b)
    low, low_error = two_sum(a_low, b_low)
    total, error = fast_two_sum(total, error + low)
    return fast_two_sum(total, error + low_error)


@inlined
def accumulate(a, a_low, b, b_low):
    """Add a pair to a running sum, whose low part gathers what rounding takes from the high one."""
    total, error = two_sum(a, b)
    return total, a_low + (error + b_low)


@inlined
def multiply(a, a_low, b, b_low):
    """Return the product of two pairs."""
    product, error = two_product(a, b)
    return fast_two_sum(product, fma(a, b_low, fma(a_low, b, error)))


@inlined
def divide(a, a_low, n):
    """Return a pair divided by the float64 `n`."""
    quotient = a / n
    rest = fma(-quotient, n, a) + a_low
    return fast_two_sum(quotient, rest / n)


@inlined
def reciprocal_root(v, v_low):
    """Return ``(v + v_low)**-0.5``: a Newton step of second order from float64's own."""
    start = 1.0 / math.sqrt(v)
    square, square_low = two_product(start, start)
    product, error = two_product(v, square)
    error += fma(v, square_low, v_low * square)
    # About 2**-52; the subtraction is exact.
    delta = (1.0 - product) - error
    correction = fma(0.375 * delta, delta, 0.5 * delta)
    return fast_two_sum(start, start * correction)


@pasted
def put_pair(y, j, high, low):
    """Round ``high + low`` once into element j; zero gets the sign of plus."""
    total, rest = two_sum(high, low)
    if width(y) == 8:
        put(y, j, total + 0.0)
    else:
        put(y, j, odd_sum(total, rest) + 0.0)
