"""Each message: what was required, what came, the cure; and nothing written by a failed call."""

import numpy as np
import pytest

from stablenorm import LayerNorm, layer_norm, layer_norm_backward, layer_norm_forward

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)

BAD_FORWARD = [
    ({"x": X.astype(np.int64)}, TypeError, "x must be float16, bfloat16, float32 or float64, got int64; pass np.asarray\\(x, np.float32\\)"),
    ({"gamma": (8,)}, TypeError, "got int64; pass np.asarray\\(gamma, np.float32\\). If it is PyTorch's normalized_shape, leave it out"),
    ({"x": X.astype(bool)}, TypeError, "got bool"),
    ({"x": X.astype(complex)}, TypeError, "got complex128"),
    ({"x": X.astype(object)}, TypeError, "got object"),
    ({"x": X.astype(np.longdouble)}, TypeError, "got float128|got longdouble"),
    ({"x": np.ma.masked_array(X)}, TypeError, "x must be a plain array, got a masked one"),
    ({"x": np.float32(1)}, ValueError, "axis must name axes of x, which has 0 dimensions, got -1"),
    ({"x": np.empty((3, 0), np.float32)}, ValueError, r"at least one element along axis 1, got shape \(3, 0\)"),
    ({"gamma": np.ones(5, np.float32)}, ValueError, r"gamma must have shape \(4,\) to match x normalized over axis 2, got \(5,\)"),
    ({"gamma": np.ones((4, 1), np.float32)}, ValueError, r"gamma must have shape \(4,\).*got \(4, 1\)"),
    ({"beta": np.float32(1)}, ValueError, r"beta must have shape \(4,\).*got \(\)"),
    ({"gamma": np.ones(4, int)}, TypeError, "gamma must be float16.*got int64"),
    ({"axis": 3}, ValueError, "axis must name axes of x, which has 3 dimensions, got 3"),
    ({"axis": (0, -3)}, ValueError, r"each once, got \(0, -3\)"),
    ({"axis": ()}, ValueError, "at least one axis"),
    ({"axis": 1.0}, TypeError, "axis must be an int or a tuple of ints, got 1.0"),
    ({"eps": -1e-5}, ValueError, "eps must be finite and >= 0, got -1e-05"),
    ({"eps": np.nan}, ValueError, "eps must be finite and >= 0, got nan"),
    ({"eps": np.inf}, ValueError, "eps must be finite and >= 0, got inf"),
    ({"eps": 10**400}, ValueError, "eps must be finite and >= 0, got 1000"),
    ({"gamma": np.ones(4), "gamma_offset": 10**400}, ValueError, "gamma_offset must be finite, got 1000"),
    ({"eps": "small"}, TypeError, "eps must be a real number, got 'small'"),
    ({"eps": "1e-5"}, TypeError, "eps must be a real number, got '1e-5'"),
    ({"eps": np.complex64(1)}, TypeError, "eps must be a real number, got"),
    ({"eps": None}, TypeError, "eps must be a real number, got None"),
    ({"x": [[1.0, 2.0], [3.0]]}, ValueError, "x must be an array, or nested lists with rows of one"),
    ({"axis": np.array([1, 2])}, TypeError, r"got array\(\[1, 2\]\); pass a tuple"),
    ({"axis": [1, 2]}, TypeError, r"got \[1, 2\]; pass a tuple"),
    ({"out": np.ma.masked_array(X, hard_mask=True)}, TypeError, "out must be a plain array"),
    ({"rounding": "exact"}, ValueError, 'rounding must be "fast" or "nearest", got \'exact\''),
    ({"backend": "torch"}, ValueError, "backend must be one of .*'numpy'.*, got 'torch'"),
    ({"out": np.empty((2, 3), np.float32)}, ValueError, r"out must have shape \(2, 3, 4\), got \(2, 3\)"),
    ({"out": np.empty(X.shape)}, TypeError, "out must have dtype float32, got float64"),
    ({"out": [[0.0]]}, TypeError, "out must be a NumPy array to write into, got list"),
]  # fmt: skip


