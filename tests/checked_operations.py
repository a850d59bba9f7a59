"""Operations with known derivatives for the gradient checker, and how it is asked about them."""

import numpy as np

from stablenorm.check import check_gradients


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


X = np.linspace(-1.0, 1.5, 12).reshape(3, 4)


def check(forward=sine, backward=cosine, args=(X,), **options):
    return check_gradients(forward, backward, args, names=["x", "w"][: len(args)], rng=0, **options)


def found(report, name):
    """Return the one finding whose name has `name` in it, on one line."""
    (finding,) = (f for f in report.findings if name in f.name)
    assert "\n" not in finding.message
    return finding
