"""
Rows in exact arithmetic: each quantity is written as on paper, as multiples of ``rstd`` and of 1.

All of a row but ``rstd`` is rational: with ``rstd**2 = 1 / (var + eps)``, odd powers of rstd are
rational multiples of it and even powers are rational. So ``xhat = centered * rstd``, and with
``g = (gamma + gamma_offset) * dy``

    dx = rstd (g - mean(g) - centered (rstd**2 mean(g * centered)))

is rstd times a rational. RMS norm has ``mean(x)`` and ``mean(g)`` set to zero in the same lines.
What a mask leaves out is zero in every vector, and ones are subtracted only where the mask is True.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np

from stablenorm.oracle.rounding import Array, Interval, Vector, read
from stablenorm.oracle.surds import Part, Surd, T, enclose, exactly, part


class Row:
    """
    One row: its statistics, and the vectors given for it by their names.

    `xhat` and `project` leave a factor rstd out, so that they are rational.
    """

    def __init__(self, inputs: "Inputs", index: int):
        self._inputs = inputs
        self._index = index
        self.layer = inputs.kind == "layer"

    def __contains__(self, name: str) -> bool:
        return name in self._inputs.vectors or name in self._inputs.matrices

    def __getitem__(self, name: str) -> Vector:
        found = self._inputs.vectors.get(name)
        return read(self._inputs.matrices[name][self._index]) if found is None else found

    @functools.cached_property
    def ones(self) -> Vector:
        """1 where the mask is True, 0 elsewhere."""
        return self["where"]

    @functools.cached_property
    def n(self) -> Fraction:
        """The number of elements of the row that are not masked; 1 if all are."""
        return self.ones.total() or Fraction(1)

    @functools.cached_property
    def mean(self) -> Fraction:
        """The mean; 0 for RMS norm."""
        return self["x"].total() / self.n if self.layer else Fraction(0)

    @functools.cached_property
    def centered(self) -> Vector:
        """``x - mean``."""
        return self.center(self["x"])

    @functools.cached_property
    def var(self) -> Fraction:
        """The mean of ``centered**2``."""
        return self.centered.dot(self.centered) / self.n

    @functools.cached_property
    def square(self) -> Fraction:
        """``rstd**2``; where there is none, 1: what a mask leaves out is 0 whatever it is."""
        return 1 / (self.var + self._inputs.eps or Fraction(1))

    def center(self, v: Vector) -> Vector:
        """Return ``v - mean(v)``, for RMS norm v."""
        return v.plus(self.ones.scaled(-v.total() / self.n)) if self.layer else v

    @property
    def xhat(self) -> Vector:
        """``xhat / rstd``."""
        return self.centered

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean(a * b)``."""
        return a.dot(b) / self.n

    def project(self, v: Vector) -> Vector:
        """Return ``v - mean(v) - xhat * mean(v * xhat)``."""
        v = self.center(v)
        return v.plus(self.xhat.scaled(-self.square * self.inner(v, self.centered)))

    def times_rstd(self, v: Vector) -> Part:
        """Return ``v * rstd``."""
        return part(v, self.square)


