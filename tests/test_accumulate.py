"""accumulate=True: the exact old value plus the sum, rounded once."""

import numpy as np
import pytest
from norms import FINITE, assert_right, assert_same

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.testing.families import FAMILIES, make_case
from stablenorm.types import bfloat16

NAMES = ("dgamma", "dbeta")


def add(dy, cache, old):
    """Return dgamma and dbeta, added to copies of `old`."""
    out = [None, *(each.copy() for each in old)]
    found = layer_norm_backward(dy, cache, wrt=("gamma", "beta"), out=out, accumulate=True)
    assert all(one is there for one, there in zip(found, out, strict=True))
    return out[1:]


@pytest.mark.parametrize("name", FINITE)
def test_the_families_keep_the_contract_and_are_rounded_to_nearest(name, dtype):
    if not FAMILIES[name].applies(dtype, 24):
        return
    case = make_case(name, dtype, 24, max(5, FAMILIES[name].smallest_rows))
    rng = np.random.default_rng(3)
    _, cache = layer_norm_forward(*case[:4])
    sums = layer_norm_backward(case.dy, cache)[1:]
    # Some of another size than the sum, and some that leave of it what its rounding has lost.
    scales = 2.0 ** rng.integers(-9, 9, 24)
    old = [(rng.standard_normal(24) * scales).astype(dtype) for _ in NAMES]
    for each, total in zip(old, sums, strict=True):
        lost = np.isfinite(total) & (np.arange(24) % 2 == 0)
        each[lost] = -total[lost]
    assert_right(case, accumulate=old)


@pytest.mark.parametrize("old", [1.0, 1 + 2.0**-23, -1.0])
@pytest.mark.parametrize("more", [0.0, 2.0**-60, -(2.0**-60)])
def test_midpoints_are_decided(old, more):
    """Of rows (-1, 1) with eps = 0, xhat is that: old plus the sum is a midpoint, or next to one."""
    x = np.tile(np.array([-1.0, 1.0], np.float32), (3, 1))
    dy = np.array([[0.0, 2.0**-24], [0.0, more], [0.0, 0.0]])
    for kind in (np.float32, np.float64):
        start = [np.full(2, old, np.float32) for _ in NAMES]
        case = x.astype(kind), np.ones(2, np.float32), np.ones(2, np.float32), 0.0, dy
        assert_right(case, accumulate=start, roundings=["nearest"])


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_an_old_value_that_is_not_finite_spoils_its_column_alone(rng, rounding, dtype, backend):
    x, dy = rng.standard_normal((2, 7, 5)).astype(dtype)
    ones = np.ones(5, dtype)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend, rounding=rounding)
    clean = add(dy, cache, [ones, ones])
    old = ones.copy()
    old[:3] = np.inf, -np.inf, -np.nan
    for total, expected in zip(add(dy, cache, [old, old]), clean, strict=True):
        assert not np.isfinite(total[:3]).any()
        if rounding == "nearest":
            # Of the one bit pattern that NaN has there.
            assert (
                total[:3].tobytes() == np.array([np.inf, -np.inf, np.nan]).astype(dtype).tobytes()
            )
        assert total[3:].tobytes() == expected[3:].tobytes()


@pytest.mark.parametrize("shape", [(300, 40), (2000, 700)])
def test_many_tiles(rng, shape, backend):
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    ones = np.ones(shape[1], np.float32)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend)
    _, wide = layer_norm_forward(x.astype(float), ones.astype(float), ones.astype(float))
    old = rng.standard_normal((2, shape[1])).astype(np.float32)
    for total, start, more in zip(
        add(dy, cache, old), old, layer_norm_backward(dy.astype(float), wide)[1:], strict=True
    ):
        error = np.abs(total - (start + more)) / np.spacing(np.abs(total))
        assert error.max() <= 0.501
    # Gathered, since rows are not contiguous.
    _, cache = layer_norm_forward(np.asfortranarray(x), ones, ones, backend=backend)
    gathered = add(np.asfortranarray(dy), cache, old)
    _, cache = layer_norm_forward(x, ones, ones, backend=backend)
    assert_same(add(dy, cache, old), gathered)


def test_rms_norm(rng, dtype):
    x, dy = rng.standard_normal((2, 9, 12)).astype(dtype)
    gamma, beta, *old = rng.standard_normal((4, 12)).astype(dtype)
    # Of bfloat16, kernels would only be compiled for this.
    backends = ["numpy"] if dtype == bfloat16 else BACKENDS
    assert_right((x, gamma, beta, 1e-5, dy), "rms", accumulate=old, backends=backends)


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_with_gamma_of_each_sample_and_with_sum_axes(rng, rounding, backend):
    x, dy = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    gamma, beta = rng.standard_normal((3, 1, 8)).astype(np.float32), np.zeros(8, np.float32)
    how = {"rounding": rounding, "backend": backend}
    _, cache = layer_norm_forward(x, gamma, beta, **how)
    old = rng.standard_normal((3, 1, 8)).astype(np.float32), np.ones(8, np.float32)
    dgamma, dbeta = add(dy, cache, old)
    _, plain = layer_norm_forward(x, gamma[0, 0], beta, **how)
    same = rng.standard_normal((2, 3, 8)).astype(np.float32)
    kept = [each.copy() for each in same]
    layer_norm_backward(dy.copy(), plain, sum_axes=1, out=(None, *kept), accumulate=True)
    np.testing.assert_array_equal(dbeta, add(dy, plain, (beta, old[1]))[1])
    for one in range(3):
        _, part = layer_norm_forward(x[one], gamma[one, 0], beta, **how)
        assert dgamma[one].tobytes() == add(dy[one], part, (old[0][one, 0], beta))[0].tobytes()
        for total, expected in zip(kept, add(dy[one], part, same[:, one]), strict=True):
            assert total[one].tobytes() == expected.tobytes()


def test_dx_is_not_added_to_and_may_be_dy(rng, dtype, backend):
    x, dy = rng.standard_normal((2, 6, 8)).astype(dtype)
    x[2] *= 1e150 if dtype == np.float64 else 1.0
    gamma, beta = np.ones(8, dtype), np.ones((8, 2), dtype)[:, 0]
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    expected = layer_norm_backward(dy, cache).dx, *add(dy, cache, (gamma, beta))
    out = dy.copy(), gamma.copy(), np.ones((8, 2), dtype)[:, 0]
    found = layer_norm_backward(out[0], cache, out=out, accumulate=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_rows_leave_the_old_value(dtype, backend):
    empty, old = np.empty((0, 4), dtype), np.array([1, -2, 0.5, 3], dtype)
    for rounding in ("fast", "nearest"):
        _, cache = layer_norm_forward(empty, old, old, backend=backend, rounding=rounding)
        for total in add(empty, cache, (old, old)):
            np.testing.assert_array_equal(total, old)
        if dtype == np.float64:
            # In one dtype: dx alone has a kernel of its own.
            assert layer_norm_backward(empty, cache, wrt="x", accumulate=True).dgamma is None


@pytest.mark.parametrize("out", [None, (None, np.ones(4), None), (None, None, None)])
def test_there_must_be_something_to_add_to(out):
    _, cache = layer_norm_forward(np.ones((3, 4)), np.ones(4), np.ones(4))
    with pytest.raises(ValueError, match="must be the array to add to with accumulate=True, got N"):
        layer_norm_backward(np.ones((3, 4)), cache, out=out, accumulate=True)
    assert out is None or out[1] is None or out[1].tolist() == [1.0] * 4
