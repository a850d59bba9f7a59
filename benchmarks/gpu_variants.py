"""
The backward otherwise than it ships, for `make gpu`: in two launches, and with blocks that are late.

Each is a driver in front of the real one, so that it runs through the same doors. Nothing here
needs a GPU but `load_finish`; tests run both on the host shim.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

from stablenorm import cuda
from stablenorm.cuda.compile import OPTIONS, compile_cubin, sources
from stablenorm.cuda.driver import Driver, Facts
from stablenorm.cuda.plan import ONE_CHUNK, PARAMETER_NAMES, Plan

# As in _cuda_plan: the fields of struct Parameters.
_PARAMETERS = struct.Struct("<16Q6qd6i")
# A final mode that the kernel does not know: partial sums are written, and nobody adds them up.
_NOBODY = 3
_WARP = 32
# Shared memory of the second launch: a pair of words for every lane of eight segments.
_FINISH_BYTES = 8 * _WARP * 16

FINISH = """
extern "C" __global__ void __launch_bounds__(BLOCK)
layer_norm_finish(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    finish_spread(p, reinterpret_cast<Pair*>(shared));
}
"""

# Up to 57 us, some thirty times what a block of few rows takes, after the partial sums of a block
# are visible and before it says so: whoever does not wait for it reads what is not there.
LATE = "-DLN_RELEASE_FENCE()=(__threadfence(),__nanosleep(8192u*(blockIdx.x%8)))"


@contextlib.contextmanager
def through(driver: Driver) -> Iterator[None]:
    """Let the calls in here go through `driver`."""
    before = cuda._driver
    cuda._driver = lambda: driver  # type: ignore[assignment]
    try:
        yield
    finally:
        cuda._driver = before


def with_facts(driver: Driver, facts: Facts) -> Driver:
    """Return a driver that says these of every device."""
    return driver._replace(facts=lambda _: facts)


def late(driver: Driver) -> Driver:
    """Return a driver whose backward has blocks that arrive late where blocks meet."""

    def kernel(plan: Plan, facts: Facts) -> Any:
        return driver.kernel(plan._replace(defines=(*plan.defines, LATE)), facts)

    return driver._replace(kernel=kernel)


def separate(driver: Driver, finish: Callable[[Plan, Facts], Any]) -> Driver:
    """
    Return a driver that launches twice where several chunks are to be added up.

    First the chunks, whose blocks meet nowhere, then `finish` (plan, facts), the kernel of
    `FINISH`: the same sums in the same order, so the same bits.
    """

    def kernel(plan: Plan, facts: Facts) -> Any:
        total = finish(plan, facts) if plan.workspace_bytes else None
        return driver.kernel(plan, facts), total

    def resident(kernels: Any, block: int, shared_bytes: int) -> int:
        return driver.resident(kernels[0], block, shared_bytes)

    def clusters(kernels: Any, plan: Plan) -> int | None:
        return driver.clusters(kernels[0], plan)

    def launch(
        kernels: Any, grid: int, block: int, shared_bytes: int, parameters: bytes, together: bool
    ) -> None:
        values = dict(zip(PARAMETER_NAMES, _PARAMETERS.unpack(parameters), strict=True))
        if values["final_mode"] == ONE_CHUNK:
            driver.launch(kernels[0], grid, block, shared_bytes, parameters, together)
            return
        values["final_mode"] = _NOBODY
        changed = _PARAMETERS.pack(*values.values())
        driver.launch(kernels[0], grid, block, shared_bytes, changed, False)
        # A warp's width of dgamma, or of dbeta, each.
        groups = 2 * -(-values["n"] // _WARP)
        driver.launch(kernels[1], groups, block, _FINISH_BYTES, changed, False)

    return driver._replace(kernel=kernel, resident=resident, clusters=clusters, launch=launch)


def finish_cubin(plan: Plan, capability: tuple[int, int]) -> bytes:
    """Return the machine code of the second launch."""
    texts = dict(sources())
    texts["layer_norm.cu"] += FINISH.encode()
    architecture = f"--gpu-architecture=sm_{capability[0]}{capability[1]}"
    return compile_cubin(texts, (architecture, *OPTIONS, *plan.defines))


@functools.cache
def load_finish(plan: Plan, facts: Facts) -> Any:
    """Return the second launch, loaded on the current device."""
    import cupy  # noqa: PLC0415  # the rest needs none

    module = cupy.cuda.Module()
    module.load(finish_cubin(plan, facts.capability))
    return module.get_function("layer_norm_finish")
