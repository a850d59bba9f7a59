"""Memory that is recycled: fixtures, and how the tests ask for it."""

import numpy as np
import pytest

from stablenorm import _recycling
from stablenorm._recycling import Recycler, empty

SHAPE = (1024, 1024)
NBYTES = 4 << 20
FLOAT32 = np.dtype(np.float32)
BYTE = np.dtype(np.uint8)


@pytest.fixture(autouse=True)
def recycler(monkeypatch):
    """One that no other test has asked, in place of that of the process."""
    fresh = Recycler()
    fresh.set_limit(64 * NBYTES)
    monkeypatch.setattr(_recycling, "recycler", fresh)
    return fresh


@pytest.fixture
def known():
    """Let `SHAPE` be a size that was asked for before."""
    new()


def new(shape=SHAPE, dtype=FLOAT32):
    return empty(shape, dtype)


def place(array):
    return array.__array_interface__["data"][0]
