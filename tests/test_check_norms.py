"""Verdicts, causes and words of `check_layer_norm` and `check_rms_norm`."""

from functools import partial

import mistakes as m
import numpy as np
import pytest
from checked_operations import Buffers, Latest, both, data
from mistakes import Cache, backward, forward, rms_backward, rms_forward, row_mean
from rationals import NAMES

import stablenorm as sn
from stablenorm import check_layer_norm, check_rms_norm
from stablenorm.check.closed_form import Case, Expected

OURS = sn.layer_norm_forward, sn.layer_norm_backward
NORMS = {
    "layer": (check_layer_norm, *OURS),
    "rms": (check_rms_norm, sn.rms_norm_forward, sn.rms_norm_backward),
}
PLAIN = {"layer": (forward, backward), "rms": (rms_forward, rms_backward)}
RIGHT = {"layer": [*m.VARIANTS.values(), OURS], "rms": [*m.RMS_VARIANTS.values(), NORMS["rms"][1:]]}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("kind", "code"), [(kind, c) for kind in NORMS for c in RIGHT[kind]])
def test_no_false_alarm(kind, code, dtype):
    for seed, (shape, offset) in enumerate((((2, 3, 8), 0.0), ((4, 8), 1e6))):
        report = NORMS[kind][0](*code, *data(seed, shape, offset, dtype), rng=seed)
        accepted = {"PASS", "INCONCLUSIVE"} if offset and dtype == np.float32 else {"PASS"}
        assert report.verdict in accepted, str(report)
        assert report.diagnosis == ()
        notes = {finding.name for finding in report.findings if finding.verdict == "NOTE"}
        # Plain formulas lose nothing on constant rows.
        assert not notes & {"constant rows", "tiny values"}


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("kind", NORMS)
def test_the_checkers_own_gradients_are_right_to_their_last_digits(kind, offset):
    x, gamma, beta = data(0, (3, 7), offset)
    dy = np.random.default_rng(0).standard_normal(x.shape)
    expected = Expected(Case(x, gamma, beta, 1e-5, dy, kind, 1.0), 2.0**-53)
    exact = getattr(sn, f"exact_{kind}_norm")(x, gamma, beta, 1e-5, dy, gamma_offset=1.0)
    for name in NAMES:
        value, _, magnitude = expected.bounds_of(name, x.dtype)
        # At most 16 roundings of the element's magnitude, whatever the offset.
        error = np.abs(value - exact.rounded(name, np.float64))
        assert (error <= 16 * 2.0**-53 * magnitude).all()


@pytest.mark.parametrize("kind", NORMS)
def test_a_gamma_offset_is_part_of_the_formula(kind):
    check, front, back = NORMS[kind]
    assert check(partial(front, gamma_offset=1.0), back, gamma_offset=1.0, rng=0).passed
    report = check(front, back, gamma_offset=1.0, rng=0)
    assert report.diagnosis == ("gamma_offset is not added to gamma in the forward",)
    # The offset is added in the forward alone.

    def half(x, gamma, beta, eps):
        y, cache = PLAIN[kind][0](x, gamma + 1, beta, eps)
        return y, cache._replace(gamma=gamma)

    report = check(half, PLAIN[kind][1], gamma_offset=1.0, rng=0)
    assert report.diagnosis == ("gamma_offset is not added to gamma in dx",)
    with pytest.raises(ValueError, match="gamma_offset must be finite, and 0 without a gamma"):
        check(front, back, np.eye(3), gamma_offset=1.0)


def findings(report, layer, verdict):
    return {f.name: f.message for f in report.findings if (f.layer, f.verdict) == (layer, verdict)}


def test_right_float32_code_passes_by_the_closed_form():
    """Differences are too coarse here, and even call an element wrong."""
    args = data(1, (32, 768), 1e4, np.float32)
    report = check_layer_norm(forward, backward, *args, rng=1)
    assert report.verdict == "PASS", str(report)
    assert "closed form" in {result.method for result in report.arguments}
    # This offset leaves no digits.
    args = data(0, (4, 768), 1e6, np.float32)
    report = check_layer_norm(forward, backward, *args, rng=0)
    assert report.verdict == "INCONCLUSIVE", str(report)


