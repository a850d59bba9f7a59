"""
Kernels on a CUDA device, without one: how they are loaded and launched, what CUDA may say, streams,
graphs and memory. CuPy is a fake one (tests/fake_cupy.py).
"""

import subprocess
import sys
import types

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm import cuda, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace, driver, errors, workspace
from stablenorm.cuda.plan import choose_kernel

fake = device.fake
# Fixtures are found by their names in this module.
cupy = device.cupy
use = device.use
launches = device.launches
on_device = device.on_device
problem = device.problem
assert_bits = device.assert_bits
host_forward = device.host_forward
needs_shim = device.needs_shim
failing = device.failing

F32 = np.dtype(np.float32)
ABOUT = driver.Facts(0, (9, 0), 132, True)
KERNEL = choose_kernel(True, 6, F32, F32, False)


def test_a_driver_older_than_the_compiler_is_refused_before_anything_is_loaded(cupy, monkeypatch):
    monkeypatch.setattr(driver.compiling, "nvrtc_version", lambda: (13, 5))
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    with pytest.raises(
        RuntimeError, match=r"must support CUDA 13.*supports 12.8; update the driver"
    ):
        driver.make_driver(cupy).load(KERNEL, ABOUT)


def test_kernels_are_loaded_once_and_launched_as_cupy_wants_it(cupy, monkeypatch):
    loaded, called, asked = [], [], []

    class Module:
        def load(self, code):
            loaded.append(code)

        def get_function(self, entry):
            def function(*arguments, **options):
                called.append((entry, arguments, options))

            function.ptr = 77
            return function

    cupy.cuda.Module = Module
    cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor = lambda *a: (asked.append(a), 2)[1]
    monkeypatch.setattr(driver.compiling, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(driver.compiling, "cubin", lambda *a: a)
    made = driver.make_driver(cupy)
    function = made.load(KERNEL, ABOUT)
    assert made.load(KERNEL, ABOUT) is function
    assert loaded == [(KERNEL.defines, (9, 0))]
    assert made.resident(function, KERNEL) == 2
    assert asked == [(77, 256, KERNEL.shared_bytes)]
    made.launch(function, KERNEL, 3, b"abcdefgh", True)
    ((entry, (grid, block, (value,), shared), options),) = called
    assert (entry, grid, block) == ("layer_norm_forward", (3,), (256,))
    assert shared == KERNEL.shared_bytes
    assert (value.size, value.nbytes, value.tobytes()) == (1, 8, b"abcdefgh")
    assert options == {"enable_cooperative_groups": True}


def test_facts_are_read_from_the_device(cupy):
    attributes = {"MultiProcessorCount": 148, "CooperativeLaunch": 1}
    cupy.cuda.Device = lambda _: types.SimpleNamespace(
        compute_capability="100", attributes=attributes
    )
    assert driver.make_driver(cupy).facts(3) == (3, (10, 0), 148, True)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (fake.CUDADriverError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), RuntimeError,
         "device 0 is lost to this process.*start a new process"),
        (fake.CUDARuntimeError("cudaErrorECCUncorrectable: uncorrectable ECC error"), RuntimeError,
         "is lost to this process"),
        (fake.CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image"), RuntimeError,
         "driver is too old"),
        (fake.CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory"), MemoryError,
         "too little memory on CUDA device 0.*free_all_blocks"),
        (fake.CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument"), fake.CUDADriverError,
         "CUDA_ERROR_INVALID_VALUE"),
    ],
)  # fmt: skip
def test_errors_of_cuda_name_the_cure_and_the_counters_are_made_anew(
    use, monkeypatch, error, kind, message
):
    cache, launches, working = failing(use, monkeypatch, error)
    dy = on_device(np.ones((300, 33), np.float32))
    with pytest.raises(kind, match=message):
        layer_norm_backward(dy, cache)
    assert not workspace._kept
    monkeypatch.setattr(cuda, "_driver", lambda: working)
    layer_norm_backward(dy, cache)
    assert not launches[-1].kernel.forward


