"""
Check a layer or RMS norm of yours: runs your file, reads back what is wrong.

The check compares gradients with a closed form, to rounding. Where one is
wrong, it shows the formula that your code computes, the right one, and the
cause.

examples:
  stablenorm check mine.py
  stablenorm check mine.py --forward fwd --backward bwd
  stablenorm check mine.py --class LayerNorm
  stablenorm check mine.py --init "LayerNorm(n, rng=None)"
  stablenorm check mine.py --kind rms
  stablenorm check softmax.py --args "x=(4,8)"
  stablenorm check mine.py --axis 1 --shape 2 8 3 4
  stablenorm check mine.py --shape 32 768 --dtype float32 --seed 3
  stablenorm check mine.py --verbose --json check.json

the file must hold two functions or a class:
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
  class LayerNorm: ...                                forward(x), backward(dy)
The kind of the norm follows the name: rms_norm_forward, class RMSNorm.

Arguments are recognized by name (gamma or weight, beta or bias, ln_param,
...), otherwise by order. A class holds gamma and beta in any array of n
elements that scales or shifts y; its backward returns their gradients, stores
them or applies them. The page "Check your own backward" has a table of forms.

THE CODE OF THE FILE IS RUN, as a module, in a process of its own: check only
files that you trust.

exit status: 0 right, 1 a mistake found, 2 not judged (one line says why), 3
right as far as it was judged: too noisy, or not all gradients.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from stablenorm.check import GradientReport, check_layer_norm, check_rms_norm
from stablenorm.check.closed_form import example
from stablenorm.check.norms import axes_of
from stablenorm.check.operation import FaultError
from stablenorm.check.roles import PARAMETERS, key_of
from stablenorm.cli import parts
from stablenorm.cli.by_hand import lines_by_hand
from stablenorm.cli.child import run_apart, silence
from stablenorm.cli.user_norm import Norm, UserFile, adapt_class, adapt_functions
from stablenorm.cli.user_operation import check_operation, judge_forward
from stablenorm.formats import parse
from stablenorm.output import shape_text

# Axes of x that are tried, and the normalized ones.
_TRIED = (
    (3, (-1,)), (2, (-1,)), (2, (0,)), (4, (1,)), (3, (-2, -1)), (2, (-2, -1)), (1, (-1,))
)  # fmt: skip
# All lengths differ, so that code which mixes up axes fails: by the number of normalized axes, and of others.
_LENGTHS = (), (8,), (2, 4), (2, 4, 5), (2, 4, 5, 7)
_OTHERS = (), (6,), (2, 3), (2, 3, 5), (2, 3, 5, 6)
# Attributes of torch tensors that arrays lack.
_TORCH = r"torch|'dim'|unsqueeze|'keepdim'|'unbiased'"

OPTIONS = {
    "file": ("a Python file; its code is run", {"nargs": None, "metavar": "FILE.py"}),
    "--forward": "default: layer_norm_forward, rms_norm_forward, ln_forward or forward",
    "--backward": "default: layer_norm_backward, rms_norm_backward, ln_backward or backward",
    "--class": "class with forward(x) and backward(dy); default: the only one, or the one with norm in its name",
    "--init": (
        'expression that makes the object, as "LayerNorm(n, rng=None)"',
        {"metavar": "EXPR"},
    ),
    "--kind": ("kind of the norm; default: the kind in its name, or layer", {"default": None}),
    "--axis": ("normalized axes; default: the last one, or those that y shows", {"default": None}),
    "--args": (
        'another operation than a norm: names and shapes of its arguments, as "x=(4,8)"',
        {"metavar": "ARGS"},
    ),
    "--noise": (
        "with --args: how far apart two equal calls of the backward may be, relative; default: 0",
        {"type": float, "default": 0.0, "metavar": "R"},
    ),
    "--example": (
        "after a FAIL, show a row of four integers that can be followed on paper",
        {"action": "store_true"},
    ),
    "--only": ("judge the gradient of x alone", {"choices": ("x",)}),
    "--gamma-offset": "number that the forward itself adds to gamma; default: 0",
    "--shape": "shape of x; default: 2 3 8, or another that the code accepts",
    "--dtype": (
        "dtype of x, gamma, beta; default: float64, or float32 if the code wants that",
        {"choices": ("float64", "float32")},
    ),
    "--eps": ("eps that the forward gets; default: 1e-5", {"default": 1e-5}),
    "--seed": "seed of the data; default: 0",
    "--timeout": (
        "seconds after which the check gives up; default: none",
        {"type": float, "metavar": "S"},
    ),
    "--quiet-code": ("do not show what the code prints", {"action": "store_true"}),
    "--verbose": (
        "show all figures: bounds, resolutions, counts, hard inputs",
        {"action": "store_true"},
    ),
    "--json": "write all figures to this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm check` is asked: the check in a process of its own, the report in this one."""
    # Eight arrays: x, dy, y, dx, and copies in the checks.
    size = parse(arguments.dtype or "float64").itemsize
    parts.check_memory(8 * math.prod(arguments.shape or ()) * size)
    parts.check_file(arguments.file, "a Python file, named *.py", ".py")
    print(f"stablenorm: running the code of {arguments.file}", file=sys.stderr, flush=True)
    arguments.job = None
    status, content, head, lines = run_apart(examine, arguments, arguments.timeout)
    parts.write_json(arguments.json, content)
    parts.print_lines(f": {head}", bold=arguments.file.name)
    parts.print_lines("", *lines[1:], bold=lines[0])
    return int(status)


