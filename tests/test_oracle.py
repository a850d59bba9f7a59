"""The oracle has the values, verdicts and S of rational arithmetic."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from norms import NORMS, draw
from rationals import DTYPES, magnitudes, nearest, plain, plain_backward, rational, textbook, unit

from stablenorm.oracle import exact_double_backward, exact_layer_norm


@pytest.mark.parametrize(
    ("dtype", "kind", "eps", "whole"),
    [*itertools.product(DTYPES, ["layer"], [1e-5], [False]),
     *itertools.product(DTYPES[-1:], NORMS, [0.0, 5e-324, 1e-5, 1e300], [True])],
)  # fmt: skip
def test_rounded_is_the_nearest_of_the_two_neighbours(dtype, kind, eps, whole, rng):
    """Errors are differences over the ulp. With `whole`, rows span the whole range of float64."""
    x, gamma, beta, dy = draw(rng, (4, 9), dtype)
    x += dtype.type(3)
    if whole:
        x = np.ldexp(x, rng.integers(-1074, 1019, x.shape))
        x[1, :3] = [5e-324, -1.7e308, 1.7e308]
        gamma, dy = (np.ldexp(v, rng.integers(-500, 500, v.shape)) for v in (gamma, dy))
        beta *= 0
    exact = NORMS[kind][2](x, gamma, beta, eps, dy)
    # Five factors of up to 2**1074 either way may cancel: fewer than 3300 digits.
    for name, expected in textbook(x, gamma, beta, eps, dy, kind, 3500 if whole else 320).items():
        for out in DTYPES:
            actual = exact.rounded(name, out)
            wanted = np.array([nearest(v, out) for v in expected.flat], out)
            assert (actual.dtype, actual.tobytes()) == (out, wanted.tobytes())
        right = exact.rounded(name, dtype)
        result = exact.check_contract(**{name: right})[name]
        assert (result.passed, result.misrounded) == (True, 0)
        wrong = np.nextafter(np.nextafter(right, dtype.type(9)), dtype.type(9))
        for actual in () if whole else (right, wrong):
            errors = exact.ulp_errors(**{name: actual})[name]
            assert errors.shape == actual.shape
            for value, returned, error in zip(expected.flat, actual.flat, errors.flat, strict=True):
                ulps = abs(Fraction(float(returned)) - value) / unit(value, dtype)
                assert error == pytest.approx(float(ulps), rel=4 * 2**-52)


def judged_rows():
    """Yield an exact y of one row, another y, its errors in ulp, and the fraction misrounded."""

    def exact_y(x, gamma=None, beta=None, eps=0.0):
        return exact_layer_norm(np.array([x], float), gamma, beta, eps)

    # n = 2 and eps = 0: xhat is -1, 1, through rstd = 2/3, at which no binary enclosure ends. A tie
    # goes to even: 2049 lies between 2048 and 2050 of float16, 2051 between 2050 and 2052.
    for sign, shift in itertools.product((-1, 1), (0.0, 0.5)):
        beta = np.array([2049.0, 2051.0]) * sign + [shift, -shift]
        exact = exact_y([0, 3], np.full(2, shift), beta)
        yield exact, sign * np.array([2048.0, 2052.0], np.float16), [0.5, 0.5], 0
        yield exact, sign * np.full(2, 2050.0, np.float16), [0.5, 0.5], 1
    # gamma * xhat is 2**-1074 of beta: far below the tie, but it decides it.
    for eps, (sign, right) in itertools.product(
        (0.0, 1e-5), ((-1, [2050, 2050, 2048]), (1, [2048, 2048, 2050]))
    ):
        exact = exact_y([0, 1, 5], np.full(3, sign * 2.0**-1074), np.full(3, 2049.0), eps)
        yield exact, np.array(right, np.float16), [0.5] * 3, 0
        yield exact, np.full(3, 2048.0, np.float16), [0.5] * 3, np.mean(np.array(right) > 2048)
    # The first two are a little above 1, the last a little below, where the ulp is half as wide.
    exact = exact_y([0, 1, 5], np.full(3, -(2.0**-1000)), np.ones(3), 1e-5)
    yield exact, np.full(3, 1 + 2.0**-23, np.float32), [1.0, 1.0, 2.0], 1
    # A power of two has the coarser ulp.
    yield exact_y([0, 3]), np.array([-1 - 2.0**-23, 1 + 2.0**-23], np.float32), [1.0, 1.0], 1
    for dtype in DTYPES:
        # The ulp is never below the smallest subnormal: y is -+ tiny / sqrt(2).
        tiny = np.nextafter(dtype.type(0), dtype.type(1))
        exact = exact_y([-1, 1], np.full(2, tiny), eps=1.0)
        yield exact, np.array([-tiny, tiny]), [0.2928932188134524756] * 2, 0
        yield exact, np.zeros(2, dtype), [0.7071067811865475244] * 2, 1
        # Values a fraction of an ulp above the largest number: infinity is right exactly where the value
        # rounds to it, and the grid of the last binade continues above the range.
        top = float(ml_dtypes.finfo(dtype).max)
        ulp = top - float(np.nextafter(dtype.type(top), dtype.type(0)))
        exact, below, above = (
            exact_y([-1, 1], ulp * np.array([1 / 4, steps]), np.full(2, top))
            for steps in (1 / 2, 1 / 2 * (1 - 2.0**-50), 1)
        )
        for judged, y, errors, misrounded in (
            (exact, [top, np.inf], [0.25, 0.5], 0),
            (exact, [np.inf, np.inf], [np.inf, 0.5], 0.5),
            (exact, [-np.inf, -np.inf], [np.inf, np.inf], 1),
            (exact, [np.nan, np.nan], [np.inf, np.inf], 1),
            (exact, [top, top], [0.25, 0.5], 0.5),
            (below, [top, top], [0.25, 1 / 2 * (1 - 2.0**-50)], 0),
            (above, [top, top], [0.25, 1.0], 0.5),
        ):
            yield judged, np.array(y).astype(dtype), errors, misrounded


@pytest.mark.parametrize(("exact", "y", "errors", "misrounded"), list(judged_rows()))
def test_a_row_is_judged_to_the_last_bit(exact, y, errors, misrounded):
    np.testing.assert_array_equal(exact.ulp_errors(y=y[None])["y"], [errors])
    result = exact.check_contract(y=y[None])["y"]
    assert result.passed == (max(errors) <= 0.501)
    assert not result.passed or result.worst_index == (0, np.argmax(errors))
    wrong = (exact.rounded("y", y.dtype) != y).mean()
    assert result.misrounded == wrong == pytest.approx(misrounded)


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
    # With the smallest dy all products round to zero: the sum is still +0.
    for scale in (5e-324, 1.0):
        exact = exact_layer_norm(x, eps=eps, dy=dy * scale)
        actual = exact.rounded("dgamma", np.float64)
        np.testing.assert_array_equal(actual, 0.0)
        assert not np.signbit(actual).any()
    assert exact.value("dgamma", (2,)) == 0
    # One smallest subnormal is one ulp of an exact zero.
    for value, ulps in ((0.0, 0.0), (5e-324, 1.0), (2.0**-100, 2.0**974)):
        errors = exact.ulp_errors(dgamma=np.full(6, value))["dgamma"]
        np.testing.assert_array_equal(errors, ulps)


@pytest.mark.parametrize("exponent", range(-275, -160, 9))
def test_remainders_below_the_enclosure_are_decided(exponent, rng):
    # Two rows cancel exactly. Their roots are known to 2**-256 at first: the third row is less than that, or
    # so little more that its rounding is undecided, or its error is blurred.
    row, rest = rng.standard_normal((2, 5))
    x, left = np.stack([row, -row, rest]), np.full(5, 2.0**exponent)
    dy = np.stack([np.ones(5), np.ones(5), left])
    expected = exact_layer_norm(rest[None], dy=left[None])
    exact = exact_layer_norm(x, dy=dy)
    actual = exact.rounded("dgamma", np.float64)
    np.testing.assert_array_equal(actual, expected.rounded("dgamma", np.float64))
    for dgamma in (actual, np.nextafter(actual, 0.0)):
        errors, right = (oracle.ulp_errors(dgamma=dgamma)["dgamma"] for oracle in (exact, expected))
        np.testing.assert_array_equal(errors, right)


def test_an_element_that_cancels_passes_by_the_second_term_and_only_just(rng):
    x = rng.standard_normal((1, 64)).astype(np.float32)
    gamma = np.ones(64, np.float32)
    # beta cancels gamma * xhat to float64: 2**-53 of it is left.
    xhat = exact_layer_norm(x, gamma).rounded("y", np.float64)
    exact = exact_layer_norm(x, gamma, -xhat[0])
    plain = np.zeros((1, 64), np.float32)
    result = exact.check_contract(y=plain)["y"]
    assert result.worst_ulp > 1e6
    assert 0 < result.worst_excess < 2**-5
    assert (result.passed, result.second_term, result.misrounded) == (True, 64, 1)
    # S is 2 |xhat| + mean|xhat|, to float64; an error of 1.5 c S is too much.
    size = 2 * np.abs(xhat[0, 7]) + np.abs(xhat).mean()
    plain[0, 7] = 1.5 * size * 2**-48
    result = exact.check_contract(y=plain)["y"]
    assert (result.passed, result.worst_excess) == (False, pytest.approx(1.5, rel=1e-3))


def test_an_exact_zero_far_from_the_smallest_float_is_held_by_the_second_term():
    # float64, S = 4: an error of 1e-20 is 1e303 ulp of an exact zero; c * S is 4 * 2**-94.
    dy = np.array([[1.0, 1.0], [-1.0, 1.0]] * 2)
    exact = exact_layer_norm(np.ones((4, 2)), dy=dy)
    bad = exact.check_contract(dbeta=np.array([1e-20, 4.0]), dgamma=np.array([1e-320, 0.0]))
    assert not bad["dbeta"].passed
    assert bad["dbeta"].worst_excess == pytest.approx(1e-20 / (4 * 2.0**-94))
    # Constant rows: xhat is 0, and so is S, which forgives nothing.
    assert bad["dgamma"].worst_excess == math.inf
    assert exact.check_contract(dbeta=np.array([1e-28, 4.0]))["dbeta"].passed
    # worst_index is the element that breaks the contract, however few ulp.
    other = exact.check_contract(dbeta=np.array([1e-28, 4 + 2.0**-50]))["dbeta"]
    assert (other.passed, other.worst_index, other.second_term) == (False, (1,), 2)
    assert other.worst_excess == pytest.approx((1 - 0.51) * 2.0**-50 / (4 * 2.0**-94))
    # Sums of narrower data have the limit of float64 arithmetic, whatever their dtype.
    narrow = exact_layer_norm(np.ones((4, 2), np.float32), dy=dy)
    sums = narrow.check_contract(dbeta=np.zeros(2), dgamma=np.zeros(2))
    assert {result.limit_ulp for result in sums.values()} == {0.501}


def test_a_row_without_variance_and_eps_must_be_nan():
    x = np.array([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], np.float32)
    exact = exact_layer_norm(x, eps=0.0, dy=np.ones_like(x))
    y = exact.rounded("y", np.float32)
    np.testing.assert_array_equal(np.isnan(y), [[False] * 3, [True] * 3])
    assert exact.check_contract(y=y, dx=exact.rounded("dx", np.float32))["dx"].passed
    np.testing.assert_array_equal(exact.ulp_errors(y=np.zeros_like(y))["y"][1], math.inf)
    assert np.isnan(exact.rounded("dgamma", np.float32)).all()
    for dgamma, passed in ((np.nan, True), (0.0, False)):
        assert exact.check_contract(dgamma=np.full(3, dgamma))["dgamma"].passed == passed
    np.testing.assert_array_equal(exact.rounded("dbeta", np.float32), 2.0)
    for name, index in (("y", (1, 0)), ("dgamma", (0,))):
        with pytest.raises(ValueError, match=f"{name} must be defined"):
            exact.value(name, index)


# The step of a central difference, and the error of that difference: step**2 = 5e-91 times a third
# derivative, which is below 1e6 for the samples here.
STEP, CLOSE = Fraction(1, 2**150), Fraction(1, 10**84)
EPS, OFFSET = 0.25, 0.1


def rest_of(gamma):
    """Return what the sum with the offset loses: it is rounded once, to float64."""
    exact = rational(gamma) + Fraction(OFFSET)
    return rational(gamma + OFFSET) - exact


def hold_close(exact, name, index, expected):
    assert abs(exact.value(name, index, 400) - expected) < CLOSE


def hold_gradients(exact, loss, **point):
    """Hold the gradients of a function of arrays of rationals against its central differences."""
    for name, array in point.items():
        for index, value in np.ndenumerate(array):
            ends = []
            for ahead in (value + STEP, value - STEP):
                moved = array.copy()
                moved[index] = ahead
                ends.append(loss(**point | {name: moved}))
            hold_close(exact, f"d{name}", index, (ends[0] - ends[1]) / (2 * STEP))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_all_terms_together_are_the_differences_of_the_forward(kind, masked, rng):
    point, tangents, old = draw(rng, (2, 4), float), draw(rng, (2, 4), float), rng.random((2, 4))
    (*point, dy), (*tangents, dsum) = point, tangents
    where = np.array([[True, False, True, True], [True] * 4]) if masked else None
    by_name = dict(zip(("tx", "tgamma", "tbeta"), tangents, strict=True))
    options = {"gamma_offset": OFFSET, "where": where, "dsum": dsum, "accumulate": old}
    exact = NORMS[kind][2](*point, EPS, dy, **options, **by_name)
    masks = [None, None] if where is None else where
    rest, dy, dsum, old = map(rational, (rest_of(point[1]), dy, dsum, old))

    def forward(x, gamma, beta):
        scale = gamma + Fraction(OFFSET) + rest
        return [plain(kind, x[r], scale, beta, Fraction(EPS), masks[r]) for r in range(2)]

    def loss(x, gamma, beta):
        total = old[0] @ gamma + old[1] @ beta + (dsum * x).sum()
        return total + sum(dy[r] @ y for r, (y, *_) in enumerate(forward(x, gamma, beta)))

    point, tangents = [rational(v) for v in point], [rational(v) for v in tangents]
    hold_gradients(exact, loss, **dict(zip(("x", "gamma", "beta"), point, strict=True)))
    before, at, after = (
        forward(*(v + side * STEP * t for v, t in zip(point, tangents, strict=True)))
        for side in (-1, 0, 1)
    )
    for r, i in np.ndindex(2, 4):
        hold_close(exact, "y", (r, i), at[r][0][i])
        hold_close(exact, "ty", (r, i), (after[r][0][i] - before[r][0][i]) / (2 * STEP))


@pytest.mark.parametrize("kind", NORMS)
def test_double_backward_is_the_difference_of_the_backward(kind, rng):
    x, gamma, _, dy = draw(rng, (2, 4), float)
    ddx, ddgamma, ddbeta, _ = draw(rng, (2, 4), float)
    inputs, sums = (ddx, dy, x, gamma, EPS), {"ddgamma": ddgamma, "ddbeta": ddbeta}
    exact = exact_double_backward(*inputs, gamma_offset=OFFSET, kind=kind, **sums)
    rest, ddx, ddgamma, ddbeta = map(rational, (rest_of(gamma), ddx, ddgamma, ddbeta))

    def loss(x, gamma, dy):
        total = 0
        for r in range(2):
            scale = gamma + Fraction(OFFSET) + rest
            dx, dgamma = plain_backward(kind, x[r], scale, Fraction(EPS), dy[r])
            total += ddx[r] @ dx + ddgamma @ dgamma + ddbeta @ dy[r]
        return total

    hold_gradients(exact, loss, x=rational(x), gamma=rational(gamma), dy=rational(dy))
    # The cotangents of the sums are 0 by default.
    zeros = {"ddgamma": np.zeros(4), "ddbeta": np.zeros(4)}
    alone, same = (exact_double_backward(*inputs, kind=kind, **options) for options in ({}, zeros))
    assert same.value("dx", (1, 2)) == alone.value("dx", (1, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", NORMS)
def test_the_second_term_has_the_magnitudes_of_all_that_is_added(kind, dtype, rng):
    x, gamma, beta, dy = draw(rng, (3, 6), np.float64)
    dsum, tx = rng.standard_normal((2, 3, 6))
    tgamma, tbeta, *old = rng.standard_normal((4, 6))
    options = {"dsum": dsum, "accumulate": old, "tx": tx, "tgamma": tgamma, "tbeta": tbeta}
    norm = NORMS[kind][2](x, gamma, beta, 1e-5, dy, **options)
    double = exact_double_backward(tx, dy, x, gamma, 1e-5, ddgamma=tgamma, ddbeta=tbeta, kind=kind)
    sizes = magnitudes(kind, x, gamma, beta, 1e-5, dy, dsum, tx, tgamma, tbeta, old)
    wide = dtype is np.float64
    limits = {"dx": 0.75, "dgamma": 0.51, "dbeta": 0.51} if wide else {}
    for exact, by_name in zip((norm, double), sizes, strict=True):
        for name, size in by_name.items():
            actual = exact.rounded(name, dtype)
            good = exact.check_contract(**{name: actual})[name]
            assert (good.passed, good.misrounded, good.worst_ulp <= 0.5) == (True, 0, True)
            is_sum = actual.ndim == 1
            index, digits = (2,) if is_sum else (1, 2), (98 if wide else 48) - 4 * is_sum
            # A value far off: the error is about the value itself, and the ulp is negligible.
            actual[index] = 2.0**40
            result = exact.check_contract(**{name: actual})[name]
            excess = 2.0 ** (40 + digits) / size[index]
            assert (result.passed, result.second_term, result.worst_index) == (False, 1, index)
            assert result.limit_ulp == limits.get(name, 0.501)
            assert result.misrounded == pytest.approx(1 / actual.size)
            assert result.worst_excess == pytest.approx(excess, rel=1e-9)
