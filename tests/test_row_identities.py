"""`row_identities`: they hold for right gradients in every dtype, and find wrong ones alone."""

import numpy as np
import pytest
from checked_layer_norms import backward, data, exact, forward

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.check import row_identities
from stablenorm.testing.families import FAMILIES, make_case
from stablenorm.testing.mistakes import MISTAKES
from stablenorm.testing.mistakes import forward as kept_forward


@pytest.mark.parametrize(
    "bug", ["mean(g) missing", "xhat term missing", "eps omitted", "rstd rounded to f32"]
)
def test_identities_alone_find_it(bug):
    for seed in range(20):
        x, gamma, beta = data(seed, (32, 768))
        y, cache = kept_forward(x, gamma, beta)
        dy = np.random.default_rng(seed).standard_normal(x.shape)
        gradients = MISTAKES[bug].backward(dy, cache)
        identities = row_identities(x, gamma, beta, 1e-5, dy, y, *gradients)
        assert not all(identity.passed for identity in identities)


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3])
def test_identities_hold_for_right_code_in_its_own_dtype(dtype, offset):
    for seed in range(5):
        x, gamma, beta = data(seed, (16, 48), offset, dtype)
        y, cache = forward(*(a.astype(np.float64) for a in (x, gamma, beta)))
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
        gradients = backward(dy.astype(np.float64), cache)
        rounded = [a.astype(dtype) for a in (y, *gradients)]
        identities = row_identities(x, gamma, beta, 1e-5, dy, *rounded)
        assert len(identities) == 3
        assert all(identity.passed for identity in identities), identities


def test_an_offset_does_not_break_the_identities_themselves():
    # Right gradients, in float64 from re-centred rows: all that can be wrong is the check.
    x, gamma, _ = data(3, (4, 8), 1e8)
    dy = data(4)[0]
    identities = row_identities(x, gamma, None, 1e-5, dy, None, exact(x, gamma, dy), None, None)
    assert [identity.passed for identity in identities] == [True, True]
    assert max(identity.error for identity in identities) < 1e-14 * 8


def test_identities_without_gamma_or_beta():
    x, gamma, _ = data(0)
    dy = data(1)[0]
    y, cache = forward(x, None, None)
    dx = backward(dy, cache)[0]
    assert len(row_identities(x, None, None, 1e-5, dy, y, dx, None, None)) == 2
    y, cache = forward(x, gamma, None)
    dx, dgamma, _ = backward(dy, cache)
    euler = row_identities(x, gamma, None, 1e-5, dy, y, dx, dgamma, None)[2]
    assert euler.passed
    assert not row_identities(x, gamma, None, 1e-5, dy, y, dx, dgamma * 1.001, None)[2].passed


def test_identities_leave_out_what_cannot_be_judged():
    x, _, _ = data(0)
    dy = data(1)[0]
    x[1, 3] = np.nan
    x[2] = 0.1
    with np.errstate(all="ignore"):
        dx = backward(dy, forward(x, None, None, 0.0)[1])[0]
    identities = row_identities(x, None, None, 0.0, dy, None, dx, None, None)
    assert [identity.passed for identity in identities] == [True, True]
    dx[0, 0] = np.nan
    identities = row_identities(x, None, None, 0.0, dy, None, dx, None, None)
    assert [identity.passed for identity in identities] == [False, False]


def test_identities_on_several_normalized_axes():
    x, _, _ = data(0, (3, 4, 5))
    gamma = data(1, (4, 5))[0]
    dy = data(2, (3, 4, 5))[0]
    flat = [a.reshape(-1, 20) for a in (x, gamma, dy)]
    y, cache = forward(flat[0], flat[1][0], None)
    dx, dgamma, _ = backward(flat[2], cache)
    results = y.reshape(x.shape), dx.reshape(x.shape), dgamma.reshape(4, 5), None
    identities = row_identities(x, gamma, None, 1e-5, dy, *results)
    assert [identity.passed for identity in identities] == [True] * 3


@pytest.mark.parametrize(
    ("dx", "dgamma", "message"),
    [
        (np.ones(3), None, r"dx must have the shape of x, ending in \(3,\), got \(3,"),
        (np.ones((2, 3)), np.ones(2), r"dgamma must have shape \(3,\), got \(2,\)"),
    ],
)
def test_identities_say_which_shape_is_wrong(dx, dgamma, message):
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=message):
        row_identities(x, np.ones(3), None, 0.1, x, x, dx, dgamma, None)


@pytest.mark.parametrize("name", ["F13", "F14", "F33", "F15", "F16", "F17"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identities_have_no_false_alarm_on_hard_families(name, dtype):
    for n in (3, 8, 129):
        if FAMILIES[name].why_not(np.dtype(dtype), n, 9):
            continue
        for seed in range(3):
            case = make_case(name, dtype, n, 9, rng=seed)
            y, cache = layer_norm_forward(case.x, case.gamma, case.beta, case.eps)
            results = (y, *layer_norm_backward(case.dy, cache))
            if all(np.isfinite(a).all() for a in results):
                found = row_identities(*case, *results)
                assert all(identity.passed for identity in found), (seed, n, found)