def examine(arguments: argparse.Namespace) -> tuple[int, dict[str, Any], str, list[str]]:
    """Run the file and judge its norm; return the status, the figures, the signature and the report."""
    if arguments.quiet_code:
        silence()
    file: Any = None
    try:
        file = UserFile(arguments.file)
        other = check_operation if arguments.args else judge_forward
        if checked := other(file, arguments):
            return checked
        norm, data, axes, notes = _choose(file, arguments)
    except (FaultError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        is_torch = re.search(_TORCH, text) or (file and "torch" in file.names)
        prefix = "arrays are NumPy's here, not torch tensors: " * bool(is_torch)
        raise parts.InputError(prefix + text) from None
    # The code is called often: what it prints is shown once.
    silence()
    kind, backward = _kind(norm, arguments), norm.backward
    if arguments.only:
        backward = lambda dy, cache: [norm.backward(dy, cache)[0], None, None]
    check = {"layer": check_layer_norm, "rms": check_rms_norm}[kind]
    x, gamma, beta = data
    report = check(
        norm.forward, backward, x, gamma, beta, arguments.eps,
        gamma_offset=arguments.gamma_offset, rng=arguments.seed, axis=axes,
    )  # fmt: skip
    why = "" if arguments.only else norm.others
    if not norm.takes and not arguments.axis and "y" in report.formula:
        over = axes_of(kind, norm.forward, norm.backward, data, arguments.eps)
        if over not in ((), (data[0].ndim - 1,)):
            listed = " ".join(map(str, over))
            why = f"y is normalized over axis {listed}; without gamma and beta nothing decides: say --axis {listed}, or -1"
            report = GradientReport((), report.forward_calls)
    report = replace(report, left=why)
    status = {"PASS": 0, "FAIL": parts.EXIT_FAILED}.get(report.verdict, parts.EXIT_INCONCLUSIVE)
    if report.passed and report.unjudged and not arguments.only:
        status = parts.EXIT_INCONCLUSIVE
    head = f"{norm.signature()}; x {shape_text(data[0].shape)} {data[0].dtype}"
    if axes != (-1,):
        head += f", axis {' '.join(map(str, axes))}"
        head += " as y shows (--axis for another)" * (not arguments.axis)
    content = {"source": arguments.file.name, "functions": norm.signature(), "notes": notes}
    content |= {"shape": data[0].shape, "dtype": str(data[0].dtype), "axis": axes}
    content |= {n: vars(arguments)[n] for n in ("eps", "seed")} | {"report": report.as_dict()}
    lines = report.text(verbose=arguments.verbose).splitlines()
    lines += [f"  note: {note}" for note in notes if arguments.verbose]
    if arguments.example and report.verdict == "FAIL":
        # Code that wants other shapes has no example.
        with suppress(Exception):
            lines += lines_by_hand(_adapt(file, arguments, (2, 4), (-1,)), kind)
    return status, content, head, lines


def _kind(norm: Norm, arguments: argparse.Namespace) -> str:
    return arguments.kind or ("rms" if "rms" in key_of(norm.name) else "layer")


def _adapt(file: UserFile, arguments: argparse.Namespace, shape: Any, axes: Any) -> Norm:
    """Return the norm: the functions, the class of --class or --init, or the file's only class."""
    functions, name = (arguments.forward, arguments.backward), arguments.class_
    if (name or arguments.init) and any(functions):
        msg = "--class must be given without --forward and --backward: it has both"
        raise parts.InputError(msg)
    if arguments.init and not name:
        name = next(iter(re.findall(r"\w+", arguments.init)), "")
    if not name:
        try:
            return adapt_functions(file, functions, arguments.kind, shape, axes)
        except parts.InputError:
            # The only class, or the only one with the norm in its name.
            usual = "", "norm", "rms" if arguments.kind == "rms" else "layernorm"
            named = ([n for n in file.classes if word in key_of(n)] for word in usual)
            name = next((only[0] for only in named if len(only) == 1), None)
            if any(functions) or not name:
                raise
    return adapt_class(file, name, shape, axes, arguments.init)


def _problems(arguments: argparse.Namespace) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the shapes of x that are tried, the normalized axes, and the shape of gamma."""
    given, shape = arguments.axis, arguments.shape
    tried: Iterable[Any] = _TRIED
    if shape:
        tried = [(len(shape), axes) for axes in ((-1,), (0,), (1,), (-2, -1), (None,))]
    for ndim, axes in dict.fromkeys((ndim, tuple(given or axes)) for ndim, axes in tried):
        over = tuple(range(-ndim, 0)) if None in axes else axes
        if not all(-ndim <= axis < ndim for axis in over):
            continue
        own = {axis % ndim for axis in over}
        left = iter(_OTHERS[ndim - len(own)]), iter(_LENGTHS[len(own)])
        x_shape = tuple(shape or (next(left[axis in own]) for axis in range(ndim)))
        whole = tuple(m if axis in own else 1 for axis, m in enumerate(x_shape))
        flat, short = (math.prod(whole),), whole[min(own) :]
        # The usual form first: (n,), but (n, 1) for columns.
        forms = (short, whole, flat) if ndim == 2 else (flat, short, whole)
        yield from ((x_shape, over, f) for f in ([flat] if over == (-1,) else dict.fromkeys(forms)))


def _choose(file: UserFile, arguments: argparse.Namespace) -> tuple[Norm, Any, Any, list[str]]:
    """Return the norm, data and axes of the first problem that both functions accept, and why others were rejected."""
    notes, accepted, last = list[str](), list[Any](), None
    for dtype in [arguments.dtype] if arguments.dtype else ["float64", "float32"]:
        for shape, axes, form in dict.fromkeys(_problems(arguments)):
            # One row would hide that sums over rows are missing.
            if len(shape) == 1 and accepted:
                continue
            is_sure = axes == (-1,) or bool(arguments.axis)
            rng = np.random.default_rng(arguments.seed)
            # Exact in float32: parameters of a class may have that.
            both = [
                a.astype("f4").astype(dtype).reshape(form)
                for a in example((1, math.prod(form)), rng)[1:]
            ]
            x = np.random.default_rng(arguments.seed).standard_normal(shape).astype(dtype)
            try:
                norm = _adapt(file, arguments, shape, axes)
                data = (
                    x,
                    *(
                        a if role in norm.takes else None
                        for role, a in zip(PARAMETERS, both, strict=True)
                    ),
                )
                wrong = _objection(norm, data, arguments.eps)
                if not wrong and not is_sure:
                    over = axes_of(
                        _kind(norm, arguments),
                        norm.forward,
                        norm.backward,
                        deepcopy(data),
                        arguments.eps,
                        axes,
                    )
                    if over != (x.ndim - len(axes),) or not norm.takes:
                        wrong = "y is normalized over another axis"
                if not wrong:
                    return norm, data, axes, notes
                if is_sure:
                    accepted.append((" raised " in wrong, norm, data, axes))
                if norm.cure and " raised " in wrong:
                    raise parts.InputError(norm.cure)
            except FaultError as fault:
                wrong, last = str(fault), last or fault
            notes.append(f"not for x of shape {shape_text(shape)} {dtype}: {wrong}")
        # The check judges wrong shapes, or a backward that raises.
        if accepted:
            _, norm, data, axes = min(accepted, key=lambda found: found[0])
            return norm, data, axes, []
    raise last or AssertionError


def _objection(norm: Norm, data: Any, eps: float) -> str:
    """Call both functions once; say which shape is wrong, or what the backward raises."""
    # Copies: the code may modify its x, which the check judges later.
    try:
        with np.errstate(all="ignore"):
            y, cache = norm.forward(*deepcopy(data), eps)
    except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
        fault = error if isinstance(error, FaultError) else FaultError.of(error)
        raise FaultError(norm.cure) if norm.cure else fault from None
    try:
        with np.errstate(all="ignore"):
            gradients = norm.backward(np.ones_like(data[0]), cache)
    except FaultError:
        # The returned gradients cannot be told apart: nothing can be checked.
        raise
    except BaseException as error:  # noqa: BLE001
        return f"your backward raised {FaultError.of(error)}"
    for name, array, actual in zip(
        ("y", "dx", "dgamma", "dbeta"), (data[0], *data), (y, *gradients), strict=True
    ):
        is_there = array is not None and actual is not None and not isinstance(actual, str)
        if is_there and np.shape(actual) != array.shape:
            came, wanted = shape_text(np.shape(actual)), shape_text(array.shape)
            return f"{name} has shape {came}, not {wanted}"
    return ""
