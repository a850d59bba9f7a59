"""`stablenorm report`: everything about one layer norm, on one page."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stablenorm.cli.files import InputError, check_target, read_problem, write_beside
from stablenorm.cli.parts import EXIT_FAILED, Help, add_problem, check_at_least, step_bar
from stablenorm.report import STEPS, check_problem, gather, write_page

_OUT = Path("stablenorm-report.html")

_EXAMPLES = """\
examples:
  stablenorm report                       the bundled data: a real layer norm of a language model
  stablenorm report mine.npz              x and, if held, gamma, beta, dy, eps from a file
  stablenorm report mine.npz --out mine.html

The page is one file. It loads nothing and runs no script. You can mail it, print it or keep it.

exit status: 0 no check failed; 1 a check failed, the page says which; 2 the input cannot be used or
the page cannot be written, one line says why.
"""


def add(commands: Any) -> None:
    """Add `report` to the commands."""
    parser = commands.add_parser(
        "report",
        help="write one HTML page on a layer norm: accuracy, hazards, gradients, cost, speed",
        description=(
            "Compute a layer norm and its gradients and check them. Find what would break other "
            "implementations on these data. Measure the cost on this machine. Write all of it to "
            "one HTML page. x is normalized over its last axis."
        ),
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.set_defaults(job=run)
    add_problem(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=_OUT,
        metavar="FILE.html",
        help=f"the page to write; an existing file is replaced; default: {_OUT}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm report` is asked."""
    check_target("--out", arguments.out, (".html", ".htm"))
    for module, name in (("jinja2", "Jinja2"), ("matplotlib", "Matplotlib")):
        if importlib.util.find_spec(module) is None:
            msg = f'{name} is needed for the report: pip install "stablenorm[plot]"'
            raise InputError(msg)
    check_at_least("--seed", arguments.seed, 0)
    problem = read_problem(arguments.file, arguments.eps, arguments.seed)
    try:
        check_problem(problem)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from None
    # Redrawn once a second, by a thread that would otherwise take its share of what is timed.
    with step_bar(STEPS, per_second=1) as step:
        facts = gather(problem, step)
    write_beside(arguments.out, lambda file: write_page(facts, file))
    verdict = "no check failed" if facts.passed else "A CHECK FAILED"
    words = (
        f"{arguments.out}: {verdict}. Open it in any browser: {arguments.out.absolute().as_uri()}"
    )
    # A name may hold brackets; an address that is broken into lines cannot be clicked.
    Console(soft_wrap=True).print(Text(words))
    return 0 if facts.passed else EXIT_FAILED
