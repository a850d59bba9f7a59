"""
Worst error in ulp, per input family and dtype: `make accuracy`.

Runs every finite family of `stablenorm.analysis.families` through the package and through the
plain two-pass formula, judges both by the exact oracle, and writes docs/accuracy.md and the
table between the accuracy markers of README.md. Exit status 1 if an element breaks the contract;
the tables are then written all the same, and say so.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from machine import processor
from rich.progress import track

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.analysis.families import FAMILIES, Case, Family, make_case
from stablenorm.analysis.plain import plain_backward, plain_forward
from stablenorm.oracle import exact_layer_norm

ROOT = Path(__file__).parent.parent
DTYPES = ("float16", "bfloat16", "float32", "float64")
OUTPUTS = ("y", "dx", "dgamma", "dbeta")
N, ROWS = 768, 4
BEGIN, END = "<!-- accuracy:begin -->", "<!-- accuracy:end -->"
# The rows of README's table: one for each way of going wrong.
TELLING = ("F01", "F04", "F07", "F09", "F13", "F16", "F19", "F28")


class Result(NamedTuple):
    """One family in one dtype: the contract of ours, and the worst ulp of both."""

    ours: dict[str, Any]
    # Of ours, the worst of the elements within the ulp limit: those that no cancellation excuses.
    within: dict[str, float]
    plain: dict[str, float]


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


def measure_all() -> dict[tuple[str, str], Result]:
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


def ours_cell(result: Result, output: str) -> str:
    """Worst ulp among the elements within the ulp limit; the others are counted."""
    contract = result.ours[output]
    count = f" +{contract.second_term}" if contract.second_term else ""
    return f"{result.within[output]:.3f}{count}" + ("" if contract.passed else " **FAILS**")


def plain_cell(ulp: float) -> str:
    """Worst ulp of the plain formula."""
    if not np.isfinite(ulp):
        return "NaN, inf"
    return f"{ulp:.2g}" if ulp < 1e4 else f"{ulp:.0e}".replace("e+0", "e").replace("e+", "e")


def table(results: dict[tuple[str, str], Result], families: list[Family], output: str) -> str:
    """One row per family: ours and the plain formula, for each dtype."""
    lines = [
        "| family | " + " | ".join(DTYPES) + " |",
        "|---" * (1 + len(DTYPES)) + "|",
    ]
    for family in families:
        cells = []
        for dtype in DTYPES:
            result = results.get((family.name, dtype))
            cells.append(
                "-"
                if result is None
                else f"{ours_cell(result, output)}; {plain_cell(result.plain[output])}"
            )
        lines.append(f"| {family.name} {family.title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(results: dict[tuple[str, str], Result]) -> str:
    """Worst over all families, per output and dtype."""
    lines = [
        "| worst of all families | " + " | ".join(DTYPES) + " |",
        "|---" * (1 + len(DTYPES)) + "|",
    ]
    for output in OUTPUTS:
        cells = []
        for dtype in DTYPES:
            of_dtype = [r for (_, d), r in results.items() if d == dtype]
            parts = [r.ours[output] for r in of_dtype]
            worst = max(r.within[output] for r in of_dtype)
            second = sum(part.second_term for part in parts)
            failed = sum(not part.passed for part in parts)
            cells.append(
                f"{worst:.4f}" + (f" +{second}" if second else "") + (" **FAILS**" * bool(failed))
            )
        lines.append(f"| {output} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def origin() -> str:
    """Where and when the numbers were made."""
    return (
        f"Generated by `make accuracy` on {dt.datetime.now(dt.UTC):%Y-%m-%d}: {processor()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}, "
        f"ml_dtypes {ml_dtypes.__version__}; n = {N}, {ROWS} rows."
    )


def page(results: dict[tuple[str, str], Result]) -> str:
    """docs/accuracy.md."""
    families = [family for family in FAMILIES.values() if family.finite]
    sections = "\n\n".join(
        f"## {output}\n\n{table(results, families, output)}" for output in OUTPUTS
    )
    wrong = {
        dtype: sum(
            r.ours[o].misrounded * np.prod(s)
            for (_, d), r in results.items()
            if d == dtype
            for o, s in (("y", (ROWS, N)), ("dx", (ROWS, N)), ("dgamma", (N,)), ("dbeta", (N,)))
        )
        for dtype in DTYPES
    }
    counts = ", ".join(f"{dtype} {round(count)}" for dtype, count in wrong.items())
    return f"""# Accuracy

{origin()}

Errors in ulp of the output's dtype against the exact result for the floats given, computed in
integers. Each cell: ours; the plain two-pass formula in float32 (float64 for float64 data).

The gate: 0.501 ulp (float64: 0.75 for dx, 0.51 for dgamma and dbeta) plus c times the magnitudes
that the element is made of, c = 2^-48 for y and dx and 2^-44 for dgamma and dbeta (float64: 2^-98
and 2^-94). "0.499 +3" means: 0.499 is the worst of the elements within the ulp limit, and three
elements cancel so completely that they needed, and kept, the second term. F36, NaN and infinity,
has no exact result; it is tested for staying in its row.

{summary(results)}

Elements that are not the correctly rounded ones, of all families and outputs: {counts}.

{sections}
"""


def readme_table(results: dict[tuple[str, str], Result]) -> str:
    """The part between the markers of README.md."""
    telling = [FAMILIES[name] for name in TELLING]
    return f"""{BEGIN}
{summary(results)}

y, ours; the plain two-pass formula:

{table(results, telling, "y")}

{origin()} "+k": k elements that cancel almost completely, judged by the second term of the
contract.
{END}"""


def write(path: Path, text: str) -> None:
    """Write beside, then rename: an interrupted run leaves the old page."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main() -> int:
    """Measure, write, and report what failed."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"README.md must hold the lines {BEGIN} and {END}, got neither", file=sys.stderr)
        return 2
    results = measure_all()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    write(readme, before + readme_table(results) + after)
    write(ROOT / "docs" / "accuracy.md", page(results))
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
