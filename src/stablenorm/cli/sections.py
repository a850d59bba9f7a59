"""Findings about a norm, told in sections: the terminal and the page show the same ones."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from stablenorm.cli.findings import Findings, Output
from stablenorm.cli.page import INK
from stablenorm.cost import DIRECTIONS, PROGRAMS, count_cost, count_kept
from stablenorm.diagnosis import Diagnosis, diagnose
from stablenorm.diagnosis.results import method_rows, sentences
from stablenorm.figures import COLORS
from stablenorm.text import Section, Table, grouped, number, quantity, shape_text
from stablenorm.types import Array

# The promises of each rounding.
_CONTRACTS = {
    "fast": "0.501 ulp (float64: 0.75 for dx, 0.51 for dgamma and dbeta), but for an element that "
    "cancels almost completely",
    "nearest": "none is misrounded",
}
# Below this, in ulp, an element counts as exact; a logarithmic axis must start somewhere.
_LEAST = 1e-3


def tell(findings: Findings) -> tuple[Section, ...]:
    """Return all sections."""
    x, eps, kind = findings.problem.x, findings.problem.eps, findings.problem.kind
    cost = _cost((x.size // x.shape[-1], x.shape[-1]), str(x.dtype), kind)
    losses = _losses(diagnose(x, eps, kind=kind))
    return _accuracy(findings), losses, _gradients(findings), cost


def worst(errors: Array) -> float:
    """Return the largest of them, 0 of none."""
    return float(errors.max(initial=0.0))


def _accuracy(findings: Findings) -> Section:
    """Tell how far the outputs, and those of the plain formula, are from the exact result."""
    outputs, rows = findings.outputs, []
    for name, output in outputs.items():
        array, passed = output.array, "PASS" if output.passed else "FAIL"
        errors = f"{worst(output.error):.3f}", number(worst(output.plain_error))
        rows.append((name, shape_text(array.shape), str(array.dtype), *errors, passed))
    columns = ("output", "shape", "dtype", "worst ulp", "plain formula", "contract")
    wrong = ", ".join(
        f"{grouped(output.misrounded)} of {grouped(output.error.size)} {'elements ' * (name == 'y')}of {name}"
        for name, output in outputs.items()
    )
    which = "all" if findings.oracle_rows == findings.rows else f"{findings.oracle_rows} of"
    return Section(
        "Accuracy",
        f'Rounding "{findings.problem.rounding}". Misrounded: {wrong}.',
        (Table("Against the exact result", columns, rows),),
        f"Exact results for {which} {findings.rows} rows, in integers; dgamma and dbeta are judged as "
        "sums over these rows. Misrounded: not the exact element rounded to nearest, ties to even. "
        "ulp: units in the last place of the output's dtype; a correctly rounded element is within "
        f"0.5. Plain formula: the worst ulp of {'two passes' if findings.problem.kind == 'layer' else 'one pass'} in "
        "float32 (float64 for float64). "
        f"The contract: {_CONTRACTS[findings.problem.rounding]}.",
        partial(_draw_errors, outputs=outputs),
        "The share of elements whose error is at least as large as the horizontal axis says. At the "
        "right edge, elements are NaN or infinite and should not be.",
    )


def _draw_errors(figure: Any, outputs: Mapping[str, Output]) -> None:
    """Draw, of each output, the share of elements with at least a given error."""
    # NaN and inf are drawn here: beyond all numbers.
    errors = [each for one in outputs.values() for each in (one.error, one.plain_error)]
    beyond = 100 * max(float(e.max(initial=1.0, where=np.isfinite(e))) for e in errors)
    at = np.geomspace(_LEAST, beyond, 400)
    lines = -(-len(outputs) // 2)
    figure.set_figheight(3.2 * lines)
    for place, (name, output) in enumerate(outputs.items(), 1):
        axes = figure.add_subplot(lines, 2, place)
        for array, color, style, label in (
            (output.error, COLORS[0], "-", "stablenorm"),
            (output.plain_error, COLORS[1], "--", "plain formula"),
        ):
            ordered = np.sort(np.where(np.isfinite(array), array, beyond), axis=None)
            share = 100 * (1 - np.searchsorted(ordered, at) / ordered.size)
            axes.loglog(at, np.maximum(share, 1e-9), style, color=color, lw=2, label=label)
        axes.axvline(0.5, color=INK, lw=1, ls=":", label="0.5 ulp")
        axes.set(xlim=(_LEAST, beyond), ylim=(1e-3, 150), title=name)
        axes.set(xlabel="error, ulp", ylabel="elements, %")


def _losses(found: Diagnosis) -> Section:
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
        f"Predicted for all {found.summary.rows} rows from each method's own sums, in its precision. "
        "Bits lost: log2 of the RMS error of y over the row, in rounding errors of the dtype, without "
        f"gamma and beta. The condition number of y{', rms(x) / std,' * (found.kind == 'layer')} is how "
        "many times larger a relative error of x is in y.",
    )


def _gradients(findings: Findings) -> Section:
    """Tell what finite differences, the closed form and identities say."""
    heading, report = "Gradient check", findings.gradients
    if report is None:
        return Section(heading, "Not checked: an output overflows, and nothing can be compared.")
    rows = []
    for one in report.arguments:
        if one.judged:
            bound = one.bound_numeric + one.bound_actual
            sizes = map(number, (abs(one.actual - one.numeric), bound, one.resolution))
            rows.append((f"d{one.name}", f"{one.checked} of {one.total}", *sizes, one.verdict))
    columns = ("gradient", "compared", "worst error", "its own bound", "would have seen", "")
    held = (one for one in report.findings if one.layer == "identities")
    identities = [(one.name, one.message, one.verdict) for one in held]
    return Section(
        heading,
        f"Finite differences, the closed form and identities: {report.verdict}.",
        (
            Table("Against finite differences", columns, rows),
            Table("Identities of the rows", ("identity", "worst row", ""), identities),
        ),
        f"check_{findings.problem.kind}_norm in float64, on some of the rows, with {report.forward_calls} calls. The "
        "bound is the estimated error of the difference plus the rounding of the backward. Would have "
        "seen: the smallest relative error that no compared element could have hidden.",
    )


def _cost(matrix: tuple[int, int], dtype: str, kind: str) -> Section:
    """Tell flops and bytes of three programs, and the bytes between forward and backward."""
    rows, n = matrix
    counted = []
    for program, direction in itertools.product(PROGRAMS, DIRECTIONS):
        cost = count_cost(program, direction, matrix, dtype, kind)
        per_element = (number(each / (rows * n)) for each in (cost.flops, cost.moved))
        counted.append((f"{program}, {direction}", *per_element, quantity(cost.held, "B")))
    kept = [(k, quantity(size, "B")) for k, size in count_kept(matrix, dtype, kind).items()]
    columns = ("program", "flops per element", "bytes moved per element", "held")
    return Section(
        "Cost",
        "Flops and bytes of three programs that do the same algebra, by formulas.",
        (
            Table(f"Counted: {rows} rows of {n}, {dtype}", columns, counted),
            Table("Kept from forward to backward, beside x", ("what", "bytes"), kept),
        ),
        "Flops: + - * / and square roots; a fused multiply-add is two. Moved: what memory must move where "
        "arrays are beyond the caches. Held: new bytes at the worst moment, results included.",
    )
