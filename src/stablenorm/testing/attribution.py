"""
Where the digits went: the error of an output, split into the intermediates that it came through.

The computed xhat of a row is ``(xhat - a) (1 + p)`` and a rest, with one number a, the error of the
mean times rstd, and one number p, the relative error of rstd. Least squares find both from y alone,
in units of the roundings that every element has of its own; so they find the errors of mean(g) and
mean(g xhat) from dx. A number counts if it exceeds five times its standard error.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import BFLOAT16, FLOAT16, Format, format_of
from stablenorm.testing.limits import Limits, half_ulp
from stablenorm.types import Array

# A row of fewer elements cannot tell its statistics from roundings.
LEAST = 8
# Standard errors beyond which a number is no rounding of others: one in a million by chance.
SURE = 5.0
# Rows that are examined: enough to see what all rows share.
ROWS = 64
# Below a twentieth of the squared error, nothing is won by mending a part.
SMALL = 0.05
NAMES = {
    "mean": "the mean",
    "rest": "roundings of single elements",
    "xhat": "the mean in xhat",
    "statistics": "the statistics of its rows",
    "last": "the last rounding",
    "order": "the sum over rows",
    "factor": "a common factor",
}
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


class Row(NamedTuple):
    """
    What least squares found in one row: numbers and their standard errors, by name.

    `shares` are the parts of the squared error. `excess` is what no number explains, in units of the
    roundings that every element has of its own.
    """

    place: int
    numbers: dict[str, tuple[float, float]]
    shares: dict[str, float]
    excess: Any = 0.0

    def sure(self, name: str) -> float:
        """Return a number if it is more than chance, or 0."""
        number, error = self.numbers.get(name, (0.0, 1.0))
        return number if abs(number) > SURE * error else 0.0


def fit(index: int, error: Array, columns: dict[str, Array], noise: Array) -> Row:
    """Split the errors of a row into multiples of columns and a rest."""
    # Squares of smaller numbers vanish.
    names = [name for name, column in columns.items() if (np.abs(column) / noise).max() > 1e-100]
    if not names:
        return Row(index, {}, {"rest": 1.0}, np.abs(error) / noise)
    matrix = np.stack([columns[name] for name in names], axis=-1) / noise[:, None]
    # Columns of the same length, lest one be taken for a multiple of the others.
    lengths = np.sqrt((matrix**2).sum(axis=0))
    found, _, rank, _ = np.linalg.lstsq(matrix / lengths, error / noise, rcond=1e-9)
    rest = error / noise - matrix / lengths @ found
    # A rounding is spread evenly over its bound, whose square is three times the mean of its own.
    spread = max(1 / 3, float(rest @ rest) / max(len(rest) - rank, 1))
    errors = np.sqrt(
        np.diag(np.linalg.pinv(matrix.T @ matrix / np.outer(lengths, lengths))) * spread
    )
    numbers = {
        name: (float(f / length), float(e / length))
        for name, f, e, length in zip(names, found, errors, lengths, strict=True)
    }
    parts = {name: columns[name] * numbers[name][0] for name in names}
    row = Row(index, numbers, {})
    # What is not sure belongs to the rest.
    sure = {name: part for name, part in parts.items() if row.sure(name)}
    squares = {name: float(part @ part) for name, part in sure.items()}
    left = error - sum(sure.values(), np.zeros_like(error))
    squares["rest"] = float(left @ left)
    total = sum(squares.values()) or 1.0
    shares = {name: square / total for name, square in squares.items()}
    return row._replace(shares=shares, excess=np.abs(left) / noise)


def _columns(name: str, limits: Limits, of_y: Mapping[int, Row]) -> dict[str, Array]:
    """Return the errors of y or dx, (rows, n), that an error of one in each intermediate makes."""
    r, xhat = limits.rstd, limits.xhat
    if name == "y":
        mean = {"mean": limits.gamma + 0 * xhat} if limits.is_layer else {}
        return mean | {"rstd": limits.gamma * xhat}
    g, mean_g, slope = limits.terms_of_dx()
    # The third power of rstd is no straight line: y tells where on it an rstd far off lies.
    p = np.array([of_y[i].sure("rstd") if i in of_y else 0.0 for i in range(limits.rows)])[:, None]
    mean = {"mean(g)": r + 0 * xhat} if limits.is_layer else {}
    rstd = r * (g - mean_g - (3 + 3 * p + p**2) * xhat * slope)
    return mean | {"mean(g xhat)": r * xhat, "rstd": rstd}


def noise_of(name: str, exact: Array, limits: Limits, dtype: Any) -> Array:
    """Return the roundings that every element of y or dx has of its own."""
    own = limits.elements_of_y(dtype) if name == "y" else limits.rstd * limits.elements_of_dx()
    return np.asarray(own + half_ulp(exact, format_of(dtype)))


def split_rows(
    name: str, error: Array, noise: Array, limits: Limits, worst: int, of_y: Mapping[int, Row]
) -> list[Row]:
    """Split the errors of rows of y or dx, the worst row first; rows that cannot be split are left out."""
    columns = _columns(name, limits, of_y)
    sizes = [np.abs(part) / noise for part in (error, *columns.values())]
    # Squares of larger numbers overflow.
    can = np.all([(size < 1e100).all(axis=-1) for size in sizes], axis=0) & (limits.n >= LEAST)
    chosen = [worst, *(i for i in range(limits.rows) if i != worst)][:ROWS]
    rows = [
        fit(i, error[i], {key: column[i] for key, column in columns.items()}, noise[i])
        for i in chosen
        if can[i]
    ]
    if name == "dx":
        # An error of the mean is in the variance, and so in rstd.
        means = {i: {"mean": row.numbers["mean"]} for i, row in of_y.items() if row.sure("mean")}
        rows = [row._replace(numbers=means.get(row.place, {}) | row.numbers) for row in rows]
    return _shifted(rows, limits, of_y) if name == "dx" and limits.is_layer else rows


def _shifted(rows: list[Row], limits: Limits, of_y: Mapping[int, Row]) -> list[Row]:
    """
    Blame xhat for the errors of mean(g) and mean(g xhat) if one shift of xhat in each row gives both.

    A shift a adds a mean(g xhat) to dx / rstd, and xhat times a mean(g). Three rows show that it is no
    chance; fewer, if y has a shift too.
    """
    parts = "mean(g)", "mean(g xhat)"
    kept = [row for row in rows if all(part in row.numbers for part in parts)]
    in_y = all(row.place in of_y and of_y[row.place].sure("mean") for row in kept)
    if not kept or (len(kept) < 3 and not in_y):
        return rows
    at = [row.place for row in kept]
    g, *means = limits.terms_of_dx()
    mean_g, slope = (mean[at, 0] for mean in means)
    (c, d), errors = _pairs(kept, parts)
    size, blur = np.hypot(mean_g, slope), np.hypot(*errors)
    shift, across = (c * slope + d * mean_g) / size**2, np.abs(c * mean_g - d * slope) / size
    # Eight roundings: those of the two means themselves. The shift of both xhat of the xhat term.
    allowed = SURE * blur + 8 * limits.u * np.abs(g).mean(axis=-1)[at] + shift**2 * abs(mean_g)
    if not (across <= allowed).all() or not (np.abs(shift) * size > 2 * allowed).any():
        return rows
    changed = {}
    for row, a, error in zip(kept, shift, blur / size, strict=True):
        shares = {name: share for name, share in row.shares.items() if name not in parts}
        shares["xhat"] = sum(row.shares.get(part, 0.0) for part in parts)
        numbers = row.numbers | {"mean": (-float(a), float(error))}
        changed[row.place] = row._replace(numbers=numbers, shares=shares)
    return [changed.get(row.place, row) for row in rows]


def _pairs(rows: list[Row], names: tuple[str, ...]) -> tuple[Array, Array]:
    """Return the numbers of these names in rows, and their standard errors, each (names, rows)."""
    pairs = np.array([[row.numbers[name] for row in rows] for name in names])
    return pairs[..., 0], pairs[..., 1]


def split_sums(error: Array, exact: Array, known: Array, dtype: Any, roundings: Array) -> Row:
    """
    Split the errors of dgamma or dbeta: statistics, a common factor, the order of sums, the last rounding.

    `known` is the error that comes with xhat; `roundings` are those of the whole sum of magnitudes.
    """
    last = half_ulp(exact, format_of(dtype))
    left = error - known
    if not left @ left < error @ error:
        known, left = 0 * error, error
    enough = len(error) >= LEAST and np.abs(exact).max() > 0
    row = fit(0, left, {"factor": exact}, last) if enough else Row(0, {}, {"rest": 1.0})
    factor = row.sure("factor")
    rest = left - factor * exact
    excess = np.abs(rest) / np.where(roundings > 0, roundings, 1)
    # Twice the bound of the last rounding: the sums were off before it, by more than their terms?
    name = "last" if (np.abs(rest) <= 2 * last).all() else "order" if (excess > 4).any() else "rest"
    parts = {"statistics": known, "factor": factor * exact, name: rest}
    squares = {name: float(part @ part) for name, part in parts.items()}
    total = sum(squares.values()) or 1.0
    shares = {name: square / total for name, square in squares.items()}
    return row._replace(shares=shares, excess=excess)


class Cause(NamedTuple):
    """What explains a number in all rows: words, the advice, and the name of a mistake if it is one."""

    words: str
    advice: str
    name: str = ""


def rounded(values: Array, form: Format) -> Array:
    """Return float64 values rounded to a format."""
    return np.asarray(values.astype(form.dtype).astype(np.float64))


def cause_of_mean(rows: list[Row], limits: Limits) -> Cause | None:
    """Name what is wrong with the mean in all rows; None where no row shows an error."""
    rows = [row for row in rows if "mean" in row.numbers]
    if not any(row.sure("mean") for row in rows):
        return None
    at = [row.place for row in rows]
    r, m = limits.rstd[at, 0], limits.mean[at, 0]
    (numbers,), (errors,) = _pairs(rows, ("mean",))
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


def fits(off: Array, expected: Array, allowed: Array) -> bool:
    """Tell whether errors are the expected ones in all rows, in one of them beyond doubt."""
    return bool(
        (np.abs(off - expected) <= allowed).all() and (np.abs(expected) > 2 * allowed).any()
    )


def cause_of_rstd(rows: list[Row], limits: Limits, eps: float) -> Cause | None:
    """Name what is wrong with rstd in all rows; None where no row shows an error."""
    rows = [row for row in rows if "rstd" in row.numbers]
    if not any(row.sure("rstd") for row in rows):
        return None
    at, n = [row.place for row in rows], limits.n
    r, m = limits.rstd[at, 0], limits.mean[at, 0]
    (off,), (errors,) = _pairs(rows, ("rstd",))
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
    # What the rounding of x**2 and mean**2 may take from the variance, relative to var + eps.
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


class Account(NamedTuple):
    """
    What the error of one output is made of.

    `where` says which row is meant, `shares` are the parts of the squared error, by name, and `causes`
    what is known of them; `hidden` says what the output cannot show.
    """

    where: str
    shares: Mapping[str, float]
    causes: Mapping[str, Cause | None]
    hidden: str = ""

    @property
    def mistakes(self) -> list[str]:
        """The names of the mistakes in parts that count."""
        named = ((part, cause) for part, cause in self.causes.items() if cause and cause.name)
        counts = ((p, c) for p, c in named if self.shares.get(p, 0.0) >= SMALL)
        return [f"{NAMES.get(part, part)}: {cause.name}" for part, cause in counts]

    def __str__(self) -> str:
        """Return a sentence, the largest part first, and the advice."""
        words, advice = list[str](), list[str]()
        for part, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            if share >= SMALL:
                much = "all of it" if share > 0.995 else f"{percent(share)} of it"
                cause = self.causes.get(part) or Cause("", "")
                name = "the rest" if part == "rest" and cause.words else NAMES.get(part, part)
                words.append(f"{much} is {name}" + f", {cause.words}" * bool(cause.words))
                advice += [cause.advice] * bool(cause.advice and cause.advice not in advice)
        said = "; ".join(words) + "." if words else "nothing is lost." * bool(self.shares)
        return " ".join(filter(None, [self.where, said, *advice, self.hidden]))


def account_of_rows(
    name: str, error: Array, exact: Array, limits: Limits, dtype: Any, worst: int, eps: float,
    of_y: Mapping[int, Row],
) -> tuple[Account, list[Row]]:  # fmt: skip
    """Account for the errors of y or dx, (rows, n); return the split rows too."""
    noise = noise_of(name, exact, limits, dtype)
    rows = split_rows(name, error, noise, limits, worst, of_y)
    if not rows or rows[0].place != worst:
        short = "rows are too short to split their errors" * (limits.n < LEAST)
        return Account(short or f"row {worst} is not finite", {}, {}), rows
    causes = {
        "rstd": cause_of_rstd(rows, limits, eps),
        "mean" if name == "y" else "xhat": cause_of_mean(rows, limits),
        "rest": cause_of_rest(rows[0], limits, noise),
    }
    for part in ("mean(g)", "mean(g xhat)") if name == "dx" else ():
        causes[part] = cause_of_means(part, rows, limits)
    ulp = 2 * half_ulp(np.abs(exact[worst]).max(), format_of(dtype))
    where = f"row {worst}, off by {digits(np.abs(error[worst]).max() / ulp)} ulp of its largest element:"
    hidden = ""
    if format_of(dtype).digits < limits.s.digits and rows[0].shares == {"rest": 1.0}:
        seen = SURE * rows[0].numbers.get("rstd", (0.0, 1.0))[1]
        hidden = f"Not visible in {np.dtype(dtype).name}: errors of rstd below {seen:.0e}, and alike of the mean."
    return Account(where, rows[0].shares, causes, hidden), rows


def account_of_sums(
    error: Array, exact: Array, actual: Array, limits: Limits, dtype: Any, known: Array, factor: Any
) -> Account:
    """Account for the errors of dgamma or dbeta, sums of dy times a factor."""
    if not np.isfinite(error + exact).all():
        return Account("not finite", {}, {})
    row = split_sums(error, exact, known, dtype, limits.u * np.abs(limits.dy * factor).sum(axis=0))
    number = row.numbers.get("factor", (0.0, 0.0))[0]
    causes = {
        "factor": Cause(f"{number:+.1e}", ADVICE["factor"]),
        "order": cause_of_order(actual, row, format_of(dtype), limits.rows),
        "statistics": Cause("", ADVICE["statistics"]),
    }
    return Account("", row.shares, causes)


def digits(value: float) -> str:
    """Write a number of ulp: two digits, and whole ones from 100 on, thousands apart."""
    return f"{value:,.0f}".replace(",", " ") if 100 <= value < 1e7 else f"{value:.2g}"


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
    (off,), (errors,) = _pairs(rows, (part,))
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


def in_sums(rows: list[Row], limits: Limits) -> Array:
    """Return the error of dgamma that comes with xhat, as rows of y show it, if they are all rows."""
    known = np.zeros(limits.n)
    if len(rows) == limits.rows:
        for row in rows:
            off = row.sure("mean") + row.sure("rstd") * limits.xhat[row.place]
            known += limits.dy[row.place] * off
    return known


def cause_of_rest(row: Row, limits: Limits, noise: Array) -> Cause | None:
    """Name what no statistic explains in a row of y or dx; None: roundings."""
    # These may add up to more than their bound, which leaves out a factor near 1.
    worst = float(np.max(row.excess))
    if worst <= 2:
        return None
    # Four roundings of x * a + b.
    allowed = noise[row.place] + 4 * limits.ue * limits.before[row.place] * np.abs(limits.gamma)
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


def percent(share: float) -> str:
    """Write a share in percent, two digits; a multiple of the whole from ten times on."""
    return (
        f"{digits(share)} times" if share >= 10 else f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
    )
