"""
Read a formula back from arrays: the few terms that give a wrong y, dx, dgamma or dbeta exactly.

A term is a product of arrays, or its mean over some axes, times a power of rstd. Orthogonal least
squares, with a beam, finds the fewest terms that leave no more than noise. A formula is believed only
if it holds on a second draw of another shape, and so is the name of a factor.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.closed_form import Case, Expected, excess, statistics
from stablenorm.check.differences import name_pattern
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32
from stablenorm.records import Array


class Reading(NamedTuple):
    """A formula that was read back, the right one, the cause (empty without a name), the axes of y."""

    formula: str
    right: str
    cause: str = ""
    axes: tuple[int, ...] = ()


class Term(NamedTuple):
    """``outer * over(inner) * rstd**power``: products of arrays by name; `over` "" takes no mean."""

    outer: str
    inner: str
    over: str = ""
    power: int = 0
    # 0: rstd and xhat are those of the forward; 1: rstd, 2: xhat as well is that of a change.
    changed: int = 0


class Change(NamedTuple):
    """Other statistics of one draw: words of the cause, the formula of rstd, the arrays."""

    words: str = ""
    text: str = ""
    rstd: Any = 1.0
    # xhat, gamma or g.
    values: Mapping[str, Any] = MappingProxyType({})
    axes: tuple[int, ...] = ()
    # Tried at the end: formulas of two terms for each right one.
    is_last: bool = False


_MEANS = "mean", "mean over the rows", "mean over the first axis", "mean over everything"
# Rows that a sum over rows may consist of.
_ROWS = {"sum": slice(None), "last row": slice(-1, None), "first row": slice(1)}
# States that the search keeps, and columns that it tries from each.
_BEAM, _TRIED = 16, 12
# A formula leaves at most so many times the noise: the error of a sum of terms that cancel.
_SLACK = 2.0**9
# Values of eps that people write.
_EPS = 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2


def _right(name: str, case: Case) -> dict[Term, float]:
    """Return the terms of the right formula, and their factors."""
    if name == "y":
        scaled = Term("", "xhat" if case.gamma is None else "gamma xhat")
        return {scaled: 1.0} | ({} if case.beta is None else {Term("", "beta"): 1.0})
    if name != "dx":
        return {Term("", "dy xhat" if name == "dgamma" else "dy", "sum"): 1.0}
    terms = {Term("", "g", "", 1): 1.0, Term("", "g", "mean", 1): -1.0}
    if case.kind == "rms":
        terms.popitem()
    return terms | {Term("xhat", "g xhat", "mean", 1): -1.0}


def _terms(name: str, case: Case, *, core: bool) -> Iterator[Term]:
    """Yield the terms that `name` may be made of; `core` for fewer, the usual ones."""
    axes, powers = case.x.ndim - 1, range(4) if core else range(-2, 5)
    # Words for what is nothing else under another name.
    there = {"dy", "g", "xhat"}
    there |= {"x"} if case.kind == "layer" else set()
    there |= set() if case.beta is None else {"y"}
    if name == "y":
        posts = "gamma xhat", "xhat", "gamma", "beta", "gamma beta", "gamma gamma xhat", "beta xhat"
        there = {"xhat", *["gamma"] * (case.gamma is not None), *["beta"] * (case.beta is not None)}
        yield from (Term("", post) for post in posts if there >= {*post.split()})
    elif name != "dx":
        inner = "dy xhat", "dy", "dy x", "dy y", "g xhat", "g", "g x", "g y", "xhat", "x"
        for product, rows, power in itertools.product(inner[: 3 if core else None], _ROWS, powers):
            # Without a mean, x is xhat / rstd, and without beta, y is gamma xhat; in one row, rstd is a number.
            if {*product.split()} <= there and (rows == "sum" or power == 2 * core):
                yield Term("", product, rows, power - 2 * core)
    else:
        kinds = ("g", "dy", "gamma g") if case.gamma is not None else ("g",)
        means = _MEANS[:1] if core or not axes else _MEANS if axes > 1 else (*_MEANS[:2], _MEANS[3])
        usual = [("", ""), ("xhat", " xhat")]
        x = sorted(there & {"x", "y"})
        every = itertools.product(
            ("", *x, "xhat", "xhat xhat"), ("", " xhat", *(f" {a}" for a in x))
        )
        odd = dict.fromkeys([*usual, *every])
        for power, over in itertools.product(powers, means):
            # Rstd may stand inside a sum over rows.
            own = kinds + tuple(f"{kind} rstd" for kind in kinds) * (over != "mean")
            for outer, after in usual if core or over != "mean" else odd:
                yield from (Term(outer, kind + after, over, power) for kind in own)
                # A mean over the rows keeps columns apart: gamma is the same inside and outside.
                if len(kinds) > 1 and over in (_MEANS[0], _MEANS[3]):
                    yield Term(f"gamma {outer}".strip(), f"dy{after}", over, power)
        for power, more in itertools.product(
            powers, ("", " xhat", " xhat xhat")[: 1 if core else 3]
        ):
            yield from (Term("", kind + more, "", power) for kind in kinds)
        if not core:
            yield from (Term("", word, "", power) for word in ("xhat", *x) for power in powers)


def _changes(name: str, of: Expected) -> Iterator[Change]:
    """Yield what may replace the statistics of the forward; for gradients, the first is no change."""
    var, eps, rstd, is_layer = of.var, of.case.eps, of.rstd, of.case.kind == "layer"
    if name == "y":
        yield from _forwards(of.case)
        return
    yield Change()
    per_less, size = of.case.n / max(of.case.n - 1, 1), "var" if is_layer else "mean(x^2)"
    less = "the variance is divided by n - 1"
    others = [
        ("eps is missing from rstd", f"1 / sqrt({size})", var**-0.5),
        (less, f"1 / sqrt({size} n / (n - 1) + eps)", (var * per_less + eps) ** -0.5),
        (less, f"1 / sqrt({size} n / (n - 1))", (var * per_less) ** -0.5),
        (less, f"1 / sqrt(({size} + eps) n / (n - 1))", rstd * per_less**-0.5),
        (f"rstd is 1 / (sqrt({size}) + eps)", f"1 / (sqrt({size}) + eps)", 1 / (var**0.5 + eps)),
        ("eps was applied twice", f"1 / sqrt({size} + 2 eps)", (var + 2 * eps) ** -0.5),
        *((f"eps is {e:g}, not {eps:g} as in the forward,", f"1 / sqrt({size} + {e:g})", (var + e) ** -0.5) for e in _EPS if e != eps),
        ("rstd is squared", "rstd^2", rstd**2),
        ("rstd is the standard deviation itself", "sqrt(var + eps)", 1 / rstd),
        ("rstd is the variance itself", size, var),
        ("rstd is the variance plus eps", f"{size} + eps", var + eps),
        ("the saved rstd is taken for the variance", "1 / sqrt(rstd + eps)", (rstd + eps) ** -0.5),
        ("the standard deviation is taken for the variance", "1 / sqrt(std + eps)", (1 / rstd + eps) ** -0.5),
    ]  # fmt: skip
    narrow = [form.dtype for form in (FLOAT32, BFLOAT16, FLOAT16)]
    others += [(f"rstd is kept in {t}", f"{t}(rstd)", rstd.astype(t).astype(float)) for t in narrow]
    for words, text, other in others:
        yield Change(words, text, other, {"xhat": of.centered * other})
    means = [
        (f"the mean is kept in {t}", of.mean - of.mean.astype(t).astype(float)) for t in narrow
    ]
    means += [("the mean of x is missing from xhat", of.mean)]
    if not is_layer:
        means = [("the mean of x is subtracted", -of.centered.mean(axis=-1, keepdims=True))]
        xhat, s, _ = statistics(of.centered, eps)
        # A layer norm altogether.
        yield Change("the mean of x is subtracted", "1 / sqrt(var + eps)", 1 / s, {"xhat": xhat})
    for words, by in means:
        yield Change(words, "", rstd, {"xhat": (of.centered + by) * rstd})
    rows = len(of.dy)
    if rows <= of.case.n:
        own = {"g": of.gamma[:rows, None] * of.dy}
        yield Change("gamma is that of the row, not of the column,", "", rstd, own)
    gamma = of.gamma - of.case.gamma_offset
    if of.case.gamma_offset:
        own = {"gamma": gamma, "g": gamma * of.dy}
        yield Change("gamma_offset is not added to gamma", "", rstd, own)
    yield Change(is_last=True)


def _forwards(case: Case) -> Iterator[Change]:
    """Yield the xhat of each way to write a forward: other axes, variances, roots and places of eps."""
    x, last = case.x.astype(np.float64), (case.x.ndim - 1,)
    subsets = (s for k in range(1, x.ndim + 1) for s in itertools.combinations(range(x.ndim), k))
    problems = [(case.eps, axes) for axes in sorted(subsets, key=lambda axes: axes != last)]
    # A forward that adds eps elsewhere does not show which it has.
    for eps, axes in problems + [(eps, last) for eps in _EPS]:
        count, mean = math.prod(x.shape[axis] for axis in axes), x.mean(axes, keepdims=True)
        squares = [np.square(a).mean(axes, keepdims=True) for a in (x - mean, x)]
        for size, less, centered in itertools.product(("var", "mean(x^2)"), (0, 1), (True, False)):
            v = squares[size != "var"] * count / max(count - less, 1)
            said = ["the variance is divided by n - 1"] * less
            if (size == "var") == centered != (case.kind == "layer"):
                other, name = ("layer", "a layer") if centered else ("rms", "an RMS")
                said.append(f"it is that of {name} norm: say --kind {other}, or check_{other}_norm")
            elif case.kind == "layer" and size != "var":
                said.append("the variance is taken without the mean, mean(x^2),")
            elif (case.kind == "layer") != centered:
                said.append(
                    "the mean of x is " + ("subtracted" if centered else "missing from xhat")
                )
            elif case.kind == "rms" and size == "var":
                said.append("the variance is taken for mean(x^2)")
            root, v_text = np.sqrt(v + eps), size + " n / (n - 1)" * less
            for words, text, bottom in (
                ("", "sqrt({} + eps)", root),
                ("rstd is 1 / (sqrt({}) + eps)", "(sqrt({}) + eps)", np.sqrt(v) + eps),
                ("eps is missing from rstd", "sqrt({})", np.sqrt(v)),
                ("eps was applied twice", "sqrt({} + 2 eps)", np.sqrt(v + 2 * eps)),
                ("eps is squared", "sqrt({} + eps^2)", np.sqrt(v + eps * eps)),
                ("the root is missing, rstd is 1 / ({} + eps),", "({} + eps)", v + eps),
                ("the root is missing, rstd is 1 / {},", "{}", v),
                ("rstd is 1 / ({} + eps)^2", "({} + eps)^2", (v + eps) ** 2),
                ("the root is taken twice", "({} + eps)^(1/4)", np.sqrt(root)),
                ("x is multiplied by sqrt({} + eps), not divided,", "rstd", 1 / root),
                ("x is not divided by sqrt({} + eps)", "1", 1 + 0 * v),
            ):
                named = "; ".join([*said, *[words.format(size)] * bool(words)])
                top = "(x - mean)" if centered else "x"
                xhat = ((x - mean * centered) / bottom).reshape(-1, case.n)
                yield Change(named, f"{top} / {text.format(v_text)}", 1.0, {"xhat": xhat}, axes)


class _Draw:
    """The arrays of one case, and the columns that terms make of them."""

    def __init__(self, case: Case, actual: Array):
        self.of, self.shape = Expected(case, 2.0**-53), case.x.shape
        of, x = self.of, case.rows(case.x)
        self.values = {"dy": of.dy, "gamma": of.gamma, "beta": of.beta, "g": of.g, "x": x}
        self.values |= {"xhat": of.xhat, "y": of.gamma * of.xhat + of.beta, "rstd": of.rstd}
        rows = actual.astype(np.float64).reshape(-1, case.n)
        # Divide by the size of each row, lest one with a large rstd speak for all.
        sizes = np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
        self.weights = 1 / np.where(sizes > 0, sizes, 1) + 0 * rows
        self.target = (rows * self.weights).reshape(-1)
        self.sizes = _sizes(self.shape)

    def columns(self, terms: Sequence[Term], change: Change) -> Array:
        """Return a column of weighted elements for each term."""
        of, made, shape = self.of, [], self.shape
        axes = (-1,), tuple(range(len(shape) - 1)), (0,), tuple(range(len(shape)))
        for term in terms:
            own = self.values | dict(change.values if term.changed == 2 else {})
            outer, inner = (np.prod([own[w] + 0 * of.dy for w in words.split()], axis=0) if words else 1 + 0 * of.dy
                            for words in term[:2])  # fmt: skip
            power = (change.rstd if term.changed else of.rstd) ** term.power
            if rows := _ROWS.get(term.over):
                column = np.sum((inner * power)[rows], axis=0, keepdims=True)
            elif term.over:
                mean = inner.reshape(shape).mean(axes[_MEANS.index(term.over)], keepdims=True)
                column = outer * power * np.broadcast_to(mean, shape).reshape(of.dy.shape)
            else:
                column = outer * inner * power
            made.append((column * self.weights).reshape(-1))
        return np.stack(made, axis=-1)


def _sparse(matrix: Array, target: Array, tolerance: float, most: int) -> list[int]:
    """Return the fewest columns that give `target` but for `tolerance`; empty if it takes too many."""
    sizes = np.sqrt(np.sum(matrix**2, axis=0))
    keep = np.flatnonzero(np.isfinite(sizes) & (sizes > 0))
    units, size = matrix[:, keep] / sizes[keep], float(target @ target)
    states: list[Any] = [((), np.zeros((len(target), 0)), target)]
    for _ in range(min(most, len(target) // 2)):
        grown: dict[Any, Any] = {}
        for chosen, basis, rest in states:
            # A column that is nearly made of those chosen adds nothing.
            left = 1 - np.sum((units.T @ basis) ** 2, axis=1)
            gain = np.where(left > 1e-9, (units.T @ rest) ** 2 / np.maximum(left, 1e-9), 0)
            for column in np.argsort(-gain, kind="stable")[:_TRIED]:
                key = tuple(sorted((*chosen, int(column))))
                if len({*key}) > len(chosen) and key not in grown:
                    new = units[:, column]
                    for _ in range(2):
                        new = new - basis @ (basis.T @ new)
                    new = new / np.sqrt(new @ new)
                    grown[key] = key, np.column_stack([basis, new]), rest - new * (new @ rest)
        states = sorted(grown.values(), key=lambda state: float(state[2] @ state[2]))[:_BEAM]
        if states and states[0][2] @ states[0][2] <= tolerance**2 * size:
            return [int(keep[column]) for column in states[0][0]]
    return []


def _fitted(matrix: Array, target: Array, tolerance: float) -> list[float]:
    """Return the coefficients of columns; empty if they do not give `target`."""
    sizes = np.sqrt(np.sum(matrix**2, axis=0))
    coefficients = np.linalg.lstsq(matrix / sizes, target, rcond=None)[0] / sizes
    rest = target - matrix @ coefficients
    return coefficients.tolist() if rest @ rest <= tolerance**2 * (target @ target) else []


def _factor(
    values: Sequence[float], sizes: Sequence[tuple[int, ...]], error: float
) -> tuple[str, float]:
    """Name the factor that has these values on two draws, and its value on x; empty if nothing has."""
    tables = [
        {
            "1": 1, "2": 2, "1/2": 0.5, "n": n, "1/n": 1 / n, "n/(n-1)": n / max(n - 1, 0.5),
            "(n-1)/n": (n - 1) / n, "n/rows": n / rows, "rows": rows, "1/rows": 1 / rows, "rows/n": rows / n,
            "n/(the first axis)": n / first, "(the first axis)/n": first / n, "1/(the first axis)": 1 / first, "1/(n rows)": 1 / n / rows,
        }
        for n, rows, first in sizes
    ]  # fmt: skip
    pairs = [*zip(map(abs, values), tables, strict=False)]
    both = [n for n in tables[0] if all(abs(v - t[n]) <= error * t[n] for v, t in pairs)]
    # On one shape, several names may be one number: then none is certain.
    if both and (sizes[0] != sizes[1] or len(both) == 1 or both[0] in ("1", "2", "1/2")):
        is_minus = values[0] < 0
        return "-" * is_minus + both[0], float(tables[2][both[0]] * (-1) ** is_minus)
    value, size = values[0], abs(values[0])
    text = f"1 {size - 1:+.1e}" if 0 < abs(size - 1) < 1e-5 else f"{size:.6g}"
    is_same = abs(value - values[1]) <= error * size
    return ("-" * (value < 0) + text) * is_same, value


def read(
    name: str, cases: Sequence[Case], outputs: Sequence[Array], noise: float,
    shape: Sequence[int], axes: Sequence[str] = (),
) -> Reading | None:  # fmt: skip
    """
    Return the formula of y, dx, dgamma or dbeta from cases, and what the code gave there.

    All cases but the last have one shape, the last has another if the code allows that.

    `noise` is the relative error of the code where it is right. Factors are shown for an x of `shape`,
    whose axes have the names `axes`. None: no formula was found.
    """
    right = _right(name, cases[0])
    if not any(output.any() for output in outputs):
        return Reading("0", _shown(right), f"{name} is zero")
    if not (found := find(name, cases, outputs, noise, shape)):
        return None
    factors, change = found
    named, values = ({term: pair[k] for term, pair in factors.items()} for k in (0, 1))
    if name == "y":
        cause = _cause_of_y(named, change, right, cases[0].gamma_offset, axes)
    else:
        cause = _cause(name, named, change, right, shape)
    return Reading(_shown(values, change), _shown(right, beside=values), cause, change.axes)


@np.errstate(all="ignore")
def find(
    name: str, cases: Sequence[Case], outputs: Sequence[Array], noise: float, shape: Sequence[int]
) -> tuple[dict[Term, Any], Change] | None:
    """Return the terms that give the outputs, each with the name of its factor and the value for `shape`."""
    draws = [_Draw(case, actual) for case, actual in zip(cases, outputs, strict=True)]
    tolerance, count = _SLACK * max(noise, 2.0**-52), len(_right(name, cases[0]))
    for changes in zip(*(_changes(name, draw.of) for draw in draws), strict=True):
        change = changes[0]
        levels = (2,) if name == "y" else (0, 1, 2) if change.words else (0,)
        usual = _terms(name, cases[0], core=bool(change.words))
        terms = [term._replace(changed=k) for term in usual for k in levels]
        # Two draws of one shape tell apart what is one number on each.
        both = [*zip(draws, changes, strict=True)]
        matrix = np.concatenate([draw.columns(terms, change) for draw, change in both[:-1]])
        target = np.concatenate([draw.target for draw in draws[:-1]])
        # Terms that do not fit together hold none that do.
        if len(terms) < len(target) and np.isfinite(matrix).all():
            basis = np.linalg.qr(matrix)[0]
            rest = target - basis @ (basis.T @ target)
            if rest @ rest > tolerance**2 * (target @ target):
                continue
        most = 2 * count if change.is_last else count + 1
        columns = _sparse(matrix, target, tolerance, most)
        chosen = [terms[i] for i in columns]
        if not chosen or (change.words and not any(term.changed for term in chosen)):
            continue
        fits = [_fitted(matrix[:, columns], target, tolerance)]
        fits.append(_fitted(draws[-1].columns(chosen, changes[-1]), draws[-1].target, tolerance))
        sizes = [draws[0].sizes, draws[-1].sizes, _sizes(shape)]
        # The error of a coefficient: noise, grown by what cancels between terms.
        factors = [_factor(pair, sizes, 64 * tolerance) for pair in zip(*fits, strict=False)]
        if len(factors) == len(chosen) and all(words for words, _ in factors):
            return dict(zip(chosen, factors, strict=True)), change
    return None


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Return n, the number of rows and the length of the first axis."""
    return shape[-1], math.prod(shape[:-1]), shape[0]


