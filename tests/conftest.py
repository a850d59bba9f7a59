"""Fixtures that every test file may ask for, and where test files find what they share."""

import functools
import gc
import os
import sys
from pathlib import Path

# Before NumPy is loaded: two test processes on two processors leave no room for threads of OpenBLAS,
# which spin while they wait. A gradient check of (32, 768) took 0.8 s of processors with two of
# them, and 0.5 s with one (2-core AMD EPYC, others busy).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest

from stablenorm import get_num_threads, set_num_threads
from stablenorm.backends import BACKENDS

try:
    import stablenorm.native  # noqa: F401  # only whether it can be
except ImportError:
    # Built without a compiler: tests of all backends are then of the others.
    del BACKENDS["native"]

# For `from checked_operations import check`: test files are no package, nor are those of the shim.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "shim")]


def pytest_collection_finish():
    """
    Leave all modules and tests loaded by now out of garbage collections.

    A full collection takes a second of all modules and tests; with them the oracle took twice as long.
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
    """So many threads for a test; afterwards as many as before."""
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
    """CuPy, a fake one (fake_cupy.py), of which `use` and `launches` put a device in place."""
    from fake_cupy import make_module  # noqa: PLC0415  # not everywhere can this be imported

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
    """140 columns, no colours, an empty folder; what a command adds to sys.path is taken back."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
