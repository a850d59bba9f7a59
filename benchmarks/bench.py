"""
Speed, beside PyTorch, JAX, ONNX Runtime and plain NumPy: `make bench`.

Checks agreement, times forward and backward, prints the targets. A full run writes
benchmarks/results/bench.json, docs/evidence/performance.md and the block of README;
another one writes only where `--out` says. Exit status 1 if ours disagree with the reference; a
target not met is printed, no error.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agreement import DisagreementError
from cases import SUITES, Effort, Record, make_cases, measure_case, measure_machine
from page import DOCS, HERE, ROOT, origin, put, write
from peers import load_peers
from speed_page import gate_table, page, readme_block

from stablenorm.cli.parts import use_threads
from stablenorm.memory import set_idle_limit

PEERS = ("PyTorch", "JAX, the formula", "ONNX Runtime", "plain NumPy")
QUICK, SMOKE = Effort(7, 3, 1), Effort(2, 1, 0.01)
# PyTorch's tuning guide has these, and long times of decay; without decay no page is ever returned:
# https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
JEMALLOC = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="float32, no sweep, few rounds")
    parser.add_argument("--smoke", action="store_true", help="tiny arrays: tries the script itself")
    parser.add_argument("--threads", type=int, default=2, help="of all; default: 2")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, not into this tree")
    parser.add_argument(
        "--render", action="store_true", help="no timing: write the pages of the last run"
    )
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Measure every wanted case; what is known of the run, and its records."""
    kept = jemalloc_runs()
    if kept:
        # As `malloc` of PyTorch has no recycling, ours has none here.
        set_idle_limit(0)
    use_threads(options.threads)
    peers, missing = load_peers(PEERS, options.threads)
    machine = measure_machine(options.threads, SMOKE if options.smoke else SUITES["n"])
    records: list[Record] = []
    agreement: dict[str, float] = {}
    refused: list[str] = []
    for case in make_cases(options.smoke):
        # Those two suites are a process of their own, with another malloc.
        if kept != (case.suite in ("kept", "alone")):
            continue
        if options.quick and (case.suite == "n" or case.dtype != "float32"):
            continue
        print(*case, file=sys.stderr, flush=True)
        effort = SMOKE if options.smoke else QUICK if options.quick else SUITES[case.suite]
        found, used = measure_case(case, peers, options.threads, effort, machine)
        records += found
        for peer, worst in used.items():
            if worst <= 1:
                agreement[peer] = max(worst, agreement.get(peer, 0.0))
            else:
                refused.append(
                    f"{peer} on {' '.join(map(str, case))} ({worst:.3g} of its tolerance)"
                )
    run = origin({peer.name: peer.version for peer in peers}) | {
        "threads": options.threads,
        "missing": missing,
        "agreement": agreement,
        "refused": refused,
        "kept": "",
    }
    return run, records


def jemalloc_runs() -> bool:
    """Tell whether the malloc of this process is jemalloc."""
    maps = Path("/proc/self/maps")
    return maps.exists() and "jemalloc" in maps.read_text()


def measure_kept(options: argparse.Namespace) -> tuple[str, list[Record]]:
    """Measure what needs jemalloc in a process of its own; why not, and its records."""
    library = ctypes.util.find_library("jemalloc")
    if library is None:
        return "jemalloc was not found; on Debian: apt-get install libjemalloc2", []
    with tempfile.TemporaryDirectory() as folder:
        given = [f"--threads={options.threads}", f"--out={folder}"]
        given += [f"--{name}" for name in ("quick", "smoke") if getattr(options, name)]
        environment = os.environ | {"LD_PRELOAD": library, "MALLOC_CONF": JEMALLOC}
        done = subprocess.run(
            [sys.executable, HERE / "bench.py", *given], env=environment, check=False
        )
        path = Path(folder) / "bench.json"
        if done.returncode or not path.exists():
            return f"with {library} preloaded it ended with status {done.returncode}", []
        return "", load(path)[1]


def save(path: Path, run: dict[str, Any], records: Sequence[Record]) -> None:
    """Write run and records; four digits are more than a timing has."""
    rows = [
        [float(f"{value:.4g}") if isinstance(value, float) else value for value in record]
        for record in records
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"run": run, "columns": Record._fields, "records": rows})
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read what `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["run"], [Record(row[0], tuple(row[1]), *row[2:]) for row in content["records"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(argv)
    results, docs = options.out or HERE / "results", options.out or DOCS
    try:
        run, records = load(results / "bench.json") if options.render else measure(options)
    except DisagreementError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if jemalloc_runs():
        save(results / "bench.json", run, records)
        return 0
    if not options.render:
        run["kept"], more = measure_kept(options)
        records += more
    if options.out or not (options.quick or options.smoke):
        save(results / "bench.json", run, records)
        write(docs / "evidence" / "performance.md", page(run, records), __file__)
        if not options.out:
            put(ROOT / "README.md", {"speed": readme_block(run, records)}, __file__)
    print(gate_table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
