"""The statistics that a `Cache` shows, against the exact ones, and how it prints."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward

LIMIT = Fraction(501, 1000)


def hard_rows(rng):
    """Rows out of range, rows that need a third word of the mean, and an rstd that float64 cannot hold."""
    x = rng.standard_normal((7, 33))
    x[1] *= 1e300
    x[2] *= 1e-310
    x[3] = 1.7 + np.spacing(1.7) * (x[3] > 1.5)
    x[4] = 1e200 + np.spacing(1e200) * (x[4] > 1)
    x[5] -= x[5].mean()
    return x


def check(cache, x, eps, c):
    exact = exact_layer_norm(x, eps=eps)
    rows = zip(cache.mean.ravel(), cache.rstd.ravel(), strict=True)
    for row, (mean, rstd) in enumerate(rows):
        values = [Fraction(float(v)) for v in x[row]]
        spread = sum(abs(v - exact.mean(row)) for v in values) / len(values)
        ulp = Fraction(float(np.spacing(abs(float(exact.mean(row))))))
        assert abs(Fraction(mean) - exact.mean(row)) <= LIMIT * ulp + c * spread
        square = exact.var(row) + Fraction(eps)
        if np.isinf(rstd):
            assert square * Fraction(np.finfo(float).max) ** 2 < 1
            continue
        # In relative terms, or in ulp: that the exact one is so near, without a square root.
        near = c * Fraction(rstd) + LIMIT * Fraction(float(np.spacing(rstd)))
        assert (Fraction(rstd) - near) ** 2 * square <= 1 <= (Fraction(rstd) + near) ** 2 * square


@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_statistics_are_near_the_exact_ones(rng, dtype, backend, offset, eps):
    x = (offset + rng.standard_normal((3, 33))).astype(dtype)
    cache = layer_norm_forward(x, eps=eps, backend=backend)[1]
    assert cache.mean.dtype == cache.rstd.dtype == np.float64
    check(cache, x, eps, Fraction(1, 2**98 if dtype.itemsize == 8 else 2**48))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_statistics_of_hard_rows(rng, backend, eps):
    x = hard_rows(rng)
    cache = layer_norm_forward(x, eps=eps, backend=backend)[1]
    assert np.isnan(cache.statistics.rstd_lo[[1, 4]]).all()
    check(cache, x, eps, Fraction(1, 2**98))
    assert np.isinf(cache.rstd[2]) == (eps == 0)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda dy, _: (dy, None), r"got NoneType; write y, cache = layer_norm_forward\(\.\.\.\)"),
        (lambda dy, _: (dy, (dy, None, 1)), "got tuple; write y, cache = "),
        (lambda dy, cache: (dy, (dy, cache)), "got tuple; this is all that layer_norm_forward"),
        (lambda dy, cache: (cache, dy), "got ndarray; the two are swapped"),
    ],
    ids=["None", "tuple", "pair", "swapped"],
)
def test_what_is_no_cache_is_refused(make, message):
    x = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match="cache must be the Cache .*" + message):
        layer_norm_backward(*make(x, layer_norm_forward(x)[1]))
