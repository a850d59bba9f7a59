"""What users of other layer norms reported, as rows that must come out right here."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import make_case
from stablenorm.testing.published import PUBLISHED


def assert_contract(x, gamma, beta, eps, dy, backend):
    """Judge every output of rows (rows, n)."""
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend=backend)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    exact = exact_layer_norm(x, gamma, beta, eps, dy)
    results = exact.check_contract(y=y, dx=dx, dgamma=dgamma, dbeta=dbeta)
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}: {row.title}")
def test_published_rows_keep_the_contract(row, rng, dtype, backend):
    if not row.fits(dtype):
        pytest.skip(f"{dtype} cannot hold {row.source}")
    dy = rng.standard_normal(row.x.shape).astype(dtype)
    assert_contract(*row.arguments(dtype), dy, backend)


KNOWN = [row for row in PUBLISHED if row.y is not None]


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: f"{row.source}: {row.title}")
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_published_rows_give_what_the_thread_expects(row, name, backend):
    """In the dtypes of the threads."""
    x, gamma, beta, eps = row.arguments(name)
    y = layer_norm(x, gamma, beta, eps, backend=backend).astype(np.float64)
    # Printed to that many digits, and rounded to dtype; |y| < 2.
    atol = 0.5 * 10.0**-row.digits + np.finfo(name).eps
    np.testing.assert_allclose(y, np.broadcast_to(row.y, y.shape), rtol=0, atol=atol)


@pytest.mark.parametrize("offset", [0, 10, 1e3, 1e4, 1e5, 1e6])
def test_no_offset_costs_a_digit(offset, backend):
    """Eight wheels of others lose 1e-5 to everything here (pytorch 51102, keras-core 866)."""
    x = (offset + np.random.default_rng(1).standard_normal((3, 768))).astype(np.float32)
    y = layer_norm(x, backend=backend)
    # Not one of the 2304.
    assert exact_layer_norm(x).check_contract(y=y)["y"].misrounded == 0


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e19, 1e25, 3e38])
def test_no_silent_zeros_at_any_scale(scale, backend):
    """Above 1.8e19 squares overflow: zeros or NaN elsewhere (tt-metal 55159, nntrainer 3935)."""
    x = (scale * np.tanh(np.random.default_rng(1).standard_normal((3, 768)))).astype(np.float32)
    y = layer_norm(x, eps=0.0, backend=backend)
    assert exact_layer_norm(x, eps=0.0).check_contract(y=y)["y"].passed
    # 768 roundings of 2^-24 in the mean of squares, each relative to its own.
    assert abs(float((y.astype(np.float64) ** 2).mean()) - 1) < 2 * 2.0**-24


@pytest.mark.parametrize("value", [1e6, 1e10, 3e38])
def test_one_element_and_a_huge_gamma(value, dtype, backend):
    """n = 1: y is beta and dgamma 0, whatever x and gamma (pytorch 188372, 98075)."""
    x = np.full((5, 1), min(value, float(ml_dtypes.finfo(dtype).max))).astype(dtype)
    beta = np.full(1, 0.3, dtype)
    y, cache = layer_norm_forward(x, x[0], beta, backend=backend)
    assert (y == beta).all()
    dx, dgamma, dbeta = layer_norm_backward(np.ones_like(x), cache)
    assert not dx.any()
    assert not dgamma.any()
    assert dbeta == np.asarray(5, dtype)


def test_half_precision_statistics_do_not_overflow(backend):
    """float16 of +-6e4: var is 3.6e9, and the sum of a row inf (onnxruntime 17692, 29043)."""
    x = np.where(np.arange(768) % 3, 6e4, -6e4).astype(np.float16)[None]
    y = layer_norm(x, backend=backend)
    assert exact_layer_norm(x).check_contract(y=y)["y"].misrounded == 0


@pytest.mark.parametrize("n", [3, 17, 127, 769, 1023])
def test_no_padding_lane_enters_the_variance(n, backend):
    """A row length that is no power of two, far from zero (Liger 518, unsloth 1867)."""
    row = np.arange(8)[:, None]
    x = (1000 + 100 * row + (np.arange(n) % 17 - 8) / 8).astype(np.float32)
    y = layer_norm(x, backend=backend)
    assert exact_layer_norm(x).check_contract(y=y)["y"].passed


def test_bfloat16_sums_over_rows_do_not_saturate(backend):
    """A running sum of ones in bfloat16 stops at 256 (Liger 950, pytorch 190828)."""
    x, ones = np.zeros((4096, 3), ml_dtypes.bfloat16), np.ones(3, ml_dtypes.bfloat16)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend)
    dbeta = layer_norm_backward(np.ones_like(x), cache).dbeta
    np.testing.assert_array_equal(dbeta, np.full(3, 4096, ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_statistics_are_not_kept_in_half_precision(name, backend):
    """Mean and rstd saved in x's dtype cost dx a digit (FlagGems 221, pytorch 139923)."""
    case = make_case("F38", name, 300)
    assert_contract(*case, backend)


def test_many_rows_of_two_normalized_axes(rng, backend):
    """Rows beyond 65 536 with a 2-D normalized shape were written out of bounds (pytorch 192016)."""
    x, dy = rng.standard_normal((2, 70_000, 2, 2)).astype(np.float32)
    y, cache = layer_norm_forward(x, axis=(1, 2), backend=backend)
    dx = layer_norm_backward(dy, cache, wrt=("x",)).dx
    assert y.shape == dx.shape == x.shape
    # Rows of both ends and of the middle, each alone.
    for at in (0, 65_535, 65_536, 69_999):
        alone, cache = layer_norm_forward(x[at].reshape(1, 4), backend=backend)
        np.testing.assert_array_equal(y[at], alone.reshape(2, 2))
        alone_dx = layer_norm_backward(dy[at].reshape(1, 4), cache, wrt=("x",)).dx
        np.testing.assert_array_equal(dx[at], alone_dx.reshape(2, 2))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (6, 4, 5), (24, 5), (120 // 5, 1, 5)])
def test_the_backward_counts_rows_over_all_leading_axes(shape, backend):
    """Rows taken from shape[0] alone lose most of dgamma (FlagGems 5474, 4916)."""
    x, dy = np.random.default_rng(4916).standard_normal((2, 24, 5)).astype(np.float32)
    gamma, beta = np.linspace(-1, 2, 5, dtype=np.float32), np.ones(5, np.float32)
    _, cache = layer_norm_forward(x.reshape(shape), gamma, beta, backend=backend)
    dx, dgamma, dbeta = layer_norm_backward(dy.reshape(shape), cache)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    results = exact.check_contract(dx=dx.reshape(24, 5), dgamma=dgamma, dbeta=dbeta)
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 4096])
def test_a_row_does_not_feel_the_size_of_its_batch(rows, backend):
    """A block size chosen by rows >= 256 changed bits of rows (vllm 48271, sglang 12143)."""
    x, dy = (3 + np.random.default_rng(48271).standard_normal((2, 4096, 65))).astype(np.float32)
    y, cache = layer_norm_forward(x, backend=backend)
    dx = layer_norm_backward(dy, cache, wrt=("x",)).dx
    part, cache = layer_norm_forward(x[-rows:], backend=backend)
    np.testing.assert_array_equal(part, y[-rows:])
    np.testing.assert_array_equal(layer_norm_backward(dy[-rows:], cache, wrt=("x",)).dx, dx[-rows:])
