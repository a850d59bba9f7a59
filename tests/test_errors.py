"""Messages say what was required, what came and the cure; a call that fails writes nothing."""

from functools import partial

import numpy as np
import pytest
from rationals import NAMES

import stablenorm as sn
from stablenorm import LayerNorm, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.memory import set_idle_limit
from stablenorm.oracle import exact_double_backward
from stablenorm.testing import make_case

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)
ROW = X[0, 0]
CACHE = layer_norm_forward(X, ROW, backend="numpy")[1]
RMS = sn.rms_norm_forward(X, backend="numpy")[1]
NEAREST = layer_norm_forward(X, ROW, rounding="nearest", backend="numpy")[1]
LEADING = layer_norm_forward(X, np.ones((2, 1, 4), np.float32), backend="numpy")[1]
OFFSET = {"gamma": np.ones(4)}
FAST = 'use rounding="fast"'


def backward(dy=X, cache=CACHE, **options):
    return layer_norm_backward(dy, cache, **options)


def jvp(cache=CACHE, tx=X, **options):
    return sn.layer_norm_jvp(tx, cache, **options)


def double_backward(cache=CACHE, tx=X, dy=X, **options):
    return sn.layer_norm_double_backward(tx, dy, cache, **options)


def layer(shape=4, **options):
    return LayerNorm(shape, **options).forward(X)


