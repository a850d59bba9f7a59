"""The variants of a right backward agree; that each mistake is one, `test_gradcheck` shows."""

import numpy as np
import pytest

from stablenorm.testing.mistakes import MISTAKES, VARIANTS, backward, forward

# Rounding: a few operations, and sums of 24 or of 6 terms, on values of order 1.
_CLOSE = {np.float64: 1e-13, np.float32: 1e-4}


def _data(dtype):
    rng = np.random.default_rng(5)
    x, dy = (0.3 + rng.standard_normal((2, 2, 3, 24))).astype(dtype)
    gamma, beta = (1 + 0.5 * rng.standard_normal((2, 24))).astype(dtype)
    return x, gamma, beta, dy


@pytest.mark.parametrize("dtype", _CLOSE)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_and_keep_the_dtype(name, dtype):
    x, gamma, beta, dy = _data(dtype)
    expected_y, cache = forward(x.astype(float), gamma.astype(float), beta.astype(float), 1e-3)
    expected = (expected_y, *backward(dy.astype(float), cache))
    variant_forward, variant_backward = VARIANTS[name]
    y, cache = variant_forward(x, gamma, beta, 1e-3)
    for actual, right in zip((y, *variant_backward(dy, cache)), expected, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, right, rtol=0, atol=_CLOSE[dtype] * np.abs(right).max())


def test_there_are_thirteen_mistakes_and_five_variants():
    assert len(MISTAKES) == 13
    assert len({mistake.diagnosis for mistake in MISTAKES.values()}) == 13
    assert len(VARIANTS) == 5
