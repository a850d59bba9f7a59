"""Calls that several threads share: arguments, a fixture, and how many helpers there are."""

from pathlib import Path

import numpy as np
import pytest

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward

# More than enough to wake helpers, and more tiles than threads, in forward and backward.
MANY_TILES = (2048, 130)


@pytest.fixture(autouse=True)
def four_threads():
    before = stablenorm.get_num_threads()
    stablenorm.set_num_threads(4)
    yield
    stablenorm.set_num_threads(before)


def make(seed, shape=MANY_TILES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((2, *shape)) + 3).astype(dtype)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return x, gamma, beta, dy


def run(x, gamma, beta, dy):
    y, cache = layer_norm_forward(x, gamma, beta)
    return [v.tobytes() for v in (y, *layer_norm_backward(dy, cache))]


def count_threads():
    """Return how many threads this process has, those of C++ included; None where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None
