"""
Kernels on a CUDA device, without one: how they are loaded and launched, what CUDA may say, streams,
graphs and memory. CuPy is a fake one (tests/fake_cupy.py).
"""

import types

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace, driver, workspace
from stablenorm.cuda.plan import choose_kernel

# Fixtures are found by their names in this module.
cupy, use, launches = device.cupy, device.use, device.launches
fake, on_device, problem = device.fake, device.on_device, device.problem

F32 = np.dtype(np.float32)
KERNEL = choose_kernel(6, F32, None, F32, F32, pairs=False)


def forward_of_ones(shape=(300, 33), device=0):
    """Return dy, and the cache of a forward with gamma."""
    dy = fake.ndarray(np.ones(shape, np.float32), device)
    gamma = fake.ndarray(np.ones(shape[-1], np.float32), device)
    return dy, layer_norm_forward(dy, gamma)[1]


@pytest.fixture
def compiler(monkeypatch):
    """A compiler whose code is what it is asked for."""
    driver.load.cache_clear()
    monkeypatch.setattr(driver.compiling, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(driver.compiling, "cubin", lambda *asked: asked)
    monkeypatch.setattr(driver, "read_facts", lambda _: driver.Facts((9, 0), 132, True))


@pytest.mark.usefixtures("compiler")
def test_a_driver_older_than_the_compiler_is_refused_before_anything_is_loaded(cupy):
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    with pytest.raises(RuntimeError, match=r"must support CUDA 13.*supports 12.8; update the driv"):
        driver.load(0, KERNEL)


@pytest.mark.usefixtures("compiler")
def test_kernels_are_loaded_once_and_launched_as_cupy_wants_it(cupy):
    loaded, called, asked = [], [], []
    function = lambda *arguments, **options: called.append((arguments, options))
    function.ptr = 77
    module = types.SimpleNamespace(load=loaded.append, get_function=lambda _: function)
    cupy.cuda.Module = lambda: module
    cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor = lambda *a: (asked.append(a), 2)[1]
    assert driver.load(0, KERNEL) is driver.load(0, KERNEL) is function
    assert loaded == [(KERNEL.defines, (9, 0))]
    assert driver.count_resident(0, function, KERNEL) == 2 * 132
    assert asked == [(77, 256, KERNEL.shared_bytes)]
    driver.launch(function, KERNEL, 3, b"abcdefgh", True)
    (((grid, block, (value,), shared), options),) = called
    assert (grid, block, shared) == ((3,), (256,), KERNEL.shared_bytes)
    assert (value.size, value.nbytes, value.tobytes()) == (1, 8, b"abcdefgh")
    assert options == {"enable_cooperative_groups": True}


@device.needs_shim
def test_a_barrier_refused_by_the_driver_becomes_a_last_block(launches, monkeypatch, rng):
    x, gamma, beta, dy = problem(rng, (64, 129), np.float32)
    case, working = (x, gamma, beta, 1e-5, dy), driver.launch

    def launch(*given):
        if given[-1]:
            msg = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: too many blocks"
            raise fake.CUDADriverError(msg)
        working(*given)

    monkeypatch.setattr(driver, "launch", launch)
    expected, actual = device.both(case, np.asarray), device.both(case)
    assert {k: a.tobytes() for k, a in actual.items()} == {
        k: a.tobytes() for k, a in expected.items()
    }
    assert [launch.kernel.forward for launch in launches] == [True, False]


# ---- streams, graphs and memory ----


def test_each_stream_has_a_counter_of_its_own(use, cupy):
    launches = use(run=False)
    dy, cache = forward_of_ones()
    places = []
    for ptr in (0, 7, 0, 7, 8):
        cupy.cuda.stream = fake.Stream(ptr)
        layer_norm_backward(dy, cache)
        places.append(launches[-1].values["counter"])
    assert places[0] == places[2] != places[1] == places[3] != places[4]
    for number in range(100, 100 + 2 * workspace._STREAMS):
        cupy.cuda.stream = fake.Stream(number)
        layer_norm_backward(dy, cache)
    assert workspace._counter.cache_info().currsize == workspace._STREAMS


def test_a_graph_needs_a_workspace_that_is_large_enough(use, cupy):
    launches = use(run=False)
    dy, cache = forward_of_ones()
    stream, work = cupy.cuda.stream, CudaWorkspace()
    stream.capturing = True
    with pytest.raises(
        RuntimeError, match=r"need \d+ bytes that outlive the call, and there is no work"
    ):
        layer_norm_backward(dy, cache)
    with work, pytest.raises(RuntimeError, match=r"and the workspace has 0: .*CudaWorkspace"):
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
    counter, partials = (piece.data.ptr for piece in work._pieces)
    assert launches[-1].values.items() >= {"partials": partials, "counter": counter}.items()
    with pytest.raises(RuntimeError, match=r"x must have rows that are contiguous"):
        layer_norm_forward(on_device(np.ones((4, 6), np.float32)), axis=0)
    stream.capturing = False
    # It grows by another piece: a graph may still write into the first.
    with work:
        layer_norm_backward(*forward_of_ones((300, 77)))
    assert len(work._pieces) == 3
    other = forward_of_ones(device=1)
    with work, pytest.raises(ValueError, match=r"stay on one device: it is on 0, x is on 1"):
        layer_norm_backward(*other)
