"""The family's exact forms against a plain forward in rationals and its differences."""

import math
from fractions import Fraction

import numpy as np
import pytest
from norms import FINITE, NORMS
from rationals import (
    DTYPES,
    dot,
    fractions,
    magnitudes,
    nearest,
    plain,
    plain_backward,
    sample,
)

from stablenorm.oracle import exact_double_backward, exact_layer_norm, exact_rms_norm
from stablenorm.testing.families import make_case

KINDS = {kind: exact for kind, (_, _, exact) in NORMS.items()}
# The step of a central difference; and what that difference may be off by: step**2 = 5e-91 times a
# third derivative, which the samples here keep below 1e6.
STEP, CLOSE = Fraction(1, 2**150), Fraction(1, 10**84)


def slope(function, point, direction):
    """The central difference of a function of a list."""
    ends = [
        function([v + side * STEP * t for v, t in zip(point, direction, strict=True)])
        for side in (1, -1)
    ]
    return (ends[0] - ends[1]) / (2 * STEP)


def unit(n, i):
    return [Fraction(k == i) for k in range(n)]


def hold(exact, expected, rows, sums):
    """Hold each element against what is expected of the rows; `sums` start with what is given."""
    sums = {name: fractions(start) for name, start in sums.items()}
    for r in range(rows):
        for name, values in expected(r).items():
            if name in sums:
                sums[name] = [a + b for a, b in zip(sums[name], values, strict=True)]
                continue
            for i, value in enumerate(values):
                assert abs(exact.value(name, (r, i), 400) - value) < CLOSE
    for name, values in sums.items():
        for i, value in enumerate(values):
            assert abs(exact.value(name, (i,), 400) - value) < CLOSE


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_terms_together_are_the_differences_of_the_forward(kind, masked, rng):
    rows, n, eps, offset = 2, 4, 0.25, 0.1
    x, gamma, beta, dy = sample(np.dtype("float64"), rows, n, rng, offset=1.0)
    dsum, tx = rng.standard_normal((2, rows, n))
    more = {"drstd": rng.standard_normal((rows, 1))}
    if kind == "layer":
        more["dmean"] = rng.standard_normal((rows, 1))
    tgamma, tbeta, old_dgamma, old_dbeta = rng.standard_normal((4, n))
    where = np.array([[True, False, True, True], [True] * 4]) if masked else None
    exact = KINDS[kind](
        x, gamma, beta, eps, dy, gamma_offset=offset, where=where, dsum=dsum, tx=tx, tgamma=tgamma,
        tbeta=tbeta, accumulate=(old_dgamma, old_dbeta), **more,
    )  # fmt: skip
    scale = [v + Fraction(offset) for v in fractions(gamma)]
    statistics = [more.get(name, np.zeros((rows, 1))) for name in ("dmean", "drstd")]

    def expected(r):
        keep = where[r].tolist() if masked else [True] * n
        state = [v * k for v, k in zip(fractions(x[r]), keep, strict=True)]
        state += [*scale, *fractions(beta)]
        tangents = [*fractions(tx[r]), *fractions(tgamma), *fractions(tbeta)]

        def forward(v):
            return plain(kind, v[:n], v[n : 2 * n], v[2 * n :], Fraction(eps), keep)

        def loss(v):
            y, *others = forward(v)
            pulled = dot([Fraction(d[r, 0]) for d in statistics], others)
            return dot(fractions(dy[r]), y) + pulled + dot(fractions(dsum[r]), v[:n])

        slopes = [slope(loss, state, unit(3 * n, i)) for i in range(3 * n)]
        return {
            "y": forward(state)[0],
            "ty": [slope(lambda v, i=i: forward(v)[0][i], state, tangents) for i in range(n)],
            "dx": slopes[:n],
            "dgamma": slopes[n : 2 * n],
            "dbeta": slopes[2 * n :],
        }

    hold(exact, expected, rows, {"dgamma": old_dgamma, "dbeta": old_dbeta})


