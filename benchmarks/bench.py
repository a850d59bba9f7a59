"""
Speed, beside PyTorch, JAX, ONNX Runtime, thinc and plain NumPy: `make bench`.

Checks agreement, times forward and backward, prints the table and the gates. A full run writes
benchmarks/results/bench.json, docs/performance.md and docs/figures/; another one writes only where
`--out` says. Exit status 1 if ours disagree with the reference; a gate not met is printed, no error.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from agreement import DisagreementError
from cases import SUITES, Case, Effort, Record, make_cases, measure_case, measure_machine
from figures import draw_length, draw_size
from gates import check_gates
from machine import processor
from page import Run, gate_table, label, origin, page, readme_table, shape_table
from peers import LOADERS, load_peers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

import stablenorm
from stablenorm._bench import DTYPES, use_threads
from stablenorm.backends import choose

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
# Small cases: enough rounds for a median that a neighbour's noise does not move. Large ones run
# against the limit: 60 groups of 5 s, 80 of 3 s, make less than a quarter of an hour.
FULL = {"call": Effort(51, 15, 10), "shapes": Effort(21, 5, 5), "dtypes": Effort(9, 3, 10)}
SWEEP = Effort(9, 3, 3)
QUICK = Effort(9, 3, 1.5)
SMOKE = Effort(2, 1, 0.01)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="float32, the shapes and what the gates need: 2 min"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny arrays: tries the script itself")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        choices=(*SUITES, *DTYPES, *LOADERS),
        help=f"suites ({', '.join(SUITES)}), dtypes or peers, to be measured alone",
    )
    parser.add_argument("--threads", type=int, default=2, help="of all; default: 2")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, not into this tree")
    parser.add_argument(
        "--render", action="store_true", help="no timing: write page and pictures of the last run"
    )
    return parser.parse_args(argv)


def wanted(case: Case, options: argparse.Namespace) -> bool:
    """Tell whether a case is to be run."""
    if options.quick and (case.suite == "n" or case.dtype not in ("float32", "all")):
        return False
    # Of the sweep of rows, what the gate on large arrays asks for.
    if options.quick and case.suite == "rows" and case.shape[0] != 2**16:
        return False
    suites, dtypes = ([w for w in options.only if w in words] for words in (SUITES, DTYPES))
    return (not suites or case.suite in suites) and (not dtypes or case.dtype in dtypes)


def effort_for(case: Case, options: argparse.Namespace) -> Effort:
    """How long to measure it."""
    if options.smoke:
        return SMOKE
    # Calls of microseconds cost next to nothing, and two gates hang on them.
    if case.suite == "call":
        return FULL["call"]
    return QUICK if options.quick else FULL.get(case.suite, SWEEP)


def measure(options: argparse.Namespace) -> tuple[Run, list[Record]]:
    """Measure every wanted case; what is known of the run, and its records."""
    threads = use_threads(options.threads)
    peers, missing = load_peers(options.threads)
    names = [word for word in options.only if word in LOADERS]
    peers = [peer for peer in peers if not names or peer.name in names]
    cases = [case for case in make_cases(options.smoke) if wanted(case, options)]
    records: list[Record] = []
    agreement: dict[str, float] = {}
    refused: list[str] = []
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn once a second: it takes its share of what is timed.
    with Progress(
        *columns, console=console, refresh_per_second=1, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("copy", total=len(cases))
        machine = measure_machine(options.threads, SMOKE if options.smoke else SWEEP)
        for case in cases:
            progress.update(task, description=label(case))
            if not console.is_terminal:
                console.print(label(case), highlight=False)
            found, used = measure_case(
                case, peers, options.threads, effort_for(case, options), max(machine.values())
            )
            records += found
            for peer, worst in used.items():
                if worst > 1:
                    refused.append(f"{peer} on {label(case)} ({worst:.3g} of its tolerance)")
                else:
                    agreement[peer] = max(worst, agreement.get(peer, 0.0))
            progress.advance(task)
    run = {
        "command": " ".join(
            ["make bench" if is_full(options) else "benchmarks/bench.py", *flags(options)]
        ),
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": options.threads,
        "threads_of_ours": threads,
        "backend": choose(None),
        "versions": versions(),
        "peers": {peer.name: peer.version for peer in peers},
        "missing": missing,
        "machine": machine,
        "agreement": agreement,
        "refused": refused,
    }
    return run, records


def is_full(options: argparse.Namespace) -> bool:
    """Tell whether everything is measured, as the page in docs has it."""
    return not (options.quick or options.smoke or options.only)


def flags(options: argparse.Namespace) -> list[str]:
    """The options that say what was measured."""
    given = [f"--{name}" for name in ("quick", "smoke") if getattr(options, name)]
    return [*given, *(["--only", *options.only] if options.only else [])]


def versions() -> dict[str, str]:
    """Return the versions of what ours runs on."""
    found = {
        "stablenorm": stablenorm.__version__,
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
    }
    # Loaded by then if the backend that was timed is written in it.
    if (numba := sys.modules.get("numba")) is not None:
        found["Numba"] = str(numba.__version__)
    return found


def save(path: Path, run: Run, records: Sequence[Record]) -> None:
    """Write run and records; four digits are more than a timing has."""

    def short(value: Any) -> Any:
        return float(f"{value:.4g}") if isinstance(value, float) else value

    rows = [json.dumps([short(value) for value in record]) for record in records]
    content = json.dumps({"run": run, "columns": Record._fields}, indent=1)
    # One line a record: half the size, and a difference that can be read.
    text = content.rstrip("}\n") + ',\n "records": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> tuple[Run, list[Record]]:
    """Read what `save` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["run"], [Record(row[0], tuple(row[1]), *row[2:]) for row in content["records"]]


