"""
Worst error in ulp, per input family and dtype: `make accuracy`.

Runs every finite family of `stablenorm.testing.families` through the package and through the
plain two-pass formula, judges both by the exact oracle, and writes docs/evidence/accuracy.md and the
table between the accuracy markers of README.md. Exit status 1 if an element breaks the contract;
the tables are then written all the same, and say so.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from machine import processor
from rich.progress import track

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, Case, make_case
from stablenorm.testing.plain import plain_backward, plain_forward

ROOT = Path(__file__).parent.parent
DTYPES = ("float16", "bfloat16", "float32", "float64")
OUTPUTS = ("y", "dx", "dgamma", "dbeta")
N, ROWS = 768, 4
BEGIN, END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
# The rows of README's table: one for each way of going wrong, and the output that shows it.
TELLING = (
    ("F01", "y"),
    ("F04", "y"),
    ("F07", "y"),
    ("F09", "y"),
    ("F13", "y"),
    ("F16", "y"),
    ("F38", "y"),
    ("F32", "y"),
    ("F19", "dx"),
    ("F27", "dx"),
    ("F28b", "dx"),
    ("F35", "dgamma"),
)


class Result(NamedTuple):
    """One family in one dtype: the contract of ours, and the worst ulp of both."""

    ours: dict[str, Any]
    # Of ours, the worst of the elements within the ulp limit: those that no cancellation excuses.
    within: dict[str, float]
    plain: dict[str, float]


Results = dict[tuple[str, str], Result]


def measure(case: Case) -> Result:
    """Judge both implementations on one case."""
    exact = exact_layer_norm(*case)
    y, cache = layer_norm_forward(case.x, case.gamma, case.beta, case.eps)
    arrays = dict(zip(OUTPUTS, (y, *layer_norm_backward(case.dy, cache)), strict=True))
    ours = exact.check_contract(**arrays)
    within = {
        name: float(np.max(errors, where=errors <= ours[name].limit_ulp, initial=0))
        for name, errors in exact.ulp_errors(**arrays).items()
    }
    y, plain_cache = plain_forward(case.x, case.gamma, case.beta, case.eps)
    plain = exact.ulp_errors(
        **dict(zip(OUTPUTS, (y, *plain_backward(case.dy, plain_cache)), strict=True))
    )
    return Result(ours, within, {name: float(np.max(errors)) for name, errors in plain.items()})


def measure_all() -> Results:
    """Judge every family in every dtype for which it exists."""
    pairs = [
        (family, dtype)
        for family in FAMILIES.values()
        for dtype in DTYPES
        if family.finite and family.applies(type_of(dtype), N)
    ]
    return {
        (family.name, dtype): measure(make_case(family.name, type_of(dtype), N, ROWS))
        for family, dtype in track(pairs, "worst ulp of families")
    }


def type_of(name: str) -> Any:
    """Return the dtype of that name; NumPy itself does not know bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def in_ulp(ulp: float) -> str:
    """Print an error that may be anything: two digits, or its order of magnitude."""
    if not np.isfinite(ulp):
        return "NaN, inf"
    if ulp < 1:
        return f"{ulp:.3f}"
    if ulp < 1e4:
        return f"{float(f'{ulp:.2g}'):g}"
    return f"{ulp:.0e}".replace("e+0", "e").replace("e+", "e")


def cell(results: list[Result], output: str) -> str:
    """Ours: the worst within the ulp limit, then the others; after a semicolon the plain one."""
    if not results:
        return "-"
    contracts = [result.ours[output] for result in results]
    text = in_ulp(max(result.within[output] for result in results))
    if count := sum(contract.second_term for contract in contracts):
        worst = max(contract.worst_ulp for contract in contracts)
        # An infinite error does not pass; one that passes is finite, but not in units that small.
        kept = np.isinf(worst) and all(contract.passed for contract in contracts)
        text += f" ({count}: {'> 1e308' if kept else in_ulp(worst)})"
    if not all(contract.passed for contract in contracts):
        text += " **FAILS**"
    return f"{text}; {in_ulp(max(result.plain[output] for result in results))}"


