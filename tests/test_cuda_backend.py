"""
Arrays on a CUDA device, without one: what goes in and comes out, and what is refused.

CuPy is a fake one (tests/fake_cupy.py), and the kernels of layer_norm.cu run on the CPU
(tests/shim). What only a device can show, `make gpu` checks.
"""

import sys

import cuda_fixtures as device
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward, rms_norm

# Fixtures are found by their names in this module.
cupy, use, launches = device.cupy, device.use, device.launches
fake, on_device, problem = device.fake, device.on_device, device.problem
assert_bits, host_forward, needs_shim = device.assert_bits, device.host_forward, device.needs_shim

# The doors.


@needs_shim
def test_results_are_cupy_arrays_with_the_bits_of_the_cpu(launches, rng):
    x, gamma, beta, dy = problem(rng, (2, 17, 129), np.float32)
    expected, host = host_forward(x, gamma, beta)
    y, cache = layer_norm_forward(*map(on_device, (x, gamma, beta)))
    assert_bits(layer_norm(*map(on_device, (x, gamma, beta))), expected)
    assert_bits(y, expected)
    assert cache.backend == "cuda"
    actual, hosts = layer_norm_backward(on_device(dy), cache), layer_norm_backward(dy, host)
    for one, other in zip(actual, hosts, strict=True):
        assert_bits(one, other)
    # One launch each; only blocks that wait for one another take a cooperative one.
    assert [launch.cooperative for launch in launches] == [False, False, True]


@needs_shim
def test_other_axes_are_copied_and_written_back(launches, cupy, rng):
    x, dy = (rng.standard_normal((3, 8, 50)).astype(np.float32) for _ in range(2))
    gamma, beta = rng.standard_normal((2, 3, 50)).astype(np.float32)
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
    assert cupy.copied.count((8, 3, 50)) == 5
    np.testing.assert_array_equal(arrays[0].host, x)


# A view of (9, 140), and the copies of x and dy that it takes.
VIEWS = {
    "columns": (lambda a: a[:, 3:-2], 0),
    "every other row, backwards": (lambda a: a[::-2, 1:], 0),
    "one row": (lambda a: a[3:4, 1:], 0),
    "a new axis": (lambda a: a[:, None, :129], 0),
    "one row for all": (lambda a: np.broadcast_to(a[0], a.shape), 0),
    "gaps within rows": (lambda a: a[:, ::2], 2),
    "rows backwards within": (lambda a: a[:, ::-1], 2),
}


@needs_shim
@pytest.mark.parametrize("view", VIEWS)
def test_row_strides_need_no_copy_and_gaps_within_rows_do(launches, cupy, rng, view):
    see, copies = VIEWS[view]
    x, dy = rng.standard_normal((2, 9, 140)).astype(np.float32)
    expected, host = host_forward(see(x))
    before = len(cupy.copied)
    y, cache = layer_norm_forward(fake.ndarray(see(x)))
    assert_bits(y, expected)
    actual = layer_norm_backward(fake.ndarray(see(dy)), cache).dx
    assert_bits(actual, layer_norm_backward(see(dy), host).dx)
    # The backward gathers x again.
    assert len(cupy.copied) - before == (3 if copies else 0)
    assert len(launches) == 2
    # And back, where there are as many elements as places.
    if view != "one row for all":
        out = fake.ndarray(see(np.empty_like(x)))
        assert_bits(layer_norm(fake.ndarray(see(x)), out=out), expected)


@needs_shim
def test_out_may_be_x_and_dx_may_be_dy(launches, rng):
    x, gamma, beta, dy = problem(rng, (5, 129), np.float32)
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
    expected, host = host_forward(x)
    y, cache = layer_norm_forward(Foreign(x, protocols, kind=kind))
    assert_bits(y, expected)
    assert cache.x.data.ptr == x.ctypes.data
    actual = layer_norm_backward(Foreign(dy, protocols), cache).dx
    assert_bits(actual, layer_norm_backward(dy, host).dx)
    place = np.empty_like(x)
    layer_norm(Foreign(x, protocols), out=Foreign(place, protocols))
    assert place.tobytes() == expected.tobytes()