@pytest.mark.parametrize("function", [layer_norm, layer_norm_forward])
@pytest.mark.parametrize(("arguments", "error", "message"), BAD_FORWARD)
def test_forward_says_what_it_needs(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(**{"x": X, **arguments})


def test_out_must_be_writeable_and_distinct():
    frozen = np.empty_like(X)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"out must be writeable, got a read-only array"):
        layer_norm(X, out=frozen)
    _, cache = layer_norm_forward(X)
    with pytest.raises(ValueError, match=r"out.dx must be writeable"):
        layer_norm_backward(X, cache, out=(frozen, None, None))
    memory, strided = np.zeros(256, np.float32), np.lib.stride_tricks.as_strided
    # By a stride of zero, by windows that slide, and by steps that meet.
    for strides in [(0, 0, 4), (4, 4, 4), (16, 8, 4), (12, 8, 8)]:
        with pytest.raises(ValueError, match=r"an element of its own for each result, got strides"):
            layer_norm(X, out=strided(memory, X.shape, strides))
    # Whatever has none in common is taken, also where one axis lies between two of another.
    expected = layer_norm(X)
    for strides in [(4, 8, 24), (64, -16, 4), (4, 32, 8), (28, 8, 56)]:
        out = strided(memory[32:], X.shape, strides)
        np.testing.assert_array_equal(layer_norm(X, out=out), expected)


def test_out_that_overlaps_is_refused_before_anything_is_written():
    buffer = np.arange(60, dtype=np.float32)
    before = buffer.copy()
    x, shifted = buffer[:24].reshape(4, 6), buffer[6:30].reshape(4, 6)
    with pytest.raises(ValueError, match=r"out must not share memory with x.*pass a copy"):
        layer_norm(x, out=shifted)
    with pytest.raises(ValueError, match=r"out must not share memory with x"):
        layer_norm_forward(x, out=x)
    with pytest.raises(ValueError, match=r"out must not share memory with gamma"):
        layer_norm(buffer[30:54].reshape(4, 6), gamma=buffer[:6], out=x)
    np.testing.assert_array_equal(buffer, before)
    # Interleaved views are no overlap.
    even, odd = (buffer.reshape(5, 12)[:, at::2] for at in (0, 1))
    expected = layer_norm(even.copy())
    np.testing.assert_array_equal(layer_norm_forward(even, out=odd)[0], expected)


