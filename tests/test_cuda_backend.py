"""
Arrays on a CUDA device, without one: the doors, the launches and the errors.

CuPy is a fake one (tests/fake_cupy.py), and the kernels of layer_norm.cu run on the CPU
(tests/shim). What only a device can show is in test_cuda_device.py.
"""

import functools
import importlib.util
import struct
import subprocess
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stablenorm import Gradients, LayerNorm, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.cuda import CudaWorkspace
from stablenorm.kernels import _cuda_device, _cuda_errors, _cuda_workspace, cuda
from stablenorm.kernels._cuda_plan import PARAMETER_NAMES

_spec = importlib.util.spec_from_file_location("fake_cupy", Path(__file__).parent / "fake_cupy.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

needs_shim = pytest.mark.skipif(
    bool(fake.load_shim().why_not()), reason=fake.load_shim().why_not() or "-"
)


def raising(error):
    def call(*_, **__):
        raise error

    return call


# The bits of the CPU, without compiling anything.
host_forward = functools.partial(layer_norm_forward, backend="numpy")


@pytest.fixture
def cupy(monkeypatch):
    module = fake.make_module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(_cuda_workspace, "_kept", type(_cuda_workspace._kept)())
    monkeypatch.setattr(cuda, "_driver", raising(AssertionError("no device was put in place")))
    return module


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shim"
    folder.mkdir(exist_ok=True)
    return folder


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


def parameters(launch):
    return dict(zip(PARAMETER_NAMES, struct.unpack("<16Q6qd6i", launch.parameters), strict=True))


# The doors.


@needs_shim
def test_results_are_cupy_arrays_with_the_bits_of_the_cpu(launches, rng, dtype):
    x, gamma, beta, dy = problem(rng, (2, 35, 40), dtype)
    expected, host = host_forward(x, gamma, beta)
    y, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    assert_bits(layer_norm(*map(on_device, (x, gamma, beta))), expected)
    assert_bits(y, expected)
    assert cache.backend == "cuda"
    actual, hosts = layer_norm_backward(on_device(dy), cache), layer_norm_backward(dy, host)
    assert_bits(actual.dx, hosts.dx)
    for one, other in zip(actual[1:], hosts[1:], strict=True):
        # Rounded once from sums in another order: the last bit of float64, others not at all.
        rtol = 2**-52 if dtype == np.float64 else 0
        np.testing.assert_allclose(one.get().astype(float), other.astype(float), rtol, 1e-30)
    assert [launch.entry for launch in launches] == [
        "layer_norm_forward",
        "layer_norm_forward",
        "layer_norm_backward",
    ]


@needs_shim
@pytest.mark.parametrize(
    ("facts", "together"),
    [
        ({"each": 2}, True),
        ({"cooperative": False}, False),
        ({"each": 1, "multiprocessors": 1}, True),
    ],
)
def test_the_backward_is_one_launch_however_the_chunks_are_added_up(use, rng, facts, together):
    # The least that has segments, and so a barrier: 200 KiB of partial sums.
    x, gamma, beta, dy = problem(rng, (64, 3300), np.float32)
    expected = layer_norm_backward(dy, host_forward(x, gamma, beta)[1])
    launches = use(**facts)
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    for _ in range(2):
        # Again: the counters must be left fit for the next launch.
        actual = layer_norm_backward(on_device(dy), cache)
        for one, other in zip(actual, expected, strict=True):
            assert_bits(one, other)
    assert [launch.together for launch in launches] == [False, together, together]


@needs_shim
def test_other_axes_are_copied_and_written_back(launches, cupy, rng):
    x, dy = (rng.standard_normal((3, 8, 5)).astype(np.float32) for _ in range(2))
    gamma, beta = rng.standard_normal((2, 3, 5)).astype(np.float32)
    expected, host = host_forward(x, gamma, beta, axis=(0, 2))
    arrays = [on_device(a) for a in (x, gamma.T.copy(), beta)]
    arrays[1] = fake.ndarray(arrays[1].host.T)
    y, cache = layer_norm_forward(*arrays, axis=(0, 2))
    assert_bits(y, expected)
    out = [fake.ndarray(np.empty(a.T.shape, a.dtype).T) for a in (x, gamma, beta)]
    for given in (None, out):
        actual = layer_norm_backward(on_device(dy), cache, out=given)
        for one, other in zip(actual, layer_norm_backward(dy, host), strict=True):
            assert_bits(one, other)
    assert len(launches) == 3
    assert cupy.copied.count((8, 3, 5)) == 5
    np.testing.assert_array_equal(arrays[0].host, x)


@needs_shim
@pytest.mark.parametrize(
    "view",
    [lambda a: a[:, 3:-2], lambda a: a[::-2, 1:], lambda a: a[3:4, 1:], lambda a: a[:, None, :7]],
    ids=["columns", "every other row, backwards", "one row", "a new axis"],
)
def test_row_strides_need_no_copy(launches, cupy, rng, view):
    x, dy = rng.standard_normal((2, 9, 40)).astype(np.float32)
    expected, host = host_forward(view(x))
    given = [fake.ndarray(view(a)) for a in (x, dy)]
    before = len(cupy.copied)
    y, cache = layer_norm_forward(given[0])
    assert_bits(y, expected)
    assert_bits(layer_norm_backward(given[1], cache).dx, layer_norm_backward(view(dy), host).dx)
    assert len(cupy.copied) == before
    assert len(launches) == 2


@needs_shim
@pytest.mark.usefixtures("launches")
def test_gaps_within_rows_take_a_copy(cupy, rng):
    x, dy = rng.standard_normal((2, 9, 80)).astype(np.float32)
    expected, host = host_forward(x[:, ::2])
    y, cache = layer_norm_forward(
        fake.ndarray(x[:, ::2]), out=fake.ndarray(np.empty((40, 9), "f4").T)
    )
    assert_bits(y, expected)
    actual = layer_norm_backward(fake.ndarray(dy[:, ::-2]), cache).dx
    assert_bits(actual, layer_norm_backward(dy[:, ::-2], host).dx)
    assert cupy.copied.count((9, 40)) == 3


@needs_shim
def test_a_broadcast_dy_is_read_where_it_is(launches, cupy, rng):
    x = rng.standard_normal((9, 40)).astype(np.float32)
    dy = np.broadcast_to(rng.standard_normal(40).astype(np.float32), x.shape)
    expected = layer_norm_backward(dy, host_forward(x)[1]).dx
    _, cache = layer_norm_forward(on_device(x))
    assert_bits(layer_norm_backward(fake.ndarray(dy), cache).dx, expected)
    assert not cupy.copied
    assert parameters(launches[1])["dy_stride"] == 0


@needs_shim
@pytest.mark.parametrize("wrt", [("x",), ("gamma",), ("beta",), ("gamma", "beta"), ()])
def test_only_what_is_asked_is_computed(launches, rng, wrt):
    x, gamma, beta, dy = problem(rng, (70, 33), np.float32)
    expected = layer_norm_backward(dy, host_forward(x, gamma, beta)[1])
    _, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    actual = layer_norm_backward(on_device(dy), cache, wrt=wrt)
    for name, one, other in zip(("x", "gamma", "beta"), actual, expected, strict=True):
        if name in wrt:
            assert_bits(one, other)
        else:
            assert one is None
    assert len(launches) == 1 + bool(wrt)


@needs_shim
def test_gamma_and_beta_are_optional_and_have_their_own_dtype(launches, rng):
    x, gamma, _, dy = problem(rng, (70, 33), np.float16, np.float32)
    beta = rng.standard_normal(33).astype(ml_dtypes.bfloat16)
    for scale in (gamma, None):
        for shift in (beta, None):
            expected, host = host_forward(x, scale, shift)
            given = [None if a is None else on_device(a) for a in (scale, shift)]
            y, cache = layer_norm_forward(on_device(x), *given)
            assert_bits(y, expected)
            for one, other in zip(
                layer_norm_backward(on_device(dy), cache),
                layer_norm_backward(dy, host),
                strict=True,
            ):
                if other is None:
                    assert one is None
                else:
                    assert_bits(one, other)
    assert len(launches) == 8


@needs_shim
@pytest.mark.parametrize("wide", ["x", "beta", "dy"])
def test_float64_beside_float32_is_computed_in_pairs(launches, rng, wide):
    arrays = dict(
        zip(("x", "gamma", "beta", "dy"), problem(rng, (20, 33), np.float32), strict=True)
    )
    arrays[wide] = arrays[wide].astype(np.float64)
    x, gamma, beta, dy = arrays.values()
    expected, host = host_forward(x, gamma, beta)
    y, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    assert_bits(y, expected)
    gradients = layer_norm_backward(on_device(dy), cache)
    for one, other in zip(gradients, layer_norm_backward(dy, host), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.get(), other, 2**-52 if one.dtype == np.float64 else 0)
    assert len(launches) == 2


@needs_shim
def test_out_may_be_x_and_dx_may_be_dy(launches, rng):
    x, gamma, beta, dy = problem(rng, (5, 33), np.float32)
    expected, host = host_forward(x, gamma, beta)
    given, scale, shift = map(on_device, (x, gamma, beta))
    _, cache = layer_norm_forward(given, scale, shift)
    place = on_device(dy)
    made = layer_norm_backward(place, cache, out=(place, None, None))
    assert made.dx is place
    assert_bits(place, layer_norm_backward(dy, host).dx)
    assert layer_norm(given, scale, shift, out=given) is given
    assert_bits(given, expected)
    assert len(launches) == 3


@needs_shim
def test_rows_of_subnormals_keep_their_scale_where_float64_is_slow(use, rng):
    """Without it the mean is rounded to the grid of x, and dgamma is hundreds of ulp off."""
    launches = use(capability=(12, 0))
    x = np.ldexp(rng.integers(-9, 10, (2, 129)), -149).astype(np.float32)
    dy = rng.standard_normal((2, 129)).astype(np.float32)
    gamma = np.ones(129, np.float32)
    expected = layer_norm_backward(dy, host_forward(x, gamma)[1])
    _, cache = layer_norm_forward(on_device(x), on_device(gamma))
    actual = layer_norm_backward(on_device(dy), cache)
    assert expected.dgamma.any()
    np.testing.assert_array_max_ulp(actual.dgamma.get(), expected.dgamma, maxulp=1)
    assert_bits(actual.dx, expected.dx)
    assert len(launches) == 2


@needs_shim
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows_are_no_launch(launches, dtype, shape):
    ones = on_device(np.ones(4, dtype))
    y, cache = layer_norm_forward(on_device(np.empty(shape, dtype)), ones, ones)
    dx, dgamma, dbeta = layer_norm_backward(y, cache)
    assert y.shape == dx.shape == shape
    for total in (dgamma, dbeta):
        assert_bits(total, np.zeros(4, dtype))
    assert launches == []


@needs_shim
def test_a_layer_takes_them_once_its_parameters_are_there(launches, rng):
    x, _, _, dy = problem(rng, (5, 33), np.float32)
    layer = LayerNorm(33)
    expected, host = host_forward(x, *layer.parameters.values())
    gradients = layer_norm_backward(dy, host)
    layer.parameters = {name: on_device(value) for name, value in layer.parameters.items()}
    assert_bits(layer.forward(on_device(x)), expected)
    assert_bits(layer.backward(on_device(dy)), gradients.dx)
    assert_bits(layer.gradients["gamma"], gradients.dgamma)
    assert len(launches) == 2


class Foreign:
    """An array of another library's: DLPack, the array interface, or both."""

    def __init__(self, host, protocols, typestr=None, kind=2):
        self.host = host
        if "dlpack" in protocols:
            self.__dlpack__ = lambda: self
            self.kind = kind
        if "interface" in protocols:
            self.typestr = typestr or host.dtype.str

    def __getattr__(self, name):
        if name == "__dlpack_device__" and "kind" in self.__dict__:
            return lambda: (self.kind, 0)
        if name == "__cuda_array_interface__" and "typestr" in self.__dict__:
            return {**self.host.__array_interface__, "typestr": self.typestr, "version": 3}
        raise AttributeError(name)


@needs_shim
@pytest.mark.parametrize(
    ("protocols", "kind"),
    [("dlpack", 2), ("dlpack", 13), ("interface", 2), ("dlpack interface", 2)],
)
@pytest.mark.usefixtures("launches")
def test_arrays_of_other_libraries_come_back_as_cupys(rng, protocols, kind):
    x = rng.standard_normal((5, 33)).astype(np.float32)
    expected, host = host_forward(x)
    y, cache = layer_norm_forward(Foreign(x, protocols, kind=kind))
    assert_bits(y, expected)
    assert cache.x.data.ptr == x.ctypes.data
    actual = layer_norm_backward(Foreign(expected, protocols), cache).dx
    assert_bits(actual, layer_norm_backward(expected, host).dx)
    place = np.empty_like(x)
    layer_norm(Foreign(x, protocols), out=Foreign(place, protocols))
    assert place.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("cupy")
def test_bfloat16_without_its_name_is_refused():
    x = Foreign(np.ones((2, 3), ml_dtypes.bfloat16), "interface", "<V2")
    with pytest.raises(TypeError, match=r"x must say that its elements are bfloat16.*DLPack"):
        layer_norm(x)


# What is refused.

X = np.ones((4, 6), np.float32)


REFUSED = [
    (lambda: layer_norm(on_device(X), np.ones(6)), TypeError,
     "gamma must be on a CUDA device, like the other arguments, got numpy.ndarray; cupy.asarray"),
    (lambda: layer_norm(on_device(X), [1.0] * 6), TypeError, "gamma must be on a CUDA device"),
    (lambda: layer_norm(X, on_device(X[0])), TypeError, "gamma must be in host memory.*back"),
    (lambda: layer_norm(X, out=on_device(X)), TypeError, "out must be in host memory"),
    (lambda: layer_norm(on_device(X), out=X.copy()), TypeError, "out must be on a CUDA device"),
    (lambda: layer_norm(on_device(X), backend="numba"), ValueError, 'backend must be "cuda"'),
    (lambda: layer_norm(X, backend="cuda"), TypeError, r"x is in host memory.*cupy.asarray\(x\)"),
    (lambda: layer_norm(X, X[0], X[0], backend="cuda"), TypeError, "x is in host memory"),
    (lambda: layer_norm(on_device(X.astype(int))), TypeError, "x must be float16.*got int64"),
    (lambda: layer_norm(on_device(X), on_device(X[0, :5])), ValueError,
     r"gamma must have shape \(6,\) to match x normalized over axis 1, got \(5,\)"),
    (lambda: layer_norm(on_device(X), on_device(X[0], 1)), ValueError,
     "gamma must be on device 0, like x, got device 1; copy it there"),
    (lambda: layer_norm(on_device(X), out=on_device(X[:2])), ValueError, "out must have shape"),
    (lambda: layer_norm(on_device(X), out=on_device(X.astype(float))), TypeError, "out must have dtype"),
    (lambda: layer_norm(on_device(X), out=fake.ndarray(np.broadcast_to(X[0], X.shape))), ValueError,
     "an element of its own for each result"),
    (lambda: layer_norm(fake.ndarray(np.zeros(25, np.uint8)[1:].view(np.float32))), ValueError,
     "x must begin at a multiple of its 4 bytes"),
    (lambda: layer_norm(on_device(X), eps=-1), ValueError, "eps must be finite"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
@pytest.mark.usefixtures("cupy")
def test_arguments_that_do_not_fit_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@needs_shim
def test_results_that_overlap_are_refused(launches):
    buffer = np.ones(60, np.float32)
    x, shifted = fake.ndarray(buffer[:24].reshape(4, 6)), fake.ndarray(buffer[6:30].reshape(4, 6))
    with pytest.raises(ValueError, match=r"out must not share memory with x.*pass a copy"):
        layer_norm(x, out=shifted)
    _, cache = layer_norm_forward(x)
    with pytest.raises(ValueError, match=r"out.dx must not share memory with dy"):
        layer_norm_backward(
            fake.ndarray(buffer[30:54].reshape(4, 6)), cache,
            out=(fake.ndarray(buffer[36:60].reshape(4, 6)), None, None),
        )  # fmt: skip
    even, odd = (
        fake.ndarray(buffer.reshape(5, 12)[:, ::2]),
        fake.ndarray(buffer.reshape(5, 12)[:, 1::2]),
    )
    layer_norm(even, out=odd)
    assert len(launches) == 2


@needs_shim
@pytest.mark.usefixtures("launches")
def test_dy_of_the_other_kind_is_refused():
    host = host_forward(X)[1]
    device = layer_norm_forward(on_device(X))[1]
    with pytest.raises(TypeError, match="dy must be in host memory"):
        layer_norm_backward(on_device(X), host)
    with pytest.raises(TypeError, match="dy must be on a CUDA device"):
        layer_norm_backward(X, device)
    with pytest.raises(TypeError, match=r"out.dx must be on a CUDA device"):
        layer_norm_backward(on_device(X), device, out=Gradients(X.copy(), None, None))


def test_without_cupy_the_install_line_is_named(monkeypatch):
    # None is what makes an import fail.
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'CuPy is needed.*pip install "stablenorm\[cuda\]"'):
        layer_norm(X, backend="cuda")
    with pytest.raises(ImportError, match="CuPy is needed"):
        layer_norm(Foreign(X, "dlpack"))


def test_without_a_device_or_a_driver_it_says_so(cupy):
    cupy.cuda.runtime.getDeviceCount = raising(
        fake.CUDARuntimeError("cudaErrorInsufficientDriver: driver version is insufficient")
    )
    with pytest.raises(RuntimeError, match=r"needs a CUDA device, and CUDA says: cudaErrorInsuff"):
        layer_norm(X, backend="cuda")
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(RuntimeError, match=r"it finds none; see whether nvidia-smi"):
        layer_norm(X, backend="cuda")


ABOUT = _cuda_device.Facts(0, (9, 0), 132, True, 100 << 10, 48 << 10)


def plan(shared_bytes=0):
    return cuda.plan_forward(4, 6, np.dtype(np.float32), 0)._replace(shared_bytes=shared_bytes)


def test_a_driver_older_than_the_compiler_is_refused_before_anything_is_loaded(cupy, monkeypatch):
    monkeypatch.setattr(_cuda_device._cuda_compile, "nvrtc_version", lambda: (13, 5))
    cupy.cuda.runtime.driverGetVersion = lambda: 12080
    driver = _cuda_device.make_driver(cupy)
    with pytest.raises(
        RuntimeError, match=r"must support CUDA 13.*supports 12.8; update the driver"
    ):
        driver.kernel(plan(), ABOUT)


def test_a_block_beyond_the_device_is_refused(cupy, monkeypatch):
    monkeypatch.setattr(_cuda_device._cuda_compile, "nvrtc_version", lambda: (13, 5))
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
    monkeypatch.setattr(_cuda_device._cuda_compile, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(_cuda_device._cuda_compile, "cubin", lambda *a: a)
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
    monkeypatch.setattr(_cuda_device._cuda_compile, "nvrtc_version", lambda: (13, 5))
    monkeypatch.setattr(_cuda_device._cuda_compile, "cubin", lambda *a: a)
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


def failing(use, monkeypatch, error):
    """Put a device in place whose launches fail with `error` after the first forward."""
    launches = use(run=False)
    ones = np.ones((300, 33), np.float32)
    _, cache = layer_norm_forward(on_device(ones), on_device(ones[0]))
    driver = cuda._driver()
    monkeypatch.setattr(cuda, "_driver", lambda: driver._replace(launch=raising(error)))
    return cache, launches, driver


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


# Streams, graphs, memory.


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


def test_an_error_that_is_none_of_cudas_stays_what_it_is():
    error = RuntimeError("cudaSomething else")
    assert _cuda_errors.explained(error, 0) is error
