"""`stablenorm report`: everything about one layer norm, on one page."""

import argparse
from typing import Any

from stablenorm.cli import parts
from stablenorm.cli.problem import add_problem, compute_problem
from stablenorm.report import STEPS, make_page

_OUT = "stablenorm-report.html"

_EXAMPLES = """\
examples:
  stablenorm report           the bundled data: a layer norm of a language model
  stablenorm report mine.npz  x and, if held, gamma, beta, dy, eps from a file
  stablenorm report mine.npz --out mine.html

The page is one file. It loads nothing and runs no script. You can mail it, print it or keep it.

exit status: 0 no check failed; 1 a check failed, the page says which; 2 the input cannot be used or
the page cannot be written, one line says why.
"""


def add(commands: Any) -> None:
    """Add `report` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "write one HTML page on a layer norm: accuracy, hazards, gradients, cost, speed",
        "Compute a layer norm and its gradients and check them. Find what would break other "
        "implementations on these data. Measure the cost on this machine. Write all of it to one "
        "HTML page. x is normalized over its last axis.",
        _EXAMPLES,
    )
    add_problem(parser)
    about = f"the page to write; an existing file is replaced; default: {_OUT}"
    parts.add_output(parser, "--out", (".html", ".htm"), about, default=_OUT)


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm report` is asked."""
    for module in ("jinja2", "matplotlib"):
        parts.require(module, "the report")
    problem, results = compute_problem(arguments)
    with parts.step_bar(STEPS) as step:
        page, passed = make_page(problem, results, step)
    parts.write_whole(arguments.out, lambda file: file.write(page.encode()))
    verdict = "no check failed" if passed else "A CHECK FAILED"
    where = f"Open it in any browser: {arguments.out.as_uri()}"
    # An address that is broken into lines cannot be clicked.
    parts.print_lines(f"{arguments.out.name}: {verdict}. {where}", soft_wrap=True)
    return 0 if passed else parts.EXIT_FAILED
