"""
Speed, beside PyTorch, JAX, ONNX Runtime and plain NumPy: `make bench`.

Checks agreement, times forward and backward, prints the targets. A full run writes
benchmarks/results/bench.json, docs/evidence/performance.md with its pictures and the block of README;
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
from cases import SUITES, Case, Effort, Record, make_cases, measure_case, measure_machine
from page import DOCS, HERE, ROOT, origin, put, write
from peers import load_peers
from speed_figures import draw_length, draw_size
from speed_page import page, readme_block, summary

from stablenorm.cli.parts import DTYPES, use_threads
from stablenorm.memory import set_idle_limit

PEERS = ("PyTorch", "JAX, the formula", "ONNX Runtime", "plain NumPy")
# Small cases: enough rounds for a median that a neighbour's noise does not move. Large ones run
# against the limit of seconds; all of them together take less than ten minutes.
EFFORTS = {
    "call": Effort(51, 15, 10),
    "shapes": Effort(21, 5, 3),
    "kept": Effort(21, 5, 4),
    "alone": Effort(9, 3, 3),
    "dtypes": Effort(9, 3, 8),
}
SWEEP = Effort(9, 3, 2)
QUICK = Effort(7, 3, 1)
SMOKE = Effort(2, 1, 0.01)
# PyTorch's tuning guide has these, and long times of decay; without decay no page is ever returned:
# https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
JEMALLOC = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:-1,muzzy_decay_ms:-1"
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="float32, no sweeps, few rounds")
    parser.add_argument("--smoke", action="store_true", help="tiny arrays: tries the script itself")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=(*SUITES, *DTYPES), help="suites or dtypes"
    )
    parser.add_argument("--threads", type=int, default=2, help="of all; default: 2")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, not into this tree")
    parser.add_argument(
        "--render", action="store_true", help="no timing: write page and pictures of the last run"
    )
    return parser.parse_args(argv)


def wanted(case: Case, options: argparse.Namespace) -> bool:
    """Tell whether a case is to be run."""
    if options.quick and (case.suite in ("n", "rows") or case.dtype not in ("float32", "all")):
        return False
    suites, dtypes = ([w for w in options.only if w in words] for words in (SUITES, DTYPES))
    return (not suites or case.suite in suites) and (not dtypes or case.dtype in dtypes)


def effort_for(case: Case, options: argparse.Namespace) -> Effort:
    """How long to measure it."""
    if options.smoke:
        return SMOKE
    return QUICK if options.quick else EFFORTS.get(case.suite, SWEEP)


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    """Measure every wanted case; what is known of the run, and its records."""
    kept = jemalloc_runs()
    if kept:
        # As `malloc` of PyTorch has no recycling, ours has none here.
        set_idle_limit(0)
    use_threads(options.threads)
    peers, missing = load_peers(PEERS, options.threads)
    # Those two suites are a process of their own, with another malloc.
    cases = [
        case
        for case in make_cases(options.smoke)
        if wanted(case, options) and kept == (case.suite in ("kept", "alone"))
    ]
    records: list[Record] = []
    agreement: dict[str, float] = {}
    refused: list[str] = []
    machine = measure_machine(options.threads, SMOKE if options.smoke else SWEEP)
    for case in cases:
        print(case.label, file=sys.stderr, flush=True)
        found, used = measure_case(
            case, peers, options.threads, effort_for(case, options), max(machine.values())
        )
        records += found
        for peer, worst in used.items():
            if worst > 1:
                refused.append(f"{peer} on {case.label} ({worst:.3g} of its tolerance)")
            else:
                agreement[peer] = max(worst, agreement.get(peer, 0.0))
    run = origin({peer.name: peer.version for peer in peers}) | {
        "command": "make bench",
        "threads": options.threads,
        "real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "missing": missing,
        "machine": machine,
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
        given = [f"--threads={options.threads}", f"--out={folder}", "--only", "kept", "alone"]
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

    def short(value: Any) -> Any:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    rows = [json.dumps([short(value) for value in record]) for record in records]
    content = json.dumps({"run": run, "columns": Record._fields}, indent=1)
    # One line a record: half the size, and a difference that can be read.
    text = content.rstrip("}\n") + ',\n "records": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Read what `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["run"], [Record(row[0], tuple(row[1]), *row[2:]) for row in content["records"]]


def render(run: dict[str, Any], records: Sequence[Record], docs: Path) -> None:
    """Write the page and its pictures."""
    write(docs / "evidence" / "performance.md", page(run, records), __file__)
    words = f"{run['processor']}, {run['threads']} threads"
    for suite, name, draw in (
        ("n", "throughput_n.png", draw_length),
        ("rows", "throughput_size.png", draw_size),
    ):
        if any(record.suite == suite for record in records):
            draw(records, docs / "figures" / name, words)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(argv)
    full = not (options.quick or options.smoke or options.only or options.out)
    results = options.out or HERE / "results"
    try:
        if options.render:
            run, records = load(results / "bench.json")
        else:
            run, records = measure(options)
    except DisagreementError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if jemalloc_runs():
        save(results / "bench.json", run, records)
        return 0
    if not options.render:
        run["kept"], more = measure_kept(options)
        records += more
    if full or options.out:
        save(results / "bench.json", run, records)
        render(run, records, options.out or DOCS)
    if full:
        put(ROOT / "README.md", {"speed": readme_block(run, records)}, __file__)
    print(summary(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
