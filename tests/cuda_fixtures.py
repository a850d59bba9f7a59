"""What the tests of arrays on a CUDA device share: a fake CuPy and device in place, and its arrays."""

import functools
import sys

import fake_cupy as fake
import host_shim
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda import workspace

needs_shim = pytest.mark.skipif(bool(host_shim.why_not()), reason=host_shim.why_not() or "-")
OUTPUTS = ("y", "dx", "dgamma", "dbeta")

# The bits of the CPU, without compiling anything.
host_forward = functools.partial(layer_norm_forward, backend="numpy")


@pytest.fixture
def cupy(monkeypatch):
    module = fake.make_module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    workspace._counter.cache_clear()
    return module


@pytest.fixture
def use(cupy, builds, monkeypatch):
    """Return a function that puts a device in place and returns the list of its launches."""
    assert sys.modules["cupy"] is cupy
    return functools.partial(fake.put_device, monkeypatch, builds)


@pytest.fixture
def launches(use):
    return use()


def on_device(array, device=0):
    return fake.ndarray(np.array(array, order="K", copy=True), device)


def problem(rng, shape, dtype, gamma_dtype=None):
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[-1]).astype(gamma_dtype or dtype) for _ in range(2))
    return x, gamma, beta, dy


def both(case, place=on_device):
    """Return y and the gradients of `case` (x, gamma, beta, eps, dy), computed where `place` puts it."""
    eps = case[3]
    x, gamma, beta, dy = (None if a is None else place(a) for a in (*case[:3], case[4]))
    backend = "numpy" if isinstance(x, np.ndarray) else None
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend=backend)
    found = zip(OUTPUTS, (y, *layer_norm_backward(dy, cache)), strict=True)
    return {k: a.get() if isinstance(a, fake.ndarray) else a for k, a in found}


def assert_bits(actual, expected):
    assert type(actual) is fake.ndarray
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.get().tobytes() == expected.tobytes()
