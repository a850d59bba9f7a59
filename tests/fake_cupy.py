"""
A CuPy whose devices are this process: what `kernels.cuda` uses of CuPy, on memory of NumPy's.

`make_module` returns one to put into sys.modules; `make_driver` a driver that runs the kernels of
layer_norm.cu on the host shim and writes down every launch. Loaded by path, as tests/shim is.
"""

import importlib.util
import sys
import threading
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stablenorm.cuda.compile import sources
from stablenorm.cuda.driver import Driver, Facts


def load_shim():
    if "host_shim" not in sys.modules:
        path = Path(__file__).parent / "shim" / "host_shim.py"
        spec = importlib.util.spec_from_file_location("host_shim", path)
        sys.modules["host_shim"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["host_shim"]


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


_here = threading.local()


def current():
    return getattr(_here, "device", 0)


class Device:
    def __init__(self, device=None):
        self.id = current() if device is None else device

    def __enter__(self):
        self.before, _here.device = current(), self.id

    def __exit__(self, *_):
        _here.device = self.before


class Pointer(NamedTuple):
    ptr: int


class Stream:
    def __init__(self, ptr=0):
        self.ptr, self.capturing, self.waited = ptr, False, 0

    def is_capturing(self):
        return self.capturing

    def synchronize(self):
        self.waited += 1


class ndarray:  # CuPy's name
    """Elements of a device: NumPy's own functions refuse them, as they refuse CuPy's."""

    def __init__(self, host, device=None):
        self.host, self.device = host, Device(device)

    def __array__(self, *_, **__):
        msg = "Implicit conversion to a NumPy array is not allowed"
        raise TypeError(msg)

    def get(self):
        return self.host.copy()

    @property
    def data(self):
        return Pointer(self.host.__array_interface__["data"][0] if self.host.size else 0)

    @property
    def __cuda_array_interface__(self):
        return {**self.host.__array_interface__, "version": 3}

    def __dlpack__(self, **_):
        return self

    def __dlpack_device__(self):
        return 2, self.device.id

    def __getitem__(self, index):
        return ndarray(self.host[index], self.device.id)

    def __setitem__(self, index, value):
        self.host[index] = value.host if isinstance(value, ndarray) else value

    def __len__(self):
        return len(self.host)

    def reshape(self, *shape):
        return ndarray(self.host.reshape(*shape), self.device.id)


for _name in ("shape", "dtype", "ndim", "size", "nbytes", "strides", "flags"):
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self.host, name)))


def make_module(devices=1):
    """Return a module to be `cupy`, with a list of every allocation."""
    cupy = types.ModuleType("cupy")
    stream = Stream()
    cupy.ndarray, cupy.allocated, cupy.copied = ndarray, [], []

    def empty(shape, dtype=np.float64):
        array = np.empty(shape, dtype)
        # What was not written must be seen.
        array.view(np.uint8).reshape(-1)[...] = 0xFB if array.size else 0
        cupy.allocated.append(array.nbytes)
        return ndarray(array)

    def zeros(shape, dtype=np.float64):
        array = empty(shape, dtype)
        array[...] = 0
        return array

    def ascontiguousarray(array):
        cupy.copied.append(array.shape)
        return ndarray(np.ascontiguousarray(array.host), array.device.id)

    def from_dlpack(value):
        made = value.__dlpack__()
        return ndarray(made.host, value.__dlpack_device__()[1])

    def asarray(value):
        return ndarray(np.asarray(getattr(value, "host", value)))

    cupy.empty, cupy.zeros, cupy.asarray, cupy.from_dlpack = empty, zeros, asarray, from_dlpack
    cupy.ascontiguousarray = ascontiguousarray
    cupy.moveaxis = lambda a, old, new: ndarray(np.moveaxis(a.host, old, new), a.device.id)
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        stream=stream,
        get_current_stream=lambda: cupy.cuda.stream,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: devices, driverGetVersion=lambda: 13000
        ),
        driver=types.SimpleNamespace(),
    )
    return cupy


class Launch(NamedTuple):
    entry: str
    grid: int
    block: int
    together: bool
    parameters: bytes
    cluster: int = 1


def whole_source():
    """Return layer_norm.cu with its headers in place, as one text."""
    source, *headers = sources().items()
    text = source[1].decode()
    for name, header in headers:
        text = text.replace(f'#include "{name}"', header.decode())
    return text


def make_driver(
    folder,
    *,
    capability=(9, 0),
    cooperative=True,
    each=1,
    multiprocessors=3,
    clusters=None,
    run=True,
):
    """
    Return a driver of a device with few multiprocessors, and the list of its launches.

    `clusters` is how many it holds, if it can be asked. Unless `run`, they are written down and not done.
    """
    shim, launches = load_shim(), []
    source = whole_source()

    def kernel(plan, _):
        if not run:
            return plan.entry, None, plan.cluster
        defines = [define.removeprefix("-D") for define in plan.defines]
        built = shim.build(source, folder, entries=[plan.entry], defines=defines)
        return plan.entry, built, plan.cluster

    def launch(function, grid, block, shared_bytes, parameters, together):
        # A kernel of a test's own has no cluster.
        entry, built, cluster = (*function, 1)[:3]
        launches.append(Launch(entry, grid, block, together, parameters, cluster))
        if not run:
            return
        seed = len(launches)
        given = (built, entry, grid, block, shared_bytes, parameters)
        shim.launch(*given, schedule_seed=seed, cooperative=together, cluster=cluster)

    facts = Facts(0, capability, multiprocessors, cooperative, 100 << 10, 48 << 10)
    driver = Driver(
        lambda device: facts._replace(device=device),
        kernel,
        lambda *_: each,
        lambda *_: clusters,
        launch,
    )
    return driver, launches
