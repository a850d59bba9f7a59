"""
Read a formula back from arrays: the few terms that give a wrong y, dx, dgamma or dbeta exactly.

A term is a product of arrays, or its mean over some axes, times a power of rstd. Orthogonal least
squares, with a beam, finds the fewest terms that leave no more than noise. A formula is believed only
if it holds on a second draw of another shape, and so is the name of a factor. Formulas of rstd and
names of factors are computed from the very text that the report shows.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.closed_form import Case, Expected, excess
from stablenorm.check.differences import name_pattern
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32
from stablenorm.records import Array, Shape


class Reading(NamedTuple):
    """A formula that was read back, the right one, a template of the cause (see `agree`), the axes of y."""

    formula: str
    right: str
    cause: str = ""
    axes: Shape = ()


class Term(NamedTuple):
    """``outer * over(inner) * rstd**power``: products of arrays by name; `over` "" takes no mean."""

    outer: str
    inner: str
    over: str = ""
    power: int = 0
    # 0: all is that of the forward; 1: rstd, 2: xhat, gamma and g as well are those of a change.
    changed: int = 0

    def __str__(self) -> str:
        """Write the term."""
        power = "rstd" * (self.power != 0) + f"^{self.power}" * (self.power not in (0, 1))
        inner = f"{self.over}({self.inner})" if self.over else self.inner
        return " ".join(filter(None, [power, self.outer, inner]))


class Change(NamedTuple):
    """Other statistics of one draw: words of the cause, their formula, the arrays."""

    words: str = ""
    text: str = ""
    rstd: Any = 1.0
    # xhat, gamma or g.
    values: Mapping[str, Any] = MappingProxyType({})
    axes: Shape = ()


_NONE = Change()
_MEANS = "mean", "mean over the rows", "mean over the first axis", "mean over everything"
# Rows that a sum over rows may consist of.
_ROWS = {"sum": slice(None), "last row": slice(-1, None), "first row": slice(1)}
# States that the search keeps, and columns that it tries from each.
_BEAM, _TRIED = 16, 12
# A formula leaves at most so many times the noise: the error of a sum of terms that cancel.
_SLACK = 2.0**9
# Values of eps that people write.
_EPS = 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2
# Formulas of rstd, the right one first, and their names; v is the variance or mean(x^2).
_ROOTS = {
    "1 / sqrt(v + eps)": "",
    "1 / (sqrt(v) + eps)": "rstd is 1 / (sqrt(v) + eps)",
    "1 / sqrt(v)": "eps is missing from rstd",
    "1 / sqrt(v + 2 * eps)": "eps was applied twice",
    "1 / sqrt(v + eps**2)": "eps is squared",
    "1 / (v + eps)": "the root is missing, rstd is 1 / (v + eps),",
    "1 / v": "the root is missing, rstd is 1 / v,",
    "1 / (v + eps)**2": "rstd is 1 / (v + eps)^2",
    "1 / sqrt(sqrt(v + eps))": "the root is taken twice",
    "sqrt(v + eps)": "rstd is the standard deviation itself",
    "v": "rstd is the variance itself",
    "v + eps": "rstd is the variance plus eps",
    "1 / sqrt(1 / sqrt(v + eps) + eps)": "the saved rstd is taken for the variance",
    "1 / sqrt(sqrt(v + eps) + eps)": "the standard deviation is taken for the variance",
    "v**0": "rstd is missing",
}
# By kind, the right one first: whether v is the variance, whether the mean of x is subtracted, words.
_NORMS = {
    "layer": (
        (True, True, ""),
        (True, False, "the mean of x is missing from xhat"),
        (False, True, "the variance is taken without the mean, mean(x^2),"),
        (False, False, "it is that of an RMS norm: say --kind rms, or check_rms_norm"),
    ),
    "rms": (
        (False, False, ""),
        (False, True, "the mean of x is subtracted"),
        (True, False, "the variance is taken for mean(x^2)"),
        (True, True, "it is that of a layer norm: say --kind layer, or check_layer_norm"),
    ),
}
# Names of factors: of n, the number of rows and the length of the first axis.
_FACTORS = (
    "1", "2", "1/2", "n", "1/n", "n/(n-1)", "(n-1)/n", "n/rows", "rows", "1/rows", "rows/n",
    "n/first", "first/n", "1/first", "1/n/rows",
)  # fmt: skip


def _right(name: str, case: Case) -> dict[Term, float]:
    """Return the terms of the right formula, and their factors."""
    if name == "y":
        scaled = Term("", "xhat" if case.gamma is None else "gamma xhat")
        return {scaled: 1.0} | ({} if case.beta is None else {Term("", "beta"): 1.0})
    if name != "dx":
        return {Term("", "dy xhat" if name == "dgamma" else "dy", "sum"): 1.0}
    mean = {} if case.kind == "rms" else {Term("", "g", "mean", 1): -1.0}
    return {Term("", "g", "", 1): 1.0} | mean | {Term("xhat", "g xhat", "mean", 1): -1.0}


def _terms(name: str, case: Case, *, core: bool) -> Iterator[Term]:
    """Yield the terms that `name` may be made of; `core` for fewer, the usual ones."""
    leading, powers = case.x.ndim - 1, range(4) if core else range(-2, 5)
    # Leave out what is nothing else under another name: x is xhat / rstd without a mean, y gamma xhat without beta.
    odd = ["x"] * (case.kind == "layer") + ["y"] * (case.beta is not None)
    own = {word for word in ("gamma", "beta") if getattr(case, word) is not None}
    if name == "y":
        posts = "gamma xhat", "xhat", "gamma", "beta", "gamma beta", "gamma gamma xhat", "beta xhat"
        yield from (Term("", post) for post in posts if own | {"xhat"} >= {*post.split()})
        return
    if name != "dx":
        inner = "dy xhat", "dy", "dy x", "dy y", "g xhat", "g", "g x", "g y", "xhat", "x"
        for product, rows, power in itertools.product(inner[: 3 if core else None], _ROWS, powers):
            # In one row, rstd is a number.
            if {*product.split()} <= {"dy", "g", "xhat", *odd} and (rows == "sum" or power == 2):
                yield Term("", product, rows, power - 2)
        return
    kinds = ("g", "dy", "gamma g") if "gamma" in own else ("g",)
    usual = {("", ""): 0, ("xhat", " xhat"): 0}
    afters = "", " xhat", *(f" {word}" for word in odd)
    every = usual | dict.fromkeys(itertools.product(("", *odd, "xhat", "xhat xhat"), afters))
    # With one leading axis, the first is all of them; without, there is one mean.
    means = [over for over in _MEANS if leading > 1 or "first" not in over]
    for power in powers:
        for kind, more in itertools.product(kinds, (1,) if core else (1, 2, 3)):
            yield Term("", kind + " xhat" * (more - 1), "", power)
        yield from (Term("", word, "", power) for word in ("xhat", *odd) if not core)
        for over in means[: 1 if core or not leading else None]:
            is_row = over == "mean"
            # Rstd may stand inside a sum over rows.
            inside = kinds + tuple(f"{kind} rstd" for kind in kinds) * (not is_row)
            for outer, after in every if is_row and not core else usual:
                yield from (Term(outer, kind + after, over, power) for kind in inside)
                # A mean over the rows keeps columns apart: gamma is the same inside and outside.
                if len(kinds) > 1 and over in (_MEANS[0], _MEANS[3]):
                    yield Term(f"gamma {outer}".strip(), f"dy{after}", over, power)


def _changes(name: str, of: Expected) -> Iterator[Change]:
    """Yield what may replace the statistics of the forward; for gradients, the first is no change."""
    ndim, norms, roots = of.case.x.ndim, _NORMS[of.case.kind], [*_ROOTS]
    last: Shape = (ndim - 1,)
    others = [(eps, last) for eps in _EPS if eps != of.case.eps]
    if name == "y":
        every = (axes for k in range(ndim) for axes in itertools.combinations(range(ndim), k + 1))
        problems = [(of.case.eps, axes) for axes in sorted(every, key=lambda axes: axes != last)]
        # A forward that adds eps elsewhere does not show which it has.
        for recipe in itertools.product(problems + others, norms, (0, 1), roots):
            change = _changed(of, *recipe)
            top = "(x - mean)" if recipe[1][1] else "x"
            bottom = change.text.removeprefix("1 / ")
            text = f"{top} / {bottom}" if bottom != change.text else f"{top} ({bottom})"
            yield change._replace(text=f"xhat = {text}", rstd=1.0)
        return
    own = [(of.case.eps, last)]
    for recipe in (
        *itertools.product(own, norms[:1], (0, 1), roots),
        *itertools.product(others, norms[:1], (0,), roots[:1]),
        *itertools.product(own, norms[1:], (0,), roots[:1]),
    ):
        change = _changed(of, *recipe)
        words = change.words.replace("it is", "xhat is").partition(":")[0]
        if recipe[0] != own[0]:
            words = f"eps is {recipe[0][0]:g}, not {of.case.eps:g} as in the forward,"
        yield change._replace(words=words, text=f"rstd' = {change.text}", axes=())
    rstd, centered, dy, gamma = of.rstd, of.centered, of.dy, of.gamma - of.case.gamma_offset
    for dtype in (form.dtype for form in (FLOAT32, BFLOAT16, FLOAT16)):
        kept, mean = (a.astype(dtype).astype(float) for a in (rstd, of.mean))
        own_xhat = {"xhat": centered * kept}
        yield Change(f"rstd is kept in {dtype}", f"rstd' = {dtype}(rstd)", kept, own_xhat)
        own_xhat = {"xhat": (centered + of.mean - mean) * rstd}
        yield Change(
            f"the mean is kept in {dtype}", f"xhat' = (x - {dtype}(mean)) rstd", rstd, own_xhat
        )
    if len(dy) <= of.case.n:
        own_g = {"g": of.gamma[: len(dy), None] * dy}
        words = "gamma is that of the row, not of the column,"
        yield Change(words, "g' = gamma[row] dy", rstd, own_g)
    if of.case.gamma_offset:
        words, text = "gamma_offset is not added to gamma", "g' = gamma dy without the offset"
        yield Change(words, text, rstd, {"gamma": gamma, "g": gamma * dy})
    yield _NONE


def _changed(of: Expected, problem: tuple[float, Shape], norm: Any, less: int, root: str) -> Change:
    """Return the rstd and xhat of one way to write a forward; the text is the formula of rstd."""
    (eps, axes), (is_var, is_centered, words) = problem, norm
    x = of.case.x.astype(np.float64)
    count, mean = math.prod(x.shape[axis] for axis in axes), x.mean(axes, keepdims=True)
    v = np.square(x - mean * is_var).mean(axes, keepdims=True) * count / max(count - less, 1)
    rstd = eval(root, {"v": v, "eps": eps, "sqrt": np.sqrt})
    size, number = "var" if is_var else "mean(x^2)", "eps" if eps == of.case.eps else f"{eps:g}"
    text = root.replace("**", "^").replace(" * ", " ").replace("eps", number)
    said = [
        "the variance is divided by n - 1" * less,
        words,
        re.sub(r"\bv\b", size, _ROOTS[root]),
    ]
    xhat = ((x - mean * is_centered) * rstd).reshape(-1, of.case.n)
    text = re.sub(r"\bv\b", size + " n / (n - 1)" * less, text).removesuffix("^0")
    # Over other axes, rstd is no number of a row.
    rows = rstd.reshape(-1, 1) if rstd.size == len(xhat) else rstd
    return Change("; ".join(filter(None, said)), text, rows, {"xhat": xhat}, axes)


class _Draw:
    """The arrays of one case, and the columns that terms make of them."""

    def __init__(self, case: Case, actual: Array):
        self.of, self.shape = Expected(case, 2.0**-53), case.x.shape
        of, self.ones = self.of, np.ones((case.x.size // case.n, case.n))
        self.values = {"dy": of.dy, "gamma": of.gamma, "beta": of.beta, "g": of.g, "rstd": of.rstd}
        self.values |= {"x": case.rows(case.x), "xhat": of.xhat, "y": of.gamma * of.xhat + of.beta}
        rows = actual.astype(np.float64).reshape(-1, case.n)
        # Divide by the size of each row, lest one with a large rstd speak for all.
        sizes = np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
        self.weights = np.broadcast_to(1 / np.where(sizes > 0, sizes, 1), rows.shape)
        self.target = (rows * self.weights).reshape(-1)

    def columns(self, terms: Sequence[Term], change: Change) -> Array:
        """Return a column of weighted elements for each term."""
        made, ndim = [], len(self.shape)
        axes = dict(zip(_MEANS, ((-1,), range(ndim - 1), (0,), range(ndim)), strict=True))
        for term in terms:
            own = self.values | dict(change.values if term.changed == 2 else {})
            outer, inner = (
                math.prod((own[word] for word in words.split()), start=self.ones)
                for words in term[:2]
            )
            power = (change.rstd if term.changed else self.of.rstd) ** term.power
            if rows := _ROWS.get(term.over):
                column = np.sum((inner * power)[rows], axis=0, keepdims=True)
            elif term.over:
                mean = inner.reshape(self.shape).mean(tuple(axes[term.over]), keepdims=True)
                column = outer * power * np.broadcast_to(mean, self.shape).reshape(inner.shape)
            else:
                column = outer * inner * power
            made.append((column * self.weights).reshape(-1))
        return np.stack(made, axis=-1)


def _sparse(matrix: Array, target: Array, tolerance: float, most: int) -> list[int]:
    """Return the fewest columns that give `target` but for `tolerance`; empty if it takes too many."""
    sizes = np.sqrt(np.sum(matrix**2, axis=0))
    keep = np.flatnonzero(np.isfinite(sizes) & (sizes > 0))
    units = matrix[:, keep] / sizes[keep]
    states: list[Shape] = [()]
    for _ in range(min(most, len(target) // 2) + 1):
        grown = dict[Shape, float]()
        for chosen in states:
            basis = np.linalg.qr(units[:, chosen])[0]
            rest = target - basis @ (basis.T @ target)
            if rest @ rest <= tolerance**2 * (target @ target):
                return [int(keep[column]) for column in chosen]
            # A column that is nearly made of those chosen adds nothing.
            left = 1 - np.sum((basis.T @ units) ** 2, axis=0)
            gains = np.where(left > 1e-9, (rest @ units) ** 2 / np.maximum(left, 1e-9), 0)
            for column in np.argsort(-gains, kind="stable")[:_TRIED]:
                key = tuple(sorted((*chosen, int(column))))
                if gains[column]:
                    grown[key] = float(rest @ rest - gains[column])
        states = sorted(grown, key=lambda key: grown[key])[:_BEAM]
    return []


def _fitted(matrix: Array, target: Array, tolerance: float) -> list[float]:
    """Return the coefficients of columns; empty if they do not give `target`."""
    sizes = np.sqrt(np.sum(matrix**2, axis=0))
    coefficients = np.linalg.lstsq(matrix / sizes, target, rcond=None)[0] / sizes
    rest = target - matrix @ coefficients
    return coefficients.tolist() if rest @ rest <= tolerance**2 * (target @ target) else []


def _factor(values: Sequence[float], shapes: Sequence[Any], error: float) -> tuple[str, float]:
    """Name the factor that has these values on two draws, and its value on x; empty if nothing has."""
    tables = []
    for *rows, n in shapes:
        known = {"n": n, "rows": math.prod(rows), "first": [*rows, n][0]}
        tables.append({name: eval(name, known) for name in _FACTORS if n > 1 or "-1" not in name})
    sign = "-" * (values[0] < 0)
    both = [
        name
        for name in tables[2]
        if all(abs(abs(v) - t[name]) <= error * t[name] for v, t in zip(values, tables, strict=False))
    ]  # fmt: skip
    # On one shape, several names may be one number: then none is certain.
    if both and (shapes[0] != shapes[1] or len(both) == 1 or both[0] in ("1", "2", "1/2")):
        return sign + both[0], tables[2][both[0]] * (-1) ** len(sign)
    size = abs(values[0])
    text = f"1 {size - 1:+.1e}" if 0 < abs(size - 1) < 1e-5 else f"{size:.6g}"
    return (sign + text) * (abs(values[0] - values[1]) <= error * size), values[0]


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
        return Reading("0", _shown(right), "{} is|are zero")
    if not (found := find(name, cases, outputs, noise, shape)):
        return None
    factors, change = found
    named, values = ({term: pair[k] for term, pair in factors.items()} for k in (0, 1))
    if name == "y":
        cause = _cause_of_y(named, change, right, cases[0].gamma_offset, axes)
    else:
        cause = _cause(named, change, right, shape)
    return Reading(_shown(values, change), _shown(right, beside=values), cause, change.axes)


@np.errstate(all="ignore")
def find(
    name: str, cases: Sequence[Case], outputs: Sequence[Array], noise: float, shape: Sequence[int]
) -> tuple[dict[Term, Any], Change] | None:
    """Return the terms that give the outputs, each with the name of its factor and the value for `shape`."""
    draws = [_Draw(case, actual) for case, actual in zip(cases, outputs, strict=True)]
    tolerance, count = _SLACK * max(noise, 2.0**-52), len(_right(name, cases[0]))
    # Two draws of one shape tell apart what is one number on each.
    target = np.concatenate([draw.target for draw in draws[:-1]])
    every = zip(*(_changes(name, draw.of) for draw in draws), strict=True)
    for place, changes in enumerate(every):
        change = changes[0]
        # At the end: two terms for each right one.
        most = 2 * count if place and not change.words else count + 1
        # Level 1 is another one than 0 if rstd is changed.
        levels = (2,) if name == "y" else (0, 1, 2)[:: 1 if "rstd'" in change.text else 2]
        levels = levels if change.words or name == "y" else (0,)
        usual = _terms(name, cases[0], core=bool(change.words))
        terms = [term._replace(changed=level) for term in usual for level in levels]
        parts = map(_Draw.columns, draws[:-1], itertools.repeat(terms), changes[:-1])
        matrix = np.concatenate([*parts])
        # Terms that do not fit together hold none that do.
        if len(terms) < len(target) and np.isfinite(matrix).all():
            basis = np.linalg.qr(matrix)[0]
            rest = target - basis @ (basis.T @ target)
            if rest @ rest > tolerance**2 * (target @ target):
                continue
        columns = _sparse(matrix, target, tolerance, most)
        chosen = [terms[i] for i in columns]
        if not chosen or (change.words and not any(term.changed for term in chosen)):
            continue
        fits = [_fitted(matrix[:, columns], target, tolerance)]
        fits.append(_fitted(draws[-1].columns(chosen, changes[-1]), draws[-1].target, tolerance))
        shapes = [cases[0].x.shape, cases[-1].x.shape, tuple(shape)]
        # The error of a coefficient: noise, grown by what cancels between terms.
        factors = [_factor(pair, shapes, 64 * tolerance) for pair in zip(*fits, strict=False)]
        if len(factors) == len(chosen) and all(words for words, _ in factors):
            return dict(zip(chosen, factors, strict=True)), change
    return None


def _shown(values: dict[Term, float], change: Change = _NONE, beside: Any = ()) -> str:
    """Write a formula; a coefficient of 1 leaves the room that the formula `beside` needs there."""
    widths = {term[:3]: len(_coefficient(beside[term])) for term in beside}
    order = sorted(values, key=lambda t: (t.over, "hat" in t.outer, "hat" not in t.inner))
    # The power of rstd that all terms have is written once.
    first = order[0]
    common = len(order) > 1 and len({(t.power, t.changed > 0) for t in order}) == 1
    marks = "|".join(re.findall(r"(\w+)'", change.text))

    def marked(term: Term) -> str:
        text = str(term).replace("xhat xhat", "xhat^2").replace("gamma gamma", "gamma^2")
        return re.sub(rf"\b({marks})\b", r"\1'", text) if marks and term.changed else text

    text = ""
    for term in order:
        coefficient = _coefficient(values[term]).ljust(widths.get(term[:3], 0))
        own = marked(term._replace(power=0) if common else term)
        text += f" {'-' if values[term] < 0 else '+'} {coefficient}{own}"
    text = text[3:] if text[1] == "+" else "-" + text[3:]
    if common and first.power:
        text = f"{marked(Term('', '', '', first.power, first.changed))} ({text})"
    return text + f", {change.text}" * bool(change.words)


def _coefficient(value: float) -> str:
    return "" if abs(abs(value) - 1) < 1e-9 else f"{abs(value):.3g} "


# ---- names of mistakes: templates in which {} stands for terms, or a gradient ----

_SLOTS = "g", "the mean of g", "the xhat term"
# By the terms and the names of their factors, sorted; * is what the right sum is over.
_KNOWN = {
    "1 gamma xhat": "beta is not added",
    "1 xhat": "gamma is not applied",
    "1 beta, 1 xhat": "gamma is not applied",
    "1 beta xhat, 1 gamma": "gamma and beta are exchanged",
    "1 beta xhat, 1 gamma beta": "gamma and beta are exchanged, and beta multiplies both",
    "1 gamma beta, 1 gamma xhat": "gamma multiplies beta as well, (xhat + beta) gamma",
    "1 beta, 1 gamma gamma xhat": "gamma is applied twice",
    "1 gamma gamma xhat": "gamma is applied twice",
    "-1 beta, 1 gamma xhat": "beta is subtracted, not added",
    "-1 gamma xhat, 1 beta": "xhat has the wrong sign",
    "1 beta, 1 gamma, 1 xhat": "gamma is added, not multiplied",
    "(n-1)/n rstd g, -1/n rstd g xhat xhat": "only the diagonal of the Jacobian is in {}: the mean of g and the xhat term are missing",
    **{
        f"{sign}1 {row}(*){rest}": f"the {row} {words}"
        for row in ("last row", "first row")
        for sign, rest, words in (
            ("", "", "alone is in {}, overwritten, not accumulated"),
            ("", ", 1 sum(*)", "is accumulated twice in {}"),
            ("-", ", 1 sum(*)", "is not accumulated in {}"),
        )
    },
}  # fmt: skip


def agree(template: str, subjects: Sequence[str]) -> str:
    """Put subjects for {}, and the right one of two forms of a verb, as in "is|are"."""
    words = re.sub(r"(\w+)\|(\w+)", rf"\{1 + (len(subjects) > 1)}", template)
    return words.replace("{}", " and ".join(subjects))


def _slot(term: Term) -> int:
    """Return the place of a term: 0 for g or a sum, 1 for the mean of g, 2 for the xhat term, -1 for others."""
    outer, inner = ({*words.split()} - {"gamma", "g", "dy", "rstd"} for words in term[:2])
    if term.over in _ROWS:
        return 0 if term.over == "sum" else -1
    if not {"g", "dy"} & {*term.inner.split()} or (not term.over and inner):
        return -1
    return 0 if not term.over else 2 if outer | inner else 1


def _deviations(
    term: Term, factor: str, right: Term, sign: str, shape: Sequence[int]
) -> Iterator[str]:
    """Yield how a term differs from the right one, whose factor has this sign."""
    words, own = ({*f"{t.outer} {t.inner}".split()} for t in (term, right))
    is_sum, n, rows = right.over == "sum", shape[-1], math.prod(shape[:-1])
    if "gamma" in term.outer:
        yield "gamma is applied after the projection in {}"
    elif is_sum and "g" in words:
        yield "{} contains|contain gamma"
    elif "g" in own and "g" not in words:
        yield "gamma is missing from {}"
    elif "gamma" in words:
        yield "gamma is applied twice in {}"
    if term.over != right.over:
        over = term.over.removeprefix("mean over ").replace("the rows", "the leading axes")
        yield f"{{}} is|are a mean over {over}, not the last"
    if is_sum and not words & {"dy", "g"}:
        yield "dy is missing from {}"
    elif is_sum and "xhat" in words - own:
        yield "{} is|are what dgamma should be"
    elif is_sum and "xhat" in own - words and not words & {"x", "y"}:
        yield "xhat is missing from {}, which is what dbeta should be"
    if right.outer and not (term.outer.removeprefix("gamma") and " " in term.inner):
        yield "a factor xhat is missing from {}"
    power = term.power - right.power + ("rstd" in words)
    # x rstd in place of xhat, as often as x is there.
    if power and power == f"{term.outer} {term.inner}".split().count("x"):
        yield "the mean of x is missing from xhat in {}"
        words, power = words - {"x"}, 0
    for made in sorted(words & {"x", "y"}):
        yield f"{{}} is|are made of {made}, not of xhat"
    if power:
        powers = {-1: "{} lacks|lack rstd", 1: "{} has|have rstd twice"}
        yield powers.get(power, f"{{}} has|have rstd^{power + 1} in place of rstd")
    factor = (sign + factor).removeprefix("--")
    factors = {
        "1": "",
        "-1": "{} is|are added, not subtracted" if sign else "{} has|have the wrong sign",
        "2": "{} is|are subtracted twice" if sign else "{} is|are doubled",
        "n": "{} is|are not divided by n",
        "n/(n-1)": "{} is|are divided by n - 1",
        "n/rows": f"{{}} is|are divided by the {rows} rows, not by n = {n} columns",
        "n/first": f"{{}} is|are divided by the {shape[0]} of the first axis, not by n = {n}",
        "1/n": "{} is|are divided by n" + " twice" * bool(sign),
    }
    if is_sum:
        factors["1/rows"] = "{} is|are averaged over the rows, not summed"
        factors["1/first"] = "{} is|are averaged over the first axis, not summed"
    factor = factor.replace("first", "the first axis") if factor not in factors else factor
    if text := factors.get(factor, f"{{}} is|are off by a factor of {factor}"):
        yield text


def _cause(
    named: dict[Term, str], change: Change, right: dict[Term, float], shape: Sequence[int]
) -> str:
    """Name the mistake of a gradient; empty if it has no name."""
    key = ", ".join(sorted(f"{factor} {term}" for term, factor in named.items()))
    key = key.replace(f"({next(iter(right)).inner})", "(*)")
    if not change.words and key in _KNOWN:
        return _KNOWN[key]
    wanted = {_slot(term): (term, "-" * (value < 0)) for term, value in right.items()}
    slots = [_slot(term) for term in named]
    if -1 in slots or len({*slots}) < len(slots):
        return ""
    found = dict[str, list[int]]()
    for slot, (term, factor) in zip(slots, named.items(), strict=True):
        said = [f"{change.words} in {{}}"] * (term.changed > 0)
        if slot in wanted:
            said += _deviations(term, factor, *wanted[slot], shape)
        else:
            said.append("{} is|are subtracted in dx")
        for template in said:
            found.setdefault(template, []).append(slot)
    if missing := sorted(wanted.keys() - slots):
        found["{} is|are missing from dx"] = missing
    sentences = []
    for template, places in found.items():
        # g has no projection.
        able = {*slots} - ({0} if "projection" in template else set())
        if {*places} >= able and not template.endswith(" dx"):
            sentences.append(template)
            continue
        sentence = agree(template, [_SLOTS[place] for place in sorted(places)])
        if template.startswith("{}") and "missing" not in template:
            sentence = sentence.replace("the mean of g and the xhat term", "the two means")
        sentences.append(sentence + " in dx" * (not sentence.endswith(" dx")))
    return "; ".join(sentences)


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
        said.insert(
            0, f"mean and variance are taken over axis {over}, not over axis {axes[-1]}{batch}"
        )
    key = ", ".join(sorted(f"{factor} {term}" for term, factor in post.items()))
    more = post.get("xhat", "0")
    if usual | {"xhat": more} == post != usual:
        missing = float(more) == -offset
        added = f"the forward adds {more} to gamma: say --gamma-offset {more}"
        said.append("gamma_offset is not added to gamma" if missing else added)
    elif post != usual:
        said.append(_KNOWN.get(key, f"y is {key}"))
    return "; ".join(
        words + " in the forward" * ("--" not in words and "axis" not in words) for words in said
    )


# ---- where no formula is found ----


def locate(actual: Array, value: Array, bound: Array, shape: Shape) -> str:
    """Say which single element, row or column is wrong, and by which factor; empty if more is wrong."""
    wrong = excess(actual, value, 2 * bound) > 1
    place = name_pattern(wrong.reshape(shape if actual.ndim > 1 else actual.shape))
    # The other rows and elements must confirm the formula, so most of them must be right.
    most = {"element": 8, "column": 8, "row": 3, "last": 3}.get(place.split()[0], np.inf)
    if not wrong.any() or most * wrong.sum() > wrong.size:
        return ""
    about, a, v = (
        f"{'the ' * place.startswith('last')}{place} of {{}} is|are",
        actual[wrong],
        value[wrong],
    )
    if not a.any():
        return f"{about} zero"
    factor = float(a @ v) / float(v @ v) if v.any() else 0.0
    # A factor with few digits was probably written in the code.
    meant = abs(factor - float(f"{factor:.4g}")) < 1e-8 * abs(factor)
    if not meant or not np.allclose(a, factor * v, rtol=0, atol=1e-6 * float(np.abs(v).max())):
        return f"{about} wrong, the rest is not"
    if abs(factor + 1) < 1e-6:
        return f"{about[:-6]}has|have the wrong sign"
    return f"{about} off by a factor of {factor:.4g}"


def describe(dx: Array, expected: Expected, changed: dict[str, Array], noise: float) -> str:
    """Say what is known of a dx that was not read back; `changed` has it after a change of one thing."""
    near = _SLACK * max(noise, 2.0**-52) * float(np.max(np.abs(dx), initial=0.0))
    facts = {
        "of sum zero over a row": dx.mean(-1),
        "orthogonal to xhat": (dx * expected.xhat).mean(-1),
    }
    said = ["not " * bool(np.max(np.abs(a)) > near) + words for words, a in facts.items()]
    moved = [name for name, other in changed.items() if np.max(np.abs(dx - other)) > near]
    there = f"it depends on {', '.join(moved) or 'dy alone'}"
    return f"{', '.join(said)}; {there}" + ", not on x: is its cache an old one?" * (
        "x" not in moved
    )
