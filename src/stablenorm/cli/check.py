"""
Check a layer or RMS norm of yours: runs your file, names common mistakes.

The check compares gradients with finite differences and a closed form, also on
hard inputs. Its report states the smallest error that it could see.

examples:
  stablenorm check mine.py
  stablenorm check mine.py --forward fwd --backward bwd
  stablenorm check mine.py --class LayerNorm
  stablenorm check mine.py --kind rms
  stablenorm check mine.py --shape 32 768 --dtype float32 --seed 3
  stablenorm check mine.py --json check.json

the file must hold two functions or a class:
  def layer_norm_forward(x, gamma, beta, eps): ...    return y, cache
  def layer_norm_backward(dy, cache): ...             return dx, dgamma, dbeta
  class LayerNorm: ...                                forward(x), backward(dy)
The kind of the norm follows the name: rms_norm_forward, class RMSNorm.

Arguments are recognized by name (gamma or weight, beta or bias, ln_param,
...), otherwise by order; gamma and beta may be missing. The cache may be
anything. Without one, the backward (dy, x, gamma, mean, rstd) gets the
forward's arguments and its results after y. Gradients may come as a tuple or,
by name, as a dict. The check finds and reports an eps fixed in the forward.

The class is called with n, (n,) or nothing. Its gamma and beta are attributes
or members of params, from the start or after the first forward; its backward
returns their gradients, or stores them in attributes (dgamma, grad_weight,
gamma.grad, ...) or in grads. Its forward, or __call__, may take gamma and beta
with x.

THE CODE OF THE FILE IS RUN, as Python would run it: check only files that you
trust.

exit status: 0 no mistake found, 1 a mistake found, 2 the check cannot be run
(one line says why), 3 inconclusive: too noisy, or too little compared, for a
verdict.
"""

import argparse
import io
import math
import sys
from copy import deepcopy
from functools import partial

import numpy as np

from stablenorm.check import check_layer_norm, check_rms_norm
from stablenorm.check.closed_form import example
from stablenorm.check.operation import FaultError
from stablenorm.check.roles import key_of
from stablenorm.cli import parts
from stablenorm.cli.user_norm import Norm, UserFile, adapt_class, adapt_functions, running
from stablenorm.formats import parse
from stablenorm.text import shape_text
from stablenorm.types import Array

# 48 elements: the check compares all. The lengths differ, so that code which mixes up axes fails.
_SHAPES = [(2, 3, 8), (6, 8)]
_Data = tuple[Array, Array | None, Array | None]

OPTIONS = {
    "file": ("a Python file; its code is run", {"nargs": None, "metavar": "FILE.py"}),
    "--forward": "default: layer_norm_forward, rms_norm_forward, ln_forward or forward",
    "--backward": "default: layer_norm_backward, rms_norm_backward, ln_backward or backward",
    "--class": "class with forward(x) and backward(dy); default: the only one in the file",
    "--kind": ("kind of the norm; default: the kind in its name, or layer", {"default": None}),
    "--gamma-offset": "number that the forward itself adds to gamma; default: 0",
    "--shape": "shape of x; default: 2 3 8, or 6 8 if the code needs two axes",
    "--dtype": (
        "dtype of x, gamma, beta; default: float64, which shows the smallest errors",
        {"choices": ("float64", "float32"), "default": "float64"},
    ),
    "--eps": ("eps that the forward gets; default: 1e-5", {"default": 1e-5}),
    "--seed": "seed of the data; default: 0",
    "--json": "write all figures to this file",
}


