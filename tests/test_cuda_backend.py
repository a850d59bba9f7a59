"""
Arrays on a CUDA device, without one: what goes in and comes out, what is refused, and what CUDA is asked.

CuPy is a fake one (tests/fake_cupy.py), and the kernels of layer_norm.cu run on the CPU
(tests/shim). What only a device can show, `make gpu` checks.
"""

import sys
from unittest.mock import Mock

import fake_cupy as fake
import numpy as np
import pytest
from fake_cupy import assert_bits, on_device
from host_shim import needs_shim
from norms import draw

from stablenorm import cuda, layer_norm, layer_norm_backward, layer_norm_forward, rms_norm
from stablenorm.cuda import driver
from stablenorm.cuda.plan import choose_kernel

F32 = np.dtype(np.float32)
KERNEL = choose_kernel(6, True, F32, F32, F32)


def forward_of_ones(*shape):
    """Return dy, and the cache of a forward with gamma."""
    dy, gamma = (fake.ndarray(np.ones(length, np.float32)) for length in (shape, shape[-1]))
    return dy, layer_norm_forward(dy, gamma)[1]


def assert_as_on_the_host(case, place=on_device, axis=-1, out=None):
    """Compare a forward and a backward where `place` puts x, gamma, beta, dy; return the y expected, and the cache."""
    placed = [None if array is None else place(array) for array in case]
    # The bits of the CPU, without compiling anything.
    expected, host = layer_norm_forward(*case[:3], axis=axis, backend="numpy")
    y, cache = layer_norm_forward(*placed[:3], axis=axis)
    assert_bits(y, expected)
    actual = layer_norm_backward(placed[3], cache, out=out)
    expected_of_backward = layer_norm_backward(case[3], host)
    for one, other, target in zip(actual, expected_of_backward, out or (None,) * 3, strict=True):
        assert (one is None) == (other is None)
        assert target is None or one is target
        if other is not None:
            assert_bits(one, other)
    return expected, cache


# ---- the doors ----


@needs_shim
def test_results_are_cupy_arrays_with_the_bits_of_the_cpu(launches, rng):
    x, gamma, beta, dy = draw(rng, (2, 17, 129))
    expected, cache = assert_as_on_the_host((x, gamma, beta, dy))
    assert cache.backend == "cuda"
    # One launch each; only blocks that wait for one another take a cooperative one.
    assert [launch.cooperative for launch in launches] == [False, True]
    assert_bits(layer_norm(*map(on_device, (x, gamma, beta))), expected)


@needs_shim
def test_other_axes_are_copied_and_written_back(launches, rng):
    x, dy = (rng.standard_normal((3, 8, 50)).astype(np.float32) for _ in range(2))
    gamma, beta = rng.standard_normal((2, 3, 50)).astype(np.float32)
    before = x.copy()

    def place(array):
        """Gamma has gaps within."""
        return fake.ndarray(gamma.T.copy().T) if array is gamma else fake.ndarray(array)

    out = [fake.ndarray(np.empty(a.T.shape, a.dtype).T) for a in (x, gamma, beta)]
    for targets in (None, out):
        assert_as_on_the_host((x, gamma, beta, dy), place, axis=(0, 2), out=targets)
    assert len(launches) == 4
    np.testing.assert_array_equal(x, before)


# A view of (9, 140), and whether it takes a copy.
VIEWS = {
    "columns": (lambda a: a[:, 3:-2], False),
    "every other row, backwards": (lambda a: a[::-2, 1:], False),
    "one row": (lambda a: a[3:4, 1:], False),
    "a new axis": (lambda a: a[:, None, :129], False),
    "one row for all": (lambda a: np.broadcast_to(a[0], a.shape), False),
    "gaps within rows": (lambda a: a[:, ::2], True),
    "rows backwards within": (lambda a: a[:, ::-1], True),
}


@needs_shim
@pytest.mark.parametrize("view", VIEWS)
def test_row_strides_need_no_copy_and_gaps_within_rows_do(launches, rng, view):
    see, is_copied = VIEWS[view]
    x, dy = rng.standard_normal((2, 9, 140)).astype(np.float32)
    expected, _ = assert_as_on_the_host((see(x), None, None, see(dy)), fake.ndarray)
    assert len(launches) == 2
    for launch in launches:
        assert (launch.values["x"] != see(x).ctypes.data) == is_copied
    # Results go back, where there are as many elements as places.
    if view != "one row for all":
        out = fake.ndarray(see(np.empty_like(x)))
        assert_bits(layer_norm(fake.ndarray(see(x)), out=out), expected)


