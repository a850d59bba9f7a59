"""A user's file that holds another operation than a norm, or a forward alone."""

import argparse
import ast
import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stablenorm.check import check_gradients
from stablenorm.cli import parts
from stablenorm.cli.child import silence
from stablenorm.cli.user_norm import UserFile, adapt_functions
from stablenorm.testing import judge

# The results of `check`: the status, the figures, the signature, the report.
Checked = tuple[int, dict[str, Any], str, list[str]]


def let_stand_alone(
    file: UserFile, names: tuple[str | None, str | None], kind: str | None
) -> tuple[str, list[bool]]:
    """
    Return the name of a forward without a backward, or "" if the file has both, a class, or neither.

    If it returns y alone, it then returns y and None, as if it had a cache. The list says of every call
    whether it returned more than y.
    """
    pairs = list[bool]()
    if names[1] or file.classes:
        return "", pairs
    with suppress(parts.InputError):
        file.find(None, "backward", kind)
        return "", pairs
    with suppress(parts.InputError):
        name, forward = file.find(names[0], "forward", kind)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            returned = forward(*args, **kwargs)
            pairs.append(isinstance(returned, tuple))
            return returned if pairs[-1] else (returned, None)

        file.names[name] = call
        return name, pairs
    return "", pairs


def judge_forward(file: UserFile, arguments: argparse.Namespace) -> Checked | None:
    """Judge y of a file with a forward alone, in a few inputs; None if the file has a backward."""
    names = arguments.forward, arguments.backward
    if arguments.class_ or arguments.init:
        return None
    name, pairs = let_stand_alone(file, names, arguments.kind)
    if not name:
        return None
    norm = adapt_functions(file, names, arguments.kind, (2, 8), (-1,))
    x = np.eye(2, 8, dtype=arguments.dtype or "float32")
    norm.forward(x, *np.ones((2, 8), x.dtype), arguments.eps)
    if any(pairs):
        # It returns y and a function that pulls dy back.
        return None
    kind = arguments.kind or ("rms" if "rms" in name.lower() else "layer")
    # Mean 0, mean 16, a variance far below eps: those on which formulas differ.
    report = judge(
        norm.forward, kind=kind, parameters=norm.takes, dtypes=[x.dtype.name],
        families=("F01", "F02", "F25"), lengths=(8, 33),
    )  # fmt: skip
    content = {"source": arguments.file.name, "functions": norm.signature()} | report.as_dict()
    head, *lines = str(report).split("\n")
    return int(not report.passed), content, f"{norm.signature()}; y alone", [head, *lines]


def shapes_of(text: str) -> dict[str, tuple[int, ...]]:
    """Read the shapes of arguments, as ``x=(4,8), w=(8,)``; InputError if the text is something else."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        named = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}  # type: ignore[attr-defined]
        shapes = {n: (s,) if isinstance(s, int) else tuple(map(int, s)) for n, s in named.items()}
    except (SyntaxError, ValueError, TypeError):
        shapes = {}
    if not shapes or min((length for shape in shapes.values() for length in shape), default=1) < 1:
        msg = f'--args must be names and shapes, as "x=(4,8), w=(8,)", got {text!r}'
        raise parts.InputError(msg)
    return shapes


def check_operation(file: UserFile, arguments: argparse.Namespace) -> Checked:
    """Check the forward and the backward of a file on arrays of the shapes of --args."""
    shapes, rng = shapes_of(arguments.args), np.random.default_rng(arguments.seed)
    arrays = [rng.standard_normal(s).astype(arguments.dtype or "float64") for s in shapes.values()]
    names = [vars(arguments)[way] or _named(file, way) for way in ("forward", "backward")]
    forward, backward = (file.find(name, "forward", None)[1] for name in names)
    silence()
    report = check_gradients(
        forward, backward, arrays, names=list(shapes), rng=arguments.seed, noise=arguments.noise
    )
    status = {"PASS": 0, "FAIL": parts.EXIT_FAILED}.get(report.verdict, parts.EXIT_INCONCLUSIVE)
    content = {"source": arguments.file.name, "functions": names, "report": report.as_dict()}
    return status, content, ", ".join(names), report.text(verbose=arguments.verbose).splitlines()


def _named(file: UserFile, way: str) -> str:
    """Return the only function of the file whose name ends or begins with the way, as softmax_forward."""
    short = {"forward": "forward|fwd", "backward": "backward|bwd|grad|vjp"}[way]
    own = [n for n, f in file.names.items() if callable(f) and n[0] != "_"]
    found: Sequence[str] = [n for n in own if re.fullmatch(f"({short})(_.*)?|.*_({short})", n)]
    if len(found) != 1:
        there = ", ".join(own) or "no functions"
        msg = f"name the {way} with --{way}: the file has {there}"
        raise parts.InputError(msg)
    return found[0]