def _shown(values: dict[Term, float], change: Any = None, beside: Any = ()) -> str:
    """Write a formula; a coefficient of 1 leaves the room that the formula `beside` needs there."""
    widths = {term[:3]: len(_coefficient(beside[term])) for term in beside}
    order = sorted(values, key=lambda t: (t.over, "hat" in t.outer, "hat" not in t.inner))
    is_common = len(order) > 1 and len({(t.power, t.changed > 0) for t in order}) == 1
    common = _power(order[0]) * is_common
    text = ""
    for term in order:
        mean = f"{term.over}({term.inner})" if term.over else term.inner
        factors = [_power(term) * (not common), term.outer, mean]
        body = (
            " ".join(filter(None, factors))
            .replace("xhat xhat", "xhat^2")
            .replace("gamma gamma", "gamma^2")
        )
        text += f" {'-' if values[term] < 0 else '+'} "
        text += _coefficient(values[term]).ljust(widths.get(term[:3], 0)) + body
    text = text[3:] if text[1] == "+" else "-" + text[3:]
    text = f"{common} ({text})" if common else text
    if change and change.text:
        other = "xhat" if change.axes else "rstd'"
        text += f", {other} = {change.text}"
    return text


def _coefficient(value: float) -> str:
    return "" if abs(abs(value) - 1) < 1e-9 else f"{abs(value):.3g} "


