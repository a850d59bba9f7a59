"""
Name the mistake in a wrong output, by trying the usual ones.

A cause is named only if it explains *every* element to rounding, and nothing simpler or as simple
does. The simplest is the right formula with one element, column or row that is wrong. A cause changes
what goes into dx = rstd (g - mean(g) - xhat mean(g xhat)): rstd, a mean, a term, the place of gamma.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from stablenorm.check.closed_form import Expected, Judged, excess, row_mean, statistics
from stablenorm.check.differences import name_pattern
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32
from stablenorm.types import Array

# Words for a mistake, with {} in place of the output's name; the output that it would make; its bound.
Guess = tuple[str, Array, Array]


def _causes(name: str, of: Expected) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield words for each mistake, without " in {}", and the parts that replace the right ones."""
    case, var, rstd, is_layer = of.case, of.var, of.rstd, of.is_layer
    eps, per_less = case.eps, case.n / max(case.n - 1, 1)
    if is_layer:
        for biased in (var * per_less + eps, (var + eps) * per_less):
            yield "the variance is divided by n - 1", {"rstd": biased**-0.5}
        yield "the mean of x is missing from xhat", {"mean": 0.0}
    else:
        _, s, mean = statistics(case.rows(case.x), eps)
        yield "the mean of x is subtracted", {"mean": row_mean(of.centered)}
        # A layer norm altogether.
        yield "the mean of x is subtracted", {"mean": mean, "rstd": 1 / s}
    yield "eps is missing from rstd", {"rstd": var**-0.5}
    size = "var" if is_layer else "mean(x^2)"
    yield f"rstd is 1 / (sqrt({size}) + eps)", {"rstd": 1 / (var**0.5 + eps)}
    yield "eps was applied twice", {"rstd": (var + 2 * eps) ** -0.5}
    yield "rstd is squared", {"rstd": rstd * rstd}
    yield "rstd is the standard deviation itself", {"rstd": 1 / rstd}
    yield "rstd is the variance itself", {"rstd": var}
    yield "rstd is the variance plus eps", {"rstd": var + eps}
    for narrow in (FLOAT32.dtype, BFLOAT16.dtype, FLOAT16.dtype):
        yield f"rstd is kept in {narrow}", {"rstd": rstd.astype(narrow)}
        if is_layer:
            yield f"the mean is kept in {narrow}", {"mean": of.mean.astype(narrow)}
    if case.gamma_offset:
        yield "gamma_offset is not added to gamma", {"before": of.gamma - case.gamma_offset}
    if name != "dx":
        return
    shape, terms = case.x.shape, [("third", "the xhat term", of.g * of.xhat)]
    if is_layer:
        terms.append(("second", "the mean of g", of.g))
    else:
        yield "the mean of g is subtracted", {"second": 1.0}
        # A factor of rstd short, or one too many: rstd^3 goes with x.
        yield "the xhat term lacks rstd", {"third": of.s}
        yield "the xhat term has rstd twice", {"third": of.rstd}
    for term, words, product in terms:
        yield f"{words} is missing from {{}}", {term: 0.0}
        yield f"{words} is subtracted twice", {term: 2.0}
        yield f"{words} is added, not subtracted", {term: -1.0}
        yield f"{words} is divided by n - 1", {term: per_less}
        yield f"{words} is not divided by n", {term: case.n}
        for axes in (slice(1), slice(-1)):
            mean = product.reshape(shape).mean(tuple(range(len(shape))[axes]), keepdims=True)
            times = np.broadcast_to(mean, shape).reshape(product.shape) / row_mean(product)
            yield f"{words} is a mean over the leading axes, not the last, in {{}}", {term: times}
    yield "rstd is missing from {}", {"factor": 1 / of.rstd}
    yield "rstd is applied twice", {"factor": of.rstd}
    yield "{} has the wrong sign", {"factor": -1.0}
    yield "gamma is applied twice", {"before": of.gamma**2}
    yield "gamma is not applied", {"before": 1.0}
    yield "gamma is applied after the projection", {"before": 1.0, "after": of.gamma}


def diagnose(judged: Iterable[Judged]) -> tuple[str, ...]:
    """Name the mistakes in wrong outputs; leave out outputs whose mistake is not certain."""
    said: dict[str, list[str]] = {}
    for output in judged:
        # Rows of one element have dx = 0, whatever the formula.
        if output.expected.case.n < 2 or not np.isfinite(output.actual).all():
            continue
        if words := _explained(output):
            # Words that fit several outputs are said once: "... in dx and dgamma".
            shown = "the forward" if output.name == "y" else output.name
            key = words if words.endswith(" in {}") else words.replace("{}", shown)
            said.setdefault(key, []).append(shown)
    return tuple(words.replace("{}", " and ".join(names)) for words, names in said.items())


