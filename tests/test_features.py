"""Broken by single keywords and second order on inputs that neither test_families.py nor test_any_call.py draws."""

import tracemalloc

import numpy as np
import pytest
from norms import NORMS, assert_contract, assert_right, assert_same, compute, draw, exactly
from rationals import DTYPES, nearest, rational

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.testing.families import Case

# ---- residual and dsum ----


@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_and_rounded_once(dtype, second, rng):
    """Powers of two beside short numbers are midpoints, and a little more."""
    x = np.exp2(rng.integers(-12, 12, 900)) * rng.integers(1, 8, 900)
    residual = np.exp2(rng.integers(-60, 4, 900)) * rng.integers(-3, 4, 900) * (1 + 2.0**-40)
    # Midpoints of bfloat16 and float32, which float64 would reach from so little above them.
    x[:3], residual[:3] = (
        [2.0**-130, -(2.0**-130), 1],
        [1 + 2.0**-8, 1 + 2.0**-8, 2.0**-24 + 2.0**-70],
    )
    x, residual = x.astype(dtype)[None], residual.astype(second)[None]
    sums = (rational(x) + rational(residual)).flat
    expected = np.array([[nearest(each, dtype) for each in sums]]).astype(dtype)
    exact = sn.exact_layer_norm(x, residual=residual)
    found = (sn.layer_norm_forward(x, residual=residual, backend=each)[1].x for each in BACKENDS)
    assert_same([exact.x, *found], [expected] * (1 + len(BACKENDS)))
    of_sum = sn.exact_layer_norm(expected).rounded("y", np.float64)
    np.testing.assert_array_equal(exact.rounded("y", np.float64), of_sum)


# ---- gamma_offset ----


# Other tests use kernels with an offset in these dtypes, too.
@pytest.mark.parametrize(("kind", "dtype"), [("rms", np.float32), ("layer", np.float64)])
def test_gamma_less_an_offset(kind, dtype, rng):
    """Constant g, or nearly so: where products with a pair are rounded alike, dx is not 0."""
    x, dy = rng.standard_normal((4, 64)), np.resize([3, 1, 1 / 3, -1.1], (4, 1)).repeat(64, axis=1)
    gamma = rng.integers(-40, 40, 64) / 40 * 2.0 ** rng.integers(-12, 1, 64)
    gamma[:20] *= 2.0**-70
    case = (each.astype(dtype) for each in (x, gamma, gamma, dy))
    x, gamma, beta, dy = case
    for offset in (1.0, -0.7, 2.0**-60):
        assert_right(Case(x, gamma, beta, 1e-6, dy), kind, gamma_offset=offset)
    # xhat is 1 and -1, and y is gamma, which one float64 loses beside 1.
    x, beta, dy = (np.array([[each, -each]], dtype) for each in (3.0, -1.0, 2.0))
    gamma = np.array([2.0**-70, -(2.0**-71)], dtype)
    assert_right(Case(x, gamma, beta[0], 0.0, dy), kind, gamma_offset=1.0)


# ---- where, dmean, drstd ----


@pytest.mark.parametrize("kind", NORMS)
def test_a_row_without_variance_is_nan_where_it_counts(kind, backend):
    x = np.array([[0.0, 0.0, 5.0], [1.0, 2.0, 4.0]])
    dy, dsum = np.ones((2, 3)), np.full((2, 3), 0.1)
    where = np.array([[True, True, False], [True, True, True]])
    forward, backward, _ = NORMS[kind]
    exact = NORMS[kind][2](x, np.ones(3), np.ones(3), 0.0, dy=dy, dsum=dsum, where=where)
    y, cache = forward(x, np.ones(3), np.ones(3), 0.0, where=where, backend=backend)
    found = backward(dy, cache, dsum=dsum)._asdict() | {"y": y}
    assert y[0, 2] == 0.0
    assert found["dx"][0, 2] == 0.1
    assert_contract(exact, found)
    y[0, 2] = np.nan
    assert not exact.check_contract(y=y)["y"].passed


