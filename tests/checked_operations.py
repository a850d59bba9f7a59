"""Operations and data for the gradient checker, and how it is asked about them."""

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


def data(seed, shape=(4, 8), offset=0.0, dtype=np.float64):
    """Draw x, gamma of both signs and beta of a layer norm."""
    rng = np.random.default_rng(seed)
    x = offset + rng.standard_normal(shape)
    gamma = rng.choice([-1.0, 1.0], shape[-1]) * (0.5 + rng.random(shape[-1]))
    return tuple(a.astype(dtype) for a in (x, gamma, rng.standard_normal(shape[-1])))


X = np.linspace(-1.0, 1.5, 12).reshape(3, 4)


def check(forward=sine, backward=cosine, args=(X,), **options):
    return check_gradients(forward, backward, args, names=["x", "w"][: len(args)], rng=0, **options)


def found(report, name):
    """Return the one finding whose name has `name` in it, on one line."""
    (finding,) = (f for f in report.findings if name in f.name)
    assert "\n" not in finding.message
    return finding