FORWARD = [
    ({"x": X.astype(np.int64)}, TypeError, "x must be float16, bfloat16, float32 or float64, got int64; pass np.asarray\\(x, np.float32\\)"),
    *(({"gamma": shape} | more, TypeError, r"normalized_shape has no place here, got .*8.*; write layer_norm\(x, gamma, beta, eps=1e-5\)")
      for shape in ((8,), 8, (3, 8)) for more in ({}, {"beta": ROW, "eps": ROW})),
    ({"gamma": 1e-5}, TypeError, "the second argument is gamma, an array, got 1e-05; eps is a keyword: write layer_norm"),
    ({"gamma": ROW, "beta": 1e-6}, TypeError, "the third argument is beta, an array, got 1e-06; eps is a keyword: write"),
    *(({"x": X.astype(kind)}, TypeError, f"got {np.dtype(kind)}") for kind in (bool, complex, object, np.longdouble)),
    ({"x": np.ma.masked_array(X)}, TypeError, "x must be a plain array, got a masked one"),
    ({"x": np.float32(1)}, ValueError, "axis must name axes of x, which has 0 dimensions, got -1"),
    ({"x": [[1.0, 2.0], [3.0]]}, ValueError, "x must be an array, or nested lists with rows of one"),
    ({"x": np.empty((3, 0), np.float32)}, ValueError, r"at least one element along axis 1, got shape \(3, 0\)"),
    ({"gamma": np.ones(5, np.float32)}, ValueError, r"gamma must have shape \(4,\) to match x normalized over axis 2, got \(5,\)"),
    ({"gamma": np.ones((4, 1), np.float32)}, ValueError, r"gamma must have shape \(4,\).*got \(4, 1\)"),
    ({"gamma": np.ones((5, 4), np.float32)}, ValueError, r"over axis 2, or that after axes that broadcast against \(2, 3\), got \(5, 4\)"),
    ({"gamma": np.ones((1, 2, 3, 4))}, ValueError, r"broadcast against \(2, 3\), got \(1, 2, 3, 4\)"),
    ({"gamma": np.ones(4, int)}, TypeError, "gamma must be float16.*got int64"),
    ({"beta": np.float32(1)}, ValueError, r"beta must have shape \(4,\).*got \(\)"),
    *(({"axis": axis}, ValueError, f"axis must name axes of x, which has 3 dimensions, got {axis}") for axis in (3, -4)),
    ({"axis": (0, -3)}, ValueError, r"each once, got \(0, -3\)"),
    ({"axis": ()}, ValueError, "at least one axis"),
    ({"axis": 1.0}, TypeError, "axis must be an int or a tuple of ints, got 1.0"),
    ({"axis": np.array([1, 2])}, TypeError, r"got array\(\[1, 2\]\); pass a tuple"),
    ({"axis": [1, 2]}, TypeError, r"got \[1, 2\]; pass a tuple"),
    *(({"eps": eps}, ValueError, f"eps must be finite and >= 0, got {said}")
      for eps, said in ((-1e-5, "-1e-05"), (np.nan, "nan"), (np.inf, "inf"), (10**400, "1000"))),
    *(({"eps": eps}, TypeError, f"eps must be a real number, got {said}")
      for eps, said in (("small", "'small'"), ("1e-5", "'1e-5'"), (np.complex64(1), ""), (None, "None"))),
    ({"gamma_offset": 1.0}, ValueError, r"gamma must be given with gamma_offset=1\.0, got None"),
    (OFFSET | {"gamma_offset": 10**400}, ValueError, "gamma_offset must be finite, got 1000"),
    (OFFSET | {"gamma_offset": "a"}, TypeError, "gamma_offset must be a real number, got 'a'"),
    ({"rounding": "exact"}, ValueError, 'rounding must be "fast" or "nearest", got \'exact\''),
    ({"rounding": X}, ValueError, 'rounding must be "fast" or "nearest", got array'),
    ({"backend": "torch"}, ValueError, "backend must be one of .*'numpy'.*, got 'torch'"),
    ({"residual": X[0]}, ValueError, r"residual must have shape \(2, 3, 4\), that of x, got \(3, 4\)"),
    ({"where": [[True], [True, False]]}, ValueError, "where must be .*unequal length"),
    ({"where": np.ones((2, 3, 1), int)}, TypeError, "bool, got int64; .* where=mask != 0"),
    ({"where": np.ma.array(X > 0, mask=X > 0)}, TypeError, "a plain array, got a masked one"),
    ({"where": X[..., 0] > 0}, ValueError, r"of x, \(2, 3, 4\), got \(2, 3\); for whole rows pass where\[\.\.\., None\]"),
    ({"where": X[0, :, :3] > 0}, ValueError, r"broadcast to the shape of x, \(2, 3, 4\), got \(3, 3\)"),
    ({"where": np.ones((5, *X.shape), bool)}, ValueError, r"broadcast to the shape of x.*got \(5, 2, 3, 4\)"),
    ({"where": np.arange(4) > 1, "rounding": "nearest"}, ValueError, FAST),
    ({"out": np.ma.masked_array(X, hard_mask=True)}, TypeError, "out must be a plain array"),
    ({"out": np.empty((2, 3), np.float32)}, ValueError, r"out must have shape \(2, 3, 4\), got \(2, 3\)"),
    ({"out": np.empty(X.shape, int)}, TypeError, "out must be float16, .* got int64"),
    ({"out": np.empty(X.shape, ">f4")}, TypeError, "out must have dtype float32, got >f4"),
    ({"out": [[0.0]]}, TypeError, "out must be a NumPy array to write into, got list"),
    ({"out": X, "residual": X}, ValueError, "out must not share memory with residual"),
]  # fmt: skip
BACKWARD = [
    ({"dy": X[:1]}, ValueError, r"that of the y of this cache, got \(1, 3, 4\); pass np.broadcast_to\(dy, \(2, 3, 4\)\)"),
    ({"dy": X.reshape(6, 4)}, ValueError, r"dy must have shape \(2, 3, 4\), .* got \(6, 4\); pass dy.reshape\(2, 3, 4\)"),
    ({"dy": X[..., :3]}, ValueError, "pass the gradient of that y"),
    ({"dy": X.astype(int)}, TypeError, "dy must be float16.*got int64"),
    ({"cache": RMS}, ValueError, "cache must be of layer_norm_forward; pass this one to rms"),
    ({"cache": None}, TypeError, r"must be the Cache .*got NoneType; write y, cache = layer_norm_forward\(\.\.\.\)"),
    ({"cache": (X, None, 1)}, TypeError, "cache must be the Cache .*got tuple; write y, cache = "),
    ({"cache": (X, CACHE)}, TypeError, "cache must be the Cache .*got tuple; this is all that layer_norm_forward"),
    ({"dy": CACHE, "cache": X}, TypeError, "cache must be the Cache .*got ndarray; the two are swapped"),
    ({"wrt": ("x", "bias")}, ValueError, "wrt must name some of 'x', 'gamma', 'beta', got 'bias'"),
    ({"wrt": "dx"}, ValueError, "got 'dx'; write wrt='x'"),
    ({"wrt": 3}, ValueError, "'beta', got 3"),
    ({"wrt": [X]}, ValueError, "wrt must name"),
    *(({"out": out}, TypeError, rf"out must have three .*got {said}; for dx alone pass out=\(dx, None, None\)")
      for out, said in ((3, "int"), (X.copy(), "ndarray"))),
    ({"out": (None, None)}, ValueError, "out must have three entries, for dx, dgamma and dbeta, got 2"),
    ({"out": (np.empty((2, 3), np.float32), None, None)}, ValueError, r"out.dx must have shape \(2, 3, 4\)"),
    ({"out": (None, np.empty(4, int), None)}, TypeError, "out.dgamma must be float16, .* got int64"),
    ({"out": (None, np.empty(3, np.float32), None)}, ValueError, r"out.dgamma must have shape \(4,\)"),
    *(({"out": out, "accumulate": True}, ValueError, "must be the array to add to with accumulate=True, got N")
      for out in (None, (None, None, np.ones(4, np.float32)), (None, None, None))),
    ({"dsum": X[:1]}, ValueError, r"dsum must have shape \(2, 3, 4\)"),
    ({"dsum": X, "out": (X, None, None), "dy": X.copy()}, ValueError, r"out\.dx must not share memory with"),
    ({"cache": NEAREST, "accumulate": True}, ValueError, FAST),
    ({"dy": X.astype(float)}, TypeError, r"dy must have dtype float32 or a narrower one, got float64; pass dy.astype\(x.dtype\)"),
    ({"dsum": X.astype(float)}, TypeError, r"dsum must have dtype float32 or a narrower one, got float64"),
    ({"sum_axes": 2}, ValueError, r"sum_axes must name axes of x.*not what is normalized, axis 2; got 2"),
    ({"sum_axes": 3}, ValueError, "which has 3 dimensions.*got 3"),
    ({"sum_axes": (0, -3)}, ValueError, "each once"),
    ({"sum_axes": "a"}, TypeError, "sum_axes must be an int or a tuple of ints, got 'a'"),
    ({"cache": LEADING, "sum_axes": 0}, ValueError, "sum_axes must name no axis along which gamma varies, got 0"),
]  # fmt: skip
SECOND_ORDER = [
    ({"cache": X}, TypeError, r"cache must be the Cache that layer_norm_forward returns, got ndarray; write"),
    ({"cache": RMS}, ValueError, r"cache must be of layer_norm_forward; pass this one to rms_norm_(jvp|double_backward)"),
    ({"cache": CACHE._replace(backend="cuda")}, TypeError, r"cache.x must be the array that the backend 'cuda' normalized, got ndarray"),
    ({"cache": NEAREST}, ValueError, r'cannot be combined with rounding="nearest".*use rounding="fast"'),
    ({"cache": LEADING}, ValueError, "cannot be combined with leading axes of gamma or beta.*; leave them out"),
    ({"tx": X[:1]}, ValueError, r"x must have shape \(2, 3, 4\), that of x, got \(1, 3, 4\)"),
    ({"tx": X.astype(int)}, TypeError, r"x must be float16.*got int64"),
]  # fmt: skip
HUGE, EXACT = np.full((2, 3), 1e308), sn.exact_layer_norm(np.array([[1.0, 2.0, 4.0]]))
ORACLE = [
    ({"where": np.ones((2, 3))}, TypeError, "where must be bool, got float64"),
    ({"where": np.ones((2, 2), bool)}, ValueError, r"where must broadcast .* \(2, 3\), got"),
    ({"residual": HUGE}, ValueError, r"x \+ residual must be finite.* inf"),
    ({"dsum": np.ones(3)}, ValueError, r"dsum must have shape \(2, 3\), got \(3,\)"),
    ({"accumulate": (np.ones(2), None)}, ValueError, r"dgamma must have shape \(3,\)"),
    ({"gamma_offset": np.inf}, ValueError, "gamma_offset must be finite, got inf"),
    ({"x": np.zeros((2, 3), int)}, TypeError, "x must be float16, .* got int64"),
    ({"x": np.float64(1.0)}, ValueError, r"x must have shape \(\.\.\., n\)"),
    ({"x": HUGE * [1, np.nan, 1]}, ValueError, "x must be finite.* got nan"),
    ({"eps": -1e-5}, ValueError, "eps must be finite and >= 0, got -1e-05"),
]
ONE_ARRAY, SINGLE = "args must be a tuple or list of at least one array", [np.ones(3)]
GRADIENTS = [
    ({"args": []}, ValueError, ONE_ARRAY),
    ({"args": np.ones(3)}, ValueError, ONE_ARRAY),
    ({"args": 2 * SINGLE, "names": ["a", "a"]}, ValueError, "names must be one name for each of 2"),
    ({"scales": []}, ValueError, "scales must have one entry for each of 1"),
    ({"scales": [-1]}, ValueError, "scales must be finite and > 0, got -1"),
    ({"args": [np.arange(3)]}, TypeError, r"args\[0\] must be float16, .* got int64"),
    ({"args": [np.array([1, np.nan])]}, ValueError, "must be finite"),
]
TABLE = [
    *((call, *row) for row in FORWARD for call in (layer_norm, layer_norm_forward)),
    *((backward, *row) for row in BACKWARD),
    *((call, *row) for row in SECOND_ORDER for call in (jvp, double_backward)),
    (double_backward, {"dy": X[0]}, ValueError, r"dy must have shape \(2, 3, 4\), that of x, got \(3, 4\)"),
    (double_backward, {"ddgamma": X}, ValueError, r"ddgamma must have shape \(4,\), that of gamma, got \(2,"),
    (double_backward, {"ddbeta": ROW}, ValueError, "ddbeta must be None, since this cache has no beta; pass"),
    (jvp, {"tbeta": ROW}, ValueError, "tbeta must be None"),
    (sn.rms_norm, {"gamma": ROW, "gamma_offset": np.inf}, ValueError, "gamma_offset must be finite, got inf"),
    (lambda x: sn.rms_norm_backward(x, CACHE), {}, ValueError, "cache must be of rms_norm_forward; pass this one to layer"),
    (lambda x: sn.rms_norm_backward(x, (x, RMS)), {}, TypeError, r"write y, cache = rms_norm_forward\(\.\.\.\)"),
    (lambda x: sn.rms_norm(x, ROW, 1e-6), {}, TypeError, r"third argument is beta.*write rms_norm\(x, gamma, eps=1e-5\)"),
    *((call, {"elementwise_affine": False}, TypeError, rf"^{name}\.__init__\(\) got an unexpected keyword")
      for name, call in (("LayerNorm", partial(LayerNorm, 4)), ("RMSNorm", partial(sn.RMSNorm, 4)))),
    (lambda x: LayerNorm(4)(x, mask=x), {}, TypeError, r"^LayerNorm\.forward\(\) got an unexpected keyword argument 'mask'"),
    (lambda x: sn.RMSNorm(4).backward(x, dz=x), {}, TypeError, r"^RMSNorm\.backward\(\) got an unexpected"),
    (lambda x: LayerNorm(4).backward(x), {}, ValueError, "call forward"),
    (layer, {"shape": 5}, ValueError, r"gamma must have shape \(4,\)"),
    (layer, {"shape": 5, "gamma": False, "beta": False}, ValueError, r"x must have lengths \(5,\) along axis -1, got \(4,\)"),
    (layer, {"shape": 0}, ValueError, "shape must be at least 1, got 0"),
    (layer, {"shape": ()}, ValueError, "shape must be the length of at least one axis"),
    (layer, {"shape": 2.5}, TypeError, "shape must be an int, got 2.5"),
    (layer, {"eps": -1}, ValueError, "eps must be finite and >= 0, got -1"),
    (layer, {"axis": (0, 1)}, ValueError, r"axis must be an int, or a tuple of as many"),
    (layer, {"shape": (3, 4), "axis": -1}, ValueError, r"as many as shape \(3, 4\), got -1"),
    (layer, {"dtype": np.int32}, TypeError, "dtype must be float16.*got int32"),
    *((sn.set_num_threads, {"count": count}, (ValueError, TypeError), f"count must be {said}")
      for count, said in ((0, "at least 1, got 0"), (-3, "at least 1, got -3"), (2.0, "an int, got 2.0"),
                          ("2", "an int, got '2'"), (None, "an int, got None"))),
    *((set_idle_limit, {"nbytes": bad}, error, rf"nbytes must be .*, got {bad!r}; ")
      for bad, error in ((-1, ValueError), (1e9, TypeError), ("1", TypeError))),
    *((sn.exact_layer_norm, {"x": HUGE} | arguments, *rest) for arguments, *rest in ORACLE),
    *((partial(EXACT.rounded, name, "f8"), {}, ValueError, f"dy must be .* for {name}") for name in NAMES[1:]),
    (EXACT.ulp_errors, {"y": np.ones(3)}, ValueError, r"y must have shape \(1, 3\), got"),
    (EXACT.check_contract, {"y": np.zeros((1, 3), int)}, TypeError, "y must be .* got int64"),
    (partial(EXACT.rounded, "z", "f4"), {}, ValueError, "name must be one of y, dx, dgamma, dbeta, ty"),
    (partial(exact_double_backward, *[HUGE] * 3), {"kind": "z"}, ValueError, "kind must be 'layer' or"),
    *((partial(sn.check_gradients, lambda x: (x, 0), lambda dy, _: (dy,)), {"args": SINGLE} | arguments, *rest)
      for arguments, *rest in GRADIENTS),
    (sn.diagnose, {"dtype": "int8"}, TypeError, "dtype must be float16.*got int8$"),
    (sn.diagnose, {"eps": -1.0}, ValueError, "eps must be finite and >= 0, got -1.0"),
    (sn.diagnose, {"top": -1}, ValueError, "top must be at least 0, got -1"),
    (sn.diagnose, {"x": np.ma.ones((2, 3))}, TypeError, "got a masked one"),
    (sn.diagnose, {"kind": "batch"}, ValueError, "kind must be layer or rms, got 'batch'"),
    *((partial(make_case, *arguments), {}, ValueError, message) for arguments, message in (
        (("F99", "float32", 8), "name must be one of F01, F02"),
        (("F21", "float16", 768), "F21 must have another dtype than float16, whose squares"),
        (("F19", "float32", 7), "F19 must have n >= 8, got 7"),
        (("F38", "float32", 8, 2), "F38 must have rows >= 4, got 2"))),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "error", "message"), TABLE, ids=range(len(TABLE)))
