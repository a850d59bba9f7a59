"""
Scaled dot-product attention with batch and heads: a backward written by hand, checked.

Run it: ``python examples/check_attention.py``. It prints the report of the right backward, then
those of three usual mistakes. Each hits one of q, k, v, and the report says which.
"""

import numpy as np

from stablenorm.check import check_gradients

NAMES = ["q", "k", "v"]


def swap(a):
    """Transpose the matrices of the last two axes."""
    return np.swapaxes(a, -1, -2)


def forward(q, k, v):
    """Return p v, p = softmax(q k^T / sqrt(d)); all are (batch, heads, tokens, d)."""
    scale = 1 / np.sqrt(q.shape[-1])
    scores = scale * (q @ swap(k))
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p @ v, (q, k, v, p, scale)


def backward(dy, cache):
    """Back through p v, then softmax, then q k^T: a matrix product turns into two."""
    q, k, v, p, scale = cache
    dp = dy @ swap(v)
    dscores = scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return dscores @ k, swap(dscores) @ q, swap(p) @ dy


def backward_dq_unscaled(dy, cache):
    """Wrong: 1 / sqrt(d) is missing in dq."""
    dq, dk, dv = backward(dy, cache)
    return dq / cache[-1], dk, dv


def backward_dk_not_swapped(dy, cache):
    """Wrong: dk from rows where it takes columns; unseen by shapes if there are as many keys."""
    q, k, v, p, scale = cache
    dp = dy @ swap(v)
    dscores = scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return dscores @ k, dscores @ q, swap(p) @ dy


def backward_dv_first_head(dy, cache):
    """Wrong: dv takes the weights of head 0 for all heads."""
    dq, dk, _ = backward(dy, cache)
    p = cache[3]
    return dq, dk, swap(np.broadcast_to(p[:, :1], p.shape)) @ dy


# What is wrong, the backward that has it, the argument whose gradient is hit.
MISTAKES = {
    "1 / sqrt(d) is missing in dq": (backward_dq_unscaled, "q"),
    "dscores is not transposed for dk": (backward_dk_not_swapped, "k"),
    "dv takes the weights of head 0": (backward_dv_first_head, "v"),
}


def make_args(rng):
    """Draw q, k, v: 2 batches, 2 heads, 3 tokens, d = 2."""
    return [rng.standard_normal((2, 2, 3, 2)) for _ in NAMES]


def main():
    """Check the right backward, then the wrong ones."""
    args = make_args(np.random.default_rng(0))
    print("right:", check_gradients(forward, backward, args, names=NAMES, rng=0))
    for mistake, (wrong, _) in MISTAKES.items():
        print(f"\n{mistake}:", check_gradients(forward, wrong, args, names=NAMES, rng=0))


if __name__ == "__main__":
    main()
