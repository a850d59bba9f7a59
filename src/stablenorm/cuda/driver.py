"""
What a launch asks of CUDA: facts of a device, a kernel, how many blocks fit, the launch itself.

`Driver` is the one place where they come together, so that tests hand in another one, which runs
the same kernels on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cuda import compile as compiling
from stablenorm.cuda.errors import driver_too_old, no_block_fits, no_device
from stablenorm.cuda.plan import Kernel


class Facts(NamedTuple):
    """What decides how kernels are compiled for a device and launched on it."""

    device: int
    capability: tuple[int, int]
    multiprocessors: int
    # Whether all blocks of a launch can be promised to run at once.
    cooperative: bool


class Driver(NamedTuple):
    """
    `facts` (device), `load` (kernel, facts: its function), `resident` (function, kernel: blocks
    that one multiprocessor holds), `launch` (function, kernel, grid, parameters, cooperative).
    """

    facts: Callable[[int], Facts]
    load: Callable[[Kernel, Facts], Any]
    resident: Callable[[Any, Kernel], int]
    launch: Callable[[Any, Kernel, int, bytes, bool], None]


def check_device(cupy: Any) -> None:
    """Raise RuntimeError where CUDA finds no device."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise no_device(error) from error
    if not count:
        raise no_device(None)


def count_resident(driver: Driver, facts: Facts, function: Any, kernel: Kernel) -> int:
    """Return how many blocks of a kernel the device holds at once; RuntimeError if not one."""
    resident = driver.resident(function, kernel) * facts.multiprocessors
    if resident == 0:
        raise no_block_fits(kernel.block)
    return resident


def make_driver(cupy: Any) -> Driver:
    """Return CUDA's driver, as CuPy calls it."""
    lock = threading.Lock()
    facts_of: dict[int, Facts] = {}
    functions: dict[tuple[int, Kernel], Any] = {}

    def facts(device: int) -> Facts:
        if device not in facts_of:
            facts_of[device] = _read_facts(cupy, device)
        return facts_of[device]

    def load(kernel: Kernel, about: Facts) -> Any:
        key = about.device, kernel
        function = functions.get(key)
        if function is None:
            with lock:
                function = functions.get(key) or _load(cupy, kernel, about)
                functions[key] = function
        return function

    def resident(function: Any, kernel: Kernel) -> int:
        ask = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return int(ask(function.ptr, kernel.block, kernel.shared_bytes))

    def launch(
        function: Any, kernel: Kernel, grid: int, parameters: bytes, cooperative: bool
    ) -> None:
        # CuPy passes a NumPy array of one element by value.
        value = np.frombuffer(parameters, np.dtype((np.void, len(parameters))))
        sizes = (grid,), (kernel.block,), (value,), kernel.shared_bytes
        function(*sizes, enable_cooperative_groups=cooperative)

    return Driver(facts, load, resident, launch)


def _read_facts(cupy: Any, device: int) -> Facts:
    # CuPy spells it "90", or "100" for 10.0.
    capability = cupy.cuda.Device(device).compute_capability
    attributes = cupy.cuda.Device(device).attributes
    return Facts(
        device,
        (int(capability[:-1]), int(capability[-1])),
        attributes["MultiProcessorCount"],
        bool(attributes["CooperativeLaunch"]),
    )


def _load(cupy: Any, kernel: Kernel, about: Facts) -> Any:
    """Compile and load."""
    version, driver = compiling.nvrtc_version(), cupy.cuda.runtime.driverGetVersion()
    # Within one major version any driver runs what any compiler makes.
    if driver // 1000 < version[0]:
        raise driver_too_old(driver, version)
    # Not RawModule, which keeps modules by the path of a file: here there may be none.
    module = cupy.cuda.Module()
    module.load(compiling.cubin(kernel.defines, about.capability))
    return module.get_function(kernel.entry)
