"""
The cost of each way of going wrong, in known implementations: `make stability`.

Measures the experiments of stability_cases.py in the environment of the peers. Writes
benchmarks/results/stability.json, the tables of docs/explanation/stability.md and the digits of
README.md; `--render` reads the file instead of measuring.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from page import DOCS, ROOT, keep, origin, origin_line, put, table
from peers import LOADERS, OURS, load_peers
from stability_cases import run, tables

PAGE = DOCS / "explanation" / "stability.md"
# The table whose cells are shares of elements, not errors, and the table that has more columns than subjects,
# so the page shows it transposed.
SHARES, TURNED = "narrow", "published"
# Lines of README: the situation in words, then its table and column.
SITUATIONS = (
    ("y: mean 0, std 1", "offset", "N"),
    ("y: mean 100, std 1", "offset", "10^2 + N"),
    ("y: mean 10 000, std 1", "offset", "10^4 + N"),
    ("y: a constant row, eps 1e-12", "constant", "1234.567, eps 1e-12"),
    ("y: values near 1e20", "range", "1e20"),
    ("dx: x and dy of mean 1000", "cotangent", "x and dy 1000 + N"),
    ("dbeta: 1 000 000 rows", "rows", "1 000 000 rows"),
)
COLUMNS = {
    "plain NumPy": "plain NumPy",
    "PyTorch": "PyTorch",
    "jax.nn.standardize": "JAX",
    "ONNX Runtime": "ONNX Runtime",
    "stablenorm": "**stablenorm**",
}

Cells = dict[str, dict[str, float]]


def measure() -> dict[str, Any]:
    """Return the cells of all tables."""
    peers, missing = load_peers(LOADERS)
    cells: dict[str, Cells] = {}
    for name, columns, cell, subjects, simulated in tables():
        print(name, file=sys.stderr)
        wanted = [peer for peer in peers if subjects is None or peer.name in subjects]
        runs = {peer.name: partial(run, peer) for peer in wanted} | simulated
        cells[name] = {
            subject: {column: cell(result(at), at) for column, at in columns.items()}
            for subject, result in runs.items()
        }
    versions = {peer.name: peer.version for peer in peers if peer.name != OURS}
    return {"origin": origin(versions) | {"missing": missing}, "tables": cells}


def figure(value: float, name: str) -> str:
    """Write one cell of the table `name`."""
    if name == SHARES:
        return "0" if value == 0 else f"{100 * value:.2g} %"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf"
    if value == 0:
        return "0"
    if 1e-2 <= value < 1e4:
        return f"{float(f'{value:.2g}'):g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits}e{int(power)}"


def stability_table(name: str, rows: Cells) -> str:
    """Return one table of the page."""
    columns = list(next(iter(rows.values())))
    if name == TURNED:
        rows = {column: {subject: rows[subject][column] for subject in rows} for column in columns}
        columns = list(next(iter(rows.values())))
    lines = [[title, *(figure(cells[c], name) for c in columns)] for title, cells in rows.items()]
    # Powers as formulas: "10^4 + N".
    heads = [re.sub(r"10\^(\d)", r"$10^\1$", column) for column in columns]
    return table(["", *heads], lines)


def correct_digits(error: float) -> str:
    """Return the number of correct decimal digits, for float32 at most 7."""
    if error == 0:
        return "exact"
    # NaN has 0 digits, and so have results that are worse than zeros.
    return str(max(0, min(7, math.floor(-math.log10(error))))) if error < 1 else "0"


def readme_block(results: Mapping[str, Any]) -> str:
    """Return README's table: correct digits, situations down, libraries across."""
    lines = []
    for words, name, column in SITUATIONS:
        rows = results["tables"][name]
        cells = [
            correct_digits(rows[peer][column]) if peer in rows else "–"  # noqa: RUF001
            for peer in COLUMNS
        ]
        bold = [f"**{c}**" if c == "0" else c for c in cells[:-1]]
        lines.append([words, *bold, f"**{cells[-1]}**"])
    versions = results["origin"]["versions"]
    return (
        "Correct decimal digits of the worst element, relative to the largest; float32 holds 7:\n\n"
        + table(["float32", *COLUMNS.values()], lines)
        + f"\n\nNumPy {versions['NumPy']}, PyTorch {versions.get('PyTorch')}, JAX "
        f"{versions.get('jax.nn.standardize')} (`jax.nn.standardize`), ONNX Runtime "
        f"{versions.get('ONNX Runtime')} (which has no backward); {results['origin']['date']}."
    )


def parts(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables and the line of origin, by the names of their markers in the page."""
    line, missing = origin_line("make stability", results["origin"]), results["origin"]["missing"]
    if missing:
        line += f" Not measured, because the import failed: {', '.join(missing)}."
    tables = {name: stability_table(name, rows) for name, rows in results["tables"].items()}
    return tables | {"origin": line}


def main() -> None:
    """Measure or read, and write the page and README's table."""
    results = keep("stability", __doc__, measure)
    put(PAGE, parts(results))
    put(ROOT / "README.md", {"accuracy": readme_block(results)})


if __name__ == "__main__":
    main()
