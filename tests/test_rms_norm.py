"""RMS norm, and gamma stored less an offset: the contract, every bit of "nearest", what is refused."""

import numpy as np
import pytest
from norms import FINITE, NORMS, assert_right, compute

from stablenorm import (
    LayerNorm,
    RMSNorm,
    check_gradients,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.backends import BACKENDS
from stablenorm.formats import format_of
from stablenorm.testing.families import FAMILIES, Case, make_case
from stablenorm.types import bfloat16


def compiled(dtype, kind="rms", offset=0.0):
    """Return the backends; each dtype, with and without an offset, is kernels of its own: of each kind one."""
    with_offset = dtype == (np.float32 if kind == "rms" else np.float64)
    return {"backends": BACKENDS if (with_offset if offset else dtype != bfloat16) else ["numpy"]}


def hard(name, dtype, n, rng):
    """Return rows of which the mean square is hard."""
    top = format_of(dtype)
    x = rng.standard_normal((5, n))
    if name == "overflow":
        x = np.clip(x, -1, 1) * top.largest
    elif name == "underflow":
        x = x * 2.0 ** (top.emin + 2)
    elif name == "one dominates":
        x[:, n // 3] = top.largest / 4
    elif name == "equal":
        x = np.repeat(x[:, :1], n, axis=1)
    elif name == "zeros":
        x = np.maximum(x, 0.0) * [[1], [1], [1], [1], [0]]
    gamma, beta, dy = 1 + 0.1 * rng.standard_normal(n), np.zeros(n), rng.standard_normal((5, n))
    dy[:, ::3] = 0.0
    return Case(*(a.astype(dtype) for a in (x, gamma, beta)), 1e-6, dy.astype(dtype))


HARD = ["overflow", "underflow", "one dominates", "equal", "zeros"]


@pytest.mark.parametrize("n", [1, 2, 67, 300])
@pytest.mark.parametrize("name", HARD)
def test_hard_rows(name, n, dtype, rng):
    case = hard(name, dtype, n, rng)
    for each in (case, case._replace(eps=0.0)) if name != "zeros" else (case,):
        assert_right(each, "rms", **compiled(dtype))


@pytest.mark.parametrize("name", FINITE)
def test_families(name, dtype):
    for n in (1, 40):
        if FAMILIES[name].applies(dtype, n):
            case = make_case(name, dtype, n)
            if case.eps or (case.x != 0).any(axis=1).all():
                assert_right(case, "rms", **compiled(dtype))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("offset", [1.0, -0.7, 2.0**-60])
def test_gamma_less_an_offset(kind, offset, dtype, rng):
    case = hard("one dominates", dtype, 64, rng)
    gamma = rng.integers(-40, 40, 64) / 40 * 2.0 ** rng.integers(-12, 1, 64)
    if dtype.itemsize > 2:
        gamma[:20] *= 2.0**-70
    case, how = case._replace(gamma=gamma.astype(dtype)), compiled(dtype, kind, offset)
    assert_right(case, kind, gamma_offset=offset, **how)
    # Constant g, or nearly so: where products with a pair are rounded alike, dx is not 0.
    dy = np.resize([3, 1, 1 / 3, -1.1], (4, 1)).repeat(64, axis=1).astype(dtype)
    assert_right(case._replace(x=case.x[:4], dy=dy), kind, gamma_offset=offset, **how)


# In these dtypes there are kernels with an offset for other tests too.
@pytest.mark.parametrize(("forward", "dtype"), [(rms_norm, np.float32), (layer_norm, np.float64)])
def test_the_sum_with_the_offset_is_exact(forward, dtype, backend):
    """xhat is 1 and -1 here, and y is gamma, which one float64 loses beside 1."""
    x, beta = (np.array([[each, -each]], dtype) for each in (3.0, -1.0))
    gamma = np.array([2.0**-70, -(2.0**-71)], dtype)
    how = {"gamma_offset": 1.0, "rounding": "nearest", "backend": backend}
    assert forward(x, gamma, beta[0], 0.0, **how).tolist() == [[2.0**-70, 2.0**-71]]


def test_a_row_with_infinity_or_nan_is_nan_and_no_other(dtype, backend, rng):
    if dtype == bfloat16:
        # Kernels would only be compiled for this.
        backend = "numpy"
    case = hard("", dtype, 33, rng)
    case.x[0, 3], case.x[1, 5] = np.nan, np.inf
    for rounding in ("fast", "nearest"):
        found = compute(case, "rms", backend=backend, rounding=rounding)
        for name in ("y", "dx"):
            assert (
                np.isnan(found[name].astype(float)).all(axis=1).tolist() == [True] * 2 + [False] * 3
            )
        assert np.isnan(found["dgamma"].astype(float)).all()
        assert np.isfinite(found["dbeta"].astype(float)).all()


def test_gradients_by_finite_differences(rng):
    x, gamma, beta = rng.standard_normal((4, 9)), *rng.standard_normal((2, 9))
    forward = lambda *args: rms_norm_forward(*args, gamma_offset=0.5)
    assert check_gradients(forward, rms_norm_backward, (x, gamma, beta), rng=rng).passed


def test_the_statistics_are_one_number_per_row(rng):
    _, cache = rms_norm_forward(rng.standard_normal((4, 9)).astype(np.float32))
    assert cache.statistics.nbytes == 32
    assert cache.mean.tolist() == [[0.0]] * 4
    expected = (cache.x.astype(float) ** 2).mean(axis=1, keepdims=True) + 1e-5
    np.testing.assert_allclose(cache.rstd, expected**-0.5, rtol=1e-14)


def test_the_class(rng):
    x = rng.standard_normal((4, 9)).astype(np.float32)
    norm = RMSNorm(9, beta=True, gamma_offset=1.0, rounding="nearest")
    norm.parameters["gamma"][:] = rng.standard_normal(9)
    y, cache = rms_norm_forward(x, *norm.parameters.values(), gamma_offset=1.0, rounding="nearest")
    assert norm.forward(x).tobytes() == y.tobytes()
    assert norm.backward(y).tobytes() == rms_norm_backward(y, cache).dx.tobytes()
    assert list(norm.gradients) == ["gamma", "beta"]
    assert repr(norm) == "RMSNorm((9,), eps=1e-05, axis=-1)"
    assert LayerNorm(2, gamma_offset=1.0).parameters["gamma"].tolist() == [0.0, 0.0]


def test_what_is_refused():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"gamma must be given with gamma_offset=1\.0, got None"):
        layer_norm(x, gamma_offset=1.0)
    with pytest.raises(ValueError, match="gamma_offset must be finite, got inf"):
        rms_norm(x, x[0], gamma_offset=np.inf)
    with pytest.raises(TypeError, match="gamma_offset must be a real number, got 'a'"):
        rms_norm(x, x[0], gamma_offset="a")
    (_, layer), (_, rms) = layer_norm_forward(x), rms_norm_forward(x)
    with pytest.raises(
        ValueError, match="cache must be of layer_norm_forward; pass this one to rms"
    ):
        layer_norm_backward(x, rms)
    with pytest.raises(
        ValueError, match="cache must be of rms_norm_forward; pass this one to layer"
    ):
        rms_norm_backward(x, layer)
    with pytest.raises(TypeError, match=r"write y, cache = rms_norm_forward\(\.\.\.\)"):
        rms_norm_backward(x, (x, rms))
