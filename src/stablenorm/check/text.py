"""A gradient report as text."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from stablenorm.check.report import ArgumentResult, GradientReport

# Wide enough for two floats of 17 digits and what they are, narrow enough for a terminal, a log
# and a message of pytest.
_WIDTH = 100

_COLORS = {"PASS": "green", "FAIL": "red", "INCONCLUSIVE": "yellow"}


def as_text(report: GradientReport) -> str:
    """Return the report in lines of at most 100 columns, the verdict first."""
    lines = [headline(report)]
    for sentence in report.diagnosis:
        lines += _wrapped(f"  {sentence}", "    ")
    for result in report.arguments:
        lines += [f"  {line}" for line in argument_lines(result)]
    for layer, passed, rest in _layers(report):
        lines += _wrapped(f"  {_summary(layer, passed, rest)}", "    ")
        for verdict, sentence in rest:
            # Where something is wrong, what is merely worth knowing stands in the way.
            if verdict != "NOTE" or report.passed:
                lines += _wrapped(f"    {verdict}: {sentence}", "        ")
    lines.append(f"  {_cost(report)}")
    return "\n".join(lines)


def argument_lines(result: ArgumentResult) -> list[str]:
    """Return one line; for what failed, or is not known, two more with the worst element."""
    head = f"{result.name}: {result.verdict}"
    if not result.judged:
        return _with_message(head, result.message)
    if result.pattern:
        head += f" ({result.pattern})"
    line = f"{head}: {_seen(result)}, resolution {result.resolution:.1e}"
    lines = _with_message(line, result.message)
    if result.verdict == "PASS":
        return lines
    return [*lines, *(f"    {line}" for line in _worst(result))]


def _with_message(line: str, message: str) -> list[str]:
    """Append a message where there is room, else on lines of its own, whole if it can be."""
    together = f"{line}: {message}" if message else line
    if len(together) <= _WIDTH - 2 and "\n" not in together:
        return [together]
    indented = _wrapped(f"    {message}", "    ") if message else []
    return [*_wrapped(line, "    "), *indented]


def _worst(result: ArgumentResult) -> tuple[str, str]:
    difference = abs(result.actual - result.numeric)
    return (
        f"{_place(result)}: backward {result.actual:.17g}, numeric {result.numeric:.17g}",
        (
            f"differ by {difference:.2e}, z = {result.z:.3g}; bounds: backward "
            f"{result.bound_actual:.2e}, numeric {result.bound_numeric:.2e}"
        ),
    )


def _place(result: ArgumentResult) -> str:
    """Return where the worst is: in NumPy's way of writing an index."""
    if result.index is None:
        return "along a probe"
    return f"at {list(result.index)}"


def _seen(result: ArgumentResult) -> str:
    compared = f"{result.checked} of {result.total} elements"
    if result.probes:
        compared += f" and {result.probes} probes"
    if result.failing:
        compared += f", {result.failing} differ"
    if result.method not in ("", "secants"):
        compared += f", by {result.method}"
    return compared


def headline(report: GradientReport) -> str:
    """Return the verdict and what it is about."""
    failed = _failed(report)
    if report.verdict == "FAIL":
        names = [r.name for r in report.arguments if r.verdict == "FAIL"]
        if names:
            return f"FAIL: wrong gradient of {_list(names)}"
        return f"FAIL: {_list(failed)}"
    if report.verdict == "PASS":
        if not math.isfinite(report.resolution):
            return "PASS"
        return f"PASS: an error of {report.resolution:.1e}, relative, would have been seen"
    unknown = [r.name for r in report.arguments if r.verdict == "INCONCLUSIVE"]
    if unknown:
        return f"INCONCLUSIVE: no verdict on the gradient of {_list(unknown)}"
    open_ = [
        layer for layer, _, rest in _layers(report) if any(v == "INCONCLUSIVE" for v, _ in rest)
    ]
    return f"INCONCLUSIVE: {_list(open_) or 'nothing was compared'}"


def _failed(report: GradientReport) -> list[str]:
    return [layer for layer, _, rest in _layers(report) if any(v == "FAIL" for v, _ in rest)]


def _list(names: list[str]) -> str:
    """Return "x, gamma and beta"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _layers(report: GradientReport) -> list[tuple[str, int, list[tuple[str, str]]]]:
    """Return for each layer its name, how much passed, and (verdict, sentence) of the rest."""
    found: dict[str, tuple[list[int], list[tuple[str, str]]]] = {}
    for identity in report.identities:
        passed, rest = found.setdefault("identities", ([], []))
        if identity.passed:
            passed.append(1)
        else:
            sentence = f"{identity.name}: off by {identity.error:.2e}, bound {identity.bound:.2e}"
            rest.append(("FAIL", sentence))
    for finding in report.findings:
        passed, rest = found.setdefault(finding.layer, ([], []))
        if finding.verdict == "PASS":
            passed.append(1)
        else:
            sentence = ": ".join(filter(None, [finding.name, finding.message]))
            rest.append((finding.verdict, sentence))
    return [(layer, len(passed), rest) for layer, (passed, rest) in found.items()]


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


def _cost(report: GradientReport) -> str:
    # Below a second, how long it took interests nobody, and equal checks give equal texts.
    calls = f"{report.forward_calls} forward and {report.backward_calls} backward calls"
    return f"{calls}, {report.seconds:.1f} s" if report.seconds >= 1 else calls


def _wrapped(line: str, indent: str) -> list[str]:
    """Break at spaces; what has none (a path, a number) is left whole."""
    return textwrap.wrap(
        line,
        # Leaves room for the two columns that a report adds before an argument.
        _WIDTH - 2,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        # A message of several lines is one here.
        replace_whitespace=True,
        drop_whitespace=True,
    )


def as_rich(report: GradientReport) -> Any:
    """Return the text for a rich console, its verdicts coloured."""
    from rich.text import Text  # noqa: PLC0415

    text = Text(as_text(report))
    for verdict, color in _COLORS.items():
        text.highlight_words([verdict], color)
    text.stylize("bold", 0, len(report.verdict))
    return text
