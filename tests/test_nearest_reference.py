"""Broken where rounding="nearest" returns a bit that is not that of the exact result: ties, zeros, the range."""

import numpy as np
import pytest
from norms import assert_right

from stablenorm.formats import format_of
from stablenorm.testing.families import Case
from stablenorm.types import bfloat16


def ties(dtype, rng):
    """Rows of which xhat is rational, with gamma, beta and dy of few bits: ties and zeros abound."""
    small = lambda *shape: rng.integers(-40, 41, shape) / 8
    step = 2.0 ** (1 - format_of(dtype).digits)
    two = np.array([[1, -3], [5, 4], [2**-9, 2**9]])
    halves = rng.permuted(np.tile([3, 3, 7, 7, 3, 7.0], (4, 1)), axis=1)
    square = np.arange(1.0, 8) * [[1], [2], [-3]]
    # Their square roots differ by rational factors.
    pairs = np.repeat(small(3, 5), 2, axis=0) * [[1], [1], [2], [4], [5], [3]]
    for x in (two, halves, square, pairs):
        rows, n = x.shape
        for gamma, beta in ((1 + step * small(n), small(n)), (small(n), 0 * small(n))):
            opposite = np.resize([1, -1], (n, rows)).T
            for dy in (small(rows, n), 1 + step * small(rows, n), opposite):
                x, gamma, beta, dy = (a.astype(dtype) for a in (x, gamma, beta, dy))  # noqa: PLW2901
                yield Case(x, gamma, beta, 0.0, dy)


def test_ties_and_exact_zeros(dtype, rng):
    for case in ties(dtype, rng):
        assert_right(case, roundings=["nearest"])


F4, F8, HUGE = np.float32, np.float64, 1.7e308
# Columns of dy, whose sum is dbeta; and the dtypes of both.
COLUMNS = [
    # A little more than half way to the next number, once the large terms have cancelled: the low part is the larger.
    (np.float16, np.float16, [2.0**14, 1, 2.0**-11, -(2.0**14), 2.0**-24]),
    *((dtype, dtype, [2.0**56, 1, 2.0**-digits, -(2.0**56), 2.0**-55])
      for dtype, digits in ((bfloat16, 8), (F4, 24), (F8, 53))),
    # The same for a pair of sums that does not hold the last term.
    (F8, F8, [1.0, 2.0**-53, 2.0**-160]),
    # More digits than a pair has.
    (F4, F4, [2.0**120, 2.0**60, 3.0, -(2.0**120), -(2.0**60), 0, 0, 0]),
    (F8, F8, [2.0**190, 2.0**90 + 2.0**38, 3.0, -(2.0**190), -(2.0**90) - 2.0**38, 0, 0, 0]),
    # Midpoints of the smallest numbers are numbers where there are all digits.
    (F4, bfloat16, [2.0**-93, 2.5 * 2.0**-133 + 2.0**-149, -(2.0**-93)]),
    # Sums along a row overflow.
    (F8, F8, [HUGE, HUGE, -HUGE]),
]  # fmt: skip


def rare_cases():
    """Yield cases, and what their calls are given besides."""
    ones = np.ones((3, 1), np.float32)
    # A dsum beside what vanishes is rounded whatever its size.
    yield Case(ones, None, None, 1e-5, ones), {"dsum": np.array([[2.0], [-1e57], [1e120]])}
    # Rows of equal elements have xhat 0 and an rstd of 10^150; the others cancel: zero in every unit.
    x = np.array([[1000, 1000], [1000, 1004], [1000, 996]], np.float32)
    yield Case(x, x[0], None, 1e-300, np.full_like(x, 3)), {}
    # A large beta sends the forward to the reference, and tiny rows let dgamma underflow to -0.
    x, dy = np.array([[1.82512575e-309, -3.03630258e-309]]), np.array([[-1.0, 1.0]]) / 64
    yield Case(x, np.ones(2), np.array([1e200, 1.0]), 1e30, dy), {}
    # Half of the columns, between which and a large dy and xhat nothing adds up: no NaN is left.
    x, dy = 2.0**-100 * np.tile([1.0, 1.0, -1.0, -1.0], (1, 4)), np.zeros((1, 16))
    dy[0, 1::4] = 2.0**1000 * np.array([1.0, -1.0, 1.0, -1.0])
    yield Case(x, np.ones(16), np.ones(16), 0.0, dy), {}
    # A dgamma among the smallest numbers is rounded to their digits.
    x, dy = 49.0 * np.array([[-5, -1, 1, 1, 1, 1, 1, 1]]), np.arange(1.0, 16.0, 2.0)[None]
    for dtype, last in ((np.float32, 2.0**-149), (bfloat16, 2.0**-133)):
        ones = np.ones(8, dtype)
        yield Case(x.astype(dtype), ones, ones, 0.0, (last * dy).astype(dtype)), {}
    for of_dy, of_beta, column in COLUMNS:
        dy = np.repeat(np.array(column)[:, None], 4, axis=1).astype(of_dy)
        x = np.random.default_rng(0).standard_normal(dy.shape).astype(of_dy)
        yield Case(x, None, np.zeros(4, of_beta), 1e-5, dy), {}


@pytest.mark.parametrize(("case", "given"), list(rare_cases()))
def test_rare_cases(case, given):
    assert_right(case, **given)


def test_overflow_and_underflow_are_those_of_one_rounding(dtype):
    """y is gamma, -gamma or a sum with beta around the largest number, the smallest, and midpoints."""
    form = format_of(dtype)
    ulp, least = 2.0 ** (form.emax + 1 - form.digits), 2.0 ** (form.emin + 1 - form.digits)
    # In float64, a product below the least number is zero.
    gamma = np.array([form.largest, form.largest, least, 0.4 * least, 1.5 * least, 1.0])
    beta = np.array([ulp / 2, ulp / 4, -least / 2, 0, 0, 0])
    x = np.array([[1, 1, 1, -1, -1, -1], [-1, -1, -1, 1, 1, 1]], dtype)
    case = Case(x, gamma, beta, 0.0, np.full(x.shape, form.largest) * [[0.5], [0.6]])
    assert_right(case, roundings=["nearest"])
