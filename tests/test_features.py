"""What single keywords do beside the table of test_families.py: regressions, and what is refused."""

from functools import partial

import numpy as np
import pytest
from norms import NORMS, SECOND_ORDER, assert_right

from stablenorm import (
    check_gradients,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.testing.families import Case
from stablenorm.types import bfloat16

X = np.ones((4, 8), np.float32)


def add(dy, cache, old):
    """Return dgamma and dbeta, added to copies of `old`."""
    out = [None, *(each.copy() for each in old)]
    found = layer_norm_backward(dy, cache, wrt=("gamma", "beta"), out=out, accumulate=True)
    assert all(one is there for one, there in zip(found, out, strict=True))
    return out[1:]


# ---- accumulate ----


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_an_old_value_that_is_not_finite_spoils_its_column_alone(rng, rounding, dtype, backend):
    x, dy = rng.standard_normal((2, 7, 5)).astype(dtype)
    ones = np.ones(5, dtype)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend, rounding=rounding)
    clean = add(dy, cache, [ones, ones])
    old = ones.copy()
    old[:3] = np.inf, -np.inf, -np.nan
    for total, expected in zip(add(dy, cache, [old, old]), clean, strict=True):
        assert not np.isfinite(total[:3]).any()
        if rounding == "nearest":
            # Of the one bit pattern that NaN has there.
            one = np.array([np.inf, -np.inf, np.nan]).astype(dtype)
            assert total[:3].tobytes() == one.tobytes()
        assert total[3:].tobytes() == expected[3:].tobytes()


# ---- residual and dsum ----


def test_a_sum_of_two_dtypes_is_rounded_once():
    """1 + 2^-8 is a midpoint of bfloat16, which float64 would reach from 2^-130 above it."""
    x = np.array([2.0**-130, -(2.0**-130), 3.0]).astype(bfloat16)
    residual = np.array([1 + 2.0**-8, 1 + 2.0**-8, 5.0], np.float32)
    _, cache = layer_norm_forward(x, residual=residual)
    assert cache.x.astype(float).tolist() == [1 + 2.0**-7, 1.0, 8.0]
    x, wide = np.array([1.0, 0.5, 2.0], np.float32), np.array([2.0**-24 + 2.0**-70, 0.0, 1.0])
    _, cache = layer_norm_forward(x, residual=wide)
    assert (cache.x.dtype, cache.x[0]) == (np.float32, 1 + 2.0**-23)


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


# ---- gamma_offset ----


# In these dtypes there are kernels with an offset for other tests too.
@pytest.mark.parametrize(("kind", "dtype"), [("rms", np.float32), ("layer", np.float64)])
def test_gamma_less_an_offset(kind, dtype, rng):
    """Constant g, or nearly so: where products with a pair are rounded alike, dx is not 0."""
    x, dy = rng.standard_normal((4, 64)), np.resize([3, 1, 1 / 3, -1.1], (4, 1)).repeat(64, axis=1)
    gamma = rng.integers(-40, 40, 64) / 40 * 2.0 ** rng.integers(-12, 1, 64)
    gamma[:20] *= 2.0**-70
    case = (each.astype(dtype) for each in (x, gamma, gamma, dy))
    x, gamma, beta, dy = case
    for offset in (1.0, -0.7, 2.0**-60):
        assert_right(Case(x, gamma, beta, 1e-6, dy), kind, gamma_offset=offset)


@pytest.mark.parametrize(("forward", "dtype"), [(rms_norm, np.float32), (layer_norm, np.float64)])
def test_the_sum_with_the_offset_is_exact(forward, dtype, backend):
    """xhat is 1 and -1 here, and y is gamma, which one float64 loses beside 1."""
    x, beta = (np.array([[each, -each]], dtype) for each in (3.0, -1.0))
    gamma = np.array([2.0**-70, -(2.0**-71)], dtype)
    how = {"gamma_offset": 1.0, "rounding": "nearest", "backend": backend}
    assert forward(x, gamma, beta[0], 0.0, **how).tolist() == [[2.0**-70, 2.0**-71]]


