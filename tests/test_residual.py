"""residual= on the forwards and dsum= on the backward: s = x + r is normalized, dx has dsum added."""

import itertools

import numpy as np
import pytest
from norms import FINITE, assert_right, assert_same

from stablenorm import (
    check_gradients,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from stablenorm.backends import BACKENDS
from stablenorm.reference import add
from stablenorm.testing import FAMILIES, make_case
from stablenorm.types import bfloat16

# Of bfloat16, kernels would only be compiled for this: they are those of float16 but for conversions.
EACH = [*itertools.product([np.float16, np.float32, np.float64], BACKENDS), (bfloat16, "numpy")]


def draw(rng, dtype, shape=(3, 5, 37)):
    """Return x, residual, gamma, beta, dy and dsum."""
    parts = [rng.standard_normal(shape).astype(dtype) for _ in range(4)]
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return parts[0], parts[1], gamma, beta, parts[2], parts[3]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(("dtype", "backend"), EACH)
def test_it_is_the_norm_of_the_sum(rng, dtype, rounding, backend):
    x, residual, gamma, beta, dy, _ = draw(rng, dtype)
    how = {"rounding": rounding, "backend": backend}
    y, cache = layer_norm_forward(x, gamma, beta, residual=residual, **how)
    s = x + residual
    expected, other = layer_norm_forward(s, gamma, beta, **how)
    assert cache.x.tobytes() == s.tobytes()
    assert y.tobytes() == expected.tobytes()
    assert layer_norm(x, gamma, beta, residual=residual, **how).tobytes() == y.tobytes()
    assert_same(layer_norm_backward(dy, cache), layer_norm_backward(dy, other))


def test_a_sum_of_two_dtypes_is_rounded_once():
    """1 + 2^-8 is a midpoint of bfloat16, which float64 would reach from 2^-130 above it."""
    x = np.array([2.0**-130, -(2.0**-130), 3.0]).astype(bfloat16)
    residual = np.array([1 + 2.0**-8, 1 + 2.0**-8, 5.0], np.float32)
    _, cache = layer_norm_forward(x, residual=residual)
    assert cache.x.astype(float).tolist() == [1 + 2.0**-7, 1.0, 8.0]
    wide = np.array([2.0**-80, 0.0, 1.0])
    _, cache = layer_norm_forward(np.array([1 + 2.0**-23, 0.5, 2.0], np.float32), residual=wide)
    assert cache.x.dtype == np.float32
    total = add(
        np.ones((1, 1), np.float32), np.array([[2.0**-24 + 2.0**-70]]), np.ones((1, 1), "f4")
    )
    assert total[0, 0] == 1 + 2.0**-23


@pytest.mark.parametrize(
    ("dtype", "other", "backend"),
    [
        (np.float16, bfloat16, "numba"),
        (np.float16, bfloat16, "numpy"),
        (bfloat16, np.float16, "numpy"),
    ],
)
def test_float16_and_bfloat16_are_added(rng, dtype, other, backend):
    """NumPy has no dtype for both of them: this was an error of its own."""
    # With gamma and beta, kernels that other tests have as well.
    x, residual, gamma, beta, dy, dsum = (each.astype(dtype) for each in draw(rng, other))
    residual, dsum = residual.astype(other), dsum.astype(other)
    where = np.arange(5)[:, None] < 3
    how = {"residual": residual, "where": where, "backend": backend}
    _, cache = layer_norm_forward(x, gamma, beta, **how)
    s = (x.astype(float) + residual.astype(float)).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(cache.x, s)
    dx = layer_norm_backward(dy, cache, dsum=dsum).dx
    np.testing.assert_array_equal(dx[:, 3:], dsum[:, 3:].astype(np.float32).astype(dtype))


def test_finite_differences_find_both_gradients(rng):
    x, residual, gamma, beta, _, _ = draw(rng, np.float64, (4, 9))

    def forward(x, residual, gamma, beta):
        return layer_norm_forward(x, gamma, beta, residual=residual)

    def backward(dy, cache):
        dx, dgamma, dbeta = layer_norm_backward(dy, cache)
        return dx, dx, dgamma, dbeta

    assert check_gradients(forward, backward, (x, residual, gamma, beta), rng=rng).passed


@pytest.mark.parametrize(("dtype", "backend"), [each for each in EACH if each[0] != np.float64])
@pytest.mark.parametrize("sum_dtype", [None, np.float64])
def test_dsum_is_added_before_dx_is_rounded(rng, dtype, sum_dtype, backend):
    x, residual, gamma, beta, dy, dsum = draw(rng, dtype, (7, 41))
    dsum = dsum.astype(sum_dtype or dtype)
    _, cache = layer_norm_forward(x, gamma, beta, residual=residual, backend=backend)
    found = layer_norm_backward(dy, cache, dsum=dsum)
    wide = [
        None if each is None else each.astype(np.float64) for each in (cache.x, gamma, beta, dy)
    ]
    _, exact = layer_norm_forward(*wide[:3], backend="numpy")
    expected = layer_norm_backward(wide[3], exact).dx + dsum.astype(np.float64)
    # All but what is nearly a midpoint.
    assert (found.dx == expected.astype(dtype)).mean() > 0.99
    assert_same(found[1:], layer_norm_backward(dy, cache)[1:])


def test_what_does_not_fit_is_refused(rng):
    x, residual, gamma, beta, dy, dsum = draw(rng, np.float32, (4, 8))
    with pytest.raises(
        ValueError, match=r"residual must have shape \(4, 8\), that of x, got \(8,\)"
    ):
        layer_norm_forward(x, gamma, residual=residual[0])
    with pytest.raises(ValueError, match="out must not share memory with residual"):
        layer_norm_forward(x, gamma, residual=residual, out=residual)
    _, cache = layer_norm_forward(x, gamma, beta, residual=residual)
    with pytest.raises(ValueError, match=r"dsum must have shape \(4, 8\)"):
        layer_norm_backward(dy, cache, dsum=dsum[:, :4])
    with pytest.raises(ValueError, match=r"out\.dx must not share memory with dsum"):
        layer_norm_backward(dy, cache, dsum=dsum, out=(dsum, None, None))


def test_y_may_overwrite_x_which_is_no_longer_needed(rng):
    x, residual, gamma, beta, _, _ = draw(rng, np.float32, (300, 40))
    expected, _ = layer_norm_forward(x, gamma, beta, residual=residual)
    y, _ = layer_norm_forward(x, gamma, beta, residual=residual, out=x)
    assert y is x
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", FINITE)
def test_dsum_keeps_the_contract(name, dtype):
    family = FAMILIES[name]
    if not family.applies(dtype, 24):
        return
    case = make_case(name, dtype, 24, max(5, family.smallest_rows))
    rng = np.random.default_rng(3)
    dsum = (rng.standard_normal(case.x.shape) * 2.0 ** rng.integers(-9, 9)).astype(dtype)
    # Of 16 bits, kernels would only be compiled for this: of float16 those of fast.
    for rounding, narrow in (("fast", np.float16), ("nearest", None)):
        backends = BACKENDS if dtype.itemsize > 2 or dtype == narrow else ["numpy"]
        how = {"roundings": [rounding], "backends": backends}
        assert_right(case, dsum=dsum, names=["dx"], **how)
