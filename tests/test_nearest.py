"""`rounding="nearest"` of the public functions: what it accepts, and the exact results on both backends."""

import numpy as np
import pytest

from stablenorm import LayerNorm, exact_layer_norm, layer_norm, layer_norm_backward
from stablenorm import layer_norm_forward as forward
from stablenorm.formats import FORMATS

DTYPES = [each.dtype for each in FORMATS]
OUTPUTS = ("y", "dx", "dgamma", "dbeta")


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def run(x, gamma, beta, eps, dy, **options):
    y, cache = forward(x, gamma, beta, eps, rounding="nearest", **options)
    return dict(zip(OUTPUTS, (y, *layer_norm_backward(dy, cache)), strict=True))


def assert_nearest(results, x, gamma, beta, eps, dy):
    exact = exact_layer_norm(x, gamma, beta, eps, dy)
    for name, actual in results.items():
        expected = exact.rounded(name, actual.dtype)
        wrong = bits(actual) != bits(expected)
        assert not wrong.any(), (
            name,
            np.argwhere(wrong)[:3],
            actual[wrong][:3],
            expected[wrong][:3],
        )


def test_unknown_rounding_is_refused():
    x = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match='rounding must be "fast" or "nearest", got \'exact\''):
        layer_norm(x, rounding="exact")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 7), (40, 33), (70, 130), (3, 1025)])
def test_every_element_is_the_nearest(shape, dtype, backend):
    rng = np.random.default_rng(shape[1])
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[1]).astype(dtype) for _ in range(2))
    x[0], dy[-1] = x[0, 0], 0
    assert_nearest(run(x, gamma, beta, 1e-5, dy, backend=backend), x, gamma, beta, 1e-5, dy)


def test_a_layer_rounds_to_nearest():
    x = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
    layer = LayerNorm(6, rounding="nearest")
    y = layer.forward(x)
    assert np.array_equal(y, layer_norm(x, *layer.parameters.values(), rounding="nearest"))
    assert layer.backward(y).shape == x.shape


def test_sums_over_rows_that_are_gathered(backend):
    """A little more than half way to the next float64: the pair of sums does not hold the last term."""
    x = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    dy = np.asfortranarray(np.repeat([[1.0], [2.0**-53], [2.0**-160]], 4, axis=1))
    found = run(x, np.ones(4), np.zeros(4), 0.1, dy, backend=backend)["dbeta"]
    assert np.array_equal(found, np.full(4, np.nextafter(1, 2)))


def test_results_may_overwrite_the_input(backend):
    rng = np.random.default_rng(1)
    x, dy = rng.standard_normal((2, 50, 24))
    expected = run(x, None, None, 0.1, dy, backend=backend)
    _, cache = forward(x, eps=0.1, rounding="nearest", backend=backend)
    cotangent = dy.copy()
    dx = layer_norm_backward(cotangent, cache, out=(cotangent, None, None)).dx
    assert np.array_equal(dx, expected["dx"])
    y = layer_norm(x, eps=0.1, rounding="nearest", out=x, backend=backend)
    assert np.array_equal(y, expected["y"])


def test_a_backward_after_a_forward_of_extreme_beta_knows_tiny_rows(backend):
    x, dy = np.array([[1.82512575e-309, -3.03630258e-309]]), np.array([[-1.0, 1.0]]) / 64
    # beta sends the forward to the reference; dgamma underflows to -0.
    beta = np.array([1e200, 1.0])
    assert_nearest(
        run(x, np.ones(2), beta, 1e30, dy, backend=backend), x, np.ones(2), beta, 1e30, dy
    )