@pytest.mark.parametrize("kind", KINDS)
def test_double_backward_is_the_difference_of_the_backward(kind, rng):
    rows, n, eps, offset = 2, 4, 0.25, 1.0
    x, gamma, _, dy = sample(np.dtype("float64"), rows, n, rng, offset=1.0)
    ddx, (ddgamma, ddbeta) = rng.standard_normal((rows, n)), rng.standard_normal((2, n))
    exact = exact_double_backward(
        ddx, dy, x, gamma, eps, ddgamma=ddgamma, ddbeta=ddbeta, gamma_offset=offset, kind=kind
    )
    scale = [v + Fraction(offset) for v in fractions(gamma)]

    def expected(r):
        def loss(v):
            w = v[2 * n :]
            dx, dgamma = plain_backward(kind, v[:n], v[n : 2 * n], Fraction(eps), w)
            sums = dot(fractions(ddgamma), dgamma) + dot(fractions(ddbeta), w)
            return dot(fractions(ddx[r]), dx) + sums

        state = [*fractions(x[r]), *scale, *fractions(dy[r])]
        slopes = [slope(loss, state, unit(3 * n, i)) for i in range(3 * n)]
        return {"dx": slopes[:n], "dgamma": slopes[n : 2 * n], "ddy": slopes[2 * n :]}

    hold(exact, expected, rows, {"dgamma": np.zeros(n)})
    # Without the cotangents of the sums, and as arrays: rounded once.
    alone = exact_double_backward(ddx, dy, x, gamma, eps, gamma_offset=offset, kind=kind)
    for name in ("ddy", "dx", "dgamma"):
        actual = alone.rounded(name, np.float32)
        assert alone.ulp_errors(**{name: actual})[name].max() <= 0.5
    zeros = {"ddgamma": np.zeros(n), "ddbeta": np.zeros(n), "gamma_offset": offset, "kind": kind}
    same = exact_double_backward(ddx, dy, x, gamma, eps, **zeros)
    assert same.value("dx", (1, 2)) == alone.value("dx", (1, 2))


@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_and_rounded_once(dtype, second, rng):
    exponents = rng.integers(-12, 12, (2, 3, 7)).astype(np.float64)
    x, residual = rng.standard_normal((2, 3, 7)) * 2**exponents
    x, residual = x.astype(dtype), residual.astype(second)
    exact = exact_layer_norm(x, residual=residual)
    pairs = zip(fractions(x.ravel()), fractions(residual.ravel()), strict=True)
    expected = np.array([nearest(a + b, dtype) for a, b in pairs], dtype).reshape(x.shape)
    assert exact.x.dtype == dtype
    np.testing.assert_array_equal(exact.x, expected)
    alone = exact_layer_norm(expected).rounded("y", np.float64)
    np.testing.assert_array_equal(exact.rounded("y", np.float64), alone)


def test_a_residual_is_not_rounded_to_float64_on_its_way():
    # bfloat16: 1 + 2**-8 is a tie, which 2**-100 decides.
    x = np.array([[1.0, 0.0]]).astype(DTYPES[1])
    exact = exact_layer_norm(x, residual=np.array([[2.0**-8 + 2.0**-60, 0.0]]))
    assert float(exact.x[0, 0]) == 1 + 2.0**-7
    exact = exact_layer_norm(x, residual=np.array([[2.0**-8, 0.0]]))
    assert float(exact.x[0, 0]) == 1


def test_the_sum_of_gamma_and_its_offset_is_exact():
    # 1 + 2**-60 is 1 in every dtype; beta takes the 1 away.
    x, gamma = np.array([[-1.0, 1.0]]), np.full(2, 2.0**-60)
    exact = exact_rms_norm(x, gamma, np.array([1.0, -1.0]), 0.0, gamma_offset=1.0)
    np.testing.assert_array_equal(exact.rounded("y", np.float32), [[-(2.0**-60), 2.0**-60]])


