"""A gradient report as text, as a rich table, and as plain data."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stablenorm.check._report import ArgumentResult, GradientReport

# Wide enough for two floats of 17 digits and what they are, narrow enough for a terminal, a log
# and a message of pytest.
_WIDTH = 100

# Of one layer, in the table: where there are more they are much alike.
_NOTES = 5

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
    """Return what a rich console prints: verdict and diagnosis, arguments, layers, cost."""
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    verdict, _, about = headline(report).partition(":")
    parts: list[Any] = [Text.assemble((verdict, f"bold {_COLORS[report.verdict]}"), f":{about}")]
    parts += [Text(f"  {sentence}", style="bold") for sentence in report.diagnosis]
    parts.append(_arguments_table(report))
    for result in report.arguments:
        parts += _worst_lines(result)
    if report.identities or report.findings:
        parts.append(_layers_table(report))
    parts.append(Text(_cost(report), style="dim"))
    return Group(*parts)


def _worst_lines(result: ArgumentResult) -> list[Any]:
    """Return, for what did not pass, the words that have no room in the table."""
    from rich.text import Text  # noqa: PLC0415

    if result.verdict == "PASS":
        return []
    lines = [result.message] if result.message else []
    if result.judged:
        lines += _worst(result)
    heads = [f"{result.name}: ", *["  "] * (len(lines) - 1)]
    return [Text(head + line) for head, line in zip(heads, lines, strict=True)]


def _table(*columns: str) -> Any:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        # No word of a head is cut in two while there are spaces to break at.
        table.add_column(
            column, overflow="fold", min_width=max(map(len, column.split()), default=0)
        )
    return table


def _colored(verdict: str) -> Any:
    from rich.text import Text  # noqa: PLC0415

    return Text(verdict, style=_COLORS.get(verdict, "dim"), no_wrap=True)


def _arguments_table(report: GradientReport) -> Any:
    table = _table("gradient of", "verdict", "compared", "differ", "worst z", "resolution")
    for column in table.columns[-2:]:
        column.justify = "right"
    for result in report.arguments:
        cells = ["nothing", "", "", ""]
        if result.judged:
            probes = f" + {result.probes} probes" if result.probes else ""
            cells = [
                f"{result.checked} of {result.total}{probes}",
                _differing(result),
                f"{result.z:.2g}",
                f"{result.resolution:.1e}",
            ]
        table.add_row(_plain(result.name), _colored(result.verdict), *map(_plain, cells))
    return table


def _differing(result: ArgumentResult) -> str:
    """Return how many elements differ, and where."""
    if not result.failing:
        return "none"
    return f"{result.failing}, {result.pattern}" if result.pattern else str(result.failing)


def _layers_table(report: GradientReport) -> Any:
    table = _table("also looked at", "verdict", "what was seen")
    for layer, passed, rest in _layers(report):
        words = {verdict for verdict, _ in rest}
        whole = next((word for word in ("FAIL", "INCONCLUSIVE") if word in words), "PASS")
        table.add_row(
            _plain(layer),
            _colored(whole if passed or whole != "PASS" else ""),
            _plain(_summary(layer, passed, rest).partition(": ")[2]),
        )
        shown = [found for found in rest if found[0] != "NOTE"]
        notes = [found for found in rest if found[0] == "NOTE"]
        shown += notes[:_NOTES]
        for verdict, sentence in shown:
            table.add_row("", _colored(verdict), _plain(sentence))
        if len(notes) > _NOTES:
            table.add_row("", "", f"and {len(notes) - _NOTES} more notes, all of them in the JSON")
    return table


def _plain(text: str) -> Any:
    """Return text whose brackets are brackets, not markup."""
    from rich.text import Text  # noqa: PLC0415

    return Text(text)


def as_dict(report: GradientReport) -> dict[str, Any]:
    """Return plain types; see `GradientReport.as_dict`."""
    return {
        "verdict": report.verdict,
        "passed": report.passed,
        "resolution": _number(report.resolution),
        "diagnosis": list(report.diagnosis),
        "arguments": [_argument_dict(result) for result in report.arguments],
        "identities": [_plain_dict(identity) for identity in report.identities],
        "findings": [_plain_dict(finding) for finding in report.findings],
        "forward_calls": int(report.forward_calls),
        "backward_calls": int(report.backward_calls),
        "seconds": _number(report.seconds),
    }


def _argument_dict(result: ArgumentResult) -> dict[str, Any]:
    held = {name: getattr(result, name) for name in result.__dataclass_fields__}
    held["differences"] = [{**_plain_dict(d), "z": _value(d.z)} for d in result.differences]
    held["curve"] = [_plain_dict(secant) for secant in result.curve]
    return {name: _value(value) for name, value in held.items()} | {"z": _value(result.z)}


def _plain_dict(record: Any) -> dict[str, Any]:
    return {name: _value(value) for name, value in record._asdict().items()}


def _value(value: Any) -> Any:
    """Return a plain type; NumPy's scalars too."""
    if value is None or isinstance(value, (str, bool, dict, list)):
        return value
    if isinstance(value, tuple):
        return [_value(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (bool, int)) else _number(value)


def _number(value: float) -> float | str:
    """Return a float; as a string what JSON has no number for, in words that float() reads."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
