"""
Speed, beside PyTorch, JAX, ONNX Runtime and plain NumPy: `make bench`.

Checks agreement, times forward and backward, and writes benchmarks/results/bench.json,
docs/evidence/performance.md and the table of README; `--render` reads the file instead of measuring.
The exit status is 1 if our results break the accuracy contract.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from typing import Any

from agreement import DisagreementError
from cases import Result, make_cases, measure_case
from figures import draw_speed
from page import DOCS, HERE, ROOT, keep, origin, put
from peers import load_peers
from speed_page import page, readme_block, speed_lines

from stablenorm import set_num_threads
from stablenorm.memory import set_idle_limit
from stablenorm.timing import Timing, measure_copy

PEERS = ("PyTorch", "JAX, the formula", "ONNX Runtime", "plain NumPy")
THREADS = 2
# A suite of a process of its own, with jemalloc, which keeps freed pages.
KEPT = "kept"
# PyTorch's tuning guide has these settings, with long times of decay; with -1 no page is ever returned:
# https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
JEMALLOC = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)


def time_cases(with_jemalloc: bool) -> tuple[dict[str, Any], list[Result]]:
    """Measure the cases of one malloc; return the origin and the agreement of the run, and its results."""
    set_num_threads(THREADS)
    peers, missing = load_peers(PEERS, THREADS)
    machine = measure_copy(THREADS)
    results: list[Result] = []
    agreement: dict[str, float] = {}
    refused: list[str] = []
    for case in make_cases():
        if with_jemalloc != (case.suite == KEPT):
            continue
        print(*case, file=sys.stderr, flush=True)
        measured, used = measure_case(case, peers, THREADS, machine)
        results += measured
        for peer, worst in used.items():
            if worst <= 1:
                agreement[peer] = max(worst, agreement.get(peer, 0.0))
            else:
                refused.append(f"{peer} on {case.shape}, {case.dtype}")
    run = origin({peer.name: peer.version for peer in peers}) | {"threads": THREADS}
    return run | {"missing": missing, "agreement": agreement, "refused": refused}, results


def print_kept() -> None:
    """Measure the cases with jemalloc, which is preloaded; our recycling is off, as PyTorch has none."""
    set_idle_limit(0)
    print(json.dumps(time_cases(with_jemalloc=True)[1]))


def measure() -> dict[str, Any]:
    """Measure every case, those with jemalloc in a process of its own."""
    run, results = time_cases(with_jemalloc=False)
    library = ctypes.util.find_library("jemalloc")
    if library is None:
        run["kept"] = "jemalloc was not found; on Debian: apt-get install libjemalloc2"
    else:
        environment = os.environ | {"LD_PRELOAD": library, "MALLOC_CONF": JEMALLOC}
        command = [sys.executable, "-c", "import bench; bench.print_kept()"]
        done = subprocess.run(
            command, env=environment, cwd=HERE, stdout=subprocess.PIPE, check=False
        )
        failed = f"with {library} preloaded it ended with status {done.returncode}"
        run["kept"] = failed if done.returncode else ""
        results += [] if done.returncode else json.loads(done.stdout)
    return {"run": run, "results": results}


def main() -> int:
    """Measure or read, and write the page, the picture and README's table."""
    try:
        saved = keep("bench", __doc__, measure)
    except DisagreementError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    results = []
    for suite, shape, dtype, direction, copy, times in saved["results"]:
        timings = {name: Timing(*quartiles) for name, quartiles in times.items()}
        results.append(Result(suite, tuple(shape), dtype, direction, copy, timings))
    put(DOCS / "evidence" / "performance.md", {"bench": page(saved["run"], results)})
    draw_speed(speed_lines(results))
    put(ROOT / "README.md", {"speed": readme_block(saved["run"], results)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
