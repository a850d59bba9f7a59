"""The same row gives the same bits, whatever the batch and its neighbours (test_any_call.py: layouts)."""

import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward


def make(rng, dtype, rows, n):
    x, dy = rng.standard_normal((2, rows, n)) + 3
    gamma, beta = 1 + 0.1 * rng.standard_normal((2, n))
    return tuple(v.astype(dtype) for v in (x, gamma, beta, dy))


def run(x, gamma, beta, dy, backend=None, axis=-1):
    y, cache = layer_norm_forward(x, gamma, beta, axis=axis, backend=backend)
    return y, layer_norm_backward(dy, cache)


def assert_same_bits(expected, actual):
    assert expected.dtype == actual.dtype
    assert expected.tobytes() == actual.tobytes()


def assert_same_results(expected, actual):
    """y and all gradients."""
    for one, other in zip((expected[0], *expected[1]), (actual[0], *actual[1]), strict=True):
        assert_same_bits(one, other)


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


def test_channels_of_an_image_in_place_of_a_permuted_copy(rng, backend):
    """NCHW over the channels (pytorch 71465): a layout that has no (rows, n) view."""
    x = rng.standard_normal((2, 3, 40, 50)).astype(np.float32)
    expected = np.moveaxis(layer_norm(np.moveaxis(x, 1, -1).copy(), backend=backend), -1, 1)
    out = np.empty_like(x)
    assert layer_norm(x, axis=1, out=out, backend=backend) is out
    assert_same_bits(np.ascontiguousarray(expected), out)


def test_in_place_where_it_is_safe(rng, dtype, backend):
    x, gamma, beta, dy = make(rng, dtype, 37, 129)
    expected = run(x, gamma, beta, dy, backend)
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    over = layer_norm_backward(dy, cache, out=(dy, None, None))
    assert over.dx is dy
    assert layer_norm(x, gamma, beta, out=x, backend=backend) is x
    assert_same_results(expected, (x, over))


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
