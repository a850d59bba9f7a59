"""The timing job: our own backends on a user's shapes, against a copy measured in the same run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from stablenorm._threads import get_num_threads, set_num_threads
from stablenorm._types import Array, Gradients, bfloat16
from stablenorm.backends import BACKENDS, choose
from stablenorm.functional import layer_norm_backward, layer_norm_forward
from stablenorm.timing import Timing, measure_copy, measure_interleaved

DTYPES = ("float32", "float16", "bfloat16", "float64")
# Bytes moved, in arrays of x: forward reads x and writes y; backward reads dy and x, writes dx.
PASSES = {"forward": 2, "backward": 3}
# Seconds for one candidate, all its rounds together: a table of two backends is done in a minute.
_LIMIT = 2.0
_ROUNDS = 15


class Row(NamedTuple):
    """One line of the table."""

    shape: tuple[int, ...]
    dtype: str
    direction: str
    backend: str
    outputs: str
    timing: Timing
    bytes_a_second: float
    of_copy: float


class Bench(NamedTuple):
    """All that `stablenorm bench` has to tell; `copy` is in bytes a second."""

    rows: tuple[Row, ...]
    copy: float
    threads: int


class Problem(NamedTuple):
    """Arrays to normalize over the last axis, and arrays to write into."""

    x: Array
    gamma: Array
    beta: Array
    dy: Array
    y: Array
    gradients: Gradients


def type_of(name: str) -> np.dtype[Any]:
    """Return the dtype of that name; NumPy itself does not know bfloat16."""
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def make_problem(shape: Sequence[int], dtype: str) -> Problem:
    """Draw N(0, 1), gamma around 1; timings do not depend on the values."""
    rng = np.random.default_rng(0)
    kind = type_of(dtype)
    drawn = np.float64 if dtype == "float64" else np.float32
    # Without a copy for float32, where arrays may fill half of the memory.
    x, dy = (rng.standard_normal(shape, drawn).astype(kind, copy=False) for _ in range(2))
    beta = rng.standard_normal(shape[-1]).astype(kind)
    gamma = rng.uniform(0.5, 1.5, shape[-1]).astype(kind)
    gradients = Gradients(np.zeros_like(x), np.zeros_like(gamma), np.zeros_like(beta))
    return Problem(x, gamma, beta, dy, np.zeros_like(x), gradients)


def make_candidates(
    problem: Problem, backend: str | None
) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, per direction, the calls with fresh outputs and with `out=`."""
    x, gamma, beta, dy, y, gradients = problem
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    return {
        "forward": {
            "fresh": lambda: layer_norm_forward(x, gamma, beta, backend=backend),
            "out=": lambda: layer_norm_forward(x, gamma, beta, out=y, backend=backend),
        },
        "backward": {
            "fresh": lambda: layer_norm_backward(dy, cache),
            "out=": lambda: layer_norm_backward(dy, cache, out=gradients),
        },
    }


def count_bytes(shape: Iterable[int], dtype: str) -> int:
    """Bytes held at once while this shape is timed, roughly."""
    size = math.prod(shape)
    # x, dy, y, dx; a fresh y or dx; the results of two backends; and the numbers as drawn.
    return size * (8 * type_of(dtype).itemsize + 4)


def physical_memory() -> float:
    """Bytes of memory in this machine; infinity where the system does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def use_threads(threads: int | None) -> int:
    """Set how many threads a call may use, if asked to; return how many it may."""
    if threads is not None:
        set_num_threads(threads)
    return get_num_threads()


def usable_backends() -> list[str]:
    """Return the names of those that can be loaded here."""
    return [name for name in BACKENDS if _loads(name)]


def _loads(name: str) -> bool:
    try:
        choose(name)
    except ImportError:
        return False
    return True


def differing(one: Problem, backends: Sequence[str]) -> str | None:
    """Name the first output in which a backend differs from the first one; None if none does."""
    first: dict[str, Any] = {}
    for backend in backends:
        y, cache = layer_norm_forward(one.x, one.gamma, one.beta, backend=backend)
        results = {"y": y, **layer_norm_backward(one.dy, cache)._asdict()}
        for name, expected in first.items():
            # Each is within an ulp of the exact value; of y and dx up to 32 bits, the bits agree.
            exact = name in ("y", "dx") and one.x.dtype.itemsize < 8
            agree = np.array_equal if exact else partial(_close, problem=one)
            if not agree(expected, results[name]):
                return f"{name} of {backend} and of {backends[0]}"
        first = first or results
    return None


def _close(expected: Array, actual: Array, problem: Problem) -> bool:
    """Two ulp apart at most, beside what the contract allows to an element that cancels."""
    constant = 2.0**-94 if problem.x.dtype.itemsize == 8 else 2.0**-44
    # The magnitudes summed over rows: those of dy and xhat are about 1, and none beyond 2**5.
    rows = problem.x.size // max(problem.x.shape[-1], 1)
    kind: Any = ml_dtypes.finfo(expected.dtype)  # type: ignore[no-untyped-call]
    least = float(kind.smallest_subnormal) + constant * rows * 2**10
    one, other = expected.astype(np.float64), actual.astype(np.float64)
    return bool(np.all(np.abs(one - other) <= 2 * (float(kind.eps) * np.abs(one) + least)))


def measure(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    backends: Sequence[str],
    threads: int,
    step: Callable[[str], None],
) -> Bench:
    """Time every backend on every shape; `step` is told what is going on."""
    step("copy")
    before = measure_copy(threads)
    timed = []
    for shape in shapes:
        for dtype in dtypes:
            step(f"{'x'.join(map(str, shape))} {dtype}")
            problem = make_problem(shape, dtype)
            if where := differing(problem, backends):
                msg = f"backends must agree to be timed, got different {where} for {shape} {dtype}"
                raise ArithmeticError(msg)
            timed += [(shape, dtype, *row) for row in _measure_one(problem, backends)]
    # The memory of a shared machine is not as fast all the time: the larger of two.
    step("copy")
    copy = max(before, measure_copy(threads))
    rows = []
    for shape, dtype, direction, backend, outputs, timing in timed:
        nbytes = PASSES[direction] * math.prod(shape) * type_of(dtype).itemsize
        speed = nbytes / timing.median
        rows.append(Row(shape, dtype, direction, backend, outputs, timing, speed, speed / copy))
    return Bench(tuple(rows), copy, threads)


def count_steps(shapes: Sequence[Any], dtypes: Sequence[str]) -> int:
    """How often `measure` calls `step`."""
    return 2 + len(shapes) * len(dtypes)


def _measure_one(problem: Problem, backends: Sequence[str]) -> list[tuple[str, str, str, Timing]]:
    """Time all backends on one problem, interleaved: direction, backend, outputs, timing."""
    candidates = {backend: make_candidates(problem, backend) for backend in backends}
    found = []
    for direction in PASSES:
        calls = {
            f"{backend} {outputs}": call
            for backend in backends
            for outputs, call in candidates[backend][direction].items()
        }
        timings = measure_interleaved(calls, rounds=_ROUNDS, least=1, limit=_LIMIT * len(calls))
        for name, timing in timings.items():
            backend, outputs = name.rsplit(" ", 1)
            found.append((direction, backend, outputs, timing))
    return found
