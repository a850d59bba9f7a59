"""
A linear layer with bias, y = x W^T + b: a backward written by hand, checked.

Run it: ``python examples/check_linear.py``. It prints the report of the right backward, then those
of three usual mistakes. Two of them hit one argument and leave the others right, and so says the
report; the third one is seen by its shape alone, because W is not square.
"""

import numpy as np

from stablenorm.check import check_gradients

NAMES = ["x", "weight", "bias"]


def forward(x, weight, bias):
    """Return x W^T + b; x is (batch, tokens, inputs), W (outputs, inputs), b (outputs,)."""
    return x @ weight.T + bias, (x, weight)


def backward(dy, cache):
    """Every token of every batch uses the same W and b: their gradients sum over both axes."""
    x, weight = cache
    dweight = np.einsum("bto,bti->oi", dy, x)
    return dy @ weight, dweight, dy.sum(axis=(0, 1))


def backward_bias_wrong_axes(dy, cache):
    """Wrong: sums over the batch, then takes the mean over the tokens."""
    dx, dweight, _ = backward(dy, cache)
    return dx, dweight, dy.sum(axis=0).mean(axis=0)


def backward_last_batch_missing(dy, cache):
    """Wrong: the loop over batches that accumulates dW ends one too early."""
    x, _ = cache
    dx, _, dbias = backward(dy, cache)
    return dx, np.einsum("bto,bti->oi", dy[:-1], x[:-1]), dbias


def backward_not_transposed(dy, cache):
    """Wrong: dW comes out as (inputs, outputs)."""
    dx, dweight, dbias = backward(dy, cache)
    return dx, dweight.T, dbias


# What is wrong, the backward that has it, the argument whose gradient is hit.
MISTAKES = {
    "dbias is summed over the wrong axes": (backward_bias_wrong_axes, "bias"),
    "the last batch is missing from dweight": (backward_last_batch_missing, "weight"),
    "dweight is not transposed": (backward_not_transposed, "weight"),
}


def make_args(rng):
    """Draw arguments in which no two axes are of one length."""
    return [rng.standard_normal(shape) for shape in ((2, 3, 4), (5, 4), (5,))]


def main():
    """Check the right backward, then the wrong ones."""
    args = make_args(np.random.default_rng(0))
    print("right:", check_gradients(forward, backward, args, names=NAMES, rng=0))
    for mistake, (wrong, _) in MISTAKES.items():
        print(f"\n{mistake}:", check_gradients(forward, wrong, args, names=NAMES, rng=0))


if __name__ == "__main__":
    main()
