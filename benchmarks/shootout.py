"""
Thirteen wrong layer norms and five right ones, before our gradient checkers and others: `make shootout`.

Every tool decides by its own step and tolerance. Writes benchmarks/results/shootout.json and the comparison of
docs/explanation/gradient-checking.md; `--render` reads the file instead of measuring. The exit status is 1 if a
checker of ours calls right code wrong. At most ten minutes.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from page import DOCS, digits, keep, origin, origin_line, put, table
from shootout_tools import Subject, Tool, load_tools

# The mistakes belong to the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from mistakes import MISTAKES, VARIANTS, forward

# Seeds that the checkers were not made on.
FIRST_SEED, SEEDS = 100, 20


class Setting(NamedTuple):
    """The shape and the distribution of x, and the seconds that one tool may take."""

    name: str
    shape: tuple[int, int]
    # x is offset + spread N(0, 1).
    offset: float
    spread: float
    # No seed begins that would end later; so all tools together take less than ten minutes.
    budget: float


SETTINGS = (
    Setting("(4, 8)", (4, 8), 0, 1, 30),
    Setting("(4, 8), x = 1e4 + .01 N", (4, 8), 1e4, 1e-2, 30),
    Setting("(32, 768)", (32, 768), 0, 1, 120),
)
# By name: forward and backward, wrong and right.
CASES = {**{name: (forward, m.backward) for name, m in MISTAKES.items()}, **VARIANTS}


class Cell(NamedTuple):
    """One tool in one setting: the median seconds of a check, and by case a letter for each seed."""

    seconds: float
    # The first letters of "found", "accepted" and "inconclusive".
    letters: dict[str, str]


# Cells by the names of settings and of tools.
Cells = dict[str, dict[str, Cell]]


def make_subject(case: str, setting: Setting, seed: int) -> Subject:
    """Draw x ~ offset + spread N, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(seed)
    x = setting.offset + setting.spread * rng.standard_normal(setting.shape)
    gamma, beta = (one + 0.1 * rng.standard_normal(setting.shape[1]) for one in (1, 0))
    return Subject(*CASES[case], (x, gamma, beta), seed)


def check_all(tool: Tool, setting: Setting) -> Cell:
    """Run one tool on all cases."""
    # A call that is not timed: the first call of a package compiles and imports.
    tool.check(make_subject(next(iter(CASES)), SETTINGS[0], FIRST_SEED))
    letters = dict.fromkeys(CASES, "")
    seconds: list[float] = []
    start = time.perf_counter()
    for number in range(SEEDS):
        # The pace so far predicts the end of a seed; the first seed always runs.
        if number and (time.perf_counter() - start) * (number + 1) / number > setting.budget:
            break
        for case in CASES:
            subject = make_subject(case, setting, FIRST_SEED + number)
            begin = time.perf_counter()
            letters[case] += tool.check(subject)[0]
            seconds.append(time.perf_counter() - begin)
    return Cell(statistics.median(seconds), letters)


def measure() -> dict[str, Any]:
    """Run every tool on every case; return the figures of the page."""
    tools, missing = load_tools()
    cells: Cells = {setting.name: {} for setting in SETTINGS}
    for setting in SETTINGS:
        for tool in tools:
            if tool.large or setting.shape == SETTINGS[0].shape:
                print(f"{setting.name} {tool.name}", file=sys.stderr)
                cells[setting.name][tool.name] = check_all(tool, setting)
    return {
        "origin": origin(dict(tool.version.split() for tool in tools)),
        "tools": [{"name": t.name, "version": t.version, "criterion": t.criterion} for t in tools],
        "missing": missing,
        "matrix": matrix(cells),
        "alarms": [
            f"{tool}, {case}, {setting}"
            for setting, by_tool in cells.items()
            for tool, cell in by_tool.items()
            for case in VARIANTS
            if tool.startswith("check_") and "f" in cell.letters[case]
        ],
    }


def matrix(cells: Cells) -> str:
    """Return a table of the mistakes that each tool finds, its false alarms and its times."""
    ends = SETTINGS[0].name, SETTINGS[-1].name
    tools = list(cells[ends[0]])

    def share(setting: str, tool: str, case: str) -> float:
        letters = cells[setting][tool].letters[case]
        return letters.count("f") / len(letters)

    def verdict(case: str, tool: str) -> str:
        shares = [share(setting, tool, case) for setting in ends if tool in cells[setting]]
        return ", ".join({0.0: "no", 1.0: "yes"}.get(part, "part") for part in shares)

    def alarms(setting: str, tool: str) -> str:
        if tool not in cells[setting]:
            return ""
        worst = max(share(setting, tool, case) for case in VARIANTS)
        return f"**{worst:.0%}**" if worst else "0"

    def duration(setting: str, tool: str) -> str:
        cell = cells[setting].get(tool)
        return digits(1e3 * cell.seconds) if cell else ""

    rows = [[case, *(verdict(case, tool) for tool in tools)] for case in MISTAKES]
    rows += [[f"false alarms, {s}", *(alarms(s, tool) for tool in tools)] for s in cells]
    rows += [[f"ms per check, {s}", *(duration(s, tool) for tool in tools)] for s in ends]
    return table(["mistake", *tools], rows)


def page(results: dict[str, Any]) -> str:
    """Return the comparison in docs/explanation/gradient-checking.md."""
    missing = "".join(f" Not run: {name} ({why})." for name, why in results["missing"].items())
    # A bar ends a cell of a table, unless it is escaped.
    tools = [
        [t["name"], t["version"], t["criterion"].replace("|", "\\|")] for t in results["tools"]
    ]
    return f"""{origin_line("make shootout", results["origin"])}{missing}

Each row is a layer norm in float64 with one mistake (`tests/mistakes.py`). Every tool uses
its own step and tolerance. The first word is for x of shape (4, 8), the second for (32, 768) if
the tool can check that shape. *yes*: the tool finds the mistake with every seed; *part*: with some seeds; *no*: with
none. *False alarms*: the share of the seeds with which the tool calls right code wrong. Right code is written in five
ways; the row shows the largest share of the five.

{results["matrix"]}

x ~ N(0, 1) unless the row says otherwise, gamma = 1 + 0.1 N, beta = 0.1 N, eps 1e-5. At most 20
seeds: too few to estimate a detection rate. The 13 mistakes are the checker's own list: for our own
checkers this is a regression test.

### The tools

{table(["tool", "version", "step, and what it calls wrong"], tools)}
"""


def main() -> int:
    """Run or read, and write the page; return 1 if a checker of ours called right code wrong."""
    results = keep("shootout", __doc__, measure)
    put(DOCS / "explanation" / "gradient-checking.md", {"shootout": page(results)})
    print(*(f"FALSE ALARM: {alarm}" for alarm in results["alarms"]), sep="\n", file=sys.stderr)
    return int(bool(results["alarms"]))


if __name__ == "__main__":
    sys.exit(main())
