"""`stablenorm report`: all that is known of a layer norm, on one page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import shlex
from importlib import resources
from typing import Any

from stablenorm.report_page._cost_section import cost_section
from stablenorm.report_page._diagnosis_section import diagnosis_section
from stablenorm.report_page._gather import STEPS, Facts, gather
from stablenorm.report_page._html import Html, number, paragraph, section, text
from stablenorm.report_page._sections import (
    accuracy_section,
    data_section,
    gradients_section,
    speed_section,
)

__all__ = ["STEPS", "Facts", "gather", "write_page"]

# How the name of the data that come with the package begins.
_BUNDLED = "bundled data"
_SECTIONS = (
    ("data", "The data", data_section),
    ("accuracy", "Accuracy", accuracy_section),
    ("diagnosis", "Where others would lose digits", diagnosis_section),
    ("gradients", "Gradient check", gradients_section),
    ("cost", "Cost, predicted and measured", cost_section),
    ("speed", "Time against a copy", speed_section),
)


def write_page(facts: Facts, file: Any) -> None:
    """Write the whole page, in UTF-8, into an open file."""
    file.write(page(facts).encode())


def page(facts: Facts) -> Html:
    """Return the whole page."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # Nothing is loaded and no script runs, whatever the data contain: the browser is told so.
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    the = "the " if facts.problem.source.startswith(_BUNDLED) else ""
    title = f"Layer normalization of {the}{facts.problem.source}"
    parts = [
        section(place, name, heading, write(facts))
        for place, (name, heading, write) in enumerate(_SECTIONS, 1)
    ]
    links = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading, _ in _SECTIONS)
    return Html(
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{_themes()}\n<header>\n<h1>{text(title)}</h1>\n{_dateline(facts)}\n{_abstract(facts)}\n"
        f'</header>\n<nav aria-label="Sections"><ol>{links}</ol></nav>\n<main>\n'
        + "\n".join(parts)
        + f"\n</main>\n{_footer(facts)}\n</body>\n</html>\n"
    )


def _themes() -> Html:
    """Return the choice between light, dark and what the system says; the style sheet does it."""
    choices = "".join(
        f'<label><input type="radio" name="theme" id="theme-{name}"{checked}> {name}</label>'
        for name, checked in (("system", " checked"), ("light", ""), ("dark", ""))
    )
    return Html(f'<fieldset class="theme"><legend>Colors</legend>{choices}</fieldset>')


def _dateline(facts: Facts) -> Html:
    origin = facts.origin
    return paragraph(f"{origin.date}. {origin.versions}. {origin.machine}.", "dateline")


def _abstract(facts: Facts) -> Html:
    """Say in a few sentences what the page shows."""
    findings = facts.findings
    if isinstance(findings, str):
        return paragraph(f"Nothing could be checked: {findings}.", "abstract")
    outputs = findings.outputs.values()
    plain = max(float(output.plain_error.max()) for output in outputs)
    ours = max(float(output.error.max()) for output in outputs)
    words = (
        f"On these data the formula that everybody writes is off by up to {number(plain)} units "
        f"in the last place; stablenorm by {number(ours)}, where 0.5 is correct rounding. "
    )
    verdict = "No check failed." if findings.passed else "A check failed; its table says which."
    return paragraph(words + verdict, "abstract")


def _footer(facts: Facts) -> Html:
    """Say how to make the page again."""
    given = (
        "" if facts.problem.source.startswith(_BUNDLED) else f" {shlex.quote(facts.problem.source)}"
    )
    return Html(f"<footer>{paragraph(f'Written by `stablenorm report{given}`.')}</footer>")
