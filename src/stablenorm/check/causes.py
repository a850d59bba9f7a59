"""
Name the mistake in a wrong gradient: by trying the usual ones, and by regression.

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
from stablenorm.types import Array, bfloat16

# Isolated elements that are told one by one; more of them are a pattern of their own.
_ELEMENTS = 2
# Rows on which a candidate is tried before all: enough for the one wrong row not to decide.
_FEW = 4
_SINGLE = 2.0**-24
# Below it, three coefficients have nothing left to be contradicted by.
_SMALLEST_N = 5


class Cause(NamedTuple):
    """One mistake: a sentence with {} in place of the outputs that have it."""

    words: str
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        """Give the sentence."""
        return self.words.replace("{}", " and ".join(self.outputs))


Causes = tuple[Cause, ...]


class Facts(NamedTuple):
    """The statistics that a change is computed from; var, rstd and mean are (rows, 1)."""

    var: Array
    eps: float
    n: int
    rstd: Array
    mean: Array


class Change(NamedTuple):
    """
    One departure from the formula: of which kind, in words, and what stands in the place.

    By kind, `make` gives rstd, the mean of x, a further factor of dx, or the number of times that
    the term is subtracted, from `Facts` or as it is; for gamma, it names the place.
    """

    kind: str
    words: str
    make: Any

    def value(self, facts: Facts) -> Any:
        """Return what it puts in the place."""
        return self.make(facts) if callable(self.make) else self.make


_NARROW = (("float32", np.float32), ("bfloat16", bfloat16), ("float16", np.float16))


def _narrow(field: str, dtype: Any) -> Callable[[Facts], Array]:
    def make(facts: Facts) -> Array:
        rounded: Array = getattr(facts, field).astype(dtype).astype(np.float64)
        return rounded

    return make


def _statistics() -> list[Change]:
    biased = "the variance is divided by n - 1 in {}"
    rstd = [
        (biased, lambda f: (f.var * f.n / (f.n - 1) + f.eps) ** -0.5),
        (biased, lambda f: ((f.var + f.eps) * f.n / (f.n - 1)) ** -0.5),
        ("eps is missing from rstd in {}", lambda f: f.var**-0.5),
        ("rstd is 1 / (sqrt(var) + eps) in {}", lambda f: 1 / (f.var**0.5 + f.eps)),
        ("eps was applied twice in {}", lambda f: (f.var + 2 * f.eps) ** -0.5),
        ("eps is squared in rstd in {}", lambda f: (f.var + f.eps * f.eps) ** -0.5),
        ("rstd is squared in {}", lambda f: f.rstd * f.rstd),
        ("rstd is the standard deviation itself in {}", lambda f: 1 / f.rstd),
    ]
    found = [Change("rstd", words, make) for words, make in rstd]
    for name, dtype in _NARROW:
        found.append(Change("rstd", f"rstd is kept in {name} in {{}}", _narrow("rstd", dtype)))
        found.append(Change("mean", f"the mean is kept in {name} in {{}}", _narrow("mean", dtype)))
    return [*found, Change("mean", "the mean of x is missing from xhat in {}", 0.0)]


def _terms() -> list[Change]:
    found = []
    for place, what in enumerate(("the mean of g", "the xhat term")):
        times = [
            ("is missing from {}", 0.0),
            ("is subtracted twice in {}", 2.0),
            ("is added, not subtracted in {}", -1.0),
            ("is divided by n - 1 in {}", lambda f: f.n / (f.n - 1)),
            ("is not divided by n in {}", lambda f: f.n),
        ]
        found += [Change(f"term {place}", f"{what} {words}", make) for words, make in times]
    return found


STATISTICS: tuple[Change, ...] = tuple(_statistics())
CHANGES: tuple[Change, ...] = (
    *STATISTICS,
    *_terms(),
    Change("factor", "rstd is missing from {}", lambda f: 1 / f.rstd),
    Change("factor", "rstd is applied twice in {}", lambda f: f.rstd),
    Change("factor", "{} has the wrong sign", -1.0),
    Change("factor", "{} is divided by n", lambda f: 1 / f.n),
    Change("factor", "{} is multiplied by n", lambda f: f.n),
    Change("gamma", "gamma is applied twice in {}", "twice"),
    Change("gamma", "gamma is not applied in {}", "never"),
    Change("gamma", "gamma is applied after the projection in {}", "after"),
)


class _Ingredients(NamedTuple):
    """The ingredients of dx, in float64; a change replaces some of them."""

    g: Array
    xhat: Array
    # dx times s, before and after gamma: 1 if rstd and the place of gamma are right.
    factor: Array
    after: Array
    times: tuple[float, float]


class Evidence:
    """One case with what the program returned; the right dx where only dgamma is looked at."""

    def __init__(self, case: Case, u: float):
        self.case, self.expected, self.u = case, Expected(case, u), u
        self.n = case.n
        # The axes before those that are normalized, to tell places by the caller's indices.
        self.lead = (*case.x.shape[: case.x.ndim - len(case.row_shape)], case.n)
        stats = self.expected.stats
        self.centered = stats.xhat * stats.s
        var = row_mean(np.square(self.centered))
        self.facts = Facts(var, case.eps, case.n, 1 / stats.s, stats.mean)

    def few_rows(self) -> Evidence:
        """Return the evidence of the first rows alone."""
        x, dy = (a.reshape(-1, *self.case.row_shape)[:_FEW] for a in (self.case.x, self.case.dy))
        return Evidence(self.case._replace(x=x, dy=dy), self.u)

    def ingredients(self, changes: tuple[Change, ...]) -> _Ingredients:
        """Build what dx is made of, with the changes."""
        with np.errstate(all="ignore"):
            made = {change.kind: change.value(self.facts) for change in changes}
            return self._ingredients(made)

    def _ingredients(self, made: dict[str, Any]) -> _Ingredients:
        dy, gamma = self.expected.dy, self.expected.gamma
        rstd = made.get("rstd", self.facts.rstd)
        # By the difference of the means: rounding it once more would hide the change.
        mean = self.facts.mean
        centered = self.centered + (mean - made.get("mean", mean))
        factor = rstd / self.facts.rstd * made.get("factor", 1.0)
        place = made.get("gamma", "once")
        g = dy * {"once": gamma, "twice": gamma * gamma}.get(place, np.ones_like(gamma))
        after = gamma if place == "after" else np.ones_like(gamma)
        times = (float(made.get("term 0", 1.0)), float(made.get("term 1", 1.0)))
        return _Ingredients(g, centered * rstd, factor, after, times)

    def dx(self, changes: tuple[Change, ...]) -> tuple[Array, Array]:
        """Return the dx that has these mistakes, and its bound."""
        made = self.ingredients(changes)
        with np.errstate(all="ignore"):
            first, second, third = dx_terms(made.g, made.xhat)
            bound = self.expected.dx_from(made.g, made.xhat)[1]
            # Divided by s at the end, so that nothing overflows on the way.
            scale = made.factor * made.after / self.expected.stats.s
            largest = max(1.0, *(abs(c) for c in made.times))
            value = first - made.times[0] * second - made.times[1] * third
            return scale * value, np.abs(scale) * bound * largest


def diagnose(case: Case, judged: dict[str, Judged]) -> tuple[str, ...]:
    """Name what is wrong with the outputs that are; nothing where that is not sure."""
    found: dict[str, tuple[str, ...]] = {}
    for name, each in judged.items():
        evidence = Evidence(case, each.u)
        if name == "dx":
            causes = diagnose_dx(evidence, each.actual)
        else:
            causes = diagnose_parameter(evidence, name, each.actual)
        for words, outputs in causes:
            # What can be said of several outputs is said once: "... in dx and dgamma".
            key = words if words.endswith(" in {}") else str(Cause(words, outputs))
            found[key] = (*found.get(key, ()), *outputs)
    return tuple(str(Cause(*item)) for item in found.items())


def diagnose_y(case: Case, judged: Judged) -> tuple[str, ...]:
    """Name what is wrong with y, where it is the statistics."""
    evidence = Evidence(case, judged.u)
    names: list[Causes] = []
    for change in STATISTICS:
        made = evidence.ingredients((change,))
        with np.errstate(all="ignore"):
            value = evidence.expected.gamma * made.xhat + evidence.expected.beta
            stretch = float(np.max(np.abs(made.factor), initial=1.0))
            wrong = excess(judged.actual, value, 2 * stretch * judged.bounds.plain) > 1
        if not wrong.any():
            names.append((Cause(change.words, ("the forward",)),))
    return tuple(str(cause) for cause in _only(names))


def diagnose_dx(evidence: Evidence, actual: Array) -> Causes:
    """Name what is wrong with dx, (rows, n) in float64; nothing if that is not sure."""
    # With one element to a row, dx is 0, whatever the formula.
    if not np.isfinite(actual).all() or evidence.n < 2:
        return ()
    explained = _explanations(evidence, actual, [()])
    if not explained:
        explained = _explanations(evidence, actual, [(change,) for change in CHANGES])
    if not explained or min(explained.values()) > 1:
        pairs = [pair for pair in combinations(CHANGES, 2) if pair[0].kind != pair[1].kind]
        explained |= _explanations(evidence, actual, pairs)
    if not explained:
        return _regression(evidence, actual) or _digits(evidence, actual)
    # The simplest; two explanations that are as simple are none.
    simplest = min(explained.values())
    return _only([causes for causes, count in explained.items() if count == simplest])


def _explanations(
    evidence: Evidence, actual: Array, candidates: Sequence[tuple[Change, ...]]
) -> dict[Causes, int]:
    """Return, in words, the candidates that explain dx, and of how many causes each consists."""
    explained = {}
    few = evidence.few_rows()
    for chosen in candidates:
        # Most candidates are out after a few rows: half of their elements must be right.
        value, bound = few.dx(chosen)
        if np.mean(excess(actual[: len(value)], value, 2 * bound) > 1) > 0.5 and len(actual) > 1:
            continue
        faults = _unexplained(actual, *evidence.dx(chosen), evidence.lead)
        if faults is not None:
            causes = (*(Cause(change.words, ("dx",)) for change in chosen), *faults)
            explained[causes] = len(causes)
    return explained


def _only(explanations: list[Causes]) -> Causes:
    """Return the one explanation there is; two that are as simple are none."""
    different = list(dict.fromkeys(explanations))
    return different[0] if len(different) == 1 else ()


def _unexplained(actual: Array, value: Array, bound: Array, lead: tuple[int, ...]) -> Causes | None:
    """Name the few rows and elements that `value` does not explain; None if there are many."""
    # Twice: the bound is the program's own rounding, and the checker has some as well.
    wrong = excess(actual, value, 2 * bound) > 1
    if not wrong.any():
        return ()
    # Evidence for the formula are the other rows and elements: most of them.
    rows, each = np.flatnonzero(wrong.any(axis=1)), wrong.sum(axis=1)
    if wrong.sum() <= _ELEMENTS and wrong.size >= 8 * _ELEMENTS:
        return tuple(
            _element("dx", np.unravel_index(place, lead), actual.flat[place], value.flat[place])
            for place in np.flatnonzero(wrong)
        )
    if len(rows) == 1 and len(wrong) >= 3 and each[rows[0]] > wrong.shape[1] / 2:
        return (_line("row", int(rows[0]), actual, value),)
    columns = np.flatnonzero(wrong.any(axis=0))
    if len(columns) == 1 and wrong.shape[1] >= 8 and wrong.sum() > len(wrong) / 2:
        return (_line("column", int(columns[0]), actual.T, value.T),)
    return None


def _element(name: str, place: Sequence[Any], actual: float, value: float) -> Cause:
    factor = actual / value if value else np.inf
    how = "wrong"
    if actual == 0:
        how = "zero"
    # A factor with few digits was meant as such.
    elif np.isfinite(factor) and abs(factor - float(f"{factor:.4g}")) < 1e-8 * abs(factor):
        how = f"off by a factor of {factor:.4g}"
    about = f"element {tuple(int(i) for i in place)} of {{}}"
    sign = abs(factor + 1) < 1e-6
    return Cause(f"{about} has the wrong sign" if sign else f"{about} is {how}", (name,))


def _line(kind: str, place: int, actual: Array, value: Array) -> Cause:
    """Name the one row (or column, of transposed arrays) that is wrong, and how."""
    which = f"the last {kind}" if place == len(actual) - 1 else f"{kind} {place}"
    line, right = actual[place], value[place]
    factor = float(line @ right) / float(right @ right) if right.any() else 0.0
    how = "wrong, the others are not"
    if not line.any():
        how = "zero"
    elif np.allclose(line, factor * right, rtol=0, atol=1e-6 * float(np.abs(right).max())):
        how = f"off by a factor of {factor:.4g}"
    return Cause(f"{which} of {{}} is {how}", ("dx",))


def _regression(evidence: Evidence, actual: Array) -> Causes:
    """Fit the coefficients of the three terms; they are named if they are the same in all rows."""
    if evidence.n < _SMALLEST_N or len(actual) < 2:
        return ()
    stats = evidence.expected.stats
    terms = dx_terms(evidence.expected.g, stats.xhat)
    bound = evidence.expected.dx_from(evidence.expected.g, stats.xhat)[1]
    left, right = np.stack([term.ravel() for term in terms], axis=1), (actual * stats.s).ravel()
    # Weighted: every element counts in units of its own rounding.
    weight = 1 / np.maximum(bound.ravel(), 1e-300)
    with np.errstate(all="ignore"):
        solved = np.linalg.lstsq(left * weight[:, None], right * weight, rcond=None)
    coefficients = solved[0]
    misfit = np.abs(left @ coefficients - right) * weight
    if solved[2] < 3 or np.any(misfit > 4 * (1 + np.abs(coefficients).max())):
        return ()
    return _named(coefficients)


def _digits(evidence: Evidence, actual: Array) -> Causes:
    """Say how accurate dx is where it is wrong all over, but no more than single precision is."""
    bounds = evidence.expected.bounds_of("dx", np.float64)
    wrong = (excess(actual, bounds.value, 2 * bounds.plain) > 1).any(axis=1)
    relative = float(np.max(np.abs(actual - bounds.value) / np.maximum(bounds.magnitude, 1e-300)))
    # Four roundings: of what dx is made of, and of its three terms.
    if not 0 < relative <= 4 * _SINGLE or evidence.u >= _SINGLE or np.mean(wrong) < 0.5:
        return ()
    digits = int(-np.log10(relative))
    words = f"{{}} is right to {digits} digits, as if something were kept in float32"
    return (Cause(words, ("dx",)),)


def _named(coefficients: Array) -> Causes:
    """Say which coefficients are not (1, -1, -1)."""
    a, b, c = (float(each) for each in coefficients)
    if abs(a) <= 1e-6:
        return (Cause("g itself is missing from {}", ("dx",)),)
    named = []
    for what, ratio in (("the mean of g", -b / a), ("the xhat term", -c / a)):
        if abs(ratio) < 1e-9:
            named.append(f"{what} is missing from {{}}")
        elif abs(ratio - 1) > 1e-5:
            named.append(f"{what} enters {{}} {ratio:.6g} times, not once")
    if abs(a - 1) > 1e-5:
        named.append(f"{{}} is off by a factor of {a:.6g}")
    return tuple(Cause(words, ("dx",)) for words in named)


# ---- dgamma and dbeta ----


def diagnose_parameter(evidence: Evidence, name: str, actual: Array) -> Causes:
    """Name what is wrong with dgamma or dbeta, (n,) in float64; nothing if that is not sure."""
    if not np.isfinite(actual).all():
        return ()
    found: list[Causes] = []
    for words, value, slack in _parameter_guesses(evidence, name):
        with np.errstate(all="ignore"):
            if not (excess(actual, value, 2 * slack) > 1).any():
                found.append((Cause(words, (name,)),))
    if found:
        return _only(found)
    value, bound = evidence.expected.bounds_of(name, np.float64)[:2]
    wrong = np.flatnonzero(excess(actual, value, 2 * bound) > 1)
    if len(wrong) == 1 and len(actual) >= 4:
        return (_element(name, list(wrong), actual[wrong[0]], value[wrong[0]]),)
    # Fewer columns than that can be on a line by chance.
    if len(actual) < _SMALLEST_N or not value.any():
        return ()
    factor = float(actual @ value) / float(value @ value)
    if (excess(actual, factor * value, 4 * max(1.0, abs(factor)) * bound) > 1).any():
        return ()
    return (Cause(f"{{}} is off by a factor of {factor:.10g}", (name,)),)


def _parameter_guesses(evidence: Evidence, name: str) -> Iterator[tuple[str, Array, Array]]:
    """Yield a sentence, the gradient it would make, and how exactly."""
    expected = evidence.expected
    dy, stats, rows = expected.dy, expected.stats, len(expected.dy)
    terms = {"dgamma": dy * stats.xhat, "dbeta": dy}
    own = terms[name]
    slack = expected.bounds_of(name, np.float64).plain
    total = own.sum(axis=0)
    yield "{} is zero", 0 * total, 0 * total
    yield "{} has the wrong sign", -total, slack
    if rows > 1:
        yield "{} is averaged over the rows, not summed", total / rows, slack
    yield "{} contains gamma", expected.gamma * total, np.abs(expected.gamma) * slack
    yield "{} is divided by n", total / evidence.n, slack
    other = "dbeta" if name == "dgamma" else "dgamma"
    swapped = expected.bounds_of(other, np.float64)
    yield "dgamma and dbeta are swapped", swapped.value, swapped.plain
    if name == "dgamma":
        yield from _dgamma_guesses(evidence, slack)
    if rows >= 2:
        yield from _row_guesses(own, slack)


def _dgamma_guesses(evidence: Evidence, slack: Array) -> Iterator[tuple[str, Array, Array]]:
    expected = evidence.expected
    dy, stats = expected.dy, expected.stats
    x, largest = expected.case.rows(expected.case.x), float(np.max(stats.s))

    def of(a: Array) -> Array:
        summed: Array = np.sum(dy * a, axis=0)
        return summed

    yield "{} lacks rstd", of(evidence.centered), slack * largest
    yield "{} is made of x, not of xhat", of(x), slack * float(np.max(np.abs(x)) + largest)
    y = expected.gamma * stats.xhat + expected.beta
    yield "{} is made of y, not of xhat", of(y), slack * float(1 + np.max(np.abs(y)))
    yield "{} has rstd twice", of(stats.xhat / stats.s), slack / float(np.min(stats.s))
    for change in STATISTICS:
        made = evidence.ingredients((change,))
        stretch = float(np.max(np.abs(made.factor), initial=1.0))
        with np.errstate(all="ignore"):
            yield change.words, of(made.xhat), slack * stretch


def _row_guesses(own: Array, slack: Array) -> Iterator[tuple[str, Array, Array]]:
    total, last = own.sum(axis=0), len(own) - 1
    for row, terms in enumerate(own):
        which = "the last row" if row == last else f"row {row}"
        yield f"{which} is not accumulated in {{}}", total - terms, slack
        yield f"{which} is accumulated twice in {{}}", total + terms, slack
    if len(own) > 2:
        yield "{} is that of the first row alone", own[0], slack
        yield "{} is that of the last row alone", own[-1], slack