def _power(term: Term) -> str:
    mark = "rstd" + "'" * (term.changed > 0)
    return "" if not term.power else mark + f"^{term.power}" * (term.power != 1)


# ---- names of mistakes: {} are the terms that have one, {of} and {at} are " of dx" and " in dx" ----

_SLOTS = "g", "the mean of g", "the xhat term"
_AGREE = {"is": "are", "has": "have", "lacks": "lack"}


def _slot(term: Term) -> int:
    """Return the place of a term: 0 for g or a sum, 1 for the mean of g, 2 for the xhat term, -1 for others."""
    outer, inner = ({*words.split()} - {"gamma", "g", "dy", "rstd"} for words in term[:2])
    if term.over in _ROWS:
        return 0 if term.over == "sum" else -1
    if not {"g", "dy"} & {*term.inner.split()} or (not term.over and inner):
        return -1
    return 0 if not term.over else 2 if outer | inner else 1


def _deviations(
    term: Term, factor: str, right: Term, sign: str, sizes: tuple[int, ...]
) -> Iterator[str]:
    """Yield how a term differs from the right one."""
    words, own = ({*f"{t.outer} {t.inner}".split()} for t in (term, right))
    is_sum, (n, rows, first) = right.over == "sum", sizes
    if "gamma" in term.outer:
        yield "gamma is applied after the projection in {}{of}"
    elif is_sum and "g" in words:
        yield "{} contains gamma"
    elif "g" in own and "g" not in words:
        yield "gamma is missing from {}{of}"
    elif "gamma" in words:
        yield "gamma is applied twice in {}{of}"
    if term.over != right.over:
        over = term.over.removeprefix("mean over ").replace("the rows", "the leading axes")
        yield f"{{}} {{is}} a mean over {over}, not the last{{at}}"
    if is_sum and not words & {"dy", "g"}:
        yield "dy is missing from {}"
    elif is_sum and "xhat" in words ^ own and not words & {"x", "y"}:
        yield (
            "{} is what dgamma should be"
            if "xhat" in words
            else "xhat is missing from {}, which is what dbeta should be"
        )
    if right.outer and not (term.outer.removeprefix("gamma") and " " in term.inner):
        yield "a factor xhat is missing from {}{of}"
    power = term.power - right.power + ("rstd" in words)
    # x rstd in place of xhat, as often as x is there.
    if power and power == f"{term.outer} {term.inner}".split().count("x"):
        yield "the mean of x is missing from xhat in {}{of}"
        words, power = words - {"x"}, 0
    for made in sorted(words & {"x", "y"}):
        yield f"{{}} {{is}} made of {made}, not of xhat{{at}}"
    if power:
        powers = {-1: "{} {lacks} rstd{at}", 1: "{} {has} rstd twice{at}"}
        yield powers.get(power, f"{{}} {{has}} rstd^{power + 1} in place of rstd{{at}}")
    factor = factor if not sign else factor[1:] if factor[0] == "-" else f"-{factor}"
    averaged = "{} is averaged over {}, not summed"
    factors = {
        "1": "", "-1": "{} {is} added, not subtracted{at}" if sign else "{} {has} the wrong sign{at}",
        "2": "{} {is} subtracted twice{at}" if sign else "{} {is} doubled{at}",
        "n": "{} {is} not divided by n{at}", "n/(n-1)": "{} {is} divided by n - 1{at}",
        "n/rows": f"{{}} {{is}} divided by the {rows} rows, not by n = {n} columns{{at}}",
        "n/(the first axis)": f"{{}} {{is}} divided by the {first} of the first axis, not by n = {n}{{at}}",
        "1/n": "{} {is} divided by n" + " twice" * bool(sign) + "{at}",
    }  # fmt: skip
    if is_sum:
        factors |= {
            "1/rows": averaged.format("{}", "the rows"),
            "1/(the first axis)": averaged.format("{}", "the first axis"),
        }
    if text := factors.get(factor, f"{{}} {{is}} off by a factor of {factor}{{at}}"):
        yield text


