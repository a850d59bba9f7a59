"""The bounds of rounding="nearest" on the contract page: what breaks them, and what would leave float64's range."""

import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_a_large_dy_leaves_no_nan(rounding, backend):
    """Where all that the kernels' sums along a row see of it is 0."""

    def gradients(x, dy):
        ones = np.ones(x.shape[1])
        _, cache = layer_norm_forward(x, ones, ones, eps=0.0, backend=backend, rounding=rounding)
        return layer_norm_backward(dy, cache)

    x, dy = np.tile([1.0, 2.0, 4.0], (3, 1)), np.full((3, 3), 1.7e308) * [[1], [1], [-1]]
    np.testing.assert_array_equal(gradients(x, dy).dbeta, 1.7e308)
    # Half of the columns, between which and dy and xhat nothing adds up.
    x, dy = 2.0**-100 * np.tile([1.0, 1.0, -1.0, -1.0], (1, 4)), np.zeros((1, 16))
    dy[0, 1::4] = 2.0**1000 * np.array([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_array_equal(gradients(x, dy).dx, np.where(dy, np.copysign(np.inf, dy), 0.0))


@pytest.mark.parametrize("axis", [0, 1])
def test_more_digits_than_a_pair_has_are_left_to_the_reference(axis, backend):
    """Also of rows that are gathered from anywhere."""
    terms = np.array([2.0**190, 2.0**90 + 2.0**38, 3.0, -(2.0**190), -(2.0**90) - 2.0**38, 0, 0, 0])
    dy = np.moveaxis(np.tile(terms.reshape(2, 4, 1), 5), -1, axis).copy()
    x = np.random.default_rng(0).standard_normal(dy.shape)
    _, cache = layer_norm_forward(
        x, axis=axis, beta=np.zeros(5), rounding="nearest", backend=backend
    )
    np.testing.assert_array_equal(layer_norm_backward(dy, cache).dbeta, 3.0)
