"""The short way of most calls, and results that are written into arrays given."""

import numpy as np
import pytest

from stablenorm import Gradients, layer_norm_backward, layer_norm_forward

SHAPE, N = (3, 5, 8), 8


def room(kind):
    """Return an array to write into."""
    if kind == "whole":
        return np.full(SHAPE, np.nan, np.float32)
    wide = np.full((3, 5, 16), np.nan, np.float32)
    return wide[..., ::2] if kind == "strided" else wide[..., :8]


@pytest.mark.parametrize("kind", ["whole", "strided", "gaps"])
@pytest.mark.parametrize("form", [Gradients._make, tuple, list], ids=["Gradients", "tuple", "list"])
def test_backward_into_arrays(rng, kind, form):
    x, dy = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    gamma, beta = rng.standard_normal((2, N)).astype(np.float32)
    _, cache = layer_norm_forward(x, gamma, beta)
    expected = layer_norm_backward(dy, cache._replace(backend="numpy"))
    for_gamma = np.empty(2 * N, np.float32)[:: 2 if kind == "strided" else 1][:N]
    out = form([room(kind), for_gamma, np.empty_like(beta)])
    found = layer_norm_backward(dy, cache, out=out)
    assert isinstance(found, Gradients)
    for one, there, other in zip(found, out, expected, strict=True):
        assert one is there
        np.testing.assert_array_equal(one, other)


PARAMETERS = {
    "both": lambda gamma, beta: (gamma, beta),
    "gamma": lambda gamma, _: (gamma, None),
    "beta": lambda _, beta: (None, beta),
    "none": lambda *_: (None, None),
    "at least float32": lambda *given: [v.astype(np.promote_types(v.dtype, "f4")) for v in given],
    "strided": lambda gamma, beta: (np.repeat(gamma, 2)[::2], np.repeat(beta, 3)[::3]),
}


@pytest.mark.parametrize("shape", [(5, 21), (2, 3, 64)])
@pytest.mark.parametrize("given", PARAMETERS)
def test_the_short_way_is_the_long_way(rng, dtype, shape, given):
    """An axis in a tuple, or a list for out, sends a call the long way: the same bits and cache."""
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = PARAMETERS[given](*(rng.standard_normal((2, shape[-1])).astype(dtype)))
    y, cache = layer_norm_forward(x, gamma, beta)
    other_y, other = layer_norm_forward(x, gamma, beta, axis=(-1,))
    assert y.tobytes() == other_y.tobytes()
    assert cache.x is x
    assert cache.norm.gamma is gamma
    assert cache.norm.beta is beta
    assert cache.axis == other.axis == (x.ndim - 1,)
    for one, there in zip(cache.statistics, other.statistics, strict=True):
        np.testing.assert_array_equal(one, there)
    found = layer_norm_backward(dy, cache)
    for one, there in zip(found, layer_norm_backward(dy, cache, out=[None] * 3), strict=True):
        assert (one is None) == (there is None)
        if one is not None:
            assert one.dtype == there.dtype
            assert one.tobytes() == there.tobytes()
    assert (found.dgamma is None, found.dbeta is None) == (gamma is None, beta is None)


def test_dx_over_a_float64_dy_of_one_row(rng, backend):
    """The sum of one row was the row of dy itself, which by then held dx."""
    x, dy = rng.standard_normal((2, 1, 5))
    _, cache = layer_norm_forward(x, beta=np.zeros(5), backend=backend)
    copy = dy.copy()
    found = layer_norm_backward(dy, cache, out=(dy, None, None), drstd=np.ones((1, 1)))
    assert found.dx is dy
    np.testing.assert_array_equal(found.dbeta, copy[0])


def test_dx_over_dy_where_a_row_is_left_to_the_reference():
    """Of these layouts NumPy cannot tell that they share memory: dgamma and dbeta saw dx for dy."""
    x = np.arange(8.0).reshape(2, 2, 2)
    x[0, 1, 0] = np.inf
    _, cache = layer_norm_forward(x.transpose(1, 0, 2), beta=np.zeros(2))
    dy = np.asfortranarray(np.ones((2, 2, 2)))
    assert layer_norm_backward(dy, cache, out=(dy, None, None)).dbeta.tolist() == [4, 4]
