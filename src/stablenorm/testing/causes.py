"""Names of the mistakes that explain the numbers of all rows, and their cures."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import BFLOAT16, FLOAT16, Format
from stablenorm.records import Array
from stablenorm.testing.attribution import SURE, Row, pairs
from stablenorm.testing.limits import Limits, half_ulp

# The cure of each cause.
ADVICE = {
    "mean": "Keep the mean in two floats, or subtract the mean of x - mean too.",
    "sum": "Sum in blocks, in pairs or in a wider dtype.",
    "kept": "Keep it in float32.",
    "one-pass": "Take the mean of (x - mean)**2 in a second pass, or by Welford's updates.",
    "padding": "Set padded elements to 0 after the mean is subtracted, not before.",
    "divided": "Divide by n.",
    "eps": "Add eps to the variance, inside the root.",
    "scaled": "Subtract the mean before scaling, not after.",
    "missing": "Subtract it.",
    "centered": "Subtract mean(g) from g before its product with xhat, and sum in blocks or in pairs.",
    "statistics": "Mend mean and rstd first: y shows what is wrong with them.",
    "factor": "Look at rstd: all elements are off by one factor.",
    "order": "Add rows in blocks or in pairs, or keep the sum in two floats.",
}


class Cause(NamedTuple):
    """What explains a number in all rows: words, the advice, and the name of a mistake if it is one."""

    words: str
    advice: str
    name: str = ""


def cause_of_mean(rows: list[Row], limits: Limits) -> Cause | None:
    """Name what is wrong with the mean in all rows; None where no row shows an error."""
    rows = [row for row in rows if "mean" in row.numbers]
    if not any(row.sure("mean") for row in rows):
        return None
    at = [row.place for row in rows]
    r, m = limits.rstd[at, 0], limits.mean[at, 0]
    (numbers,), (errors,) = pairs(rows, ("mean",))
    scale = 1 + np.array([row.numbers.get("rstd", (0.0,))[0] for row in rows])
    # The error of the mean itself.
    off, blur = -numbers / scale / r, SURE * errors / abs(scale) / r
    allowed = blur + np.broadcast_to(limits.total(limits.shift), limits.rstd.shape)[at, 0] / r
    form = limits.s
    worst = np.abs(off / half_ulp(m, form) / 2).max()
    said = f"off by up to {digits(worst)} ulp of a {form.dtype.name}"
    for narrow in (BFLOAT16, FLOAT16):
        kept = rounded(m, narrow) - m
        if narrow.digits < form.digits and fits(off, kept, allowed):
            name = f"kept in {narrow.dtype.name}"
            return Cause(f"{said}: {name}", ADVICE["kept"], name)
    if (np.abs(off) <= half_ulp(m, form) * (1 + 2**-10) + blur).all():
        return Cause(f"{said}: rounded once, and then too short", ADVICE["mean"])
    # A sum in blocks errs by a few ulp.
    return Cause(said, ADVICE["mean" if worst < 4 else "sum"])


def cause_of_rstd(rows: list[Row], limits: Limits, eps: float) -> Cause | None:
    """Name what is wrong with rstd in all rows; None where no row shows an error."""
    rows = [row for row in rows if "rstd" in row.numbers]
    if not any(row.sure("rstd") for row in rows):
        return None
    at, n = [row.place for row in rows], limits.n
    r, m = limits.rstd[at, 0], limits.mean[at, 0]
    (off,), (errors,) = pairs(rows, ("rstd",))
    shifts = np.array([row.numbers.get("mean", (0.0,))[0] for row in rows])
    # An error of the mean adds its square to the variance.
    var = np.maximum(r**-2 - eps, 0)
    seen = var + (np.where(np.abs(off) < 0.5, shifts / (1 + off), 0) / r) ** 2
    blur, worst = SURE * errors, np.abs(off).max()
    said = f"off by up to {100 * worst:.3g} %" if worst > 1e-3 else f"off by up to {worst:.1e}"
    # rstd of a variance summed in blocks errs by less; no other sum meets a formula in all rows.
    close = blur + 8 * limits.u
    for words, advice, expected in _formulas(seen, m, r, eps, n, limits):
        if fits(off, expected / r - 1, close):
            return Cause(f"{said}: {words}", ADVICE[advice], words)
    left = np.abs(off - (seen + eps) ** -0.5 / r + 1)
    if (left <= close).all():
        own = "its own roundings" if worst < 8 * limits.u else "the square of the error of the mean"
        return Cause(f"{said}: {own}", "")
    if (left <= blur + limits.own_scale[at, 0]).all():
        return Cause(said, ADVICE["sum"])
    # The part that the rounding of x**2 and mean**2 may take from the variance, relative to var + eps.
    lost = (limits.additions(n) + 4) * limits.u * (var + 2 * m**2) * r**2
    # One rounding of mean**2 alone loses this much, but for luck.
    least = limits.u * (m * r) ** 2 / 32
    is_lost = (lost > 1e-3) & (np.abs(off) > least)
    if limits.is_layer and is_lost.any() and (np.abs((1 + off) ** -2 - 1) <= 2 * lost).all():
        name = "the variance is E[x**2] - mean**2"
        return Cause(f"{said}: {name}", ADVICE["one-pass"], name)
    return Cause(said, "")


def _formulas(
    var: Array, m: Array, r: Array, eps: float, n: int, limits: Limits
) -> Iterator[tuple[str, str, Array]]:
    """Yield the words, the advice and the rstd of mistakes that are often made."""
    yield "the variance is divided by n - 1", "divided", (var * n / (n - 1) + eps) ** -0.5
    yield "eps is missing", "eps", var**-0.5
    yield "eps is added outside the root", "eps", 1 / (var**0.5 + eps)
    for narrow in (BFLOAT16, FLOAT16):
        if narrow.digits < limits.s.digits:
            yield f"kept in {narrow.dtype.name}", "kept", rounded(r, narrow)
    for block in (
        2 ** math.ceil(math.log2(n)),
        *(-(-n // size) * size for size in (32, 64, 128, 256, 512)),
    ):
        if block > n:
            words = f"{block - n} padded elements count as zeros"
            yield words, "padding", (var + (block - n) / n * m**2 + eps) ** -0.5


def cause_of_means(part: str, rows: list[Row], limits: Limits) -> Cause | None:
    """Name what is wrong with mean(g) or mean(g xhat) in all rows; None where no row shows an error."""
    rows = [row for row in rows if part in row.numbers]
    if not any(row.sure(part) for row in rows):
        return None
    at, n = [row.place for row in rows], limits.n
    g, mean_g, slope = limits.terms_of_dx()
    exact = (mean_g if part == "mean(g)" else slope)[at, 0]
    size = np.abs(g if part == "mean(g)" else g * limits.xhat).mean(axis=-1)[at]
    # It is subtracted: what is too small leaves some of it.
    (off,), (errors,) = pairs(rows, (part,))
    # Eight roundings of a sum in blocks; the shift of xhat that y shows is in it too.
    shifts = np.array([row.numbers.get("mean", (0.0,))[0] for row in rows])
    allowed = SURE * errors + (8 * limits.u + abs(shifts)) * size
    for words, advice, factor in (
        ("which is missing", "missing", 1.0),
        ("which is divided by n - 1", "divided", -1 / max(n - 1, 1)),
        ("which is not divided by n", "divided", 1.0 - n),
    ):
        if fits(off, factor * exact, allowed * max(1.0, abs(factor))):
            return Cause(words, ADVICE[advice], words)
    worst = np.abs(off / size).max()
    key = "sum" if part == "mean(g)" else "centered"
    return Cause(f"off by up to {worst:.1e} of the mean of its terms' magnitudes", ADVICE[key])


def cause_of_rest(row: Row, limits: Limits, noise: Array, weight: Any) -> Cause | None:
    """Name what no statistic explains in a row of y or dx, xhat times a weight; None: roundings."""
    # These may add up to more than their bound, which leaves out a factor near 1.
    worst = float(np.max(row.excess))
    if worst <= 2:
        return None
    # Four roundings of x * a + b.
    allowed = noise[row.place] + 4 * limits.u_e * limits.before[row.place] * np.abs(weight)
    if (row.excess * noise[row.place] <= allowed).all():
        name = "x is scaled before the mean is subtracted"
        return Cause(name, ADVICE["scaled"], name)
    return Cause(f"up to {digits(worst)} times what roundings explain", "")


def cause_of_order(actual: Array, row: Row, form: Format, rows: int) -> Cause:
    """Name what is wrong with sums over rows, whose error is `row.excess` roundings of their magnitudes."""
    most = float(np.max(row.excess))
    for narrow in (BFLOAT16, FLOAT16):
        if narrow.digits < form.digits and np.array_equal(rounded(actual, narrow), actual):
            name = f"summed in {narrow.dtype.name}"
            return Cause(name, ADVICE["kept"], name)
    if most > rows + 4:
        return Cause("off by more than any order explains", "")
    # A sum in pairs rounds each term so often.
    is_long = most > math.log2(rows) + 1
    return Cause(f"{digits(most)} roundings of the sum of magnitudes", ADVICE["order"] * is_long)


def fits(off: Array, expected: Array, allowed: Array) -> bool:
    """Tell whether errors are the expected ones in all rows, in one of them beyond doubt."""
    return bool(
        (np.abs(off - expected) <= allowed).all() and (np.abs(expected) > 2 * allowed).any()
    )


def rounded(values: Array, form: Format) -> Array:
    """Return float64 values rounded to a format."""
    return np.asarray(values.astype(form.dtype).astype(np.float64))


def digits(value: float) -> str:
    """Write a number of ulp: two digits, and whole ones from 100 on, thousands apart."""
    return f"{value:,.0f}".replace(",", " ") if 100 <= value < 1e7 else f"{value:.2g}"
