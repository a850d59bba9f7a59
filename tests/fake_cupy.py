"""
A CuPy whose devices are this process: what `stablenorm.cuda` uses of CuPy, on memory of NumPy's.

`make_module` returns one to put into sys.modules; `put_device` replaces the functions of
`stablenorm.cuda.driver`: layer_norm.cu runs on the host shim, and every launch is written down.
Fixtures of both are in conftest.py.
"""

import contextlib
import re
import types

import host_shim
import numpy as np
from host_shim import ATOMIC, READ, WRITE, Tensor
from norms import compute

from stablenorm import cuda
from stablenorm.cuda import driver
from stablenorm.cuda.compile import source
from stablenorm.formats import parse

# The names of the fields of struct Parameters.
BODY = source().partition("struct Parameters {")[2].partition("};")[0]
PARAMETERS = re.findall(r"(\w+)[,;]", re.sub("//.*", "", BODY))


class Device(contextlib.nullcontext):
    def __init__(self, device=0):
        super().__init__()
        self.id = device


class ndarray:  # CuPy's name
    """Elements of a device: NumPy's own functions refuse them, as they refuse CuPy's."""

    def __init__(self, host, device=0):
        self.host, self.device = host, Device(device)

    def __getattr__(self, name):
        if name not in {"dtype", "itemsize", "nbytes", "ndim", "size", "strides", "flags"}:
            raise AttributeError(name)
        return getattr(self.host, name)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.host.ctypes.data if self.size else 0)

    @property
    def shape(self):
        return self.host.shape

    @shape.setter
    def shape(self, shape):
        self.host.shape = shape

    def __array__(self, *_, **__):
        msg = "Implicit conversion to a NumPy array is not allowed"
        raise TypeError(msg)

    def __dlpack_device__(self):
        return 2, self.device.id

    @property
    def __cuda_array_interface__(self):
        return self.host.__array_interface__

    def __setitem__(self, index, value):
        self.host[index] = value.host if isinstance(value, ndarray) else value

    def __len__(self):
        return len(self.host)

    def __getitem__(self, index):
        return ndarray(self.host[index], self.device.id)

    def get(self):
        return self.host.copy()

    def astype(self, dtype):
        return ndarray(self.host.astype(dtype), self.device.id)

    def transpose(self, order):
        return ndarray(self.host.transpose(order), self.device.id)

    def view(self):
        return ndarray(self.host.view(), self.device.id)

    def reshape(self, *shape):
        return ndarray(self.host.reshape(*shape), self.device.id)


def empty(shape, dtype):
    array = np.empty(shape, dtype)
    # NaN in every format: bytes that nobody writes must be seen.
    array.ravel().view(np.uint8)[...] = 0xFF
    return ndarray(array)


def Stream(ptr=0, capturing=False):
    return types.SimpleNamespace(ptr=ptr, is_capturing=lambda: capturing)


def make_module():
    """Return a module to be `cupy`."""
    for cached in (driver._counter, driver.import_cupy, cuda.find_plan):
        cached.cache_clear()

    cupy = types.SimpleNamespace(
        ndarray=ndarray, empty=empty, zeros=lambda *args: ndarray(np.zeros(*args)),
        from_dlpack=lambda value: ndarray(value.__dlpack__().host),
        asarray=lambda value: ndarray(value.host),
        ascontiguousarray=lambda a: ndarray(np.ascontiguousarray(a.host), a.device.id),
        put_device=put_device,
    )  # fmt: skip
    cupy.cuda = types.SimpleNamespace(
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
    placed = [place(value) if isinstance(value, np.ndarray) else value for value in case]
    on_host = isinstance(placed[0], np.ndarray)
    results = compute(placed, backend="numpy" if on_host else None)
    return results if on_host else {name: array.get() for name, array in results.items()}


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
        memory = tensors(kernel, grid, values)
        sizes = grid, kernel.threads, kernel.shared_bytes, parameters.tobytes(), memory
        options = {"seed": seed + len(launches) - 1, "cooperative": together}
        for tensor, counts in zip(
            memory, host_shim.launch(function, *sizes, **options), strict=True
        ):
            made["traffic"][tensor.name] = counts.sum(axis=1)
            # Each byte of a result is stored once.
            assert tensor.rights != WRITE or (counts[1] == 1).all(), tensor.name

    facts = driver.Facts("90", 1, shared)
    monkeypatch.setattr(driver, "read_facts", lambda _: facts)
    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "launch", launch)
    return launches


def tensors(kernel, grid, values):
    """Return the memory that a launch may touch, by its parameters; none if results lie over inputs."""
    rows, n = values["rows"], values["n"]
    if values["out"] and values["out"] in (values["x"], values["dy"]):
        return []
    x, gamma, beta = (parse(name).itemsize for name in (kernel.x, kernel.gamma, kernel.beta))
    statistics = WRITE if kernel.forward else READ
    regions = []
    for name, rights in (("x", READ), ("dy", READ), ("out", WRITE)):
        begin, pitch, width = values[name], values[f"{name}_stride"] * x, n * x
        if pitch == width:
            regions.append(Tensor(name, begin, rows * width, rights))
        else:
            regions += [Tensor(name, begin + row * pitch, width, rights) for row in range(rows)]
    flat = {
        "gamma": (n * gamma, READ), "dgamma": (n * gamma, WRITE),
        "beta": (n * beta, READ), "dbeta": (n * beta, WRITE),
        **dict.fromkeys(("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail"), (8 * rows, statistics)),
        "exponent": (4 * rows, statistics), "counter": (kernel.counter_bytes(grid), ATOMIC),
        "partials": (2 * n * values["chunks"] * kernel.number_bytes, READ | WRITE),
    }  # fmt: skip
    regions += [Tensor(name, values[name], *rest) for name, rest in flat.items()]
    return [tensor for tensor in regions if values[tensor.name]]
