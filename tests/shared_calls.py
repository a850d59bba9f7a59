"""Calls that several threads share: arguments, fixtures, and interpreters of their own."""

import threading

import numpy as np
import pytest

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward

# More than SMALL elements, and more tiles than threads, in forward and backward.
MANY_TILES = (2048, 130)


@pytest.fixture(autouse=True)
def four_threads():
    before = stablenorm.get_num_threads()
    stablenorm.set_num_threads(4)
    yield
    stablenorm.set_num_threads(before)


@pytest.fixture
def pool(monkeypatch):
    """Replace the helpers of this process by a pool that has started nobody yet."""
    module = pytest.importorskip("stablenorm.cpu.pool")
    fresh = module._Pool()
    monkeypatch.setattr(module, "_pool", fresh)
    return fresh


def make(seed, shape=MANY_TILES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((2, *shape)) + 3).astype(dtype)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return x, gamma, beta, dy


def run(x, gamma, beta, dy):
    y, cache = layer_norm_forward(x, gamma, beta)
    return [v.tobytes() for v in (y, *layer_norm_backward(dy, cache))]


def helpers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "stablenorm"]