def run(arguments: argparse.Namespace) -> int:
    """Do what `stablenorm check` is asked."""
    # Eight arrays: x, dy, y, dx, and copies in the checks.
    parts.check_memory(8 * math.prod(arguments.shape or ()) * parse(arguments.dtype).itemsize)
    # stderr, before `running` takes it from the user's code; None if it was closed. A text overwrites the last.
    stream = sys.stderr if sys.stderr and sys.stderr.isatty() else io.StringIO()
    show = partial(print, end="\x1b[K\r", file=stream, flush=True)
    progress = lambda done, total: show(f"comparing: {done} of {total}")
    with (
        # For results that the check cannot judge: a traceback helps nobody.
        parts.refusing(Exception, prefix="the check cannot go on: ", named=True),
        parts.refusing(FaultError),
        running(arguments.file) as file,
    ):
        norm = _adapt(file, arguments)
        kind = arguments.kind or ("rms" if "rms" in key_of(norm.name) else "layer")
        data, notes = _choose_data(norm, arguments)
        notes += ["no gamma and no beta found: the check judges dx alone"] * (not norm.takes)
        check = {"layer": check_layer_norm, "rms": check_rms_norm}[kind]
        inputs = norm.forward, norm.backward, *data, arguments.eps
        options = {"gamma_offset": arguments.gamma_offset, "rng": arguments.seed}
        report = check(*inputs, **options, progress=progress)
    show()
    content = {"source": arguments.file.name, "functions": norm.signature, "notes": notes}
    content |= {"shape": data[0].shape} | {n: vars(arguments)[n] for n in ("dtype", "eps", "seed")}
    parts.write_json(arguments.json, content | {"report": report.as_dict()})
    parts.print_lines(f": {norm.signature}", bold=arguments.file.name)
    parts.print_lines(*(f"note: {note}" for note in notes), "")
    first, *others = str(report).splitlines()
    parts.print_lines("", *others, bold=first)
    return {"PASS": 0, "FAIL": parts.EXIT_FAILED}.get(report.verdict, parts.EXIT_INCONCLUSIVE)


def _adapt(file: UserFile, arguments: argparse.Namespace) -> Norm:
    """Return the norm: the functions, the class of --class, or the file's only class."""
    functions, name = (arguments.forward, arguments.backward), arguments.class_
    if name and any(functions):
        msg = "--class must be given without --forward and --backward: it has both"
        raise parts.InputError(msg)
    # ValueError: a signature cannot be read, or is not that of a norm.
    with parts.refusing(ValueError):
        try:
            if not name:
                return adapt_functions(file, *functions, arguments.kind)
        except parts.InputError:
            if any(functions) or len(file.classes) != 1:
                raise
        return adapt_class(file, name or file.classes[0], (arguments.shape or _SHAPES[0])[-1])


def _choose_data(norm: Norm, arguments: argparse.Namespace) -> tuple[_Data, list[str]]:
    """Return x, gamma and beta of the first shape that both functions accept, and why others were rejected."""
    notes, accepted, refused = list[str](), list[_Data](), list[FaultError]()
    for shape in [tuple(arguments.shape)] if arguments.shape else _SHAPES:
        arrays = example(shape, np.random.default_rng(arguments.seed))
        x, gamma, beta = (array.astype(arguments.dtype) for array in arrays)
        data = x, gamma if "gamma" in norm.takes else None, beta if "beta" in norm.takes else None
        try:
            # Pass a copy: the code may modify its x, which the check judges later.
            if not (wrong := _objection(norm, deepcopy(data), arguments.eps)):
                return data, notes
            accepted.append(data)
        except FaultError as fault:
            wrong = str(fault)
            refused.append(fault)
        notes.append(f"not for x of shape {shape_text(shape)}: {wrong}")
    # The check judges wrong shapes, or a backward that raises.
    if accepted:
        return accepted[0], []
    raise refused[0]


def _objection(norm: Norm, data: _Data, eps: float) -> str:
    """Call both functions once; say which shape is wrong, or what the backward raises."""
    y, cache = norm.forward(*data, eps)
    try:
        gradients = norm.backward(np.ones_like(data[0]), cache)
    except FaultError as fault:
        # Raise if the returned gradients cannot be told apart: nothing can be checked.
        if fault.raised:
            return str(fault)
        raise
    names = ("y", "dx", "dgamma", "dbeta")
    for name, array, actual in zip(names, (data[0], *data), (y, *gradients), strict=True):
        if array is not None and actual is not None and np.shape(actual) != array.shape:
            cure = "; sum over all axes but the last" * (name in ("dgamma", "dbeta"))
            came, wanted = shape_text(np.shape(actual)), shape_text(array.shape)
            return f"{name} has shape {came}, not {wanted}{cure}"
    return ""
