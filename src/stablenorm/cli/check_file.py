"""Run `stablenorm check`: load the user's code, make data for it, and check it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import GradientReport, check_layer_norm
from stablenorm.check.closed_form import Candidate, Case
from stablenorm.check.operation import Operation
from stablenorm.cli.parts import InputError
from stablenorm.cli.user_class import adapt_class
from stablenorm.cli.user_file import UserFile, UserFileError, quiet
from stablenorm.cli.user_functions import LayerNorm, adapt_functions
from stablenorm.types import Array

# 48 elements: all are compared. The lengths differ, lest one axis be taken for another.
_SHAPES = ((2, 3, 8), (6, 8))
_DEFAULT_EPS = 1e-5


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


class _Data(NamedTuple):
    x: Array
    gamma: Array | None
    beta: Array | None


def check_file(request: Namespace, progress: Callable[[int, int], object]) -> FileCheck:
    """Do what the arguments of `stablenorm check` ask for; InputError if that cannot be done."""
    try:
        file = UserFile(request.file)
        layer_norm = _adapted(file, request)
        with quiet():
            layer_norm, shape, notes = _choose_shape(layer_norm, request)
            data = _data(layer_norm, shape, request)
            eps, origin = _choose_eps(layer_norm, data, request)
            report = _check(layer_norm, data, eps, {"rng": request.seed, "progress": progress})
    except UserFileError as error:
        raise InputError(error.line) from error
    # To the check None means "do not look"; a file that leaves one out has not been shown right.
    arguments = tuple(
        replace(result, verdict="INCONCLUSIVE")
        if result.verdict == "NOT CHECKED" and getattr(data, result.name, None) is not None
        else result
        for result in report.arguments
    )
    about = file.name, layer_norm.signature, shape, request.dtype, eps, origin, request.seed
    notes += file.prints
    return FileCheck(*about, tuple(notes), replace(report, arguments=arguments))


def _adapted(file: UserFile, request: Namespace) -> LayerNorm:
    """Return the class that is asked for, or the only one of a file without functions for it."""
    named = request.forward or request.backward
    if request.class_ is not None:
        if named:
            msg = "--class must be given without --forward and --backward: it has both"
            raise InputError(msg)
        return adapt_class(file, request.class_)
    try:
        return adapt_functions(file, request.forward, request.backward)
    except UserFileError:
        if named or len(file.classes) != 1:
            raise
        return adapt_class(file, file.classes[0])


def _check(
    layer_norm: LayerNorm, data: _Data, eps: float, options: dict[str, Any]
) -> GradientReport:
    functions = layer_norm.forward, layer_norm.backward
    try:
        return check_layer_norm(*functions, *data, eps, **options)
    except (UserFileError, MemoryError):
        raise
    # What the check refuses is what the user's functions returned; and a mistake of the check
    # itself is not to be read off a traceback by the user either.
    except Exception as error:
        known = isinstance(error, (TypeError, ValueError))
        text = " ".join(str(error).split())
        msg = text if known else f"the check itself failed: {type(error).__name__}: {text}"
        raise InputError(msg) from error


def _data(layer_norm: LayerNorm, shape: tuple[int, ...], request: Namespace) -> _Data:
    """Return x, and gamma and beta where there are any: of both signs, and nothing special."""
    rng = np.random.default_rng(request.seed)
    n = shape[-1]
    x = rng.standard_normal(shape).astype(request.dtype)
    signs = rng.permutation(np.where(np.arange(n) % 2, -1.0, 1.0))
    gamma = (signs * (1 + 0.5 * rng.random(n))).astype(request.dtype)
    beta = (0.5 + rng.random(n)).astype(request.dtype)
    takes = layer_norm.takes
    return _Data(x, gamma if "gamma" in takes else None, beta if "beta" in takes else None)


def _choose_shape(
    layer_norm: LayerNorm, request: Namespace
) -> tuple[LayerNorm, tuple[int, ...], list[str]]:
    """Return the first shape that both functions accept, and why others were rejected."""
    shapes = _SHAPES if request.shape is None else (tuple(request.shape),)
    wrong, errors = {}, {}
    # The usual shapes in any case: whether the number of axes matters is worth knowing.
    for shape in (*shapes, *_SHAPES):
        try:
            wrong[shape] = _objection(layer_norm, _data(layer_norm, shape, request), request.eps)
        except UserFileError as error:
            wrong[shape], errors[shape] = error.line, error
    # What runs, but returns wrong shapes, is for the check to judge.
    runs = [shape for shape in shapes if shape not in errors]
    if not runs:
        raise next(iter(errors.values()))
    shape = min(runs, key=lambda one: bool(wrong[one]))
    refused = {s: why for s, why in wrong.items() if why and len(s) != len(shape)}
    # One axis has no room for rows.
    if wrong[shape] or not refused or len(shape) == 1:
        return layer_norm, shape, []
    notes = [f"not for x of shape {list(s)}: {why}" for s, why in refused.items()]
    notes.append(f"so x of any shape is passed to it with {len(shape)} axes")
    return _with_axes(layer_norm, len(shape)), shape, notes


def _objection(layer_norm: LayerNorm, data: _Data, eps: float | None) -> str:
    """Call both functions once; return what is wrong with the shapes, empty if nothing is."""
    copies = (None if a is None else a.copy() for a in data)
    y, cache = layer_norm.forward(*copies, _DEFAULT_EPS if eps is None else eps)
    if np.shape(y) != data.x.shape:
        return f"y has shape {list(np.shape(y))}"
    gradients = layer_norm.backward(np.ones(data.x.shape, np.asarray(y).dtype), cache)
    if not isinstance(gradients, (tuple, list)) or len(gradients) != len(data):
        return "the backward does not return three gradients"
    for name, array, gradient in zip(data._fields, data, gradients, strict=True):
        if array is not None and gradient is not None and np.shape(gradient) != array.shape:
            return f"d{name} has shape {list(np.shape(gradient))}, not {list(array.shape)}"
    return ""


def _with_axes(layer_norm: LayerNorm, axes: int) -> LayerNorm:
    """Return the same for x of any shape, passed on with so many axes."""

    def seen(a: Array) -> Array:
        """See an array with the last axis as it is: ones in front, or the others as one."""
        leading = a.shape[:-1] if a.ndim <= axes else (math.prod(a.shape[:-1]),)
        return np.reshape(a, (*(1,) * (axes - 1 - len(leading)), *leading, a.shape[-1]))

    def as_x(result: Any, x: Array) -> Any:
        return np.reshape(result, x.shape) if np.size(result) == x.size else result

    def forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Array, Any]:
        y, cache = layer_norm.forward(seen(x), gamma, beta, eps)
        return as_x(y, x), cache

    def backward(dy: Array, cache: Any) -> Any:
        gradients = layer_norm.backward(seen(dy), cache)
        if not isinstance(gradients, (tuple, list)) or len(gradients) == 0:
            return gradients
        return as_x(gradients[0], dy), *gradients[1:]

    return layer_norm._replace(forward=forward, backward=backward)


def _choose_eps(layer_norm: LayerNorm, data: _Data, request: Namespace) -> tuple[float, str]:
    """Return eps and its origin."""
    if layer_norm.takes_eps:
        if request.eps is None and layer_norm.eps is not None:
            return layer_norm.eps, "the forward's default"
        return _DEFAULT_EPS if request.eps is None else request.eps, "passed on"
    if request.eps is not None:
        return request.eps, "as given: the forward does not take it"
    case = Case(*data, _DEFAULT_EPS, data.x)
    eps, _ = Candidate(Operation(layer_norm.forward, layer_norm.backward)).read_eps(case)
    return eps, "read off y: the forward does not take it"
