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


def kept(change):
    """Return what gives a pair of functions another cache, and a y that is made of it."""

    def spoil(forward, backward):
        def call(x, gamma, beta, eps):
            cache = change(forward(x, gamma, beta, eps)[1])
            return gamma * cache.xhat + beta, cache

        return call, backward

    return spoil


def clipped(cache):
    """Clip rstd: of rows whose var is tiny."""
    rstd = np.minimum(cache.rstd, 100)
    return cache._replace(rstd=rstd, xhat=(cache.x - cache.mean) * rstd)


def by_matrix(cache):
    """Subtract the mean by a product with I - 1/n: the rows of that sum to 0 but for rounding."""
    n = cache.x.shape[-1]
    if not cache.mean.any():
        return cache
    centered = cache.x @ (np.eye(n) - np.full((n, n), 1 / n)).astype(cache.x.dtype)
    rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + cache.eps)
    return cache._replace(xhat=centered * rstd, rstd=rstd)


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
        kept = (self._put(i, each) for i, each in enumerate(cache))
        made = type(cache)(*kept) if isinstance(cache, tuple) else self._put("cache", cache)
        return self._put("y", y), (made, threading.Lock()) if self._locked else made

    def backward(self, dy, cache):
        found = self._pair[1](dy, cache[0] if self._locked else cache)
        return tuple(self._put(f"d{i}", each) for i, each in enumerate(found))


def closure(forward, backward):
    """Buffers in a closure, which no copy reaches."""
    made = Buffers(forward, backward)

    def call(*args):
        y, cache = made.forward(*args)
        return y, lambda dy: made.backward(dy, cache)

    return call, lambda dy, pull: pull(dy)


def both(thing):
    return thing.forward, thing.backward


def promoted(forward, backward):
    """Multiply by what NumPy 2 takes for float64, as it does any of its scalars."""
    return forward, lambda *given: tuple(each * np.float64(1) for each in backward(*given))


# Each form: what makes both functions of the right ones, the verdict, words of the report, and the
# dtypes in which it is asked.
WIDE, BOTH = ("float64",), ("float64", "float32")
OVERWRITTEN = "overwritten by the next call"
FORMS = {
    "right": (lambda f, b: (f, b), "PASS", "", BOTH),
    "dx = 0 on constant rows": (
        dx(lambda dx, _, c: np.where(c.var < 1e-12, 0, dx)), "FAIL", "constant rows", BOTH),
    "rstd clipped at 100": (kept(clipped), "FAIL", "constant rows", BOTH),
    "dx = dy for n = 1": (
        dx(lambda dx, dy, _: dy if dy.shape[-1] == 1 else dx), "FAIL", "n = 1", BOTH),
    "dx = 0 for n = 2": (dx(lambda dx, *_: dx * (dx.shape[-1] != 2)), "FAIL", "n = 2", WIDE),
    "xhat clipped at 5": (
        lambda f, b: (f, lambda dy, c: b(dy, c._replace(xhat=np.clip(c.xhat, -5, 5)))),
        "FAIL", "19 rows of 33", BOTH),
    "columns from 8 on": (spoiled_tail(-1), "FAIL", "19 rows of 33", WIDE),
    "rows from 8 on": (spoiled_tail(0), "FAIL", "19 rows of 33", WIDE),
    "the latest forward": (
        lambda f, b: both(Latest(f, b)), "FAIL", "of the latest forward", WIDE),
    "a buffer for each result": (lambda f, b: both(Buffers(f, b)), "PASS", OVERWRITTEN, BOTH),
    "a cache that cannot be copied": (
        lambda f, b: both(Buffers(f, b, locked=True)), "PASS", OVERWRITTEN, WIDE),
    "a closure over buffers": (closure, "PASS", OVERWRITTEN, WIDE),
    "centered by a matrix": (kept(by_matrix), "PASS", "", BOTH),
    "promoted gradients": (promoted, "PASS", "", ("float32",)),
    "keyword-only eps": (
        lambda f, b: (lambda x, /, gamma, beta, *, eps: f(x, gamma, beta, eps), b), "PASS", "", WIDE),
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
    "a module in the cache": (
        (lambda x: (softmax(x)[0], (softmax(x)[0], np)), lambda dy, c: softmax_backward(dy, c[0])),
        "PASS", ""),
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
