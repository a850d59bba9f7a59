"""
Compute y, dx, dgamma and dbeta of the arrays in a file, and check them.

Compute y, dx, dgamma and dbeta, and check them against the exact result,
against finite differences and a closed form. The error of the usual two-pass
formula on the same data is shown beside ours, what other methods would lose,
and what the norm costs. x is normalized over its last axis.

examples:
  stablenorm run              the bundled data: a layer norm of a language model
  stablenorm run mine.npz     x and, if held, gamma, beta, dy, eps from a file
  stablenorm run mine.npz --kind rms   an RMS norm
  stablenorm run arrays/      the same from x.npy, gamma.npy, ...
  stablenorm run mine.npz --out res.npz --html page.html
  stablenorm run --digests    is rounding="nearest" the same here as everywhere?

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used,
one line says why.
"""

import argparse
import itertools

import numpy as np

from stablenorm.api import FUNCTIONS
from stablenorm.cli import parts
from stablenorm.cli.files import BUNDLED, list_members, read_eps
from stablenorm.cli.page import make_page
from stablenorm.cli.sections import SECTIONS, Problem, compute
from stablenorm.testing import digest, digest_inputs, published_digests
from stablenorm.text import Section, printable, shape_text, write_whole

_INPUTS = ("x", "gamma", "beta", "dy")
# By the worst of all sections.
_VERDICTS = {
    "FAIL": "A CHECK FAILED.",
    "INCONCLUSIVE": "No check failed.",
    "PASS": "All checks passed.",
}

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
    path, out, page = arguments.file, arguments.out, arguments.html
    for option, written in (("--out", out), ("--html", page)):
        if path and written and path.exists() and written.exists() and written.samefile(path):
            msg = f"{option} must not be the file that is read, got {path}"
            raise parts.InputError(msg)
    source = str(path) if path else f"bundled data ({BUNDLED.name})"
    # The package refuses the user's input in its own words.
    with parts.refusing(TypeError, ValueError):
        problem, origin = _read(source, arguments)
        results = compute(problem)
    if msg := _objection(problem):
        raise parts.InputError(msg)
    write_whole(out, lambda file: np.savez(file, **results))  # type: ignore[arg-type]
    sections = list[Section]()
    with parts.progress_bar("") as progress:
        for what, tell in SECTIONS.items():
            progress(len(sections), len(SECTIONS), what)
            sections.append(tell(problem, results))
    verdicts = {section.verdict for section in sections}
    verdict = next(words for each, words in _VERDICTS.items() if each in verdicts)
    x, kind = problem.x, ", RMS norm" * (problem.kind == "rms")
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {problem.eps:g}{kind}; {origin}"
    if page:
        title = f"{'RMS' if kind else 'Layer'} normalization of {source}"
        content = make_page(title, about, verdict, sections)
        write_whole(page, lambda file: file.write(content))
    parts.print_lines(f": {about}", bold=source)
    for table in itertools.chain.from_iterable(section.tables for section in sections):
        parts.print_table(table)
    # How the numbers were obtained is below all of them.
    for section in sections:
        notes = section.notes and f"\n{section.notes}"
        parts.print_lines(f" {section.text}{notes}", bold=f"{section.heading}.")
    parts.print_lines(verdict)
    if page:
        parts.print_lines(f"The page: {page.as_uri()}")
    return parts.EXIT_FAILED if "FAIL" in verdicts else 0


def _read(source: str, arguments: argparse.Namespace) -> tuple[Problem, str]:
    """Read a file that holds x, or is x, or a directory of .npy files; return where dy is from, too."""
    path = arguments.file or BUNDLED
    if path.is_dir():
        members = {each.stem: list_members(each)["x"] for each in sorted(path.glob("*.npy"))}
    else:
        members = list_members(path)
    if "x" not in members:
        held = printable(", ".join(sorted(members)), "") or "nothing of that kind"
        msg = f"{source} must hold an array named x, got {held}"
        raise parts.InputError(msg)
    # x, dy, y and dx at least.
    what = "x must fit in memory, with y, dx and dy, to be checked"
    parts.check_memory(what, 4 * members["x"].like.nbytes)
    x = members["x"].load()
    shapes = {"gamma": x.shape[-1:], "beta": x.shape[-1:], "dy": x.shape}
    arrays = {name: members[name].load(shape) for name, shape in shapes.items() if name in members}
    origin = "dy of the file"
    if "dy" not in arrays:
        origin = f"dy not given: random N(0, 1), seed {arguments.seed}"
        drawn = np.random.default_rng(arguments.seed).standard_normal(x.shape)
        arrays["dy"] = drawn.astype(x.dtype)
    if unknown := sorted(members.keys() - {*_INPUTS, "eps"}):
        origin += f"; not used: {', '.join(unknown)}"
    eps, options = read_eps(members, arguments.eps), (arguments.rounding, arguments.kind)
    gamma, beta = arrays.get("gamma"), arrays.get("beta")
    return Problem(x, gamma, beta, eps, arrays["dy"], *options), origin


def _objection(problem: Problem) -> str:
    """Say why there is no exact result: NaN, infinity, no rows, 0/0; empty if there is one."""
    x = problem.x
    for name in _INPUTS:
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            value = f"{array[tuple(where)]} at {where.tolist()}"
            end = "stablenorm diagnose names such rows"
            return f"{name} must be finite to be checked, got {value}; {end}"
    if x.size == 0:
        return f"x must have at least one row, got {shape_text(x.shape)}"
    is_layer = problem.kind == "layer"
    undefined = np.flatnonzero((x == (x[..., :1] if is_layer else 0)).all(axis=-1))
    if problem.eps == 0 and undefined.size:
        what, row = "constant" if is_layer else "zero", undefined[0]
        return f"eps must be > 0 where a row of x is {what}, got 0 and row {row}; pass --eps"
    return ""


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
