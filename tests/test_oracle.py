"""The oracle against plain rational arithmetic, and against wrong answers, which it must reject."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from rationals import (
    BFLOAT16,
    DTYPES,
    NAMES,
    fractions,
    nearest,
    neighbours,
    plain,
    plain_backward,
    sample,
)

from stablenorm.oracle import exact_layer_norm, exact_rms_norm, rounding, surds


def textbook(x, gamma, beta, eps, dy, kind="layer", digits=320):
    """All four quantities as flat lists of rationals, but for the rounding of the square root."""
    scale, shift, eps = fractions(gamma), fractions(beta), Fraction(eps)
    found = {"y": [], "dx": [], "dgamma": [], "dbeta": [sum(fractions(v)) for v in dy.T]}
    for values, cotangents in zip(map(fractions, x), map(fractions, dy), strict=True):
        found["y"] += plain(kind, values, scale, shift, eps, digits=digits)[0]
        dx, dgamma = plain_backward(kind, values, scale, eps, cotangents, digits)
        found["dx"] += dx
        found["dgamma"].append(dgamma)
    return found | {"dgamma": [sum(column) for column in zip(*found["dgamma"], strict=True)]}


@pytest.mark.parametrize("out", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_is_the_nearest_of_the_two_neighbours(dtype, out, rng):
    x, gamma, beta, dy = sample(dtype, 4, 9, rng, offset=3.0)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    expected = textbook(x, gamma, beta, 1e-5, dy)
    for name in NAMES:
        actual = exact.rounded(name, out)
        assert actual.dtype == out
        wanted = np.array([nearest(v, out) for v in expected[name]], out)
        np.testing.assert_array_equal(actual.ravel(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_the_differences_over_the_ulp(dtype, rng):
    x, gamma, beta, dy = sample(dtype, 4, 9, rng)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    expected = textbook(x, gamma, beta, 1e-5, dy)
    for name in NAMES:
        right = exact.rounded(name, dtype)
        wrong = np.nextafter(np.nextafter(right, dtype.type(9)), dtype.type(9))
        for actual in (right, wrong):
            errors = exact.ulp_errors(**{name: actual})[name]
            assert errors.shape == actual.shape
            for value, given, error in zip(
                expected[name], actual.ravel(), errors.ravel(), strict=True
            ):
                below, above = neighbours(value, dtype)
                gap = Fraction(float(above)) - Fraction(float(below))
                if gap:
                    wanted = abs(Fraction(float(given)) - value) / gap
                    assert error == pytest.approx(float(wanted), rel=4 * 2**-52)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_tie_goes_to_even(sign):
    # n = 2, eps = 0: xhat is exactly -1, 1, through rstd = 2/3 that no binary enclosure ends at.
    x = np.array([[0.0, 3.0]])
    beta = np.array([2049.0, 2051.0]) * sign
    gamma = np.zeros(2)
    for shift in (0.0, 0.5):
        # 2049 lies between 2048 and 2050 of float16, 2051 between 2050 and 2052.
        exact = exact_layer_norm(x, gamma + shift, beta + np.array([shift, -shift]), 0.0)
        actual = exact.rounded("y", np.float16)
        np.testing.assert_array_equal(actual, sign * np.array([[2048.0, 2052.0]]))
        np.testing.assert_array_equal(exact.ulp_errors(y=actual)["y"], 0.5)
        assert exact.check_contract(y=actual)["y"].misrounded == 0
        other = np.array([[2050.0, 2050.0]], np.float16) * np.float16(sign)
        np.testing.assert_array_equal(exact.ulp_errors(y=other)["y"], 0.5)
        result = exact.check_contract(y=other)["y"]
        assert result.misrounded == 1
        assert result.passed


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_smallest_term_decides_a_near_tie(sign, eps):
    # gamma * xhat is 2**-1074 of what beta is: far below the tie, and it still decides it.
    x = np.array([[0.0, 1.0, 5.0]])
    gamma = np.full(3, sign * 2.0**-1074)
    exact = exact_layer_norm(x, gamma, np.full(3, 2049.0), eps)
    low, high = 2048.0, 2050.0
    expected = [high, high, low] if sign < 0 else [low, low, high]
    np.testing.assert_array_equal(exact.rounded("y", np.float16)[0], expected)
    result = exact.check_contract(y=np.array([[low, low, low]], np.float16))["y"]
    assert result.misrounded == pytest.approx(np.mean([v != low for v in expected]))


def test_the_ulp_at_a_power_of_two_and_just_below_it():
    x = np.array([[0.0, 1.0, 5.0]])
    gamma = np.full(3, -(2.0**-1000))
    exact = exact_layer_norm(x, gamma, np.full(3, 1.0))
    # The first two are a little above 1, the last a little below, where the ulp is half as wide.
    actual = np.full((1, 3), 1 + 2.0**-23, np.float32)
    np.testing.assert_array_equal(exact.ulp_errors(y=actual)["y"], [[1.0, 1.0, 2.0]])
    # And at a power of two, the coarser: y is -1, 1, which no enclosure of rstd = 2/3 ends at.
    exact = exact_layer_norm(np.array([[0.0, 3.0]]), eps=0.0)
    actual = np.array([[-1 - 2.0**-23, 1 + 2.0**-23]], np.float32)
    np.testing.assert_array_equal(exact.ulp_errors(y=actual)["y"], 1.0)


@pytest.mark.parametrize(
    ("first", "second", "eps"),
    # With eps only rows of the same variance cancel; without it any multiples do, although their
    # square roots differ by a rational factor that is no power of two.
    [(1, -1, 1e-5), (1, -1, 0.0), (1, -2, 0.0), (1, -3, 0.0), (10, -7, 0.0)],
)
def test_dgamma_of_opposite_rows_is_exactly_zero(first, second, eps, rng):
    row = rng.integers(-40, 40, 6) / 8
    x = np.stack([first * row, second * row])
    dy = np.stack([np.arange(6.0), np.arange(6.0)])
    exact = exact_layer_norm(x, eps=eps, dy=dy)
    actual = exact.rounded("dgamma", np.float64)
    np.testing.assert_array_equal(actual, 0.0)
    assert not np.signbit(actual).any()
    assert exact.value("dgamma", (2,)) == 0
    np.testing.assert_array_equal(exact.ulp_errors(dgamma=actual)["dgamma"], 0.0)
    # One smallest subnormal is one ulp of an exact zero.
    errors = exact.ulp_errors(dgamma=np.full(6, 5e-324))["dgamma"]
    np.testing.assert_array_equal(errors, 1.0)
    errors = exact.ulp_errors(dgamma=np.full(6, 2.0**-100))["dgamma"]
    np.testing.assert_array_equal(errors, 2.0**974)
    # So small a dy that all its products round to zero: the sum is still +0.
    small = exact_layer_norm(x, eps=eps, dy=dy * 5e-324).rounded("dgamma", np.float64)
    np.testing.assert_array_equal(small, 0.0)
    assert not np.signbit(small).any()


@pytest.mark.parametrize("exponent", range(630, 680, 7))
def test_what_is_left_below_the_enclosure_is_resolved(exponent, rng):
    # Two rows cancel exactly; the third is 2**-270 to 2**-220 of them, about the 2**-256 to which
    # their square roots are known at first.
    row, rest = rng.standard_normal((2, 5))
    x, left = np.stack([row, -row, rest]), np.full(5, 2.0**exponent)
    dy = np.stack([np.full(5, 2.0**900), np.full(5, 2.0**900), left])
    expected = exact_layer_norm(rest[None], dy=left[None])
    exact = exact_layer_norm(x, dy=dy)
    actual = exact.rounded("dgamma", np.float64)
    np.testing.assert_array_equal(actual, expected.rounded("dgamma", np.float64))
    for given in (actual, np.nextafter(actual, 0.0)):
        np.testing.assert_array_equal(
            exact.ulp_errors(dgamma=given)["dgamma"], expected.ulp_errors(dgamma=given)["dgamma"]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ulp_is_never_below_the_smallest_subnormal(dtype):
    tiny = float(np.nextafter(dtype.type(0), dtype.type(1)))
    x = np.array([[-1.0, 1.0]], dtype)
    exact = exact_layer_norm(x, np.full(2, tiny, dtype), None, 1.0)
    # y = -+ tiny / sqrt(2): an error of 0.29 from the nearest, 0.71 from zero.
    right = np.array([[-tiny, tiny]], dtype)
    np.testing.assert_array_equal(exact.rounded("y", dtype), right)
    near, far = 1 - math.sqrt(0.5), math.sqrt(0.5)
    np.testing.assert_allclose(exact.ulp_errors(y=right)["y"], near, rtol=1e-15)
    zeros = np.zeros((1, 2), dtype)
    np.testing.assert_allclose(exact.ulp_errors(y=zeros)["y"], far, rtol=1e-15)
    assert not exact.check_contract(y=zeros)["y"].passed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_is_right_exactly_where_the_value_rounds_to_it(dtype):
    top = float(np.finfo(dtype).max if dtype != BFLOAT16 else ml_dtypes.finfo(dtype).max)
    ulp = top - float(np.nextafter(dtype.type(top), dtype.type(0)))
    # xhat = -1, 1: the first a quarter ulp below the largest number, the second half an ulp above.
    x = np.array([[-1.0, 1.0]])
    gamma = np.array([ulp / 4, ulp / 2])
    exact = exact_layer_norm(x, gamma, np.array([top, top]), 0.0)
    np.testing.assert_array_equal(exact.rounded("y", dtype).astype(float), [[top, math.inf]])
    inf = np.full((1, 2), np.inf, dtype)
    np.testing.assert_array_equal(exact.ulp_errors(y=inf)["y"], [[math.inf, 0.5]])
    np.testing.assert_array_equal(exact.ulp_errors(y=-inf)["y"], math.inf)
    np.testing.assert_array_equal(exact.ulp_errors(y=np.full_like(inf, np.nan))["y"], math.inf)
    assert exact.check_contract(y=exact.rounded("y", dtype))["y"].misrounded == 0
    finite = np.full((1, 2), top, dtype)
    assert exact.check_contract(y=finite)["y"].misrounded == 0.5
    below = exact_layer_norm(x, gamma * (1 - 2.0**-50), np.array([top, top]), 0.0)
    np.testing.assert_array_equal(below.rounded("y", dtype).astype(float), top)
    # Above the range the grid of the last binade goes on.
    above = exact_layer_norm(x, gamma * [1, 2], np.array([top, top]), 0.0)
    np.testing.assert_array_equal(above.ulp_errors(y=finite)["y"], [[0.25, 1.0]])


@pytest.mark.parametrize(("kind", "judge"), [("layer", exact_layer_norm), ("rms", exact_rms_norm)])
@pytest.mark.parametrize("eps", [0.0, 5e-324, 1e-5, 1e300])
def test_the_whole_range_of_float64_in_one_row(eps, kind, judge, rng):
    x = np.ldexp(rng.standard_normal((2, 12)), rng.integers(-1074, 1022, (2, 12)))
    x[1, :3] = [5e-324, -1.7e308, 1.7e308]
    gamma = np.ldexp(rng.standard_normal(12), rng.integers(-500, 500, 12))
    dy = np.ldexp(rng.standard_normal((2, 12)), rng.integers(-500, 500, (2, 12)))
    exact = judge(x, gamma, None, eps, dy)
    # Five factors of up to 2**1074 either way may cancel: fewer than 3300 digits.
    expected = textbook(x, gamma, np.zeros(12), eps, dy, kind, 3500)
    for name in NAMES:
        actual = exact.rounded(name, np.float64)
        result = exact.check_contract(**{name: actual})[name]
        assert result.passed
        assert result.misrounded == 0
        for value, given in zip(expected[name], actual.ravel().tolist(), strict=True):
            if abs(value) > Fraction(np.finfo(float).max):
                assert given == math.copysign(math.inf, value)
            else:
                # A quotient of Python integers is correctly rounded, subnormals included.
                assert given == value.numerator / value.denominator


def test_an_enclosure_that_crosses_a_negative_power_of_two_is_open():
    """In steps of 128 the nearest is -2^30; above it they are 64, and -2^30 + 40 is not."""
    assert (
        rounding.nearest(rounding.Interval(-(1 << 30), 40, 0), rounding.FORMATS["float32"]) is None
    )


@pytest.mark.parametrize("excess", [0, 1])
def test_a_square_root_is_exact_only_if_nothing_is_left_over(excess):
    """The first 512 bits of 1 + 2^-600 are those of 1."""
    root = surds.enclose_root(1 + excess * Fraction(1, 2**600))
    assert root == rounding.Interval(*((1 << 256, 1, -256) if excess else (1, 0, 0)))
