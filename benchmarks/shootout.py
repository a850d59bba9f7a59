"""
Thirteen wrong layer norms and five right ones, before our gradient checkers and others.

Every tool decides by its own step and tolerance. A full run writes docs/shootout.md and
benchmarks/results/shootout.json; another one writes only where `--out` says.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import processor
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from shootout_page import page, select
from shootout_peers import load_tools
from shootout_tools import Subject, Tool, our_tools, plain_tools

import stablenorm
from stablenorm.analysis.mistakes import MISTAKES, VARIANTS, forward

ROOT = Path(__file__).parent.parent


class Setting(NamedTuple):
    """Where all tools are compared, and how long one of them may take there."""

    name: str
    shape: tuple[int, int]
    # Added to x, which then has a standard deviation of `spread`.
    offset: float
    spread: float
    # Seconds for one tool. A seed that would end later is not begun: 14 tools twice and 7 once
    # then make less than ten minutes, and a table of few seeds says how few.
    budget: float


SETTINGS = (
    Setting("(4, 8)", (4, 8), 0, 1, 30),
    Setting("(4, 8), x = 1e4 + .01 N", (4, 8), 1e4, 1e-2, 30),
    Setting("(32, 768)", (32, 768), 0, 1, 120),
)
FIRST_SEED = 100
SEEDS, QUICK_SEEDS = 20, 2

Run = dict[str, Any]


class Case(NamedTuple):
    """An implementation; `argument` and `words` say what is wrong with it, if anything is."""

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    argument: str = ""
    words: str = ""


def make_cases() -> list[Case]:
    """Return the wrong ones, then the right ones."""
    wrong = [
        Case(name, forward, mistake.backward, mistake.argument, mistake.diagnosis)
        for name, mistake in MISTAKES.items()
    ]
    return wrong + [Case(name, *variant) for name, variant in VARIANTS.items()]


def make_args(setting: Setting, seed: int) -> tuple[Any, Any, Any]:
    """Draw x ~ N, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(seed)
    n = setting.shape[1]
    return (
        setting.offset + setting.spread * rng.standard_normal(setting.shape),
        1 + 0.1 * rng.standard_normal(n),
        0.1 * rng.standard_normal(n),
    )


