"""Run `stablenorm check`: load the user's code, make data for it, and check it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import GradientReport, check_layer_norm
from stablenorm.check.closed_form import Candidate, Case
from stablenorm.check.operation import Operation
from stablenorm.cli.files import InputError
from stablenorm.cli.user_class import adapt_class
from stablenorm.cli.user_file import UserFile, UserFileError
from stablenorm.cli.user_layer_norm import LayerNorm, adapt
from stablenorm.oracle import exact_layer_norm
from stablenorm.types import Array

# 48 elements: all are compared. The lengths differ, lest one axis be taken for another.
_SHAPES = ((2, 3, 8), (6, 8))
_DEFAULT_EPS = 1e-5


class Request(NamedTuple):
    """What the user asks for."""

    path: Path
    forward: str | None
    backward: str | None
    class_: str | None
    shape: tuple[int, ...] | None
    dtype: str
    eps: float | None
    seed: int


class FileCheck(NamedTuple):
    """What was checked, what had to be assumed, and what was found."""

    source: str
    functions: str
    shape: tuple[int, ...]
    dtype: str
    eps: float
    eps_origin: str
    seed: int
    notes: tuple[str, ...]
    report: GradientReport

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, the report's own among them."""
        return self._asdict() | {
            "shape": list(self.shape),
            "notes": list(self.notes),
            "report": self.report.as_dict(),
        }


class _Data(NamedTuple):
    x: Array
    gamma: Array | None
    beta: Array | None


def check_request(request: Request) -> None:
    """Refuse what cannot be asked for, before the user's code is run."""
    if request.seed < 0:
        msg = f"--seed must be >= 0, got {request.seed}"
        raise InputError(msg)
    if request.eps is not None and not (math.isfinite(request.eps) and request.eps >= 0):
        msg = f"--eps must be finite and >= 0, got {request.eps}"
        raise InputError(msg)


def check_file(request: Request, progress: Callable[[int, int], object]) -> FileCheck:
    """Run the user's file, and check its layer norm; InputError if that cannot be done."""
    try:
        return _check_file(request, progress)
    except UserFileError as error:
        raise InputError(error.line) from error


def _check_file(request: Request, progress: Callable[[int, int], object]) -> FileCheck:
    file = UserFile(request.path)
    layer_norm = _adapted(file, request)
    with file.quiet():
        layer_norm, shape, notes = _choose_shape(layer_norm, request)
        data = _data(layer_norm, shape, request)
        eps, origin = _choose_eps(layer_norm, data, request)
        report = _demanding(_check(layer_norm, data, eps, request, progress), data)
    printed = [file.prints] if file.prints else []
    return FileCheck(
        file.name,
        layer_norm.signature,
        shape,
        request.dtype,
        eps,
        origin,
        request.seed,
        (*notes, *printed),
        report,
    )


def _adapted(file: UserFile, request: Request) -> LayerNorm:
    """Return the class that is asked for, or the only one of a file without functions for it."""
    named = request.forward or request.backward
    if request.class_ is not None:
        if named:
            msg = "--class must be given without --forward and --backward: it has both"
            raise InputError(msg)
        return adapt_class(file, request.class_)
    if len(file.classes) == 1 and not named:
        try:
            return adapt(file, None, None)
        except UserFileError:
            return adapt_class(file, file.classes[0])
    return adapt(file, request.forward, request.backward)


def _demanding(report: GradientReport, data: _Data) -> GradientReport:
    """
    Return the report, inconclusive where a gradient that there must be was not returned.

    To the check None means "do not look"; a file that leaves one out has not been shown right.
    """
    arguments = tuple(
        replace(result, verdict="INCONCLUSIVE")
        if result.verdict == "NOT CHECKED" and given
        else result
        for result, given in zip(
            report.arguments,
            (getattr(data, r.name, None) is not None for r in report.arguments),
            strict=True,
        )
    )
    return replace(report, arguments=arguments)


