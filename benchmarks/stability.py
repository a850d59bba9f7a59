"""
The cost of each way of going wrong, in known implementations: `make stability`.

Measures the experiments of stability_cases.py in the environment of the peers, keeps the figures in
benchmarks/results/stability.json, and writes the tables of docs/explanation/stability.md and the
digits of README.md between their markers. With `--render` nothing is measured: both are written
again from the figures kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from page import DOCS, ROOT, keep, origin, origin_line, put, table
from peers import LOADERS, OURS, load_peers
from stability_cases import run, tables

PAGE = DOCS / "explanation" / "stability.md"
# A table whose cells are shares of all elements, and no errors; and one that is turned, since it has
# more columns than subjects.
SHARES, TURNED = "narrow", "published"
# README: the situation in words, table and column.
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
    """Fill all tables."""
    peers, missing = load_peers(LOADERS)
    found: dict[str, Cells] = {}
    for name, columns, cell, subjects, simulated in tables():
        print(name, file=sys.stderr)
        wanted = [each for each in peers if subjects is None or each.name in subjects]
        runs = {each.name: partial(run, each) for each in wanted} | simulated
        found[name] = {
            who: {words: cell(result(at), at) for words, at in columns.items()}
            for who, result in runs.items()
        }
    versions = {peer.name: peer.version for peer in peers if peer.name != OURS}
    return {"origin": origin(versions) | {"missing": missing}, "tables": found}


def figure(value: float, name: str) -> str:
    """Print one figure."""
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
    if name == TURNED:
        words = list(next(iter(rows.values())))
        rows = {word: {who: rows[who][word] for who in rows} for word in words}
    columns = list(next(iter(rows.values())))
    lines = [[who, *(figure(cells[c], name) for c in columns)] for who, cells in rows.items()]
    return table(["", *columns], lines)


def correct_digits(error: float) -> str:
    """Return how many decimal digits are right; float32 holds 7."""
    if error == 0:
        return "exact"
    # NaN has none, and nor has what is worse than zeros.
    return str(max(0, min(7, math.floor(-math.log10(error))))) if error < 1 else "0"


def readme_block(results: Mapping[str, Any]) -> str:
    """Return README's table: correct digits, situations down, libraries across."""
    lines = []
    for words, name, column in SITUATIONS:
        rows = results["tables"][name]
        cells = [
            correct_digits(rows[who][column]) if who in rows else "–"  # noqa: RUF001
            for who in COLUMNS
        ]
        bold = [f"**{c}**" if c == "0" else c for c in cells[:-1]]
        lines.append([words, *bold, f"**{cells[-1]}**"])
    made = results["origin"]["versions"]
    return (
        "Correct decimal digits of the worst element, relative to the largest; float32 holds 7:\n\n"
        + table(["float32", *COLUMNS.values()], lines)
        + f"\n\nNumPy {made['NumPy']}, PyTorch {made.get('PyTorch')}, JAX "
        f"{made.get('jax.nn.standardize')} (`jax.nn.standardize`), ONNX Runtime "
        f"{made.get('ONNX Runtime')} (which has no backward); {results['origin']['date']}."
    )


def parts(results: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands between the markers of the page."""
    made = results["origin"]
    text = origin_line("make stability", made)
    if made["missing"]:
        text += f" Not measured, since they could not be imported: {', '.join(made['missing'])}."
    every = {name: stability_table(name, rows) for name, rows in results["tables"].items()}
    return every | {"origin": text}


def main() -> None:
    """Measure or read, and write the pages."""
    results = keep("stability", __doc__, measure)
    put(PAGE, parts(results))
    put(ROOT / "README.md", {"accuracy": readme_block(results)})


if __name__ == "__main__":
    main()
