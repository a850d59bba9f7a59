"""`where=`: rows and elements that count; `dmean=`, `drstd=`: gradients by the statistics."""

import tracemalloc

import numpy as np
import pytest
from norms import NORMS, assert_contract, assert_same, draw

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward

# Kernels that take rows by their numbers would only be compiled for this file.
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
def test_many_rows_by_their_numbers(rng, dtype):
    """More than the 64 of a part of the sums; results that go past the caches."""
    for rows, n in ((700, 37), (90, 300), (4200, 256)):
        where = rng.random((rows, 1)) < 0.6
        # Equally far apart, and one alone.
        where[:40] = np.arange(40)[:, None] % 3 == 0
        counts = where[:, 0]
        x, gamma, beta, dy = draw(rng, (rows, n), dtype)
        x[~counts], dy[~counts] = np.nan, np.inf
        y, cache = layer_norm_forward(x, gamma, beta, where=where)
        found = layer_norm_backward(dy, cache)
        expected, alone = layer_norm_forward(x[counts], gamma, beta)
        gradients = layer_norm_backward(dy[counts], alone)
        assert_same((y[counts], found.dx[counts], *found[1:]), (expected, *gradients))
        assert not any(each[~counts].any() for each in (y, found.dx, cache.mean, cache.rstd))
        assert_same([layer_norm(x, gamma, beta, where=where, out=x)], [y])


@pytest.mark.parametrize("kind", NORMS)
def test_a_row_without_variance_is_nan_where_it_counts(kind, backend):
    x, dy, dsum = (
        np.array([[0.0, 0.0, 5.0], [1.0, 2.0, 4.0]]),
        np.ones((2, 3)),
        np.full((2, 3), 0.1),
    )
    where = np.array([[True, True, False], [True, True, True]])
    forward, backward, _ = NORMS[kind]
    exact = NORMS[kind][2](x, np.ones(3), np.ones(3), 0.0, dy=dy, dsum=dsum, where=where)
    y, cache = forward(x, np.ones(3), np.ones(3), 0.0, where=where, backend=backend)
    found = backward(dy, cache, dsum=dsum)._asdict() | {"y": y}
    assert y[0, 2] == 0.0
    assert found["dx"][0, 2] == 0.1
    assert_contract(exact, found)
    y[0, 2] = np.nan
    assert not exact.check_contract(y=y)["y"].passed


@pytest.mark.parametrize("power", [-480, -300, 400, 480])
def test_gradients_by_the_statistics_of_extreme_rows(rng, power, backend):
    """Powers of two change no bit; at 2^-400, the products of drstd were NaN."""
    x, dy = rng.standard_normal((2, 3, 7))
    dmean, drstd = rng.standard_normal((2, 3, 1))
    found = []
    for unit in (1.0, 2.0**power):
        _, cache = layer_norm_forward(x * unit, eps=0.0, backend=backend)
        by_rstd = drstd * unit * unit
        found.append(layer_norm_backward(dy * unit, cache, dmean=dmean, drstd=by_rstd).dx)
    np.testing.assert_array_equal(*found)


def test_the_mask_may_change_after_the_forward(rng, backend):
    x, gamma, beta, dy = draw(rng, (8, 9))
    for where in (rng.random((8, 1)) < 0.5, rng.random((8, 9)) < 0.5):
        cache = layer_norm_forward(x, gamma, beta, where=where, backend=backend)[1]
        before = layer_norm_backward(dy, cache)
        where[...] = ~where
        assert_same(layer_norm_backward(dy, cache), before)


def test_a_mask_and_a_residual(rng, backend):
    """The sum is for the next residual: it is there in rows that do not count, whatever they hold."""
    x, gamma, beta, dy = draw(rng, (8, 9))
    where = np.arange(8)[:, None] % 3 > 0
    x[0], x[3], dy[0], dy[3] = np.inf, 3e38, -np.inf, 3e38
    y, cache = layer_norm_forward(x, gamma, beta, residual=dy, where=where, backend=backend)
    with np.errstate(all="ignore"):
        total = x + dy
    expected = layer_norm(total, gamma, beta, where=where, backend=backend)
    assert_same((cache.x, y), (total, expected))
    dx = layer_norm_backward(dy, cache, dsum=x).dx
    rows = where[:, 0]
    alone = layer_norm_forward(total[rows], gamma, beta, backend=backend)[1]
    of_rows = layer_norm_backward(dy[rows], alone, dsum=x[rows]).dx
    assert_same((dx[rows], dx[::3]), (of_rows, x[::3]))


X = np.ones((2, 3, 4), np.float32)
NEAREST = 'use rounding="fast"'


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "bool, got int64; .* where=mask != 0", {"where": np.ones((2, 3, 1), int)}),
        (TypeError, "a plain array, got a masked one", {"where": np.ma.array(X > 0, mask=X > 0)}),
        (ValueError, r"broadcast to the shape of x, \(2, 3, 4\), got \(3, 3\)", {"where": X[0, :, :3] > 0}),
        (ValueError, r"broadcast to the shape of x, \(2, 3, 4\), got \(5, 2, 3, 4\)", {"where": np.ones((5, *X.shape), bool)}),
        (ValueError, NEAREST, {"where": np.arange(4) > 1, "rounding": "nearest"}),
    ],
)  # fmt: skip
def test_masks_that_are_refused(error, message, call, backend):
    with pytest.raises(error, match=message):
        layer_norm(X, backend=backend, **call)


def test_statistics_that_are_refused():
    fast, nearest = (layer_norm_forward(X, rounding=each)[1] for each in ("fast", "nearest"))
    with pytest.raises(ValueError, match=r"dmean must have shape \(2, 3, 1\), that of cache\.rstd"):
        layer_norm_backward(X, fast, dmean=np.ones((2, 3)))
    with pytest.raises(TypeError, match=r"drstd must be float16, .* got int64"):
        layer_norm_backward(X, fast, drstd=np.ones((2, 3, 1), int))
    for name in ("dmean", "drstd"):
        with pytest.raises(ValueError, match=NEAREST):
            layer_norm_backward(X, nearest, **{name: np.ones((2, 3, 1))})


def test_a_mask_costs_no_copy_of_x(rng):
    """A few blocks and numbers of rows, however many rows count."""
    x = rng.standard_normal((65536, 512), np.float32)
    y, where = np.empty_like(x), rng.random((65536, 1)) < 0.5
    layer_norm(x, out=y, where=where)
    tracemalloc.start()
    layer_norm(x, out=y, where=where)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 8
