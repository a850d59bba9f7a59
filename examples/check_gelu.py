"""
GELU, the exact one with erf: a backward written by hand, checked.

Run it: ``python examples/check_gelu.py``. It prints the report of the right backward, then those of
two usual mistakes. The first is the derivative of the other GELU, the one with tanh: it is right
to three digits, and a tolerance of 1e-3 lets it pass.
"""

import math

import numpy as np

from stablenorm.check import check_gradients

NAMES = ["x"]
# The standard library's erf, element by element: slow, but no further package is needed.
erf = np.vectorize(math.erf, otypes=[np.float64])


def forward(x):
    """Return x Phi(x), where Phi is the normal distribution."""
    return x * (1 + erf(x / math.sqrt(2))) / 2, x


def backward(dy, x):
    """The product rule: Phi(x) + x phi(x), where phi is the normal density."""
    distribution = (1 + erf(x / math.sqrt(2))) / 2
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return (dy * (distribution + x * density),)


def backward_tanh(dy, x):
    """Wrong here: differentiates x (1 + tanh(c (x + 0.044715 x^3))) / 2, not what forward is."""
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return (dy * ((1 + t) / 2 + x * (1 - t * t) / 2 * c * (1 + 3 * 0.044715 * x**2)),)


def backward_without_product_rule(dy, x):
    """Wrong: holds Phi(x) constant, like the mask of a ReLU."""
    return (dy * (1 + erf(x / math.sqrt(2))) / 2,)


# What is wrong, the backward that has it, the argument whose gradient is hit.
MISTAKES = {
    "the derivative of the tanh form": (backward_tanh, "x"),
    "x phi(x) is missing": (backward_without_product_rule, "x"),
}


def make_args(rng):
    """Draw x where GELU bends."""
    return [2 * rng.standard_normal((4, 6))]


def main():
    """Check the right backward, then the wrong ones."""
    args = make_args(np.random.default_rng(0))
    print("right:", check_gradients(forward, backward, args, names=NAMES, rng=0))
    for mistake, (wrong, _) in MISTAKES.items():
        print(f"\n{mistake}:", check_gradients(forward, wrong, args, names=NAMES, rng=0))


if __name__ == "__main__":
    main()
