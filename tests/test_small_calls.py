"""The short way of most calls; of few float32 also with results to write into."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import Gradients, layer_norm, layer_norm_backward, layer_norm_forward

SHAPE, N = (3, 5, 8), 8
SIZE = 3 * 5 * 8
FORMS = ["Gradients", "tuple", "list"]


@pytest.fixture
def case(rng):
    """x, dy, a gap, gamma and beta in one buffer, so that anything can overlap."""
    buffer = rng.standard_normal(2 * SIZE + 3 * N).astype(np.float32)
    x, dy = buffer[:SIZE].reshape(SHAPE), buffer[SIZE : 2 * SIZE].reshape(SHAPE)
    gamma, beta = buffer[-2 * N : -N], buffer[-N:]
    return buffer, x, gamma, beta, dy


def room(kind="whole"):
    """Return an array to write into."""
    if kind == "whole":
        return np.full(SHAPE, np.nan, np.float32)
    wide = np.full((3, 5, 16), np.nan, np.float32)
    return wide[..., ::2] if kind == "strided" else wide[..., :8]


@pytest.mark.parametrize("kind", ["whole", "strided", "gaps"])
def test_forward_into_an_array(case, kind):
    _, x, gamma, beta, _ = case
    expected = layer_norm(x, gamma, beta, backend="numpy")
    out = room(kind)
    assert layer_norm(x, gamma, beta, out=out) is out
    np.testing.assert_array_equal(out, expected)
    out = room(kind)
    y, cache = layer_norm_forward(x, gamma, beta, out=out)
    assert y is out
    assert cache.x is x
    np.testing.assert_array_equal(out, expected)


def test_forward_in_place(case):
    _, x, gamma, beta, _ = case
    expected = layer_norm(x, gamma, beta)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        layer_norm_forward(x, gamma, beta, out=x)
    assert layer_norm(x, gamma, beta, out=x) is x
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize(
    ("start", "name"), [(8, "x"), (SIZE - 8, "x"), (SIZE + 2 * N, "gamma"), (SIZE + 3 * N, "beta")]
)
def test_forward_outputs_may_not_overlap(case, start, name):
    buffer, x, gamma, beta, _ = case
    if name == "beta":
        gamma = gamma.copy()
    before = buffer.copy()
    out = buffer[start : start + SIZE].reshape(SHAPE)
    for function in (layer_norm, layer_norm_forward):
        with pytest.raises(ValueError, match=f"out must not share memory with {name}"):
            function(x, gamma, beta, out=out)
    np.testing.assert_array_equal(buffer, before)


def test_outputs_that_cannot_be_written(case):
    _, x, gamma, beta, dy = case
    out = room()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writeable"):
        layer_norm(x, gamma, beta, out=out)
    _, cache = layer_norm_forward(x, gamma, beta)
    with pytest.raises(ValueError, match=r"out.dx must be writeable"):
        layer_norm_backward(dy, cache, out=(out, np.empty_like(gamma), np.empty_like(gamma)))
    with pytest.raises(ValueError, match="out must have shape"):
        layer_norm(x, gamma, beta, out=np.empty((5, 3, 8), np.float32))
    with pytest.raises(TypeError, match="out must have dtype float32"):
        layer_norm(x, gamma, beta, out=np.empty(SHAPE))


@pytest.mark.parametrize("kind", ["whole", "strided", "gaps"])
@pytest.mark.parametrize("form", [Gradients, lambda *out: out, lambda *out: list(out)], ids=FORMS)
def test_backward_into_arrays(case, kind, form):
    _, x, gamma, beta, dy = case
    _, cache = layer_norm_forward(x, gamma, beta)
    expected = layer_norm_backward(dy, cache._replace(backend="numpy"))
    out = form(room(kind), np.empty(2 * N, np.float32)[:: 2 if kind == "strided" else 1][:N],
               np.empty_like(beta))  # fmt: skip
    found = layer_norm_backward(dy, cache, out=out)
    assert isinstance(found, Gradients)
    for one, there, other in zip(found, out, expected, strict=True):
        assert one is there
        np.testing.assert_array_equal(one, other)


def test_backward_in_place(case):
    _, x, gamma, beta, dy = case
    _, cache = layer_norm_forward(x, gamma, beta)
    expected = layer_norm_backward(dy, cache)
    found = layer_norm_backward(dy, cache, out=(dy, np.empty_like(gamma), np.empty_like(beta)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def overlapping(case, which):
    """Return results of which one shares memory with what it must not."""
    buffer, _, gamma, *_ = case
    dx, dgamma, dbeta = room(), np.empty(N, np.float32), np.empty(N, np.float32)
    part = {"x": buffer[:N], "dy": buffer[2 * SIZE - N : 2 * SIZE], "gamma": gamma}
    shifted = {"x": buffer[:SIZE], "dy": buffer[SIZE + 8 : 2 * SIZE + 8]}
    return {
        "dx dy": (shifted["dy"].reshape(SHAPE), dgamma, dbeta),
        "dx x": (shifted["x"].reshape(SHAPE), dgamma, dbeta),
        "dgamma x": (dx, part["x"], dbeta),
        "dgamma dy": (dx, part["dy"], dbeta),
        "dgamma gamma": (dx, part["gamma"], dbeta),
        "dbeta x": (dx, dgamma, part["x"]),
        "dbeta gamma": (dx, dgamma, part["gamma"]),
        "dgamma dx": (dx, dx.reshape(-1)[:N], dbeta),
        "dbeta dx": (dx, dgamma, dx.reshape(-1)[-N:]),
        "dbeta dgamma": (dx, dgamma, dgamma),
    }[which]


@pytest.mark.parametrize(
    "which",
    [
        *("dx dy", "dx x", "dgamma x", "dgamma dy", "dgamma gamma", "dbeta x", "dbeta gamma"),
        *("dgamma dx", "dbeta dx", "dbeta dgamma"),
    ],
)
def test_backward_outputs_may_not_overlap(case, which):
    buffer, x, gamma, beta, dy = case
    _, cache = layer_norm_forward(x, gamma, beta)
    before = buffer.copy()
    one, other = which.split()
    with pytest.raises(ValueError, match=rf"out.{one} must not share memory with (out\.)?{other}"):
        layer_norm_backward(dy, cache, out=overlapping(case, which))
    np.testing.assert_array_equal(buffer, before)


PARAMETERS = {
    "both": lambda gamma, beta: (gamma, beta),
    "gamma": lambda gamma, _: (gamma, None),
    "beta": lambda _, beta: (None, beta),
    "none": lambda *_: (None, None),
    "float32": lambda gamma, beta: (gamma.astype(np.float32), beta.astype(np.float32)),
    "of two types": lambda gamma, beta: (gamma.astype(np.float64), beta.astype(np.float16)),
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
    assert cache.gamma is gamma
    assert cache[2:4] == other[2:4] == (None if beta is None else beta.dtype, (x.ndim - 1,))
    for one, there in zip(cache.statistics, other.statistics, strict=True):
        np.testing.assert_array_equal(one, there)
    found = layer_norm_backward(dy, cache)
    for one, there in zip(found, layer_norm_backward(dy, cache, out=[None] * 3), strict=True):
        assert (one is None) == (there is None)
        if one is not None:
            assert one.dtype == there.dtype
            assert one.tobytes() == there.tobytes()
    assert (found.dgamma is None, found.dbeta is None) == (gamma is None, beta is None)


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("swapped", ["x", "gamma", "beta", "dy"])
def test_another_byte_order(rng, name, swapped, backend):
    names = ("x", "gamma", "beta", "dy")
    arrays = dict(zip(names, rng.standard_normal((4, 9)).astype(name), strict=True))
    *given, dy = arrays.values()
    y, cache = layer_norm_forward(*given, backend=backend)
    gradients = layer_norm_backward(dy, cache)
    arrays[swapped] = arrays[swapped].astype(np.dtype(name).newbyteorder())
    *given, dy = arrays.values()
    other, cache = layer_norm_forward(*given, backend=backend)
    for one, there in zip((y, *gradients), (other, *layer_norm_backward(dy, cache)), strict=True):
        assert one.dtype == there.dtype
        np.testing.assert_array_equal(one, there)


@pytest.mark.parametrize("dtype_of_x", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_shapes_that_do_not_match_are_refused(dtype_of_x):
    x = np.ones((2, 5), dtype_of_x)
    with pytest.raises(ValueError, match=r"gamma must have shape \(5,\)"):
        layer_norm(x, np.ones(4, dtype_of_x))
    with pytest.raises(ValueError, match=r"beta must have shape \(5,\)"):
        layer_norm(x, None, np.ones((1, 5), dtype_of_x))
    _, cache = layer_norm_forward(x)
    with pytest.raises(ValueError, match=r"dy must have shape \(2, 5\)"):
        layer_norm_backward(np.ones((5, 2), dtype_of_x), cache)
    with pytest.raises(ValueError, match="has 0 dimensions"):
        layer_norm(dtype_of_x(1))
    with pytest.raises(ValueError, match="has 0 dimensions"):
        layer_norm(np.ones((), dtype_of_x))