def _check(
    layer_norm: LayerNorm,
    data: _Data,
    eps: float,
    request: Request,
    progress: Callable[[int, int], object],
) -> GradientReport:
    options: dict[str, Any] = {"rng": request.seed, "progress": progress}
    functions = layer_norm.forward, layer_norm.backward
    try:
        return check_layer_norm(*functions, *data, eps, oracle=exact_layer_norm, **options)
    except (UserFileError, MemoryError):
        raise
    # What the check refuses is what the user's functions returned; and a mistake of the check
    # itself is not to be read off a traceback by the user either.
    except Exception as error:
        known = isinstance(error, (TypeError, ValueError))
        text = " ".join(str(error).split())
        msg = text if known else f"the check itself failed: {type(error).__name__}: {text}"
        raise InputError(msg) from error


def _data(layer_norm: LayerNorm, shape: tuple[int, ...], request: Request) -> _Data:
    """Return x, and gamma and beta where there are any: of both signs, and nothing special."""
    rng = np.random.default_rng(request.seed)
    n = shape[-1]
    x = rng.standard_normal(shape).astype(request.dtype)
    signs = rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0))
    gamma = (signs * (1 + 0.5 * rng.random(n))).astype(request.dtype)
    beta = (0.5 + rng.random(n)).astype(request.dtype)
    return _Data(
        x,
        gamma if "gamma" in layer_norm.takes else None,
        beta if "beta" in layer_norm.takes else None,
    )


def _choose_shape(
    layer_norm: LayerNorm, request: Request
) -> tuple[LayerNorm, tuple[int, ...], list[str]]:
    """Return the first shape that both functions accept, and why others were rejected."""
    tried = {}
    # The usual shapes in any case: whether the number of axes matters is worth knowing.
    for shape in dict.fromkeys((*([request.shape] if request.shape else []), *_SHAPES)):
        try:
            objection, error = _try(layer_norm, _data(layer_norm, shape, request), request), None
        except UserFileError as raised:
            objection, error = raised.line, raised
        tried[shape] = (objection, error)
    shapes = list(_SHAPES) if request.shape is None else [request.shape]
    good = [shape for shape in shapes if not tried[shape][0]]
    # What runs, but returns wrong shapes, is for the check to judge.
    runs = [shape for shape in shapes if tried[shape][1] is None]
    if not runs:
        raise next(error for _, error in tried.values() if error is not None)
    shape = (good or runs)[0]
    refused = {s: why for s, (why, _) in tried.items() if why and len(s) != len(shape)}
    # One axis has no room for rows.
    if not good or not refused or len(shape) == 1:
        return layer_norm, shape, []
    notes = [f"not for x of shape {list(s)}: {why}" for s, why in refused.items()]
    notes.append(f"so x of any shape is passed to it with {len(shape)} axes")
    return layer_norm.fixed(len(shape)), shape, notes


def _try(layer_norm: LayerNorm, data: _Data, request: Request) -> str:
    """Call both functions once; return what is wrong with the shapes, empty if nothing is."""
    eps = _DEFAULT_EPS if request.eps is None else request.eps
    y, cache = layer_norm.forward(*(None if a is None else a.copy() for a in data), eps)
    if np.shape(y) != data.x.shape:
        return f"y has shape {list(np.shape(y))}"
    dy = np.ones(data.x.shape, np.asarray(y).dtype)
    gradients = layer_norm.backward(dy, cache)
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(data):
        return "the backward does not return three gradients"
    for name, array, gradient in zip(_Data._fields, data, gradients, strict=True):
        if array is not None and gradient is not None and np.shape(gradient) != array.shape:
            return f"d{name} has shape {list(np.shape(gradient))}, not {list(array.shape)}"
    return ""


def _choose_eps(layer_norm: LayerNorm, data: _Data, request: Request) -> tuple[float, str]:
    """Return eps and its origin."""
    eps, origin = _DEFAULT_EPS, "passed on"
    if request.eps is not None:
        eps = request.eps
    elif layer_norm.eps is not None:
        eps, origin = layer_norm.eps, "the forward's default"
    if layer_norm.takes_eps:
        return eps, origin
    if request.eps is not None:
        return eps, "as given: the forward does not take it"
    case = Case(*data, eps, data.x)
    eps, _ = Candidate(Operation(layer_norm.forward, layer_norm.backward)).read_eps(case)
    return eps, "read off y: the forward does not take it"
