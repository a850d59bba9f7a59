"""
Compute y, dx, dgamma and dbeta of the arrays in a file, and check them.

The checks use the exact result, finite differences and a closed form. The
report adds the error of the usual two-pass formula, the bits that other
methods lose, and the operations and bytes of the norm. The last axis of x is
normalized.

examples:
  stablenorm run              the bundled data: a layer norm of a language model
  stablenorm run mine.npz     x from a file; gamma, beta, dy, eps if it has them
  stablenorm run mine.npz --kind rms   an RMS norm
  stablenorm run arrays/      the same from x.npy, gamma.npy, ...
  stablenorm run mine.npz --out res.npz --html page.html
  stablenorm run --digests    are the bits of rounding="nearest" as published?

to make such a file:
  np.savez("mine.npz", x=x, gamma=gamma, beta=beta, dy=dy, eps=1e-5)

exit status: 0 no check failed; 1 a check failed; 2 the input cannot be used
(one line says why).
"""

import argparse
import io
import itertools
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any, NamedTuple

import numpy as np
from rich import get_console

from stablenorm.api import FUNCTIONS
from stablenorm.check import GradientReport, check_layer_norm, check_rms_norm
from stablenorm.cli import parts
from stablenorm.cli.files import list_members, read_eps
from stablenorm.cost import DIRECTIONS, PROGRAMS, count_cost, count_kept
from stablenorm.diagnosis import diagnose, lines_of
from stablenorm.figures import COLORS, new_figure
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.testing import digest, digest_inputs, published_digests
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.text import number, printable, quantity, shape_text, write_whole
from stablenorm.types import Array

OPTIONS = {
    "file": "an .npz or .safetensors file, or a directory of .npy files, that holds x and, optionally, "
    "gamma, beta, dy, eps; or an .npy file with x alone; default: the bundled data",
    "--kind": "kind of the norm; default: layer",
    "--eps": "default: eps of the file, or 1e-5",
    "--rounding": "nearest: compute and require correctly rounded results; default: fast",
    "--seed": "seed of a random dy, if the file has no dy; default: 0",
    "--out": "write y, dx, dgamma and dbeta to this file",
    "--html": "write the report with a picture, as a page for a browser",
    "--digests": "only compare digests of correctly rounded results with the published ones",
}


# By the kind of the norm: forward, backward, oracle, check.
NORMS: dict[str, Any] = {
    "layer": (*FUNCTIONS["layer"], exact_layer_norm, check_layer_norm),
    "rms": (*FUNCTIONS["rms"], exact_rms_norm, check_rms_norm),
}
# The promises of each rounding.
_CONTRACTS = {
    "fast": "0.501 ulp (float64: 0.75 for dx, 0.51 for dgamma and dbeta), except for elements that "
    "cancel almost completely",
    "nearest": "no element is misrounded",
}
# The oracle takes about a second for these, at 5 to 15 us an element and output.
_ORACLE_ELEMENTS = 50_000
# The gradient check calls the forward 500 times, at 0.15 us an element.
_CHECK_ELEMENTS = 4_096
# y, dx and, where there are parameters, dgamma and dbeta.
_Results = dict[str, Array]


