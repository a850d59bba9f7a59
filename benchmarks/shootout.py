"""
Thirteen wrong layer norms and five right ones, before our gradient checkers and others: `make shootout`.

Every tool decides by its own step and tolerance. Keeps benchmarks/results/shootout.json and writes
the comparison of docs/explanation/gradient-checking.md; with `--render` from the file alone. Exit status 1 if a checker of
ours called right code wrong. At most ten minutes.
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
    """A setting in which all tools are compared, and the seconds that one of them may take."""

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
# By name: forward and backward, wrong and right.
CASES = {**{name: (forward, each.backward) for name, each in MISTAKES.items()}, **VARIANTS}


class Cell(NamedTuple):
    """One tool in one setting: the median seconds of a check; by case, a letter for each seed."""

    seconds: float
    # found, accepted, inconclusive
    said: dict[str, str]


# By the names of settings and of tools.
Found = dict[str, dict[str, Cell]]


def make_subject(case: str, setting: Setting, seed: int) -> Subject:
    """Draw x ~ offset + spread N, gamma = 1 + .1 N, beta = .1 N."""
    rng = np.random.default_rng(seed)
    x = setting.offset + setting.spread * rng.standard_normal(setting.shape)
    gamma, beta = (one + 0.1 * rng.standard_normal(setting.shape[1]) for one in (1, 0))
    return Subject(*CASES[case], (x, gamma, beta), seed)


def check_all(tool: Tool, setting: Setting) -> Cell:
    """Run one tool on all cases."""
    # The first call of a package compiles and imports.
    tool.check(make_subject(next(iter(CASES)), SETTINGS[0], FIRST_SEED))
    said = dict.fromkeys(CASES, "")
    spent: list[float] = []
    start = time.perf_counter()
    for number in range(SEEDS):
        # At the pace so far; the first seed is run in any case.
        if number and (time.perf_counter() - start) * (number + 1) / number > setting.budget:
            break
        for case in CASES:
            subject = make_subject(case, setting, FIRST_SEED + number)
            begin = time.perf_counter()
            said[case] += tool.check(subject)[0]
            spent.append(time.perf_counter() - begin)
    return Cell(statistics.median(spent), said)


def measure() -> dict[str, Any]:
    """Run every tool on every case; return what the page holds."""
    tools, missing = load_tools()
    found: Found = {setting.name: {} for setting in SETTINGS}
    for setting in SETTINGS:
        for tool in tools:
            if tool.large or setting.shape == SETTINGS[0].shape:
                print(f"{setting.name} {tool.name}", file=sys.stderr)
                found[setting.name][tool.name] = check_all(tool, setting)
    return {
        "origin": origin(dict(tool.version.split() for tool in tools)),
        "tools": [{"name": t.name, "version": t.version, "criterion": t.criterion} for t in tools],
        "missing": missing,
        "matrix": matrix(found),
        "alarms": [
            f"{tool}, {case}, {setting}"
            for setting, cells in found.items()
            for tool, cell in cells.items()
            for case in VARIANTS
            if tool.startswith("check_") and "f" in cell.said[case]
        ],
    }


def matrix(found: Found) -> str:
    """Tell which tool finds which mistake, which calls right code wrong, and how long each takes."""
    ends = SETTINGS[0].name, SETTINGS[-1].name
    tools = list(found[ends[0]])

    def share(setting: str, tool: str, case: str) -> float:
        said = found[setting][tool].said[case]
        return said.count("f") / len(said)

    def verdict(case: str, tool: str) -> str:
        shares = [share(setting, tool, case) for setting in ends if tool in found[setting]]
        return ", ".join({0.0: "no", 1.0: "yes"}.get(each, "part") for each in shares)

    def alarms(setting: str, tool: str) -> str:
        if tool not in found[setting]:
            return ""
        worst = max(share(setting, tool, case) for case in VARIANTS)
        return f"**{worst:.0%}**" if worst else "0"

    def duration(setting: str, tool: str) -> str:
        cell = found[setting].get(tool)
        return digits(1e3 * cell.seconds) if cell else ""

    rows = [[case, *(verdict(case, tool) for tool in tools)] for case in MISTAKES]
    rows += [[f"false alarms, {s}", *(alarms(s, tool) for tool in tools)] for s in found]
    rows += [[f"ms per check, {s}", *(duration(s, tool) for tool in tools)] for s in ends]
    return table(["mistake", *tools], rows)


def page(found: dict[str, Any]) -> str:
    """Return the comparison in docs/explanation/gradient-checking.md."""
    missing = "".join(f" Not run: {name} ({why})." for name, why in found["missing"].items())
    # A bar within a cell would end it.
    tools = [[t["name"], t["version"], t["criterion"].replace("|", "\\|")] for t in found["tools"]]
    return f"""{origin_line("make shootout", found["origin"])}{missing}

Each row is a layer norm in float64 with one mistake (`tests/mistakes.py`). Every tool uses
its own step and tolerance. The first word is for x of shape (4, 8), the second for (32, 768) if
the tool can check that shape. *yes*: the tool finds the mistake with every seed; *part*: with some seeds; *no*: with
none. *False alarms*: right code, written in five ways, is called wrong with this share of the seeds, in the worst of the
five.

{found["matrix"]}

x ~ N(0, 1) unless the row says otherwise, gamma = 1 + 0.1 N, beta = 0.1 N, eps 1e-5. At most 20
seeds: too few to estimate a detection rate. The 13 mistakes are the checker's own list: for our own
checkers this is a regression test.

### The tools

{table(["tool", "version", "step, and what it calls wrong"], tools)}
"""


def main() -> int:
    """Run or read, write; 1 if a checker of ours called right code wrong."""
    found = keep("shootout", __doc__, measure)
    put(DOCS / "explanation" / "gradient-checking.md", {"shootout": page(found)})
    print(*(f"FALSE ALARM: {alarm}" for alarm in found["alarms"]), sep="\n", file=sys.stderr)
    return int(bool(found["alarms"]))


if __name__ == "__main__":
    sys.exit(main())