@needs_shim
def test_out_may_be_x_and_dx_may_be_dy(launches, rng):
    x, gamma, beta, dy = draw(rng, (5, 129))
    over = on_device(dy)
    place = lambda array: over if array is dy else on_device(array)
    expected, cache = assert_as_on_the_host((x, gamma, beta, dy), place, out=(over, None, None))
    x, *others = cache.x, *cache.norm[:2]
    assert layer_norm(x, *others, out=x) is x
    assert_bits(x, expected)
    assert len(launches) == 3


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows_are_no_launch(launches, dtype, shape):
    ones = on_device(np.ones(4, dtype))
    y, cache = layer_norm_forward(on_device(np.empty(shape, dtype)), ones, ones)
    dx, dgamma, dbeta = layer_norm_backward(y, cache)
    assert y.shape == dx.shape == shape
    for total in (dgamma, dbeta):
        assert_bits(total, np.zeros(4, dtype))
    assert launches == []


class Foreign:
    """An array of another library's: DLPack, the array interface, or both."""

    def __init__(self, host, protocols, kind=2):
        self.host = host
        if "dlpack" in protocols:
            self.__dlpack__ = lambda: self
            self.__dlpack_device__ = lambda: (kind, 0)
        if "interface" in protocols:
            self.__cuda_array_interface__ = {**host.__array_interface__, "version": 3}


@needs_shim
@pytest.mark.parametrize(
    ("protocols", "kind"),
    [("dlpack", 2), ("dlpack", 13), ("interface", 2), ("dlpack interface", 2)],
)
@pytest.mark.usefixtures("launches")
def test_arrays_of_other_libraries_come_back_as_cupys(rng, protocols, kind):
    x, dy = rng.standard_normal((2, 5, 129)).astype(np.float32)
    place = lambda host: Foreign(host, protocols, kind)
    expected, cache = assert_as_on_the_host((x, None, None, dy), place)
    assert cache.x.data.ptr == x.ctypes.data
    result = np.empty_like(x)
    layer_norm(place(x), out=place(result))
    assert result.tobytes() == expected.tobytes()


# ---- what is refused ----

X = np.ones((4, 6), np.float32)


def backward(**keywords):
    return layer_norm_backward(*forward_of_ones(4, 6), **keywords)


