"""What was found about a user's norm: computed, told in sections, written as a page."""

import datetime as dt
import os
import platform
from collections.abc import Callable
from importlib import resources

import numpy as np

import stablenorm
from stablenorm.cost import measure_costs
from stablenorm.diagnosis import diagnose
from stablenorm.report import sections
from stablenorm.report.figures import as_svg
from stablenorm.report.findings import Problem, inspect
from stablenorm.text import Section, number, prose, quantity, shape_text
from stablenorm.threads import get_num_threads
from stablenorm.types import Array

# Bytes of x beyond the caches of most machines: a copy reads and writes twice as much. Rounds and
# seconds: a reader waits for them, and a median of three tells a factor.
_BYTES, _ROUNDS, _SECONDS = 2**25, 9, 3.0
# The diagnosis; the two steps of `inspect`; the times.
STEPS = 1 + 2 + 1


def make_page(
    problem: Problem, results: dict[str, Array], step: Callable[[str], None]
) -> tuple[str, bool]:
    """Check and measure everything, telling `step`; return the page, and whether no check failed."""
    # Loaded when a page is wanted: no other command needs it.
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415

    step("diagnosis")
    losses = sections.losses_section(diagnose(problem.x, problem.eps, kind=problem.kind))
    found = inspect(problem, results, step)
    step("cost and times")
    x, n = problem.x, problem.x.shape[-1]
    what = (max(1, _BYTES // (n * x.itemsize)), n), str(x.dtype), get_num_threads()
    try:
        cost = sections.cost_section(
            measure_costs(*what, kind=problem.kind, rounds=_ROUNDS, limit=_SECONDS)
        )
    except ImportError as error:
        cost = Section("Cost and time", f"Not computed: the fused kernel: {error}.")
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
