"""The known mistakes are mistakes, of the gradient they name alone; the variants are none."""

import numpy as np
import pytest

from stablenorm.testing.mistakes import MISTAKES, VARIANTS, backward, forward

# Rounding: a few operations, and sums of 24 or of 6 terms, on values of order 1.
_CLOSE = {np.float64: 1e-13, np.float32: 1e-4}


def _data(shape=(2, 3, 24), dtype=np.float64):
    rng = np.random.default_rng(5)
    x, dy = (0.3 + rng.standard_normal((2, *shape))).astype(dtype)
    gamma, beta = (1 + 0.5 * rng.standard_normal((2, shape[-1]))).astype(dtype)
    return x, gamma, beta, dy


@pytest.mark.parametrize("dtype", _CLOSE)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_agree_and_keep_the_dtype(name, dtype):
    x, gamma, beta, dy = _data(dtype=dtype)
    expected_y, cache = forward(x.astype(float), gamma.astype(float), beta.astype(float), 1e-3)
    expected = (expected_y, *backward(dy.astype(float), cache))
    variant_forward, variant_backward = VARIANTS[name]
    y, cache = variant_forward(x, gamma, beta, 1e-3)
    for actual, right in zip((y, *variant_backward(dy, cache)), expected, strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, right, rtol=0, atol=_CLOSE[dtype] * np.abs(right).max())


def test_the_plain_backward_is_the_derivative():
    x, gamma, beta, dy = _data((2, 6))
    gradients = backward(dy, forward(x, gamma, beta, 1e-3)[1])
    for position, gradient in enumerate(gradients):
        for place in np.ndindex(gradient.shape):
            ends = []
            for step in (1e-6, -1e-6):
                args = [x.copy(), gamma.copy(), beta.copy()]
                args[position][place] += step
                ends.append((dy * forward(*args, 1e-3)[0]).sum())
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(gradient[place], abs=1e-8)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_spoil_the_gradient_that_they_name_and_no_other(name):
    x, gamma, beta, dy = _data()
    cache = forward(x, gamma, beta, 1e-3)[1]
    mistake = MISTAKES[name]
    found = mistake.backward(dy, cache)
    differs = [
        argument
        for argument, actual, right in zip(
            ("x", "gamma", "beta"), found, backward(dy, cache), strict=True
        )
        if np.abs(actual - right).max() > 1e-10 * np.abs(right).max()
    ]
    assert differs == [mistake.argument]


def test_there_are_thirteen_mistakes_and_five_variants():
    assert len(MISTAKES) == 13
    assert len({mistake.diagnosis for mistake in MISTAKES.values()}) == 13
    assert len(VARIANTS) == 5
