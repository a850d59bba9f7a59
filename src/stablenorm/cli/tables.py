"""Tables and pictures of what `stablenorm run` found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stablenorm.report._findings import Findings, Output

# Terminals narrower than this get tables without rules between the columns.
_NARROW = 90


def print_findings(findings: Findings, console: Any) -> None:
    """Print the tables of one run to a rich console."""
    from rich.markup import escape  # noqa: PLC0415

    problem = findings.problem
    # Escaped: a file may have brackets in its name.
    console.print(
        f"[bold]{escape(problem.source)}[/bold]: x {problem.x.shape} {problem.x.dtype}, "
        f"eps {problem.eps:g}; {problem.dy_origin}",
        highlight=False,
    )
    narrow = console.width < _NARROW
    tables = [_outputs_table]
    if findings.gradients is not None:
        tables += [_gradients_table, _identities_table]
    for table in tables:
        console.print(table(findings, narrow))
    console.print(_notes(findings), highlight=False)


def _table(title: str, narrow: bool, *columns: str) -> Any:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        # Rules between columns cost two of three characters of what is between the words.
        box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
        pad_edge=not narrow,
        padding=(0, 0) if narrow else (0, 1),
    )
    for i, column in enumerate(columns):
        table.add_column(
            column,
            justify="left" if i == 0 else "right",
            overflow="fold",
            # No word is cut in two while there are spaces to break at.
            min_width=max((len(word) for word in column.split()), default=0),
        )
    return table


def _outputs_table(findings: Findings, narrow: bool) -> Any:
    columns = ["output", "shape", "dtype", "worst ulp", "plain formula", "contract"]
    agreed = any(output.agreement is not None for output in findings.outputs.values())
    if agreed:
        columns.append("file's own values")
    table = _table("Against the exact result", narrow, *columns)
    for name, output in findings.outputs.items():
        cells = [
            name,
            str(output.array.shape),
            str(output.array.dtype),
            _worst(output),
            _number(float(output.plain_error.max())),
            _verdict(output.contract.passed),
        ]
        if agreed:
            cells.append("" if output.agreement is None else f"{output.agreement:.0e}")
        table.add_row(*cells)
    return table


def _worst(output: Output) -> str:
    """Worst ulp among those within the ulp limit, and how many cancel beyond it."""
    within = output.error[output.error <= output.contract.limit_ulp]
    worst = float(within.max()) if within.size else 0.0
    count = output.contract.second_term
    if not output.contract.passed:
        return _number(float(output.error.max()))
    return f"{worst:.3f}" + (f" (+{count} cancel)" if count else "")


def _gradients_table(findings: Findings, narrow: bool) -> Any:
    table = _table(
        f"Finite differences of the float64 forward ({findings.gradient_rows} rows, "
        f"{findings.gradients.forward_calls} calls): {findings.gradients.verdict}",
        narrow,
        "gradient",
        "checked",
        "worst error",
        "its own bound",
        "would have seen",
        "",
    )
    for result in findings.gradients.arguments:
        if result.verdict == "NOT CHECKED":
            continue
        table.add_row(
            f"d{result.name}",
            f"{result.checked} of {result.total}, {result.probes} directions",
            _number(abs(result.actual - result.numeric)),
            _number(result.bound_numeric + result.bound_actual),
            f"{_number(result.resolution)} relative",
            result.verdict,
        )
    return table


def _identities_table(findings: Findings, narrow: bool) -> Any:
    table = _table("Identities of the rows", narrow, "identity", "worst error", "bound", "")
    for identity in findings.identities:
        table.add_row(
            identity.name,
            _number(identity.error),
            _number(identity.bound),
            _verdict(identity.passed),
        )
    return table


def _notes(findings: Findings) -> str:
    lines = []
    if findings.oracle_rows < findings.rows:
        lines.append(
            f"Exact results for {findings.oracle_rows} of {findings.rows} rows, evenly spaced; "
            "dgamma and dbeta are judged as sums over those rows."
        )
    lines.append(
        "ulp: units in the last place of the output's dtype; 0.5 is correct rounding. "
        "plain formula: the two-pass formula in float32 (float64 for float64), on the same data."
    )
    if any(output.agreement is not None for output in findings.outputs.values()):
        lines.append(
            "file's own values: largest difference of a float64 run from them, over the largest."
        )
    for name, seconds in findings.seconds.items():
        moved = findings.bytes_moved[name]
        lines.append(
            f"{name}: {1e3 * seconds:.2f} ms, {moved / 1e6:.1f} MB read and written, "
            f"{moved / seconds / 1e9:.2f} GB/s"
        )
    if findings.gradients is None:
        lines.append(
            f"{' and '.join(findings.overflowing)} overflow: finite differences and identities "
            "have nothing to compare; the exact results above judge infinities too."
        )
        lines.append("No check failed." if findings.passed else "A CHECK FAILED.")
    elif findings.gradients.verdict == "INCONCLUSIVE":
        lines.append(
            "finite differences: inconclusive. Gradients of this dtype are too coarse, or too "
            "small, to be judged by them; the exact results above do not depend on it."
        )
        lines.append("No check failed." if findings.passed else "A CHECK FAILED.")
    else:
        lines.append("All checks passed." if findings.passed else "A CHECK FAILED.")
    return "\n".join(lines)


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN or inf"
    return f"{value:.3g}"


def plot_findings(findings: Findings, file: Any, format_: str) -> None:
    """Draw the errors of both formulas, and the gradient check, into an open file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_errors(left, findings)
    _draw_gradients(right, findings)
    shape = " x ".join(map(str, findings.problem.x.shape))
    # Not parsed: a file may have dollar signs in its name.
    title = f"{findings.problem.source}: x {shape} {findings.problem.x.dtype}"
    figure.suptitle(title, parse_math=False)
    figure.savefig(file, format=format_, dpi=150)


