"""`row_identities`: they hold for right gradients in every dtype, and find wrong ones alone."""

import numpy as np
import pytest
from checked_operations import data

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.check import row_identities
from stablenorm.check.closed_form import Case, Expected
from stablenorm.testing.families import FAMILIES, make_case
from stablenorm.testing.mistakes import MISTAKES, backward, forward


def verdicts(*args):
    return [identity.passed for identity in row_identities(*args)]


@pytest.mark.parametrize(
    "bug", ["mean(g) missing", "xhat term missing", "eps omitted", "rstd rounded to f32"]
)
def test_identities_alone_find_it(bug):
    for seed in range(5):
        x, gamma, beta = data(seed, (32, 768))
        y, cache = forward(x, gamma, beta)
        dy = np.random.default_rng(seed).standard_normal(x.shape)
        gradients = MISTAKES[bug].backward(dy, cache)
        assert not all(verdicts(x, gamma, beta, 1e-5, dy, y, *gradients))


@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3])
def test_identities_hold_for_right_code_in_its_own_dtype(dtype, offset):
    for seed in range(5):
        x, gamma, beta = data(seed, (16, 48), offset, dtype)
        y, cache = forward(*(a.astype(np.float64) for a in (x, gamma, beta)))
        dy = np.random.default_rng(seed).standard_normal(x.shape).astype(dtype)
        gradients = backward(dy.astype(np.float64), cache)
        rounded = [a.astype(dtype) for a in (y, *gradients)]
        assert verdicts(x, gamma, beta, 1e-5, dy, *rounded) == [True] * 3


def test_identities_leave_out_what_is_not_given_or_cannot_be_judged():
    # Right gradients, in float64 from re-centred rows: all that can be wrong is the check.
    x, gamma, _ = data(3, (4, 8), 1e8)
    dy = data(4)[0]
    dx = Expected(Case(x, gamma, None, 1e-5, dy), 2.0**-53).bounds_of("dx", x.dtype).value
    identities = row_identities(x, gamma, None, 1e-5, dy, None, dx, None, None)
    assert [identity.passed for identity in identities] == [True, True]
    assert max(identity.error for identity in identities) < 1e-14 * 8
    x = data(0)[0]
    y, cache = forward(x, gamma, 0)
    dx, dgamma, _ = backward(dy, cache)
    assert verdicts(x, gamma, None, 1e-5, dy, y, dx, dgamma, None) == [True] * 3
    assert not verdicts(x, gamma, None, 1e-5, dy, y, dx, dgamma * 1.001, None)[2]
    x[1, 3] = np.nan
    x[2] = 0.1
    with np.errstate(all="ignore"):
        dx = backward(dy, forward(x, 1, 0, 0.0)[1])[0]
    assert verdicts(x, None, None, 0.0, dy, None, dx, None, None) == [True, True]
    dx[0, 0] = np.nan
    assert verdicts(x, None, None, 0.0, dy, None, dx, None, None) == [False, False]


def test_identities_on_several_normalized_axes():
    x, dy, gamma = data(0, (3, 4, 5))[0], data(2, (3, 4, 5))[0], data(1, (4, 5))[0]
    y, cache = forward(x.reshape(3, 20), gamma.reshape(20), 0)
    dx, dgamma, _ = backward(dy.reshape(3, 20), cache)
    results = y.reshape(x.shape), dx.reshape(x.shape), dgamma.reshape(4, 5), None
    assert verdicts(x, gamma, None, 1e-5, dy, *results) == [True] * 3
    with pytest.raises(ValueError, match=r"dx must have shape \(3, 4, 5\), got \(3, 20\)"):
        verdicts(x, gamma, None, 1e-5, dy, None, dx, None, None)


@pytest.mark.parametrize("name", ["F13", "F14", "F33", "F15", "F16", "F17"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identities_have_no_false_alarm_on_hard_families(name, dtype):
    for n in (3, 8, 129):
        if FAMILIES[name].why_not(np.dtype(dtype), n, 9):
            continue
        case = make_case(name, dtype, n, 9, rng=0)
        y, cache = layer_norm_forward(case.x, case.gamma, case.beta, case.eps)
        results = (y, *layer_norm_backward(case.dy, cache))
        if all(np.isfinite(a).all() for a in results):
            assert all(verdicts(*case, *results)), n
