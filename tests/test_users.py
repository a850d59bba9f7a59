"""What users of other layer norms reported, as rows that must come out right here."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
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


def test_bfloat16_sums_over_rows_do_not_saturate(backend):
    """A running sum of ones in bfloat16 stops at 256 (Liger 950, pytorch 190828)."""
    x, ones = np.zeros((4096, 3), ml_dtypes.bfloat16), np.ones(3, ml_dtypes.bfloat16)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend)
    dbeta = layer_norm_backward(np.ones_like(x), cache).dbeta
    np.testing.assert_array_equal(dbeta, np.full(3, 4096, ml_dtypes.bfloat16))


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
