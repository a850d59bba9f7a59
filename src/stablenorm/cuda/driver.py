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
from stablenorm.cuda.errors import (
    block_too_large,
    driver_too_old,
    no_block_fits,
    no_device,
)
from stablenorm.cuda.plan import Plan, largest_cluster

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h.
_MAX_DYNAMIC_SHARED = 8


class Facts(NamedTuple):
    """What decides how kernels are compiled for a device and launched on it."""

    device: int
    capability: tuple[int, int]
    multiprocessors: int
    # Whether all blocks of a launch can be promised to run at once.
    cooperative: bool
    # Bytes that a block may have, and those that it may have without asking.
    shared_most: int
    shared_free: int


class Driver(NamedTuple):
    """
    `facts` (device), `kernel` (plan, facts), `resident` (kernel, block, shared bytes: blocks that
    one multiprocessor holds), `clusters` (kernel, plan: clusters that the device holds, None where
    nobody can tell), `launch` (kernel, grid, block, shared bytes, parameters, cooperative).
    """

    facts: Callable[[int], Facts]
    kernel: Callable[[Plan, Facts], Any]
    resident: Callable[[Any, int, int], int]
    clusters: Callable[[Any, Plan], int | None]
    launch: Callable[[Any, int, int, int, bytes, bool], None]


class Fit(NamedTuple):
    """A plan that a device can run, its kernel, and how many of its blocks are held at once."""

    plan: Plan
    kernel: Any
    resident: int


def fit(
    driver: Driver, facts: Facts, make_plan: Callable[..., Plan], cluster_limit: int | None = None
) -> Fit:
    """
    Return what `make_plan` makes of the limits of a device: `shared_limit` and `cluster_limit`.

    Without clusters where it holds none, as a share of a device may; RuntimeError if not one block
    fits.
    """
    most = largest_cluster(facts.capability) if cluster_limit is None else cluster_limit
    plan = make_plan(shared_limit=facts.shared_most, cluster_limit=most)
    kernel = driver.kernel(plan, facts)
    resident = driver.resident(kernel, plan.block, plan.shared_bytes) * facts.multiprocessors
    if plan.cluster > 1:
        clusters = driver.clusters(kernel, plan)
        resident = resident if clusters is None else clusters * plan.cluster
        if resident < plan.cluster:
            return fit(driver, facts, make_plan, 1)
    if resident == 0:
        raise no_block_fits(plan.block)
    return Fit(plan, kernel, resident)


def check_device(cupy: Any) -> None:
    """Raise RuntimeError where CUDA finds no device."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise no_device(error) from error
    if not count:
        raise no_device(None)


def make_driver(cupy: Any) -> Driver:
    """Return CUDA's driver, as CuPy calls it."""
    driver, lock = cupy.cuda.driver, threading.Lock()
    facts_of: dict[int, Facts] = {}
    functions: dict[tuple[int, Plan], Any] = {}
    clusters_of: dict[int, int | None] = {}

    def facts(device: int) -> Facts:
        if device not in facts_of:
            facts_of[device] = _read_facts(cupy, device)
        return facts_of[device]

    def kernel(plan: Plan, about: Facts) -> Any:
        key = about.device, plan
        function = functions.get(key)
        if function is None:
            with lock:
                function = functions.setdefault(key, _load(cupy, plan, about))
        return function

    def resident(function: Any, block: int, shared_bytes: int) -> int:
        return driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, block, shared_bytes)

    def clusters(function: Any, plan: Plan) -> int | None:
        if function.ptr not in clusters_of:
            clusters_of[function.ptr] = _ask_clusters(function.ptr, plan)
        return clusters_of[function.ptr]

    def launch(
        function: Any, grid: int, block: int, shared_bytes: int, parameters: bytes, together: bool
    ) -> None:
        # CuPy passes a NumPy array of one element by value.
        value = np.frombuffer(parameters, np.dtype((np.void, len(parameters))))
        function((grid,), (block,), (value,), shared_bytes, enable_cooperative_groups=together)

    return Driver(facts, kernel, resident, clusters, launch)


def _read_facts(cupy: Any, device: int) -> Facts:
    # CuPy spells it "90", or "100" for 10.0.
    capability = cupy.cuda.Device(device).compute_capability
    attributes = cupy.cuda.Device(device).attributes
    return Facts(
        device,
        (int(capability[:-1]), int(capability[-1])),
        attributes["MultiProcessorCount"],
        bool(attributes["CooperativeLaunch"]),
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerBlock"],
    )


def _ask_clusters(function: int, plan: Plan) -> int | None:
    """Return how many clusters of the plan the current device holds; None if it does not say."""
    # CuPy has no such call. The size of a cluster is the one that the kernel was compiled with.
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # only where there is CUDA

        config = driver.CUlaunchConfig()
        config.gridDimX, config.blockDimX = plan.cluster, plan.block
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = plan.shared_bytes
        status, found = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function), config)
    except Exception:  # noqa: BLE001  # ImportError, or what its loader raises
        return None
    if status == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
        return 0
    return int(found) if status == driver.CUresult.CUDA_SUCCESS else None


def _load(cupy: Any, plan: Plan, about: Facts) -> Any:
    """Compile, load, and ask for the shared memory that a block needs; return the function."""
    version, driver = compiling.nvrtc_version(), cupy.cuda.runtime.driverGetVersion()
    # Within one major version any driver runs what any compiler makes.
    if driver // 1000 < version[0]:
        raise driver_too_old(driver, version)
    if plan.shared_bytes > about.shared_most:
        raise block_too_large(plan.shared_bytes, about.shared_most)
    # Not RawModule, which keeps modules by the path of a file: here there may be none.
    module = cupy.cuda.Module()
    module.load(compiling.cubin(plan.defines, about.capability))
    function = module.get_function(plan.entry)
    if plan.shared_bytes > about.shared_free:
        cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, plan.shared_bytes)
    return function
