"""A gradient report as text."""

from __future__ import annotations

import math

from stablenorm.check.report import ArgumentResult, GradientReport
from stablenorm.text import wrapped


def as_text(report: GradientReport) -> str:
    """Return the report in lines of at most 100 columns, the verdict first."""
    lines = [headline(report), *(f"  {sentence}" for sentence in report.diagnosis)]
    for result in report.arguments:
        lines += [f"  {line}" for line in argument_lines(result)]
    for layer, passed, rest in _layers(report):
        lines.append(f"  {_summary(layer, passed, rest)}")
        # Where something is wrong, what is merely worth knowing stands in the way.
        shown = [each for each in rest if each[0] != "NOTE" or report.passed]
        lines += [f"    {verdict}: {sentence}" for verdict, sentence in shown]
    calls = f"{report.forward_calls} forward and {report.backward_calls} backward calls"
    # Below a second, how long it took interests nobody, and equal checks give equal texts.
    lines.append(f"  {calls}, {report.seconds:.1f} s" if report.seconds >= 1 else f"  {calls}")
    return "\n".join(part for line in lines for part in wrapped(line))


def argument_lines(result: ArgumentResult) -> list[str]:
    """Return one line; for what failed, or is not known, two more with the worst element."""
    message = f": {result.message}" if result.message else ""
    if not result.judged:
        return [f"{result.name}: {result.verdict}{message}"]
    pattern = f" ({result.pattern})" if result.pattern else ""
    compared = f"{result.checked} of {result.total} elements"
    compared += f" and {result.probes} probes" if result.probes else ""
    compared += f", {result.failing} differ" if result.failing else ""
    compared += f", by {result.method}" if result.method != "secants" else ""
    head = f"{result.name}: {result.verdict}{pattern}: {compared}"
    lines = [f"{head}, resolution {result.resolution:.1e}{message}"]
    if result.verdict == "PASS":
        return lines
    place = "along a probe" if result.index is None else f"at {list(result.index)}"
    difference = f"differ by {abs(result.actual - result.numeric):.2e}, z = {result.z:.3g}"
    bounds = f"backward {result.bound_actual:.2e}, numeric {result.bound_numeric:.2e}"
    values = f"backward {result.actual:.17g}, numeric {result.numeric:.17g}"
    return [*lines, f"    {place}: {values}", f"    {difference}; bounds: {bounds}"]


def headline(report: GradientReport) -> str:
    """Return the verdict and what it is about."""
    verdict = report.verdict
    if verdict == "PASS":
        if not math.isfinite(report.resolution):
            return "PASS"
        return f"PASS: an error of {report.resolution:.1e}, relative, would have been seen"
    names = [r.name for r in report.arguments if r.verdict == verdict]
    if names:
        about = "wrong gradient" if verdict == "FAIL" else "no verdict on the gradient"
        return f"{verdict}: {about} of {_list(names)}"
    open_ = [layer for layer, _, rest in _layers(report) if verdict in dict(rest)]
    return f"{verdict}: {_list(open_) or 'nothing was compared'}"


def _list(names: list[str]) -> str:
    """Return "x, gamma and beta"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _layers(report: GradientReport) -> list[tuple[str, int, list[tuple[str, str]]]]:
    """Return by layer its name, how much passed, and (verdict, sentence) of the rest."""
    seen = [
        (
            "identities",
            "PASS" if i.passed else "FAIL",
            f"{i.name}: off by {i.error:.2e}, bound {i.bound:.2e}",
        )
        for i in report.identities
    ]
    seen += [
        (f.layer, f.verdict, ": ".join(filter(None, [f.name, f.message]))) for f in report.findings
    ]
    found: dict[str, list[tuple[str, str]]] = {}
    for layer, verdict, sentence in seen:
        found.setdefault(layer, []).append((verdict, sentence))
    return [
        (layer, sum(v == "PASS" for v, _ in every), [each for each in every if each[0] != "PASS"])
        for layer, every in found.items()
    ]


def _summary(layer: str, passed: int, rest: list[tuple[str, str]]) -> str:
    """Return "contract: 12 of 13 pass, 2 notes"; notes are not counted among them."""
    notes = sum(verdict == "NOTE" for verdict, _ in rest)
    counted = passed + len(rest) - notes
    words = []
    if counted:
        words.append(f"{passed} pass" if passed == counted else f"{passed} of {counted} pass")
    if notes:
        words.append(f"{notes} note" + "s" * (notes > 1))
    return f"{layer}: {', '.join(words)}"
