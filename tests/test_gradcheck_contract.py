"""What `check_gradients` says of code that breaks the contract, and of what is no operation at all."""

import numpy as np
import pytest
from checked_operations import X, check, cosine, found, sine

from stablenorm.check import assert_gradients


def test_right_code_keeps_the_contract():
    report = check()
    assert report.passed, str(report)
    assert {finding.verdict for finding in report.findings} == {"PASS"}
    assert report.backward_calls > 10
    assert report.seconds > 0


# ---- the contract: each fault, where it is reported, and a word of the message ----


def writes_x(x):
    y, kept = np.sin(x), x.copy()
    x *= 2
    return y, kept


def doubles_dy(dy, x):
    dx = dy * np.cos(x)
    dy *= 2
    return (dx,)


def spoils_the_cache(dy, x):
    dx = dy * np.cos(x)
    x += 1
    return (dx,)


def works_in_dy(dy, x):
    dy *= np.cos(x)
    return (dy,)


class Drifting:
    """Wrong by a little more at each call."""

    def __init__(self):
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return np.sin(x) * (1 + 1e-6 * self.calls), x

    def backward(self, dy, x):
        self.calls += 1
        return (dy * np.cos(x) * (1 + 1e-6 * self.calls),)


FAULTS = [
    (writes_x, cosine, "forward leaves", "forward modifies x"),
    (sine, doubles_dy, "backward leaves", "backward modifies dy"),
    (sine, works_in_dy, "backward leaves", "backward modifies dy"),
    (sine, spoils_the_cache, "backward leaves", "backward modifies x, the cache"),
    (lambda x: (np.sin(x), [x]), lambda dy, cache: cosine(dy, cache.pop()),
     "backward is deterministic", "IndexError"),
    (Drifting().forward, cosine, "forward is deterministic", "y differs by"),
    (sine, Drifting().backward, "backward is deterministic", "gradient of x differs by"),
    (sine, lambda dy, x: (dy * np.cos(x) + 1e-9,), "linear", "of x differs by"),
    (sine, lambda dy, x: (np.clip(dy, -2, 2) * np.cos(x),), "linear", "of x differs by"),
    (sine, lambda dy, x: (dy * np.cos(x) * (1 + 1e-3 * np.tanh(np.abs(dy))),), "linear", "differs"),
    # Homogeneous, but not linear.
    (sine, lambda dy, x: ((dy + 1e-9 * np.abs(dy)) * np.cos(x),), "linear", "of x differs by"),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "backward", "name", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_broken_contract_fails_in_one_line(forward, backward, name, message):
    report = check(forward, backward)
    assert report.verdict == "FAIL"
    finding = found(report, name)
    assert finding.verdict == "FAIL"
    assert message in finding.message


# ---- bad input ----


class Breaking:
    """Right at first, then a nuisance."""

    def __init__(self, calls, then):
        self.calls, self.then = calls, then

    def __call__(self, x):
        self.calls -= 1
        return sine(x) if self.calls >= 0 else self.then(x)


def fail(*_):
    msg = "no\nluck"
    raise RuntimeError(msg)


BAD_FORWARDS = [
    (fail, "INCONCLUSIVE", "forward raised RuntimeError: no luck"),
    (np.sin, "FAIL", "forward must return (y, cache), got ndarray"),
    (lambda x: (x, x, x), "FAIL", "forward must return (y, cache), got tuple of 3"),
    (lambda _: None, "FAIL", "forward must return (y, cache), got NoneType"),
    (lambda x: (x.astype(int), x), "FAIL", "the y that forward returns must be float16"),
    (lambda x: ([x, [1]], x), "FAIL", "y that forward returns"),
    (lambda x: (x * 1j, x), "FAIL", "got complex128"),
    (lambda x: (None, x), "FAIL", "got object"),
    (Breaking(9, lambda x: (np.sin(x)[0], x)), "FAIL", "y has shape"),
    (lambda x: (np.sin(x) + np.random.default_rng().random(x.shape), x), "FAIL", "deterministic"),
]


@pytest.mark.parametrize(
    ("forward", "verdict", "message"), BAD_FORWARDS, ids=range(len(BAD_FORWARDS))
)
def test_a_bad_forward_is_a_sentence_not_a_traceback(forward, verdict, message):
    report = check(forward)
    assert report.verdict == verdict, str(report)
    assert any(message in f"{f.name}: {f.message}" for f in report.findings), report.findings
    with pytest.raises(AssertionError):
        assert_gradients(forward, cosine, [X], rng=0)


BAD_BACKWARDS = [
    (fail, "backward raised RuntimeError: no luck"),
    (lambda *_: None, "got NoneType"),
    (lambda dy, x: {"x": dy * np.cos(x)}, "got dict"),
    (lambda dy, x: dy * np.cos(x), "got ndarray"),
    (lambda dy, x: cosine(dy, x) * 2, "must return 1 gradients, one for each argument, got 2"),
    (lambda *_: (), "must return 1 gradients, one for each argument, got 0"),
    (lambda dy, x: (dy[0] * np.cos(x[0]),), "must have shape (3, 4)"),
    (lambda dy, _: (dy * np.nan,), "must be finite, got nan at (0, 0) (12 such)"),
    (lambda dy, _: (dy * np.inf,), "must be finite"),
    (lambda *_: ("no",), "must be float16"),
    (lambda *_: ([[1], [1, 2]],), "must be an array, got list"),
    (lambda dy, _: (dy.astype(int),), "got int64"),
]


@pytest.mark.parametrize(("backward", "message"), BAD_BACKWARDS, ids=range(len(BAD_BACKWARDS)))
def test_a_bad_backward_is_a_sentence_not_a_traceback(backward, message):
    report = check(backward=backward)
    assert report.verdict == "FAIL"
    assert message in report.arguments[0].message
    assert "\n" not in report.arguments[0].message


def test_a_backward_that_breaks_later_fails():
    calls = iter(range(100))
    report = check(backward=lambda dy, x: cosine(dy, x) if next(calls) < 3 else fail())
    assert report.verdict == "FAIL"
    assert "backward raised RuntimeError: no luck" in str(report.findings)


def test_a_forward_that_raises_near_x_is_left_out_there():
    def root(x):
        if (x < 0).any():
            fail()
        return np.sqrt(x), x

    args = [np.array([0.02, 1.0, 2.0])]
    report = check(root, lambda dy, x: (dy / (2 * np.sqrt(x)),), args)
    assert report.passed, str(report)
    assert found(report, "called near").verdict == "NOTE"
    assert check(root, lambda dy, x: (dy / np.sqrt(x),), args).verdict == "FAIL"


def test_a_scalar_y_and_arguments_without_axes_or_elements():
    for y in (np.sum, lambda x: float(x.sum())):
        report = check(lambda x, y=y: (y(x), None), lambda dy, _: (np.full(X.shape, dy),))
        assert report.passed, str(report)
    square = (lambda x: (x * x, x), lambda dy, x: (2 * x * dy,))
    assert check(*square, [np.array(3.0)]).passed
    assert check(*square, [np.zeros((0, 3))]).verdict == "INCONCLUSIVE"
