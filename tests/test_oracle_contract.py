"""The contract and the errors of the oracle: wrong answers are rejected, and wrong arguments."""

import math

import numpy as np
import pytest

from stablenorm.oracle import exact_layer_norm


def test_an_element_that_cancels_passes_by_the_second_term_and_only_just(rng):
    x = rng.standard_normal((1, 64)).astype(np.float32)
    gamma = np.ones(64, np.float32)
    # beta takes away all of gamma * xhat that float64 holds: what is left is 2**-53 of it.
    xhat = exact_layer_norm(x, gamma).rounded("y", np.float64)
    exact = exact_layer_norm(x, gamma, -xhat[0])
    plain = np.zeros((1, 64), np.float32)
    result = exact.check_contract(y=plain)["y"]
    assert result.worst_ulp > 1e6
    assert result.second_term == 64
    assert result.misrounded == 1
    assert 0 < result.worst_excess < 2**-5
    assert result.passed
    # An error of 2**-45 of S is eight times too much.
    plain[0, 7] = np.abs(xhat[0, 7]) * 4 * 2**-45
    assert not exact.check_contract(y=plain)["y"].passed


def test_an_exact_zero_far_from_the_smallest_float_is_held_by_the_second_term():
    # float64, S = 4: an error of 1e-20 is 1e303 ulp of an exact zero; c * S is 4 * 2**-94.
    dy = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    exact = exact_layer_norm(np.ones((4, 1)), dy=dy)
    bad = exact.check_contract(dbeta=np.array([1e-20]), dgamma=np.array([1e-320]))
    assert not bad["dbeta"].passed
    assert bad["dbeta"].worst_excess == pytest.approx(1e-20 / (4 * 2.0**-94))
    # n = 1: xhat is 0, S too, and nothing is forgiven.
    assert bad["dgamma"].worst_excess == math.inf
    assert exact.check_contract(dbeta=np.array([1e-28]))["dbeta"].passed


def test_a_row_without_variance_and_eps_must_be_nan():
    x = np.array([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], np.float32)
    exact = exact_layer_norm(x, eps=0.0, dy=np.ones_like(x))
    y = exact.rounded("y", np.float32)
    np.testing.assert_array_equal(np.isnan(y), [[False] * 3, [True] * 3])
    assert exact.check_contract(y=y, dx=exact.rounded("dx", np.float32))["dx"].passed
    np.testing.assert_array_equal(exact.ulp_errors(y=np.zeros_like(y))["y"][1], math.inf)
    dgamma = exact.rounded("dgamma", np.float32)
    assert np.isnan(dgamma).all()
    assert exact.check_contract(dgamma=dgamma)["dgamma"].passed
    assert not exact.check_contract(dgamma=np.zeros(3))["dgamma"].passed
    np.testing.assert_array_equal(exact.rounded("dbeta", np.float32), 2.0)
    with pytest.raises(ValueError, match="y must be defined"):
        exact.value("y", (1, 0))
    with pytest.raises(ValueError, match="dgamma must be defined"):
        exact.value("dgamma", (0,))


def test_wrong_arrays_and_names():
    x = np.array([[1.0, 2.0, 4.0]])
    exact = exact_layer_norm(x)
    for name in ("dx", "dgamma", "dbeta"):
        with pytest.raises(ValueError, match="dy must be given"):
            exact.rounded(name, np.float64)
    with pytest.raises(ValueError, match=r"y must have shape \(1, 3\), got \(3,\)"):
        exact.ulp_errors(y=x[0])
    with pytest.raises(TypeError, match=r"y must be .* got int64"):
        exact.check_contract(y=np.zeros((1, 3), int))
    with pytest.raises(ValueError, match="name must be one of y, dx, dgamma, dbeta, ty, got 'z'"):
        exact.rounded("z", np.float32)
    assert exact.ulp_errors() == {}
