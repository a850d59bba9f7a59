"""
What a launch asks of CUDA: facts of a device, a kernel, how many blocks fit, the launch itself.

Tests replace these functions by others, which run the same kernels on the CPU.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cuda import compile as compiling
from stablenorm.cuda.plan import Kernel


class Facts(NamedTuple):
    """What decides how kernels are compiled for a device and launched on it."""

    capability: tuple[int, int]
    multiprocessors: int
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
    capability, attributes = about.compute_capability, about.attributes
    return Facts(
        (int(capability[:-1]), int(capability[-1])),
        attributes["MultiProcessorCount"],
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
    return module.get_function(kernel.entry)


def count_resident(device: int, function: Any, kernel: Kernel) -> int:
    """Return how many blocks of a kernel the device holds at once."""
    ask = import_cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
    each = int(ask(function.ptr, kernel.block, kernel.shared_bytes))
    return each * read_facts(device).multiprocessors


def launch(function: Any, kernel: Kernel, grid: int, parameters: bytes, cooperative: bool) -> None:
    """Launch on the current stream."""
    # CuPy passes a NumPy array of one element by value.
    value = np.frombuffer(parameters, np.dtype((np.void, len(parameters))))
    sizes = (grid,), (kernel.block,), (value,), kernel.shared_bytes
    function(*sizes, enable_cooperative_groups=cooperative)
