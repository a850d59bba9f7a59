"""The checker on known answers: right ones pass, wrong ones fail, at the right argument."""

import numpy as np
import pytest
from checked_operations import cosine, sine

from stablenorm import (
    assert_gradients,
    check_gradients,
    check_layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from stablenorm.check import row_identities


def two_pass(x, gamma, beta, eps):
    """A plain layer norm, written differently from ours: the chain rule through var and mean."""
    mean = x.mean(axis=-1, keepdims=True)
    var = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(var + eps)
    xhat = (x - mean) * rstd
    return gamma * xhat + beta, (x, mean, rstd, xhat, gamma)


def chain_rule(dy, cache):
    x, mean, rstd, xhat, gamma = cache
    g = gamma * dy
    n = x.shape[-1]
    dvar = (g * (x - mean) * -0.5 * rstd**3).sum(axis=-1, keepdims=True)
    dmean = (-g * rstd).sum(axis=-1, keepdims=True)
    dx = g * rstd + dvar * 2 * (x - mean) / n + dmean / n
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def no_mean(dy, cache):
    _, _, rstd, xhat, gamma = cache
    g = gamma * dy
    dx = rstd * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    return dx, *chain_rule(dy, cache)[1:]


def gamma_last(dy, cache):
    _, _, rstd, xhat, gamma = cache
    centered = dy - dy.mean(axis=-1, keepdims=True)
    dx = gamma * rstd * (centered - xhat * (dy * xhat).mean(axis=-1, keepdims=True))
    return dx, *chain_rule(dy, cache)[1:]


def last_row_dropped(dy, cache):
    dx, dgamma, dbeta = chain_rule(dy, cache)
    dx[-1] = 0
    return dx, dgamma, dbeta


def dgamma_without_rstd(dy, cache):
    dx, _, dbeta = chain_rule(dy, cache)
    return dx, (dy * (cache[0] - cache[1])).sum(axis=0), dbeta


WRONG = {no_mean: "x", gamma_last: "x", last_row_dropped: "x", dgamma_without_rstd: "gamma"}


@pytest.mark.parametrize("seed", range(10))
def test_sin(seed):
    x = np.random.default_rng(seed).standard_normal(7)
    assert check_gradients(sine, cosine, [x], rng=seed).verdict == "PASS"


def test_one_element_one_percent_off_is_found_where_it_is():
    def backward(dy, x):
        dx = dy * np.cos(x)
        dx[4] *= 1.01
        return (dx,)

    x = np.linspace(-1, 1, 7)
    report = check_gradients(sine, backward, [x], names=["angle"], rng=0)
    assert report.verdict == "FAIL"
    assert report.arguments[0].name == "angle"
    assert report.arguments[0].index == (4,)
    assert "angle" in str(report)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("seed", range(5))
def test_correct_layer_norms_pass(seed, offset):
    rng = np.random.default_rng(seed)
    x = offset + rng.standard_normal((4, 8))
    gamma, beta = rng.standard_normal((2, 8))
    for forward, backward in (
        (layer_norm_forward, layer_norm_backward),
        (two_pass, chain_rule),
    ):
        report = check_layer_norm(forward, backward, x, gamma, beta, rng=seed)
        # An offset may leave a plain formula too noisy to judge: that is said, not passed.
        assert report.verdict != "FAIL", str(report)
        if forward is layer_norm_forward:
            assert report.verdict == "PASS", str(report)


@pytest.mark.parametrize("backward", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_wrong_backwards_fail_at_the_right_argument(backward, seed):
    report = check_layer_norm(two_pass, backward, rng=seed)
    assert report.verdict == "FAIL"
    failed = {result.name for result in report.arguments if result.verdict == "FAIL"}
    assert failed == {WRONG[backward]}


def test_large_arguments_are_sampled():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 768))
    gamma, beta = rng.standard_normal((2, 768))
    report = check_layer_norm(layer_norm_forward, layer_norm_backward, x, gamma, beta, rng=0)
    assert report.verdict == "PASS", str(report)
    assert report.arguments[0].checked < x.size == report.arguments[0].total
    assert report.arguments[0].probes > 0


def test_float16_is_inconclusive_not_passed():
    def forward(x):
        return np.sin(x.astype(np.float64)).astype(np.float16), x

    def backward(dy, x):
        return ((dy * np.cos(x.astype(np.float64))).astype(np.float16),)

    x = np.linspace(0.5, 1, 5).astype(np.float16)
    assert check_gradients(forward, backward, [x], rng=0).verdict == "INCONCLUSIVE"


def test_arguments_are_not_modified_and_may_be_frozen():
    x = np.linspace(-1, 1, 7)
    x.flags.writeable = False
    before = x.copy()
    check_gradients(sine, cosine, [x], rng=0)
    np.testing.assert_array_equal(before, x)


def test_gradients_that_are_none_are_not_checked():
    def forward(x, w):
        return x * w, (x, w)

    def backward(dy, cache):
        return dy * cache[1], None

    report = check_gradients(forward, backward, [np.ones(3), np.arange(3.0)], rng=0)
    assert [result.verdict for result in report.arguments] == ["PASS", "NOT CHECKED"]


def test_a_wrong_shape_is_a_failure_not_an_error():
    report = check_gradients(sine, lambda dy, _: (dy[:2],), [np.ones(5)], rng=0)
    assert report.verdict == "FAIL"
    assert "shape" in report.arguments[0].message


def test_assert_gradients_raises_with_the_report():
    x = np.linspace(-1, 1, 7)
    assert_gradients(sine, cosine, [x], rng=0)
    with pytest.raises(AssertionError, match="backward"):
        assert_gradients(sine, lambda dy, x: (-dy * np.cos(x),), [x], rng=0)


@pytest.mark.parametrize(
    ("args", "error"),
    [([], ValueError), ([np.arange(3)], TypeError), ([np.array([np.nan])], ValueError)],
)
def test_wrong_use_is_an_error(args, error):
    with pytest.raises(error, match="must"):
        check_gradients(sine, cosine, args)


def test_the_bound_covers_the_true_error():
    """Of cos, known: error within bound on every element of 40 draws."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = rng.uniform(-1.5, 1.5, 6) * 10.0 ** rng.integers(-3, 1)
        report = check_gradients(sine, cosine, [x], rng=seed)
        result = report.arguments[0]
        assert result.failing == 0
        assert abs(result.actual - result.numeric) <= result.bound_numeric + result.bound_actual


@pytest.mark.parametrize("which", ["eps", "euler"])
def test_identities_see_what_differences_hardly_do(which):
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, 4, 8))
    gamma, beta = rng.standard_normal((2, 8))
    y, cache = layer_norm_forward(x, gamma, beta, 1e-5)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    right = row_identities(x, gamma, beta, 1e-5, dy, y, dx, dgamma, dbeta)
    assert all(identity.passed for identity in right)
    if which == "eps":
        dx = layer_norm_backward(dy, layer_norm_forward(x, gamma, beta, 0.0)[1]).dx
    else:
        dgamma = dgamma * (1 + 1e-9)
    wrong = row_identities(x, gamma, beta, 1e-5, dy, y, dx, dgamma, dbeta)
    assert sum(not identity.passed for identity in wrong) == 1
