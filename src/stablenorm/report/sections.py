"""What is known of a layer norm, in sections: the terminal and the page print the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from stablenorm.cost import Measured, Roofline, count_kept
from stablenorm.diagnosis import Diagnosis
from stablenorm.diagnosis.report import method_rows, sentences
from stablenorm.report import figures
from stablenorm.report.findings import Findings, Output, is_finite
from stablenorm.types import Array


class Table(NamedTuple):
    """Rows of cells below their columns; None draws a rule."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str] | None]


class Picture(NamedTuple):
    """What `figures.as_svg` draws, so many pixels high, and what it shows."""

    draw: Callable[[Any], None]
    height: int
    caption: str


class Section(NamedTuple):
    """
    One part of what is told; `notes` say how the numbers were obtained.

    `absent` says why there is nothing to tell, if there is nothing.
    """

    heading: str
    text: str = ""
    tables: Sequence[Table] = ()
    notes: str = ""
    picture: Picture | None = None
    absent: str = ""


# ---- numbers ----


def number(value: float) -> str:
    """Write three digits, all those before the point of a number of four or five."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def quantity(value: float, unit: str = "") -> str:
    """Write three digits and the unit, with the prefix that fits."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}".rstrip()
    prefix, size = ("u", 1e-6) if value >= 1e-6 else ("n", 1e-9)
    return f"{value / size:.3g} {prefix}{unit}" if value else f"0 {unit}".rstrip()


def shape_text(shape: Sequence[int]) -> str:
    """Write a shape as a product."""
    return " x ".join(map(str, shape))


# ---- sections ----


