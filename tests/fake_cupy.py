"""
A CuPy whose devices are this process: what `stablenorm.cuda` uses of CuPy, on memory of NumPy's.

`make_module` returns one to put into sys.modules; `put_device` replaces the functions of
`stablenorm.cuda.driver`: layer_norm.cu runs on the host shim, and every launch is written down.
Fixtures of both are in conftest.py.
"""

import ctypes
import re
import types

import host_shim
import numpy as np
from host_shim import READ, WRITE, Tensor
from norms import compute

from stablenorm import cuda
from stablenorm.cuda import driver
from stablenorm.cuda.compile import source
from stablenorm.formats import parse

# The names of the fields of struct Parameters.
BODY = source().partition("struct Parameters {")[2].partition("};")[0]
PARAMETERS = re.findall(r"(\w+)[,;]", re.sub("//.*", "", BODY))


class Device:
    current = 0

    def __init__(self, device=None):
        self.id = Device.current if device is None else device

    def __enter__(self):
        self.before, Device.current = Device.current, self.id

    def __exit__(self, *_):
        Device.current = self.before


class Stream:
    def __init__(self, ptr=0):
        self.ptr, self.capturing = ptr, False

    def is_capturing(self):
        return self.capturing


class ndarray:  # CuPy's name
    """Elements of a device: NumPy's own functions refuse them, as they refuse CuPy's."""

    def __init__(self, host, device=None):
        self.host, self.device = host, Device(device)
        # Attributes, as quick as CuPy's: tests take the time of calls.
        self.dtype, self.itemsize, self.nbytes = host.dtype, host.itemsize, host.nbytes
        self.ndim, self.size, self.strides = host.ndim, host.size, host.strides
        self.flags = host.flags
        self.data = types.SimpleNamespace(ptr=address_of(host) if self.size else 0)

    @property
    def shape(self):
        return self.host.shape

    @shape.setter
    def shape(self, shape):
        self.host.shape = shape
        self.__init__(self.host, self.device.id)

    def view(self):
        return ndarray(self.host.view(), self.device.id)

    def __array__(self, *_, **__):
        msg = "Implicit conversion to a NumPy array is not allowed"
        raise TypeError(msg)

    def __dlpack_device__(self):
        return 2, self.device.id

    def __getitem__(self, index):
        return ndarray(self.host[index], self.device.id)

    def __setitem__(self, index, value):
        self.host[index] = value.host if isinstance(value, ndarray) else value

    def get(self):
        return self.host.copy()

    @property
    def __cuda_array_interface__(self):
        return self.host.__array_interface__

    def reshape(self, *shape):
        return ndarray(self.host.reshape(*shape), self.device.id)


def address_of(host):
    try:
        # A third of the time of the other, CuPy's takes none; it is for contiguous arrays alone.
        return ctypes.addressof(ctypes.c_char.from_buffer(host))
    except (TypeError, ValueError):
        return host.__array_interface__["data"][0]


def empty(shape, dtype=np.float64):
    array = np.empty(shape, dtype)
    # NaN in every format: bytes that nobody writes must be seen.
    array.ravel().view(np.uint8)[...] = 0xFF
    return ndarray(array)


def zeros(shape, dtype=np.float64):
    return ndarray(np.zeros(shape, dtype))


def from_dlpack(value):
    return ndarray(value.__dlpack__().host, value.__dlpack_device__()[1])


def make_module():
    """Return a module to be `cupy`, with a list of the shapes of all copies."""
    for kept in (driver._counter, driver.import_cupy, cuda.find_plan):
        kept.cache_clear()
    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.empty, cupy.zeros, cupy.from_dlpack = ndarray, empty, zeros, from_dlpack
    cupy.put_device, cupy.copied = put_device, []

    def ascontiguousarray(array):
        cupy.copied.append(array.shape)
        return ndarray(np.ascontiguousarray(array.host), array.device.id)

    cupy.ascontiguousarray = ascontiguousarray
    cupy.asarray = lambda value: ndarray(np.asarray(getattr(value, "host", value)))
    cupy.moveaxis = lambda a, old, new: ndarray(np.moveaxis(a.host, old, new), a.device.id)
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        stream=Stream(),
        get_current_stream=lambda: cupy.cuda.stream,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 1, driverGetVersion=lambda: 13000),
        driver=types.SimpleNamespace(),
    )
    return cupy


