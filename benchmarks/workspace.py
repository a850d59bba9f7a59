"""
What a training step pays for new pages: the table of docs/how-to/workspace.md, `make workspace`.

Times a step, forward and backward of float32, with results in new arrays, in those that the functions
take by themselves, in those of a workspace, and in arrays handed over, interleaved; counts page
faults. All must agree bit for bit before they are timed.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from page import DOCS, digits, origin, origin_line, put, table

from stablenorm import get_num_threads, layer_norm_backward, layer_norm_forward
from stablenorm.memory import Workspace
from stablenorm.timing import measure_interleaved

SHAPE = (16, 512, 1024)
# What the system says of pages of 2 MiB: fewer faults, where it gives them.
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def count_faults(call: Callable[[], Any]) -> int:
    """Return the page faults of a call, the fewest of three."""
    counts = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts[1:])


def main() -> None:
    """Measure, and write the table."""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(SHAPE, np.float32) for _ in range(2))
    gamma, beta = rng.standard_normal((2, SHAPE[-1])).astype(np.float32)
    work = Workspace()
    ours = np.empty_like(x), np.empty_like(x)

    def step(y: Any, dx: Any) -> tuple[Any, Any]:
        y, cache = layer_norm_forward(x, gamma, beta, out=y)
        return y, layer_norm_backward(dy, cache, out=(dx, None, None)).dx

    cases: dict[str, Callable[[], Any]] = {
        "left to the call": lambda: step(None, None),
        "a `Workspace`'s": lambda: step(work.empty_like(x), work.empty_like(x)),
        "the caller's own two arrays": lambda: step(*ours),
        "new arrays (`np.empty_like`) in every step": lambda: step(
            np.empty_like(x), np.empty_like(x)
        ),
    }
    expected = [v.tobytes() for v in cases["left to the call"]()]
    for case in cases.values():
        if [v.tobytes() for v in case()] != expected:
            msg = "the results differ"
            raise RuntimeError(msg)
    timings = measure_interleaved(cases, rounds=31)
    lines = [
        (
            name, digits(1e3 * timing.median),
            f"{digits(1e3 * timing.low)} to {digits(1e3 * timing.high)}",
            count_faults(cases[name]),
        )
        for name, timing in timings.items()
    ]  # fmt: skip
    huge = HUGE.read_text().strip() if HUGE.exists() else "unknown"
    text = (
        table(("y and dx are", "ms per step", "quartiles", "page faults per step"), lines)
        + f'\n\nfloat32, {SHAPE}, {get_num_threads()} threads, huge pages "{huge}"; a step is one forward '
        "and one backward with gamma and beta; medians of 31 interleaved steps, results bitwise equal. "
        + origin_line("make workspace", origin())
    )
    put(DOCS / "how-to" / "workspace.md", {"workspace": text}, __file__)
    print(text)


if __name__ == "__main__":
    main()