# What is refused.

X = np.ones((4, 6), np.float32)


REFUSED = [
    (lambda: layer_norm(on_device(X), np.ones(6)), TypeError,
     "gamma must be on a CUDA device, like the other arguments, got numpy.ndarray; cupy.asarray"),
    (lambda: layer_norm(X, on_device(X[0])), TypeError, "gamma must be in host memory.*back"),
    (lambda: layer_norm(X, out=on_device(X)), TypeError, "out must be in host memory"),
    (lambda: layer_norm(on_device(X), out=X.copy()), TypeError, "out must be on a CUDA device"),
    (lambda: layer_norm(on_device(X), backend="native"), ValueError, 'backend must be "cuda"'),
    (lambda: layer_norm(X, backend="cuda"), TypeError, r"x is in host memory.*cupy.asarray\(x\)"),
    (lambda: layer_norm(on_device(X.astype(int))), TypeError, "x must be float16.*got int64"),
    (lambda: layer_norm(on_device(X), on_device(X[0, :5])), ValueError,
     r"gamma must have shape \(6,\) to match x normalized over axis 1, got \(5,\)"),
    (lambda: layer_norm(on_device(X), on_device(X[:1])), ValueError,
     "leading axes of gamma or beta cannot be combined with arrays on a CUDA"),
    (lambda: rms_norm(on_device(X)), ValueError, "RMS norm cannot be combined with arrays on a CUDA device.*x.get"),
    (lambda: layer_norm(on_device(X), on_device(X[0]), gamma_offset=1.0), ValueError,
     "gamma_offset cannot be combined with arrays on a CUDA device"),
    (lambda: layer_norm(on_device(X), on_device(X[0], 1)), ValueError,
     "gamma must be on device 0, like x, got device 1; copy it there"),
    (lambda: layer_norm(on_device(X), out=on_device(X.astype(float))), TypeError, "out must have dtype"),
    (lambda: layer_norm(on_device(X), out=fake.ndarray(np.broadcast_to(X[0], X.shape))), ValueError,
     "an element of its own for each result"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
@pytest.mark.usefixtures("cupy")
def test_arguments_that_do_not_fit_are_named(call, error, message):
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


@pytest.mark.parametrize(("name", "value"), [("sum_axes", 0), ("accumulate", True)])
def test_sums_of_another_kind_are_refused(use, name, value):
    launches = use(run=False)
    _, cache = layer_norm_forward(on_device(X), on_device(X[0]))
    with pytest.raises(ValueError, match=f"{name} cannot be combined with arrays on a CUDA device"):
        layer_norm_backward(on_device(X), cache, **{name: value})
    assert len(launches) == 1


def test_without_cupy_the_install_line_is_named(monkeypatch):
    # None is what makes an import fail.
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'CuPy is needed.*pip install "stablenorm\[cuda\]"'):
        layer_norm(X, backend="cuda")
    with pytest.raises(ImportError, match="CuPy is needed"):
        layer_norm(Foreign(X, "dlpack"))


def test_without_a_device_or_a_driver_it_says_so(cupy):
    def fail():
        msg = "cudaErrorInsufficientDriver: driver version is insufficient"
        raise fake.CUDARuntimeError(msg)

    cupy.cuda.runtime.getDeviceCount = fail
    with pytest.raises(
        RuntimeError, match=r"needs a CUDA device, and CUDA says: CUDARuntimeError: cudaErrorInsuff"
    ):
        layer_norm(X, backend="cuda")
    cupy.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(RuntimeError, match=r"it finds none; see whether nvidia-smi"):
        layer_norm(X, backend="cuda")
