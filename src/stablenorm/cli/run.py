"""`stablenorm run`: compute, and check every number."""

import argparse
from typing import Any

import numpy as np

from stablenorm.api import layer_norm_backward, layer_norm_forward
from stablenorm.cli import parts
from stablenorm.cli.problem import add_problem, compute_problem
from stablenorm.report.findings import inspect
from stablenorm.report.sections import accuracy_section, cost_section, gradients_section
from stablenorm.testing import digest, digest_inputs, published_digests

_EXAMPLES = """\
examples:
  stablenorm run              the bundled data: a layer norm of a language model
  stablenorm run mine.npz     x and, if held, gamma, beta, dy, eps from a file
  stablenorm run mine.npz --kind rms   an RMS norm
  stablenorm run arrays/      the same from x.npy, gamma.npy, ...
  stablenorm run mine.npz --out res.npz
  stablenorm run --digests    is rounding="nearest" the same here as everywhere?

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used, one line says why.
"""


def add(commands: Any) -> None:
    """Add `run` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "compute y, dx, dgamma and dbeta of the arrays in a file, and check them",
        "Compute y, dx, dgamma and dbeta, and check them against the exact result, against finite "
        "differences and against identities. The error of the usual two-pass formula on the same "
        "data is shown beside ours. x is normalized over its last axis.",
        _EXAMPLES,
    )
    add_problem(parser)
    parts.add_output(parser, "--out", (".npz",), "write y, dx, dgamma and dbeta to this file")
    about = "compare digests of correctly rounded results with those published; nothing else"
    parser.add_argument("--digests", action="store_true", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    if arguments.digests:
        return _compare_digests()
    source, out = arguments.file, arguments.out
    if source and out and source.exists() and out.exists() and out.samefile(source):
        msg = f"--out must not be the file that is read, got {source}"
        raise parts.InputError(msg)
    problem, results = compute_problem(arguments)
    parts.write_whole(out, lambda file: np.savez(file, **results))  # type: ignore[arg-type]
    # The two steps of `inspect`.
    with parts.step_bar(2) as step:
        findings = inspect(problem, results, step)
    x = problem.x
    kind = ", RMS norm" * (problem.kind == "rms")
    about = f": x {x.shape} {x.dtype}, eps {problem.eps:g}{kind}; {problem.dy_origin}"
    parts.print_lines(about, bold=problem.source)
    n = x.shape[-1]
    cost = cost_section((x.size // n, n), str(x.dtype), problem.kind)
    parts.print_sections(accuracy_section(findings), gradients_section(findings), cost)
    judged = findings.gradients is not None and findings.gradients.verdict != "INCONCLUSIVE"
    verdict = "All checks passed." if judged else "No check failed."
    parts.print_lines(verdict if findings.passed else "A CHECK FAILED.")
    return 0 if findings.passed else parts.EXIT_FAILED


def _compare_digests() -> int:
    """Print the digests of y, dx, dgamma and dbeta of each fixed input, and whether they are right."""
    differ, published = 0, published_digests()
    for name, case in digest_inputs().items():
        y, cache = layer_norm_forward(*case[:4], rounding="nearest")
        outputs = y, *layer_norm_backward(case.dy, cache)
        found = tuple(digest(output) for output in outputs if output is not None)
        differ += found != published[name]
        parts.print_lines(" ".join((f"{name:27}", *found)))
    verdict = f"{differ} LINES DIFFER from those published." if differ else "All are as published."
    parts.print_lines(verdict)
    return parts.EXIT_FAILED if differ else 0
