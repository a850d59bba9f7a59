"""`stablenorm check`: check the layer norm in a file of the user's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stablenorm.cli import parts
from stablenorm.cli.check_file import FileCheck, check_file
from stablenorm.formats import parse
from stablenorm.report import shape_text

_EXAMPLES = """\
examples:
  stablenorm check mine.py                            layer_norm_forward and layer_norm_backward in it
  stablenorm check mine.py --forward fwd --backward bwd
  stablenorm check mine.py --class LayerNorm
  stablenorm check mine.py --shape 32 768 --dtype float32 --seed 3
  stablenorm check mine.py --plot check.png --json check.json

what the file holds, in any usual form:
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
  Arguments are recognized by name (gamma or weight, beta or bias, ln_param, ...), otherwise by
  order. The cache may be anything. Gradients may come as a tuple or, by name, as a dict. An eps
  fixed inside the forward is read off y. What the file prints is not shown.

or a class:
  class LayerNorm: ...                                forward(x) and backward(dy)
  It is made with n, (n,) or nothing. gamma and beta are attributes (gamma or weight, beta or bias);
  their gradients are returned, or stored in attributes (dgamma, grad_weight, grads, ...).

THE CODE OF THE FILE IS RUN, as Python would run it: check only files that you trust.

exit status: 0 no mistake found, 1 something is wrong, 2 it could not be run (one line says why),
3 inconclusive: too noisy, or too little compared, for a verdict.
"""


def add(commands: Any) -> None:
    """Add `check` to the commands."""
    parser = parts.add_command(
        commands,
        run,
        "check a layer norm that you have written: runs your file, names common mistakes",
        "Run a Python file of yours and check the layer norm in it: its gradients against finite "
        "differences and a closed form, its behavior on hard inputs. The report names common "
        "mistakes, and the smallest error that would have been seen.",
        _EXAMPLES,
    )
    parser.add_argument("file", type=Path, metavar="FILE.py", help="its code is run")
    parser.add_argument("--forward", metavar="NAME", help="default: layer_norm_forward")
    parser.add_argument("--backward", metavar="NAME", help="default: layer_norm_backward")
    about = "with forward(x) and backward(dy); default: the only one there is"
    parser.add_argument("--class", dest="class_", metavar="NAME", help=about)
    about = "of x, the last axis normalized; default: 2 3 8 or 6 8, what the code is made for"
    parser.add_argument("--shape", nargs="+", type=parts.at_least(1), metavar="N", help=about)
    about = "of x, gamma, beta; default: float64, which sees most"
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help=about)
    about = "default: the forward's own, or 1e-5 where it has none"
    parser.add_argument("--eps", type=parts.eps, help=about)
    parser.add_argument("--seed", type=parts.at_least(0), default=0, help="of the data; default: 0")
    parts.add_json(parser)
    parts.add_plot(parser, "draw error against step")


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm check` is asked."""
    # x, dy, y, dx, and what the checks keep of them.
    parts.check_memory(arguments.shape or (), 8 * parse(arguments.dtype).itemsize)
    print(f"stablenorm: running the code of {arguments.file}", file=sys.stderr)
    with parts.progress_bar("comparing") as progress:
        check = check_file(arguments, progress)
    content = check._asdict() | {"report": check.report.as_dict()}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    parts.write_whole(arguments.json, lambda file: file.write(text.encode()))
    parts.write_plot(arguments.plot, lambda file, kind: check.report.plot(file, format=kind))
    _print(check, Console())
    return {"PASS": 0, "FAIL": parts.EXIT_FAILED}.get(check.report.verdict, parts.EXIT_INCONCLUSIVE)


def _print(check: FileCheck, console: Console) -> None:
    """Print what was run and assumed, then the report."""
    assumed = f"eps {check.eps:g} ({check.eps_origin})"
    console.print(Text.assemble((check.source, "bold"), f": {check.functions}"))
    console.print(Text(f"x {shape_text(check.shape)} {check.dtype}, seed {check.seed}; {assumed}"))
    for note in check.notes:
        console.print(Text(f"note: {note}"))
    console.print()
    first, *others = str(check.report).splitlines(keepends=True)
    console.print(Text.assemble((first, "bold"), *others))
