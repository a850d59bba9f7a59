"""Differences, rules of a call, the report: right code passes, wrong code fails, doubt is inconclusive."""

import json
import warnings
from functools import partial
from itertools import count

import ml_dtypes
import numpy as np
import pytest
from checked_operations import Buffers, Latest, both, data
from mistakes import backward, forward

from stablenorm import check_gradients, layer_norm_backward, layer_norm_forward
from stablenorm.check import assert_gradients
from stablenorm.testing.families import FAMILIES, make_case

X = np.linspace(-1.0, 1.5, 12).reshape(3, 4)


def sine(x):
    return np.sin(x), x


def cosine(dy, x):
    return (dy * np.cos(x),)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p, p


def softmax_backward(dy, p):
    return (p * (dy - (dy * p).sum(-1, keepdims=True)),)


def check(forward=sine, backward=cosine, args=(X,), **options):
    return check_gradients(forward, backward, args, names="xwb"[: len(args)], rng=0, **options)


def finding_named(report, name):
    """Return the one finding whose name has `name` in it."""
    (finding,) = (f for f in report.findings if name in f.name)
    return finding


# Operations with known derivatives: forward, backward, shapes of the arguments.
OPERATIONS = {
    "matmul": (lambda a, b: (a @ b, (a, b)), lambda dy, c: (dy @ c[1].T, c[0].T @ dy),
               [(3, 5), (5, 4)]),
    "softmax": (softmax, softmax_backward, [(4, 6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_right_gradients_pass_and_one_percent_on_one_element_fails_there(name):
    function, gradient, shapes = OPERATIONS[name]

    def spoil(dy, cache):
        *others, last = (np.array(g) for g in gradient(dy, cache))
        last[1, 1] *= 1.01
        return *others, last

    for seed in range(3):
        rng = np.random.default_rng(seed)
        args = [rng.standard_normal(shape) for shape in shapes]
        report = check_gradients(function, gradient, args, rng=rng)
        assert report.verdict == "PASS", f"seed {seed}\n{report}"
    *others, wrong = check_gradients(function, spoil, args, rng=rng).arguments
    assert (wrong.verdict, wrong.failing, wrong.index) == ("FAIL", 1, (1, 1))
    assert all(result.verdict == "PASS" for result in others)


def test_an_error_of_twice_the_stated_resolution_is_seen():
    """The resolution is that of finite differences: this operation has no closed form."""
    for offset in (0.0, 1.0, 1e3, 1e6):
        for seed in range(5):
            x, gamma, beta = data(seed, (4, 8 + seed), offset)
            of_x = partial(forward, gamma=gamma, beta=beta)
            pull = lambda dy, cache, by=0.0: ((1 + by) * backward(dy, cache)[0],)
            report = check_gradients(of_x, pull, [x], rng=seed, max_elements=200)
            assert report.passed, str(report)
            # The bound is not far too large.
            assert report.resolution < 1e-6
            worse = partial(pull, by=2 * report.resolution)
            assert check_gradients(of_x, worse, [x], rng=seed, max_elements=200).verdict == "FAIL"


def test_large_tensors_are_sampled_and_probes_find_what_sampling_misses():
    def wrong(dy, cache):
        dx, *others = backward(dy, cache)
        # One of 68 rows, and no element that the check always samples.
        dx[1, 7] *= 1.001
        return dx, *others

    args, done = data(0, (4, 17, 384)), []
    report = check_gradients(forward, backward, args, rng=0, progress=lambda *s: done.append(s))
    assert report.passed, str(report)
    assert [(r.checked, r.probes) for r in report.arguments] == 3 * [(12, 3)]
    assert (done[-1], report.forward_calls < 45 * 20) == ((45, 45), True)
    assert check_gradients(forward, wrong, args, rng=0).arguments[0].verdict == "FAIL"


def test_nothing_given_is_changed_and_none_is_not_checked():
    x, gamma, _ = data(0)
    x.flags.writeable = gamma.flags.writeable = False
    without_beta = lambda x, gamma, _: forward(x, gamma, 0)
    pull = lambda dy, cache: (*backward(dy, cache)[:2], None)
    report = check_gradients(without_beta, pull, [x, gamma, None], rng=0)
    assert [result.verdict for result in report.arguments] == ["PASS", "PASS", "NOT CHECKED"]


def test_assert_gradients_raises_the_report_and_the_same_rng_gives_the_same(rng):
    x = rng.standard_normal(5)
    assert_gradients(sine, cosine, [x], rng=0)
    assert len({str(check_gradients(sine, cosine, [x], rng=7)) for _ in range(2)}) == 1
    with pytest.raises(
        AssertionError, match=r"angle: wrong everywhere; at .* yours is .*, right is "
    ):
        assert_gradients(sine, lambda dy, x: (-dy * np.cos(x),), [x], names=["angle"])


def test_scales_are_the_row_spread_not_the_magnitude(rng):
    # exp(x - max): a step in proportion to |x| would be far too long.
    x = 1e5 + rng.standard_normal((4, 6))
    report = check_gradients(softmax, softmax_backward, [x], rng=0)
    assert report.passed, str(report)
    assert report.arguments[0].resolution < 1e-6
    # `scales` replaces a spread that misleads.
    x = np.array([[0.0, 0.0, 1e9], [1.0, 2.0, 3.0]])
    report = check_gradients(softmax, softmax_backward, [x], scales=[1.0], rng=0)
    assert report.passed, str(report)


KINKS = {
    "abs": (lambda x: (np.abs(x), x), lambda dy, x: (dy * np.sign(x),)),
    "relu": (lambda x: (np.maximum(x, 0), x), lambda dy, x: (dy * (x > 0),)),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.parametrize("distance", [0.0, 2.0**-30, 2.0**-20])
def test_a_kink_is_recognised(name, distance):
    forward, backward = KINKS[name]
    x = X.copy()
    x[1, 2] = distance
    for seed in range(2):
        report = check_gradients(forward, backward, [x], names=["x"], rng=seed)
        assert report.verdict == "PASS", str(report)
        if distance == 0:
            assert "not differentiable at (1, 2)" in finding_named(report, "differentiable").message
    # A kink excuses no other element.
    report = check(forward, lambda dy, x: (1.01 * backward(dy, x)[0],), [x])
    assert report.verdict == "FAIL"
    report = check(forward, backward, [np.zeros((3, 4))])
    assert report.verdict == "INCONCLUSIVE"
    assert "not differentiable at 12 of 12 elements" in str(report)


PLACES = [
    ((5, 7), (2, 3), "element (2, 3)"),
    ((5, 7), (slice(None), 5), "column 5"),
    ((5, 7), (-1, slice(None)), "last row"),
    ((5, 7), (slice(None), slice(2, 5)), "15 of 35 elements"),
    ((5, 7), (slice(None), slice(None)), "everywhere"),
    ((3, 4, 5), (1, 2), "row (1, 2)"),
]


@pytest.mark.parametrize(("shape", "place", "pattern"), PLACES)
def test_the_pattern_says_where(shape, place, pattern):
    def wrong(dy, cache):
        x, w = cache
        dx = dy * w
        dx[place] *= 1.1
        return dx, (dy * x).reshape(-1, shape[-1]).sum(0)

    rng = np.random.default_rng(1)
    args = [rng.standard_normal(shape), rng.standard_normal(shape[-1])]
    report = check(lambda x, w: (x * w, (x, w)), wrong, args)
    assert [result.pattern for result in report.arguments] == [pattern, ""]


@pytest.mark.parametrize("name", ["F04", "F09", "F13", "F16", "F33", "F34"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hard_inputs_are_no_false_alarm(name, dtype):
    if FAMILIES[name].why_not(dtype, 6):
        pytest.skip(f"{name} has no rows of {dtype}")
    case = make_case(name, dtype, 6)
    for eps in (case.eps, 1e300):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = partial(layer_norm_forward, eps=eps)
            report = check_gradients(ours, layer_norm_backward, case[:3], rng=0)
        # A derivative too large for its dtype is infinite, but a gradient must be finite.
        too_large = any("got inf" in result.message for result in report.arguments)
        assert report.verdict != "FAIL" or (name == "F16" and too_large), str(report)


# Size 20: 27 of 30 seeds failed before the check measured the roundings of the backward; 2 still fail.
# An output near 1 there moves by less than its last bit, which no difference sees.
@pytest.mark.parametrize("size", [6, 10])
def test_a_saturated_softmax_is_no_false_alarm(size):
    """dy - <p, dy> cancels near p = 1: its rounding errors are far larger than the gradient."""
    for seed in range(12):
        x = size * np.random.default_rng(seed).standard_normal((5, 7))
        report = check_gradients(softmax, softmax_backward, [x], rng=seed)
        assert report.verdict != "FAIL", f"seed {seed}\n{report}"


CALLS = count(1)


# Error that grows with the number of calls.
drift = lambda a: a * (1 + 1e-6 * next(CALLS))


class Tensor:
    """An array of another package that NumPy may not read."""

    def __array__(self, *_, **__):
        msg = "detach it"
        raise RuntimeError(msg)


def fail(*_):
    msg = "no\nluck"
    raise RuntimeError(msg)


# Faults of a call with X: forward, backward, the finding that reports it (x: the argument), words of its message.
FAULTS = [
    (lambda x: (np.sin(x), (x.copy(), np.negative(x, out=x))[0]), cosine,
     "forward leaves", "forward modifies x"),
    (sine, lambda dy, x: (dy * np.cos(x), np.negative(x, out=x), np.negative(dy, out=dy))[:1],
     "backward leaves", "backward modifies dy, x, the cache"),
    (lambda x: (np.sin(x), [x]), lambda dy, cache: cosine(dy, cache.pop()),
     "backward is deterministic", "IndexError"),
    (lambda x: (drift(np.sin(x)), x), cosine, "forward is deterministic", "y differs by"),
    (sine, lambda dy, x: (dy * np.cos(x) + 1e-9,), "linear", "of x differs by"),
    # This backward is homogeneous, but not linear.
    (sine, lambda dy, x: ((dy + 1e-9 * np.abs(dy)) * np.cos(x),), "linear", "of x differs by"),
    # Functions that are no forward.
    (np.sin, cosine, "returns", "forward must return (y, cache), got one array"),
    (lambda x: (Tensor(), x), cosine, "returns", "y that forward returns must be an array, got Tensor: detach"),
    # Functions that are no backward: a sentence, not a traceback.
    (sine, fail, "x", "backward raised RuntimeError: no luck"),
    (sine, lambda dy, x: (dy[0] * np.cos(x[0]),), "x", "the gradient must have shape 3 x 4, got 4"),
    (sine, lambda dy, _: (dy * np.nan,), "x", "must be finite, got nan at (0, 0) (12 such)"),
    (sine, lambda *_: ([[1], [1, 2]],), "x", "must be an array, got list"),
    (*both(Latest(softmax, softmax_backward)), "uses the cache", "the latest forward"),
    (lambda x: (np.sin(x).reshape((1, 3, 4) if next(AGAIN) else (3, 4)), x), cosine,
     "forward is deterministic", "y must have shape 3 x 4, got 1 x 3 x 4"),
]  # fmt: skip
# Smooth functions do not excuse gradients that are wrong in one element, or rounded to float32.
SMOOTH = [
    (lambda x: np.sin(300 * x), lambda x: 300 * np.cos(300 * x)),
    # This one nearly has a kink.
    (lambda x: np.sqrt(x * x + 1e-6), lambda x: x / np.sqrt(x * x + 1e-6)),
    (lambda x: x**3, lambda x: 3 * x**2),
]
SPOILED = (
    ("f8", 1, "PASS", "x", ""),
    ("f8", 1.01, "FAIL", "x", ""),
    ("f4", 1, "FAIL", "linear", "differs by"),
)
SQUARE = lambda x: (x * x, x), lambda dy, x: (2 * x * dy,)
ROOT = lambda x: fail() if (x < 0).any() else (np.sqrt(x), x)
NEAR_0 = np.array([0.02, 1.0, 2.0])
# Forward, backward, arguments, the verdict and, if different, that of the finding, its name, its message.
JUDGED = [
    *((*fault[:2], [X], "FAIL", *fault[2:]) for fault in FAULTS),
    *((lambda x, f=f: (f(x), x),
       lambda dy, _, d=d, t=t, k=k: ((dy * np.where(X[1, 1] == X, k, 1) * d(X)).astype(t).astype(float),),
       [X], *rest) for f, d in SMOOTH for t, k, *rest in SPOILED),
    (forward, backward, data(0, offset=1e5, dtype=np.float32), "INCONCLUSIVE", "x", "coarser than"),
    (forward, backward, data(2, dtype=ml_dtypes.bfloat16), "INCONCLUSIVE", "x", "coarser than"),
    # The forward computes in float16.
    (lambda x: (np.sin(x).astype(np.float16).astype(float), x), cosine, data(0)[:1],
     "INCONCLUSIVE", "x", "coarser than"),
    # The forward is NaN near x.
    (lambda x: (np.sqrt(x), x), lambda dy, x: (dy / (2 * np.sqrt(x)),), [np.array([1e-12, 1.0])],
     "INCONCLUSIVE", "x", "not finite"),
    # Nothing to compare.
    (sine, lambda *_: (None,), [X], "INCONCLUSIVE, NOT CHECKED", "x", "returned None"),
    (*SQUARE, [np.zeros((0, 3))], "INCONCLUSIVE, NOT CHECKED", "x", "is empty"),
    # A scalar y, and arguments without axes.
    (*SQUARE, [np.array(3.0)], "PASS", "x", ""),
    # A forward that raises near x.
    (ROOT, lambda dy, x: (dy / (2 * np.sqrt(x)),), [NEAR_0], "PASS, NOTE", "called near", ""),
    # Buffers, promoted results, a module in the cache, no cache at all.
    (*both(Buffers(softmax, softmax_backward)), [X], "PASS, NOTE", "results last", "overwritten by the next"),
    (lambda x: (np.float64(1) * softmax(x)[0], softmax(x)[0]),
     lambda dy, p: (softmax_backward(dy.astype(p.dtype), p)[0] * np.float64(1),), [X.astype("f4")], "PASS", "x", ""),
    (lambda x: (STATE.update(p=softmax(x)[0]) or STATE["p"], None),
     lambda dy, _: softmax_backward(dy, STATE["p"]), [X], "PASS", "x", ""),
]  # fmt: skip
AGAIN, STATE = count(), {}


@pytest.mark.parametrize(
    ("forward", "backward", "args", "verdicts", "name", "message"), JUDGED, ids=range(len(JUDGED))
)
def test_a_call_has_its_verdict_and_a_line_that_says_why(
    forward, backward, args, verdicts, name, message
):
    report, (verdict, _, other) = check(forward, backward, args), verdicts.partition(", ")
    assert report.verdict == verdict, str(report)
    said = report.arguments[0] if name == "x" else finding_named(report, name)
    assert (said.verdict, "\n" in said.message) == (other or verdict, False)
    assert message in said.message
    assert verdict != "INCONCLUSIVE" or said.resolution > 1e-3
    # A modified array spoils all later findings, and without a gradient there are none: both are causes.
    is_fault = name == "x" and (verdict, said.judged) == ("FAIL", False)
    assert report.diagnosis == (said.message,) * ("modifies" in message or is_fault)


# ---- the report: text, JSON ----

DOUBTFUL = data(0, offset=1e5, dtype=np.float32)
# Checks whose reports are empty, full or hold NaN, and the beginning of their text.
REPORTS = {
    "passed": ((sine, cosine), "PASS"),
    "nothing": ((sine, lambda *_: (None,)), "INCONCLUSIVE: nothing was compared"),
    "unclear": ((forward, backward, DOUBTFUL), "INCONCLUSIVE: no verdict on the gradient of x"),
    "NaN": ((sine, lambda dy, _: (dy * np.nan,)), "FAIL: wrong gradient of x"),
    "wrong": ((sine, lambda dy, x: (dy * np.sin(x) + 1,)), "FAIL: wrong gradient of x"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_has_lines_and_json(name, tmp_path):
    arguments, headline = REPORTS[name]
    report = check(*arguments)
    lines = report.text(verbose=True).splitlines()
    assert lines[0].startswith(headline)
    # Formulas and causes keep their line.
    assert max(len(line) for line in lines if not line.startswith("  cause")) <= 100
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text
    written = json.loads(text, parse_constant=pytest.fail)
    assert written == report.as_dict()
    assert (written["verdict"], float(written["resolution"])) == (report.verdict, report.resolution)
    actual = [float(argument["actual"]) for argument in written["arguments"]]
    np.testing.assert_equal(actual, [result.actual for result in report.arguments])
    # All that did not pass is told, and counted by its layer.
    told = [f"  {f.verdict}: {f.name}" for f in report.findings if f.verdict != "PASS"]
    assert all(any(one in line for line in lines) for one in told)
    assert any(line.startswith("  contract (what every pair") for line in lines)