def _explained(judged: Judged) -> str:
    """Name the mistake in one output, (rows, n) or (n,) in float64; empty if it is not certain."""
    name, of, actual = judged.name, judged.expected, judged.actual
    value, bound = judged.value, judged.plain
    if alone := _fault(actual, value, bound, of.case.x.shape):
        return alone
    guesses = (_of_sum if name in ("dgamma", "dbeta") else _changed)(name, of, bound)
    explained = {words for words, *guess in guesses if _equal(actual, *guess)}
    # Two equally simple causes: neither is certain.
    if explained:
        return explained.pop() if len(explained) == 1 else ""
    # Fewer than 5 elements can be multiples by chance.
    if actual.size < 5 or not value.any():
        return ""
    factor = float(np.vdot(actual, value) / np.vdot(value, value))
    if _equal(actual, factor * value, 2 * max(1.0, abs(factor)) * bound):
        close = f"1 {factor - 1:+.1e}" if abs(factor - 1) < 1e-5 else f"{factor:.6g}"
        return f"{{}} is off by a factor of {close}"
    powers = _of_powers(of, actual) if name == "dx" else ()
    return next((words for words, *guess in powers if _equal(actual, *guess)), "")


def _of_powers(of: Expected, actual: Array) -> Iterator[Guess]:
    """Fit dx = r^a g - r^b mean(g) - r^c xhat mean(g xhat), where r is rstd, with eps or without."""
    g, minus_mean = of.g, np.broadcast_to(-row_mean(of.g), of.g.shape)
    terms = {"g": g, "the mean of g": minus_mean, "the xhat term": -of.xhat * row_mean(g * of.xhat)}
    if not of.is_layer:
        del terms["the mean of g"]
    matrix = np.stack([*terms.values()], axis=-1)
    if not np.isfinite(matrix).all():
        return
    fit = np.linalg.pinv(matrix) @ actual[..., None]
    for rstd, end in ((of.rstd, ""), (of.var**-0.5, " without eps")):
        # All rows have the same powers; a row with rstd 1 has any.
        powers = np.round(np.nanmedian(np.log(fit[..., 0]) / np.log(rstd), axis=0)) + 0.0
        scales = [rstd**power for power in powers]
        made = sum(scale * matrix[..., i] for i, scale in enumerate(scales))
        size = np.max(scales, axis=0) * np.max(np.abs(powers), initial=1)
        has = [f"{t} has rstd^{p:.0f}{end}" for t, p in zip(terms, powers, strict=True) if p != 1]
        words = " and ".join(has) + " in place of rstd in {}"
        if len(has) == len(terms) and len(set(powers)) == 1:
            words = f"{{}} has rstd^{powers[0]:.0f}{end} in place of rstd"
        yield words, made, size * of.dx_bounds(of.g, of.xhat)[0]


def _equal(actual: Array, value: Array, bound: Array) -> bool:
    # Twice the bound: it covers the program's rounding, and the checker rounds as well.
    return not (excess(actual, value, 2 * bound) > 1).any()


def _changed(name: str, of: Expected, slack: Array) -> Iterator[Guess]:
    """Yield the output that each cause would produce."""
    right = {"rstd": of.rstd, "mean": of.mean, "before": of.gamma, "after": 1.0, "factor": 1.0}
    right |= {"second": float(of.is_layer), "third": 1.0}
    for words, wrong in _causes(name, of):
        said = words + " in {}" * ("{}" not in words)
        rstd, mean, before, after, factor, second, third = (right | wrong).values()
        # Add the difference of the means: rounding a mean once more would hide the change.
        xhat = (of.centered + (of.mean - mean)) * rstd
        grown = slack * np.max(np.abs(rstd / of.rstd), initial=1.0)
        if name == "y":
            yield said, before * xhat + of.beta, grown
        elif name == "dx":
            g, most = of.dy * before, np.maximum(np.abs(second), np.abs(third))
            bound = of.dx_bounds(g, xhat)[0] * np.maximum(1.0, most)
            # Divide by s at the end, so that no intermediate overflows.
            scale = rstd / of.rstd * factor * after / of.s
            terms = g - second * row_mean(g) - third * (xhat * row_mean(g * xhat))
            yield said, scale * terms, np.abs(scale) * bound
        # dgamma does not contain gamma.
        elif "before" not in wrong:
            yield said, np.sum(of.dy * xhat, axis=0), grown


def _of_sum(name: str, of: Expected, slack: Array) -> Iterator[Guess]:
    """Yield the dgamma or dbeta that each mistake would produce."""
    own = of.dy * of.xhat if name == "dgamma" else of.dy
    total, rows = own.sum(axis=0), len(own)
    yield "{} is zero", 0 * total, 0 * total
    yield "{} has the wrong sign", -total, slack
    yield "{} contains gamma", of.gamma * total, np.abs(of.gamma) * slack
    value, bound, *_ = of.bounds_of("dbeta" if name == "dgamma" else "dgamma", slack.dtype)
    yield "dgamma and dbeta are swapped", value, bound
    if name == "dgamma":
        yield "{} lacks rstd", np.sum(of.dy * of.centered, axis=0), slack * np.max(of.s)
        if of.is_layer:
            x = of.case.rows(of.case.x)
            size = np.max(np.max(np.abs(x)) + of.s)
            yield "{} is made of x, not of xhat", np.sum(of.dy * x, axis=0), slack * size
        yield from _changed(name, of, slack)
    if rows < 2:
        return
    yield "{} is averaged over the rows, not summed", total / rows, slack
    for row, terms in enumerate(own):
        which = "the last row" if row == rows - 1 else f"row {row}"
        yield f"{which} is not accumulated in {{}}", total - terms, slack
        yield f"{which} is accumulated twice in {{}}", total + terms, slack


def _fault(actual: Array, value: Array, bound: Array, shape: tuple[int, ...]) -> str:
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