GPU, ROW = on_device(X), on_device(X[0])
CANNOT = " cannot be combined with arrays on a CUDA device"
REFUSED = [
    (TypeError, "gamma must be on a CUDA device, like the other arguments, got numpy.ndarray; cupy.asarray",
     lambda: layer_norm(GPU, np.ones(6))),
    (TypeError, "gamma must be in host memory.*back", lambda: layer_norm(X, ROW)),
    (TypeError, "out must be in host memory", lambda: layer_norm(X, out=GPU)),
    (TypeError, "out must be on a CUDA device", lambda: layer_norm(GPU, out=X.copy())),
    (TypeError, "out must have dtype", lambda: layer_norm(GPU, out=on_device(X.astype(float)))),
    (TypeError, r"x is in host memory.*cupy.asarray\(x\)", lambda: layer_norm(X, backend="cuda")),
    (TypeError, "x must be float16.*got int64", lambda: layer_norm(on_device(X.astype(int)))),
    (ValueError, 'backend must be "cuda"', lambda: layer_norm(GPU, backend="native")),
    (ValueError, r"gamma must have shape \(6,\) to match x normalized over axis 1, got \(5,\)",
     lambda: layer_norm(GPU, on_device(X[0, :5]))),
    (ValueError, "gamma must be on device 0, like x, got device 1; copy it there",
     lambda: layer_norm(GPU, on_device(X[0], 1))),
    (ValueError, "an element of its own for each result",
     lambda: layer_norm(GPU, out=fake.ndarray(np.broadcast_to(X[0], X.shape)))),
    (ValueError, "leading axes of gamma or beta" + CANNOT, lambda: layer_norm(GPU, on_device(X[:1]))),
    (ValueError, f"RMS norm{CANNOT}.*x.get", lambda: rms_norm(GPU)),
    (ValueError, "gamma_offset" + CANNOT, lambda: layer_norm(GPU, ROW, gamma_offset=1.0)),
    (ValueError, "sum_axes" + CANNOT, lambda: backward(sum_axes=0)),
    (ValueError, "accumulate" + CANNOT, lambda: backward(accumulate=True)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[row[1] for row in REFUSED])
def test_arguments_that_do_not_fit_are_named(use, error, message, call):
    use(run=False)
    with pytest.raises(error, match=message):
        call()


def test_results_that_overlap_are_refused(use):
    launches, buffer = use(run=False), np.ones(60, np.float32)
    x, shifted = fake.ndarray(buffer[:24].reshape(4, 6)), fake.ndarray(buffer[6:30].reshape(4, 6))
    with pytest.raises(ValueError, match=r"out must not share memory with x.*pass a copy"):
        layer_norm(x, out=shifted)
    _, cache = layer_norm_forward(x)
    dy, dx = (fake.ndarray(buffer[at : at + 24].reshape(4, 6)) for at in (30, 36))
    with pytest.raises(ValueError, match=r"out.dx must not share memory with dy"):
        layer_norm_backward(dy, cache, out=(dx, None, None))
    even, odd = (fake.ndarray(buffer.reshape(5, 12)[:, at::2]) for at in (0, 1))
    layer_norm(even, out=odd)
    assert len(launches) == 2


def test_without_cupy_the_install_line_is_named(monkeypatch):
    # The entry None makes an import fail.
    monkeypatch.setitem(sys.modules, "cupy", None)
    driver.import_cupy.cache_clear()
    with pytest.raises(ImportError, match=r'CuPy is needed.*pip install "stablenorm\[cuda\]"'):
        layer_norm(X, backend="cuda")
    with pytest.raises(ImportError, match="CuPy is needed"):
        layer_norm(Foreign(X, "dlpack"))


def test_without_a_device_or_a_driver_it_says_so(cupy):
    error = RuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")
    cupy.cuda.runtime.getDeviceCount = Mock(side_effect=[error, 0])
    for said in (
        "RuntimeError: cudaErrorInsufficientDriver.*",
        "it finds none; see whether nvidia",
    ):
        with pytest.raises(RuntimeError, match=f"needs a CUDA device, and CUDA says: {said}"):
            layer_norm(X, backend="cuda")


# ---- kernels: loaded, launched ----


def test_kernels_are_loaded_once_and_launched_as_cupy_wants_it(cupy, monkeypatch):
    driver.load.cache_clear()
    monkeypatch.setattr(driver.compiling, "compiler", lambda: (None, (13, 5)))
    # A compiler whose code is what it is asked for.
    monkeypatch.setattr(driver.compiling, "cubin", lambda *asked: asked)
    monkeypatch.setattr(driver, "read_facts", lambda _: driver.Facts("90", 132, 227 << 10))
    function, cupy.cuda.Module, cupy.cuda.driver = Mock(ptr=77), Mock(), Mock()
    module = cupy.cuda.Module()
    occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    module.get_function.return_value, occupancy.return_value = function, 2
    # A driver older than the compiler is refused before anything is loaded.
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    with pytest.raises(RuntimeError, match=r"must support CUDA 13.*supports 12.8; update the driv"):
        driver.load(0, KERNEL)
    module.load.assert_not_called()
    cupy.cuda.runtime.driverGetVersion = lambda: 13000
    # No more blocks than fit all 132 multiprocessors.
    for rows, grid in ((1, 1), (1 << 20, 2 * 132)):
        plan = cuda.find_plan(0, rows, 6, True, True, F32, F32, F32)
        assert plan[:3] == (KERNEL, function, grid)
    assert driver.load(0, KERNEL) is driver.load(0, KERNEL)
    module.load.assert_called_once_with((KERNEL.defines, "90"))
    occupancy.assert_called_once_with(77, 256, KERNEL.shared_bytes)
    # The attribute is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
    cupy.cuda.driver.funcSetAttribute.assert_called_once_with(77, 8, KERNEL.shared_bytes)
    driver.launch(function, KERNEL, 3, "one", True)
    sizes = (3,), (256,), ("one",), KERNEL.shared_bytes
    function.assert_called_once_with(*sizes, enable_cooperative_groups=True)


@needs_shim
def test_a_grid_refused_by_the_driver_is_halved(launches, monkeypatch, rng):
    error = RuntimeError("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: too many blocks")
    refuse, working = Mock(side_effect=error), driver.launch
    monkeypatch.setattr(
        driver, "launch", lambda *a: (refuse if a[2] > 1 and a[-1] else working)(*a)
    )
    assert_as_on_the_host(draw(rng, (64, 129)))
    assert [launch.kernel.forward for launch in launches] == [True, False]


# ---- streams, graphs and memory ----


def test_each_stream_has_a_counter_of_its_own(use, cupy):
    launches = use(run=False)
    dy, cache = forward_of_ones(300, 33)
    places = []
    for ptr in (0, 7, 0, 7, 8):
        cupy.cuda.stream = fake.Stream(ptr)
        layer_norm_backward(dy, cache)
        places.append(launches[-1].values["counter"])
    assert places[0] == places[2] != places[1] == places[3] != places[4]
    for number in range(100, 100 + 2 * driver._STREAMS):
        cupy.cuda.stream = fake.Stream(number)
        layer_norm_backward(dy, cache)
    assert driver._counter.cache_info().currsize == driver._STREAMS


def test_memory_that_a_graph_writes_to_is_kept(use, cupy, monkeypatch):
    launches, captured = use(run=False), []
    monkeypatch.setattr(driver, "_captured", captured)
    dy, cache = forward_of_ones(300, 33)
    layer_norm_backward(dy, cache)
    assert captured == []
    cupy.cuda.stream = fake.Stream(capturing=True)
    for _ in range(2):
        layer_norm_backward(dy, cache)
    # Partial sums and a counter of each, which the graph sets to 0.
    places = [array.data.ptr for array in captured]
    assert len(set(places)) == 4
    for launch, pair in zip(launches[-2:], (places[:2], places[2:]), strict=True):
        assert [launch.values["partials"], launch.values["counter"]] == pair
    layer_norm_forward(on_device(np.ones((4, 6), np.float32)), axis=0)
    # The copies of x and of y.
    assert [array.shape for array in captured[4:]] == [(6, 4), (6, 4)]