BAD_BACKWARD = [
    ({"dy": X[:1]}, ValueError, r"dy must have shape \(2, 3, 4\) to match the y of this cache, got \(1, 3, 4\)"),
    ({"dy": X.astype(int)}, TypeError, "dy must be float16.*got int64"),
    ({"wrt": ("x", "bias")}, ValueError, "wrt must name some of 'x', 'gamma', 'beta', got 'bias'"),
    ({"out": (None, None)}, ValueError, "out must have three entries, for dx, dgamma and dbeta, got 2"),
    ({"out": (np.empty((2, 3), np.float32), None, None)}, ValueError, r"out.dx must have shape \(2, 3, 4\)"),
    ({"out": (None, np.empty(4), None)}, TypeError, "out.dgamma must have dtype float32, got float64"),
    ({"out": (None, None, np.empty(3, np.float32))}, ValueError, r"out.dbeta must have shape \(4,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_BACKWARD)
def test_backward_says_what_it_needs(arguments, error, message):
    cache = layer_norm_forward(X, np.ones(4, np.float32), np.zeros(4, np.float32))[1]
    with pytest.raises(error, match=message):
        layer_norm_backward(**{"dy": np.ones_like(X), "cache": cache, **arguments})


def overlapping(buffer):
    """Return out of which one shares memory with what it must not, by the names of both."""
    dx, dgamma, dbeta = np.empty_like(X), *np.empty((2, 4), np.float32)
    return {
        "dx x": (buffer[4:28].reshape(X.shape), None, None),
        "dx dy": (buffer[47:23:-1].reshape(X.shape), None, None),
        "dgamma x": (None, buffer[:4], None),
        "dgamma dy": (None, buffer[44:48], None),
        "dbeta gamma": (None, None, buffer[48:52]),
        "dgamma dx": (dx, dx.reshape(-1)[:4], dbeta),
        "dbeta dx": (dx, dgamma, dx.reshape(-1)[-4:]),
        "dbeta dgamma": (dx, dgamma, dgamma),
    }


@pytest.mark.parametrize("which", overlapping(np.empty(52)))
def test_backward_outputs_may_not_overlap(rng, which):
    buffer = rng.standard_normal(52).astype(np.float32)
    before = buffer.copy()
    x, dy = buffer[:48].reshape(2, *X.shape)
    cache = layer_norm_forward(x, buffer[48:], np.zeros(4, np.float32))[1]
    one, other = which.split()
    with pytest.raises(ValueError, match=rf"out.{one} must not share memory with (out\.)?{other}"):
        layer_norm_backward(dy, cache, out=overlapping(buffer)[which])
    np.testing.assert_array_equal(buffer, before)


BAD_CALLS = [
    (lambda: LayerNorm(4).backward(X), ValueError, "call forward"),
    (lambda: layer_norm_backward(X, layer_norm_forward(X)[1], wrt=3), ValueError, "'beta', got 3"),
    (lambda: layer_norm_backward(X, layer_norm_forward(X)[1], wrt=[X]), ValueError, "wrt must name"),
    (lambda: layer_norm_backward(X, layer_norm_forward(X)[1], out=3), TypeError, "out must have three .*int"),
    (lambda: layer_norm(X, where=[[True], [True, False]]), ValueError, "where must be .*unequal length"),
    (lambda: layer_norm(X, rounding=X), ValueError, 'rounding must be "fast" or "nearest", got array'),
    (lambda: LayerNorm(5).forward(X), ValueError, r"gamma must have shape \(4,\)"),
    (
        lambda: LayerNorm(5, gamma=False, beta=False).forward(X), ValueError,
        r"x must have lengths \(5,\) along axis -1, got \(4,\)",
    ),
    (lambda: LayerNorm(0), ValueError, "shape must be at least 1, got 0"),
    (lambda: LayerNorm(()), ValueError, "shape must be the length of at least one axis"),
    (lambda: LayerNorm(2.5), TypeError, "shape must be an int, got 2.5"),
    (lambda: LayerNorm(3, eps=-1), ValueError, "eps must be finite and >= 0, got -1"),
    (lambda: LayerNorm(3, rounding="up"), ValueError, 'rounding must be "fast" or "nearest", got \'up\''),
    (lambda: LayerNorm(3, axis=(0, 1)), ValueError, r"axis must be an int, or a tuple of as many"),
    (lambda: LayerNorm(4, dtype=np.int32), TypeError, "dtype must be float16.*got int32"),
    (lambda: LayerNorm(4, gamma_offset="a"), TypeError, "gamma_offset must be a real number, got 'a'"),
    (lambda: LayerNorm(4, gamma_offset=np.inf), ValueError, "gamma_offset must be finite, got inf"),
    (lambda: LayerNorm((3, 4), axis=-1), ValueError, r"as many as shape \(3, 4\), got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_calls_say_what_they_need(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_out_without_elements_is_distinct_whatever_its_strides(shape):
    # NumPy gives an array without elements strides of 0.
    x, gamma = np.empty(shape, np.float32), np.ones(5, np.float32)
    assert 0 in np.empty_like(x).strides
    assert layer_norm(x, gamma, gamma, out=np.empty_like(x)).shape == shape
    out = np.empty_like(x)
    y, cache = layer_norm_forward(x, gamma, gamma, out=out)
    assert y is out
    gradients = layer_norm_backward(x, cache, out=(np.empty_like(x), gamma + 1, gamma + 2))
    assert not gradients.dgamma.any()
    assert not gradients.dbeta.any()


def test_a_layer_normalizes_the_last_axes_by_default(rng):
    x = rng.standard_normal((3, 8, 16))
    y = LayerNorm((8, 16)).forward(x)
    np.testing.assert_array_equal(y, LayerNorm((8, 16), axis=(1, 2)).forward(x))
