"""
Thirteen wrong layer norms and five right ones, before our gradient checkers and others.

Every tool decides by its own step and tolerance. Writes benchmarks/results/shootout.json and
docs/evidence/gradient-checkers.md; `--quick` takes two seeds and prints only.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from checker_page import write_page
from page import processor
from shootout_tools import Subject, Tool, load_tools

from stablenorm.testing.mistakes import MISTAKES, VARIANTS, forward

RESULTS = Path(__file__).parent / "results" / "shootout.json"
FIRST_SEED, SEEDS = 100, 20


class Setting(NamedTuple):
    """Where all tools are compared, and how many seconds one of them may take there."""

    name: str
    shape: tuple[int, int]
    # Added to x, which then has a standard deviation of `spread`.
    offset: float
    spread: float
    # A seed that would end later is not begun: all tools then take less than ten minutes.
    budget: float


SETTINGS = (
    Setting("(4, 8)", (4, 8), 0, 1, 30),
    Setting("(4, 8), x = 1e4 + .01 N", (4, 8), 1e4, 1e-2, 30),
    Setting("(32, 768)", (32, 768), 0, 1, 120),
)
# By name: forward, backward, and what is wrong ("" if nothing is).
CASES = {
    **{name: (forward, m.backward, m.argument) for name, m in MISTAKES.items()},
    **{name: (*variant, "") for name, variant in VARIANTS.items()},
}


def make_subject(case: str, setting: Setting, seed: int) -> Subject:
    """Draw x ~ N, gamma = 1 + .1 N, beta = .1 N for one case."""
    rng = np.random.default_rng(seed)
    n = setting.shape[1]
    x = setting.offset + setting.spread * rng.standard_normal(setting.shape)
    args = (x, 1 + 0.1 * rng.standard_normal(n), 0.1 * rng.standard_normal(n))
    return Subject(*CASES[case][:2], args, seed)


def measure(tool: Tool, setting: Setting, seeds: int, cases: Sequence[str]) -> list[dict[str, Any]]:
    """Run one tool on all cases; return a cell for each, of all seeds together."""
    # The first call of a package compiles and imports.
    tool.check(make_subject(cases[0], SETTINGS[0], FIRST_SEED))
    verdicts = dict.fromkeys(cases, "")
    spent: list[float] = []
    start = time.perf_counter()
    for number in range(seeds):
        # At the pace so far; the first seed is run in any case.
        if number and (time.perf_counter() - start) * (number + 1) / number > setting.budget:
            break
        for case in cases:
            subject = make_subject(case, setting, FIRST_SEED + number)
            begin = time.perf_counter()
            # found, accepted, inconclusive
            verdicts[case] += tool.check(subject)[0]
            spent.append(time.perf_counter() - begin)
    seconds = statistics.median(spent)
    shared = {"tool": tool.name, "setting": setting.name, "seconds": seconds}
    return [{**shared, "case": case, "verdicts": said} for case, said in verdicts.items()]


def run(seeds: int, cases: Sequence[str]) -> dict[str, Any]:
    """Run every tool on every case."""
    tools, missing = load_tools()
    cells = []
    for setting in SETTINGS:
        for tool in tools:
            if tool.large or setting.shape == SETTINGS[0].shape:
                print(f"{setting.name} {tool.name}", file=sys.stderr)
                cells += measure(tool, setting, seeds, cases)
    return {
        "command": "make shootout",
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "processor": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tools": [{"name": t.name, "version": t.version, "criterion": t.criterion} for t in tools],
        "missing": missing,
        "mistakes": [case for case in cases if CASES[case][2]],
        "variants": [case for case in cases if not CASES[case][2]],
        "cells": cells,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write; 1 if a checker of ours called right code wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, prints only")
    quick = parser.parse_args(argv).quick
    found = run(2 if quick else SEEDS, list(CASES))
    if quick:
        for cell in found["cells"]:
            print(f"{cell['setting']:24} {cell['tool']:17} {cell['case']:25} {cell['verdicts']}")
    else:
        RESULTS.write_text(json.dumps(found) + "\n", encoding="utf-8")
        write_page()
    ours = [cell for cell in found["cells"] if cell["tool"].startswith("check_")]
    alarms = [c for c in ours if c["case"] in VARIANTS and "f" in c["verdicts"]]
    for cell in alarms:
        print(f"FALSE ALARM of ours: {cell}", file=sys.stderr)
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