class Magnitudes(Row):
    """A row whose quantities, each part in magnitude, are S of the contract."""

    def _spread(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v|``, for RMS norm ``|v|``."""
        v = v.magnitudes()
        return v.plus(self.ones.scaled(v.total() / self.n)) if self.layer else v

    @property
    def xhat(self) -> Vector:
        """``(|xhat| + mean|xhat|) / rstd``."""
        return self._spread(self.centered)

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean|a * b|``."""
        return super().inner(a.magnitudes(), b.magnitudes())

    def project(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|``."""
        inner = self.square * self.inner(self.center(v), self.centered)
        return self._spread(v).plus(self.xhat.scaled(inner))


# ---- the quantities: of each row, or summed over all rows ----

Parts = Iterator[Part]


def _y(row: Row) -> Parts:
    yield row.times_rstd(row["scale"].times(row.xhat))
    if "beta" in row:
        yield part(row["beta"].times(row.ones))


def _dx(row: Row) -> Parts:
    yield row.times_rstd(row.project(row["scale"].times(row["dy"])))
    if "dsum" in row:
        yield part(row["dsum"])
    # The derivatives of mean and rstd are 1 / n and -rstd**2 xhat / n.
    if "dmean" in row:
        yield part(row.ones.scaled(row["dmean"].total() / row.n))
    if "drstd" in row:
        yield row.times_rstd(row.xhat.scaled(-row["drstd"].total() * row.square / row.n))


def _dgamma(row: Row) -> Parts:
    yield row.times_rstd(row["dy"].times(row.xhat))


def _dbeta(row: Row) -> Parts:
    yield part(row["dy"])


def _jvp(row: Row, x: str, gamma: str, beta: str) -> Parts:
    """Yield the tangent of y, given the names of those of x, gamma, beta."""
    # The Jacobian of xhat is symmetric: the tangent of xhat is rstd project(tx).
    yield row.times_rstd(row["scale"].times(row.project(row[x])))
    if gamma in row:
        yield row.times_rstd(row[gamma].times(row.xhat))
    if beta in row:
        yield part(row[beta].times(row.ones))


# Second order: the cotangents ddx, ddgamma, ddbeta of dx, dgamma, dbeta pulled back to dy, x, gamma.
# What is pulled back is the gradient of
#     L = <ddx, rstd project(g)> + <ddgamma * dy, xhat> + <ddbeta, dy>.
# project is symmetric, so that the gradient with respect to dy is a jvp.


def _double_dgamma(row: Row) -> Parts:
    yield row.times_rstd(row["dy"].times(row.project(row["ddx"])))


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
    "dgamma": Quantity(_dgamma, True, "dy"),
    "dbeta": Quantity(_dbeta, True, "dy"),
    "ty": Quantity(partial(_jvp, x="tx", gamma="tgamma", beta="tbeta"), False, "tx"),
}
DOUBLE_BACKWARD = {
    "ddy": Quantity(partial(_jvp, x="ddx", gamma="ddgamma", beta="ddbeta"), False, "ddx"),
    "dx": Quantity(_double_dx, False, "dy"),
    "dgamma": Quantity(_double_dgamma, True, "dy"),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """
    What the quantities are made of, all float64.

    `matrices` has, by name, what differs from row to row: (rows, n) or (rows, 1). `vectors` has what
    all rows share, and under the names of summed quantities what is added to those.
    """

    kind: str
    eps: Fraction
    matrices: dict[str, Array]
    vectors: dict[str, Vector]
    quantities: dict[str, Quantity]

    @property
    def n(self) -> int:
        """The number of elements of a row, masked ones too."""
        return int(self.matrices["x"].shape[1])

    def blocks(self, name: str) -> range:
        """Return the places of the blocks of a quantity: rows, or the one of a sum over rows."""
        needed = self.quantities[name].needs
        if needed not in self.matrices:
            msg = f"{needed} must be given for {name}, got None"
            raise ValueError(msg)
        return range(1 if self.quantities[name].summed else len(self.matrices["x"]))

    def parts(self, name: str, block: int, kind: type[Row] = Row) -> Parts:
        """Yield the parts of one block."""
        if name in self.vectors:
            yield part(self.vectors[name])
        for index in self._rows(name, block):
            yield from self.quantities[name].parts(kind(self, index))

    def _rows(self, name: str, block: int) -> range:
        """Return the rows that one block is made of."""
        summed = self.quantities[name].summed
        return range(len(self.matrices["x"])) if summed else range(block, block + 1)

    def undefined(self, name: str, block: int) -> Array:
        """Tell which elements of one block have no value: without variance and eps, those that count."""
        found = np.zeros(self.n, bool)
        # dbeta, which is a sum of dy, is made without rstd.
        if self.eps == 0 and name != "dbeta":
            for row in (Row(self, index) for index in self._rows(name, block)):
                if row.var == 0:
                    found |= np.array(row.ones.integers) != 0
        return found

    def sizes(self, name: str, block: int) -> list[Interval]:
        """Return S of the contract: the sum of the magnitudes that each element is made of."""
        parts = self.parts(name, block, Magnitudes)
        return enclose((Part(list(map(abs, v)), square) for v, square in parts), self.n)

    def exactly(self, name: str, block: int, columns: list[int]) -> list[Surd]:
        """Return some elements of one block."""
        return exactly(self.parts(name, block), columns) if columns else []

    def decide(
        self, name: str, block: int, verdict: Callable[[int, Interval | None], T | None]
    ) -> list[T]:
        """Return the verdict on each element of one block, given its place and an enclosure, if defined."""
        undefined = self.undefined(name, block).tolist()
        intervals = enclose(self.parts(name, block), self.n)
        pairs = enumerate(zip(intervals, undefined, strict=True))
        found = [verdict(i, None if nothing else interval) for i, (interval, nothing) in pairs]
        left_open = [i for i, each in enumerate(found) if each is None]
        for i, number in zip(left_open, self.exactly(name, block, left_open), strict=True):
            found[i] = number.decide(partial(verdict, i))
        return [each for each in found if each is not None]
