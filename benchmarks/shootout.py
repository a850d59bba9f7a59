"""
Thirteen wrong layer norms and five right ones, before our gradient checkers and others: `make shootout`.

Every tool decides by its own step and tolerance. Then `check_layer_norm` alone, on right code at
offsets that leave float32 few digits. Keeps benchmarks/results/shootout.json and writes
docs/evidence/gradient-checkers.md; with `--render` from the file alone. Exit status 1 if a checker of
ours called right code wrong. Ten minutes.
"""

from __future__ import annotations

import collections
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from page import DOCS, digits, keep, origin, origin_line, table, write
from shootout_tools import Subject, Tool, load_tools

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.check import check_layer_norm
from stablenorm.testing.mistakes import MISTAKES, VARIANTS, forward

# Not the seeds that the checkers were made on.
FIRST_SEED, SEEDS = 100, 20
OFFSETS = (0.0, 1.0, 1e2, 1e4, 1e6)


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


def make_args(
    shape: tuple[int, int], offset: float, spread: float, seed: int, dtype: Any = np.float64
) -> Any:
    """Draw x ~ offset + spread N, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(seed)
    x = offset + spread * rng.standard_normal(shape)
    args = (x, *(one + 0.1 * rng.standard_normal(shape[1]) for one in (1, 0)))
    return tuple(a.astype(dtype) for a in args)


def make_subject(case: str, setting: Setting, seed: int) -> Subject:
    """Draw the arguments of one case."""
    args = make_args(setting.shape, setting.offset, setting.spread, seed)
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


def measure_offsets(seeds: int) -> dict[str, dict[str, dict[str, int]]]:
    """Count what `check_layer_norm` says of right code, by dtype and shape, and by offset."""
    ours: Any = layer_norm_forward, layer_norm_backward
    right = [*VARIANTS.values(), ours]
    found: dict[str, dict[str, dict[str, int]]] = {}
    for dtype in ("float64", "float32"):
        # A check of the larger shape takes five times as long.
        for shape, count in (((4, 8), seeds), ((32, 768), max(1, seeds // 5))):
            row = found.setdefault(f"{dtype}, {shape}", {})
            for offset in OFFSETS:
                said = [
                    check_layer_norm(*code, *make_args(shape, offset, 1, seed, dtype), rng=seed)
                    for code in right
                    for seed in range(FIRST_SEED, FIRST_SEED + count)
                ]
                row[f"{offset:g}"] = collections.Counter(report.verdict for report in said)
    return found


def run(seeds: int, cases: Sequence[str]) -> dict[str, Any]:
    """Run every tool on every case, and ours on the offsets."""
    tools, missing = load_tools()
    cells = []
    for setting in SETTINGS:
        for tool in tools:
            if tool.large or setting.shape == SETTINGS[0].shape:
                print(f"{setting.name} {tool.name}", file=sys.stderr)
                cells += measure(tool, setting, seeds, cases)
    packages = dict(tool.version.split() for tool in tools if tool.version)
    return {
        "origin": origin(packages),
        "tools": [{"name": t.name, "version": t.version, "criterion": t.criterion} for t in tools],
        "missing": missing,
        "mistakes": [case for case in cases if CASES[case][2]],
        "variants": [case for case in cases if not CASES[case][2]],
        "cells": cells,
        "offsets": measure_offsets(max(1, seeds // 2)),
    }


def matrix(found: dict[str, Any]) -> str:
    """Who finds which mistake, who calls right code wrong, and how long it takes."""
    cells = {(c["tool"], c["case"], c["setting"]): c for c in found["cells"]}
    settings = list(dict.fromkeys(c["setting"] for c in found["cells"]))
    ends = list(dict.fromkeys((settings[0], settings[-1])))
    tools = [t["name"] for t in found["tools"]]

    def shares(tool: str, cases: Sequence[str], setting: str) -> list[float]:
        verdicts = [cells.get((tool, case, setting), {}).get("verdicts") for case in cases]
        return [said.count("f") / len(said) for said in verdicts if said]

    def mark(tool: str, case: str) -> str:
        parts = [share for setting in ends for share in shares(tool, [case], setting)]
        return ", ".join({0.0: "no", 1.0: "yes"}.get(share, "part") for share in parts)

    def alarms(tool: str, setting: str) -> str:
        worst = max(shares(tool, found["variants"], setting), default=None)
        return "" if worst is None else f"**{worst:.0%}**" if worst else "0"

    def duration(tool: str, setting: str) -> str:
        spent = [c["seconds"] for (t, _, s), c in cells.items() if (t, s) == (tool, setting)]
        return digits(1e3 * statistics.median(spent)) if spent else ""

    rows = [[case, *(mark(tool, case) for tool in tools)] for case in found["mistakes"]]
    rows += [[f"false alarms, {s}", *(alarms(tool, s) for tool in tools)] for s in settings]
    rows += [[f"ms per check, {s}", *(duration(tool, s) for tool in tools)] for s in ends]
    return table(["mistake", *tools], rows)


def offsets_table(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """How often right code passes, by offset."""
    words = {"INCONCLUSIVE": "{} inconclusive", "FAIL": "**{} FAIL**"}
    rows = []
    for row, counts in found.items():
        cells = []
        for said in counts.values():
            others = [text.format(said[word]) for word, text in words.items() if said.get(word)]
            cells.append(", ".join([f"{said.get('PASS', 0)} of {sum(said.values())}", *others]))
        rows.append([row, *cells])
    return table(["right code", *next(iter(found.values()))], rows)


def page(found: dict[str, Any]) -> str:
    """Return docs/evidence/gradient-checkers.md."""
    missing = "".join(f" Not run: {name} ({why})." for name, why in found["missing"].items())
    # A bar within a cell would end it.
    tools = [
        [t["name"], t["version"] or "rule, written anew", t["criterion"].replace("|", "\\|")]
        for t in found["tools"]
    ]
    return f"""# Gradient checkers compared