def on_device(array, device=0):
    return ndarray(np.array(array, order="K", copy=True), device)


def both(case, place=on_device):
    """Return y and the gradients of `case` (x, gamma, beta, eps, dy), computed where `place` puts it."""
    placed = [place(each) if isinstance(each, np.ndarray) else each for each in case]
    on_host = isinstance(placed[0], np.ndarray)
    found = compute(placed, backend="numpy" if on_host else None)
    return found if on_host else {name: array.get() for name, array in found.items()}


def assert_bits(actual, expected):
    assert type(actual) is ndarray
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.get().tobytes() == expected.tobytes()


# ---- a device ----


def put_device(
    monkeypatch, builds, *, resident=3, run=True, seed=0, shared=227 << 10,
    edits=(), edited="", defines=(),
):  # fmt: skip
    """
    Put a device in place that holds `resident` blocks; return the list of its launches.

    Unless `run`, none is done. `seed` decides the schedules. `edits` are pairs of a text of the source of
    the kernel `edited` and another in its place, `defines` more options for its compiler.
    """
    launches = []
    cuda.find_plan.cache_clear()

    def load(_, kernel):
        if not run:
            return None, resident
        text = source()
        for before, after in edits if kernel.entry == edited else ():
            if before not in text:
                # No AssertionError: tests of faults expect one.
                raise LookupError(before)
            text = text.replace(before, after)
        defined = *kernel.defines, *defines
        return host_shim.build(text, builds, kernel.entry, defined), resident

    def launch(function, kernel, grid, parameters, together):
        values = dict(zip(PARAMETERS, parameters.view(np.int64).tolist(), strict=True))
        made = {"kernel": kernel, "values": values, "cooperative": together, "traffic": {}}
        launches.append(types.SimpleNamespace(**made))
        if not run:
            return
        memory = parameters.tobytes(), tensors(kernel, values)
        given = grid, kernel.threads, kernel.shared_bytes, *memory
        options = {"seed": seed + len(launches) - 1, "cooperative": together}
        for each in host_shim.launch(function, *given, **options):
            made["traffic"][each.tensor.name] = each
            # Each byte of a result is stored once.
            assert each.tensor.rights != WRITE or (each.stores == 1).all(), each.tensor.name

    facts = driver.Facts("90", 1, shared)
    monkeypatch.setattr(driver, "read_facts", lambda _: facts)
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "launch", launch)
    return launches


def tensors(kernel, values):
    """Return the memory that a launch may touch, by its parameters; none if results lie over inputs."""
    rows, n = values["rows"], values["n"]
    if values["out"] and values["out"] in (values["x"], values["dy"]):
        return []
    x, dy, gamma, beta = (parse(name).itemsize for name in kernel[1:5])
    kept = WRITE if kernel.forward else READ
    found = []
    for name, size, rights in (("x", x, READ), ("dy", dy, READ), ("out", x, WRITE)):
        begin, pitch, width = values[name], values[f"{name}_stride"] * size, n * size
        if pitch == width:
            found.append(Tensor(name, begin, rows * width, rights))
        else:
            found += [Tensor(name, begin + row * pitch, width, rights) for row in range(rows)]
    flat = {
        "gamma": (n * gamma, READ), "dgamma": (n * gamma, WRITE),
        "beta": (n * beta, READ), "dbeta": (n * beta, WRITE),
        **dict.fromkeys(("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail"), (8 * rows, kept)),
        "exponent": (4 * rows, kept), "counter": (4, READ | WRITE),
        "partials": (2 * n * values["chunks"] * kernel.number_bytes, READ | WRITE),
    }  # fmt: skip
    found += [Tensor(name, values[name], *rest) for name, rest in flat.items()]
    return [tensor for tensor in found if values[tensor.name]]