def test_a_call_says_what_it_needs(call, arguments, error, message):
    takes_x = call in (layer_norm, layer_norm_forward, sn.rms_norm, sn.diagnose)
    needs_x = takes_x or getattr(call, "__name__", "") == "<lambda>"
    with pytest.raises(error, match=message):
        call(**({"x": X} if needs_x else {}) | arguments)


def test_out_must_be_writeable_and_distinct():
    frozen = np.empty_like(X)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"out must be writeable, got a read-only array"):
        layer_norm(X, out=frozen)
    with pytest.raises(ValueError, match=r"out.dx must be writeable"):
        backward(out=(frozen, None, None))
    memory, strided = np.zeros(256, np.float32), np.lib.stride_tricks.as_strided
    # A stride of zero, sliding windows, and strides whose multiples meet.
    for strides in [(0, 0, 4), (4, 4, 4), (16, 8, 4), (12, 8, 8)]:
        with pytest.raises(ValueError, match=r"an element of its own for each result, got strides"):
            layer_norm(X, out=strided(memory, X.shape, strides))
    # Views without a common element are accepted, also if one axis lies between two steps of another.
    expected = layer_norm(X)
    for strides in [(4, 8, 24), (64, -16, 4), (4, 32, 8), (28, 8, 56)]:
        out = strided(memory[32:], X.shape, strides)
        np.testing.assert_array_equal(layer_norm(X, out=out), expected)
    # NumPy gives an array without elements strides of 0.
    x = np.empty((3, 0, 4), np.float32)
    y, cache = layer_norm_forward(x, ROW, ROW, out=np.empty_like(x))
    gradients = layer_norm_backward(x, cache, out=(np.empty_like(x), ROW + 1, ROW + 2))
    assert (y.shape, gradients.dgamma.any(), gradients.dbeta.any()) == (x.shape, False, False)


