"""
The experiments of docs/explanation/stability.md: one table each, hazard by hazard.

A table has a column for each input and a row for each implementation; `measure` fills one cell.
Errors are against the exact oracle (sums over rows: `math.fsum`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from peers import Calls, Peer
from stability_methods import (
    KEPT,
    MOMENTS,
    Moments,
    backward_from,
    corrected,
    masked_by_product,
    normalize,
    rounded_before_gamma,
)

from stablenorm import __version__, layer_norm_backward, layer_norm_forward
from stablenorm.cli.bench import Problem
from stablenorm.cli.parts import DTYPES
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.published import PUBLISHED
from stablenorm.types import Array, Gradients, bfloat16

N, ROWS, EPS = 768, 4, 1e-5
OURS, FLUSHING = "stablenorm", "PyTorch, set_flush_denormal"


class Input(NamedTuple):
    """The five arguments of a measurement."""

    x: Array
    gamma: Array
    beta: Array
    eps: float
    dy: Array


class Table(NamedTuple):
    """One experiment: `cell` measures a subject on the input of a column."""

    name: str
    columns: dict[str, Input]
    cell: Callable[[Peer, Input], float]
    # Names of the subjects that are measured; all that know the dtype where None.
    subjects: tuple[str, ...] | None = None
    # Rows that are no library but a simulation: a function of the input.
    simulated: dict[str, Callable[[Input], float]] = {}  # noqa: RUF012


def make_input(
    x: Any, dtype: Any = np.float32, eps: float = EPS, gamma: float = 1.0, dy: Any = None
) -> Input:
    """Round to `dtype`; dy is N(0, 1) if not given."""
    x = np.asarray(x).astype(dtype)
    n = x.shape[1]
    drawn = np.random.default_rng(1).standard_normal(x.shape) if dy is None else dy
    dy = np.broadcast_to(np.asarray(drawn).astype(dtype), x.shape).copy()
    return Input(x, np.full(n, gamma).astype(dtype), np.zeros(n, dtype), eps, dy)


def normal(rows: int = ROWS, n: int = N) -> Array:
    """Return the same N(0, 1) every time."""
    return np.random.default_rng(0).standard_normal((rows, n))


def run(subject: Peer, at: Input) -> dict[str, Array]:
    """Return the subject's outputs, in float64."""
    x, gamma, beta, eps, dy = at
    nowhere = Gradients(None, None, None)
    with np.errstate(all="ignore"):
        calls = subject.make(Problem(x, gamma, beta, dy, x, nowhere), eps)
        results = calls.results()
    return {name: np.asarray(array).astype(np.float64) for name, array in results.items()}


def load_ours(backend: str | None = None) -> Peer:
    """Return the package, by one of its backends."""

    def make(problem: Problem, eps: float) -> Calls:
        def results() -> dict[str, Array]:
            y, cache = layer_norm_forward(*problem[:3], eps, backend=backend)
            return {"y": y, **layer_norm_backward(problem.dy, cache)._asdict()}

        return Calls(results, None, results)

    return Peer(OURS, __version__, DTYPES, make)


def flushing(pytorch: Peer) -> Peer:
    """Return PyTorch on a processor that is set to flush subnormals."""
    torch: Any = importlib.import_module("torch")

    def make(problem: Problem, eps: float) -> Calls:
        calls = pytorch.make(problem, eps)

        def results() -> dict[str, Array]:
            if not torch.set_flush_denormal(True):
                msg = "this processor cannot flush subnormals"
                raise RuntimeError(msg)
            try:
                return calls.results()
            finally:
                torch.set_flush_denormal(False)

        return Calls(results, None, results)

    return pytorch._replace(name=FLUSHING, make=make)


@lru_cache(maxsize=64)
def _exact(key: tuple[bytes, ...], shape: tuple[int, ...], dtype: str, eps: float) -> Any:
    kind = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    x, gamma, beta, dy = (np.frombuffer(part, kind) for part in key)
    return exact_layer_norm(x.reshape(shape), gamma, beta, eps, dy.reshape(shape))


def exactly(at: Input) -> Any:
    """Return the oracle for an input."""
    key = tuple(part.tobytes() for part in (at.x, at.gamma, at.beta, at.dy))
    return _exact(key, at.x.shape, at.x.dtype.name, at.eps)


