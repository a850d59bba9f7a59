"""Fixtures for every test file, and the path to the modules that test files share."""

import functools
import gc
import os
import sys
from pathlib import Path

# Set before NumPy is loaded: two test processes on two processors leave no room for threads of OpenBLAS,
# which spin while they wait. A gradient check of (32, 768) took 0.8 s of processor time with two
# threads, and 0.5 s with one (2-core AMD EPYC, others busy).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from stablenorm import get_num_threads, set_num_threads
from stablenorm.backends import BACKENDS

try:
    import stablenorm.native  # noqa: F401  # a trial
except ImportError:
    # The package was built without a compiler: test the other backends.
    del BACKENDS["native"]

# Test files and those of the shim are no packages: `from norms import compute` needs the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "shim")]


def pytest_collection_finish():
    """
    Exclude all modules and tests loaded so far from garbage collections.

    A full collection of them takes a second, and the oracle took twice as long.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 1000)


@pytest.fixture(params=sorted(BACKENDS))
def backend(request):
    return request.param


@pytest.fixture(params=["float16", "bfloat16", "float32", "float64"])
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(20260229)


@pytest.fixture(params=[1, 2])
def threads(request):
    """Set the number of threads for a test; restore it afterwards."""
    before = get_num_threads()
    set_num_threads(request.param)
    yield
    set_num_threads(before)


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    """The folder of kernels for the host shim, one for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shim"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def cupy(monkeypatch):
    """A fake CuPy (fake_cupy.py); `use` and `launches` give it a device."""
    from fake_cupy import make_module  # noqa: PLC0415  # it needs fcntl, which Windows lacks

    module = make_module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def use(cupy, builds, monkeypatch):
    """Return a function that puts a device in place and returns the list of its launches."""
    return functools.partial(cupy.put_device, monkeypatch, builds)


@pytest.fixture
def launches(use):
    return use()


@pytest.fixture
def plain_terminal(monkeypatch, tmp_path):
    """Set 140 columns, no colours, an empty folder; restore sys.path after a command."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
