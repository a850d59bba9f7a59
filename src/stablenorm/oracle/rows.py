"""
Rows in exact arithmetic: each quantity is written as on paper, as multiples of ``rstd`` and of 1.

All of a row but ``rstd`` is rational: with ``rstd**2 = 1 / (var + eps)``, odd powers of rstd are
rational multiples of it and even powers are rational. So ``xhat = centered * rstd``, and with
``g = (gamma + gamma_offset) * dy``

    dx = rstd (g - mean(g) - centered (rstd**2 mean(g * centered)))

is rstd times a rational. RMS norm has ``mean(x)`` and ``mean(g)`` set to zero in the same lines.
What a mask leaves out is zero in every vector, and ones are subtracted only where the mask is True.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.oracle.rounding import Array, Interval, Vector, read, require
from stablenorm.oracle.surds import RATIONAL, Part, T, enclose, exactly, settle


class Row:
    """
    One row: its statistics, and the vectors given for it by their names.

    `xhat` and `project` leave a factor rstd out, so that they are rational.
    """

    def __init__(self, inputs: "Inputs", index: int):
        self._inputs, self._index = inputs, index
        self.layer = inputs.kind == "layer"
        # 1 where the mask is True, 0 elsewhere; and how many elements that leaves, 1 if none.
        self.ones = self["where"]
        self.n = self.ones.total() or Fraction(1)
        self.mean = self["x"].total() / self.n if self.layer else Fraction(0)
        self.centered = self.center(self["x"])
        self.var = self.centered.times(self.centered).total() / self.n
        # rstd**2; where there is none, 1: what a mask leaves out is 0 whatever it is.
        self.square = 1 / (self.var + inputs.eps or Fraction(1))
        # xhat / rstd.
        self.xhat = self.centered

    def __contains__(self, name: str) -> bool:
        return name in self._inputs.vectors or name in self._inputs.matrices

    def __getitem__(self, name: str) -> Vector:
        found = self._inputs.vectors.get(name)
        return read(self._inputs.matrices[name][self._index]) if found is None else found

    def center(self, v: Vector) -> Vector:
        """Return ``v - mean(v)``, for RMS norm v."""
        return v.plus(self.ones.scaled(-v.total() / self.n)) if self.layer else v

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean(a * b)``."""
        return a.times(b).total() / self.n

    def project(self, v: Vector) -> Vector:
        """Return ``v - mean(v) - xhat * mean(v * xhat)``."""
        v = self.center(v)
        return v.plus(self.xhat.scaled(-self.square * self.inner(v, self.centered)))

    def times_rstd(self, v: Vector) -> Part:
        """Return ``v * rstd``."""
        return v, self.square