def accuracy_section(findings: Findings) -> Section:
    """Tell how far the outputs, and those of the plain formula, are from the exact result."""
    outputs = findings.outputs
    columns = ["output", "shape", "dtype", "worst ulp", "plain formula", "contract"]
    agreed = any(output.agreement is not None for output in outputs.values())
    rows = []
    for name, output in outputs.items():
        row = [name, shape_text(output.array.shape), str(output.array.dtype), _worst(output)]
        row += [number(worst(output.plain_error)), verdict(output.contract.passed)]
        if agreed:
            row.append("" if output.agreement is None else f"{output.agreement:.1g}")
        rows.append(row)
    which = "all" if findings.oracle_rows == findings.rows else f"{findings.oracle_rows} of"
    notes = (
        f"Exact results for {which} {findings.rows} rows, in integers, with one integer square "
        "root per row. "
    )
    if findings.oracle_rows < findings.rows:
        notes += "They are evenly spaced; dgamma and dbeta are judged as sums over them. "
    notes += (
        "ulp: units in the last place of the output's dtype, at the exact value; 0.5 is correct "
        "rounding. Plain formula: the worst ulp of the two-pass formula in float32 (float64 for "
        "float64), on the same data. The contract is 0.501 ulp (float64: 0.75 for dx, 0.51 for "
        "dgamma and dbeta) plus a term that only an element that cancels almost completely needs; "
        "(+k cancel): k such elements."
    )
    if agreed:
        notes += (
            " File's own values: their largest difference from a float64 run, over the largest "
            "value."
        )
    picture = Picture(
        partial(figures.draw_errors, outputs=outputs),
        230 * -(-len(outputs) // 2),
        "The share of elements whose error is at least as large as the horizontal axis says. At the "
        "right edge, elements are NaN or infinite and should not be.",
    )
    columns += ["file's own values"] if agreed else []
    tables = (Table("Against the exact result", columns, rows),)
    shares = (f"{100 * o.contract.misrounded:.2g} % of {name}" for name, o in outputs.items())
    text = f"Of the elements compared, {', '.join(shares)} are not correctly rounded."
    return Section("Accuracy", text, tables, notes, picture)


def worst(errors: Array) -> float:
    """Return the largest of them, 0 of none."""
    return float(errors.max(initial=0.0))


def _worst(output: Output) -> str:
    """Write the worst ulp among those within the limit, and how many cancel beyond it."""
    if not output.contract.passed:
        return number(worst(output.error))
    within = output.error[output.error <= output.contract.limit_ulp]
    count = output.contract.second_term
    return f"{worst(within):.3f}" + (f" (+{count} cancel)" if count else "")


def verdict(passed: bool) -> str:
    """Say whether a check passed."""
    return "PASS" if passed else "FAIL"


def losses_section(found: Diagnosis) -> Section:
    """Tell how many bits common methods lose, and on which rows."""
    columns = ("method", "median row", "worst row", "rows losing 4 or more")
    hardest = [(one.advice,) for one in found.worst[:6]]
    return Section(
        "Where others would lose digits",
        " ".join(f"{said[0].upper()}{said[1:]}." for said in sentences(found)),
        (
            Table(f"Bits of y lost, of {found.bits}", columns, method_rows(found)),
            Table("The rows that are hardest", ("the hardest first",), hardest),
        ),
        f"Predicted from one sweep over all {found.summary.rows} rows: the sums that each method "
        "forms are formed as it forms them, in its precision; with its mean and rstd the error of "
        "the row follows in closed form. Bits lost: log2 of the RMS error of y over the row, in "
        "rounding errors of the dtype. gamma and beta are left out. The condition number of y is "
        "the RMS of the row over its standard deviation: how many times larger a relative error of "
        "x is in y. That stablenorm loses none is measured: see Accuracy.",
    )


def gradients_section(findings: Findings) -> Section:
    """Tell what finite differences and identities say."""
    heading, report = "Gradient check", findings.gradients
    if report is None:
        infinite = [name for name, o in findings.outputs.items() if not is_finite(o.array)]
        reason = (
            f"{' and '.join(infinite)} overflow: finite differences and identities have nothing to "
            "compare; the exact results judge infinities too"
        )
        return Section(heading, absent=reason)
    rows = [
        (
            f"d{result.name}",
            f"{result.checked} of {result.total}, {result.probes} directions",
            number(abs(result.actual - result.numeric)),
            number(result.bound_numeric + result.bound_actual),
            number(result.resolution),
            result.verdict,
        )
        for result in report.arguments
        if result.judged
    ]
    columns = ("gradient", "compared", "worst error", "its own bound", "would have seen", "")
    identities = [
        (one.name, number(one.error), number(one.bound), verdict(one.passed))
        for one in findings.identities
    ]
    text = {
        "PASS": "No element differs from its finite difference by more than both their bounds.",
        "FAIL": "A gradient differs from its finite difference by more than both their bounds.",
    }.get(
        report.verdict,
        "Gradients of this dtype are too coarse, or too small, to be judged by finite differences; "
        "the exact results do not depend on it.",
    )
    return Section(
        heading,
        f"Finite differences: {report.verdict}. {text}",
        (
            Table("Against finite differences", columns, rows),
            Table("Identities of the rows", ("identity", "worst error", "bound", ""), identities),
        ),
        "Central differences of the forward in float64 at several steps, extrapolated to step 0, on "
        f"{findings.gradient_rows} rows, with {report.forward_calls} calls. The bound is the "
        "estimated error of the difference plus the rounding of the backward. Would have seen: the "
        "smallest relative error that no compared element could have hidden. The identities are "
        f"evaluated over all {findings.rows} rows; the error is that of the row that is worst in "
        "proportion to its bound.",
    )


def cost_section(costs: Sequence[Measured]) -> Section:
    """Tell flops, bytes and times of each size, and the roofline of this machine."""
    tables = []
    for measured in costs:
        rows, n = measured.matrix
        counted, timed = [], []
        for line in measured.lines:
            name, cost = f"{line.program}, {line.direction}", line.cost
            per_element = (number(each / (rows * n)) for each in (cost.flops, cost.moved))
            counted.append((name, *per_element, quantity(cost.held, "B")))
            times = line.predicted, line.measured.median
            timed.append((name, *(quantity(t, "s") for t in times), number(times[1] / times[0])))
        about = f"{rows} rows of {n}, {measured.dtype}"
        columns = ("", "flops per element", "bytes moved per element", "held")
        tables.append(Table(f"Counted: {about}", columns, counted))
        tables.append(Table(f"Measured: {about}", ("", "roofline", "measured", "ratio"), timed))
    kept = [
        (what, quantity(b, "B")) for what, b in count_kept(costs[0].matrix, costs[0].dtype).items()
    ]
    title = f"Kept from forward to backward, of {costs[0].matrix[0]} rows, beside x"
    tables.append(Table(title, ("what", "bytes"), kept))
    last = costs[-1]
    spread = max(line.measured.high / line.measured.low for c in costs for line in c.lines)
    ratios = [number(line.measured.median / line.predicted) for line in last.lines[-2:]]
    roofs = f"Of the fused kernel: {_rates(last.all_threads)}"
    if last.all_threads.threads > 1:
        roofs += f" Of the other two programs: {_rates(last.one_thread)}"
    picture = Picture(
        partial(figures.draw_costs, measured=last),
        360,
        "Flops per second, over flops per byte moved: the copy (the slope) and the arithmetic (the "
        "level part) of this machine bound every program. Filled: forward, hollow: backward.",
    )
    return Section(
        "Cost and time",
        f"On {shape_text(last.matrix)} elements of {last.dtype} the fused forward takes {ratios[0]} "
        f"times, the fused backward {ratios[1]} times as long as the roofline of this machine allows.",
        tables,
        "Flops and bytes are counted by formulas. Times are medians of interleaved calls on random "
        "numbers, with out= for the reference and the fused kernel; the quartiles of a time are at "
        f"most a factor {number(spread)} apart. Roofline: the longer of moved / copy and flops / "
        f"arithmetic. {roofs}",
        picture,
    )


def _rates(roofline: Roofline) -> str:
    threads = "1 thread" if roofline.threads == 1 else f"{roofline.threads} threads"
    return (
        f"{threads}, copy {quantity(roofline.copy, 'B/s')}, arithmetic "
        f"{quantity(roofline.flops, 'flop/s')} in float64."
    )
