"""`stablenorm report`: all that is known of a layer norm, on one page that needs nothing else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from stablenorm.cost import count_kept
from stablenorm.diagnosis.report import method_rows, sentences
from stablenorm.report import _figures as figures
from stablenorm.report import _numbers as numbers
from stablenorm.report._findings import Findings, Output, Problem, compute, inspect
from stablenorm.report._gather import STEPS, Facts, check_problem, gather

__all__ = [
    "STEPS",
    "Facts",
    "Findings",
    "Output",
    "Problem",
    "check_problem",
    "compute",
    "gather",
    "inspect",
    "page",
    "write_page",
]

_SECTIONS = {
    "data": "The data",
    "accuracy": "Accuracy",
    "diagnosis": "Where others would lose digits",
    "gradients": "Gradient check",
    "cost": "Cost and time",
}
_OUTCOMES = {
    "PASS": "No element differs from its finite difference by more than both their bounds.",
    "FAIL": "A gradient differs from its finite difference by more than both their bounds.",
    "": "Gradients of this dtype are too coarse, or too small, to be judged by finite differences; "
    "the exact results above do not depend on it.",
}
# What no page can show: control characters and lone halves of surrogate pairs, which may stand in
# the name of a file.
_UNSHOWN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def write_page(facts: Facts, file: Any) -> None:
    """Write the whole page, in UTF-8, into an open file."""
    file.write(page(facts).encode())


def page(facts: Facts) -> str:
    """Return the whole page."""
    # Loaded when a page is wanted: no other command needs them.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    # Everything is escaped, so that nothing in a file is markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "number": numbers.number, "count": numbers.count, "size": numbers.size,
        "seconds": numbers.seconds, "shape": numbers.shape, "prose": _prose, "names": _names,
        "worst": _worst, "ours": _ours,
    }  # fmt: skip
    problem, costs = facts.problem, () if isinstance(facts.costs, str) else facts.costs
    source, n = problem.source, problem.x.shape[-1]
    rows_and_n = (problem.x.size // n, n)
    times = [line.measured for cost in costs for line in cost.lines]
    bundled = source.startswith("bundled data")
    text = environment.from_string(_read("page.html")).render(
        facts=facts,
        rows=facts.rows,
        title=f"Layer normalization of {'the ' if bundled else ''}{source}",
        style=_read("page.css"),
        sections=_SECTIONS,
        outcomes=_OUTCOMES,
        spreads=_spreads(facts),
        arrays=_arrays(facts),
        judged=_judged(facts),
        said=sentences(facts.diagnosis),
        methods=method_rows(facts.diagnosis),
        kept=count_kept(rows_and_n, problem.x.dtype),
        spread=max(t.high / t.low for t in times) if times else None,
        pictures=_pictures(facts),
        argument="" if bundled else f" {shlex.quote(source)}",
    )
    return _UNSHOWN.sub("\ufffd", text)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _pictures(facts: Facts) -> dict[str, dict[str, str]]:
    """Draw what there is to draw."""
    found, diagnosis = facts.findings, facts.diagnosis
    pictures: dict[str, dict[str, str]] = {"losses": {}, "gradients": {}}
    if facts.rows.finite.any():
        pictures["rows"] = figures.draw_rows(facts.rows)
    if not isinstance(found, str):
        pictures["errors"] = figures.draw_errors(found.outputs)
        if any(result.differences for result in _judged(facts)):
            pictures["gradients"] = figures.draw_gradients(_judged(facts))
    if any(counts.any() for counts in diagnosis.summary.lost.values()):
        pictures["losses"] = figures.draw_losses(diagnosis)
    if not isinstance(facts.costs, str):
        pictures["costs"] = figures.draw_costs(facts.costs)
    return pictures


def _judged(facts: Facts) -> list[Any]:
    if isinstance(facts.findings, str) or facts.findings.gradients is None:
        return []
    return [result for result in facts.findings.gradients.arguments if result.judged]


def _spreads(facts: Facts) -> list[tuple[str, ...]]:
    """Return a line for each quantity of a row, over all finite rows."""
    rows, eps = facts.rows, facts.problem.eps
    with np.errstate(all="ignore"):
        quantities = {
            "mean": rows.mean,
            "standard deviation": rows.std,
            "|mean| / standard deviation": np.abs(rows.mean) / rows.std,
            "variance / `eps`": rows.std**2 / eps,
            "farthest element, in standard deviations": (
                np.maximum(rows.high - rows.mean, rows.mean - rows.low) / rows.std
            ),
        }
    lines = []
    for name, values in quantities.items():
        known = np.flatnonzero(rows.finite & ~np.isnan(values))
        if known.size:
            ordered = values[known]
            cells = (ordered.min(), np.median(ordered), ordered.max())
            row = str(known[ordered.argmax()])
            lines.append((name, *(numbers.number(float(v)) for v in cells), row))
    return lines


def _arrays(facts: Facts) -> list[tuple[str, Any, float, float]]:
    """Return gamma, beta and dy, as far as there are any, with their least and largest."""
    found = []
    for name in ("gamma", "beta", "dy"):
        array = getattr(facts.problem, name)
        if array is not None:
            wide = array.astype(np.float64)
            finite = wide[np.isfinite(wide)]
            ends = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
            found.append((name, array, *map(float, ends)))
    return found


def _prose(value: Any) -> Any:
    """Escape a text, and set what stands between backticks as code."""
    from markupsafe import Markup, escape  # noqa: PLC0415

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(value))))


def _names(names: Sequence[str]) -> str:
    """Write names as code, an "and" before the last."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _worst(errors: Any) -> float:
    return float(errors.max()) if errors.size else 0.0


def _ours(output: Output) -> str:
    """Write the worst ulp among those within the limit, and how many cancel beyond it."""
    if not output.contract.passed:
        return numbers.number(_worst(output.error))
    within = output.error[output.error <= output.contract.limit_ulp]
    cancelling = output.contract.second_term
    return f"{_worst(within):.3f}" + (f" (+{cancelling} cancel)" if cancelling else "")
