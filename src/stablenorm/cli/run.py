"""`stablenorm run`: compute, and check every number."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from stablenorm.cli.files import (
    InputError,
    check_finite,
    check_target,
    read_problem,
    write_beside,
)
from stablenorm.cli.parts import (
    EXIT_FAILED,
    Help,
    add_problem,
    check_at_least,
    check_plot,
    step_bar,
    write_plot,
)
from stablenorm.cli.tables import number, print_table, quantity
from stablenorm.figures import COLORS, new_figure
from stablenorm.report import Findings, Output, compute, inspect

_EXAMPLES = """\
examples:
  stablenorm run                          the bundled data: a real layer norm of a language model
  stablenorm run mine.npz                 x and, if held, gamma, beta, dy, eps from a file
  stablenorm run arrays/                  the same from x.npy, gamma.npy, ... in a directory
  stablenorm run mine.npz --out res.npz --plot res.png

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used, one line says why.
"""


def add(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = commands.add_parser(
        "run",
        help="compute y, dx, dgamma and dbeta of the arrays in a file, and check them",
        description=(
            "Compute y, dx, dgamma and dbeta, and check them against the exact result, against "
            "finite differences and against identities. The error of the usual two-pass formula "
            "on the same data is shown beside ours. x is normalized over its last axis."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    add_problem(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE.npz", help="write y, dx, dgamma and dbeta to this file"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the errors into this file"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    check_target("--out", arguments.out, (".npz",))
    check_plot(arguments.plot)
    if _same_file(arguments.out, arguments.file):
        msg = f"--out must not be the file that is read, got {arguments.out}"
        raise InputError(msg)
    check_at_least("--seed", arguments.seed, 0)
    problem = read_problem(arguments.file, arguments.eps, arguments.seed)
    try:
        results: dict[str, Any] = compute(problem)
    except (TypeError, ValueError) as error:
        # What the package refuses is the user's input, said in the package's words.
        raise InputError(str(error)) from None
    check_finite(problem)
    if arguments.out is not None:
        write_beside(arguments.out, lambda file: np.savez(file, **results))
    # The four steps of `inspect`.
    with step_bar(4) as step:
        findings = inspect(problem, results, step)
    write_plot(arguments.plot, lambda file, kind: _plot(findings, file, kind))
    _print(findings, Console())
    return 0 if findings.passed else EXIT_FAILED


def _same_file(one: Path | None, other: Path | None) -> bool:
    """Tell whether both name one file, by whatever links."""
    if one is None or other is None:
        return False
    return one.exists() and other.exists() and one.samefile(other)


# ---- tables ----


def _print(findings: Findings, console: Console) -> None:
    problem = findings.problem
    about = (f": x {problem.x.shape} {problem.x.dtype}, eps {problem.eps:g}; {problem.dy_origin}",)
    # Not as markup: a file may have brackets in its name.
    console.print(Text.assemble((problem.source, "bold"), *about))
    _print_outputs(findings, console)
    if findings.gradients is not None:
        _print_gradients(findings, console)
        print_table(
            console,
            "Identities of the rows",
            ("identity", "worst error", "bound", ""),
            [
                (one.name, number(one.error), number(one.bound), _verdict(one.passed))
                for one in findings.identities
            ],
        )
    console.print(Text("\n".join(_notes(findings))))


def _print_outputs(findings: Findings, console: Console) -> None:
    columns = ["output", "shape", "dtype", "worst ulp", "plain formula", "contract"]
    agreed = any(output.agreement is not None for output in findings.outputs.values())
    rows = []
    for name, output in findings.outputs.items():
        plain = number(float(output.plain_error.max()))
        row = [name, str(output.array.shape), str(output.array.dtype), _worst(output), plain]
        row.append(_verdict(output.contract.passed))
        if agreed:
            row.append("" if output.agreement is None else f"{output.agreement:.0e}")
        rows.append(row)
    columns += ["file's own values"] if agreed else []
    print_table(console, "Against the exact result", columns, rows)


def _worst(output: Output) -> str:
    """Worst ulp among those within the ulp limit, and how many cancel beyond it."""
    if not output.contract.passed:
        return number(float(output.error.max()))
    within = output.error[output.error <= output.contract.limit_ulp]
    count = output.contract.second_term
    return f"{within.max(initial=0.0):.3f}" + (f" (+{count} cancel)" if count else "")


def _print_gradients(findings: Findings, console: Console) -> None:
    report = findings.gradients
    title = (
        f"Finite differences of the float64 forward ({findings.gradient_rows} rows, "
        f"{report.forward_calls} calls): {report.verdict}"
    )
    columns = ("gradient", "checked", "worst error", "its own bound", "would have seen", "")
    rows = [
        (
            f"d{result.name}",
            f"{result.checked} of {result.total}, {result.probes} directions",
            number(abs(result.actual - result.numeric)),
            number(result.bound_numeric + result.bound_actual),
            f"{number(result.resolution)} relative",
            result.verdict,
        )
        for result in report.arguments
        if result.verdict != "NOT CHECKED"
    ]
    print_table(console, title, columns, rows)


def _notes(findings: Findings) -> Iterator[str]:
    if findings.oracle_rows < findings.rows:
        yield (
            f"Exact results for {findings.oracle_rows} of {findings.rows} rows, evenly spaced; "
            "dgamma and dbeta are judged as sums over those rows."
        )
    yield (
        "ulp: units in the last place of the output's dtype; 0.5 is correct rounding. "
        "plain formula: the two-pass formula in float32 (float64 for float64), on the same data."
    )
    if any(output.agreement is not None for output in findings.outputs.values()):
        yield (
            "file's own values: their largest difference from a float64 run, over the largest value."
        )
    for name, seconds in findings.seconds.items():
        moved = findings.bytes_moved[name]
        yield (
            f"{name}: {quantity(seconds, 's')}, {quantity(moved, 'B')} read and written, "
            f"{moved / seconds / 1e9:.2f} GB/s"
        )
    judged = findings.gradients is not None and findings.gradients.verdict != "INCONCLUSIVE"
    if findings.gradients is None:
        yield (
            f"{' and '.join(findings.overflowing)} overflow: finite differences and identities "
            "have nothing to compare; the exact results above judge infinities too."
        )
    elif not judged:
        yield (
            "finite differences: inconclusive. Gradients of this dtype are too coarse, or too "
            "small, to be judged by them; the exact results above do not depend on it."
        )
    if not findings.passed:
        yield "A CHECK FAILED."
    else:
        yield "All checks passed." if judged else "No check failed."


def _verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


# ---- picture ----

# Below this an element counts as exact; a curve on a logarithmic axis must start somewhere.
_LEAST = 1e-2


def _plot(findings: Findings, file: Any, format_: str) -> None:
    """Draw the share of elements with at least a given error, a curve for each output."""
    figure = new_figure(8, 4.6)
    axes = figure.subplots()
    curves = [
        (errors, color, style, label)
        for color, (name, output) in zip(COLORS, findings.outputs.items(), strict=False)
        for errors, style, label in ((output.error, "-", name), (output.plain_error, ":", None))
    ]
    largest = max(
        float(errors.max(initial=1.0, where=np.isfinite(errors))) for errors, *_ in curves
    )
    # Where NaN and inf are drawn: beyond all numbers, and said to be so.
    beyond = 30 * largest
    for errors, color, style, label in curves:
        ordered = np.sort(np.where(np.isfinite(errors), errors, beyond).ravel())
        share = 1 - np.arange(ordered.size) / ordered.size
        axes.plot(np.maximum(ordered, _LEAST), 100 * share, style, color=color, label=label, lw=1.8)
    _mark(axes, 0.5, "correct rounding ends at 0.5")
    if not all(np.isfinite(errors).all() for errors, *_ in curves):
        _mark(axes, beyond, "NaN or inf")
    axes.plot([], [], ":", color="0.3", label="plain two-pass formula")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(_LEAST, None),
        xlabel="error, ulp",
        ylabel="elements with at least this error, %",
    )
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    problem = findings.problem
    shape = " x ".join(map(str, problem.x.shape))
    # Not parsed: a file may have dollar signs in its name.
    figure.suptitle(f"{problem.source}: x {shape} {problem.x.dtype}", parse_math=False)
    figure.savefig(file, format=format_, dpi=150)


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
