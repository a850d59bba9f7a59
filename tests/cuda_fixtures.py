"""What the tests of arrays on a CUDA device share: a fake CuPy and device in place, and its arrays."""

import functools
import sys

import fake_cupy as fake
import host_shim
import numpy as np
import pytest

from stablenorm import cuda, layer_norm_forward
from stablenorm.cuda import workspace

needs_shim = pytest.mark.skipif(bool(host_shim.why_not()), reason=host_shim.why_not() or "-")

# The bits of the CPU, without compiling anything.
host_forward = functools.partial(layer_norm_forward, backend="numpy")


def raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.fixture
def cupy(monkeypatch):
    module = fake.make_module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(workspace, "_kept", type(workspace._kept)())
    monkeypatch.setattr(cuda, "_driver", raising(AssertionError("no device was put in place")))
    return module


@pytest.fixture
def use(cupy, builds, monkeypatch):
    """Return a function that puts a device in place and returns the list of its launches."""

    def put(**facts):
        assert sys.modules["cupy"] is cupy
        driver, launches = fake.make_driver(builds, **facts)
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        return launches

    return put


@pytest.fixture
def launches(use):
    return use()


def on_device(array, device=0):
    return fake.ndarray(np.array(array, order="K", copy=True), device)


def problem(rng, shape, dtype, gamma_dtype=None):
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[-1]).astype(gamma_dtype or dtype) for _ in range(2))
    return x, gamma, beta, dy


def assert_bits(actual, expected):
    assert type(actual) is fake.ndarray
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.get().tobytes() == expected.tobytes()


def failing(use, monkeypatch, error):
    """Put a device in place whose launches fail with `error` after the first forward."""
    launches = use(run=False)
    ones = np.ones((300, 33), np.float32)
    _, cache = layer_norm_forward(on_device(ones), on_device(ones[0]))
    driver = cuda._driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver._replace(launch=raising(error)))
    return cache, launches, driver
