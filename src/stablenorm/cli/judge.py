"""
Judge the digits of a layer or RMS norm of yours on hard inputs: limits, no tolerance.

check asks: is the mathematics right? judge asks: are the digits? The limit of
each element follows from the exact result and the arithmetic that you declare.
An error is split into the intermediates that it came through.

examples:
  stablenorm judge my_kernel.py
  stablenorm judge my_kernel.py --statistics float32 --sums 64
  stablenorm judge my_package.norms:forward,backward
  stablenorm judge my_kernel.py --kind rms --cast xhat --dtypes bfloat16
  stablenorm judge my_kernel.py --families F03 F18 --full --json judge.json

the file must hold functions, or a class with forward(x) and backward(dy):
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
A forward alone, which returns y, is judged too. Arrays are NumPy's: convert
them in the file, or call stablenorm.testing.judge from Python.

THE CODE OF THE FILE IS RUN, in a process of its own: judge only files that you
trust. Where GITHUB_ACTIONS is set, failures become annotations.

exit status: 0 no limit exceeded, 1 a limit exceeded, 2 not judged
"""

import argparse
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from stablenorm.cli import parts
from stablenorm.cli.child import run_apart, silence
from stablenorm.cli.user_norm import Norm, UserFile, adapt_class, adapt_functions
from stablenorm.cli.user_operation import let_stand_alone
from stablenorm.formats import DTYPES
from stablenorm.testing import FAMILIES, JudgeReport, judge
from stablenorm.testing.judge import LENGTHS


def _order(text: str) -> str | int:
    return text if text == "any" else int(text)


OPTIONS: dict[str, Any] = {
    "file": ("a Python file, or module:forward,backward; its code is run", {"nargs": None}),
    "--forward": "default: layer_norm_forward, rms_norm_forward or forward",
    "--backward": "default: layer_norm_backward, rms_norm_backward or backward",
    "--class": "class with forward(x) and backward(dy)",
    "--kind": ("kind of the norm; default: the kind in its name, or layer", {"default": None}),
    "--dtypes": (
        "dtypes of all arrays; default: float32 bfloat16 float16",
        {"nargs": "+", "choices": DTYPES, "default": ["float32", "bfloat16", "float16"]},
    ),
    "--families": (
        "hard inputs; default: all",
        {"nargs": "+", "choices": tuple(FAMILIES), "metavar": "F"},
    ),
    "--lengths": (
        "lengths of rows; default: 1 to 16384, those at which kernels branch",
        {"nargs": "+", "type": int, "metavar": "N", "default": LENGTHS},
    ),
    "--full": ("every combination of family, length, dtype and layout", {"action": "store_true"}),
    "--statistics": (
        "dtype in which mean and rstd are kept; default: float32, float64 for float64 data",
        {"choices": DTYPES},
    ),
    "--elementwise": ("dtype of single elements; default: that of the sums", {"choices": DTYPES}),
    "--cast": (
        "what is rounded to the dtype of x: y alone, or xhat first; default: y",
        {"choices": ("y", "xhat"), "default": "y"},
    ),
    "--sums": (
        "most additions that a term of a sum passes through; default: any order",
        {"type": _order, "default": "any", "metavar": "H"},
    ),
    "--scaled": ("x is scaled before the mean is subtracted", {"action": "store_true"}),
    "--worst": ("limits of the worst case, not the probable ones", {"action": "store_true"}),
    "--timeout": ("seconds after which to give up; default: none", {"type": float, "metavar": "S"}),
    "--json": "write all figures to this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm judge` is asked: the kernel in a process of its own, the report in this one."""
    source = str(arguments.file)
    if ":" not in source:
        parts.check_file(arguments.file, "a Python file, named *.py, or module:function", ".py")
    print(f"stablenorm: running the code of {source}", file=sys.stderr, flush=True)
    arguments.job = None
    report: JudgeReport = run_apart(examine, arguments, arguments.timeout)
    parts.write_json(arguments.json, {"source": source} | report.as_dict())
    first, *others = str(report).split("\n")
    parts.print_lines("\n" + "\n".join(others), bold=first)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(source.partition(":")[0], report)
    return 0 if report.passed else parts.EXIT_FAILED


def _annotate(file: str, report: JudgeReport) -> None:
    """Print a line for each family that fails, as GitHub's runners read it."""
    worst = dict[str, Any]()
    for verdict in sorted(report.verdicts, key=lambda verdict: verdict.share):
        if not verdict.passed:
            worst[verdict.problem.family] = verdict
    for verdict in worst.values():
        said = verdict.wrong or f"{verdict.share:.3g} times the limit"
        print(f"::error file={file},title=stablenorm judge::{verdict.problem}: {said}")


def examine(arguments: argparse.Namespace) -> JudgeReport:
    """Load the kernel and judge it."""
    stream = sys.__stderr__
    module, _, names = str(arguments.file).partition(":")
    if names:
        sys.path.insert(0, str(Path.cwd()))
        loaded = importlib.import_module(module)
        forward, *rest = (getattr(loaded, name) for name in names.split(","))
        functions, kind, takes = (forward, *rest), arguments.kind, None
    else:
        functions, kind, takes = _of_file(UserFile(arguments.file), arguments)
    silence()
    declared = {n: vars(arguments)[n] for n in ("statistics", "elementwise", "cast", "sums")}
    declared |= {"centered": False} if arguments.scaled else {}
    declared |= {"bound": "worst"} if arguments.worst else {}
    usual = {"statistics": None, "elementwise": None, "cast": "y", "sums": "any"}
    declared = {name: value for name, value in declared.items() if value != usual.get(name)}

    def show(done: int, total: int) -> None:
        if stream and stream.isatty():
            print(
                f"judging: {done} of {total}" * (done < total),
                end="\x1b[K\r",
                file=stream,
                flush=True,
            )

    options: dict[str, Any] = {
        n: vars(arguments)[n] for n in ("dtypes", "families", "lengths", "full")
    }
    options |= {"kind": kind or "layer", "parameters": takes, "progress": show} | declared
    forward, backward = (*functions, None)[:2]
    return judge(forward, backward, **options)


def _of_file(file: UserFile, arguments: argparse.Namespace) -> Any:
    """Return the functions of a file, the kind of the norm, and the parameters that it takes."""
    names, asked, class_ = (arguments.forward, arguments.backward), arguments.kind, arguments.class_
    is_alone = not class_ and bool(let_stand_alone(file, names, asked)[0])

    @functools.cache
    def norm(n: int) -> Norm:
        # A class makes its parameters for rows of a length.
        if class_:
            return adapt_class(file, class_, (2, n), (-1,), None)
        return adapt_functions(file, names, asked, (2, n), (-1,))

    first = norm(8)
    kind = asked or ("rms" if "rms" in first.name.lower() else "layer")

    def forward(x: Any, *rest: Any) -> Any:
        return norm(x.shape[-1]).forward(x, *rest)

    def backward(dy: Any, cache: Any) -> Any:
        return norm(dy.shape[-1]).backward(dy, cache)

    return (forward,) if is_alone else (forward, backward), kind, first.takes