def error_of(name: str, actual: Array, at: Input) -> float:
    """Return max|error| over max|exact|; 1 is nothing left."""
    expected = exactly(at).rounded(name, np.float64)
    worst = float(np.abs(actual - expected).max())
    size = float(np.abs(expected).max())
    # Where the exact result is 0 there is nothing to be relative to.
    return worst if size == 0 or math.isnan(worst) else worst / size


def of_y(subject: Peer, at: Input) -> float:
    """Relative error of y."""
    return error_of("y", run(subject, at)["y"], at)


def of_dx(subject: Peer, at: Input) -> float:
    """Relative error of dx."""
    return error_of("dx", run(subject, at)["dx"], at)


def to_g(dx: Array, at: Input) -> float:
    """Return max|error of dx| / (rstd max|g|), worst of the rows."""
    exact, actual = exactly(at), dx.astype(at.x.dtype)
    off = np.abs(actual.astype(np.float64) - exact.rounded("dx", np.float64))
    if not np.isfinite(off).all():
        return math.inf
    worst = 0.0
    for row, column in enumerate(np.argmax(off, axis=1).tolist()):
        error = abs(Fraction(float(actual[row, column])) - exact.value("dx", (row, column)))
        rstd = 1 / math.sqrt(exact.var(row) + Fraction(at.eps))
        g = at.gamma.astype(np.float64) * at.dy[row].astype(np.float64)
        worst = max(worst, float(error) / (rstd * float(np.abs(g).max())))
    return worst


def of_dx_to_g(subject: Peer, at: Input) -> float:
    """The same of a subject."""
    return to_g(run(subject, at)["dx"], at)


def _with_parameters(at: Input) -> Input:
    """Give gamma and beta the values of an ordinary layer."""
    gamma, beta = np.random.default_rng(4).standard_normal((2, at.x.shape[1])) * 0.1
    return at._replace(gamma=(1 + gamma).astype(at.x.dtype), beta=beta.astype(at.x.dtype))


def _share_misrounded(y: Array, at: Input) -> float:
    expected = exactly(at).rounded("y", at.x.dtype)
    return float(np.mean(y.astype(np.float64) != expected.astype(np.float64)))


def rounded_twice(at: Input) -> float:
    """The share of elements that a rounding of xhat, before gamma and beta, puts wrong."""
    return _share_misrounded(rounded_before_gamma(*at[:4]), at)


def _by_moments() -> dict[str, Callable[[Input], float]]:
    ways: dict[str, Callable[[Input], float]] = {
        f"{name}, simulated": partial(_of_moments, moments)
        for name, moments in MOMENTS.items()
        if name != "two passes"
    }
    ways["two passes corrected, simulated"] = lambda at: error_of(
        "y", corrected(at.x, at.eps).astype(np.float64), at
    )
    return ways


def _of_moments(moments: Moments, at: Input) -> float:
    return error_of("y", normalize(at.x, moments, at.eps).astype(np.float64), at)


def misrounded(subject: Peer, at: Input) -> float:
    """Return the share of the elements of y that are not the correctly rounded ones."""
    return _share_misrounded(run(subject, at)["y"], at)


def ulp_at_outlier(subject: Peer, at: Input) -> float:
    """Return the error of dx at element 5, in ulp of its exact value."""
    dx = run(subject, at)["dx"].astype(at.x.dtype)
    return float(np.max(exactly(at).ulp_errors(dx=dx)["dx"][:, 5]))


def of_dbeta(subject: Peer, at: Input) -> float:
    """Return max|error of dbeta| / sum|dy|, the exact sums by fsum."""
    actual = run(subject, at)["dbeta"]
    columns = at.dy.astype(np.float64).T.tolist()
    return max(
        abs(a - math.fsum(c)) / math.fsum(map(abs, c)) for a, c in zip(actual, columns, strict=True)
    )


def rows_touched(subject: Peer, at: Input) -> float:
    """Count the rows of y and dx with anything that is not finite in them."""
    results = run(subject, at)
    bad = ~np.isfinite(results["y"]).all(axis=1)
    if "dx" in results:
        bad |= ~np.isfinite(results["dx"]).all(axis=1)
    return float(bad.sum())


def padded_rows_touched(at: Input) -> float:
    """The same where padding that holds infinity is multiplied by zero."""
    x = np.full((len(at.x), 1024), np.inf, at.x.dtype)
    x[:, :N] = at.x
    return float((~np.isfinite(masked_by_product(x, N, at.eps))).any(axis=1).sum())


