"""`Bounded` numbers: every operation has its error in the bound."""

from fractions import Fraction

import numpy as np
import pytest

from stablenorm.reference.bounded import Bounded
from stablenorm.reference.doubledouble import Wide


def assert_within(number, expected, power=1):
    """Assert that ``expected ** power``, or of -2 its root, is where the bounds say."""
    words = np.broadcast_arrays(number.hi, number.lo, number.bound.hi)
    flat = zip(*(word.ravel().tolist() for word in words), strict=True)
    for (high, low, bound), wanted in zip(flat, np.ravel(expected), strict=True):
        exact = 1 / wanted if power == -2 else wanted
        value, error = Fraction(high) + Fraction(low), Fraction(bound) / 2**106
        if power == -2:
            value, error = value**2, 2 * value * error
        assert abs(value - exact) <= error


@pytest.mark.parametrize("bound", [0.0, 50.0])
def test_every_operation_has_its_error_in_the_bound(bound, rng):
    """Of numbers that differ from what is carried by all of their bounds."""

    def number():
        high = rng.random((3, 9)) + 1
        low = (rng.random((3, 9)) - 0.5) * 2.0**-53
        error = Wide(bound * high, np.zeros((3, 9)))
        words = zip(high.ravel(), low.ravel(), error.hi.ravel(), strict=True)
        exact = [Fraction(a) + Fraction(b) + Fraction(c) / 2**106 for a, b, c in words]
        return Bounded(Wide(high, low), error), np.array(exact).reshape(3, 9)

    (a, exact_a), (b, exact_b) = number(), number()
    for _ in range(20):
        assert_within(a + b, exact_a + exact_b)
        assert_within(a - b, exact_a - exact_b)
        assert_within(a * b, exact_a * exact_b)
        assert_within(a.divided(7), exact_a / 7)
        assert_within(a.mean(), exact_a.sum(axis=1) / 9)
        assert_within(a.sum_rows(), exact_a.sum(axis=0))
        assert_within(a.rsqrt(), exact_a, -2)
        (a, exact_a), (b, exact_b) = number(), number()
