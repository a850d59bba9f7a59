"""`check_layer_norm`: what it adds to finite differences, on right and on wrong layer norms."""

import re
from dataclasses import replace

import numpy as np
import pytest

from stablenorm import (
    check_layer_norm,
    exact_layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from stablenorm.check import ArgumentResult
from stablenorm.check.cases import ordinary
from stablenorm.check.causes import CHANGES, Evidence, diagnose_dx
from stablenorm.check.closed_form import Candidate, Case, Expected, statistics
from stablenorm.check.layer_norm import cleared
from stablenorm.check.operation import Operation
from stablenorm.testing.mistakes import MISTAKES, VARIANTS, Kept, backward, forward

OURS = {"ours": (layer_norm_forward, layer_norm_backward)}


def data(seed, shape=(4, 8), dtype=np.float64, offset=0.0):
    rng = np.random.default_rng(100 + seed)
    x = offset + rng.standard_normal(shape)
    gamma = 1 + 0.1 * rng.standard_normal(shape[-1])
    return [a.astype(dtype) for a in (x, gamma, 0.1 * rng.standard_normal(shape[-1]))]


def mean(a):
    return a.mean(axis=-1, keepdims=True)


def failed(report):
    return {result.name for result in report.arguments if result.verdict == "FAIL"}


def findings(report, layer, verdict):
    return [f for f in report.findings if f.layer == layer and f.verdict == verdict]


# ---- the gates, with few seeds ----


@pytest.mark.parametrize("shape", [(4, 8), (32, 768)])
@pytest.mark.parametrize("name", MISTAKES)
def test_every_known_mistake_is_found_and_named(name, shape):
    mistake = MISTAKES[name]
    # Of the large one, few finite differences: the layers beyond them are asked here.
    options = {} if shape == (4, 8) else {"max_elements": 2, "probes": 1}
    for seed in range(2 if shape == (4, 8) else 1):
        args = data(seed, shape)
        report = check_layer_norm(forward, mistake.backward, *args, rng=seed, **options)
        assert report.verdict == "FAIL"
        assert failed(report) == {mistake.argument}
        assert report.diagnosis == (mistake.diagnosis,)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", [*VARIANTS, *OURS])
def test_no_false_alarm(name, dtype):
    for seed, offset in enumerate((0.0, 1e2, 1e6)):
        args = data(seed, dtype=dtype, offset=offset)
        report = check_layer_norm(*(VARIANTS | OURS)[name], *args, rng=seed)
        assert report.verdict != "FAIL", str(report)
        assert report.diagnosis == ()


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8), (4, 1), (4, 3)])
def test_other_shapes(shape):
    args = data(0, shape)
    # Without gamma and beta as well.
    for given in (args, args[:1]):
        report = check_layer_norm(*OURS["ours"], *given, rng=0)
        assert report.verdict != "FAIL", str(report)


# ---- the layers ----


def test_resolutions_are_at_rounding_level():
    report = check_layer_norm(forward, backward, *data(0), rng=0)
    seen = [f.resolution for f in findings(report, "closed form", "PASS")]
    assert len(seen) >= 10
    assert max(seen) < 1e-13
    # What secants reach is 1e-12.
    assert report.resolution < 1e-13


def test_a_scale_that_changes_y_is_found():
    """An absolute step inside: 2^k x with 4^k eps no longer has the same y."""

    def uneven(x, gamma, beta, eps):
        return forward(x, gamma, beta, eps if eps < 1.1e-5 else eps * 1.01)

    report = check_layer_norm(uneven, backward, *data(0), rng=0)
    assert [f for f in findings(report, "closed form", "FAIL") if "16 eps" in f.name]


def batch_norm(x, gamma, beta, eps):
    """Right for 4 rows alone: elsewhere the first row sees the others."""
    y, cache = forward(x, gamma, beta, eps)
    return (y if len(x) == 4 else y + 1e-9 * y[::-1]), cache


def places(dy, cache):
    """Right for columns in any order but for the last one, where x is 4 higher."""
    dx, dgamma, dbeta = backward(dy, cache)
    return dx + 1e-9 * (mean(cache.x) > 3), dgamma, dbeta


def mixing(dy, cache):
    dx, dgamma, dbeta = backward(dy, cache)
    return dx + 1e-9 * dx.sum(axis=0), dgamma, dbeta


@pytest.mark.parametrize(
    ("front", "back", "name"),
    [(batch_norm, backward, "first rows alone"), (forward, places, "x + 4"), (forward, mixing, "")],
    ids=["batch norm", "places", "rows that see one another"],
)
def test_what_is_right_on_ordinary_data_alone_is_found(front, back, name):
    report = check_layer_norm(front, back, *data(0), rng=0)
    assert report.verdict == "FAIL"
    if name:
        assert [f for f in findings(report, "closed form", "FAIL") if name in f.name]
    else:
        assert failed(report) == {"x"}


# ---- hard inputs: inaccurate is not wrong ----