# ---- each keyword by finite differences ----


def joined(y, cache):
    return np.concatenate([y, cache.mean, cache.rstd], axis=-1), cache


def both(gradients):
    """dx is the gradient of the residual as well."""
    return gradients.dx, gradients.dx, *gradients[1:]


def by_keyword(kind, rng):
    """Yield functions and arguments, of which the last two are gamma and beta."""
    forward, backward, _ = NORMS[kind]
    double_backward, where = SECOND_ORDER[kind][1], rng.random((4, 9)) < 0.6
    x, dy = rng.standard_normal((2, 4, 9))
    gamma, beta = rng.standard_normal((2, 9))
    yield partial(forward, gamma_offset=0.5), backward, (x, gamma, beta)
    of_sum = lambda x, r, *given: forward(x, *given, residual=r)
    yield of_sum, lambda dy, cache: both(backward(dy, cache)), (x, dy, gamma, beta)
    of_mean = (lambda dy: {"dmean": dy[:, -2:-1]}) if kind == "layer" else lambda _: {}
    yield (
        lambda *given: joined(*forward(*given, where=where)),
        lambda dy, c: backward(dy[:, :-2], c, **of_mean(dy), drstd=dy[:, -1:]),
        (x, gamma, beta),
    )
    x3, lead = rng.standard_normal((2, 3, 5)), rng.standard_normal((2, 1, 5))
    yield forward, backward, (x3, lead, rng.standard_normal((3, 5)))
    # The double backward: of dx, and of dgamma.
    for output in (0, 1):

        def run(dy, x, gamma, output=output):
            _, cache = forward(x, gamma, eps=1e-3)
            return backward(dy, cache)[output], (dy, cache)

        def gradients(cotangent, kept, output=output):
            ddx, more = (np.zeros_like(dy), {"ddgamma": cotangent}) if output else (cotangent, {})
            return double_backward(ddx, *kept, **more)

        yield run, gradients, (dy, x, gamma)


@pytest.mark.parametrize("kind", NORMS)
def test_finite_differences_find_every_gradient(kind, rng):
    for forward, backward, args in by_keyword(kind, rng):
        report = check_gradients(forward, backward, args, rng=rng)
        assert report.verdict == "PASS", report


# ---- what is refused ----

ONES = layer_norm_forward(X, X[0], X[0], backend="numpy")[1]
RMS = rms_norm_forward(X, backend="numpy")[1]
REFUSED = [
    (lambda: layer_norm_forward(X, residual=X[0]), ValueError,
     r"residual must have shape \(4, 8\), that of x, got \(8,\)"),
    (lambda: layer_norm_forward(X, residual=X, out=X), ValueError,
     "out must not share memory with residual"),
    (lambda: layer_norm_backward(X, ONES, dsum=X[:, :4]), ValueError, r"dsum must have shape \(4, 8\)"),
    (lambda: layer_norm_backward(X.copy(), ONES, dsum=X, out=(X, None, None)), ValueError,
     r"out\.dx must not share memory with"),
    *((lambda out=out: layer_norm_backward(X, ONES, out=out, accumulate=True), ValueError,
       "must be the array to add to with accumulate=True, got N")
      for out in (None, (None, np.ones(8, np.float32), None), (None, None, None))),
    (lambda: layer_norm(X, gamma_offset=1.0), ValueError,
     r"gamma must be given with gamma_offset=1\.0, got None"),
    (lambda: rms_norm(X, X[0], gamma_offset=np.inf), ValueError, "gamma_offset must be finite, got inf"),
    (lambda: rms_norm(X, X[0], gamma_offset="a"), TypeError, "gamma_offset must be a real number, got 'a'"),
    (lambda: layer_norm_backward(X, RMS), ValueError,
     "cache must be of layer_norm_forward; pass this one to rms"),
    (lambda: rms_norm_backward(X, ONES), ValueError,
     "cache must be of rms_norm_forward; pass this one to layer"),
    (lambda: rms_norm_backward(X, (X, RMS)), TypeError, r"write y, cache = rms_norm_forward\(\.\.\.\)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
