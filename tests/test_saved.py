"""The statistics that a `Cache` shows, against the exact ones, and how it prints."""

import pickle
from fractions import Fraction

import numpy as np
import pytest
from rationals import rational, square_root

from stablenorm import exact_layer_norm, layer_norm_forward

LIMIT = Fraction(501, 1000)


def ulp(value):
    return Fraction(float(np.spacing(abs(float(value)))))


def check(cache, x, eps, c):
    exact = exact_layer_norm(x, eps=eps)
    statistics = zip(cache.mean.ravel().tolist(), cache.rstd.ravel().tolist(), strict=True)
    for row, (mean, rstd) in enumerate(statistics):
        center, square = exact.mean(row), exact.var(row) + Fraction(eps)
        spread = abs(rational(x[row]) - center).mean()
        assert abs(Fraction(mean) - center) <= LIMIT * ulp(center) + c * spread
        if rstd == np.inf:
            assert square * Fraction(np.finfo(float).max) ** 2 < 1
            continue
        right = 1 / square_root(square, 60)
        assert abs(Fraction(rstd) - right) <= LIMIT * ulp(rstd) + c * right


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_statistics_are_near_the_exact_ones(rng, dtype, backend, offset, eps):
    x = (offset + rng.standard_normal((3, 33))).astype(dtype)
    cache = layer_norm_forward(x, eps=eps, backend=backend)[1]
    assert cache.mean.dtype == cache.rstd.dtype == np.float64
    check(cache, x, eps, Fraction(1, 2**98 if dtype.itemsize == 8 else 2**48))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_statistics_of_hard_rows(rng, backend, eps):
    """Rows out of range, rows that need a third word of the mean, and an rstd that float64 cannot hold."""
    x = rng.standard_normal((7, 33)) * [[1], [1e300], [1e-310], [1], [1], [1], [1]]
    for row, value in ((3, 1.7), (4, 1e200)):
        x[row] = value + np.spacing(value) * (x[row] > 1)
    x[5] -= x[5].mean()
    cache = layer_norm_forward(x, eps=eps, backend=backend)[1]
    assert np.isnan(cache.statistics.rstd_lo[[1, 4]]).all()
    check(cache, x, eps, Fraction(1, 2**98))
    assert np.isinf(cache.rstd[2]) == (eps == 0)


@pytest.mark.parametrize("n", [64, 1024, 40_000])
def test_a_guess_of_outliers_alone_is_made_again(n, backend):
    """Otherwise var = s - d**2 loses log2(n / 8) bits: the forward guesses the mean from x[:, :: n // 8]."""
    x = np.random.default_rng(n).standard_normal((1, n)).astype(np.float32)
    x[:, :: n // 8] += 1e4
    check(layer_norm_forward(x, backend=backend)[1], x, 1e-5, Fraction(1, 2**48))


def test_statistics_of_no_rows_and_of_nan(backend):
    assert layer_norm_forward(np.ones((0, 4)), backend=backend)[1].mean.shape == (0, 1)
    x = np.array([[1, np.nan], [1, np.inf], [1, 3]], np.float32)
    cache = layer_norm_forward(x, eps=0.0, backend=backend)[1]
    assert np.isnan(cache.rstd[:2]).all()
    assert (cache.mean[2], cache.rstd[2]) == (2, 1)


def test_a_cache_prints_on_one_line():
    x = np.ones((2, 3, 4), np.float16)
    _, cache = layer_norm_forward(x, np.ones(4, np.float32), backend="numpy")
    assert repr(cache) == (
        "Cache(x: float16 (2, 3, 4), gamma: float32 (4,), beta: None, axis: (2,), "
        "statistics: 144 bytes, backend: 'numpy', rounding: 'fast')"
    )
    assert pickle.loads(pickle.dumps(cache)).mean.tolist() == cache.mean.tolist()
    assert len(tuple(cache)) == len(cache._fields)
