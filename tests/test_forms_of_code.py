"""Broken by a verdict that changes: what people write, right and wrong, as one table with words that say why."""

import threading

import mistakes as m
import numpy as np
import pytest
from checked_operations import data, softmax, softmax_backward

from stablenorm import check_gradients, check_layer_norm, check_rms_norm

LAYER = check_layer_norm, m.forward, m.backward
RMS = check_rms_norm, m.rms_forward, m.rms_backward


def dx(make):
    """Return what gives a pair of functions a dx that is made of the right one, dy and the cache."""

    def spoil(forward, backward):
        def wrong(dy, cache):
            dx, *sums = backward(dy, cache)
            return make(dx, dy, cache).astype(dx.dtype), *sums

        return forward, wrong

    return spoil


def clipped(forward, backward):
    """Clip rstd: of rows whose var is tiny."""

    def call(x, gamma, beta, eps):
        _, cache = forward(x, gamma, beta, eps)
        rstd = np.minimum(cache.rstd, 100)
        xhat = (x - cache.mean) * rstd
        return gamma * xhat + beta, cache._replace(rstd=rstd, xhat=xhat)

    return call, backward


def spoiled_tail(axis):
    """Spoil a gradient in all that lies past 8 along an axis, 1 of it in 1000."""

    def make(dx, *_):
        dx = dx.copy()
        tail = np.moveaxis(dx.reshape(-1, dx.shape[-1]), axis, 0)[8:]
        tail *= 1.001
        return dx

    return dx(make)


class Latest:
    """A module with a state: its backward takes a cache, and does not look at it."""

    def __init__(self, forward, backward):
        self._pair = forward, backward

    def forward(self, *args):
        y, self.state = self._pair[0](*args)
        return y, self.state

    def backward(self, dy, _):
        return self._pair[1](dy, self.state)


class Buffers:
    """Fills the same arrays on every call, those of the cache as well; `locked`: not to be copied."""

    def __init__(self, forward, backward, locked=False):
        self._pair, self._held, self._locked = (forward, backward), {}, locked

    def _put(self, name, value):
        there = self._held.setdefault((name, np.shape(value)), np.empty_like(value))
        there[...] = value
        return there

    def forward(self, *args):
        y, cache = self._pair[0](*args)
        kept = [self._put(i, each) for i, each in enumerate(cache)]
        kept = kept if len(kept) == len(cache) else cache
        made = type(cache)(*kept) if isinstance(cache, tuple) else self._put("cache", cache)
        return self._put("y", y), (made, threading.Lock()) if self._locked else made

    def backward(self, dy, cache):
        found = self._pair[1](dy, cache[0] if self._locked else cache)
        return tuple(self._put(f"d{i}", each) for i, each in enumerate(found))


def clipped_xhat(forward, backward):
    return forward, lambda dy, cache: backward(dy, cache._replace(xhat=np.clip(cache.xhat, -5, 5)))


def closure(forward, backward):
    """Buffers in a closure, which no copy reaches."""
    made = Buffers(forward, backward)

    def call(*args):
        y, cache = made.forward(*args)
        return y, lambda dy: made.backward(dy, cache)

    return call, lambda dy, pull: pull(dy)


def by_matrix(forward, backward):
    """Subtract the mean by a product with I - 1/n: the rows of that sum to 0 but for rounding."""

    def call(x, gamma, beta, eps):
        n = x.shape[-1]
        centered = x @ (np.eye(n) - np.full((n, n), 1 / n)).astype(x.dtype)
        rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + eps)
        cache = forward(x, gamma, beta, eps)[1]._replace(xhat=centered * rstd, rstd=rstd)
        return gamma * cache.xhat + beta, cache

    return (forward if forward is m.rms_forward else call), backward


def both(thing):
    return thing.forward, thing.backward


def promoted(forward, backward):
    """Divide by a count and add an eps that NumPy 2 takes for float64, as it does any of its scalars."""

    def call(x, gamma, beta, eps):
        n = np.prod(x.shape[-1:])
        _, cache = forward(x, gamma, beta, eps)
        assert cache.xhat.dtype == x.dtype
        return gamma * cache.xhat + beta, (cache, n)

    def pull(dy, held):
        cache, n = held
        dx, dgamma, dbeta = backward(dy, cache)
        return dx * np.float64(1) * n / n, dgamma * np.float64(1), dbeta * np.float64(1)

    return call, pull


