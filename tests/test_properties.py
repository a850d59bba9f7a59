"""What must hold for every input (Hypothesis), and the agreement with independent values."""

from importlib import resources

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward

U = 2.0**-53

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 40)
rows_sizes = st.integers(1, 6)
offsets = st.sampled_from([0.0, 1.0, 1e3, -1e6])


def make(seed, rows, n, offset=0.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x = (offset + rng.standard_normal((rows, n))).astype(dtype)
    gamma, beta = rng.standard_normal((2, n)).astype(dtype)
    return x, gamma, beta, rng.standard_normal((rows, n)).astype(dtype)


@quick
@given(seeds, rows_sizes, sizes, st.integers(-60, 60), st.sampled_from([np.float32, np.float64]))
def test_scaling_by_a_power_of_two_with_eps_changes_no_bit(seed, rows, n, power, dtype):
    x, gamma, beta, dy = make(seed, rows, n, 3.0, dtype)
    y, cache = layer_norm_forward(x, gamma, beta, 1e-5)
    scaled, scaled_cache = layer_norm_forward(
        np.ldexp(x, power), gamma, beta, np.ldexp(1e-5, 2 * power)
    )
    np.testing.assert_array_equal(y, scaled)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    of_scaled = layer_norm_backward(dy, scaled_cache)
    np.testing.assert_array_equal(dx, np.ldexp(of_scaled.dx, power))
    np.testing.assert_array_equal(dgamma, of_scaled.dgamma)
    np.testing.assert_array_equal(dbeta, of_scaled.dbeta)


@quick
@given(seeds, rows_sizes, sizes, st.integers(-2000, 2000))
def test_an_exact_shift_changes_no_bit(seed, rows, n, shift):
    """x on a grid of 1/1024: x + shift is exact in float32, so y must not move at all."""
    rng = np.random.default_rng(seed)
    x = (rng.integers(-4096, 4096, (rows, n)) / 1024).astype(np.float32)
    moved = x + np.float32(shift)
    np.testing.assert_array_equal(moved.astype(float) - shift, x)
    y, expected = layer_norm(moved), layer_norm(x)
    # float64 statistics of a row 2000 off round elsewhere: a misrounding once in 2**28.
    np.testing.assert_allclose(y, expected, rtol=2.0**-23, atol=2.0**-48 * np.abs(expected).max())


@quick
@given(seeds, rows_sizes, sizes, offsets)
def test_the_backward_is_linear_in_dy(seed, rows, n, offset):
    x, gamma, beta, dy = make(seed, rows, n, offset)
    other = make(seed + 1, rows, n)[3]
    cache = layer_norm_forward(x, gamma, beta)[1]
    one, two, both = (layer_norm_backward(v, cache) for v in (dy, other, dy + other))
    for a, b, c in zip(one, two, both, strict=True):
        # dy + other is itself rounded: u per term of sums of at most rows or n + 2 terms.
        size = np.abs(a).max() + np.abs(b).max() + np.abs(dy).max() + np.abs(other).max()
        np.testing.assert_allclose(c, a + b, rtol=0, atol=16 * U * size * (rows + n))
    doubled = layer_norm_backward(2 * dy, cache)
    np.testing.assert_array_equal(doubled.dx, 2 * one.dx)


def test_real_data_agrees_with_another_implementation():
    """The bundled file's y, dx, dgamma, dbeta: float64, by someone else's autodiff."""
    with resources.files("stablenorm").joinpath("data/minilm_layer0_output.npz").open("rb") as file:
        data = dict(np.load(file, allow_pickle=False))
    x, gamma, beta, dy = (data[k].astype(np.float64) for k in ("x", "gamma", "beta", "dy"))
    y, cache = layer_norm_forward(x, gamma, beta, float(data["eps"]))
    actual = dict(zip(("dx", "dgamma", "dbeta"), layer_norm_backward(dy, cache), strict=True))
    for name, array in {"y": y, **actual}.items():
        # The file is good to about 1e-13 of the largest.
        atol = 1e-12 * np.abs(data[name]).max()
        np.testing.assert_allclose(array, data[name], rtol=0, atol=atol)
