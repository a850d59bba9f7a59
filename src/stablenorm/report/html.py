"""The page of `stablenorm report`: everything is computed and measured, then written down."""

from __future__ import annotations

import datetime as dt
import os
import platform
import re
import shlex
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import stablenorm
from stablenorm.cost import Measured, measure_costs
from stablenorm.diagnosis import diagnose
from stablenorm.report.figures import as_svg
from stablenorm.report.findings import Findings, Problem, compute, inspect, is_finite
from stablenorm.report.sections import (
    Section,
    accuracy_section,
    cost_section,
    data_section,
    gradients_section,
    losses_section,
    number,
    worst,
)
from stablenorm.threads import get_num_threads

# Elements that are computed and judged by identities, about a second of it; of a larger array
# evenly spaced rows.
_ELEMENTS = 2**24
# Bytes of x beyond the caches of most machines: a copy reads and writes twice as much. Rounds and
# seconds of each size: a reader waits for them, and a median of three tells a factor.
_FAR, _ROUNDS, _SECONDS = 2**25, 9, 3.0
# At most: the diagnosis; the four steps of `inspect`; the two sizes that are timed.
STEPS = 1 + 4 + 2
_TIMES = "\N{MULTIPLICATION SIGN}"
# What no page can show: control characters and lone halves of surrogate pairs, which may stand in
# the name of a file.
_UNSHOWN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


class Facts(NamedTuple):
    """Everything that the page says."""

    source: str
    abstract: str
    sections: tuple[Section, ...]
    # What could not be checked did not fail.
    passed: bool
    versions: str
    machine: str
    date: str


def gather(problem: Problem, step: Callable[[str], None]) -> Facts:
    """Compute and measure everything; `step` is told what is going on."""
    step("diagnosis")
    diagnosis = diagnose(problem.x, problem.eps)
    part, choice = _judgeable(problem)
    found: Findings | None = None
    abstract = f"Nothing could be checked: {choice}."
    accuracy, gradients = (Section(name, absent=choice) for name in ("Accuracy", "Gradient check"))
    if part is not None:
        found = inspect(part, compute(part), step)
        accuracy, gradients = accuracy_section(found), gradients_section(found)
        accuracy = accuracy._replace(notes=f"{accuracy.notes} {choice}")
        ours, plain = (
            number(max(worst(getattr(output, name)) for output in found.outputs.values()))
            for name in ("error", "plain_error")
        )
        abstract = (
            f"On these data the formula that everybody writes is off by up to {plain} ulp, units in "
            f"the last place; stablenorm by {ours}, where 0.5 is correct rounding. "
        )
        abstract += "No check failed." if found.passed else "A check failed; its table says which."
    try:
        cost = cost_section(_measure(problem, step))
    except ImportError as error:
        cost = Section("Cost and time", absent=f"the fused kernel cannot be loaded: {error}")
    return Facts(
        problem.source,
        abstract,
        (data_section(problem, diagnosis), accuracy, losses_section(diagnosis), gradients, cost),
        found is None or found.passed,
        f"stablenorm {stablenorm.__version__}, NumPy {np.__version__}, "
        f"Python {platform.python_version()}",
        f"{_processor()}, {os.cpu_count()} processors, {platform.system()}",
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
    )


def check_problem(problem: Problem) -> None:
    """Refuse what the package refuses, in its words, before anything is computed."""
    x, dy = problem.x, problem.dy
    # Without rows: the checks alone. What differs in shape is refused whole.
    whole = x.ndim < 2 or x.shape != dy.shape
    compute(problem if whole else problem._replace(x=x[:0], dy=dy[:0]))
    if x.size == 0:
        msg = f"x must have at least one row, got shape {x.shape}"
        raise ValueError(msg)


def _judgeable(problem: Problem) -> tuple[Problem | None, str]:
    """Return the rows that have an exact result, few enough, and which they are."""
    for name in ("gamma", "beta"):
        array = getattr(problem, name)
        if array is not None and not is_finite(array):
            return None, f"{name} is not finite, so that no row has an exact result"
    n = problem.x.shape[-1]
    x, dy = (array.reshape(-1, n) for array in (problem.x, problem.dy))
    keep = np.isfinite(x).all(axis=1) & np.isfinite(dy).all(axis=1)
    if problem.eps == 0:
        keep &= (x != x[:, :1]).any(axis=1)
    chosen, words = np.flatnonzero(keep), []
    if not chosen.size:
        return None, "no row of x and dy has an exact result: they hold NaN, infinity or 0/0"
    if left_out := len(x) - chosen.size:
        words.append(
            f"{left_out} rows that hold NaN or infinity, or are constant with eps = 0, are left out"
        )
    most = max(1, _ELEMENTS // n)
    if chosen.size > most:
        words.append(f"{most} rows are taken, evenly spaced")
        chosen = chosen[np.linspace(0, chosen.size - 1, most).astype(np.intp)]
    if not words:
        return problem, ""
    return problem._replace(x=x[chosen], dy=dy[chosen], expected={}), f"{'; '.join(words)}."


def _measure(problem: Problem, step: Callable[[str], None]) -> list[Measured]:
    """Time the programs at the data's own shape and, if that is small, beyond the caches."""
    n, kind = problem.x.shape[-1], problem.x.dtype
    own, far = problem.x.size // n, max(1, _FAR // (n * kind.itemsize))
    found = []
    for rows in [min(own, far)] if own > far // 2 else [own, far]:
        step(f"time of {rows} rows")
        found.append(
            measure_costs((rows, n), str(kind), get_num_threads(), rounds=_ROUNDS, limit=_SECONDS)
        )
    return found


def _processor() -> str:
    """Return the processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_page(facts: Facts, file: Any) -> None:
    """Write the whole page, in UTF-8, into an open file."""
    file.write(page(facts).encode())


def page(facts: Facts) -> str:
    """Return the whole page."""
    # Loaded when a page is wanted: no other command needs them.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    # Everything is escaped, so that nothing in a file is markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["prose"] = _prose
    bundled = facts.source.startswith("bundled data")
    pictures = [
        as_svg(p.draw, p.height, p.label, stacked=p.stacked) if p else {}
        for p in (section.picture for section in facts.sections)
    ]
    text = environment.from_string(_read("page.html")).render(
        facts=facts,
        title=f"Layer normalization of {'the ' if bundled else ''}{facts.source}",
        style=_read("page.css"),
        pictures=pictures,
        argument="" if bundled else f" {shlex.quote(facts.source)}",
    )
    return _UNSHOWN.sub("\ufffd", text)


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _prose(text: str) -> Any:
    """Escape a text, and set its numbers as printers do: 2e-05 with a power of ten."""
    from markupsafe import Markup, escape  # noqa: PLC0415

    found = re.sub(r"(?<=\d)e\+?(-?)0*(\d+)\b", rf" {_TIMES} 10<sup>\1\2</sup>", str(escape(text)))
    found = re.sub(r" x (?=\d)", f" {_TIMES} ", found)
    return Markup(re.sub(r"(?<![^\s>(])-(?=\d)", "\N{MINUS SIGN}", found))
