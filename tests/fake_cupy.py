"""
A CuPy whose devices are this process: what `stablenorm.cuda` uses of CuPy, on memory of NumPy's.

`make_module` returns one to put into sys.modules; `make_driver` a driver that runs the kernels of
layer_norm.cu on the host shim and writes down every launch.
"""

import struct
import threading
import types
from typing import NamedTuple

import host_shim
import layer_norm_host as host
import numpy as np

from stablenorm.cuda.driver import Driver, Facts
from stablenorm.cuda.plan import FORMAT, PARAMETERS, Kernel


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
    kernel: Kernel
    grid: int
    parameters: bytes
    cooperative: bool

    @property
    def values(self):
        return dict(zip(PARAMETERS, struct.unpack(FORMAT, self.parameters), strict=True))


def make_driver(builds, *, cooperative=True, each=1, multiprocessors=3, run=True):
    """
    Return a driver of a device with few multiprocessors, and the list of its launches.

    Unless `run`, they are written down and not done.
    """
    launches = []

    def load(kernel, _):
        return host.build(builds, kernel) if run else None

    def launch(function, kernel, grid, parameters, together):
        launches.append(Launch(kernel, grid, parameters, together))
        if run:
            sizes = grid, kernel.block, kernel.shared_bytes
            options = {"seed": len(launches), "cooperative": together}
            host_shim.launch(function, *sizes, parameters, None, **options)

    facts = Facts(0, (9, 0), multiprocessors, cooperative)
    of_device = lambda device: facts._replace(device=device)
    return Driver(of_device, load, lambda *_: each, launch), launches
