r"""
The structural identities of layer normalization that need several calls: at rounding level.

- Folded with gamma, the Jacobian is symmetric: <dx(u), g(w)> = <g(u), dx(w)> in every row.
- dy = 1 / gamma gives dx = 0: the sum of xhat over a row does not depend on x.
- x + c has the same y and gradients; 2^k x with 4^k eps has the same y, and 2^-k dx.
- Columns in another order give results in that order.
- <J v, dy> = <v, dx> with a jvp that is this checker's own.
- y is linear in gamma and beta, so the forward itself tells dgamma and dbeta without any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from stablenorm._types import Array
from stablenorm.check._cases import normal_like
from stablenorm.check._expected import Case, Expected, jvp
from stablenorm.check._program import Judged, Outcome, Program
from stablenorm.check._report import Finding

LAYER = "identities"
# Tangents of the dot test: signed, all elements at once, so that one suffices to see any element;
# two more for errors that a sign pattern happens to cancel.
_TANGENTS = 3
# Few enough bits to be added to the shift exactly in all four dtypes.
_QUANTUM, _SHIFT, _POWER = 2.0**-3, 4.0, 2


class Equation(NamedTuple):
    """A residual that should vanish, and what plain and careless arithmetic leave of it."""

    name: str
    residual: Array
    plain: Array
    careless: Array
    # What an error is relative to.
    size: float

    def finding(self) -> Finding:
        """Say whether it holds."""
        error = np.where(np.isfinite(self.residual), np.abs(self.residual), np.inf)
        resolution = float(np.max(self.plain, initial=0.0)) / self.size
        if not np.isfinite(resolution):
            message = "too few digits are left to judge it"
            return Finding(LAYER, self.name, "INCONCLUSIVE", message, resolution)
        if np.all(error <= self.plain):
            return Finding(LAYER, self.name, "PASS", "", resolution)
        worst = int(np.argmax(error / np.where(self.plain > 0, self.plain, 1e-300)))
        message = f"off by {error.flat[worst]:.2e}, rounding explains {self.plain.flat[worst]:.2e}"
        if np.all(error <= self.careless):
            message = f"inaccurate here: {message}, a one-pass variance as much again"
            return Finding(LAYER, self.name, "NOTE", message, resolution)
        return Finding(LAYER, self.name, "FAIL", message, resolution)


def check_structure(
    program: Program, base: Case, rng: np.random.Generator, *, takes_eps: bool
) -> list[Finding]:
    """Evaluate the identities around the case `base`."""
    equations: list[Equation] = []
    first = _run(program, base)
    if first is None:
        return []
    if "dx" in first:
        equations += _symmetry(program, base, first["dx"], rng)
        equations += _vanishing(program, base)
        equations += [_dot_test(base, first["dx"], rng)]
    equations += _shifted(program, base, rng, takes_eps=takes_eps)
    equations += _permuted(program, base, first, rng)
    equations += _linear(program, base)
    return [equation.finding() for equation in equations]


def _run(program: Program, case: Case) -> dict[str, Judged] | None:
    outcome = program.run(case)
    return None if outcome.error else program.judge(case, outcome)


def _symmetry(
    program: Program, base: Case, first: Judged, rng: np.random.Generator
) -> list[Equation]:
    case = base._replace(dy=normal_like(base, rng))
    found = _run(program, case)
    if found is None or "dx" not in found:
        return []
    second, gamma = found["dx"], base.vector(base.gamma, 1.0)
    g, other = gamma * base.rows(base.dy), gamma * base.rows(case.dy)

    def products(a: Array, b: Array) -> Array:
        summed: Array = np.sum(a * other, axis=-1) + np.sum(b * g, axis=-1)
        return summed

    def bound(a: Array, b: Array) -> Array:
        summed: Array = np.sum(a * np.abs(other) + b * np.abs(g), axis=-1)
        return summed

    return [
        Equation(
            "dx: the Jacobian, gamma folded in, is symmetric",
            products(first.actual, -second.actual),
            bound(first.bounds.plain, second.bounds.plain),
            bound(first.bounds.careless, second.bounds.careless),
            float(np.max(bound(first.bounds.magnitude, second.bounds.magnitude))) or 1.0,
        )
    ]


def _vanishing(program: Program, base: Case) -> list[Equation]:
    ones = np.ones(base.dy.shape)
    dy = ones if base.gamma is None else ones / base.gamma.astype(np.float64)
    found = _run(program, base._replace(dy=dy.astype(base.dy.dtype)))
    if found is None or "dx" not in found:
        return []
    dx = found["dx"]
    # Not 0 exactly, since 1 / gamma is rounded: what is left of it is known.
    residual = dx.actual - dx.bounds.value
    name = "dx: dy = 1 / gamma gives 0"
    return [Equation(name, residual, dx.bounds.plain, dx.bounds.careless, dx.size)]


def _dot_test(base: Case, dx: Judged, rng: np.random.Generator) -> Equation:
    stats, dy = Expected(base, dx.u).stats, base.rows(base.dy)
    residuals, plain, careless, sizes = [], [], [], []
    for _ in range(_TANGENTS):
        v = rng.choice([-1.0, 1.0], dy.shape) * stats.s
        pushed = jvp(base, stats, v)
        residuals.append(np.sum(pushed * dy, axis=-1) - np.sum(v * dx.actual, axis=-1))
        plain.append(np.sum(np.abs(v) * dx.bounds.plain, axis=-1))
        careless.append(np.sum(np.abs(v) * dx.bounds.careless, axis=-1))
        sizes.append(np.sum(np.abs(v) * dx.bounds.magnitude, axis=-1))
    return Equation(
        "dx: <J v, dy> = <v, dx>, with a jvp of this checker's own",
        np.array(residuals),
        np.array(plain),
        np.array(careless),
        float(np.max(sizes)) or 1.0,
    )


def _between(
    label: str,
    first: dict[str, Judged],
    second: dict[str, Judged],
    restore: Callable[[str, Array], Array],
) -> list[Equation]:
    """Compare two runs, the second put back by `restore`, output by output."""
    return [
        Equation(
            f"{name}: {label}",
            judged.actual - restore(name, second[name].actual),
            judged.bounds.plain + np.abs(restore(name, second[name].bounds.plain)),
            judged.bounds.careless + np.abs(restore(name, second[name].bounds.careless)),
            judged.size,
        )
        for name, judged in first.items()
        if name in second
    ]


def _shifted(
    program: Program, base: Case, rng: np.random.Generator, *, takes_eps: bool
) -> list[Equation]:
    drawn = np.clip(rng.standard_normal(base.x.shape), -3, 3)
    x = (np.round(drawn / _QUANTUM) * _QUANTUM).astype(base.x.dtype)
    here = base._replace(x=x)
    first = _run(program, here)
    if first is None:
        return []
    equations: list[Equation] = []
    shift = x.dtype.type(_SHIFT)
    second = _run(program, here._replace(x=x + shift))
    if second is not None:
        equations += _between(f"the same for x + {_SHIFT:g}", first, second, lambda _, a: a)
    if takes_eps:
        factor = 2.0**_POWER
        scaled = here._replace(x=x * x.dtype.type(factor), eps=factor**2 * base.eps)
        third = _run(program, scaled)
        if third is not None:
            label = f"{factor:g} x with {factor**2:g} eps changes its scale alone"
            equations += _between(
                label, first, third, lambda name, a: a * factor if name == "dx" else a
            )
    return equations


def _permuted(
    program: Program, base: Case, first: dict[str, Judged], rng: np.random.Generator
) -> list[Equation]:
    order = rng.permutation(base.n)

    def moved(a: Array) -> Array:
        # A fresh array, not a view.
        return a.reshape(-1, base.n)[:, order].reshape(a.shape).copy()

    case = Case(
        moved(base.x),
        None if base.gamma is None else moved(base.gamma),
        None if base.beta is None else moved(base.beta),
        base.eps,
        moved(base.dy),
    )
    second = _run(program, case)
    if second is None:
        return []
    back = np.argsort(order)
    return _between("columns may be permuted", first, second, lambda _, a: a[..., back])


def _linear(program: Program, base: Case) -> list[Equation]:
    """Take dgamma and dbeta from the forward: with y linear in them, any step is exact."""
    equations: list[Equation] = []
    for name, parameter, other, values in (
        ("dgamma", "gamma", "beta", (0.0, 1.0, 2.0)),
        ("dbeta", "beta", "gamma", (0.0, 1.0)),
    ):
        if getattr(base, parameter) is None:
            continue
        runs = []
        for value in values:
            changed = {parameter: np.full_like(getattr(base, parameter), value)}
            if getattr(base, other) is not None:
                changed[other] = np.zeros_like(getattr(base, other))
            case = base._replace(**changed)
            runs.append(_linear_run(program, case))
        known = [run for run in runs if run is not None]
        if len(known) == len(values):
            equations += _from_forward(base, name, known, values)
    return equations


def _linear_run(program: Program, case: Case) -> tuple[Judged, Outcome, Program, Case] | None:
    outcome = program.run(case)
    if outcome.error or outcome.y is None:
        return None
    return program.judge_one(case, "y", outcome.y), outcome, program, case


def _from_forward(
    base: Case,
    name: str,
    runs: list[tuple[Judged, Outcome, Program, Case]],
    values: tuple[float, ...],
) -> list[Equation]:
    low, high = runs[0][0], runs[-1][0]
    dy, span = base.rows(base.dy), values[-1] - values[0]
    weights = np.abs(dy) / span
    numeric = np.sum(dy * (high.actual - low.actual), axis=0) / span
    equations = []
    for (_, outcome, program, case), value in zip(runs, values, strict=True):
        actual = outcome.get(name)
        if actual is None:
            return []
        judged = program.judge_one(case, name, actual)

        def total(kind: str, judged: Judged = judged) -> Array:
            own: Array = getattr(judged.bounds, kind)
            ends = getattr(low.bounds, kind) + getattr(high.bounds, kind)
            return own + np.sum(weights * ends, axis=0)

        label = f"{name}: that of the forward, with {name[1:]} = {value:g}"
        residual = judged.actual - numeric
        equations.append(Equation(label, residual, total("plain"), total("careless"), judged.size))
    return equations