def one_pass(x, gamma, beta, eps):
    mu = mean(x)
    var = mean(x * x) - mu * mu
    rstd = 1 / np.sqrt(var + eps)
    xhat = (x - mu) * rstd
    return gamma * xhat + beta, Kept(x, gamma, eps, mu, var, rstd, xhat)


def test_a_one_pass_variance_is_inaccurate_not_wrong():
    for offset in (0.0, 1e4):
        report = check_layer_norm(one_pass, backward, *data(0, offset=offset), rng=0)
        assert report.verdict != "FAIL", str(report)
        assert report.diagnosis == ()
    plain = check_layer_norm(forward, backward, *data(0), rng=0)
    for each, off in ((report, 1e-9), (plain, 1e-13)):
        notes = {f.name: f.message for f in findings(each, "hard inputs", "NOTE")}
        said = re.search(r"inaccurate here: off by (\S+) of", notes["right for offset 1e4"])
        assert off < float(said[1]) < 1e3 * off
    ours = check_layer_norm(*OURS["ours"], *data(0), rng=0)
    assert findings(ours, "hard inputs", "NOTE") == []


def test_float32_inside_float64_is_wrong_and_told():
    def single(x, gamma, beta, eps):
        y, cache = forward(*(a.astype(np.float32) for a in (x, gamma, beta)), eps)
        return y.astype(np.float64), cache

    report = check_layer_norm(single, backward, *data(0), rng=0)
    messages = [f.message for f in findings(report, "closed form", "FAIL")]
    assert any("as if something were kept in float32" in message for message in messages)


def test_a_division_by_gamma_is_wrong_where_gamma_is_zero():
    def dividing(dy, cache):
        dx, dgamma, dbeta = backward(dy, cache)
        with np.errstate(all="ignore"):
            return dx / cache.gamma * cache.gamma, dgamma, dbeta

    report = check_layer_norm(forward, dividing, *data(0), rng=0)
    assert {f.name for f in findings(report, "hard inputs", "FAIL")} == {
        "right for gamma with zeros",
        "right for gamma = 0",
    }


def test_what_a_program_does_not_take_is_a_note():
    def fixed(x, gamma, beta, eps):
        # As people write it, and as the checker must be able to take it.
        assert x.shape[-1] == 8, "8 only"
        return forward(x, gamma, beta, eps)

    def for_two_axes(dy, cache):
        return backward(dy, cache)[0], (dy * cache.xhat).sum(axis=0), dy.sum(axis=0)

    report = check_layer_norm(fixed, for_two_axes, *data(0), rng=0)
    assert report.passed, str(report)
    assert "8 only" in findings(report, "hard inputs", "NOTE")[0].message
    assert any("of shape (1, 8)" in f.message for f in findings(report, "closed form", "NOTE"))


# ---- diagnosis ----


def spoiled(make):
    """Build a backward from what `make` turns the right gradients into."""
    return lambda dy, cache: make(dy, cache, *backward(dy, cache))


def natural(rstd_of):
    """Build a backward that uses its own rstd everywhere, as people write it."""

    def wrong(dy, cache):
        rstd, g = rstd_of(cache), cache.gamma * dy
        xhat = (cache.x - cache.mean) * rstd
        dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
        return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)

    return wrong


def drop_row(dy, c, dx, dgamma, dbeta):
    return dx, dgamma - dy[1] * c.xhat[1], dbeta - dy[1]


NAMED = [
    (spoiled(drop_row), "row 1 is not accumulated in dgamma and dbeta"),
    (spoiled(lambda _, __, a, b, c: (a, c, b)), "dgamma and dbeta are swapped"),
    (spoiled(lambda _, __, a, b, c: (a, b / 4, c)), "dgamma is averaged over the rows, not summed"),
    (spoiled(lambda _, __, a, b, c: (1.01 * a, b, c)), "dx is off by a factor of 1.01"),
    (natural(lambda c: c.var**-0.5), "eps is missing from rstd in dx and dgamma"),
    (natural(lambda c: (c.var + 2 * c.eps) ** -0.5), "eps was applied twice in dx and dgamma"),
    (
        spoiled(lambda dy, k, a, b, c: (a + 0.1 * k.rstd * mean(k.gamma * dy), b, c)),
        "the mean of g enters dx 0.9 times, not once",
    ),
]


@pytest.mark.parametrize(("wrong", "expected"), NAMED)
def test_more_causes_are_named(wrong, expected):
    report = check_layer_norm(forward, wrong, *data(0), rng=0)
    assert report.verdict == "FAIL"
    assert report.diagnosis == (expected,)


def test_what_is_not_sure_is_not_named():
    noise = np.random.default_rng(0)
    for make in (
        lambda _, __, a, b, c: (a * (1 + 1e-3 * noise.standard_normal(a.shape)), b, c),
        lambda dy, cache, a, b, c: (a + 1e-3 * cache.xhat * cache.x * dy, b, c),
        lambda dy, __, a, b, c: (a, b + 1e-3 * dy[0] ** 2, c),
        lambda dy, cache, _, b, c: (cache.rstd * dy * cache.gamma**2, b, c),
    ):
        report = check_layer_norm(forward, spoiled(make), *data(0), rng=0)
        assert report.verdict == "FAIL"
        assert report.diagnosis == ()