def table(head: str, rows: Iterable[tuple[str, str, tuple[str, ...]]], results: Results) -> str:
    """One row per (words, output, names of families): ours and the plain formula, by dtype."""
    lines = [f"| {head} | " + " | ".join(DTYPES) + " |", "|---" * (1 + len(DTYPES)) + "|"]
    for words, output, names in rows:
        cells = [
            cell([results[name, dtype] for name in names if (name, dtype) in results], output)
            for dtype in DTYPES
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(results: Results) -> str:
    """Worst over all families, per output and dtype."""
    return table("worst of all families", worst_rows("{}"), results)


def worst_rows(words: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return a row of `table` for each output, over all families."""
    names = tuple(name for name, family in FAMILIES.items() if family.finite)
    return [(words.format(output), output, names) for output in OUTPUTS]


def misrounded(results: Results) -> str:
    """How many elements are not the correctly rounded ones, and what those were allowed."""
    sizes = {"y": ROWS * N, "dx": ROWS * N, "dgamma": N, "dbeta": N}
    lines = [
        "| | " + " | ".join(DTYPES) + " |",
        "|---" * (1 + len(DTYPES)) + "|",
    ]
    of = {d: [r.ours for (_, kind), r in results.items() if kind == d] for d in DTYPES}
    wrong = {
        d: sum(round(ours[o].misrounded * size) for ours in of[d] for o, size in sizes.items())
        for d in DTYPES
    }
    total = {d: len(of[d]) * sum(sizes.values()) for d in DTYPES}
    excess = {d: max(ours[o].worst_excess for ours in of[d] for o in OUTPUTS) for d in DTYPES}
    for words, values in (
        ("elements", [str(total[d]) for d in DTYPES]),
        ("not correctly rounded", [str(wrong[d]) for d in DTYPES]),
        ("their fraction", [f"{wrong[d] / total[d]:.1g}" for d in DTYPES]),
        ("worst use of the second term, of 1", [f"{excess[d]:.2g}" for d in DTYPES]),
    ):
        lines.append(f"| {words} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def origin() -> str:
    """Where and when the numbers were made."""
    return (
        f"Generated by `make accuracy` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"ml_dtypes {ml_dtypes.__version__}; n = {N}, {ROWS} rows."
    )


LEGEND = """Each cell: ours; the plain two-pass formula in float32 (float64 for float64 data).
"0.500 (3: 51)": of the elements within the ulp limit the worst is off by 0.500; three more cancel
so completely that they needed, and kept, the second term of the contract, and the worst of those is
off by 51. Where the exact value is 0, or nearly, an ulp is the smallest subnormal number."""


def page(results: Results) -> str:
    """docs/evidence/accuracy.md."""
    families = [family for family in FAMILIES.values() if family.finite]
    sections = "\n\n".join(
        f"## {output}\n\n"
        + table("family", [(f"{f.name} {f.title}", output, (f.name,)) for f in families], results)
        for output in OUTPUTS
    )
    return f"""# Accuracy

{origin()}

Errors in ulp of the output's dtype against the exact result for the floats given, computed in
integers.

{LEGEND}

The gate: 0.501 ulp (float64: 0.75 for dx, 0.51 for dgamma and dbeta) plus c times the magnitudes
that the element is made of, c = 2^-48 for y and dx and 2^-44 for dgamma and dbeta (float64: 2^-98
and 2^-94). F36, NaN and infinity, has no exact result; it is tested for staying in its row.

{summary(results)}

{misrounded(results)}

{sections}
"""


def readme_table(results: Results) -> str:
    """The part between the markers of README.md."""
    telling = [(f"{output}, {FAMILIES[name].title}", output, (name,)) for name, output in TELLING]
    return f"""{BEGIN}
{table("output, and family of inputs", [*worst_rows("**{}, worst of all**"), *telling], results)}

{LEGEND}

{origin()}
{END}"""


def write(path: Path, text: str) -> None:
    """Write beside, then rename: an interrupted run leaves the old page."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def around(readme: Path) -> tuple[str, str]:
    """Return what stands before and after the table of README.md."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        msg = (
            f"{readme.name} must hold {BEGIN} and below it {END}, got no {END if begin else BEGIN}"
        )
        raise ValueError(msg)
    return before, after


def main() -> int:
    """Measure, write, and report what failed."""
    readme = ROOT / "README.md"
    try:
        around(readme)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results = measure_all()
    # Read again: it may have been edited meanwhile.
    before, after = around(readme)
    write(readme, before + readme_table(results) + after)
    write(ROOT / "docs" / "evidence" / "accuracy.md", page(results))
    print(summary(results))
    failed = [
        f"{family} {dtype} {output}: {result}"
        for (family, dtype), both in results.items()
        for output, result in both.ours.items()
        if not result.passed
    ]
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
