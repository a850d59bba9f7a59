"""Gamma and beta with leading axes, and sum_axes=: the bits of one ordinary call for each part."""

import numpy as np
import pytest
from norms import assert_same

from stablenorm import (
    get_num_threads,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    set_num_threads,
)


def test_sum_axes_writes_into_out_and_only_what_is_asked(rng):
    x, dy = rng.standard_normal((2, 3, 5, 8), np.float32)
    gamma, beta = rng.standard_normal((3, 1, 8), np.float32), np.zeros(8, np.float32)
    _, cache = layer_norm_forward(x, gamma, beta)
    expected = layer_norm_backward(dy.copy(), cache, sum_axes=1)
    out = np.empty((8, 6), np.float32).T[::2]
    found = layer_norm_backward(dy, cache, sum_axes=1, out=(dy, out, None))
    assert found.dx is dy
    assert found.dgamma is out
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # Sums that cannot be seen as (parts, n).
    room = None, None, np.empty((3, 10, 8), np.float32)[:, ::2]
    only = layer_norm_backward(dy, cache, sum_axes=(), wrt="beta", out=room)
    assert only.dx is only.dgamma is None
    assert only.dbeta is room[2]
    np.testing.assert_array_equal(only.dbeta, dy)


def views(layout, *arrays):
    """Return arrays of these elements, (samples, rows, n), in another layout."""
    if layout == "every second row":
        return [np.repeat(each, 2, axis=1)[:, ::2] for each in arrays]
    if layout == "columns first":
        return [np.asfortranarray(each) for each in arrays]
    if layout == "samples in the middle":
        return [np.ascontiguousarray(each.swapaxes(0, 1)).swapaxes(0, 1) for each in arrays]
    return arrays


@pytest.fixture(params=[1, 2])
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield
    set_num_threads(before)


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.usefixtures("threads")
def test_samples_that_go_past_the_caches_may_begin_at_any_float(rng):
    x, dy = rng.standard_normal((2, 4, 1024, 1024), np.float32)
    gamma = rng.standard_normal((4, 1, 1024), np.float32)
    # The first at a whole line, and each one float more apart than they are long.
    room = np.empty(4 * 2**20 + 20, np.float32)
    start = -room.ctypes.data % 64 // 4
    out = room[start : start + 4 * 2**20 + 4].reshape(4, -1)[:, :-1].reshape(x.shape)
    y, cache = layer_norm_forward(x, gamma)
    np.testing.assert_array_equal(layer_norm(x, gamma, out=out), y)
    expected = layer_norm_backward(dy, cache)
    found = layer_norm_backward(dy, cache, out=(out, None, None))
    assert_same(found, expected)


# Rows of four tiles, the last one short; samples of a row; rows shorter than a vector; few samples.
@pytest.mark.parametrize("shape", [(5, 75, 512), (300, 1, 300), (4, 3, 5), (3, 514, 512)])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(
    "layout", ["plain", "in place", "every second row", "columns first", "samples in the middle"]
)
@pytest.mark.usefixtures("threads")
def test_samples_dealt_out_to_threads(rng, layout, rounding, shape):
    of_x = np.float16 if shape[1] == 1 else np.float32
    x, dy = views(layout, *rng.standard_normal((2, *shape)).astype(of_x))
    gamma, beta = rng.standard_normal((2, shape[0], 1, shape[2])).astype(np.float32)
    some = range(0, shape[0], max(1, shape[0] // 5))
    expected = []
    for one in some:
        y, cache = layer_norm_forward(x[one], gamma[one, 0], beta[one, 0], rounding=rounding)
        expected.append((y, cache.mean, cache.rstd, *layer_norm_backward(dy[one], cache)))
    out = x.copy() if layout == "in place" else None
    y = layer_norm(x if out is None else out, gamma, beta, rounding=rounding, out=out)
    again, cache = layer_norm_forward(x, gamma, beta, rounding=rounding)
    assert again.tobytes() == y.tobytes()
    out = (dy, None, None) if layout == "in place" else None
    found = y, cache.mean, cache.rstd, *layer_norm_backward(dy, cache, out=out)
    for one, each in zip(some, expected, strict=True):
        for whole, part in zip(found, each, strict=True):
            assert whole[one].tobytes() == part.tobytes()


def test_hard_rows_of_one_sample_are_its_own(rng, backend):
    """Exponents, third words: of some samples alone. Of dy, found when dgamma has been added to."""
    x, dy = rng.standard_normal((2, 4, 2, 8))
    x[1] *= 1e300
    x[2] = 1e15 + np.arange(8) * 0.125
    dy[2, 1] *= 1e300
    gamma, old = rng.standard_normal((2, 4, 1, 8))
    y, cache = layer_norm_forward(x, gamma, backend=backend)
    how = {"wrt": ("x", "gamma"), "accumulate": True}
    found = layer_norm_backward(dy, cache, out=(None, old.copy(), None), **how)
    for i in range(4):
        expected, part = layer_norm_forward(x[i], gamma[i, 0], backend=backend)
        alone = layer_norm_backward(dy[i], part, out=(None, old[i, 0].copy(), None), **how)
        assert_same((y[i], cache.mean[i], cache.rstd[i]), (expected, part.mean, part.rstd))
        assert_same((found.dx[i], found.dgamma[i, 0]), alone[:2])


X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 4), r"gamma must have shape \(4,\) to match x.* over axis 2, or that after axes that "),
        ((5, 4), r" that broadcast against \(2, 3\), got \(5, 4\)"),
        ((1, 2, 3, 4), r"broadcast against \(2, 3\), got \(1, 2, 3, 4\)"),
        ((2, 3, 1), r"gamma must have shape \(4,\) to match x normalized over axis 2, got \(2, 3, 1\)"),
    ],
)  # fmt: skip
def test_leading_axes_that_do_not_broadcast_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(X, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("sum_axes", "error", "message"),
    [
        (2, ValueError, r"sum_axes must name axes of x.*not what is normalized, axis 2; got 2"),
        (3, ValueError, "which has 3 dimensions.*got 3"),
        ((0, -3), ValueError, "each once"),
        ("a", TypeError, "sum_axes must be an int or a tuple of ints, got 'a'"),
        (0, ValueError, "sum_axes must name no axis along which gamma varies, got 0"),
    ],
)
def test_wrong_sum_axes_are_refused(sum_axes, error, message):
    _, cache = layer_norm_forward(X, np.ones((2, 1, 4), np.float32))
    with pytest.raises(error, match=message):
        layer_norm_backward(X, cache, sum_axes=sum_axes)
