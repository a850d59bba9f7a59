"""
Check a layer or RMS norm of yours: runs your file, reads back what is wrong.

The check compares gradients with finite differences and a closed form. Where
one is wrong, it shows the formula that your code computes, the right one, and
the cause.

examples:
  stablenorm check mine.py
  stablenorm check mine.py --forward fwd --backward bwd
  stablenorm check mine.py --class LayerNorm
  stablenorm check mine.py --init "LayerNorm(n, rng=None)"
  stablenorm check mine.py --kind rms
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
import io
import math
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.check.closed_form import example
from stablenorm.check.layer_norm import axes_of
from stablenorm.check.operation import FaultError, Missing
from stablenorm.check.results import Finding
from stablenorm.check.roles import key_of
from stablenorm.cli import parts
from stablenorm.cli.child import run_apart, silence
from stablenorm.cli.user_norm import Norm, UserFile, adapt_class, adapt_functions
from stablenorm.formats import parse
from stablenorm.output import shape_text

# Axes of x that are tried, and the normalized ones. All lengths differ, so that code which mixes up axes fails.
_AXES = [(3, (-1,)), (2, (-1,)), (2, (0,)), (4, (1,)), (3, (-2, -1)), (2, (-2, -1)), (1, (-1,))]
_LEADS = {0: (), 1: (6,), 2: (2, 3), 3: (2, 3, 4)}
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
    # A text overwrites the last; the code may have closed the stream.
    stream = sys.__stderr__ if sys.__stderr__ and sys.__stderr__.isatty() else io.StringIO()
    show = partial(print, end="\x1b[K\r", file=stream, flush=True)
    if arguments.quiet_code:
        silence()
    file: Any = None
    try:
        file = UserFile(arguments.file)
        norm, data, axes, notes = _choose(file, arguments)
    except (FaultError, ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        is_torch = re.search(_TORCH, text) or (file and "torch" in file.names)
        raise parts.InputError(
            "arrays are NumPy's here, not torch tensors: " * bool(is_torch) + text
        ) from None
    # The code is called often: what it prints is shown once.
    silence()
    kind = _kind(norm, arguments)
    if not norm.takes and axes == (-1,) and not arguments.axis:
        over = axes_of(kind, norm.forward, norm.backward, data, arguments.eps)
        if over and over != (data[0].ndim - 1,):
            listed = " ".join(map(str, over))
            line = f"y is normalized over axis {listed}; without gamma and beta nothing decides: say --axis {listed}, or -1"
            return (
                3,
                {"source": arguments.file.name},
                norm.signature(),
                ["INCONCLUSIVE", f"  {line}"],
            )
    backward = norm.backward
    if arguments.only:
        backward = lambda dy, cache: [norm.backward(dy, cache)[0], None, None]
    check = {"layer": check_layer_norm, "rms": check_rms_norm}[kind]
    options: dict[str, Any] = {
        "gamma_offset": arguments.gamma_offset,
        "rng": arguments.seed,
        "axis": axes,
        # The closed form judges all elements: differences confirm some.
        "max_elements": 12,
        "probes": 1,
    }
    progress = lambda done, total: show(f"comparing: {done} of {total}")
    x, gamma, beta = data
    report = check(
        norm.forward, backward, x, gamma, beta, arguments.eps, **options, progress=progress
    )
    show()
    if norm.others and report.passed and not arguments.only:
        unseen = Finding("parameters", "not all are judged", "INCONCLUSIVE", norm.others)
        report = replace(report, findings=(*report.findings, unseen))
    is_partial = report.passed and report.unjudged and not arguments.only
    status = {"PASS": 0, "FAIL": parts.EXIT_FAILED}.get(report.verdict, parts.EXIT_INCONCLUSIVE)
    head = f"{norm.signature()}; x {shape_text(data[0].shape)} {data[0].dtype}"
    if axes != (-1,):
        head += f", axis {' '.join(map(str, axes))}" + " as y shows (--axis for another)" * (
            not arguments.axis
        )
    content = {"source": arguments.file.name, "functions": norm.signature(), "notes": notes}
    content |= {"shape": data[0].shape, "dtype": str(data[0].dtype), "axis": axes}
    content |= {n: vars(arguments)[n] for n in ("eps", "seed")} | {"report": report.as_dict()}
    lines = report.text(verbose=arguments.verbose).splitlines()
    lines += [f"  note: {note}" for note in notes if arguments.verbose]
    return parts.EXIT_INCONCLUSIVE if is_partial else status, content, head, lines


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
            return adapt_functions(file, *functions, arguments.kind)
        except parts.InputError:
            # The only class, or the only one with the norm in its name.
            usual = "rms" if arguments.kind == "rms" else "layernorm"
            for wanted in ("", "norm", usual):
                named = [n for n in file.classes if wanted in key_of(n)]
                if len(named) == 1:
                    break
            else:
                raise
            if any(functions):
                raise
            name = named[0]
    return adapt_class(file, name, shape, axes, arguments.init)


def _problems(
    arguments: argparse.Namespace,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
    """Yield the shapes of x that are tried, the normalized axes, and the shape of gamma."""
    given = tuple(arguments.axis) if arguments.axis else None
    if given and None in given:
        given = tuple(range(len(arguments.shape or (0, 0))))
    tried = [(ndim, given or axes) for ndim, axes in _AXES]
    if arguments.shape:
        ndim = len(arguments.shape)
        tried = (
            [(ndim, given)]
            if given
            else [(ndim, a) for a in ((-1,), (0,), (1,), (-2, -1), tuple(range(-ndim, 0)))]
        )
    for ndim, axes in dict.fromkeys(tried):
        if not all(-ndim <= axis < ndim for axis in axes):
            continue
        own = {axis % ndim for axis in axes}
        lengths = (
            iter((8,) if len(own) == 1 else (2, 4, 5, 7)),
            iter(_LEADS[ndim - 1] if len(own) == 1 else (3, 5, 6)),
        )
        shape = tuple(arguments.shape or (next(lengths[axis not in own]) for axis in range(ndim)))
        whole = [m if axis in own else 1 for axis, m in enumerate(shape)]
        short = tuple(whole[min(own) :])
        flat = (math.prod(whole),)
        forms = (
            [flat]
            if axes == (-1,)
            else [short, (*whole,), flat]
            if ndim == 2
            else [flat, short, (*whole,)]
        )
        for form in dict.fromkeys(map(tuple, forms)):
            yield shape, axes, form


def _choose(
    file: UserFile, arguments: argparse.Namespace
) -> tuple[Norm, Any, tuple[int, ...], list[str]]:
    """Return the norm, data and axes of the first problem that both functions accept, and why others were rejected."""
    notes, accepted = list[str](), list[Any]()
    last: Any = None
    for dtype in [arguments.dtype] if arguments.dtype else ["float64", "float32"]:
        for shape, axes, form in _problems(arguments):
            # One row would hide that sums over rows are missing.
            if len(shape) == 1 and accepted:
                continue
            n = math.prod(form)
            arrays = example((shape[0], n), np.random.default_rng(arguments.seed))
            x = np.random.default_rng(arguments.seed).standard_normal(shape).astype(dtype)
            # Exact in float32: parameters of a class may have that.
            both = [a.astype("float32").astype(dtype).reshape(form) for a in arrays[1:]]
            try:
                norm = _adapt(file, arguments, shape, axes)
                data = (
                    x,
                    *(
                        a if role in norm.takes else None
                        for role, a in zip(("gamma", "beta"), both, strict=True)
                    ),
                )
                # Pass a copy: the code may modify its x, which the check judges later.
                wrong = _objection(norm, deepcopy(data), arguments.eps)
                is_last = axes == (-1,) or arguments.axis
                if not wrong and not is_last:
                    over = axes_of(
                        _kind(norm, arguments),
                        norm.forward,
                        norm.backward,
                        data,
                        arguments.eps,
                        axes,
                    )
                    wrong = (
                        ""
                        if over and len(over) == 1 and over[0] == x.ndim - len(axes) and norm.takes
                        else "y is normalized over another axis"
                    )
                found = norm, data, axes, notes
                if not wrong:
                    return found
                accepted += [found] * bool(is_last)
                if norm.cure and " raised " in wrong:
                    raise parts.InputError(norm.cure)
            except FaultError as fault:
                wrong = str(fault)
                last = last or fault
            said = f"not for x of shape {shape_text(shape)} {dtype}: {wrong}"
            if said not in notes:
                notes.append(said)
        # The check judges wrong shapes, or a backward that raises.
        if accepted:
            norm, data, axes, _ = accepted[0]
            return norm, data, axes, []
    raise last


def _objection(norm: Norm, data: Any, eps: float) -> str:
    """Call both functions once; say which shape is wrong, or what the backward raises."""
    try:
        with np.errstate(all="ignore"):
            y, cache = norm.forward(*data, eps)
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
    if _exchange(norm, data, eps, y):
        return _objection(norm, deepcopy(data), eps)
    names = ("y", "dx", "dgamma", "dbeta")
    for name, array, actual in zip(names, (data[0], *data), (y, *gradients), strict=True):
        if (
            array is not None
            and actual is not None
            and not isinstance(actual, Missing)
            and np.shape(actual) != array.shape
        ):
            came, wanted = shape_text(np.shape(actual)), shape_text(array.shape)
            return f"{name} has shape {came}, not {wanted}"
    return ""


def _exchange(norm: Norm, data: Any, eps: float, y: Any) -> bool:
    """Exchange the roles of arguments of unknown names if gamma shifts y; FaultError if one does neither."""
    shifts = dict[str, bool]()
    for role, name in norm.unknown.items():
        steps = []
        for by in (1, 2):
            moved = dict(zip(("x", "gamma", "beta"), deepcopy(data), strict=True))
            moved[role] += by
            steps.append(np.asarray(norm.forward(*moved.values(), eps)[0]) - y)
        near = 1e-4 * max(1.0, float(np.max(np.abs(y))))
        shifts[role] = bool(np.max(np.abs(steps[0] - 1)) <= near)
        if np.max(np.abs(steps[1] - 2 * steps[0])) > near or not np.max(np.abs(steps[0])) > near:
            msg = f"the forward takes {name}, which neither scales nor shifts y: wrap it in functions of (x, gamma, beta, eps)"
            raise FaultError(msg)
    if exchanged := shifts == {"gamma": True, "beta": False}:
        first, second = norm.unknown.values()
        norm.roles.update({first: norm.roles[second], second: norm.roles[first]})
    return exchanged