def _draw_errors(axes: Any, findings: Findings) -> None:
    """Share of elements with at least a given error: one curve for each output."""
    colors = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    # Below this an element counts as exact; a curve on a logarithmic axis must start somewhere.
    least = 1e-2
    curves = [
        (errors, color, style, label)
        for color, (name, output) in zip(colors, findings.outputs.items(), strict=False)
        for errors, style, label in (
            (output.error, "-", name),
            (output.plain_error, ":", None),
        )
    ]
    finite = [errors[np.isfinite(errors)] for errors, *_ in curves]
    largest = max(1.0, *(float(errors.max()) for errors in finite if errors.size), 0.0)
    # Where NaN and inf are drawn: beyond all numbers, and said to be so.
    beyond = 30 * largest
    for errors, color, style, label in curves:
        ordered = np.sort(np.where(np.isfinite(errors), errors, beyond).ravel())
        share = 1 - np.arange(ordered.size) / ordered.size
        axes.plot(np.maximum(ordered, least), 100 * share, style, color=color, label=label, lw=1.8)
    _mark(axes, 0.5, "correct rounding ends at 0.5")
    if any(len(some) < errors.size for some, (errors, *_) in zip(finite, curves, strict=True)):
        _mark(axes, beyond, "NaN or inf")
    axes.plot([], [], ":", color="0.3", label="plain two-pass formula")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(least, None),
        xlabel="error, ulp",
        ylabel="elements with at least this error, %",
        title="stablenorm (solid) and the plain formula (dotted)",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)


def _mark(axes: Any, x: float, text: str) -> None:
    """Draw a vertical line that says what it is."""
    axes.axvline(x, color="0.4", lw=0.8)
    axes.annotate(
        text,
        (x, 0.03),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3, 0),
        textcoords="offset points",
        rotation=90,
        color="0.4",
        fontsize=8,
    )


def _draw_gradients(axes: Any, findings: Findings) -> None:
    """Error of the finite-difference check beside its own bound."""
    if findings.gradients is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no gradient check: an output overflows", ha="center")
        return
    results = [r for r in findings.gradients.arguments if r.verdict != "NOT CHECKED"]
    errors = [abs(result.actual - result.numeric) for result in results]
    bounds = [result.bound_numeric + result.bound_actual for result in results]
    drawn = [value for value in (*errors, *bounds) if 0 < value < math.inf]
    # Eight decades are enough; what is smaller is drawn as an arrow at the edge.
    right = 4 * max(drawn, default=1.0)
    left = max(min(drawn, default=1.0) / 4, right * 1e-8)
    for row, (error, bound) in enumerate(zip(errors, bounds, strict=True)):
        if not (math.isfinite(error) and math.isfinite(bound)):
            axes.text(left * 1.3, row, "NaN or inf", va="center", color="#d55e00")
            continue
        axes.barh(row, bound, color="0.85", height=0.5)
        marker = "o" if error > left else "<"
        color = "#0072b2" if error <= bound else "#d55e00"
        axes.plot(max(error, left), row, marker, color=color, clip_on=False)
    axes.plot([], [], color="0.85", lw=8, label="its own bound")
    axes.plot([], [], "o", color="#0072b2", label="error (arrow: smaller)")
    axes.set(
        xscale="log",
        xlim=(left, right),
        # Set, lest a row without a bar be cut off; the first one on top.
        ylim=(len(results) - 0.5, -0.5),
        xlabel="|backward - finite difference|, worst element",
        title=f"gradient check: {findings.gradients.verdict}",
    )
    axes.set_yticks(range(len(results)), [f"d{result.name}" for result in results])
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes.grid(alpha=0.25, axis="x")