def _cause(
    name: str, named: dict[Term, str], change: Change, right: dict[Term, float],
    shape: Sequence[int],
) -> str:  # fmt: skip
    """Name the mistake of a gradient; empty if it has no name."""
    if {(t.inner, f) for t, f in named.items()} == {("g", "(n-1)/n"), ("g xhat xhat", "-1/n")}:
        return "only the diagonal of the Jacobian is in dx: the mean of g and the xhat term are missing"
    wanted = {_slot(term): (term, "-" * (value < 0)) for term, value in right.items()}
    found, slots, ends = dict[str, list[int]](), list[int](), list[str]()
    for term, factor in named.items():
        slot = _slot(term)
        if term.over in _ROWS and slot < 0:
            whole = [t[:2] for t in named if t.over == "sum"]
            counted = {"1": "is accumulated twice in {}", "-1": "is not accumulated in {}"}.get(
                factor, ""
            )
            if not whole and len(named) == 1:
                counted = "alone is in {}, overwritten, not accumulated"
            elif whole != [term[:2]] or not counted:
                return ""
            ends.append(f"the {term.over} {counted.format(name)}")
            continue
        if slot < 0 or slot in slots:
            return ""
        slots.append(slot)
        said = (
            [*_deviations(term, factor, *wanted[slot], _sizes(shape))]
            if slot in wanted
            else ["{} {is} subtracted in dx"]
        )
        for template in [f"{change.words} in {{}}{{of}}"] * (term.changed > 0) + said:
            found.setdefault(template, []).append(slot)
    if (missing := sorted(wanted.keys() - slots)) and not ends:
        found["{} {is} missing from dx"] = missing
    sentences = []
    for template, places in found.items():
        subject = " and ".join(_SLOTS[place] for place in sorted(places))
        # Terms that could have it: g has no mean and no xhat.
        able = {*slots} - (
            {0}
            if template.startswith(("gamma is applied after", "the mean of x", "the mean is"))
            else set()
        )
        able &= {2} if template.startswith(("the mean of x", "the mean is")) else able
        if {*places} == able and template[-2:] != "dx":
            subject = name
        elif sorted(places) == [1, 2] and "{at}" in template:
            subject = "the two means"
        several, part = len(places) > 1 and subject != name, subject != name
        verbs = {verb: many if several else verb for verb, many in _AGREE.items()}
        sentences.append(template.format(subject, of=" of dx" * part, at=" in dx" * part, **verbs))
    return "; ".join(sentences + ends)


