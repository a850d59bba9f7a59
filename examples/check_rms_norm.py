"""
RMS norm over the last axis: a backward written by hand, checked.

Run it: ``python examples/check_rms_norm.py``. It prints the report of the right backward, then
those of two usual mistakes: one as small as eps, one of the size of 1 / n.
"""

import numpy as np

from stablenorm.check import check_gradients

NAMES = ["x", "gamma"]
EPS = 1e-5


def mean(a):
    """Take the mean of each row."""
    return a.mean(axis=-1, keepdims=True)


def forward(x, gamma):
    """Return gamma xhat, where xhat = x / sqrt(mean(x^2) + eps)."""
    rrms = 1 / np.sqrt(mean(x * x) + EPS)
    return gamma * x * rrms, (x, gamma, rrms)


def backward(dy, cache):
    """The Jacobian of xhat is rrms (I - xhat xhat^T / n), exact with eps inside rrms."""
    x, gamma, rrms = cache
    xhat = x * rrms
    g = gamma * dy
    return rrms * (g - xhat * mean(g * xhat)), (dy * xhat).sum(axis=0)


def backward_without_eps(dy, cache):
    """Wrong: computes rrms again, and forgets eps."""
    x, gamma, _ = cache
    return backward(dy, (x, gamma, 1 / np.sqrt(mean(x * x))))


def backward_n_minus_1(dy, cache):
    """Wrong: divides the second term by n - 1, as statisticians divide a variance."""
    x, gamma, rrms = cache
    xhat = x * rrms
    g = gamma * dy
    slope = (g * xhat).sum(axis=-1, keepdims=True) / (x.shape[-1] - 1)
    return rrms * (g - xhat * slope), (dy * xhat).sum(axis=0)


# What is wrong, the backward that has it, the argument whose gradient is hit hardest.
MISTAKES = {
    "eps is missing from rrms": (backward_without_eps, "x"),
    "the mean of g xhat is divided by n - 1": (backward_n_minus_1, "x"),
}


def make_args(rng):
    """Draw ordinary rows: a missing eps then changes dx by about 1e-5 of itself."""
    return [rng.standard_normal((3, 8)), 1 + 0.5 * rng.standard_normal(8)]


def main():
    """Check the right backward, then the wrong ones."""
    args = make_args(np.random.default_rng(0))
    print("right:", check_gradients(forward, backward, args, names=NAMES, rng=0))
    for mistake, (wrong, _) in MISTAKES.items():
        print(f"\n{mistake}:", check_gradients(forward, wrong, args, names=NAMES, rng=0))


if __name__ == "__main__":
    main()