# ---- hard inputs: inaccurate is not wrong ----


def one_pass(x, gamma, beta, eps):
    mu = row_mean(x)
    var = row_mean(x * x) - mu * mu
    rstd = 1 / np.sqrt(var + eps)
    xhat = (x - mu) * rstd
    return gamma * xhat + beta, Cache(x, gamma, eps, mu, var, rstd, xhat)


def test_a_one_pass_variance_is_inaccurate_not_wrong():
    for offset in (0.0, 1e4):
        report = check_layer_norm(one_pass, backward, *data(0, offset=offset), rng=0)
        assert report.verdict != "FAIL", str(report)
        assert report.diagnosis == ()


# ---- diagnosis ----


def spoiled(make):
    """Build a backward that returns ``make(dy, cache, *gradients)`` of the right gradients."""
    return lambda dy, cache: make(dy, cache, *backward(dy, cache))


def terms(*powers, over_g=-1, over_xhat=-1, layer=True):
    """Build a backward whose terms have other powers of rstd, or means over other axes."""

    def wrong(dy, cache):
        a, b, c = (cache.rstd**power for power in powers or (1, 1, 1))
        g, xhat = cache.gamma * dy, cache.xhat
        mean_g, mean_xhat = g.mean(over_g, keepdims=True), (g * xhat).mean(over_xhat, keepdims=True)
        dx = a * g - layer * b * mean_g - c * xhat * mean_xhat
        return dx, *(backward if layer else rms_backward)(dy, cache)[1:]

    return wrong


