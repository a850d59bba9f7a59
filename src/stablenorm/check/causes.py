"""
Name the mistake in a wrong output: by trying the usual ones, and by regression.

A cause is named only if it explains *every* element to rounding, and nothing simpler or as simple
does. dx / rstd is made of three terms, g, mean(g) and xhat mean(g xhat), with coefficients
(1, -1, -1); the mistakes change a coefficient, the rstd or the mean that go in, or the place of
gamma. Two of them at once are tried as well, and each beside rows or elements that are wrong in
themselves. What is left are coefficients that are none of these: the regression tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.closed_form import Case, Expected, Judged, dx_terms, excess, row_mean
from stablenorm.check.compare import name_pattern
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32
from stablenorm.types import Array

# Rows on which a candidate is tried before all: enough for the one wrong row not to decide.
_FEW = 4
# Below it, three coefficients have nothing left to be contradicted by.
_SMALLEST_N = 5

# What is wrong with one output: sentences with {} in place of its name.
Causes = tuple[str, ...]
# A sentence, the output that it would make, and how exactly.
Guess = tuple[str, Array, Array]


class Change(NamedTuple):
    """
    One departure from the formula: of which kind, in words, and what stands in the place.

    By kind, `value` is the rstd, the mean of x, a further factor of dx, the number of times that
    the first or second mean is subtracted, or the powers of gamma before and after the projection.
    """

    kind: str
    words: str
    # It, or a function of `Evidence` that makes it.
    value: Any


def _rounded(field: str, dtype: Any) -> Callable[[Evidence], Array]:
    def make(e: Evidence) -> Array:
        rounded: Array = getattr(e, field).astype(dtype).astype(np.float64)
        return rounded

    return make


STATISTICS: tuple[Change, ...] = (
    *(
        Change("rstd", words + " in {}", value)
        for words, value in (
            ("the variance is divided by n - 1", lambda e: (e.var * e.per_less + e.eps) ** -0.5),
            ("the variance is divided by n - 1", lambda e: ((e.var + e.eps) * e.per_less) ** -0.5),
            ("eps is missing from rstd", lambda e: e.var**-0.5),
            ("rstd is 1 / (sqrt(var) + eps)", lambda e: 1 / (e.var**0.5 + e.eps)),
            ("eps was applied twice", lambda e: (e.var + 2 * e.eps) ** -0.5),
            ("eps is squared in rstd", lambda e: (e.var + e.eps * e.eps) ** -0.5),
            ("rstd is squared", lambda e: e.rstd * e.rstd),
            ("rstd is the standard deviation itself", lambda e: 1 / e.rstd),
        )
    ),
    *(
        Change(kind, f"{name} is kept in {narrow.dtype} in {{}}", _rounded(kind, narrow.dtype))
        for narrow in (FLOAT32, BFLOAT16, FLOAT16)
        for kind, name in (("rstd", "rstd"), ("mean", "the mean"))
    ),
    Change("mean", "the mean of x is missing from xhat in {}", 0.0),
)
CHANGES: tuple[Change, ...] = (
    *STATISTICS,
    *(
        Change(f"term {place}", f"{term} {words}", value)
        for place, term in enumerate(("the mean of g", "the xhat term"))
        for words, value in (
            ("is missing from {}", 0.0),
            ("is subtracted twice in {}", 2.0),
            ("is added, not subtracted in {}", -1.0),
            ("is divided by n - 1 in {}", lambda e: e.per_less),
            ("is not divided by n in {}", lambda e: e.n),
        )
    ),
    Change("factor", "rstd is missing from {}", lambda e: 1 / e.rstd),
    Change("factor", "rstd is applied twice in {}", lambda e: e.rstd),
    Change("factor", "{} has the wrong sign", -1.0),
    Change("factor", "{} is divided by n", lambda e: 1 / e.n),
    Change("factor", "{} is multiplied by n", lambda e: e.n),
    Change("gamma", "gamma is applied twice in {}", (2, 0)),
    Change("gamma", "gamma is not applied in {}", (0, 0)),
    Change("gamma", "gamma is applied after the projection in {}", (0, 1)),
)


class Evidence:
    """One case, and the statistics that a change is computed from; `u` is the precision judged by."""

    def __init__(self, case: Case, u: float):
        self.case, self.expected, self.u = case, Expected(case, u), u
        self.n, self.eps, stats = case.n, case.eps, self.expected.stats
        self.per_less = self.n / max(self.n - 1, 1)
        # The axes before those that are normalized, to tell places by the caller's indices.
        self.lead = (*case.x.shape[: case.x.ndim - len(case.row_shape)], case.n)
        self.centered = stats.xhat * stats.s
        self.var = row_mean(np.square(self.centered))
        self.rstd, self.mean = 1 / stats.s, stats.mean

    def few_rows(self) -> Evidence:
        """Return the evidence of the first rows alone."""
        x, dy = (a.reshape(-1, *self.case.row_shape)[:_FEW] for a in (self.case.x, self.case.dy))
        return Evidence(self.case._replace(x=x, dy=dy), self.u)

    def made(self, changes: Sequence[Change]) -> tuple[dict[str, Any], Array, Array]:
        """Return by kind what the changes put in place; then xhat, and rstd in units of the right."""
        with np.errstate(all="ignore"):
            made = {c.kind: c.value(self) if callable(c.value) else c.value for c in changes}
            rstd = made.get("rstd", self.rstd)
            # By the difference of the means: rounding it once more would hide the change.
            centered = self.centered + (self.mean - made.get("mean", self.mean))
            return made, centered * rstd, rstd / self.rstd

    def dx(self, changes: Sequence[Change]) -> tuple[Array, Array]:
        """Return the dx that has these mistakes, and its bound."""
        made, xhat, stretch = self.made(changes)
        before, after = made.get("gamma", (1, 0))
        times = tuple(float(made.get(f"term {place}", 1.0)) for place in (0, 1))
        with np.errstate(all="ignore"):
            g = self.expected.dy * self.expected.gamma**before
            first, second, third = dx_terms(g, xhat)
            bound = self.expected.dx_bound(g, xhat) * max(1.0, *map(abs, times))
            # Divided by s at the end, so that nothing overflows on the way.
            factor = stretch * made.get("factor", 1.0) * self.expected.gamma**after
            scale = factor / self.expected.stats.s
            return scale * (first - times[0] * second - times[1] * third), np.abs(scale) * bound


def diagnose(case: Case, judged: dict[str, Judged]) -> tuple[str, ...]:
    """Name what is wrong with the outputs that are; nothing where that is not sure."""
    found: dict[str, list[str]] = {}
    for name, each in judged.items():
        evidence = Evidence(case, each.u)
        if not np.isfinite(each.actual).all():
            continue
        causes = diagnose_dx(evidence, each.actual) if name == "dx" else _guessed(evidence, each)
        for words in causes:
            # What can be said of several outputs is said once: "... in dx and dgamma".
            shown = "the forward" if name == "y" else name
            key = words if words.endswith(" in {}") else words.replace("{}", shown)
            found.setdefault(key, []).append(shown)
    return tuple(words.replace("{}", " and ".join(names)) for words, names in found.items())


def _largest(stretch: Array) -> float:
    return float(np.max(np.abs(stretch), initial=1.0))


def diagnose_dx(evidence: Evidence, actual: Array) -> Causes:
    """Name what is wrong with dx, (rows, n) in float64; nothing if that is not sure."""
    # With one element to a row, dx is 0, whatever the formula.
    if evidence.n < 2:
        return ()
    explained = _explanations(evidence, actual, [()])
    if not explained:
        explained = _explanations(evidence, actual, [(change,) for change in CHANGES])
    if not explained or min(map(len, explained)) > 1:
        pairs = [pair for pair in combinations(CHANGES, 2) if pair[0].kind != pair[1].kind]
        explained += _explanations(evidence, actual, pairs)
    if not explained:
        return _regression(evidence, actual)
    simplest = min(map(len, explained))
    return _only([causes for causes in explained if len(causes) == simplest])


def _explanations(
    evidence: Evidence, actual: Array, candidates: Sequence[tuple[Change, ...]]
) -> list[Causes]:
    """Return, in words, the candidates that explain dx."""
    explained = []
    few = evidence.few_rows()
    for chosen in candidates:
        # Most candidates are out after a few rows: half of their elements must be right.
        value, bound = few.dx(chosen)
        if np.mean(excess(actual[: len(value)], value, 2 * bound) > 1) > 0.5 and len(actual) > 1:
            continue
        faults = _unexplained(actual, *evidence.dx(chosen), evidence.lead)
        if faults is not None:
            explained.append((*(change.words for change in chosen), *faults))
    return explained


def _only(explanations: list[Causes]) -> Causes:
    """Return the one explanation there is; two that are as simple are none."""
    different = list(dict.fromkeys(explanations))
    return different[0] if len(different) == 1 else ()


def _unexplained(
    actual: Array, value: Array, bound: Array, shape: tuple[int, ...]
) -> Causes | None:
    """Name the element, row or column that `value` does not explain; None if there is more."""
    # Twice: the bound is the program's own rounding, and the checker has some as well.
    wrong = excess(actual, value, 2 * bound) > 1
    if not wrong.any():
        return ()
    place = name_pattern(wrong.reshape(shape))
    # Evidence for the formula are the other rows and elements: most of them.
    most = {"element": 8, "column": 8, "row": 3, "last": 3}.get(place.split()[0], np.inf)
    if most * wrong.sum() > wrong.size:
        return None
    about = f"{'the ' * place.startswith('last')}{place} of {{}}"
    a, v = actual[wrong], value[wrong]
    if not a.any():
        return (f"{about} is zero",)
    factor = float(a @ v) / float(v @ v) if v.any() else 0.0
    # A factor with few digits was meant as such.
    meant = abs(factor - float(f"{factor:.4g}")) < 1e-8 * abs(factor)
    if not meant or not np.allclose(a, factor * v, rtol=0, atol=1e-6 * float(np.abs(v).max())):
        return (f"{about} is wrong, the rest is not",)
    how = "has the wrong sign" if abs(factor + 1) < 1e-6 else f"is off by a factor of {factor:.4g}"
    return (f"{about} {how}",)


def _regression(evidence: Evidence, actual: Array) -> Causes:
    """Fit the coefficients of the three terms; they are named if they are the same in all rows."""
    if evidence.n < _SMALLEST_N or len(actual) < 2:
        return ()
    stats, g = evidence.expected.stats, evidence.expected.g
    left = np.stack([term.ravel() for term in dx_terms(g, stats.xhat)], axis=1)
    right = (actual * stats.s).ravel()
    # Weighted: every element counts in units of its own rounding.
    weight = 1 / np.maximum(evidence.expected.dx_bound(g, stats.xhat).ravel(), 1e-300)
    with np.errstate(all="ignore"):
        solved = np.linalg.lstsq(left * weight[:, None], right * weight, rcond=None)
    misfit = np.abs(left @ solved[0] - right) * weight
    if solved[2] < 3 or np.any(misfit > 4 * (1 + np.abs(solved[0]).max())):
        return ()
    a, b, c = (float(each) for each in solved[0])
    if abs(a) <= 1e-6:
        return ("g itself is missing from {}",)
    named = []
    for what, ratio in (("the mean of g", -b / a), ("the xhat term", -c / a)):
        if abs(ratio) < 1e-9:
            named.append(f"{what} is missing from {{}}")
        elif abs(ratio - 1) > 1e-5:
            named.append(f"{what} enters {{}} {ratio:.6g} times, not once")
    if abs(a - 1) > 1e-5:
        named.append(f"{{}} is off by a factor of {a:.6g}")
    return tuple(named)


def _guessed(evidence: Evidence, judged: Judged) -> Causes:
    """Name what is wrong with y, dgamma or dbeta; nothing if that is not sure."""
    actual, (value, bound, *_) = judged.actual, judged.bounds
    found: list[Causes] = []
    with np.errstate(all="ignore"):
        guesses = _of_y if judged.name == "y" else _of_parameter
        for words, guess, slack in guesses(evidence, judged):
            if not (excess(actual, guess, 2 * slack) > 1).any():
                found.append((words,))
    if found or judged.name == "y":
        return _only(found)
    if faults := _unexplained(actual, value, bound, actual.shape):
        return faults
    # Fewer columns than that can be on a line by chance.
    if len(actual) < _SMALLEST_N or not value.any():
        return ()
    factor = float(actual @ value) / float(value @ value)
    if (excess(actual, factor * value, 4 * max(1.0, abs(factor)) * bound) > 1).any():
        return ()
    return (f"{{}} is off by a factor of {factor:.10g}",)


def _of_y(evidence: Evidence, judged: Judged) -> Iterator[Guess]:
    for change in STATISTICS:
        _, xhat, stretch = evidence.made([change])
        value = evidence.expected.gamma * xhat + evidence.expected.beta
        yield change.words, value, judged.bounds.plain * _largest(stretch)


def _of_parameter(evidence: Evidence, judged: Judged) -> Iterator[Guess]:
    expected, n, slack = evidence.expected, evidence.n, judged.bounds.plain
    dy, stats, gamma = expected.dy, expected.stats, expected.gamma
    own = dy * stats.xhat if judged.name == "dgamma" else dy
    total, rows = own.sum(axis=0), len(own)
    yield "{} is zero", 0 * total, 0 * total
    yield "{} has the wrong sign", -total, slack
    yield "{} contains gamma", gamma * total, np.abs(gamma) * slack
    yield "{} is divided by n", total / n, slack
    swapped = expected.bounds_of("dbeta" if judged.name == "dgamma" else "dgamma", dy.dtype)
    yield "dgamma and dbeta are swapped", swapped.value, swapped.plain
    if judged.name == "dgamma":
        x, y = expected.case.rows(expected.case.x), gamma * stats.xhat + expected.beta
        made_of = [
            ("{} lacks rstd", evidence.centered, stats.s),
            ("{} is made of x, not of xhat", x, np.max(np.abs(x)) + stats.s),
            ("{} is made of y, not of xhat", y, 1 + np.abs(y)),
            ("{} has rstd twice", stats.xhat / stats.s, 1 / stats.s),
        ]
        for change in STATISTICS:
            _, xhat, stretch = evidence.made([change])
            made_of.append((change.words, xhat, np.asarray(_largest(stretch))))
        for words, array, size in made_of:
            yield words, np.sum(dy * array, axis=0), slack * np.max(size)
    if rows < 2:
        return
    yield "{} is averaged over the rows, not summed", total / rows, slack
    for row, terms in enumerate(own):
        which = "the last row" if row == rows - 1 else f"row {row}"
        yield f"{which} is not accumulated in {{}}", total - terms, slack
        yield f"{which} is accumulated twice in {{}}", total + terms, slack
