"""
The backend "cuda": layer norm on a CUDA device, one launch forward and one backward.

`layer_norm.cu` does the work, `plan` says how it is compiled and launched; here arguments become
addresses. Everything happens on the device of x and its current stream, without waiting for it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.arrays import Arrays
from stablenorm.call import Backward, Forward
from stablenorm.cuda import arrays, driver, workspace
from stablenorm.cuda.compile import first_line
from stablenorm.cuda.driver import check_usable
from stablenorm.cuda.plan import Kernel, choose_kernel, cut, pack_parameters
from stablenorm.cuda.workspace import CudaWorkspace
from stablenorm.types import Statistics

__all__ = ["CudaWorkspace", "check_usable"]

# What the driver says when blocks that wait for one another would not all fit, whatever was
# computed before: another process, or a share of the device, may take multiprocessors away.
_TOO_MANY = "COOPERATIVE_LAUNCH_TOO_LARGE"

# The names of the runtime and of the driver for it.
_NO_MEMORY = ("MemoryAllocation", "OUT_OF_MEMORY")

# Copies of 16 bytes need addresses that are multiples of it.
_VECTOR_BYTES = 16

_choose_kernel = functools.lru_cache(1024)(choose_kernel)


def forward(call: Forward) -> Statistics:
    """Do what `reference.forward` does."""
    x, (gamma, beta, eps, *_), y = call[:3]
    with _on_device(x=x.array, gamma=gamma, beta=beta, out=y.array) as (cupy, device):
        rows, n = x.shape
        statistics = _new_statistics(cupy, rows, x.dtype.itemsize == 8)
        if rows == 0:
            return statistics
        source = arrays.matrix(cupy, "x", x, read=True)
        target = arrays.matrix(cupy, "out", y, read=False)
        scale, shift = arrays.flat(cupy, "gamma", gamma), arrays.flat(cupy, "beta", beta)
        values: dict[str, Any] = _places(
            x=source, out=target, gamma=scale, beta=shift, **statistics._asdict()
        )
        values |= {"rows": rows, "n": n, "eps": eps}
        kernel = _kernel(device, values, x.dtype, None, gamma, beta)
        _launch(device, kernel, -(-rows // kernel.slots), False, values)
        arrays.put_back(cupy, target, y)
        return statistics


def backward(call: Backward) -> None:
    """Do what `reference.backward` does."""
    dy, x, norm, statistics, dx, dgamma, dbeta = call[:7]
    gamma = norm.gamma
    totals: dict[str, Any] = {"dgamma": dgamma, "dbeta": dbeta}
    places = {"x": x.array, "dy": dy.array, "gamma": gamma, "out.dx": getattr(dx, "array", None)}
    with _on_device(**places, **{f"out.{k}": v for k, v in totals.items()}) as (cupy, device):
        rows, n = x.shape
        wanted = {name: total for name, total in totals.items() if total is not None}
        if rows == 0:
            for total in wanted.values():
                total[...] = 0
        if rows == 0 or (dx is None and not wanted):
            return
        target = None if dx is None else arrays.matrix(cupy, "out.dx", dx, read=False)
        sources = [arrays.matrix(cupy, *each, read=True) for each in (("x", x), ("dy", dy))]
        # A strided dgamma or dbeta is written to memory of its own first.
        made = {
            name: total if total.flags.c_contiguous else cupy.empty(n, total.dtype)
            for name, total in wanted.items()
        }
        scale = arrays.flat(cupy, "gamma", gamma)
        given = {"x": sources[0], "dy": sources[1], "out": target, "gamma": scale, **made}
        values = _places(**given, **statistics._asdict()) | {"rows": rows, "n": n}
        # beta itself is no argument of the backward: its dtype is that of dbeta.
        kernel = _kernel(device, values, x.dtype, dy.dtype, gamma, dbeta)
        chunks = cut(rows, kernel)
        values |= {"chunks": chunks.number, "chunk_rows": chunks.rows}
        if wanted:
            nbytes = 2 * n * chunks.number * kernel.number_bytes
            room = workspace.room(cupy, device, nbytes)
            values |= _places(**room)
        # Blocks wait for one another only where all are promised to run at once.
        barrier = bool(wanted) and driver.read_facts(device).cooperative
        _launch(device, kernel, chunks.number, barrier, values)
        arrays.put_back(cupy, target, dx)
        for name, total in wanted.items():
            if made[name] is not total:
                total[...] = made[name].reshape(total.shape)


def _kernel(device: int, values: dict[str, int], x: Any, dy: Any, gamma: Any, beta: Any) -> Kernel:
    """Return the kernel for these places and strides, dtypes of x and dy, arrays gamma and beta."""
    find = values.get
    places = values["x"] | find("dy", 0) | find("out", 0)
    strides = values["x_stride"] | find("dy_stride", 0) | find("out_stride", 0)
    aligned = (places | strides * x.itemsize) % _VECTOR_BYTES == 0
    dtypes = x, dy, getattr(gamma, "dtype", None), getattr(beta, "dtype", None)
    return _choose_kernel(values["n"], *dtypes, driver.read_facts(device).shared, aligned)


def _launch(device: int, kernel: Kernel, work: int, barrier: bool, values: dict[str, Any]) -> None:
    """Launch once, at most a block for each piece of `work`."""
    function = driver.load(device, kernel)
    grid = min(work, driver.count_resident(device, kernel))
    try:
        parameters = pack_parameters(barrier=barrier, **values)
        driver.launch(function, kernel, grid, parameters, barrier)
    except RuntimeError as error:
        if not barrier or _TOO_MANY not in str(error):
            raise
        # Refused before anything ran. The last block gives the same bits and needs no company.
        driver.launch(function, kernel, grid, pack_parameters(**values), False)


@contextlib.contextmanager
def _on_device(**places: Any) -> Iterator[tuple[Any, int]]:
    """Make the one device of all arrays current; where its memory is not enough, say the cure."""
    device = int(places["x"].device.id)
    for name, array in places.items():
        if array is not None and array.device.id != device:
            msg = (
                f"{name} must be on device {device}, like x, got device {array.device.id}; copy it "
                f"there: with cupy.cuda.Device({device}): {name} = cupy.array({name})"
            )
            raise ValueError(msg)
    cupy = driver.import_cupy()
    try:
        with cupy.cuda.Device(device):
            yield cupy, device
    except (RuntimeError, MemoryError) as error:
        line = first_line(error)
        if not isinstance(error, MemoryError) and not any(word in line for word in _NO_MEMORY):
            raise
        msg = (
            f"too little memory on CUDA device {device} ({line}); let go of arrays and call "
            "cupy.get_default_memory_pool().free_all_blocks(), or pass fewer rows at a time"
        )
        raise MemoryError(msg) from error


def _new_statistics(cupy: Any, rows: int, pairs: bool) -> Statistics:
    numbers = cupy.empty((5 if pairs else 3, rows), np.float64)
    words = Statistics(numbers[0], numbers[1], numbers[2])
    if not pairs:
        return words
    exponent = cupy.empty((rows, 2), np.int16)
    return words._replace(rstd_lo=numbers[3], mean_tail=numbers[4], exponent=exponent)


# ---- arguments as parameters of a kernel ----


def _places(**found: Any) -> dict[str, int]:
    """Return addresses and strides; what is not there stays null."""
    values: dict[str, int] = {}
    for name, array in found.items():
        if isinstance(array, arrays.Matrix):
            values[name], values[name + "_stride"] = array.pointer, array.stride
        elif array is not None:
            values[name] = int(array.data.ptr)
    return values


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
    with _on_device(x=like) as (cupy, _):
        return cupy.empty(shape, dtype)


# What the public functions do with these arrays.
ARRAYS = Arrays(
    arrays.convert, arrays.target, _empty, arrays.overlap, arrays.same_elements, arrays.Folded
)
