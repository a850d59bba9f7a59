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
from stablenorm.report.findings import Problem, inspect
from stablenorm.report.sections import (
    Section,
    accuracy_section,
    cost_section,
    gradients_section,
    losses_section,
    number,
    quantity,
    shape_text,
    worst,
)
from stablenorm.threads import get_num_threads
from stablenorm.types import Array

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
    passed: bool
    # Date, versions and machine.
    origin: str


def gather(problem: Problem, results: dict[str, Array], step: Callable[[str], None]) -> Facts:
    """Check and measure everything; `step` is told what is going on."""
    step("diagnosis")
    diagnosis = diagnose(problem.x, problem.eps)
    found = inspect(problem, results, step)
    try:
        cost = cost_section(_measure(problem, step))
    except ImportError as error:
        cost = Section("Cost and time", absent=f"the fused kernel cannot be loaded: {error}")
    ours, plain = (
        number(max(worst(getattr(output, name)) for output in found.outputs.values()))
        for name in ("error", "plain_error")
    )
    x = problem.x
    data = (
        f"x has the shape {shape_text(x.shape)} in {x.dtype}: {found.rows} rows of n = {x.shape[-1]} "
        f"elements ({quantity(x.nbytes, 'B')}), each normalized by itself, with eps = "
        f"{number(problem.eps)}. The cotangent is {problem.dy_origin}."
    )
    verdict = "No check failed." if found.passed else "A check failed; its table says which."
    return Facts(
        problem.source,
        f"On these data the formula that everybody writes is off by up to {plain} ulp, units in the "
        f"last place; stablenorm by {ours}, where 0.5 is correct rounding. {verdict} {data}",
        (
            accuracy_section(found),
            losses_section(diagnosis),
            gradients_section(found),
            cost,
        ),
        found.passed,
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC. stablenorm {stablenorm.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}. {_processor()}, {os.cpu_count()} "
        f"processors, {platform.system()}.",
    )


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


def page(facts: Facts) -> str:
    """Return the whole page."""
    # Loaded when a page is wanted: no other command needs them.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    # Everything is escaped, so that nothing in a file is markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["prose"] = _prose
    bundled = facts.source.startswith("bundled data")
    pictures = [
        as_svg(one.picture.draw, one.picture.height, one.heading) if one.picture else ""
        for one in facts.sections
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
