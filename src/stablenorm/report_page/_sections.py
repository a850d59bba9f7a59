"""The sections on the data, the accuracy, the gradients and the time."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenorm._bench import PASSES
from stablenorm._run import Findings, Output
from stablenorm.report_page._gather import Facts
from stablenorm.report_page._html import (
    TIMES,
    Html,
    absent,
    both,
    count,
    method,
    number,
    paragraph,
    seconds,
    shape,
    size,
    table,
)
from stablenorm.report_page._pictures import (
    draw_errors,
    draw_gradients,
    draw_rows,
    draw_speeds,
)
from stablenorm.report_page._speed import COPY, OURS


def data_section(facts: Facts) -> list[Html]:
    """Describe x, row by row, and the other arrays."""
    problem, rows = facts.problem, facts.rows
    n, total = problem.x.shape[-1], len(rows.mean)
    parts = [
        paragraph(
            f"`x` has the shape {shape(problem.x.shape)} in {problem.x.dtype}: {count(total)} rows "
            f"of n = {count(n)} elements ({size(problem.x.nbytes)}), each normalized by itself, "
            f"with `eps` = {number(problem.eps)}. Cotangent: {problem.dy_origin}."
        )
    ]
    if not rows.finite.any():
        parts.append(absent("every row of x holds NaN or infinity"))
        return parts
    parts.append(both(lambda width: draw_rows(rows, width), _rows_caption(facts)))
    parts.append(
        table("Over the rows of x", ("", "least", "median", "largest", "in row"), _spreads(facts))
    )
    parameters = [
        (
            f"`{name}`",
            shape(array.shape),
            str(array.dtype),
            *(number(float(v)) for v in _least_and_largest(array)),
        )
        for name, array in (("gamma", problem.gamma), ("beta", problem.beta), ("dy", problem.dy))
        if array is not None
    ]
    columns = ("array", "shape", "dtype", "least", "largest")
    parts.append(table("The other arrays", columns, parameters))
    parts.append(
        method(
            "Mean and standard deviation (biased, without `eps`) in float64, in two passes, over "
            "all finite rows, each divided by its largest magnitude first. Least and largest are "
            "the numbers themselves."
        )
    )
    return parts


def _least_and_largest(array: Any) -> tuple[float, float]:
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    return (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)


def _rows_caption(facts: Facts) -> str:
    rows = facts.rows
    every = -(-len(rows.mean) // 96)
    what = "Each line is one row" if every == 1 else f"Each line is {every} rows"
    words = (
        f"{what}, from its least to its largest element; the bar is its mean ± one standard "
        "deviation"
        + ("" if every == 1 else ", the medians of the group")
        + ". The scale is logarithmic away from zero."
    )
    bad = int((~rows.finite).sum())
    if bad:
        words += f" {TIMES}: {count(bad)} rows hold NaN or infinity."
    return words


def _spreads(facts: Facts) -> list[tuple[str, ...]]:
    """Return a line for each quantity of a row, over all finite rows."""
    rows, eps = facts.rows, facts.problem.eps
    with np.errstate(all="ignore"):
        reach = np.maximum(rows.high - rows.mean, rows.mean - rows.low)
        quantities = {
            "mean": rows.mean,
            "standard deviation": rows.std,
            "|mean| / standard deviation": np.abs(rows.mean) / rows.std,
            "variance / `eps`": rows.std**2 / eps,
            "farthest element, in standard deviations": reach / rows.std,
        }
    lines = []
    for name, values in quantities.items():
        known = np.flatnonzero(rows.finite & ~np.isnan(values))
        if not known.size:
            continue
        ordered = values[known]
        cells = (ordered.min(), np.median(ordered), ordered.max())
        lines.append((name, *(number(float(v)) for v in cells), str(known[ordered.argmax()])))
    lines.append(("constant rows", "", "", count(int(rows.constant.sum())), ""))
    lines.append(("rows with NaN or infinity", "", "", count(int((~rows.finite).sum())), ""))
    return lines


def accuracy_section(facts: Facts) -> list[Html]:
    """Compare both formulas with the exact results."""
    findings = facts.findings
    if isinstance(findings, str):
        return [absent(findings)]
    outputs = findings.outputs
    worst = max(outputs, key=lambda name: _worst(outputs[name].plain_error))
    lost = outputs[worst]
    opening = (
        f"Every element of {_list(list(outputs))} was compared with the exact result. The largest "
        f"error of the plain formula is {number(_worst(lost.plain_error))} ulp, in `{worst}`; "
        f"there stablenorm is off by {_ours(lost)} ulp at most. Correct rounding is 0.5."
    )
    columns = [
        "output",
        "shape",
        "dtype",
        "stablenorm, worst ulp",
        "not the nearest",
        "plain formula, worst ulp",
        "contract",
    ]
    agreed = any(output.agreement is not None for output in outputs.values())
    if agreed:
        columns.append("file's own values")
    lines = [
        (
            f"`{name}`",
            shape(output.array.shape),
            str(output.array.dtype),
            _ours(output),
            f"{number(100 * output.contract.misrounded)} %",
            number(_worst(output.plain_error)),
            "PASS" if output.contract.passed else "FAIL",
            *([_agreement(output)] if agreed else []),
        )
        for name, output in outputs.items()
    ]
    caption = (
        "The share of elements whose error is at least as large as the horizontal axis says. "
        "Correct rounding ends at 0.5 ulp. Where a curve reaches the right edge, elements are NaN "
        "or infinite and should not be."
    )
    return [
        paragraph(opening),
        both(lambda width: draw_errors(outputs, width), caption),
        table("Against the exact result", columns, lines),
        method(_accuracy_method(facts, findings, agreed)),
    ]


def _accuracy_method(facts: Facts, findings: Findings, agreed: bool) -> str:
    which = (
        f"all {count(findings.oracle_rows)} rows"
        if findings.oracle_rows == len(facts.rows.mean)
        else f"{count(findings.oracle_rows)} of {count(len(facts.rows.mean))} rows, evenly spaced"
    )
    words = (
        f"The exact result is computed in integers, with one integer square root a row, for {which}"
        + (f" ({facts.choice})" if facts.choice else "")
        + ". An error is in ulp, units in the last place of the output's dtype at the exact value. "
        "Not the nearest: the share of elements that are not the correctly rounded result. "
        "The plain formula is the two-pass formula in float32 (float64 for float64) on the same "
        "data. The contract is 0.501 ulp (0.75 for `dx`, 0.51 for `dgamma`, `dbeta` of float64) "
        "plus a term that only an element that cancels almost completely may need; its number is "
        "given in brackets."
    )
    if findings.oracle_rows < findings.rows:
        words += " `dgamma` and `dbeta` are judged as sums over the rows compared."
    if agreed:
        words += (
            " File's own values: the largest difference of our float64 run from the results that "
            "the file holds, over the largest of them."
        )
    return words


def _worst(errors: Any) -> float:
    return float(errors.max()) if errors.size else 0.0


def _ours(output: Output) -> str:
    """Write the worst ulp among those within the limit, and how many cancel beyond it."""
    if not output.contract.passed:
        return number(_worst(output.error))
    within = output.error[output.error <= output.contract.limit_ulp]
    cancelling = output.contract.second_term
    return f"{_worst(within):.3f}" + (f" (+{cancelling} cancel)" if cancelling else "")


def _agreement(output: Output) -> str:
    return "" if output.agreement is None else number(output.agreement, 1)


def _list(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def gradients_section(facts: Facts) -> list[Html]:
    """Show the finite differences, and the identities of the rows."""
    findings = facts.findings
    if isinstance(findings, str):
        return [absent(findings)]
    if findings.gradients is None:
        names = _list(list(findings.overflowing))
        return [absent(f"{names} overflow, so that finite differences have nothing to compare")]
    report = findings.gradients
    judged = [result for result in report.arguments if result.judged]
    lines = [
        (
            f"`d{result.name}`",
            f"{result.checked} of {count(result.total)}, and {result.probes} directions",
            number(abs(result.actual - result.numeric)),
            number(result.bound_numeric + result.bound_actual),
            number(result.resolution),
            result.verdict,
        )
        for result in judged
    ]
    identities = [
        (i.name, number(i.error), number(i.bound), "PASS" if i.passed else "FAIL")
        for i in findings.identities
    ]
    outcome = {
        "PASS": "No element differs from its finite difference by more than both their bounds.",
        "FAIL": "A gradient differs from its finite difference by more than both their bounds.",
    }.get(
        report.verdict,
        "Gradients of this dtype are too coarse, or too small, to be judged by finite differences; "
        "the exact results above do not depend on it.",
    )
    caption = (
        "At the worst place of each gradient: how far a plain central difference is from the "
        "extrapolated value, by its step. Beside it: every element compared, its difference over "
        "its own bound; beyond 1 it would be wrong."
    )
    parts = [paragraph(f"Verdict: {report.verdict}. {outcome}")]
    if any(result.differences for result in judged):
        parts.append(both(lambda width: draw_gradients(judged, width), caption))
    columns = (
        "gradient",
        "compared",
        "worst difference",
        "its own bound",
        "would have seen, relative",
        "verdict",
    )
    parts.append(table("Against finite differences", columns, lines))
    parts.append(
        table(
            "Identities that exact gradients satisfy",
            ("identity", "worst error", "bound", "verdict"),
            identities,
        )
    )
    parts.append(
        method(
            f"Central differences of the forward in float64 at several steps, extrapolated to step "
            f"0, on {count(findings.gradient_rows)} rows, evenly spaced, with "
            f"{count(report.forward_calls)} calls, against the backward in the dtypes of the data. "
            "Each carries a bound of its own: the noise of the forward, measured, the last change "
            "of the extrapolation, and the rounding of the backward. Would have seen: the smallest "
            "error, relative to the gradient, that no compared element could have hidden. The "
            f"identities are evaluated over all {count(findings.rows)} rows judged; the error is "
            "of the row that is worst in proportion to its bound."
        )
    )
    return parts


def speed_section(facts: Facts) -> list[Html]:
    """Show bytes a second beside those of a copy."""
    speeds = facts.speeds
    last = speeds[-1]
    forward, backward = (last.rate(d, OURS) / last.rate(d, COPY) for d in PASSES)
    opening = (
        f"On {size(last.nbytes)} of `x`, the forward moves its bytes at {number(forward, 2)} of the "
        f"speed of a copy, the backward at {number(backward, 2)}, with {last.threads} threads and "
        "`out=`. 1 is the speed of memory; where everything stays in the caches it may be exceeded."
    )
    lines = [
        (
            f"{direction}, {name}",
            shape(speed.shape),
            seconds(timing.median),
            f"{seconds(timing.low)} to {seconds(timing.high)}",
            f"{speed.rate(direction, name) / 1e9:.3g}",
            f"{speed.rate(direction, name) / speed.rate(direction, COPY):.2f}",
            str(timing.rounds),
        )
        for speed in speeds
        for direction, timings in speed.timings.items()
        for name, timing in timings.items()
    ]
    columns = ("what", f"rows {TIMES} n", "median", "middle half", "GB/s", "of copy", "rounds")
    caption = (
        f"GB/s of each, {last.dtype}, each size on a scale of its own; the vertical line is the copy. "
        "Paler: a new array for every result, as a plain call has it."
    )
    return [
        paragraph(opening),
        both(lambda width: draw_speeds(speeds, width), caption),
        table("Medians of interleaved calls", columns, lines),
        method(
            "All candidates of one direction and size are called in turn, in an order that "
            "rotates, in as many rounds as the table says; the median of the rounds counts. "
            "GB/s: what must be read and written (forward `x`, `y`; backward `dy`, `x`, `dx`; "
            "copy both arrays) over the median. The copy has as many threads, each a part of its "
            "own, or one thread where the data are small, and writes into pages that exist. Nothing else should run meanwhile; this is not "
            f"checked. {facts.origin.machine}, {facts.origin.date}."
        ),
    ]
