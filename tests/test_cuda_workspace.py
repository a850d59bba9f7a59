"""
Streams, graphs and memory of a CUDA device, without one.

CuPy is a fake one (tests/fake_cupy.py).
"""

import subprocess
import sys

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm import cuda, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace
from stablenorm.cuda import workspace as _cuda_workspace

fake = device.fake
# Fixtures are found by their names in this module.
cupy = device.cupy
builds = device.builds
use = device.use
on_device = device.on_device
parameters = device.parameters
failing = device.failing


def test_each_stream_has_counters_of_its_own(use, cupy):
    launches = use(run=False)
    dy = on_device(np.ones((300, 33), np.float32))
    _, cache = layer_norm_forward(dy, on_device(np.ones(33, np.float32)))
    places = []
    for ptr in (0, 7, 0, 7, 8):
        cupy.cuda.stream = fake.Stream(ptr)
        layer_norm_backward(dy, cache)
        places.append(parameters(launches[-1])["counters"])
    assert places[0] == places[2] != places[1] == places[3] != places[4]
    for number in range(100, 100 + 2 * _cuda_workspace._STREAMS):
        cupy.cuda.stream = fake.Stream(number)
        layer_norm_backward(dy, cache)
    assert len(_cuda_workspace._kept) == _cuda_workspace._STREAMS


def test_a_graph_needs_a_workspace_that_is_large_enough(use, cupy):
    launches = use(run=False)
    dy = on_device(np.ones((300, 33), np.float32))
    _, cache = layer_norm_forward(dy, on_device(np.ones(33, np.float32)))
    stream, work = cupy.cuda.stream, CudaWorkspace()
    stream.capturing = True
    with pytest.raises(
        RuntimeError, match=r"partial sums need memory that outlives.*CudaWorkspace"
    ):
        layer_norm_backward(dy, cache)
    with work, pytest.raises(RuntimeError, match=r"workspace must hold \d+ bytes, and it holds 0"):
        layer_norm_backward(dy, cache)
    stream.capturing = False
    with work:
        expected = layer_norm_backward(dy, cache)
    assert stream.waited == 1
    assert work.nbytes > 0
    out = [on_device(np.empty_like(a.host)) for a in expected if a is not None]
    stream.capturing, before = True, list(cupy.allocated)
    with work:
        layer_norm_backward(dy, cache, out=(out[0], out[1], None))
    # Captured: nothing allocated, the workspace's own addresses.
    assert cupy.allocated == before
    held = {"partials": work._pieces[-1].data.ptr, "counters": work._counters.data.ptr}
    assert parameters(launches[-1]).items() >= held.items()
    with pytest.raises(RuntimeError, match=r"x must have rows that are contiguous"):
        layer_norm_forward(on_device(np.ones((4, 6), np.float32)), axis=0)
    stream.capturing = False
    # It grows by another piece: a graph may still write into the first.
    large = on_device(np.ones((300, 77), np.float32))
    with work:
        _, cache = layer_norm_forward(large, on_device(np.ones(77, np.float32)))
        layer_norm_backward(large, cache)
    assert len(work._pieces) == 2
    other = fake.ndarray(large.host, 1)
    _, cache = layer_norm_forward(other, fake.ndarray(np.ones(77, np.float32), 1))
    with work, pytest.raises(ValueError, match=r"stay on one device: it is on 0, x is on 1"):
        layer_norm_backward(other, cache)


def test_a_workspace_spoiled_by_an_error_is_zeroed_and_keeps_its_memory(use, monkeypatch):
    error = fake.CUDADriverError("CUDA_ERROR_LAUNCH_TIMEOUT: timed out")
    cache, _, driver = failing(use, monkeypatch, error)
    work, dy = CudaWorkspace(), on_device(np.ones((300, 33), np.float32))
    with work:
        with pytest.raises(RuntimeError, match="lost to this process"):
            layer_norm_backward(dy, cache)
        work._counters[...] = 12345
        place = work._counters.data.ptr
        monkeypatch.setattr(cuda, "_driver", lambda: driver)
        layer_norm_backward(dy, cache)
    assert not work._counters.host.any()
    assert work._counters.data.ptr == place


def test_workspaces_nest():
    first, second = CudaWorkspace(), CudaWorkspace()
    with first:
        with second, first:
            assert _cuda_workspace._entered.work is first
        assert _cuda_workspace._entered.work is first
    assert _cuda_workspace._entered.work is None
    assert repr(first) == "<CudaWorkspace of 0 bytes>"


def test_numpy_calls_load_nothing_of_cuda():
    code = (
        "import sys, numpy as np, stablenorm\n"
        "stablenorm.layer_norm(np.ones((2, 3)), backend='numpy')\n"
        "stablenorm.layer_norm([[1.0, 2.0]], backend='numpy')\n"
        "print(*(m for m in sys.modules if 'cuda' in m or 'cupy' in m))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == []
