"""
What each way of going wrong costs, in known implementations: the tables of one page, measured.

Run in the environment of the peers: `.venv-bench/bin/python benchmarks/stability.py` measures, keeps
the figures in benchmarks/results/stability.json, and writes the tables of
docs/explanation/stability.md between their markers. With `--render` nothing is measured: the page
is written again from the figures kept.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import processor

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "stability.md"
RESULTS = ROOT / "benchmarks" / "results" / "stability.json"
# Tables whose cells are counts, or shares of all elements, and no errors.
COUNTS, SHARES = ("contained",), ("narrow",)
# One subject is a setting of another; it belongs to one table alone.
ONLY = {"PyTorch, set_flush_denormal": ("subnormal",)}
# Of the published rows the table is turned: they are more than the subjects.
TURNED = ("published",)

Cells = dict[str, dict[str, float]]


def measure() -> dict[str, Any]:
    """Fill all tables."""
    # The libraries are loaded here: `--render` needs none of them.
    from stability_cases import tables  # noqa: PLC0415
    from stability_subjects import load_subjects  # noqa: PLC0415

    subjects, missing = load_subjects()
    found: dict[str, Cells] = {}
    for table in tables():
        print(table.name, file=sys.stderr)
        rows: Cells = {}
        for subject in subjects:
            if table.name not in ONLY.get(subject.name, (table.name,)):
                continue
            if table.subjects is None or subject.name in table.subjects:
                rows[subject.name] = {
                    words: table.cell(subject, at) for words, at in table.columns.items()
                }
        for name, simulate in table.simulated.items():
            rows[name] = {words: simulate(at) for words, at in table.columns.items()}
        found[table.name] = rows
    origin = {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "processor": processor(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "peers": {s.name: s.version for s in subjects if s.name not in ONLY},
        "missing": missing,
    }
    return {"origin": origin, "tables": found}


def cell(value: float, name: str) -> str:
    """Print one figure."""
    if name in COUNTS:
        return f"{value:.0f}"
    if name in SHARES:
        return "0" if value == 0 else f"{100 * value:.2g} %"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf"
    if value == 0:
        return "0"
    if 1e-2 <= value < 1e4:
        return f"{float(f'{value:.2g}'):g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def table_lines(name: str, rows: Cells) -> list[str]:
    """Return one table in Markdown."""
    columns = list(next(iter(rows.values())))
    if name in TURNED:
        rows = {words: {who: rows[who][words] for who in rows} for words in columns}
        columns = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for words, cells in rows.items():
        shown = [cell(cells[column], name) for column in columns]
        lines.append(f"| {words} | " + " | ".join(shown) + " |")
    return lines


def origin_line(origin: dict[str, Any]) -> str:
    """Say where the figures come from."""
    peers = ", ".join(f"{name} {version}" for name, version in origin["peers"].items())
    text = (
        f"Measured by `benchmarks/stability.py` on {origin['date']}: {origin['processor']}, "
        f"Python {origin['python']}; {peers}."
    )
    if origin["missing"]:
        text += f" Not measured, since they could not be imported: {', '.join(origin['missing'])}."
    return text


def fill(page: str, results: dict[str, Any]) -> str:
    """Return the page with every table between its markers."""
    parts = {name: table_lines(name, rows) for name, rows in results["tables"].items()}
    parts["origin"] = [origin_line(results["origin"])]
    for name, lines in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            msg = f"{PAGE.name} must hold {begin} and {end} once each"
            raise ValueError(msg)
        before, rest = page.split(begin)
        page = before + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    return page


def main() -> int:
    """Measure or read, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--render", action="store_true", help="measure nothing")
    if parser.parse_args().render:
        results = json.loads(RESULTS.read_text("utf8"))
    else:
        results = measure()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    PAGE.write_text(fill(PAGE.read_text("utf8"), results), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
