"""
Compute y, dx, dgamma and dbeta of the arrays in a file, and tell about them.

How fast they come, how exact they are, on harder data too; whether the
gradients are right, and what they cost. The last axis of x is normalized.

examples:
  stablenorm run              the bundled data: a layer norm of a language model
  stablenorm run mine.npz     x from a file; gamma, beta, dy, eps if it has them
  stablenorm run mine.npz --kind rms   an RMS norm
  stablenorm run two.npz --member h    another array than x
  stablenorm run arrays/      the same from x.npy, gamma.npy, ...
  stablenorm run mine.npz --out res.npz --html page.html
  stablenorm run --digests    are the bits of rounding="nearest" as published?

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

how to read it:
  digits      correct decimal ones of the worst element, relative to the largest
  ulp         units in the last place of the element itself; 0.5 is perfect
  misrounded  elements that are not the float nearest to the exact one

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used
(one line says why).
"""

import argparse

import numpy as np

from stablenorm.cli import page, parts, story
from stablenorm.cli.files import Member, choose, list_members, read_eps
from stablenorm.cli.story import Problem
from stablenorm.output import columns, filled, printable, shape_text, write_whole
from stablenorm.testing import digest, digest_inputs, published_digests

OPTIONS = {
    "file": "an .npz or .safetensors file, or a directory of .npy files, that holds x and, optionally, "
    "gamma, beta, dy, eps; or an .npy file with x alone; default: the bundled data",
    "--member": "array to take as x; default: x, or the only one",
    "--kind": "kind of the norm; default: layer",
    "--eps": "default: eps of the file, or 1e-5",
    "--rounding": "nearest: compute and require correctly rounded results; default: fast",
    "--seed": "seed of a random dy, if the file has no dy; default: 0",
    "--verbose": "add the whole report of the gradient check, and what other programs cost",
    "--out": "write y, dx, dgamma and dbeta to this file",
    "--html": "write the same with pictures, as a page for a browser",
    "--digests": "only compare digests of correctly rounded results with the published ones",
}
# The names in a file.
_NAMES = "x", "gamma", "beta", "dy", "eps"
# The widest line of the story.
_WIDTH = 90


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    if arguments.digests:
        return _compare_digests()
    path, out, html = arguments.file, arguments.out, arguments.html
    is_bundled = path == parts.BUNDLED
    source = "activations of a language model (bundled)"
    source = source if is_bundled else printable(str(path), "")
    # The package refuses the user's input in its own words.
    with parts.refusing(TypeError, ValueError):
        problem, origin = _read(arguments)
        results = problem.compute()
    if msg := _objection(problem):
        raise parts.InputError(msg)
    write_whole(out, lambda file: np.savez(file, **results))  # type: ignore[arg-type]
    x, kind = problem.x, ", RMS norm" * (problem.kind == "rms")
    about = f"{source}: x {shape_text(x.shape)} {x.dtype}, eps {problem.eps:g}{kind}"
    about += f"; {origin}" * (not is_bundled)
    told = story.tell(problem, results, about, verbose=arguments.verbose)
    _print(told)
    if html:
        title = f"{'RMS' if kind else 'Layer'} normalization of {source}"
        write_whole(html, lambda file: file.write(page.make_page(title, told)))
        # A line by itself: an address can be clicked.
        parts.print_lines(f"page      {html.as_uri()}")
    return 0 if told.passed else parts.EXIT_FAILED


def _print(told: story.Story) -> None:
    """Print the verdict and each part: its name, its sentences and its table beside that."""
    width = min(_WIDTH, parts.page_width())
    parts.print_lines(bold="\n".join(filled(told.verdict, width)))
    for part in told.parts:
        lines = [line for text in part.text for line in filled(text, width - 10)]
        lines += columns(part.table)
        for name, line in zip([part.name, *[""] * (len(lines) - 1)], lines, strict=True):
            parts.print_lines(line, bold=f"{name:10}")


def _read(arguments: argparse.Namespace) -> tuple[Problem, str]:
    """Read x and the other arrays from a file or a directory of .npy files; say where dy is from."""
    path, members = arguments.file, dict[str, Member]()
    if path.is_dir():
        # iterdir, unlike glob, raises for a directory that cannot be read.
        for file in (path / f"{name}.npy" for name in _NAMES if any(path.iterdir())):
            wanted = f"{file} must hold one array, as np.save writes it, got no "
            if file.exists():
                with parts.refusing(KeyError, prefix=wanted):
                    members[file.stem] = list_members(file)["x"]
        if "x" not in members:
            msg = f"{path} must hold x.npy, got no such file"
            raise parts.InputError(msg)
    else:
        members = list_members(path)
    # Measured: 4.5 times x (x, dy, y, dx, masks), and 2000 bytes of integers an element of a row, 32 a row.
    x = choose(members, path, arguments.member).load(arrays=5, row=40, column=2200)
    shapes = {"gamma": x.shape[-1:], "beta": x.shape[-1:], "dy": x.shape}
    gamma, beta, dy = (
        members[name].load(shape) if name in members else None for name, shape in shapes.items()
    )
    origin = "dy of the file"
    if dy is None:
        origin = f"no dy in the file: random N(0, 1), seed {arguments.seed}"
        dy, rng = np.empty_like(x), np.random.default_rng(arguments.seed)
        # A piece at a time: float64 numbers for all of a float16 x would take four times its memory.
        for piece in np.array_split(dy.reshape(-1), 1 + dy.size // 2**20):
            piece[:] = rng.standard_normal(piece.size)
    if unknown := sorted(members.keys() - {arguments.member, *_NAMES}):
        origin += f"; not used: {', '.join(unknown)}"
    eps = read_eps(members, arguments.eps)
    return Problem(x, gamma, beta, eps, dy, arguments.rounding, arguments.kind), origin


def _objection(problem: Problem) -> str:
    """Say why there is no exact result: NaN, infinity, no rows, 0/0; empty if there is one."""
    x = problem.x
    for name in ("x", "gamma", "beta", "dy"):
        array = getattr(problem, name)
        if array is not None and not np.isfinite(array).all():
            value = array[~np.isfinite(array)][0]
            return f"{name} must be finite to be checked, got {value}; stablenorm diagnose names such rows"
    if x.size == 0:
        return f"x must have at least one row, got {shape_text(x.shape)}"
    kind, other = ("constant", x[..., :1]) if problem.kind == "layer" else ("zero", 0)
    if problem.eps == 0 and (x == other).all(axis=-1).any():
        return f"eps must be > 0 where a row of x is {kind}, got 0; pass --eps"
    return ""


def _compare_digests() -> int:
    """Print the digests of y, dx, dgamma and dbeta of every fixed input, and whether they are right."""
    differ, published = 0, published_digests()
    for name, case in digest_inputs().items():
        digests = tuple(map(digest, Problem(*case, "nearest", "layer").compute().values()))
        differ += digests != published[name]
        parts.print_lines(" ".join((f"{name:27}", *digests)))
    verdict = f"{differ} LINES DIFFER from those published." if differ else "All are as published."
    parts.print_lines(verdict)
    return parts.EXIT_FAILED if differ else 0
