"""The same bits whatever the scale, and in every run (test_tiny.py, test_masks.py: whatever the batch)."""

import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward


def make(rng, dtype, rows, n):
    x, dy = rng.standard_normal((2, rows, n)) + 3
    gamma, beta = 1 + 0.1 * rng.standard_normal((2, n))
    return tuple(v.astype(dtype) for v in (x, gamma, beta, dy))


def run(x, gamma, beta, dy, backend=None, eps=1e-5):
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend=backend)
    return y, layer_norm_backward(dy, cache)


def assert_same_bits(expected, actual):
    assert expected.dtype == actual.dtype
    assert expected.tobytes() == actual.tobytes()


@pytest.mark.parametrize("power", [-60, 1, 60])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_scaling_by_a_power_of_two_with_eps_changes_no_bit(rng, name, backend, power):
    x, gamma, beta, dy = make(rng, name, 5, 33)
    y, gradients = run(x, gamma, beta, dy, backend)
    scaled = np.ldexp(x, power), gamma, beta, dy
    scaled_y, (dx, *sums) = run(*scaled, backend, np.ldexp(1e-5, 2 * power))
    expected = y, *gradients
    for one, other in zip(expected, (scaled_y, np.ldexp(dx, power), *sums), strict=True):
        assert_same_bits(one, other)


def test_runs_are_repeatable_and_wrt_changes_nothing(rng, dtype, backend):
    x, gamma, beta, dy = make(rng, dtype, 300, 129)
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    whole = layer_norm_backward(dy, cache)
    for i, name in enumerate(("x", "gamma", "beta")):
        one = layer_norm_backward(dy, cache, wrt=(name,))
        assert_same_bits(whole[i], one[i])
        assert all(one[j] is None for j in range(3) if j != i)
    for expected, actual in zip(whole, layer_norm_backward(dy, cache), strict=True):
        assert_same_bits(expected, actual)
