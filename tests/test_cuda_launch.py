"""
Kernels on a CUDA device, without one: how they are loaded and launched, and what CUDA may say.

CuPy is a fake one (tests/fake_cupy.py), and the kernels of layer_norm.cu run on the CPU.
"""

import sys
import types

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm import cuda, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import driver as _cuda_device
from stablenorm.cuda import errors as _cuda_errors
from stablenorm.cuda import workspace as _cuda_workspace

fake = device.fake
# Fixtures are found by their names in this module.
cupy = device.cupy
builds = device.builds
use = device.use
launches = device.launches
on_device = device.on_device
problem = device.problem
assert_bits = device.assert_bits
host_forward = device.host_forward
needs_shim = device.needs_shim
failing = device.failing

ABOUT = _cuda_device.Facts(0, (9, 0), 132, True, 100 << 10, 48 << 10)


def plan(shared_bytes=0):
    return cuda.plan_forward(4, 6, np.dtype(np.float32), 0)._replace(shared_bytes=shared_bytes)


def test_a_driver_older_than_the_compiler_is_refused_before_anything_is_loaded(cupy, monkeypatch):
    monkeypatch.setattr(_cuda_device.compiling, "nvrtc_version", lambda: (13, 5))
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    driver = _cuda_device.make_driver(cupy)
    with pytest.raises(
        RuntimeError, match=r"must support CUDA 13.*supports 12.8; update the driver"
    ):
        driver.kernel(plan(), ABOUT)


def test_a_block_beyond_the_device_is_refused(cupy, monkeypatch):
    monkeypatch.setattr(_cuda_device.compiling, "nvrtc_version", lambda: (13, 5))
    with pytest.raises(RuntimeError, match=r"needs 204800 bytes of shared memory.*has 102400"):
        _cuda_device.make_driver(cupy).kernel(plan(200 << 10), ABOUT)