def judge(
    tool: Tool, cases: Sequence[Case], setting: Setting, seeds: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of one seed after another; a seed is run on all cases or not at all."""
    start = time.perf_counter()
    for number in range(seeds):
        spent = time.perf_counter() - start
        # At the pace so far; the first one is run in any case.
        if number and spent * (number + 1) / number > setting.budget:
            return
        yield [one(tool, case, setting, FIRST_SEED + number) for case in cases]


def one(tool: Tool, case: Case, setting: Setting, seed: int) -> dict[str, Any]:
    """Run one tool on one case with one seed."""
    subject = Subject(case.forward, case.backward, make_args(setting, seed), seed)
    start = time.perf_counter()
    outcome = tool.check(subject)
    seconds = time.perf_counter() - start
    return {
        "tool": tool.name,
        "case": case.name,
        "setting": setting.name,
        "seed": seed,
        "verdict": outcome.verdict,
        # Only the right argument, and no other.
        "located": outcome.blamed == (case.argument,) if outcome.blamed else None,
        "named": bool(case.words) and case.words in outcome.words,
        "number": outcome.number,
        "seconds": seconds,
    }


def measure(options: argparse.Namespace) -> Run:
    """Run every wanted tool on every case."""
    others, missing = load_tools()
    ours = our_tools(f"stablenorm {stablenorm.__version__}")
    tools = [t for t in (*ours, *others, *plain_tools()) if wanted(t, options.only)]
    cases = make_cases()
    seeds = QUICK_SEEDS if options.quick else SEEDS
    work = [(t, s) for s in SETTINGS for t in tools if t.large or s.shape == SETTINGS[0].shape]
    records: list[dict[str, Any]] = []
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(work) * seeds)
        for number, (tool, setting) in enumerate(work, 1):
            label = f"{tool.name} {setting.name}"
            progress.update(task, description=label)
            if not console.is_terminal:
                console.print(f"{number} of {len(work)}: {label}", highlight=False)
            # The first call of a package compiles and imports.
            one(tool, cases[0], SETTINGS[0], FIRST_SEED)
            for found in judge(tool, cases, setting, seeds):
                records += found
                progress.advance(task)
            progress.update(task, completed=number * seeds)
    return describe(options, tools, missing, cases) | {"records": records}


def describe(
    options: argparse.Namespace, tools: Sequence[Tool], missing: dict[str, str], cases: list[Case]
) -> Run:
    """Say where, when, with what."""
    full = not (options.quick or options.only)
    flags = (["--quick"] if options.quick else []) + (
        ["--only", *options.only] if options.only else []
    )
    return {
        "command": shlex.join(["make", "shootout"] if full else ["benchmarks/shootout.py", *flags]),
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "processor": processor(),
        "cpus": os.cpu_count(),
        # Of the last 5 minutes: above the number of cores the times are those of a busy machine.
        "load": os.getloadavg()[1],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ours": [tool.name for tool in our_tools("")],
        "tools": [tool._replace(check=None)._asdict() for tool in tools],  # type: ignore[arg-type]
        "missing": missing,
        "mistakes": [case.name for case in cases if case.words],
        "variants": [case.name for case in cases if not case.words],
        "first_seed": FIRST_SEED,
    }


def compact(run: Run) -> Run:
    """Return the run with a record for each tool, case and setting, for all seeds together."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in run["records"]:
        groups.setdefault((record["tool"], record["case"], record["setting"]), []).append(record)
    cells = []
    for (tool, case, setting), records in groups.items():
        numbers = [r["number"] for r in records if r["number"] is not None]
        cells.append(
            {
                "tool": tool,
                "case": case,
                "setting": setting,
                # In the order of the seeds: found, accepted, inconclusive, no verdict.
                "verdicts": "".join(r["verdict"][0] for r in records),
                "located": sum(r["located"] is True for r in records),
                "named": sum(r["named"] for r in records),
                "number": statistics.median(numbers) if numbers else None,
                "seconds": statistics.median(r["seconds"] for r in records),
            }
        )
    return {key: value for key, value in run.items() if key != "records"} | {"cells": cells}


def wanted(tool: Tool, words: Sequence[str]) -> bool:
    """Tell whether a tool is to be run."""
    return not words or any(word.lower() in tool.name.lower() for word in words)


def summary(run: Run) -> str:
    """Return a line a tool and setting: mistakes found, false alarms, time of one check."""
    lines = []
    for setting in SETTINGS:
        for tool in run["tools"]:
            here = select(run, tool=tool["name"], setting=setting.name)
            if not here:
                continue
            wrong = [r["verdict"] == "found" for r in here if r["case"] in run["mistakes"]]
            right = [r["verdict"] == "found" for r in here if r["case"] in run["variants"]]
            lines.append(
                f"{setting.name:24} {tool['name']:17} found {sum(wrong):4} of {len(wrong):4}, "
                f"false alarms {sum(right):3} of {len(right):3}, "
                f"{1e3 * statistics.median(r['seconds'] for r in here):8.2f} ms"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if a checker of ours called a right implementation wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds of {SEEDS}")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="tools with WORD in their name"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, not into this tree")
    options = parser.parse_args(argv)
    run = measure(options)
    print(summary(run))
    full = not (options.quick or options.only)
    if options.out or full:
        target = options.out or ROOT / "benchmarks" / "results"
        target.mkdir(parents=True, exist_ok=True)
        (target / "shootout.json").write_text(json.dumps(compact(run)) + "\n")
        (options.out or ROOT / "docs").joinpath("shootout.md").write_text(page(run))
    alarms = [
        r
        for r in select(run, verdict="found")
        if r["tool"] in run["ours"] and r["case"] in run["variants"]
    ]
    for record in alarms:
        print(f"FALSE ALARM of ours: {record}", file=sys.stderr)
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