def keyword_eps(forward, backward):
    def call(x, /, gamma, beta, *, eps):
        return forward(x, gamma, beta, eps)

    return call, backward


# Each form: what makes both functions of the right ones, the verdict, words of the report, and the
# dtypes in which it is asked.
WIDE, BOTH = ("float64",), ("float64", "float32")
OVERWRITTEN = "overwritten by the next call"
FORMS = {
    "right": (lambda f, b: (f, b), "PASS", "", BOTH),
    "dx = 0 on constant rows": (
        dx(lambda dx, _, c: np.where(c.var < 1e-12, 0, dx)), "FAIL", "constant rows", BOTH),
    "rstd clipped at 100": (clipped, "FAIL", "constant rows", BOTH),
    "dx = dy for n = 1": (
        dx(lambda dx, dy, _: dy if dy.shape[-1] == 1 else dx), "FAIL", "n = 1", BOTH),
    "dx = 0 for n = 2": (dx(lambda dx, *_: dx * (dx.shape[-1] != 2)), "FAIL", "n = 2", WIDE),
    "xhat clipped at 5": (clipped_xhat, "FAIL", "19 rows of 33", BOTH),
    "columns from 8 on": (spoiled_tail(-1), "FAIL", "19 rows of 33", WIDE),
    "rows from 8 on": (spoiled_tail(0), "FAIL", "19 rows of 33", WIDE),
    "the latest forward": (
        lambda f, b: both(Latest(f, b)), "FAIL", "of the latest forward", WIDE),
    "a buffer for each result": (lambda f, b: both(Buffers(f, b)), "PASS", OVERWRITTEN, BOTH),
    "a cache that cannot be copied": (
        lambda f, b: both(Buffers(f, b, locked=True)), "PASS", OVERWRITTEN, WIDE),
    "a closure over buffers": (closure, "PASS", OVERWRITTEN, WIDE),
    "centered by a matrix": (by_matrix, "PASS", "", BOTH),
    "promoted gradients": (promoted, "PASS", "", ("float32",)),
    "keyword-only eps": (keyword_eps, "PASS", "", WIDE),
}  # fmt: skip


@pytest.mark.parametrize(("check", "forward", "backward"), [LAYER, RMS], ids=["layer", "rms"])
@pytest.mark.parametrize(
    ("form", "dtype"), [(name, dtype) for name, form in FORMS.items() for dtype in form[3]]
)
def test_each_form_has_its_verdict(check, forward, backward, form, dtype):
    make, verdict, words, _ = FORMS[form]
    report = check(*make(forward, backward), *data(0, (4, 8), dtype=dtype), rng=0)
    assert report.verdict == verdict, str(report)
    assert any(words in f"{each.name}: {each.message}" for each in report.findings), str(report)
    if verdict == "PASS":
        assert sum(OVERWRITTEN in each.message for each in report.findings) == bool(words)
    notes = {each.name for each in report.findings if each.verdict == "NOTE"}
    # A plain formula loses nothing on constant rows.
    assert form != "right" or not any("constant" in name or "tiny" in name for name in notes)


# Operations in general: a state, buffers, promoted results, no cache at all.
GENERAL = {
    "the latest forward": (both(Latest(softmax, softmax_backward)), "FAIL", "latest forward"),
    "buffers": (both(Buffers(softmax, softmax_backward)), "PASS", OVERWRITTEN),
    "promoted": (
        (lambda x: (np.float64(1) * softmax(x)[0], softmax(x)[0]),
         lambda dy, p: (softmax_backward(dy.astype(p.dtype), p)[0] * np.float64(1),)), "PASS", ""),
    "no cache": (
        (lambda x: (STATE.update(p=softmax(x)[0]) or STATE["p"], None),
         lambda dy, _: softmax_backward(dy, STATE["p"])), "PASS", ""),
}  # fmt: skip
STATE = {}


@pytest.mark.parametrize("name", GENERAL)
def test_each_operation_has_its_verdict(name):
    functions, verdict, words = GENERAL[name]
    x = data(0)[0].astype(np.float32 if name == "promoted" else np.float64)
    report = check_gradients(*functions, [x], rng=0)
    assert report.verdict == verdict, str(report)
    assert any(words in each.message for each in report.findings), str(report)
