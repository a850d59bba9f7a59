"""benchmarks/gpu.py without a GPU: the checks run on the host shim, and find what is wrong."""

import importlib
import sys

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm.cuda import driver

# Fixtures are found by their names in this module.
cupy, use, launches = device.cupy, device.use, device.launches
pytestmark = device.needs_shim


@pytest.fixture
def gpu(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "benchmarks")
    yield importlib.import_module("gpu")
    for name in ("gpu", "gpu_peers", "page"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    "variant",
    ["plain", "no gamma", "one element later", "row stride", "mean 1e4", "subnormal", "a NaN row"],
)
def test_the_kernels_pass(gpu, cupy, variant):
    assert gpu.check(cupy, gpu.Case(33, 129, "float32", variant)) == ""
    assert gpu.check(cupy, gpu.Case(0, 129, "float32", variant)) == ""


@pytest.mark.usefixtures("launches")
def test_a_wrong_kernel_does_not_pass(gpu, cupy, monkeypatch):
    working = driver.launch

    def launch(function, kernel, grid, parameters, together):
        # eps, before two integers.
        wrong = parameters[:-16] + np.float64(1.1e-5).tobytes() + parameters[-8:]
        working(function, kernel, grid, wrong, together)

    monkeypatch.setattr(driver, "launch", launch)
    for rows, judged in ((33, 2**15), (33, 129)):
        monkeypatch.setattr(gpu, "JUDGED", judged)
        assert "y: " in gpu.check(cupy, gpu.Case(rows, 129, "float32", "plain"))


@pytest.mark.usefixtures("launches")
def test_a_leaking_nan_does_not_pass(gpu, cupy, monkeypatch):
    real = gpu.run

    def leaking(arrays, backend=None):
        found = real(arrays, backend)
        if np.isnan(arrays["x"].get()).any():
            found["y"].host[0, 0] += 1
        return found

    monkeypatch.setattr(gpu, "run", leaking)
    assert gpu.check(cupy, gpu.Case(3, 129, "float32", "a NaN row")) == "a NaN leaves its row"


def test_without_a_device_it_says_so(gpu, cupy, capsys):
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    assert gpu.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