class Magnitudes(Row):
    """A row whose quantities, each part in magnitude, are S of the contract."""

    def _spread(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v|``, for RMS norm ``|v|``."""
        v = v.magnitudes()
        return v.plus(self.ones.scaled(v.total() / self.n)) if self.layer else v

    def __init__(self, inputs: "Inputs", index: int):
        super().__init__(inputs, index)
        # (|xhat| + mean|xhat|) / rstd.
        self.xhat = self._spread(self.centered)

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean|a * b|``."""
        return super().inner(a.magnitudes(), b.magnitudes())

    def project(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|``."""
        inner = self.square * self.inner(self.center(v), self.centered)
        return self._spread(v).plus(self.xhat.scaled(inner))


# ---- the quantities: of each row, or summed over all rows ----

Parts = Iterable[Part]


def _y(row: Row) -> Parts:
    yield row.times_rstd(row["scale"].times(row.xhat))
    if "beta" in row:
        yield row["beta"].times(row.ones), RATIONAL


# Summands of dx, by argument. The derivatives of mean and rstd are 1 / n and -rstd**2 xhat / n.
ADDED: dict[str, Callable[[Row, Vector], Part]] = {
    "dsum": lambda _, v: (v, RATIONAL),
    "dmean": lambda row, v: (row.ones.scaled(v.total() / row.n), RATIONAL),
    "drstd": lambda row, v: row.times_rstd(row.xhat.scaled(-v.total() * row.square / row.n)),
}


def _dx(row: Row) -> Parts:
    yield row.times_rstd(row.project(row["scale"].times(row["dy"])))
    yield from (added(row, row[name]) for name, added in ADDED.items() if name in row)


def _jvp(row: Row, x: str, gamma: str, beta: str) -> Parts:
    """Yield the tangent of y, given the names of those of x, gamma, beta."""
    # The Jacobian of xhat is symmetric: the tangent of xhat is rstd project(tx).
    yield row.times_rstd(row["scale"].times(row.project(row[x])))
    if gamma in row:
        yield row.times_rstd(row[gamma].times(row.xhat))
    if beta in row:
        yield row[beta].times(row.ones), RATIONAL


# Second order: the cotangents ddx, ddgamma, ddbeta of dx, dgamma, dbeta pulled back to dy, x, gamma.
# The sum that is differentiated is
#     L = <ddx, rstd project(g)> + <ddgamma * dy, xhat> + <ddbeta, dy>.
# project is symmetric, so that the gradient with respect to dy is a jvp.


def _double_dx(row: Row) -> Parts:
    dy, u = row["dy"], row["ddx"]
    g = row["scale"].times(dy)
    if "ddgamma" in row:
        yield row.times_rstd(row.project(row["ddgamma"].times(dy)))
    # With a = mean(u xhat), b = mean(g xhat), m = mean(u (g - mean(g))), and so for u centered:
    # <u, rstd project(g)> = n rstd (m - a b), and m - a b = mean(u project(g)). The gradients of
    # rstd, a and b are -rstd**2 xhat / n, rstd project(u) / n and rstd project(g) / n. Together:
    # -rstd**2 (xhat mean(u project(g)) + project(u) b + project(g) a).
    pu, pg = row.project(u), row.project(g)
    u, g = row.center(u), row.center(g)
    across = pu.scaled(row.inner(g, row.centered)).plus(pg.scaled(row.inner(u, row.centered)))
    yield row.times_rstd(row.xhat.scaled(row.inner(u, pg)).plus(across).scaled(-row.square))


class Quantity(NamedTuple):
    """How a quantity is made of a row, whether summed over rows, and the argument it needs."""

    parts: Callable[[Row], Parts]
    summed: bool
    needs: str


NORM = {
    "y": Quantity(_y, False, "x"),
    "dx": Quantity(_dx, False, "dy"),
    "dgamma": Quantity(lambda r: [r.times_rstd(r["dy"].times(r.xhat))], True, "dy"),
    "dbeta": Quantity(lambda r: [(r["dy"], RATIONAL)], True, "dy"),
    "ty": Quantity(partial(_jvp, x="tx", gamma="tgamma", beta="tbeta"), False, "tx"),
}
DOUBLE_BACKWARD = {
    "ddy": Quantity(partial(_jvp, x="ddx", gamma="ddgamma", beta="ddbeta"), False, "ddx"),
    "dx": Quantity(_double_dx, False, "dy"),
    "dgamma": Quantity(lambda r: [r.times_rstd(r["dy"].times(r.project(r["ddx"])))], True, "dy"),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """
    The data that quantities are made of, all float64.

    A row has `n` elements, masked ones too. `matrices` has, by name, what differs from row to row:
    (rows, n) or (rows, 1). `vectors` has what all rows share, and under the names of summed
    quantities what is added to those.
    """

    kind: str
    eps: Fraction
    n: int
    matrices: dict[str, Array]
    vectors: dict[str, Vector]
    quantities: dict[str, Quantity]

    def rows(self, name: str, block: int, kind: type[Row] = Row) -> Iterator[Row]:
        """Yield the rows that one block is made of."""
        all_rows = range(len(self.matrices["x"]))
        return (kind(self, i) for i in (all_rows if self.quantities[name].summed else [block]))

    def parts(self, name: str, block: int, kind: type[Row] = Row) -> Parts:
        """Yield the parts of one block."""
        make, _, needed = self.quantities[name]
        require(needed in self.matrices, f"{needed} must be given for {name}, got None")
        if name in self.vectors:
            yield self.vectors[name], RATIONAL
        for row in self.rows(name, block, kind):
            yield from make(row)

    def undefined(self, name: str, block: int) -> Array:
        """Tell which elements of a block have no value: those that count, without variance, eps."""
        found = np.zeros(self.n, bool)
        # dbeta, which is a sum of dy, is made without rstd.
        if self.eps == 0 and name != "dbeta":
            for row in self.rows(name, block):
                if row.var == 0:
                    found |= np.array(row.ones.integers) != 0
        return found

    def sizes(self, name: str, block: int) -> list[Interval]:
        """Return S of the contract: the sum of the magnitudes that each element is made of."""
        parts = self.parts(name, block, Magnitudes)
        return enclose(((v.magnitudes(), square) for v, square in parts), self.n)

    def decide(self, name: str, verdict: Callable[[int, Interval | None], T | None]) -> list[T]:
        """Return the verdict on each element, given its place and an enclosure, if defined."""
        found: list[Any] = []
        for block in range(1 if self.quantities[name].summed else len(self.matrices["x"])):
            intervals = enclose(self.parts(name, block), self.n)
            undefined = self.undefined(name, block).tolist()
            places = range(len(found), len(found) + self.n)
            for place, interval, nothing in zip(places, intervals, undefined, strict=True):
                found.append(verdict(place, None if nothing else interval))
            if left_open := [place for place in places if found[place] is None]:
                numbers = exactly(self.parts(name, block), [i % self.n for i in left_open])
                for place, number in zip(left_open, numbers, strict=True):
                    found[place] = settle(number, partial(verdict, place))
        return found
