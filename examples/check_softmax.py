"""
Softmax over the last axis: a backward written by hand, checked.

Run it: ``python examples/check_softmax.py``. It prints the report of the right backward, then those
of two usual mistakes.
"""

import numpy as np

from stablenorm.check import check_gradients

NAMES = ["x"]


def forward(x):
    """Return softmax(x), and p as the cache."""
    # Shifted by the largest, lest exp overflow; the shift cancels in the quotient.
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p, p


def backward(dy, p):
    """The Jacobian of a row is diag(p) - p p^T: dx = p (dy - sum(p dy))."""
    return (p * (dy - (p * dy).sum(axis=-1, keepdims=True)),)


def backward_without_sum(dy, p):
    """Wrong: takes exp and the division apart, and forgets that the divisor depends on x too."""
    return (p * dy,)


def backward_wrong_axis(dy, p):
    """Wrong: sums over the rows, where the forward normalized over the last axis."""
    return (p * (dy - (p * dy).sum(axis=0, keepdims=True)),)


# What is wrong, the backward that has it, the argument whose gradient is hit.
MISTAKES = {
    "-p sum(p dy) is missing": (backward_without_sum, "x"),
    "the sum is over the wrong axis": (backward_wrong_axis, "x"),
}


def make_args(rng):
    """Draw logits; not square, so that axes cannot be mixed up unseen."""
    return [3 * rng.standard_normal((5, 7))]


def main():
    """Check the right backward, then the wrong ones."""
    args = make_args(np.random.default_rng(0))
    print("right:", check_gradients(forward, backward, args, names=NAMES, rng=0))
    for mistake, (wrong, _) in MISTAKES.items():
        print(f"\n{mistake}:", check_gradients(forward, wrong, args, names=NAMES, rng=0))


if __name__ == "__main__":
    main()