def _cause_of_y(
    named: dict[Term, str], change: Change, right: dict[Term, float], offset: float,
    axes: Sequence[str],
) -> str:  # fmt: skip
    """Name the mistake of a forward."""
    last, said = len(axes) - 1, [*filter(None, [change.words])]
    post = {term.inner: factor for term, factor in named.items()}
    usual = {term.inner: "1" for term in right}
    if change.axes != (last,):
        over = " and ".join(axes[axis] for axis in change.axes)
        batch = ": that is a batch norm" * (last not in change.axes)
        said = [
            f"mean and variance are taken over axis {over}, not over axis {axes[-1]}{batch}",
            *said,
        ]
    key = ", ".join(f"{factor} {term}" for term, factor in post.items())
    known = {
        "1 gamma xhat": "beta is not added", "1 xhat": "gamma is not applied", "1 xhat, 1 beta": "gamma is not applied",
        "1 beta xhat, 1 gamma": "gamma and beta are exchanged", "1 gamma, 1 beta xhat": "gamma and beta are exchanged",
        "1 gamma xhat, 1 gamma beta": "gamma multiplies beta as well, (xhat + beta) gamma",
        "1 gamma gamma xhat, 1 beta": "gamma is applied twice", "1 beta, 1 gamma gamma xhat": "gamma is applied twice",
        "1 gamma xhat, -1 beta": "beta is subtracted, not added", "-1 gamma xhat, 1 beta": "xhat has the wrong sign",
        "1 xhat, 1 gamma, 1 beta": "gamma is added, not multiplied",
    }  # fmt: skip
    more = post.get("xhat", "0")
    if usual | {"xhat": more} == post != usual:
        missing = float(more) == -offset
        added = f"the forward adds {more} to gamma: say --gamma-offset {more}"
        said.append("gamma_offset is not added to gamma" if missing else added)
    elif post != usual:
        said.append(known.get(key, f"y is {key}"))
    return "; ".join(
        words + " in the forward" * ("--" not in words and "axis" not in words) for words in said
    )