def render(run: Run, records: Sequence[Record], docs: Path) -> None:
    """Write the page and its pictures."""
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "performance.md").write_text(page(run, records, check_gates(records)), encoding="utf-8")
    words = f"{run['processor']}, {run['threads']} threads"
    for suite, name, draw in (
        ("n", "throughput_n.png", draw_length),
        ("rows", "throughput_size.png", draw_size),
    ):
        if any(record.suite == suite for record in records):
            draw(records, docs / "figures" / name, words)


def write_readme(run: Run, records: Sequence[Record], readme: Path) -> None:
    """Put the table between the speed markers of README.md."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        msg = (
            f"{readme.name} must hold {BEGIN} and below it {END}, got no {END if begin else BEGIN}"
        )
        raise ValueError(msg)
    table = readme_table(run, records)
    readme.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def show(run: Run, records: Sequence[Record]) -> None:
    """Print the tables of float32 and the gates."""
    print(origin(run))
    shapes = [record for record in records if record.suite == "shapes"]
    for dtype, direction in dict.fromkeys((r.dtype, r.direction) for r in shapes):
        here = [r for r in shapes if (r.dtype, r.direction) == (dtype, direction)]
        print(f"\n{dtype}, {direction}: time, and the time of peers over our fresh one")
        print(shape_table(here, list(run["peers"])))
    print("\n" + gate_table(check_gates(records)))
    for text in run["refused"]:
        print(f"not timed, since it does not agree: {text}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(argv)
    results, docs = (options.out, options.out) if options.out else (RESULTS, ROOT / "docs")
    if options.render:
        run, records = load(results / "bench.json")
        render(run, records, docs)
        if not options.out:
            write_readme(run, records, ROOT / "README.md")
        return 0
    try:
        run, records = measure(options)
    except DisagreementError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if is_full(options) or options.out:
        save(results / "bench.json", run, records)
        render(run, records, docs)
    if is_full(options) and not options.out:
        write_readme(run, records, ROOT / "README.md")
    show(run, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
