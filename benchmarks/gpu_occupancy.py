"""How the plan of every benchmark case meets a device: blocks that fit, blocks launched, the end."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from typing import Any

from gpu_cases import BENCH_DTYPES, BENCH_SHAPES, PASSES

from stablenorm._bench import type_of
from stablenorm.kernels._cuda_device import Driver
from stablenorm.kernels._cuda_plan import (
    GRID_BARRIER,
    ONE_CHUNK,
    TICKETS,
    Plan,
    arithmetic,
    final_mode,
    grid_blocks,
    plan_backward,
    plan_forward,
)

_ENDS = {ONE_CHUNK: "one chunk", TICKETS: "tickets", GRID_BARRIER: "barrier"}


def occupancy(driver: Driver, device: int, done: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield one record for each case whose label is not `done`, its kernel compiled and loaded."""
    facts = driver.facts(device)
    which, most = arithmetic(facts.capability), facts.shared_most
    for (rows, n), dtype, direction in itertools.product(BENCH_SHAPES, BENCH_DTYPES, PASSES):
        label, kind = f"occupancy {direction} {rows}x{n} {dtype}", type_of(dtype)
        if label in done:
            continue
        if direction == "forward":
            plan = plan_forward(rows, n, kind, which, shared_limit=most)
        else:
            plan = plan_backward(rows, n, kind, kind, which, shared_limit=most)
        yield {"label": label, **_launched(driver, plan, device, rows)}


def _launched(driver: Driver, plan: Plan, device: int, rows: int) -> dict[str, Any]:
    """Return what `kernels.cuda` computes before it launches."""
    facts = driver.facts(device)
    kernel = driver.kernel(plan, facts)
    each = driver.resident(kernel, plan.block, plan.shared_bytes)
    room = each * facts.multiprocessors
    grid = grid_blocks(plan, rows, room)
    mode = final_mode(plan, grid, room if facts.cooperative else 0)
    return {
        "threads": plan.block,
        "shared_bytes": plan.shared_bytes,
        "resident": each,
        "chunks": plan.chunks,
        "grid": grid,
        "final": _ENDS[mode],
    }
