"""`check_rms_norm` and `check_layer_norm` on right and wrong norms, and what both checks know of gamma_offset, residual, where and dsum."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from checked_operations import data, failed

from stablenorm import (
    check_layer_norm,
    check_rms_norm,
    exact_layer_norm,
    exact_rms_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.check import row_identities
from stablenorm.check.cases import ordinary
from stablenorm.check.causes import CHANGES, Evidence, explain
from stablenorm.check.closed_form import Case, Expected
from stablenorm.testing.mistakes import (
    MISTAKES,
    RMS_MISTAKES,
    RMS_VARIANTS,
    VARIANTS,
    backward,
    forward,
    rms_backward,
    rms_forward,
)

NORMS = {
    "layer": (check_layer_norm, layer_norm_forward, layer_norm_backward),
    "rms": (check_rms_norm, rms_norm_forward, rms_norm_backward),
}


# A sample of the elements is compared, and all.
@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [*product(["layer"], MISTAKES, [(8, 96)]), *product(["rms"], RMS_MISTAKES, [(4, 8)])],
)
def test_every_known_mistake_is_found_and_named(kind, name, shape):
    mistake, front = (
        (MISTAKES[name], forward) if kind == "layer" else (RMS_MISTAKES[name], rms_forward)
    )
    report = NORMS[kind][0](front, mistake.backward, *data(0, shape), rng=0, probes=1)
    assert report.verdict == "FAIL"
    assert report.diagnosis == (mistake.diagnosis,)
    assert failed(report) == {mistake.argument}
    # By differences too: the closed form takes over where they see nothing.
    assert {r.method for r in report.arguments if r.verdict == "FAIL"} == {"secants"}


RIGHT = {"layer": [*VARIANTS.values()], "rms": [*RMS_VARIANTS.values()]}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    ("kind", "code"), [(kind, c) for kind in NORMS for c in (*RIGHT[kind], NORMS[kind][1:])]
)
def test_no_false_alarm(kind, code, dtype):
    for seed, offset in enumerate((0.0, 1e2, 1e6)):
        args = data(seed, ((2, 3, 8), (4, 8), (4, 8))[seed], offset, dtype)
        report = NORMS[kind][0](*code, *args, rng=seed)
        accepted = {"PASS"} if dtype == np.float64 else {"PASS", "INCONCLUSIVE"}
        assert report.verdict in accepted, str(report)
        assert report.diagnosis == ()


def test_each_norm_taken_for_the_other_is_named():
    assert check_rms_norm(forward, backward, rng=0).diagnosis == (
        "the mean of x is subtracted in the forward",
    )
    report = check_layer_norm(rms_forward, rms_backward, rng=0)
    assert "this is not the layer normalization asked for" in str(report)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_every_change_of_dx_is_named(kind, rng):
    x, gamma, beta = data(0, (6, 12))
    case = ordinary(Case(x, gamma, beta, 1e-5, x, kind, 1.0), rng)
    evidence = Evidence(case, 2.0**-53)
    bounds = evidence.bounds_of("dx", x.dtype)
    changes = list(evidence.apt(CHANGES))
    assert len(changes) > 20
    for change in changes:
        assert explain(evidence, "dx", evidence.dx(change)[0], bounds) == change.words


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("kind", NORMS)
def test_the_checkers_own_gradients_are_right_to_their_last_digits(kind, offset):
    x, gamma, beta = data(0, (3, 7), offset)
    dy = np.random.default_rng(0).standard_normal(x.shape)
    expected = Expected(Case(x, gamma, beta, 1e-5, dy, kind, 1.0), 2.0**-53)
    oracle = exact_layer_norm if kind == "layer" else exact_rms_norm
    exact = oracle(x, gamma, beta, 1e-5, dy, gamma_offset=1.0)
    for name in ("y", "dx", "dgamma", "dbeta"):
        bounds = expected.bounds_of(name, x.dtype)
        error = np.abs(bounds.value - exact.rounded(name, np.float64))
        # 16 roundings of what the element is made of, whatever the offset.
        assert (error <= 16 * 2.0**-53 * bounds.magnitude).all()


def test_the_identities_of_rms_norm_are_two():
    x, gamma, beta = data(0)
    y, cache = rms_norm_forward(x, gamma, beta, gamma_offset=1.0)
    found = row_identities(
        x, gamma, beta, 1e-5, x, y, *rms_norm_backward(x, cache), kind="rms", gamma_offset=1.0
    )
    assert len(found) == 2
    assert all(each.passed for each in found)


# ---- what functions take besides ----


@pytest.mark.parametrize("kind", NORMS)
def test_a_gamma_offset_is_part_of_the_formula(kind):
    check, front, back = NORMS[kind]
    assert check(partial(front, gamma_offset=1.0), back, gamma_offset=1.0, rng=0).passed
    report = check(front, back, gamma_offset=1.0, rng=0)
    assert report.diagnosis == ("gamma_offset is not added to gamma in the forward",)
    # Added in the forward alone.
    plain, pull = (forward, backward) if kind == "layer" else (rms_forward, rms_backward)

    def half(x, gamma, beta, eps):
        y, cache = plain(x, gamma + 1, beta, eps)
        return y, cache._replace(gamma=gamma)

    report = check(half, pull, gamma_offset=1.0, rng=0)
    assert report.diagnosis == ("gamma_offset is not added to gamma in dx",)
    with pytest.raises(ValueError, match="gamma_offset must be finite, and 0 without a gamma"):
        check(front, back, np.eye(3), gamma_offset=1.0)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_our_masks_residual_and_dsum_pass(kind, dtype):
    check, front, back = NORMS[kind]
    takes = ("where", "residual", "dsum")
    report = check(front, back, *data(0, (4, 8), dtype=dtype), takes=takes, rng=0)
    assert report.passed, str(report)


def masked(x, gamma, beta, eps, residual=None, where=True, count_all=False):
    """An RMS norm of x + residual over the elements where `where`, and what its backward needs."""
    where = np.broadcast_to(where, x.shape)
    total = x if residual is None else x + residual
    n = x.shape[-1] if count_all else np.maximum(where.sum(axis=-1, keepdims=True), 1)
    rstd = 1 / np.sqrt((total**2).sum(axis=-1, keepdims=True, where=where) / n + eps)
    xhat = np.where(where, total * rstd, 0)
    return np.where(where, gamma * xhat + beta, 0), (xhat, rstd, gamma, where, n)


def masked_backward(dy, cache, dsum=0.0):
    xhat, rstd, gamma, where, n = cache
    dy = np.where(where, dy, 0)
    along = (gamma * dy * xhat).sum(axis=-1, keepdims=True) / n
    rows = tuple(range(dy.ndim - 1))
    dx = rstd * (gamma * dy - xhat * along) * where + dsum
    return dx, (dy * xhat).sum(axis=rows), dy.sum(axis=rows)


def test_a_mask_is_right_only_if_what_it_leaves_out_does_not_count():
    takes = ("where", "residual", "dsum")
    report = check_rms_norm(masked, masked_backward, takes=takes, rng=0)
    assert report.passed, str(report)
    wrong = {
        "count": (partial(masked, count_all=True), masked_backward),
        "y": (lambda *a, where: (masked(*a)[0], masked(*a, where=where)[1]), masked_backward),
        "dx": (masked, lambda dy, c: (masked_backward(dy, c)[0] + 1, *masked_backward(dy, c)[1:])),
    }
    found = {what: check_rms_norm(*code, takes=["where"], rng=0) for what, code in wrong.items()}
    assert {report.verdict for report in found.values()} == {"FAIL"}
    for what in ("y", "dx"):
        assert f"{what} must have the shape of x, and be 0 where" in " ".join(
            str(found[what]).split()
        )


def test_a_residual_or_a_dsum_that_is_wrong_is_found():
    def without(*args, **_):
        return masked(*args)

    def twice(dy, cache, dsum=0.0):
        return masked_backward(dy, cache, 2 * dsum)

    def ignored(*args, **_):
        return masked_backward(*args)

    report = check_rms_norm(without, masked_backward, takes=["residual"], rng=0)
    assert "this is not the RMS normalization asked for" in str(report)
    report = check_rms_norm(masked, twice, takes=["dsum"], rng=0)
    assert failed(report) == {"x"}
    report = check_rms_norm(masked, ignored, takes=["dsum"], rng=0)
    assert report.verdict == "FAIL"
    assert "dx with a dsum is dx alone" in str(report)
    with pytest.raises(ValueError, match="takes must be a sequence of"):
        check_rms_norm(masked, masked_backward, takes="where")
