"""`check_layer_norm`: what it adds to finite differences (test_check_rms_norm.py: of both norms)."""

import re

import numpy as np
import pytest
from checked_operations import data, failed

from stablenorm import check_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.check import ArgumentResult
from stablenorm.check.closed_form import Candidate, Case
from stablenorm.check.layer_norm import decided
from stablenorm.check.operation import Operation
from stablenorm.testing.mistakes import MISTAKES, VARIANTS, Kept, backward, forward

OURS = layer_norm_forward, layer_norm_backward


def mean(a):
    return a.mean(axis=-1, keepdims=True)


def findings(report, layer, verdict):
    return {f.name: f.message for f in report.findings if (f.layer, f.verdict) == (layer, verdict)}


def test_there_are_thirteen_mistakes_and_five_variants():
    assert len({mistake.diagnosis for mistake in MISTAKES.values()}) == len(MISTAKES) == 13
    assert len(VARIANTS) == 5


@pytest.mark.parametrize(("scale", "eps"), [(1, 1e-5), (1e-300, 0.0)])
def test_one_row_without_parameters(scale, eps):
    assert check_layer_norm(*OURS, scale * data(0, (8,))[0], eps=eps, rng=0).verdict == "PASS"


@pytest.mark.parametrize("name", [n for n in MISTAKES if n != "rstd rounded to f32"])
def test_wrong_float32_code_fails(name):
    args = data(0, dtype=np.float32)
    report = check_layer_norm(forward, MISTAKES[name].backward, *args, rng=0)
    assert failed(report) == {MISTAKES[name].argument}, str(report)


def test_right_float32_code_passes_by_the_closed_form():
    """Too coarse for differences, which even call an element wrong."""
    args = data(1, (32, 768), 1e4, np.float32)
    report = check_layer_norm(forward, backward, *args, rng=1, probes=1)
    assert report.verdict == "PASS", str(report)
    assert "closed form" in {result.method for result in report.arguments}
    # An offset that leaves no digits.
    args = data(0, (4, 768), 1e6, np.float32)
    report = check_layer_norm(forward, backward, *args, rng=0, max_elements=2, probes=1)
    assert report.verdict == "INCONCLUSIVE", str(report)


def uneven(x, gamma, beta, eps):
    """An absolute step inside: 2^k x with 4^k eps no longer has the same y."""
    return forward(x, gamma, beta, eps if eps < 1.1e-5 else eps * 1.01)


def batch_norm(x, gamma, beta, eps):
    """Right for 4 rows alone: elsewhere the first row sees the others."""
    y, cache = forward(x, gamma, beta, eps)
    return (y if len(x) == 4 else y + 1e-9 * y[::-1]), cache


def places(dy, cache):
    """Right for columns in any order but for the last one, where x is 4 higher."""
    dx, dgamma, dbeta = backward(dy, cache)
    return dx + 1e-9 * (mean(cache.x) > 3), dgamma, dbeta


@pytest.mark.parametrize(
    ("front", "back", "name"),
    [
        (uneven, backward, "4 x and 16 eps"),
        (batch_norm, backward, "the first rows alone"),
        (forward, places, "x + 4"),
    ],
)
def test_what_is_right_on_ordinary_data_alone_is_found(front, back, name):
    report = check_layer_norm(front, back, *data(0), rng=0)
    assert report.verdict == "FAIL"
    assert f"right for {name}" in findings(report, "closed form", "FAIL")


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
    # What secants reach is 1e-12.
    assert plain.resolution < 1e-13
    for each, digits in ((report, 6), (plain, 10)):
        message = findings(each, "hard inputs", "NOTE")["right for offset 1e4"]
        said = re.search(r"keeps (\d+) of 16 digits", message)
        assert digits <= int(said[1]) <= digits + 3
    assert findings(check_layer_norm(*OURS, *data(0), rng=0), "hard inputs", "NOTE") == {}


def test_a_division_by_gamma_is_wrong_where_gamma_is_zero():
    def dividing(dy, cache):
        dx, dgamma, dbeta = backward(dy, cache)
        with np.errstate(all="ignore"):
            return dx / cache.gamma * cache.gamma, dgamma, dbeta

    report = check_layer_norm(forward, dividing, *data(0), rng=0)
    names = {"right for gamma with zeros", "right for gamma = 0"}
    assert findings(report, "hard inputs", "FAIL").keys() == names