{origin_line("make shootout", found["origin"])}{missing}

Each row is a layer norm in float64 with one mistake (`stablenorm.testing.mistakes`). Every tool uses
its own step and tolerance. The first word is for x of shape (4, 8), the second for (32, 768), where
the tool can do it. *yes*: found with every seed; *part*: with some; *no*: with none. *False alarms*:
the largest share of seeds with which right code was called wrong, of five ways to write it.

{found["matrix"]}

x ~ N(0, 1) unless the row says otherwise, gamma = 1 + 0.1 N, beta = 0.1 N, eps 1e-5. At most 20
seeds: too few to estimate a detection rate. The 13 mistakes are the checker's own list: for our own
checkers this is a regression test.

## Right code with few digits left

How often `check_layer_norm` says PASS of right code, written in six ways, by the offset of x:

{found["offsets"]}

INCONCLUSIVE: an offset of 1e6 leaves float32 no digits to judge by.

## The tools

"Rule, written anew" is the rule of a package or of a course, written again in NumPy.

{table(["tool", "version", "step, and what it calls wrong"], tools)}
"""


def main() -> int:
    """Run or read, write; 1 if a checker of ours called right code wrong."""
    found = keep("shootout", __doc__ or "", lambda: kept(run(SEEDS, list(CASES))))
    write(DOCS / "evidence" / "gradient-checkers.md", page(found))
    alarms = found["alarms"]
    print(*(f"FALSE ALARM of ours: {alarm}" for alarm in alarms), sep="\n", file=sys.stderr)
    return int(bool(alarms))


def kept(found: dict[str, Any]) -> dict[str, Any]:
    """Return of what was found the tables of the page."""
    same = {name: found[name] for name in ("origin", "tools", "missing")}
    of_offsets = offsets_table(found["offsets"])
    return {**same, "matrix": matrix(found), "offsets": of_offsets, "alarms": false_alarms(found)}


def false_alarms(found: dict[str, Any]) -> list[Any]:
    """Return where a checker of ours called right code wrong."""
    alarms: list[Any] = [
        cell
        for cell in found["cells"]
        if cell["tool"].startswith("check_")
        and cell["case"] in VARIANTS
        and "f" in cell["verdicts"]
    ]
    return alarms + [c for row in found["offsets"].values() for c in row.values() if c.get("FAIL")]


if __name__ == "__main__":
    sys.exit(main())