def test_every_change_of_dx_is_named_and_pairs_are_never_told_as_others(rng):
    x, gamma, beta = data(0, (6, 12))
    evidence = Evidence(ordinary(Case(x, gamma, beta, 1e-5, x), rng), 2.0**-53)
    for change in CHANGES:
        assert diagnose_dx(evidence, evidence.dx([change])[0]) == (change.words,)
    named = 0
    for _ in range(10):
        pair = [CHANGES[i] for i in rng.choice(len(CHANGES), 2, replace=False)]
        planted = pair[: 1 + (pair[0].kind != pair[1].kind)]
        said = diagnose_dx(evidence, evidence.dx(planted)[0])
        assert set(said) <= {change.words for change in planted}
        named += len(said) == 2
    assert named >= 3


@pytest.mark.parametrize(
    ("denominator", "diagnosis"),
    [
        (lambda v, e, n: v * n / (n - 1) + e, "the variance is divided by n - 1 in the forward"),
        (lambda v, e, _: v + 2 * e, "eps was applied twice in the forward"),
    ],
)
def test_a_forward_that_is_another_function_is_told(denominator, diagnosis):
    def other(x, gamma, beta, eps):
        centered = x - mean(x)
        var = mean(centered**2)
        rstd = denominator(var, eps, x.shape[-1]) ** -0.5
        kept = Kept(x, gamma, eps, mean(x), var, rstd, centered * rstd)
        return gamma * centered * rstd + beta, kept

    report = check_layer_norm(other, backward, *data(0), rng=0)
    assert report.verdict == "FAIL"
    assert report.diagnosis == (diagnosis,)


def test_an_eps_fixed_inside_is_told_and_used():
    def fixed(x, gamma, beta, _eps):
        return forward(x, gamma, beta, 1e-3)

    report = check_layer_norm(fixed, backward, *data(0), rng=0)
    assert report.passed, str(report)
    assert any("it is 0.001 inside" in f.message for f in report.findings)


def test_a_backward_that_raises_is_no_traceback():
    report = check_layer_norm(forward, lambda *_: 1 / 0, *data(0), rng=0)
    assert report.verdict == "FAIL"


# ---- the checker's own formulas and row_identities ----


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
def test_the_checkers_own_gradients_are_right_to_their_last_digits(offset):
    x, gamma, beta = data(0, (3, 7), offset=offset)
    dy = np.random.default_rng(0).standard_normal(x.shape)
    expected = Expected(Case(x, gamma, beta, 1e-5, dy), 2.0**-53)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    for name in ("y", "dx", "dgamma", "dbeta"):
        bounds = expected.bounds_of(name, x.dtype)
        error = np.abs(bounds.value - exact.rounded(name, np.float64))
        # 16 roundings of what the element is made of, whatever the offset.
        assert (error <= 16 * 2.0**-53 * bounds.magnitude).all()


def test_statistics_survive_the_whole_range():
    row = np.array([[1.0, -1.0, 1.0, -1.0]])
    for scale in (np.finfo(np.float64).max, 1.0, 2.0**-1000):
        stats = statistics(scale * row, 0.0)
        np.testing.assert_array_equal(stats.xhat, row)
        assert stats.s[0, 0] == scale


@pytest.mark.parametrize("shape", [(4, 8), (32, 768)])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_right_float32_code_passes(shape, offset):
    """Too coarse for differences; at (32, 768), offset 1e4, they even call an element wrong."""
    options = {} if shape == (4, 8) else {"probes": 1}
    report = check_layer_norm(
        forward, backward, *data(1, shape, np.float32, offset), rng=1, **options
    )
    assert report.verdict == "PASS", str(report)
    assert offset == 0 or "closed form" in {result.method for result in report.arguments}


@pytest.mark.parametrize("name", [n for n in MISTAKES if n != "rstd rounded to f32"])
def test_wrong_float32_code_fails(name):
    report = check_layer_norm(forward, MISTAKES[name].backward, *data(0, dtype=np.float32), rng=0)
    assert failed(report) == {MISTAKES[name].argument}, str(report)


def test_an_offset_that_leaves_no_digits_is_inconclusive():
    args = data(0, (4, 768), np.float32, 1e6)
    report = check_layer_norm(forward, backward, *args, rng=0, max_elements=2, probes=1)
    assert report.verdict == "INCONCLUSIVE", str(report)


def test_differences_that_contradict_the_closed_form_still_fail():
    case = Case(*data(0), 1e-5, data(1)[0])
    candidate = Candidate(Operation(forward, backward))
    right = candidate.judge(case, candidate.run(case))["dx"]
    result = ArgumentResult(
        "x", "FAIL", 1, 1, failing=1, index=(0, 0), actual=1.0, numeric=1.1, bound_numeric=0.05,
        bound_actual=0.0,
    )  # fmt: skip
    assert cleared(result, right).verdict == "PASS"
    assert cleared(replace(result, numeric=2.0), right).verdict == "FAIL"
