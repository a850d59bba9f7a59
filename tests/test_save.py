"""`save=`: what is kept of a forward, and what the backward makes of it."""

import numpy as np
import pytest
from norms import assert_same

import stablenorm
from stablenorm import layer_norm_forward


def draw(rng, dtype, shape=(64, 96), offset=0.5):
    x, dy = rng.standard_normal((2, *shape))
    gamma, beta = 1 + 0.1 * rng.standard_normal(shape[-1]), 0.1 * rng.standard_normal(shape[-1])
    return [each.astype(dtype) for each in (x + offset, gamma, beta, dy)]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_recompute_gives_the_same_bits(rng, dtype, backend, kind, rounding):
    forward, backward = (getattr(stablenorm, f"{kind}_norm_{p}") for p in ("forward", "backward"))
    x, gamma, beta, dy = draw(rng, dtype)
    if dtype.itemsize == 2 and kind == "rms":
        # Other kernels would only be compiled for this.
        backend = "numpy"
    if dtype == np.float64:
        # Rows that the kernels leave to the reference, and some that need more words.
        x[3] *= 1e300
        x[4] = 1e6 + np.spacing(1e6) * (x[4] > 0)
    options = {"backend": backend, "rounding": rounding}
    y, cache = forward(x, gamma, beta, save="recompute", **options)
    expected_y, expected = forward(x, gamma, beta, **options)
    assert cache.statistics.nbytes == 0
    assert y.tobytes() == expected_y.tobytes()
    assert_same(backward(dy, cache), backward(dy, expected))
    if rounding == "fast" and dtype.itemsize > 2:
        jvp = getattr(stablenorm, f"{kind}_norm_jvp")
        assert_same([jvp(dy, cache)], [jvp(dy, expected)])
    with pytest.raises(AttributeError, match='not kept with save="recompute"'):
        assert cache.mean is None


def test_what_cannot_be_saved_is_refused():
    for save in ("dx", "y"):
        with pytest.raises(ValueError, match=f'save must be "x" or "recompute", got \'{save}\''):
            layer_norm_forward(np.ones((2, 4), np.float32), save=save)
