"""`stablenorm run`: compute, and check every number."""

import argparse
import itertools

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.cli import parts
from stablenorm.cli.findings import Findings, compute_problem, inspect
from stablenorm.cli.page import make_page
from stablenorm.cli.sections import tell, worst
from stablenorm.testing import digest, digest_inputs, published_digests
from stablenorm.text import number, shape_text

EXAMPLES = """\
examples:
  stablenorm run              the bundled data: a layer norm of a language model
  stablenorm run mine.npz     x and, if held, gamma, beta, dy, eps from a file
  stablenorm run mine.npz --kind rms   an RMS norm
  stablenorm run arrays/      the same from x.npy, gamma.npy, ...
  stablenorm run mine.npz --out res.npz --html page.html
  stablenorm run --digests    is rounding="nearest" the same here as everywhere?

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used, one line says why.
"""


SUMMARY = "compute y, dx, dgamma and dbeta of the arrays in a file, and check them"
ABOUT = (
    "Compute y, dx, dgamma and dbeta, and check them against the exact result, against finite "
    "differences and a closed form. The error of the usual two-pass formula on the same "
    "data is shown beside ours, what other methods would lose, and what the norm costs. x is "
    "normalized over its last axis."
)
OPTIONS = {
    "file": "an .npz or .safetensors file, or a directory of .npy files, that holds x and, optionally, "
    "gamma, beta, dy, eps; or x alone, in an .npy file too; default: the bundled data",
    "--kind": "of the norm; default: layer",
    "--eps": "default: eps of the file, or 1e-5",
    "--rounding": "nearest: every element correctly rounded, or the check fails; default: fast",
    "--seed": "of a random dy, if the file has none; default: 0",
    "--out": "write y, dx, dgamma and dbeta to this file",
    "--html": "write the same on a page, with pictures, for a browser",
    "--digests": "compare digests of correctly rounded results with those published; nothing else",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    if arguments.digests:
        return _compare_digests()
    source, out, page = arguments.file, arguments.out, arguments.html
    for option, path in (("--out", out), ("--html", page)):
        if source and path and source.exists() and path.exists() and path.samefile(source):
            msg = f"{option} must not be the file that is read, got {source}"
            raise parts.InputError(msg)
    problem, results = compute_problem(arguments)
    parts.write_whole(out, lambda file: np.savez(file, **results))  # type: ignore[arg-type]
    with parts.progress_bar("") as progress:
        findings = inspect(problem, results, progress)
        progress(2, 3, "diagnosis")
        sections = tell(findings)
    judged = findings.gradients is not None and findings.gradients.verdict != "INCONCLUSIVE"
    verdict = "All checks passed." if judged else "No check failed."
    verdict = verdict if findings.passed else "A CHECK FAILED."
    x, kind = problem.x, ", RMS norm" * (problem.kind == "rms")
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {problem.eps:g}{kind}; {problem.dy_origin}"
    if page:
        title = f"{'RMS' if kind else 'Layer'} normalization of {problem.source}"
        content = make_page(title, about, f"{_abstract(findings)} {verdict}", sections)
        parts.write_whole(page, lambda file: file.write(content))
    parts.print_lines(f": {about}", bold=problem.source)
    for table in itertools.chain.from_iterable(section.tables for section in sections):
        parts.print_table(table)
    # How the numbers were obtained is below all of them.
    for section in sections:
        notes = section.notes and f"\n{section.notes}"
        parts.print_lines(f" {section.text}{notes}", bold=f"{section.heading}.")
    parts.print_lines(verdict)
    if page:
        parts.print_lines(f"The page: {page.as_uri()}")
    return 0 if findings.passed else parts.EXIT_FAILED


def _abstract(findings: Findings) -> str:
    """Compare ours with the plain formula in one sentence."""
    ours, plain = (
        number(max(worst(getattr(output, name)) for output in findings.outputs.values()))
        for name in ("error", "plain_error")
    )
    return (
        f"On these data the formula that everybody writes is off by up to {plain} ulp, units in the "
        f"last place; stablenorm by {ours}, a correctly rounded result by at most 0.5."
    )


def _compare_digests() -> int:
    """Print the digests of y, dx, dgamma and dbeta of each fixed input, and whether they are right."""
    differ, published, (forward, backward) = 0, published_digests(), FUNCTIONS["layer"]
    for name, case in digest_inputs().items():
        y, cache = forward(*case[:4], rounding="nearest")
        outputs = y, *backward(case.dy, cache)
        found = tuple(digest(output) for output in outputs if output is not None)
        differ += found != published[name]
        parts.print_lines(" ".join((f"{name:27}", *found)))
    verdict = f"{differ} LINES DIFFER from those published." if differ else "All are as published."
    parts.print_lines(verdict)
    return parts.EXIT_FAILED if differ else 0
