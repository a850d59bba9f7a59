"""Memory that is handed out again: fixtures, and how the tests ask for it."""

import numpy as np
import pytest

from stablenorm import memory
from stablenorm.memory import Pool, empty

# The smallest that the pool of the process keeps.
SHAPE = (1024, 256)
NBYTES = memory.LEAST
FLOAT32 = np.dtype(np.float32)
BYTE = np.dtype(np.uint8)


@pytest.fixture
def pool(monkeypatch):
    """A pool that nobody has asked before, in place of that of the process."""
    fresh = Pool(64 * NBYTES)
    monkeypatch.setattr(memory, "pool", fresh)
    monkeypatch.setattr(memory, "_asked", set())
    return fresh


@pytest.fixture
def known(pool):
    """The pool, which was asked for `SHAPE` before."""
    new()
    return pool


def new(shape=SHAPE, dtype=FLOAT32):
    return empty(shape, dtype)


def place(array):
    return array.__array_interface__["data"][0]
