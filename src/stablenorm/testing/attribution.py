"""
Where the digits went: the error of an output, split into the intermediates that it came through.

The computed xhat of a row is ``(xhat - a) (1 + p)`` and a rest, with one number a, the error of the
mean times rstd, and one number p, the relative error of rstd. Least squares find both from y alone,
in units of the roundings that every element has of its own; so they find the errors of mean(g) and
mean(g xhat) from dx. A number counts if it exceeds five times its standard error.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import format_of
from stablenorm.records import Array
from stablenorm.testing.limits import Limits, half_ulp

# A row of fewer elements cannot tell its statistics from roundings.
LEAST = 8
# Standard errors beyond which a number is no rounding of others: one in a million by chance.
SURE = 5.0
# Rows that are examined: enough to see what all rows share.
ROWS = 64


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
    # Unsure parts belong to the rest.
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
    (c, d), errors = pairs(kept, parts)
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


def pairs(rows: list[Row], names: tuple[str, ...]) -> tuple[Array, Array]:
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


def in_sums(rows: list[Row], limits: Limits) -> Array:
    """Return the error of dgamma that comes with xhat, as rows of y show it, if they are all rows."""
    known = np.zeros(limits.n)
    if len(rows) == limits.rows:
        for row in rows:
            off = row.sure("mean") + row.sure("rstd") * limits.xhat[row.place]
            known += limits.dy[row.place] * off
    return known
