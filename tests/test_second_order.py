"""jvp and double backward, beside the table of test_families.py: rows, layouts, masks, errors."""

import numpy as np
import pytest
from norms import NORMS, SECOND_ORDER, assert_contract, exactly

from stablenorm import layer_norm_double_backward, layer_norm_forward, layer_norm_jvp


class Problem:
    """Random x, gamma, beta, dy, and tangents or cotangents of what has one, all of one dtype."""

    def __init__(self, rng, kind, dtype=np.float64, shape=(3, 7), offset=1.0):
        n = shape[-1]
        (self.x, self.dy, self.tx), (self.gamma, self.beta, self.tgamma, self.tbeta) = (
            (mean + rng.standard_normal((count, *lengths))).astype(dtype)
            for mean, count, lengths in ((0.5, 3, shape), (0.0, 4, (n,)))
        )
        self.kind, self.offset, self.eps = kind, offset, 1e-3

    def cache(self, backend="numpy"):
        given = self.x, self.gamma, self.beta, self.eps
        return NORMS[self.kind][0](*given, gamma_offset=self.offset, backend=backend)[1]

    def jvp(self, backend="numpy"):
        return SECOND_ORDER[self.kind][0](self.tx, self.cache(backend), self.tgamma, self.tbeta)

    def double_backward(self):
        cotangents = {"ddgamma": self.tgamma, "ddbeta": self.tbeta}
        return SECOND_ORDER[self.kind][1](self.tx, self.dy, self.cache(), **cotangents)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_large_means_of_the_cotangents_cost_nothing(rng, size):
    """In a product with what sums to zero, a mean leaves only its rounding errors, if it is there."""
    p = Problem(rng, "layer", np.float32, (1, 768), offset=0.0)
    p.gamma, p.tgamma = np.ones_like(p.gamma), np.zeros_like(p.tgamma)
    p.dy += np.float32(1e6)
    p.tx = np.full_like(p.x, size)
    # Where xhat is small, since there it is in no sum but that of its own element.
    p.tx[0, abs(p.x - p.x.mean()).argmin()] += 1
    case = p.x, p.gamma, p.beta, p.eps, p.dy
    exact = exactly(case, ddx=p.tx, ddgamma=p.tgamma, ddbeta=p.tbeta)
    assert_contract(exact, dict(zip(("ddy", "dx", "dgamma"), p.double_backward(), strict=True)))
    assert_contract(exact, {"ddy": p.jvp()})


def test_rows_out_of_range_are_nan_and_others_as_they_are(rng):
    """Pairs cannot hold such a row; a wrong number would look like a right one."""
    tx, x, dy = rng.standard_normal((3, 4, 9))
    few = layer_norm_jvp(tx, layer_norm_forward(x)[1])
    x[1:3] *= np.array([[1e250], [1e-250]])
    found = layer_norm_jvp(tx, layer_norm_forward(x)[1])
    assert np.isnan(found[1:3]).all()
    np.testing.assert_array_equal(found[[0, 3]], few[[0, 3]])
    ddy, dx, dgamma = layer_norm_double_backward(tx, dy, layer_norm_forward(x, np.ones(9))[1])
    assert np.isnan(ddy[1:3]).all()
    assert np.isnan(dx[1:3]).all()
    assert np.isfinite(dx[[0, 3]]).all()
    assert np.isnan(dgamma).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_masked_row_is_the_row_of_what_counts(rng, kind, whole):
    p = Problem(rng, kind, shape=(4, 9))
    mask = rng.random((4, 1 if whole else 9)) < 0.6
    mask[0], mask[1] = False, True
    forward, (jvp, double_backward) = NORMS[kind][0], SECOND_ORDER[kind]
    shown = np.broadcast_to(mask, p.x.shape)
    x, dy, tx = (np.where(shown, a, np.nan) for a in (p.x, p.dy, p.tx))
    _, cache = forward(x, p.gamma, p.beta, where=mask)
    ty = jvp(tx, cache, p.tgamma, p.tbeta)
    found = double_backward(tx, dy, cache, ddgamma=p.tgamma, ddbeta=p.tbeta)
    expected = [np.zeros((4, 9)), np.zeros((4, 9)), np.zeros(9)]
    for i in range(1, 4):
        some = shown[i]
        if some.any():
            gamma, beta, tgamma, tbeta = (a[some] for a in (p.gamma, p.beta, p.tgamma, p.tbeta))
            _, alone = forward(x[i, some], gamma, beta)
            parts = double_backward(tx[i, some], dy[i, some], alone, ddgamma=tgamma, ddbeta=tbeta)
            expected[0][i, some], expected[1][i, some] = parts[:2]
            expected[2][some] += parts[2]
    np.testing.assert_array_equal(found[0], ty)
    for actual, right in zip(found, expected, strict=True):
        assert_close(actual, right)
