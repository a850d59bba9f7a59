"""What `check_gradients` says of code that breaks the contract, and of what is no operation at all."""

from itertools import count

import numpy as np
import pytest
from checked_operations import X, check, cosine, found, sine


def writes_x(x):
    y, kept = np.sin(x), x.copy()
    x *= 2
    return y, kept


def spoils_the_cache(dy, x):
    dx = dy * np.cos(x)
    x += 1
    dy += 1
    return (dx,)


CALLS = count(1)


def drift(a):
    """Wrong by a little more at each call."""
    return a * (1 + 1e-6 * next(CALLS))


def fail(*_):
    msg = "no\nluck"
    raise RuntimeError(msg)


# Each fault, where it is reported, and a word of the message.
FAULTS = [
    (writes_x, cosine, "forward leaves", "forward modifies x"),
    (sine, spoils_the_cache, "backward leaves", "backward modifies dy, x, the cache"),
    (lambda x: (np.sin(x), [x]), lambda dy, cache: cosine(dy, cache.pop()),
     "backward is deterministic", "IndexError"),
    (lambda x: (drift(np.sin(x)), x), cosine, "forward is deterministic", "y differs by"),
    (sine, lambda dy, x: (drift(dy * np.cos(x)),), "backward is deterministic", "gradient of x differs by"),
    (sine, lambda dy, x: (dy * np.cos(x) + 1e-9,), "linear", "of x differs by"),
    (sine, lambda dy, x: (np.clip(dy, -2, 2) * np.cos(x),), "linear", "of x differs by"),
    # Homogeneous, but not linear.
    (sine, lambda dy, x: ((dy + 1e-9 * np.abs(dy)) * np.cos(x),), "linear", "of x differs by"),
    # What is no forward at all.
    (np.sin, cosine, "returns", "forward must return (y, cache), got ndarray"),
    (lambda x: (x, x, x), cosine, "returns", "forward must return (y, cache), got tuple of 3"),
    (lambda x: (x.astype(int), x), cosine, "returns", "the y that forward returns must be float16"),
    (lambda x: ([x, [1]], x), cosine, "returns", "y that forward returns"),
    (lambda x: (x * 1j, x), cosine, "returns", "got complex128"),
    (lambda x: (None, x), cosine, "returns", "got object"),
    (lambda x: (np.sin(x) + np.random.default_rng().random(x.shape), x), cosine,
     "forward is deterministic", "y differs by"),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "backward", "name", "message"), FAULTS, ids=range(len(FAULTS)))
def test_a_broken_contract_fails_in_one_line(forward, backward, name, message):
    report = check(forward, backward)
    assert report.verdict == "FAIL"
    finding = found(report, name)
    assert finding.verdict == "FAIL"
    assert message in finding.message


BAD_BACKWARDS = [
    (fail, "backward raised RuntimeError: no luck"),
    (lambda *_: None, "got NoneType"),
    (lambda dy, x: {"x": dy * np.cos(x)}, "got dict"),
    (lambda dy, x: cosine(dy, x) * 2, "must return 1 gradients, one for each argument, got 2"),
    (lambda dy, x: (dy[0] * np.cos(x[0]),), "must have shape (3, 4)"),
    (lambda dy, _: (dy * np.nan,), "must be finite, got nan at (0, 0) (12 such)"),
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