def _offsets(powers: Sequence[int]) -> dict[str, Input]:
    columns = {"N": make_input(normal())}
    return columns | {f"10^{p} + N": make_input(10.0**p + normal()) for p in powers}


def _poisoned() -> dict[str, Input]:
    columns = {}
    for words, value in (("all finite", 0.0), ("one NaN", np.nan), ("one Inf", np.inf)):
        x = normal(8)
        x[3, 5] += value
        columns[words] = make_input(x)
    return columns


def _outliers() -> dict[str, Input]:
    columns = {}
    for power in (10, 24, 66):
        x = normal()
        x[:, 5] = 2.0**power
        columns[f"2^{power}"] = make_input(x)
    return columns


def _with_mean(way: str) -> Callable[[Input], float]:
    def measure(at: Input) -> float:
        g = (at.gamma * at.dy).astype(at.x.dtype)
        return to_g(backward_from(KEPT[way], at.x, g, at.eps), at)

    return measure


def tables() -> list[Table]:
    """Return all experiments, in the order of the page."""
    offsets = _offsets((2, 4, 6))
    back = ("plain NumPy", "PyTorch", "JAX, the formula", OURS)
    rows = {
        f"{words} rows": make_input(
            normal(count, 8), dy=np.random.default_rng(2).random((count, 8))
        )
        for words, count in (("100", 100), ("10 000", 10_000), ("1 000 000", 1_000_000))
    }
    scales = {
        "1e-40, eps 0": make_input(1e-40 * normal(), eps=0.0),
        "1e-25, eps 0": make_input(1e-25 * normal(), eps=0.0),
        "1e15": make_input(1e15 * normal()),
        "1e20": make_input(1e20 * normal()),
        "3e38": make_input(3e38 * np.sign(normal())),
    }
    constants = {
        f"{value}, eps {words}": make_input(np.full((1, N), value), eps=eps)
        for words, eps in (("1e-5", 1e-5), ("1e-12", 1e-12))
        for value in (0.1, 1234.567)
    }
    noise = np.random.default_rng(3).standard_normal((ROWS, N))
    cotangents = {
        "dy = N": make_input(normal(), dy=noise),
        "1 + N / 1000": make_input(normal(), dy=1 + 1e-3 * noise),
        "dy = x": make_input(normal(), dy=normal()),
        "x and dy 1000 + N": make_input(1000 + normal(), dy=1000 + noise),
    }
    narrow = {
        f"{np.dtype(kind).name}, {words}": _with_parameters(make_input(offset + normal(), kind))
        for kind in (np.float16, bfloat16)
        for words, offset in (("N", 0), ("100 + N", 100))
    }
    tiny = {
        "x of 1e-40, eps 0": make_input(1e-40 * normal(), eps=0.0),
        "gamma of 1e-40": make_input(normal(), gamma=1e-40),
    }
    return [
        Table("offset", offsets, of_y, None, _by_moments()),
        Table(
            "saved", offsets, of_dx_to_g, back,
            {f"exact, but the mean kept in {way}": _with_mean(way) for way in KEPT},
        ),
        Table("range", scales, of_y),
        Table("constant", constants, of_y),
        Table("outlier", _outliers(), ulp_at_outlier, back),
        Table("outlier_size", _outliers(), of_dx_to_g, back),
        Table("cotangent", cotangents, of_dx, (*back, "jax.nn.standardize")),
        Table("rows", rows, of_dbeta, (*back, "jax.nn.standardize")),
        Table(
            "narrow", narrow, misrounded, back,
            {"xhat rounded before gamma, simulated": rounded_twice},
        ),
        Table("subnormal", tiny, of_y),
        Table(
            "contained", _poisoned(), rows_touched, None,
            {"padding times zero, simulated": padded_rows_touched},
        ),
        Table("published", _published(), of_y),
    ]  # fmt: skip


def _published() -> dict[str, Input]:
    """Return rows that went wrong in public, where float32 can hold them."""
    columns = {}
    for case in PUBLISHED:
        if case.fits(np.float32) and case.gamma == 1:
            x, gamma, beta, eps = case.arguments(np.float32)
            columns[f"{case.source}: {case.title}"] = Input(x, gamma, beta, eps, np.ones_like(x))
    return columns