def test_kernels_are_loaded_once_and_launched_as_cupy_wants_it(cupy, monkeypatch):
    loaded, called = [], []

    class Module:
        def load(self, code):
            loaded.append(code)

        def get_function(self, entry):
            def function(*arguments, **options):
                called.append((entry, arguments, options))

            function.ptr = 77
            return function

    asked = []
    cupy.cuda.Module = Module
    cupy.cuda.driver.funcSetAttribute = lambda *a: asked.append(a)
    cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor = lambda *a: (asked.append(a), 2)[1]
    monkeypatch.setattr(_cuda_device.compiling, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(_cuda_device.compiling, "cubin", lambda *a: a)
    driver = _cuda_device.make_driver(cupy)
    function = driver.kernel(plan(), ABOUT)
    assert driver.kernel(plan(), ABOUT) is function
    assert loaded == [(plan().defines, (9, 0))]
    assert asked == []
    driver.kernel(plan(64 << 10), ABOUT)
    assert driver.resident(function, 256, 1024) == 2
    assert asked == [(77, 8, 64 << 10), (77, 256, 1024)]
    driver.launch(function, 3, 256, 1024, b"abcdefgh", True)
    ((entry, (grid, block, (value,), shared), options),) = called
    assert (entry, grid, block, shared) == ("layer_norm_forward", (3,), (256,), 1024)
    assert (value.size, value.nbytes, value.tobytes()) == (1, 8, b"abcdefgh")
    assert options == {"enable_cooperative_groups": True}


@pytest.mark.parametrize(("kib", "staged"), [(227, True), (163, True), (99, False), (48, False)])
def test_a_launch_takes_the_shared_memory_that_the_device_grants(use, monkeypatch, kib, staged):
    use(run=False)
    driver, plans, launched = cuda._driver(), [], []

    def kernel(plan, facts):
        plans.append(plan)
        return driver.kernel(plan, facts)

    monkeypatch.setattr(
        cuda,
        "_driver",
        lambda: driver._replace(
            facts=lambda device: driver.facts(device)._replace(shared_most=kib << 10),
            kernel=kernel,
            launch=lambda *arguments: launched.append(arguments[3]),
        ),
    )
    x = on_device(np.ones((4, 5001), np.float32))
    _, cache = layer_norm_forward(x, on_device(np.ones(5001, np.float32)))
    layer_norm_backward(x, cache)
    assert launched == [plan.shared_bytes for plan in plans]
    assert (launched[1] > 48 << 10) == ("-DLN_SHARED_SUMS=1" in plans[1].defines) == staged


def test_a_kernel_that_needs_more_than_is_granted_unasked_asks(cupy, monkeypatch):
    asked, about = [], ABOUT._replace(shared_most=227 << 10)
    function = types.SimpleNamespace(ptr=77)
    cupy.cuda.Module = lambda: types.SimpleNamespace(
        load=lambda _: None, get_function=lambda _: function
    )
    cupy.cuda.driver.funcSetAttribute = lambda *a: asked.append(a)
    monkeypatch.setattr(_cuda_device.compiling, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(_cuda_device.compiling, "cubin", lambda *a: a)
    driver, f32 = _cuda_device.make_driver(cupy), np.dtype(np.float32)
    large = cuda.plan_backward(4, 8192, f32, f32, 0, shared_limit=about.shared_most)
    assert driver.kernel(large, about) is function
    # 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    assert asked == [(77, 8, large.shared_bytes)]
    assert large.shared_bytes > 48 << 10


def test_facts_are_read_from_the_device(cupy):
    attributes = {
        "MultiProcessorCount": 148,
        "CooperativeLaunch": 1,
        "MaxSharedMemoryPerBlockOptin": 232448,
        "MaxSharedMemoryPerBlock": 49152,
    }
    cupy.cuda.Device = lambda _: types.SimpleNamespace(
        compute_capability="100", attributes=attributes
    )
    assert _cuda_device.make_driver(cupy).facts(3) == (3, (10, 0), 148, True, 232448, 49152)


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
    cache, launches, driver = failing(use, monkeypatch, error)
    dy = on_device(np.ones((300, 33), np.float32))
    with pytest.raises(kind, match=message):
        layer_norm_backward(dy, cache)
    assert not _cuda_workspace._kept
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    layer_norm_backward(dy, cache)
    assert launches[-1].entry == "layer_norm_backward"


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
def test_a_barrier_refused_by_the_driver_becomes_tickets(use, monkeypatch, rng):
    # The least that has segments, and so a barrier: 200 KiB of partial sums.
    x, gamma, beta, dy = problem(rng, (64, 3300), np.float32)
    expected = layer_norm_backward(dy, host_forward(x, gamma, beta)[1])
    launches = use()
    driver, real = cuda._driver(), cuda._driver().launch

    def launch(kernel, grid, block, shared, values, together):
        if together:
            msg = "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: too many blocks"
            raise fake.CUDADriverError(msg)
        real(kernel, grid, block, shared, values, together)

    monkeypatch.setattr(cuda, "_driver", lambda: driver._replace(launch=launch))
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    for one, other in zip(layer_norm_backward(on_device(dy), cache), expected, strict=True):
        assert_bits(one, other)
    assert [launch.entry for launch in launches] == ["layer_norm_forward", "layer_norm_backward"]


@needs_shim
def test_the_grid_is_never_more_than_is_resident(use, rng):
    x, gamma, beta, dy = problem(rng, (2000, 40), np.float32)
    launches = use(each=1, multiprocessors=2, run=False)
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    layer_norm_backward(on_device(dy), cache)
    assert [launch.grid for launch in launches] == [2, 2]
    use(each=0)
    with pytest.raises(RuntimeError, match=r"none fits a multiprocessor"):
        layer_norm(on_device(x))


# Blocks that share a row: 5001 float32 do not fit one block of a device that grants 100 KiB.


@needs_shim
@pytest.mark.parametrize(("clusters", "grid"), [(None, 2), (1, 2), (2, 4), (40, 6)])
def test_rows_of_two_blocks_are_one_launch_of_whole_clusters(use, rng, clusters, grid):
    x, gamma, beta, dy = problem(rng, (33, 5001), np.float32)
    expected, host = host_forward(x, gamma, beta)
    launches = use(clusters=clusters)
    y, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    assert_bits(y, expected)
    for one, other in zip(
        layer_norm_backward(on_device(dy), cache), layer_norm_backward(dy, host), strict=True
    ):
        assert_bits(one, other)
    assert [launch.cluster for launch in launches] == [2, 2]
    # Three chunks; three blocks at once if nobody knows better.
    assert launches[1].grid == grid
    # Clusters that are not all resident would wait for ever.
    assert not any(launch.together for launch in launches)


@pytest.mark.parametrize("facts", [{"clusters": 0}, {"capability": (8, 0), "clusters": 9}])
def test_a_device_without_clusters_gets_none(use, facts):
    launches = use(run=False, **facts)
    x = on_device(np.ones((33, 5001), np.float32))
    _, cache = layer_norm_forward(x, on_device(np.ones(5001, np.float32)))
    layer_norm_backward(x, cache)
    assert [launch.cluster for launch in launches] == [1, 1]


def test_a_cluster_refused_by_the_driver_becomes_single_blocks(use, monkeypatch):
    launches = use(run=False)
    driver, real = cuda._driver(), cuda._driver().launch

    def launch(kernel, *given):
        if kernel[2] > 1:
            msg = "CUDA_ERROR_INVALID_CLUSTER_SIZE: invalid cluster size"
            raise fake.CUDADriverError(msg)
        real(kernel, *given)

    monkeypatch.setattr(cuda, "_driver", lambda: driver._replace(launch=launch))
    x = on_device(np.ones((33, 5001), np.float32))
    _, cache = layer_norm_forward(x, on_device(np.ones(5001, np.float32)))
    layer_norm_backward(x, cache)
    assert [launch.cluster for launch in launches] == [1, 1]


@pytest.mark.parametrize(("status", "expected"), [("fine", 16), ("size", 0), ("lost", None)])
def test_the_driver_is_asked_once_how_many_clusters_it_holds(cupy, monkeypatch, status, expected):
    asked = []

    def ask(function, config):
        asked.append((function, config.gridDimX, config.blockDimX, config.sharedMemBytes))
        return status, 16

    results = types.SimpleNamespace(CUDA_SUCCESS="fine", CUDA_ERROR_INVALID_CLUSTER_SIZE="size")
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = types.SimpleNamespace(
        CUresult=results,
        CUlaunchConfig=types.SimpleNamespace,
        CUfunction=lambda address: address,
        cuOccupancyMaxActiveClusters=ask,
    )
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    driver, function = _cuda_device.make_driver(cupy), types.SimpleNamespace(ptr=77)
    for _ in range(2):
        assert driver.clusters(function, plan(1024)._replace(cluster=8, block=512)) == expected
    assert asked == [(77, 8, 512, 1024)]


def test_a_driver_that_cannot_be_asked_says_nothing(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    driver = _cuda_device.make_driver(cupy)
    assert driver.clusters(types.SimpleNamespace(ptr=77), plan()) is None


def test_an_error_that_is_none_of_cudas_stays_what_it_is():
    error = RuntimeError("cudaSomething else")
    assert _cuda_errors.explained(error, 0) is error
