"""native/simple.h, the page to read first, has the bits of the kernels."""

import numpy as np
import pytest
from compiled import functions_of

import stablenorm as sn

pytest.importorskip("stablenorm.native", exc_type=ImportError)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [1, 3, 8, 100, 1000, 1030, 3000])
def test_no_bit_differs(n, dtype, rng, builds):
    """A bad guess of the mean, a large mean, constant rows, and lengths around lanes and blocks."""
    rows = 4
    x, dy = rng.standard_normal((2, rows, n))
    x[1], x[2], x[3, :: max(n // 8, 1)] = x[1] + 300, 0.1, 1000
    dy[2] = 1
    x, dy = x.astype(dtype), dy.astype(dtype)
    gamma, beta = rng.standard_normal((2, n)).astype(np.float32)
    options = {"backend": "native", "rounding": "fast"}
    y, cache = sn.layer_norm_forward(x, gamma, beta, **options)
    gradients = sn.layer_norm_backward(dy, cache)

    actual_y, dx, sums = np.empty_like(y), np.empty_like(x), np.zeros((2, n))
    statistics = np.empty((rows, 2))
    parameters = np.stack([gamma, beta]).astype(np.float64)
    call = functions_of("simple", builds)
    call(f"of_{dtype}", x, dy, rows, n, parameters, actual_y, dx, sums, statistics)
    expected = (y, gradients.dx, gradients.dgamma, gradients.dbeta, cache.mean, cache.rstd)
    for one, other in zip(
        (actual_y, dx, *sums.astype(np.float32), *statistics.T), expected, strict=True
    ):
        assert one.tobytes() == np.ascontiguousarray(other).tobytes()