NOISE = np.random.default_rng(0).standard_normal((4, 8))
POWER = "{} has rstd^{} in place of rstd in dx".format
LEADING = "{} is a mean over {}, not the last in dx".format
POWERS = [
    ("rms", terms(1, 1, -1, layer=False), POWER("the xhat term", -1)),
    ("layer", terms(1, 1, 3), POWER("the xhat term", 3)),
    ("layer", terms(1, 0, 1), "the mean of g lacks rstd in dx"),
    ("layer", terms(1, 2, 1), "the mean of g has rstd twice in dx"),
    ("layer", terms(-2, -2, -2), "dx has rstd^-2 in place of rstd"),
    ("layer", terms(3, 3, 1), "g and the mean of g have rstd^3 in place of rstd in dx"),
]
OTHERS = [
    (spoiled(lambda dy, k, a, b, c: (a, b - dy[-1] * k.xhat[-1], c - dy[-1])),
     "the last row is not accumulated in dgamma and dbeta"),
    (spoiled(lambda _, __, a, b, c: (a, c, b)), "dgamma and dbeta are exchanged"),
    (spoiled(lambda dy, _, a, b, c: (a, b / len(dy), c)), "dgamma is averaged over the rows, not summed"),
    (spoiled(lambda _, __, a, b, c: (1.01 * a, b, c)), "dx is off by a factor of 1.01"),
    # A backward with an rstd of its own, as people write it.
    (lambda dy, k: backward(dy, k._replace(rstd=k.var**-0.5, xhat=(k.x - k.mean) * k.var**-0.5)),
     "eps is missing from rstd in dx and dgamma"),
    (lambda dy, k: backward(dy, k._replace(rstd=k.var)),
     "rstd is the variance itself in dx"),
    # The check names no cause that is unsure.
    (spoiled(lambda _, __, a, b, c: (a * (1 + 1e-3 * NOISE), b, c)), None),
    (spoiled(lambda dy, k, a, b, c: (a + 1e-3 * k.xhat * k.x * dy, b, c)), None),
    # Rows that see one another.
    (spoiled(lambda _, __, a, b, c: (a + 1e-9 * a.sum(axis=0), b, c)), None),
]  # fmt: skip
AXES = {"shape": (2, 3, 8)}
# The norm, a backward, its diagnosis, the argument that is blamed, and the data.
NAMED = [
    # These compare a sample of the elements, the rows below all elements.
    *(("layer", *mistake, {"shape": (8, 96)}) for mistake in m.MISTAKES.values()),
    *(("rms", *mistake, {}) for mistake in m.RMS_MISTAKES.values()),
    *((*row, None, {"shape": (3, 4), "dtype": dtype}) for row in POWERS for dtype in ("f8", "f4")),
    *(("layer", terms(**{f"over_{of}": axes}), LEADING(term, said), None, AXES)
      for of, term in (("g", "the mean of g"), ("xhat", "the xhat term"))
      for axes, said in ((0, "the first axis"), ((0, 1), "the leading axes"))),
    *(("layer", *row, None, {}) for row in OTHERS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrong", "diagnosis", "blamed", "options"),
    NAMED,
    ids=[f"{at}: {row[2]}" for at, row in enumerate(NAMED)],
)
def test_a_mistake_is_found_and_named_where_that_is_sure(kind, wrong, diagnosis, blamed, options):
    report = NORMS[kind][0](PLAIN[kind][0], wrong, *data(0, **options), rng=0)
    assert report.verdict == "FAIL"
    assert report.diagnosis == (() if diagnosis is None else (diagnosis,))
    failed = [r.name for r in report.arguments if r.verdict == "FAIL"]
    assert blamed is None or failed == [blamed]


def test_another_eps_or_float32_inside_the_forward_is_told():
    def single(x, gamma, beta, eps):
        y, cache = forward(*(a.astype(np.float32) for a in (x, gamma, beta)), eps)
        return y.astype(np.float64), cache

    narrow = check_layer_norm(single, backward, *data(0), rng=0)
    assert narrow.passed
    assert "  the code computes in float32 inside" in str(narrow).splitlines()[1]
    twice = check_layer_norm(lambda x, g, b, e: forward(x, g, b, 2 * e), backward, rng=0)
    assert twice.verdict == "FAIL"
    assert twice.diagnosis == ("eps was applied twice in the forward",)
    fixed = check_layer_norm(lambda x, g, b, _: forward(x, g, b, 1e-3), backward, rng=0)
    assert fixed.passed, str(fixed)
    assert "it is 0.001 inside" in str(findings(fixed, "the forward", "NOTE"))


# ---- code as people write it, right and wrong ----


def dx(make):
    """Return a function that replaces dx of a pair by ``make(dx, dy, cache)``."""

    def spoil(forward, backward):
        def wrong(dy, cache):
            dx, *sums = backward(dy, cache)
            return make(dx, dy, cache).astype(dx.dtype), *sums

        return forward, wrong

    return spoil


def spoiled_tail(dx, *_):
    """Spoil a gradient by 1 in 1000, from the ninth row on."""
    dx = dx.copy()
    dx.reshape(-1, dx.shape[-1])[8:] *= 1.001
    return dx


def batch_norm(forward, backward):
    """Return a pair that is right for 4 rows only: otherwise rows see one another."""

    def call(x, gamma, beta, eps):
        y, cache = forward(x, gamma, beta, eps)
        return (y if len(x) == 4 else y + 1e-9 * y[::-1]), cache

    return call, backward


# Forms of code: a function from the right pair to the pair to check, the verdict, words of the report, and the dtypes
# of the test.
WIDE, BOTH = ("float64",), ("float64", "float32")
OVERWRITTEN = "overwritten by the next call"
FORMS = {
    "dx = 0 on constant rows": (
        dx(lambda dx, _, c: np.where(c.var < 1e-12, 0, dx)), "FAIL", "constant rows", BOTH),
    "dx = dy for n = 1": (
        dx(lambda dx, dy, _: dy if dy.shape[-1] == 1 else dx), "FAIL", "n = 1", BOTH),
    "xhat clipped at 5": (
        lambda f, b: (f, lambda dy, c: b(dy, c._replace(xhat=np.clip(c.xhat, -5, 5)))),
        "FAIL", "19 rows of 33", BOTH),
    "rows from 8 on": (dx(spoiled_tail), "FAIL", "19 rows of 33", WIDE),
    "the latest forward": (
        lambda f, b: both(Latest(f, b)), "FAIL", "of the latest forward", WIDE),
    "a buffer for each result": (lambda f, b: both(Buffers(f, b)), "PASS", OVERWRITTEN, BOTH),
    "a cache that cannot be copied": (
        lambda f, b: both(Buffers(f, b, locked=True)), "PASS", OVERWRITTEN, WIDE),
    # Code that is right on ordinary data only: eps changes above 1.1e-5; rows see one another unless they are 4; rows
    # with a mean above 3 are wrong.
    "4 x and 16 eps": (
        lambda f, b: (lambda x, gamma, beta, eps: f(x, gamma, beta, eps * (1 + 0.01 * (eps > 1.1e-5))), b),
        "FAIL", "4 x and 16 eps", WIDE),
    "the first rows alone": (batch_norm, "FAIL", "the first rows alone", WIDE),
    "wrong for three axes": (
        dx(lambda dx, *_: dx * (1 + 1e-9 * (dx.ndim == 3))), "FAIL", "one more leading axis", WIDE),
    "wrong for one axis": (
        dx(lambda dx, *_: dx * (1 + 1e-9 * (dx.ndim == 1))), "FAIL", "no leading axis", WIDE),
    "x + 4": (dx(lambda dx, _, c: dx + 1e-9 * (row_mean(c.x) > 3)), "FAIL", "x + 4", WIDE),
    "NaN where rows are constant": (
        dx(lambda dx, _, c: np.where(c.var < 1e-12, np.nan, dx)),
        "FAIL", "tiny values: dx is NaN on all rows", WIDE),
    "infinite in row 18": (
        dx(lambda dx, *_: np.where(np.arange(len(dx))[:, None] == 18, np.inf, dx)),
        "FAIL", "19 rows of 33: dx is infinite on row 18 of 19", WIDE),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [(kind, name, dtype) for name, form in FORMS.items() for dtype in form[3] for kind in NORMS
     if (name, kind) != ("x + 4", "rms")],
)  # fmt: skip
def test_each_form_of_code_has_its_verdict(kind, form, dtype):
    make, verdict, words, _ = FORMS[form]
    report = NORMS[kind][0](*make(*PLAIN[kind]), *data(0, dtype=dtype), rng=0)
    assert report.verdict == verdict, str(report)
    said = [f"{f.name}: {f.message}" for f in report.findings if verdict in ("PASS", f.verdict)]
    assert any(words in line for line in said), str(report)
    assert verdict == "FAIL" or sum(OVERWRITTEN in line for line in said) == bool(words)


def test_a_y_of_the_other_norm_is_told_so():
    for kind, other, name in (("layer", "rms", "an RMS"), ("rms", "layer", "a layer")):
        said = f"it is that of {name} norm: say --kind {other}, or check_{other}_norm"
        assert said in " ".join(str(NORMS[kind][0](*PLAIN[other], rng=0)).split())


def three_axes(x, gamma, beta, eps):
    """Take three axes only, as teaching code does."""
    B, T, _ = x.shape
    assert B * T
    return forward(x, gamma, beta, eps)


def test_every_trial_has_as_many_axes_as_the_first_run():
    report = check_layer_norm(three_axes, backward, *data(0, (2, 3, 8)), rng=0)
    assert report.passed
    assert not any("raised" in f.message for f in report.findings), str(report)
    wrong = spoiled(lambda dy, _, a, b, c: (a * (dy.shape[-1] != 2), b, c))
    report = check_layer_norm(three_axes, wrong, *data(0, (2, 3, 8)), rng=0)
    assert [f.name for f in report.findings if f.verdict == "FAIL"] == ["n = 2"]


def test_a_place_is_that_of_the_callers_array():
    def wrong(dy, cache):
        dx, *sums = sn.layer_norm_backward(dy, cache)
        if dx.shape == (2, 8, 3):
            dx[1, 5, 2] *= 1.01
        return dx, *sums

    call = lambda *args: sn.layer_norm_forward(*args, axis=1)
    x = data(0, (2, 3, 8))[0].swapaxes(1, 2)
    dx = check_layer_norm(call, wrong, x, axis=1, rng=0).arguments[0]
    assert (dx.verdict, dx.index, dx.pattern) == ("FAIL", (1, 5, 2), "element (1, 5, 2)")


def test_a_backward_that_modifies_dy_is_told_so_first():
    in_place = lambda dy, k: backward(np.multiply(dy, k.gamma, out=dy), k._replace(gamma=1))
    report = check_layer_norm(forward, in_place, rng=0)
    assert report.diagnosis[0] == "the backward modifies dy"
    assert str(report).splitlines()[1] == "  cause     the backward modifies dy"
