"""How the plan of every benchmark case meets a device: blocks that fit, blocks launched, the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterator
from typing import Any

from gpu_cases import BENCH_DTYPES, BENCH_SHAPES, PASSES

from stablenorm.cli.bench_measure import type_of
from stablenorm.cuda.driver import Driver, Facts, fit
from stablenorm.cuda.plan import (
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
    which = arithmetic(facts.capability)
    for (rows, n), dtype, direction in itertools.product(BENCH_SHAPES, BENCH_DTYPES, PASSES):
        label, kind = f"occupancy {direction} {rows}x{n} {dtype}", type_of(dtype)
        if label in done:
            continue
        if direction == "forward":
            make_plan = functools.partial(plan_forward, rows, n, kind, which)
        else:
            make_plan = functools.partial(plan_backward, rows, n, kind, kind, which)
        yield {"label": label, **_launched(driver, make_plan, facts, rows)}


def _launched(
    driver: Driver, make_plan: Callable[..., Plan], facts: Facts, rows: int
) -> dict[str, Any]:
    """Return what `kernels.cuda` computes before it launches."""
    plan, kernel, room = fit(driver, facts, make_plan)
    grid = grid_blocks(plan, rows, room)
    mode = final_mode(plan, grid, room if facts.cooperative else 0)
    return {
        "threads": plan.block,
        "shared_bytes": plan.shared_bytes,
        "cluster": plan.cluster,
        "resident": driver.resident(kernel, plan.block, plan.shared_bytes),
        "chunks": plan.chunks,
        "grid": grid,
        "final": _ENDS[mode],
    }
