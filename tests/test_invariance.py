"""The same row, the same bits: whatever the batch, its neighbours, its scale (test_any_call.py: layouts)."""

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


# 1, 7, 8, 9, 129: tails of NumPy's pairwise sum.
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 129, 768, 8193])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(rng, dtype, backend, n):
    x, gamma, beta, dy = make(rng, dtype, 40, n)
    y, gradients = run(x, gamma, beta, dy, backend)
    for row in (0, 17, 39):
        part = slice(row, row + 1)
        y_alone, alone = run(x[part], gamma, beta, dy[part], backend)
        assert_same_bits(y[part], y_alone)
        assert_same_bits(gradients.dx[part], alone.dx)


def test_hard_neighbours_do_not_change_a_float64_row(rng, backend):
    """Exponents and third words are kept for a whole array once one row needs them."""
    x, gamma, beta, dy = make(rng, np.float64, 4, 33)
    y, gradients = run(x, gamma, beta, dy, backend)
    hard = np.stack([1e300 * x[0], 1e-310 * x[0], 1.7 + np.spacing(1.7) * (x[0] > 3)])
    y_among, among = run(
        np.concatenate([x, hard]), gamma, beta, np.concatenate([dy, dy[:3]]), backend
    )
    assert_same_bits(y, y_among[:4])
    assert_same_bits(gradients.dx, among.dx[:4])


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
