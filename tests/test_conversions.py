"""From and to 16 bits: each conversion of the kernels against `reference.rounding.round_to`."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.reference.rounding import round_to

pytest.importorskip("stablenorm.native", exc_type=ImportError)

SIXTEEN = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])


def every(dtype):
    """Return all that has 16 bits."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


@SIXTEEN
def test_from_16_bits(dtype):
    """dbeta of one row is dy, of a dtype that holds it."""
    values = every(dtype)
    for wide in (np.float32, np.float64):
        beta = np.zeros(values.size, wide)
        x = np.resize(np.array([0, 1], dtype), (1, values.size))
        _, cache = layer_norm_forward(x, beta=beta, backend="native")
        with np.errstate(all="ignore"):
            found = layer_norm_backward(values[None], cache, wrt="beta").dbeta
            expected = values.astype(wide) + wide(0)
        np.testing.assert_array_equal(found, expected)
        number = ~np.isnan(expected)
        assert found[number].tobytes() == expected[number].tobytes()


@SIXTEEN
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_to_16_bits(dtype, wide):
    """y of a constant row is beta, rounded: about each number and each midpoint, and far outside."""
    with np.errstate(all="ignore"):
        finite = np.abs(every(dtype).astype(wide))
    finite = np.unique(finite[np.isfinite(finite)])
    # Behind the last the middle alone, which is the first that rounds to infinity.
    half = np.append(np.diff(finite), finite[-1] - finite[-2]) / 2
    middle = finite + half
    near = np.concatenate([finite, middle, finite + half / 2, middle + half / 2])
    with np.errstate(all="ignore"):
        beside = [np.nextafter(near, wide(end)) for end in (np.inf, -np.inf)]
        tiny = 0.0, 5e-324, 2.0**-1022, float(finite[1]) / 4, 1e-50
        far = np.array([*tiny, 3.4e38, 1e39, 1.7e308, np.inf, np.nan]).astype(wide)
        beta = np.concatenate([near, *beside, far])
        beta = np.concatenate([beta, -beta])
        expected = round_to(beta.astype(np.float64) + 0.0, np.dtype(dtype))
    found = layer_norm(np.ones((1, beta.size), dtype), beta=beta, backend="native")[0]
    nan = np.isnan(beta)
    assert np.isnan(found[nan].astype(wide)).all()
    wrong = (found.view(np.uint16) != expected.view(np.uint16)) & ~nan
    assert not wrong.any(), (beta[wrong][:5], found[wrong][:5])
    assert beta.size > 2**18