def shared(buffer):
    """Yield a call whose out shares memory with another array, the names of both, and the options."""
    x, dy = buffer[:48].reshape(2, *X.shape)
    cache = layer_norm_forward(x, buffer[48:52], np.zeros(4, np.float32))[1]
    near, dx, (dgamma, dbeta) = buffer[4:28].reshape(X.shape), np.empty_like(X), X[0, :2].copy()
    yield layer_norm, "x", {"x": x, "out": near}
    yield layer_norm_forward, "x", {"x": x, "out": x}
    yield layer_norm, "gamma", {"x": dy, "gamma": buffer[:4], "out": x}
    for out, one, other in (
        ((near, None, None), "dx", "x"),
        ((buffer[47:23:-1].reshape(X.shape), None, None), "dx", "dy"),
        ((None, buffer[:4], None), "dgamma", "x"),
        ((None, buffer[44:48], None), "dgamma", "dy"),
        ((None, None, buffer[48:52]), "dbeta", "gamma"),
        ((dx, dx.reshape(-1)[:4], dbeta), "dgamma", "out.dx"),
        ((dx, dgamma, dx.reshape(-1)[-4:]), "dbeta", "out.dx"),
        ((dx, dgamma, dgamma), "dbeta", "out.dgamma"),
    ):
        yield layer_norm_backward, f"{one} {other}", {"dy": dy, "cache": cache, "out": out}


def test_out_that_overlaps_is_refused_before_anything_is_written(rng):
    buffer = rng.standard_normal(52).astype(np.float32)
    before = buffer.copy()
    for call, names, options in shared(buffer):
        *one, other = names.split()
        message = ".".join(["out", *one]) + rf" must not share memory with {other}.*pass a copy"
        with pytest.raises(ValueError, match=message):
            call(**options)
        np.testing.assert_array_equal(buffer, before)
    # Interleaved views are no overlap.
    even, odd = (buffer[:48].reshape(4, 12)[:, at::2] for at in (0, 1))
    expected = layer_norm(even.copy())
    np.testing.assert_array_equal(layer_norm_forward(even, out=odd)[0], expected)
