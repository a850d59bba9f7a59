"""The same bits whatever the scale, and in every run (test_tiny.py, test_masks.py: whatever the batch)."""

import numpy as np
import pytest
from norms import assert_same, compute

from stablenorm import layer_norm_backward, layer_norm_forward


def make(rng, dtype, rows, n):
    x, dy = rng.standard_normal((2, rows, n)) + 3
    gamma, beta = 1 + 0.1 * rng.standard_normal((2, n))
    return tuple(v.astype(dtype) for v in (x, gamma, beta, dy))


@pytest.mark.parametrize("power", [-60, 1, 60])
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_scaling_by_a_power_of_two_with_eps_changes_no_bit(rng, name, backend, power):
    x, gamma, beta, dy = make(rng, name, 5, 33)
    how = {"backend": backend}
    expected = compute((x, gamma, beta, 1e-5, dy), **how)
    scaled = np.ldexp(x, power), gamma, beta, np.ldexp(1e-5, 2 * power), dy
    found = compute(scaled, **how)
    found["dx"] = np.ldexp(found["dx"], power)
    assert_same(found.values(), expected.values())


def test_runs_are_repeatable_and_wrt_changes_nothing(rng, dtype, backend):
    x, gamma, beta, dy = make(rng, dtype, 300, 129)
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    whole = layer_norm_backward(dy, cache)
    for i, name in enumerate(("x", "gamma", "beta")):
        one = layer_norm_backward(dy, cache, wrt=(name,))
        assert_same(one, [whole[j] if i == j else None for j in range(3)])
    assert_same(layer_norm_backward(dy, cache), whole)
