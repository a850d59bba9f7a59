"""
What a launch asks of CUDA: facts of a device, a kernel, how many blocks fit, the launch itself.

Tests replace these functions by others, which run the same kernels on the CPU.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cuda import compile as compiling
from stablenorm.cuda.plan import Kernel

# CUDA's number of CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_SHARED = 8

# Asynchronous copies and barriers in shared memory came with it.
_OLDEST = (8, 0)


class Facts(NamedTuple):
    """What decides how kernels are compiled for a device and launched on it."""

    capability: tuple[int, int]
    multiprocessors: int
    # Bytes that a block may have of shared memory.
    shared: int
    # Whether all blocks of a launch can be promised to run at once.
    cooperative: bool


def import_cupy() -> Any:
    """Return CuPy, or raise ImportError with the line that installs it."""
    try:
        import cupy  # noqa: PLC0415  # only where there is CUDA
    except Exception as error:
        # ImportError, or what CuPy raises where a library of CUDA's is missing.
        raise compiling.not_loaded(error, "CuPy") from error
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
    # CuPy spells it "90", or "100" for 10.0.
    name, attributes = about.compute_capability, about.attributes
    capability = int(name[:-1]), int(name[-1])
    if capability < _OLDEST:
        msg = f"x must be on a device of compute capability 8.0 or later, got {name[:-1]}.{name[-1]}; pass x.get()"
        raise RuntimeError(msg)
    return Facts(
        capability,
        attributes["MultiProcessorCount"],
        attributes["MaxSharedMemoryPerBlockOptin"],
        bool(attributes["CooperativeLaunch"]),
    )


@functools.cache
def load(device: int, kernel: Kernel) -> Any:
    """Return the function of a kernel on a device, compiled and loaded the first time."""
    cupy = import_cupy()
    (major, minor), driver = compiling.nvrtc_version(), cupy.cuda.runtime.driverGetVersion()
    # Within one major version any driver runs what any compiler makes.
    if driver // 1000 < major:
        msg = (
            f"the NVIDIA driver must support CUDA {major}, which NVRTC {major}.{minor} compiles for, "
            f"and supports {driver // 1000}.{driver % 1000 // 10}; update the driver, or install "
            f"NVRTC and cuda-bindings of CUDA {driver // 1000}"
        )
        raise RuntimeError(msg)
    # Not RawModule, which keeps modules by the path of a file: here there may be none.
    module = cupy.cuda.Module()
    module.load(compiling.cubin(kernel.defines, read_facts(device).capability))
    function = module.get_function(kernel.entry)
    # Beyond 48 KiB a kernel must be allowed its shared memory.
    cupy.cuda.driver.funcSetAttribute(function.ptr, _MOST_SHARED, kernel.shared_bytes)
    return function


def count_resident(device: int, kernel: Kernel) -> int:
    """Return how many blocks of a kernel the device holds at once."""
    return _fitting(device, kernel) * read_facts(device).multiprocessors


@functools.cache
def _fitting(device: int, kernel: Kernel) -> int:
    """Return how many blocks of a kernel fit a multiprocessor."""
    ask = import_cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    return int(ask(load(device, kernel).ptr, kernel.threads, kernel.shared_bytes))


def launch(function: Any, kernel: Kernel, grid: int, parameters: bytes, cooperative: bool) -> None:
    """Launch on the current stream."""
    # CuPy passes a NumPy array of one element by value.
    value = np.frombuffer(parameters, np.dtype((np.void, len(parameters))))
    sizes = (grid,), (kernel.threads,), (value,), kernel.shared_bytes
    function(*sizes, enable_cooperative_groups=cooperative)