class Problem(NamedTuple):
    """One norm to compute."""

    x: Array
    gamma: Array | None
    beta: Array | None
    eps: float
    dy: Array
    rounding: str
    kind: str

    def compute(self) -> _Results:
        """Return y, dx and, where there are parameters, their gradients."""
        forward, backward, *_ = NORMS[self.kind]
        y, cache = forward(*self[:4], rounding=self.rounding)
        return _named(y, *backward(self.dy, cache))

    def sample(self, elements: int) -> tuple["Problem", Array]:
        """Return a problem of so many elements, and its rows: evenly spaced, the first and the last included."""
        x, dy = (array.reshape(-1, self.x.shape[-1]) for array in (self.x, self.dy))
        count = min(len(x), max(1, elements // x.shape[1]))
        rows = np.unique(np.linspace(0, len(x) - 1, count).astype(np.intp))
        return self._replace(x=x[rows], dy=dy[rows]), rows


def _named(*results: Array | None) -> _Results:
    names = zip(("y", "dx", "dgamma", "dbeta"), results, strict=True)
    return {name: array for name, array in names if array is not None}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm run` is asked."""
    if arguments.digests:
        return _compare_digests()
    path, out, page = arguments.file, arguments.out, arguments.html
    source = f"bundled data ({path.name})" if path == parts.BUNDLED else printable(str(path), "")
    # The package refuses the user's input in its own words.
    with parts.refusing(TypeError, ValueError):
        problem, origin = _read(source, arguments)
        results = problem.compute()
    if msg := _objection(problem):
        raise parts.InputError(msg)
    write_whole(out, lambda file: np.savez(file, **results))  # type: ignore[arg-type]
    x, kind = problem.x, ", RMS norm" * (problem.kind == "rms")
    about = f"x {shape_text(x.shape)} {x.dtype}, eps {problem.eps:g}{kind}; {origin}"
    parts.print_lines(f": {about}", bold=source)
    passed, errors = _tell_accuracy(problem, results)
    _tell_losses(problem)
    verdict = _tell_gradients(problem, results)
    _tell_cost(problem)
    failed = not passed or verdict == "FAIL"
    ending = "All checks passed." if verdict == "PASS" else "No check failed."
    parts.print_lines("A CHECK FAILED." if failed else ending)
    if page:
        title = f"{'RMS' if kind else 'Layer'} normalization of {source}"
        write_whole(page, lambda file: file.write(_make_page(title, errors)))
        parts.print_lines(f"The page: {page.as_uri()}")
    return parts.EXIT_FAILED if failed else 0


def _read(source: str, arguments: argparse.Namespace) -> tuple[Problem, str]:
    """Read x and the other arrays from a file or a directory of .npy files; say where dy is from."""
    path = arguments.file
    if path.is_dir():
        members = {}
        # iterdir, unlike glob, raises for a directory that cannot be read.
        for file in sorted(file for file in path.iterdir() if file.suffix == ".npy"):
            wanted = f"{file} must hold one array, as np.save writes it, got no "
            with parts.refusing(KeyError, prefix=wanted):
                members[file.stem] = list_members(file)["x"]
    else:
        members = list_members(path)
    if "x" not in members:
        names = printable(", ".join(sorted(members)), "") or "no arrays"
        msg = f"{source} must hold an array named x, got {names}"
        raise parts.InputError(msg)
    # Measured: 4.5 times x (x, dy, y, dx, masks), and 1400 bytes of the oracle an element of a row.
    x = members["x"].load(arrays=5, column=1500)
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
    if unknown := sorted(members.keys() - {"x", "eps", *shapes}):
        origin += f"; not used: {', '.join(unknown)}"
    eps = read_eps(members, arguments.eps)
    return Problem(x, gamma, beta, eps, dy, arguments.rounding, arguments.kind), origin


def _objection(problem: Problem) -> str:
    """Say why there is no exact result: NaN, infinity, no rows, 0/0; empty if there is one."""
    x = problem.x
    for name in ("x", "gamma", "beta", "dy"):
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
        kind, row = "constant" if is_layer else "zero", undefined[0]
        return f"eps must be > 0 where a row of x is {kind}, got 0 and row {row}; pass --eps"
    return ""


def _tell_accuracy(problem: Problem, results: _Results) -> tuple[bool, dict[str, Any]]:
    """Print the errors of the outputs; return whether they keep the contract, and the errors to draw."""
    part, sample = problem.sample(_ORACLE_ELEMENTS)
    *inputs, rounding, kind = part
    rows = problem.x.size // part.x.shape[1]
    # dgamma and dbeta are sums over all rows, so a sample of rows has sums of its own.
    judged = results if len(sample) == rows else part.compute()
    judged = judged | {name: results[name].reshape(rows, -1)[sample] for name in ("y", "dx")}
    exact = NORMS[kind][2](*inputs)
    contract, ours = exact.check_contract(**judged), exact.ulp_errors(**judged)
    y, cache = plain_forward(*part[:4], kind)
    plain = _named(y, *plain_backward(part.dy, cache, kind))
    plain = exact.ulp_errors(**{name: plain[name].astype(a.dtype) for name, a in judged.items()})
    cells, all_passed = [], True
    for name, array in results.items():
        wrong, total = round(contract[name].misrounded * ours[name].size), ours[name].size
        passed = contract[name].passed and (rounding == "fast" or not wrong)
        all_passed &= passed
        worst, worst_plain = (errors[name].max(initial=0.0) for errors in (ours, plain))
        errors = f"{worst:.3f}", number(worst_plain), f"{wrong} of {total}"
        about = f"{shape_text(array.shape)} {array.dtype}"
        cells.append((name, about, *errors, "PASS" if passed else "FAIL"))
    columns = ("output", "shape, dtype", "worst ulp", "plain formula", "not nearest", "contract")
    which = "all" if len(sample) == rows else f"{len(sample)} of"
    parts.print_lines(f' Rounding "{rounding}".', bold="\nAccuracy.")
    parts.print_table("Against the exact result", columns, cells)
    parts.print_lines(
        f"Exact results for {which} {rows} rows, in integers; dgamma and dbeta are judged as "
        "sums over these rows. Not nearest: not the exact element rounded to nearest, ties to even. "
        "ulp: units in the last place of the output's dtype; a correctly rounded element is within "
        f"0.5. Plain formula: the worst ulp of {'two passes' if kind == 'layer' else 'one pass'} in "
        f"float32 (float64 for float64). The contract: {_CONTRACTS[rounding]}."
    )
    return all_passed, {name: (ours[name], plain[name]) for name in results}


def _tell_losses(problem: Problem) -> None:
    """Print how many bits common methods lose, and on which rows, as `stablenorm diagnose` does."""
    diagnosis = diagnose(problem.x, problem.eps, top=6, kind=problem.kind)
    parts.print_lines("", *lines_of(diagnosis), bold="\nWhere others would lose digits.")
    parts.print_lines(
        f"Predicted for all {diagnosis.summary.rows} rows from each method's own sums, in its precision. "
        "Bits lost: log2 of the RMS error of y over the row, in rounding errors of the dtype, without "
        f"gamma and beta. The condition number of y{', rms(x) / std,' * (problem.kind == 'layer')} is the "
        "factor by which a relative error of x grows in y."
    )


def _tell_gradients(problem: Problem, results: _Results) -> str:
    """Check gradients by finite differences and the closed form, print the report, return the verdict."""
    heading = "\nGradient check."
    if not all(np.isfinite(array).all() for array in results.values()):
        text = " Not checked: an output overflows, and nothing can be compared."
        parts.print_lines(text, bold=heading)
        return "INCONCLUSIVE"
    forward, backward, _, check = NORMS[problem.kind]
    forward = partial(forward, rounding=problem.rounding)
    # Use float64: its finite differences show the smallest errors.
    sample = problem.sample(_CHECK_ELEMENTS)[0][:3]
    arrays = (None if array is None else array.astype(np.float64) for array in sample)
    report: GradientReport = check(forward, backward, *arrays, problem.eps, rng=0)
    parts.print_lines("", *str(report).splitlines(), bold=heading)
    parts.print_lines(
        f"check_{problem.kind}_norm in float64, on a sample of rows: finite differences and the closed "
        "form. Resolution: the smallest relative error that no compared element could have hidden."
    )
    return report.verdict


def _tell_cost(problem: Problem) -> None:
    """Print flops and bytes of three programs, and the bytes stored from forward to backward."""
    n, dtype, kind = problem.x.shape[-1], str(problem.x.dtype), problem.kind
    rows = problem.x.size // n
    counted = []
    for program, direction in itertools.product(PROGRAMS, DIRECTIONS):
        cost = count_cost(program, direction, (rows, n), dtype, kind)
        per_element = (number(count / (rows * n)) for count in (cost.flops, cost.moved))
        counted.append((f"{program}, {direction}", *per_element, quantity(cost.held, "B")))
    stored = [(k, quantity(size, "B")) for k, size in count_kept((rows, n), dtype, kind).items()]
    parts.print_lines(" Three programs of the same algebra, counted by formulas.", bold="\nCost.")
    columns = ("program", "flops per element", "bytes moved per element", "held")
    parts.print_table(f"Counted: {rows} rows of {n}, {dtype}", columns, counted)
    parts.print_table("Kept from forward to backward, beside x", ("what", "bytes"), stored)
    parts.print_lines(
        "Flops: + - * / and square roots; a fused multiply-add is two. Moved: bytes to and from memory if "
        "the arrays exceed the caches. Held: new bytes at the worst moment, results included."
    )


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


# ---- the page of --html: a picture of the errors above what the terminal shows ----

# The browser's own colors: light or dark, as the reader's system is. The page fetches nothing, runs no script.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }}
body {{ max-width: 60rem; margin: auto; padding: 1rem; overflow-wrap: anywhere; }}
figure, svg {{ width: 90vw; max-width: 58rem; height: auto; margin: 0; fill: currentColor; }}
pre {{ font: 0.9rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{origin}</p>
<figure>
{picture}
<figcaption>The share of elements whose error is at least the one on the horizontal axis. If a line ends
above the lowest share, the rest of its elements are wrongly NaN or infinite.</figcaption>
</figure>
<pre>{shown}</pre>
</body>
</html>
"""


def _make_page(title: str, errors: dict[str, Any]) -> bytes:
    """Return the page. Everything is escaped: no text from a file can act as markup."""
    made = f"Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by stablenorm run --html: "
    made += ", ".join(f"{key} {value}" for key, value in parts.origin().items())
    shown = get_console().export_html(code_format="{code}", inline_styles=True)
    text = {"title": escape(printable(title)), "origin": escape(made), "shown": shown}
    return _PAGE.format(picture=_draw_errors(errors), **text).encode()


def _draw_errors(errors: dict[str, Any]) -> str:
    """Draw, for each output, the share of elements with at least a given error: ours and the plain formula's."""
    shares, lines = np.geomspace(1e-5, 1, 400), -(-len(errors) // 2)
    looks = ("stablenorm", COLORS[0], "-"), ("plain formula", COLORS[1], "--")
    figure = new_figure(10, 3.2 * lines)
    for place, (name, both) in enumerate(errors.items(), 1):
        axes = figure.add_subplot(lines, 2, place, title=name, xscale="log", yscale="log")
        for error, (label, color, style) in zip(both, looks, strict=True):
            # Errors below 0.001 ulp are drawn there: the axis is logarithmic.
            drawn = np.nan_to_num(error, nan=np.inf, posinf=np.inf).clip(1e-3)
            at = np.quantile(drawn, 1 - shares, method="higher")
            axes.plot(at, 100 * shares, style, color=color, lw=2, label=label)
        axes.axvline(0.5, color="black", lw=1, ls=":", label="0.5 ulp")
        axes.set(xlim=(1e-3, None), xlabel="error, ulp", ylabel="elements, %")
        axes.grid(alpha=0.3)
    entries = axes.get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=3, frameon=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True)
    # Black becomes the page's text color.
    svg = file.getvalue().replace("#000000", "currentColor")
    return svg[svg.index("<svg") :]