def test_too_little_memory_is_said_wherever_it_is_missing(use, cupy):
    use(run=False)
    enough, limit = cupy.empty, 3 * 8 * 300

    def empty(shape, dtype=np.float64):
        if np.prod(shape) * np.dtype(dtype).itemsize > limit:
            msg = "Out of memory allocating 1 bytes (allocated so far: 0 bytes)."
            raise MemoryError(msg)
        return enough(shape, dtype)

    cupy.empty = empty
    with pytest.raises(MemoryError, match=r"too little memory on CUDA device 0.*fewer rows"):
        layer_norm(on_device(np.ones((300, 33), np.float32)))
    # y is given, the partial sums are not.
    x = on_device(np.ones((300, 33), np.float32))
    cache = layer_norm_forward(x, on_device(np.ones(33, np.float32)), out=on_device(x.host))[1]
    with pytest.raises(MemoryError, match="too little memory"):
        layer_norm_backward(x, cache, out=(on_device(x.host), None, None))


@needs_shim
def test_a_barrier_refused_by_the_driver_becomes_a_last_block(use, monkeypatch, rng):
    x, gamma, beta, dy = problem(rng, (64, 129), np.float32)
    expected = layer_norm_backward(dy, host_forward(x, gamma, beta)[1])
    launches = use()
    working = cuda._driver()

    def launch(*given):
        if given[-1]:
            msg = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: too many blocks"
            raise fake.CUDADriverError(msg)
        working.launch(*given)

    monkeypatch.setattr(cuda, "_driver", lambda: working._replace(launch=launch))
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    for one, other in zip(layer_norm_backward(on_device(dy), cache), expected, strict=True):
        assert_bits(one, other)
    assert [launch.kernel.forward for launch in launches] == [True, False]


def test_the_grid_is_never_more_than_is_resident_nor_than_there_is_work(use, rng):
    x, gamma, beta, dy = map(on_device, problem(rng, (2000, 40), np.float32))
    for facts, grids in (({"multiprocessors": 2}, [2, 2]), ({"each": 999}, [125, 125])):
        launches = use(run=False, **facts)
        _, cache = layer_norm_forward(x, gamma, beta)
        layer_norm_backward(dy, cache)
        assert [launch.grid for launch in launches] == grids
    use(each=0, run=False)
    with pytest.raises(RuntimeError, match=r"none fits a multiprocessor"):
        layer_norm(x)


def test_an_error_that_is_none_of_cudas_stays_what_it_is():
    error = RuntimeError("cudaSomething else")
    assert errors.explained(error, 0) is error


# ---- streams, graphs and memory ----


def test_each_stream_has_counters_of_its_own(use, cupy):
    launches = use(run=False)
    dy = on_device(np.ones((300, 33), np.float32))
    _, cache = layer_norm_forward(dy, on_device(np.ones(33, np.float32)))
    places = []
    for ptr in (0, 7, 0, 7, 8):
        cupy.cuda.stream = fake.Stream(ptr)
        layer_norm_backward(dy, cache)
        places.append(launches[-1].values["counters"])
    assert places[0] == places[2] != places[1] == places[3] != places[4]
    for number in range(100, 100 + 2 * workspace._STREAMS):
        cupy.cuda.stream = fake.Stream(number)
        layer_norm_backward(dy, cache)
    assert len(workspace._kept) == workspace._STREAMS


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
    assert launches[-1].values.items() >= held.items()
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
    cache, _, working = failing(use, monkeypatch, error)
    work, dy = CudaWorkspace(), on_device(np.ones((300, 33), np.float32))
    with work:
        with pytest.raises(RuntimeError, match="lost to this process"):
            layer_norm_backward(dy, cache)
        work._counters[...] = 12345
        place = work._counters.data.ptr
        monkeypatch.setattr(cuda, "_driver", lambda: working)
        layer_norm_backward(dy, cache)
    assert not work._counters.host.any()
    assert work._counters.data.ptr == place


def test_workspaces_nest():
    first, second = CudaWorkspace(), CudaWorkspace()
    with first:
        with second, first:
            assert workspace._entered.work is first
        assert workspace._entered.work is first
    assert workspace._entered.work is None
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
