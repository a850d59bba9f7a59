"""
Requests of a launch to CUDA: facts of a device, a kernel, how many blocks fit, the launch itself.

Tests replace these functions by others, which run the same kernels on the CPU.
"""

import functools
import threading
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cuda import compile as compiling
from stablenorm.cuda.plan import Kernel

# CUDA's number of CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_SHARED = 8

# Asynchronous copies and barriers in shared memory came with it.
_OLDEST = 80


class Facts(NamedTuple):
    """The facts of a device that decide how kernels are compiled and launched."""

    # CuPy's spelling: "90", or "100" for 10.0.
    capability: str
    multiprocessors: int
    # Bytes that a block may have of shared memory.
    shared: int


@functools.cache
def import_cupy() -> Any:
    """Return CuPy, or raise ImportError with the line that installs it."""
    with compiling.needed("CuPy"):
        import cupy  # noqa: PLC0415  # only where there is CUDA
    return cupy


def check_usable() -> None:
    """Raise ImportError or RuntimeError unless there are CuPy and a device."""
    try:
        count, reason = import_cupy().cuda.runtime.getDeviceCount(), "it finds none"
    except RuntimeError as error:
        count, reason = 0, compiling.first_line(error)
    if not count:
        msg = (
            f'backend="cuda" needs a CUDA device, and CUDA says: {reason}; see whether nvidia-smi '
            "lists one and CUDA_VISIBLE_DEVICES hides it, or pass NumPy arrays"
        )
        raise RuntimeError(msg)


@functools.cache
def read_facts(device: int) -> Facts:
    """Ask a device."""
    about = import_cupy().cuda.Device(device)
    capability, attributes = about.compute_capability, about.attributes
    if int(capability) < _OLDEST:
        msg = (
            "x must be on a device of compute capability 8.0 or later, "
            f"got {int(capability) / 10}; pass x.get()"
        )
        raise RuntimeError(msg)
    processors = attributes["MultiProcessorCount"]
    return Facts(capability, processors, attributes["MaxSharedMemoryPerBlockOptin"])


@functools.cache
def load(device: int, kernel: Kernel) -> tuple[Any, int]:
    """Return a kernel's function on a device, compiled and loaded once, and how many blocks fit a multiprocessor."""
    cupy = import_cupy()
    (major, minor), driver = compiling.compiler()[1], cupy.cuda.runtime.driverGetVersion()
    # Within one major version any driver runs what any compiler makes.
    if driver // 1000 < major:
        msg = (
            f"the NVIDIA driver must support CUDA {major}, which NVRTC {major}.{minor} compiles for, "
            f"and supports {driver // 1000}.{driver % 1000 // 10}; update the driver, or install "
            f"NVRTC and cuda-bindings of CUDA {driver // 1000}"
        )
        raise RuntimeError(msg)
    # RawModule would keep modules by the path of a file: here there may be none.
    module = cupy.cuda.Module()
    module.load(compiling.cubin(kernel.defines, read_facts(device).capability))
    function = module.get_function(kernel.entry)
    # Beyond 48 KiB a kernel must be allowed its shared memory.
    cupy.cuda.driver.funcSetAttribute(function.ptr, _MOST_SHARED, kernel.shared_bytes)
    count = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return function, int(count(function.ptr, kernel.threads, kernel.shared_bytes))


def launch(function: Any, kernel: Kernel, grid: int, parameters: Any, cooperative: bool) -> None:
    """Launch on the current stream; CuPy passes `parameters`, an array of one element, by value."""
    sizes = (grid,), (kernel.threads,), (parameters,), kernel.shared_bytes
    function(*sizes, enable_cooperative_groups=cooperative)


# ---- memory beside the arguments ----

# Streams whose counters are kept: more than a program has at once.
_STREAMS = 64

# Memory that CUDA graphs were captured with: they go on writing to it.
_captured: list[Any] = []


def held(cupy: Any, array: Any) -> Any:
    """Keep an array until the process ends if a CUDA graph is being captured, which may be replayed until then."""
    if cupy.cuda.get_current_stream().is_capturing():
        _captured.append(array)
    return array


def room(cupy: Any, device: int, nbytes: int, counter_bytes: int) -> tuple[Any, Any]:
    """
    Return arrays for `nbytes` of partial sums, and for the counter of the blocks of a launch with what is behind it.

    The counter is 0 at first, and each launch leaves it fit for the next on its stream: shared between two streams,
    it would let blocks go on too early. A captured graph sets a counter of its own to 0. No error spoils one: a
    launch that is refused has not touched it, and one that stops in the middle ends the device's context.
    """
    partials, stream = cupy.empty(nbytes, np.uint8), cupy.cuda.get_current_stream()
    if stream.is_capturing():
        return held(cupy, partials), held(cupy, cupy.zeros(counter_bytes, np.uint8))
    # One address, cudaStreamPerThread, is another stream in each thread.
    return partials, _counter(counter_bytes, device, stream.ptr, threading.get_ident())[0]


@functools.lru_cache(_STREAMS)
def _counter(nbytes: int, *_: int) -> tuple[Any, Any]:
    """Return a counter for the current stream, and the stream, whose address no other gets while it is kept."""
    cupy = import_cupy()
    # Zeroed on this stream, and so before the launch that follows on it.
    return cupy.zeros(nbytes, np.uint8), cupy.cuda.get_current_stream()