def test_the_mask_may_change_after_the_forward(rng, backend):
    x, gamma, beta, dy = draw(rng, (8, 9))
    for where in (rng.random((8, 1)) < 0.5, rng.random((8, 9)) < 0.5):
        cache = sn.layer_norm_forward(x, gamma, beta, where=where, backend=backend)[1]
        before = sn.layer_norm_backward(dy, cache)
        where[...] = ~where
        assert_same(sn.layer_norm_backward(dy, cache), before)


def test_a_mask_costs_no_copy_of_x(rng):
    """A few blocks and numbers of rows, however many rows count."""
    x = rng.standard_normal((65536, 512), np.float32)
    y, where = np.empty_like(x), rng.random((65536, 1)) < 0.5
    sn.layer_norm(x, out=y, where=where)
    tracemalloc.start()
    sn.layer_norm(x, out=y, where=where)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 8


# ---- jvp and double backward ----


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_large_means_of_the_cotangents_cost_nothing(rng, size):
    """In a product with what sums to zero, a mean leaves only its rounding errors, if it is there."""
    x, _, beta, dy = draw(rng, (1, 768))
    x, dy = x + np.float32(0.5), dy + np.float32(1e6)
    ones, zeros, ddx = np.ones_like(beta), np.zeros_like(beta), np.full_like(x, size)
    # The element has a small xhat, so that it is in no sum but its own.
    ddx[0, abs(x - x.mean()).argmin()] += 1
    exact = exactly((x, ones, beta, 1e-3, dy), ddx=ddx, ddgamma=zeros, ddbeta=beta)
    cache = sn.layer_norm_forward(x, ones, beta, 1e-3)[1]
    found = sn.layer_norm_double_backward(ddx, dy, cache, ddgamma=zeros, ddbeta=beta)
    assert_contract(exact, dict(zip(("ddy", "dx", "dgamma"), found, strict=True)))
    assert_contract(exact, {"ddy": sn.layer_norm_jvp(ddx, cache, zeros, beta)})


def test_second_order_of_rows_out_of_range_is_nan_and_of_others_as_it_is(rng):
    """Pairs cannot hold such a row; a wrong number would look like a right one."""
    tx, x, dy = rng.standard_normal((3, 4, 9))
    few = sn.layer_norm_jvp(tx, sn.layer_norm_forward(x)[1])
    x[1:3] *= np.array([[1e250], [1e-250]])
    found = sn.layer_norm_jvp(tx, sn.layer_norm_forward(x)[1])
    assert np.isnan(found[1:3]).all()
    np.testing.assert_array_equal(found[[0, 3]], few[[0, 3]])
    ddy, dx, dgamma = sn.layer_norm_double_backward(tx, dy, sn.layer_norm_forward(x, np.ones(9))[1])
    assert np.isnan(ddy[1:3]).all()
    assert (np.isnan(dx).all(axis=1) == [False, True, True, False]).all()
    assert np.isfinite(dx[[0, 3]]).all()
    assert np.isnan(dgamma).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("whole", [False, True])
def test_second_order_of_a_masked_row_is_that_of_what_counts(rng, kind, whole):
    x, gamma, beta, dy = draw(rng, (4, 9), np.float64)
    ddx, ddgamma, ddbeta, _ = draw(rng, (4, 9), np.float64)
    mask = rng.random((4, 1 if whole else 9)) < 0.6
    mask[0], mask[1] = False, True
    shown = np.broadcast_to(mask, x.shape)
    x[~shown] = dy[~shown] = ddx[~shown] = np.nan

    def second(rows, some, names=("ddx", "ddgamma", "ddbeta"), **where):
        case = x[rows, some], gamma[some], beta[some], 1e-5, dy[rows, some]
        given = zip(names, (ddx[rows, some], ddgamma[some], ddbeta[some]), strict=True)
        return compute(case, kind, **dict(given), **where)

    found = second(..., slice(None), where=mask)
    ty = second(..., slice(None), ("tx", "tgamma", "tbeta"), where=mask)["ty"]
    np.testing.assert_array_equal(found["ddy"], ty)
    expected = {name: np.zeros_like(each) for name, each in found.items()}
    for i, some in enumerate(shown):
        for name, alone in second(i, some).items() if some.any() else ():
            expected[name][(some if name == "dgamma" else (i, some))] += alone
    for name, right in expected.items():
        np.testing.assert_allclose(found[name], right, rtol=0, atol=1e-13 * np.abs(right).max())
