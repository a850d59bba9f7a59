"""What was found about a user's norm: computed, told in sections, written as a page."""

import datetime as dt
import os
import platform
from collections.abc import Callable
from importlib import resources

import numpy as np

import stablenorm
from stablenorm.diagnosis import diagnose
from stablenorm.report import sections
from stablenorm.report.figures import as_svg
from stablenorm.report.findings import Problem, inspect
from stablenorm.text import number, prose, quantity, shape_text
from stablenorm.types import Array

# The diagnosis; the two steps of `inspect`.
STEPS = 1 + 2


def make_page(
    problem: Problem, results: dict[str, Array], step: Callable[[str], None]
) -> tuple[str, bool]:
    """Check and measure everything, telling `step`; return the page, and whether no check failed."""
    # Loaded when a page is wanted: no other command needs it.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    step("diagnosis")
    losses = sections.losses_section(diagnose(problem.x, problem.eps, kind=problem.kind))
    found = inspect(problem, results, step)
    x, n = problem.x, problem.x.shape[-1]
    cost = sections.cost_section((x.size // n, n), str(x.dtype), problem.kind)
    ours, plain = (
        number(max(sections.worst(getattr(output, name)) for output in found.outputs.values()))
        for name in ("error", "plain_error")
    )
    verdict = "No check failed." if found.passed else "A check failed; its table says which."
    abstract = (
        f"On these data the formula that everybody writes is off by up to {plain} ulp, units in the "
        f"last place; stablenorm by {ours}, a correctly rounded result by at most 0.5. {verdict} x has the shape "
        f"{shape_text(x.shape)} in {x.dtype} ({quantity(x.nbytes, 'B')}), and eps is "
        f"{number(problem.eps)}. The cotangent is {problem.dy_origin}."
    )
    origin = (
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC. stablenorm {stablenorm.__version__}, NumPy "
        f"{np.__version__}, Python {platform.python_version()}. {platform.machine()}, "
        f"{os.cpu_count()} processors, {platform.system()}."
    )
    title = f"{'Layer' if problem.kind == 'layer' else 'RMS'} normalization of {problem.source}"
    told = (sections.accuracy_section(found), losses, sections.gradients_section(found), cost)
    # Everything is escaped, so that nothing in a file is markup.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"prose": prose, "svg": as_svg}
    here = resources.files(__package__)
    template, style = (here.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    text = environment.from_string(template).render(
        style=style, title=title, origin=origin, abstract=abstract, sections=told
    )
    # The name of a file may be no Unicode.
    return text.encode("utf-8", "replace").decode("utf-8"), found.passed