def test_what_a_program_does_not_take_is_a_note():
    def fixed(x, gamma, beta, eps):
        # As people write it, and as the checker must be able to take it.
        assert x.shape[-1] == 8, "8 only"
        return forward(x, gamma, beta, eps)

    def for_two_axes(dy, cache):
        return backward(dy, cache)[0], (dy * cache.xhat).sum(axis=0), dy.sum(axis=0)

    report = check_layer_norm(fixed, for_two_axes, *data(0), rng=0)
    assert report.passed, str(report)
    assert "8 only" in str(findings(report, "hard inputs", "NOTE"))
    assert "of shape (1, 8)" in str(findings(report, "closed form", "NOTE"))


def test_what_cannot_be_checked_is_no_traceback():
    assert check_layer_norm(forward, lambda *_: 1 / 0, *data(0), rng=0).verdict == "FAIL"
    with pytest.raises(ValueError, match="eps must be finite and >= 0, got -1"):
        check_layer_norm(forward, backward, eps=-1)


# ---- diagnosis ----


def spoiled(make):
    """Build a backward from what `make` turns the right gradients into."""
    return lambda dy, cache: make(dy, cache, *backward(dy, cache))


def without_eps(dy, cache):
    """Use an rstd of its own everywhere, as people write it."""
    rstd, g = cache.var**-0.5, cache.gamma * dy
    xhat = (cache.x - cache.mean) * rstd
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


NOISE = np.random.default_rng(0).standard_normal((4, 8))
# The last ones are not sure, and not named.
NAMED = [
    (
        spoiled(lambda dy, k, a, b, c: (a, b - dy[1] * k.xhat[1], c - dy[1])),
        "row 1 is not accumulated in dgamma and dbeta",
    ),
    (spoiled(lambda _, __, a, b, c: (a, c, b)), "dgamma and dbeta are swapped"),
    (spoiled(lambda _, __, a, b, c: (a, b / 4, c)), "dgamma is averaged over the rows, not summed"),
    (spoiled(lambda _, __, a, b, c: (1.01 * a, b, c)), "dx is off by a factor of 1.01"),
    (without_eps, "eps is missing from rstd in dx and dgamma"),
    (spoiled(lambda _, __, a, b, c: (a * (1 + 1e-3 * NOISE), b, c)), None),
    (spoiled(lambda dy, k, a, b, c: (a + 1e-3 * k.xhat * k.x * dy, b, c)), None),
    # Rows that see one another.
    (spoiled(lambda _, __, a, b, c: (a + 1e-9 * a.sum(axis=0), b, c)), None),
]


@pytest.mark.parametrize(("wrong", "expected"), NAMED, ids=range(len(NAMED)))
def test_more_causes_are_named_where_they_are_sure(wrong, expected):
    report = check_layer_norm(forward, wrong, *data(0), rng=0)
    assert report.verdict == "FAIL"
    assert report.diagnosis == (() if expected is None else (expected,))


def test_what_a_forward_makes_of_eps_and_float32_is_told():
    def single(x, gamma, beta, eps):
        y, cache = forward(*(a.astype(np.float32) for a in (x, gamma, beta)), eps)
        return y.astype(np.float64), cache

    narrow = check_layer_norm(single, backward, *data(0), rng=0)
    assert "as if something were kept in float32" in str(findings(narrow, "closed form", "FAIL"))
    twice = check_layer_norm(lambda x, g, b, e: forward(x, g, b, 2 * e), backward, rng=0)
    assert twice.verdict == "FAIL"
    assert twice.diagnosis == ("eps was applied twice in the forward",)
    fixed = check_layer_norm(lambda x, g, b, _: forward(x, g, b, 1e-3), backward, rng=0)
    assert fixed.passed, str(fixed)
    assert "it is 0.001 inside" in str(findings(fixed, "closed form", "NOTE"))


def test_the_closed_form_decides_where_it_can():
    """Differences are the noise of about ten samples; they decide where an offset leaves it no digits."""
    case = Case(*data(0), 1e-5, data(1)[0])
    candidate = Candidate(Operation(forward, backward))
    right = candidate.judge(case, candidate.run(case))["dx"]
    result = ArgumentResult("x", "FAIL", 1, 1, failing=1, index=(0, 0), actual=1.0, numeric=1.1)
    assert decided(result, [right]).verdict == "PASS"
    assert decided(result, []) is result
    far = case._replace(x=case.x + 1e16)
    unknown = candidate.judge(far, candidate.run(far))["dx"]
    assert decided(result, [unknown]) is result