def test_what_is_accumulated_is_rounded_once():
    # float16 at 2048 has steps of 2: 2049 is a tie, and 2**-20 decides it.
    dy = np.array([[1.0], [2.0**-20]])
    old = np.array([2048.0], np.float16)
    exact = exact_rms_norm(np.ones((2, 1)), eps=0.0, dy=dy, accumulate=(old, old))
    for name in ("dgamma", "dbeta"):
        assert exact.rounded(name, np.float16) == 2050
        assert exact.check_contract(**{name: old})[name].misrounded == 1
    alone = exact_rms_norm(np.ones((2, 1)), eps=0.0, dy=dy, accumulate=(None, old))
    assert alone.rounded("dgamma", np.float16) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_term_has_the_magnitudes_of_all_that_is_added(kind, dtype, rng):
    x, gamma, beta, dy = sample(np.dtype("float64"), 3, 6, rng)
    dsum, tx = rng.standard_normal((2, 3, 6))
    drstd, (tgamma, tbeta, *old) = rng.standard_normal((3, 1)), rng.standard_normal((4, 6))
    norm = KINDS[kind](
        x, gamma, beta, 1e-5, dy, dsum=dsum, drstd=drstd, accumulate=old, tx=tx, tgamma=tgamma,
        tbeta=tbeta,
    )  # fmt: skip
    double = exact_double_backward(tx, dy, x, gamma, 1e-5, ddgamma=tgamma, ddbeta=tbeta, kind=kind)
    sizes = magnitudes(kind, x, gamma, beta, 1e-5, dy, dsum, drstd, tx, tgamma, tbeta, old)
    wide = dtype is np.float64
    limits = {"dx": 0.75, "dgamma": 0.51, "dbeta": 0.51} if wide else {}
    for exact, each in zip((norm, double), sizes, strict=True):
        for name, size in each.items():
            actual = exact.rounded(name, dtype)
            good = exact.check_contract(**{name: actual})[name]
            assert (good.passed, good.misrounded, good.worst_ulp <= 0.5) == (True, 0, True)
            index, digits = (
                ((1, 2), 98 if wide else 48) if actual.ndim == 2 else ((2,), 94 if wide else 44)
            )
            # Far from the exact value: the error is the difference itself, the ulp nothing beside it.
            actual[index] = 2.0**40
            result = exact.check_contract(**{name: actual})[name]
            assert not result.passed
            assert (result.worst_index, result.second_term) == (index, 1)
            assert result.limit_ulp == limits.get(name, 0.501)
            assert result.misrounded == pytest.approx(1 / actual.size)
            assert result.worst_excess == pytest.approx(
                2.0 ** (40 + digits) / size[index], rel=1e-9
            )


@pytest.mark.parametrize("family", FINITE)
@pytest.mark.parametrize("kind", KINDS)
def test_hard_families_are_those_of_the_formula(kind, family):
    x, gamma, beta, eps, dy = make_case(family, "float32", n := 10)
    exact = KINDS[kind](x, gamma, beta, eps, dy)
    scale, shift, eps = fractions(gamma), fractions(beta), Fraction(eps)
    for r, (values, weights) in enumerate(zip(x, dy, strict=True)):
        row = fractions(values)
        y = plain(kind, row, scale, shift, eps)[0]
        dx = plain_backward(kind, row, scale, eps, fractions(weights))[0]
        for i, value in enumerate([*y, *dx]):
            actual = exact.value("y" if i < n else "dx", (r, i % n))
            # Terms are products of at most six floats, below 1e240: 80 digits of dx are right.
            assert abs(actual - value) <= abs(value) / 10**60 + Fraction(1, 10**80)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"where": np.ones((2, 3))}, TypeError, "where must be bool, got float64"),
        ({"where": np.ones((2, 2), bool)}, ValueError, r"where must broadcast .* \(2, 3\), got"),
        ({"residual": np.ones(3)}, ValueError, r"residual must have shape \(2, 3\), got \(3,\)"),
        ({"residual": np.full((2, 3), 1e308)}, ValueError, r"x \+ residual must be finite.* inf"),
        ({"dsum": np.ones(3)}, ValueError, r"dsum must have shape \(2, 3\), got \(3,\)"),
        ({"drstd": np.ones(2)}, ValueError, r"drstd must have shape \(2, 1\), got \(2,\)"),
        ({"accumulate": (np.ones(2), None)}, ValueError, r"dgamma must have shape \(3,\)"),
        ({"gamma_offset": math.inf}, ValueError, "gamma_offset must be finite, got inf"),
        ({"tgamma": np.ones(3, int)}, TypeError, "tgamma must be float16, .* got int64"),
        ({"x": np.zeros((2, 3), int)}, TypeError, "x must be float16, .* got int64"),
        ({"x": np.float64(1.0)}, ValueError, r"x must have shape \(\.\.\., n\)"),
        ({"beta": np.zeros(2)}, ValueError, r"beta must have shape \(3,\), got \(2,\)"),
        ({"x": np.array([[1.0, np.nan, 2.0]] * 2)}, ValueError, "x must be finite.* got nan"),
        ({"eps": -1e-5}, ValueError, "eps must be finite and >= 0, got -1e-05"),
    ],
)
def test_wrong_arguments(change, error, message):
    for exact in KINDS.values():
        with pytest.raises(error, match=message):
            exact(**({"x": np.full((2, 3), 1e308)} | change))
