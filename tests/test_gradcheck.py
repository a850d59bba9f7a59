"""The checker passes what is right, fails what is wrong, and says so where it cannot tell."""

import ml_dtypes
import numpy as np
import pytest
from checked_operations import cosine, data, sine, softmax, softmax_backward

from stablenorm.check import assert_gradients, check_gradients, gradients
from stablenorm.check.closed_form import Case, Expected
from stablenorm.testing.mistakes import backward, forward

# Operations with known derivatives: forward, backward, shapes of the arguments.
OPERATIONS = {
    "sin": (sine, cosine, [(3, 5)]),
    "matmul": (
        lambda a, b: (a @ b, (a, b)),
        lambda dy, c: (dy @ c[1].T, c[0].T @ dy),
        [(3, 5), (5, 4)],
    ),
    "softmax": (softmax, softmax_backward, [(4, 6)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_right_gradients_pass_and_one_percent_on_one_element_fails_there(name):
    function, gradient, shapes = OPERATIONS[name]
    wrong = len(shapes) - 1
    spoiled = (1,) * len(shapes[wrong])

    def spoil(dy, cache):
        found = [np.array(g) for g in gradient(dy, cache)]
        found[wrong][spoiled] *= 1.01
        return found

    for seed in range(3):
        rng = np.random.default_rng(seed)
        args = [rng.standard_normal(shape) for shape in shapes]
        report = check_gradients(function, gradient, args, rng=rng)
        assert report.verdict == "PASS", f"seed {seed}\n{report}"
    report = check_gradients(function, spoil, args, rng=rng)
    result = report.arguments[wrong]
    assert (report.verdict, result.failing, result.index) == ("FAIL", 1, spoiled)
    assert [r.verdict for r in report.arguments[:-1]] == ["PASS"] * wrong


def test_numeric_bound_covers_the_true_error(monkeypatch):
    # The bound of each numeric derivative, seen where the report is made of them.
    seen, judge = [], gradients.judge
    monkeypatch.setattr(gradients, "judge", lambda *args: (seen.append(args), judge(*args))[1])
    z = []
    for offset in (0.0, 1.0, 1e3, 1e6):
        for seed in range(9):
            x, gamma, beta = data(seed, (4, 8 + seed), offset)
            seen.clear()
            check_gradients(
                lambda x, gamma=gamma, beta=beta: forward(x, gamma, beta),
                lambda dy, cache: backward(dy, cache)[:1],
                [x],
                rng=seed,
                max_elements=200,
            )
            _, comparer, estimates = seen[0]
            # From re-centred rows: its error, u times a few, is far below what is measured.
            case = Case(x, gamma, beta, 1e-5, comparer.loss.cotangent())
            expected = Expected(case, 2.0**-53).bounds_of("dx", x.dtype).value
            z += [abs(e.numeric - expected.flat[e.place]) / e.bound_numeric for e in estimates]
    assert len(z) > 1700
    assert np.mean(np.array(z) <= 1) >= 0.999
    # A bound that is never exceeded because it is useless would be no bound.
    assert np.median(z) >= 0.01


@pytest.mark.parametrize(
    ("function", "gradient", "args", "message"),
    [
        (forward, backward, data(0, offset=1e5, dtype=np.float32), "coarser than"),
        (forward, backward, data(1, dtype=np.float16), ""),
        (forward, backward, data(2, dtype=ml_dtypes.bfloat16), ""),
        # float16 inside.
        (lambda x: (np.sin(x).astype(np.float16).astype(float), x), cosine, data(0)[:1], ""),
        # Not finite nearby.
        (
            lambda x: (np.sqrt(x), x),
            lambda dy, x: (dy / (2 * np.sqrt(x)),),
            [np.array([1e-12, 1.0])],
            "not finite",
        ),
        # Nothing to compare.
        (sine, lambda *_: (None,), data(0)[:1], ""),
    ],
    ids=range(6),
)
def test_what_cannot_be_judged_is_said(function, gradient, args, message):
    report = check_gradients(function, gradient, args, rng=0)
    assert report.verdict == "INCONCLUSIVE", str(report)
    assert report.arguments[0].resolution > 1e-3
    assert report.arguments[0].message
    assert message in report.arguments[0].message


def test_large_tensors_are_sampled_and_probes_find_what_sampling_misses():
    calls, done = [], []

    def counted(*args):
        calls.append(1)
        return forward(*args)

    def wrong(dy, cache):
        dx, *others = backward(dy, cache)
        # One row in 68, in no element that is sampled on purpose.
        dx[1, 7] *= 1.001
        return dx, *others

    args = data(0, (4, 17, 384))
    report = check_gradients(
        counted, backward, args, rng=0, progress=lambda *state: done.append(state)
    )
    assert report.passed, str(report)
    assert report.forward_calls == len(calls) < 45 * 20
    assert [(r.checked, r.total, r.probes) for r in report.arguments] == [
        (12, 4 * 17 * 384, 3),
        (12, 384, 3),
        (12, 384, 3),
    ]
    assert done == [(i + 1, 45) for i in range(45)]
    assert check_gradients(forward, wrong, args, rng=0).arguments[0].verdict == "FAIL"


def test_nothing_given_is_changed_and_none_is_not_checked():
    x, gamma, _ = args = data(0)
    for a in args:
        a.flags.writeable = False
    report = check_gradients(
        lambda x, gamma, _: forward(x, gamma, 0),
        lambda dy, c: (*backward(dy, c)[:2], None),
        [x, gamma, None],
        rng=0,
    )
    assert report.passed
    assert [result.verdict for result in report.arguments] == ["PASS", "PASS", "NOT CHECKED"]
    # A forward that writes gets copies; it is reported.
    report = check_gradients(lambda x: (x * 2, x.fill(0)), lambda dy, _: (2 * dy,), [x], rng=0)
    assert report.verdict == "FAIL"


ONE = [np.ones(3)]


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ([], {}, ValueError, "args must be a tuple or list of at least one array"),
        (np.ones(3), {}, ValueError, "args must be a tuple or list of at least one array"),
        (2 * ONE, {"names": ["a", "a"]}, ValueError, "names must be one name for each of 2"),
        (ONE, {"scales": []}, ValueError, "scales must have one entry for each of 1"),
        (ONE, {"scales": [-1]}, ValueError, "scales must be finite and > 0, got -1"),
        ([np.arange(3)], {}, TypeError, r"args\[0\] must be float16, .* got int64"),
        ([np.array([1, np.nan])], {}, ValueError, "must be finite"),
    ],
)
def test_wrong_use_raises(args, options, error, message):
    with pytest.raises(error, match=message):
        check_gradients(lambda x: (x, None), lambda dy, _: (dy,), args, **options)


def test_assert_gradients_raises_the_report_and_the_same_rng_gives_the_same(rng):
    x = rng.standard_normal(5)
    assert_gradients(sine, cosine, [x], rng=0)
    assert len({str(check_gradients(sine, cosine, [x], rng=7)) for _ in range(2)}) == 1
    with pytest.raises(AssertionError, match=r"angle: FAIL.*\n.*backward .*numeric"):
        assert_gradients(sine, lambda dy, x: (-dy * np.cos(x),), [x], names=["angle"])


def test_scales_are_the_row_spread_not_the_magnitude(rng):
    # exp(x - max): a step in proportion to |x| would leave the function behind.
    x = 1e5 + rng.standard_normal((4, 6))
    report = check_gradients(softmax, softmax_backward, [x], rng=0)
    assert report.passed, str(report)
    assert report.arguments[0].resolution < 1e-6
    # A spread that misleads can be replaced.
    x = np.array([[0.0, 0.0, 1e9], [1.0, 2.0, 3.0]])
    report = check_gradients(softmax, softmax_backward, [x], scales=[1.0], rng=0)
    assert report.passed, str(report)
