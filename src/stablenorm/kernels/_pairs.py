"""
Double-double arithmetic on vectors.

A number is a pair of vectors, ``high + low`` with |low| at most half an ulp of high. Sums and
products use the error-free transformations of Knuth and Dekker (`two_sum`, `product_of`, the
latter with the fused multiply-add), and are exact to about 2**-104; Joldes, Muller and Popescu,
ACM TOMS 44 (2017) 15, has the bounds.
"""

from __future__ import annotations

from stablenorm.kernels._inner import inner
from stablenorm.kernels._vectors import SWAPPED, fma, minus, negative, splat, square_root

_swap4, _swap2, _swap1 = SWAPPED[4], SWAPPED[2], SWAPPED[1]


@inner
def two_sum(a, b):
    """
    Return ``fl(a + b)`` and its exact error, as `_sums.two_sum` does.

    A third of the operations are left to the units that multiply, which have less to do: float64
    takes 0.90 of the time forward and 0.95 backward (AMD EPYC 9005, n = 1024). With a half of them,
    or those of `fast_two_sum` as well, it is slower than so.
    """
    total = a + b
    b_part = total - a
    return total, minus(a, total - b_part) + minus(b, b_part)


@inner
def fast_two_sum(a, b):
    """Return ``fl(a + b)`` and its exact error, given ``|a| >= |b|``."""
    total = a + b
    return total, b - (total - a)


@inner
def product_of(a, b):
    """Return ``fl(a * b)`` and its exact error."""
    product = a * b
    return product, fma(a, b, negative(product))


@inner
def add(a, a_low, b, b_low):
    """Return the sum of two pairs."""
    total, error = two_sum(a, b)
    low, low_error = two_sum(a_low, b_low)
    total, error = fast_two_sum(total, error + low)
    return fast_two_sum(total, error + low_error)


@inner
def accumulated(a, a_low, b, b_low):
    """Add a pair to a running sum, whose low part gathers what rounding takes from the high one."""
    total, error = two_sum(a, b)
    return total, a_low + (error + b_low)


@inner
def multiply(a, a_low, b, b_low):
    """Return the product of two pairs."""
    product, error = product_of(a, b)
    return fast_two_sum(product, fma(a, b_low, fma(a_low, b, error)))


@inner
def divide(a, a_low, n):
    """Return a pair divided by `n`."""
    quotient = a / n
    rest = fma(negative(quotient), n, a) + a_low
    return fast_two_sum(quotient, rest / n)


@inner
def over_lanes(v, v_low):
    """Return the sum of the lanes of a pair, in all lanes."""
    v, v_low = fast_two_sum(v, v_low)
    v, v_low = add(v, v_low, _swap4(v), _swap4(v_low))
    v, v_low = add(v, v_low, _swap2(v), _swap2(v_low))
    return add(v, v_low, _swap1(v), _swap1(v_low))


@inner
def reciprocal_root(v, v_low):
    """Return ``(v + v_low)**-0.5``: a Newton step of second order from float64's own."""
    one = splat(1.0, v)
    start = one / square_root(v)
    square, square_low = product_of(start, start)
    product, error = product_of(v, square)
    error = error + fma(v, square_low, v_low * square)
    # About 2**-52; the subtraction is exact.
    delta = (one - product) - error
    half_delta = splat(0.5, v) * delta
    correction = fma(splat(0.375, v) * delta, delta, half_delta)
    return fast_two_sum(start, start * correction)