# ---- where no formula is found ----


def locate(actual: Array, value: Array, bound: Array, shape: tuple[int, ...]) -> str:
    """Say which single element, row or column is wrong, and by which factor; empty if more is wrong."""
    wrong = excess(actual, value, 2 * bound) > 1
    place = name_pattern(wrong.reshape(shape if actual.ndim > 1 else actual.shape))
    # The other rows and elements must confirm the formula, so most of them must be right.
    most = {"element": 8, "column": 8, "row": 3, "last": 3}.get(place.split()[0], np.inf)
    if not wrong.any() or most * wrong.sum() > wrong.size:
        return ""
    about = f"{'the ' * place.startswith('last')}{place} of {{}}"
    a, v = actual[wrong], value[wrong]
    if not a.any():
        return f"{about} is zero"
    factor = float(a @ v) / float(v @ v) if v.any() else 0.0
    # A factor with few digits was probably written in the code.
    meant = abs(factor - float(f"{factor:.4g}")) < 1e-8 * abs(factor)
    if not meant or not np.allclose(a, factor * v, rtol=0, atol=1e-6 * float(np.abs(v).max())):
        return f"{about} is wrong, the rest is not"
    if abs(factor + 1) < 1e-6:
        return f"{about} has the wrong sign"
    return f"{about} is off by a factor of {factor:.4g}"


def describe(dx: Array, expected: Expected, changed: dict[str, Array], noise: float) -> str:
    """Say what is known of a dx that was not read back; `changed` has it after a change of one thing."""
    near = _SLACK * max(noise, 2.0**-52) * float(np.max(np.abs(dx), initial=0.0))

    def is_zero(a: Array) -> bool:
        return bool(np.max(np.abs(a)) <= near)

    orthogonal = "not " * (not is_zero((dx * expected.xhat).mean(-1))) + "orthogonal to xhat"
    moved = [name for name, other in changed.items() if not is_zero(dx - other)]
    known = "not " * (not is_zero(dx.mean(-1))) + f"of sum zero over a row, {orthogonal}"
    return f"{known}; it depends on {', '.join(moved) or 'none of them'}"
