"""
Rows in exact arithmetic: each quantity is written as on paper, as multiples of ``rstd`` and of 1.

A row is rational except for ``rstd``. As ``rstd**2 = 1 / (var + eps)``, odd powers of rstd are
rational multiples of it and even powers are rational. So ``xhat = centered * rstd``, and with
``g = scale * dy``, scale the sum of gamma and gamma_offset

    dx = rstd (g - mean(g) - centered (rstd**2 mean(g * centered)))

is rstd times a rational. RMS norm has ``mean(x)`` and ``mean(g)`` set to zero in the same lines.
Elements that a mask leaves out are zero in every vector: `Row.ones` is 0 there.
"""

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from stablenorm.oracle.rounding import Vector
from stablenorm.oracle.surds import RATIONAL, Part


class Row(dict[str, Vector]):
    """
    One row: its vectors by name, and its statistics.

    `xhat` and `project` leave a factor rstd out, so that they are rational.
    """

    def __init__(self, vectors: dict[str, Vector], eps: Fraction, kind: str):
        super().__init__(vectors)
        self.is_layer = kind == "layer"
        # ones: 1 where the mask is True, 0 elsewhere. n: their number, or 1 if there are none.
        self.ones = self["where"]
        self.n = self.ones.total() or Fraction(1)
        self.mean = self["x"].total() / self.n if self.is_layer else Fraction(0)
        # The attribute `xhat` is xhat / rstd; `Magnitudes` has a larger one.
        self.xhat = self.centered = self.center(self["x"])
        self.var = self.inner(self.centered, self.centered)
        # rstd**2. 1 where var + eps = 0: all elements are 0 or undefined there.
        self.square = 1 / (self.var + eps or Fraction(1))

    def center(self, v: Vector) -> Vector:
        """Return ``v - mean(v)``, for RMS norm v."""
        return v + self.ones * (-v.total() / self.n) if self.is_layer else v

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean(a * b)``."""
        return (a * b).total() / self.n

    def project(self, v: Vector) -> Vector:
        """Return ``v - mean(v) - xhat * mean(v * xhat)``."""
        v = self.center(v)
        return v + self.xhat * (-self.square * self.inner(v, self.centered))


class Magnitudes(Row):
    """A row in magnitudes: its quantities are S of the contract."""

    def __init__(self, vectors: dict[str, Vector], eps: Fraction, kind: str):
        super().__init__(vectors, eps, kind)
        # (|xhat| + mean|xhat|) / rstd.
        self.xhat = self._spread(self.centered)

    def _spread(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v|``, for RMS norm ``|v|``."""
        return abs(v) + self.ones * (abs(v).total() / self.n) if self.is_layer else abs(v)

    def inner(self, a: Vector, b: Vector) -> Fraction:
        """Return ``mean|a * b|``."""
        return abs(a * b).total() / self.n

    def project(self, v: Vector) -> Vector:
        """Return ``|v| + mean|v| + (|xhat| + mean|xhat|) mean|(v - mean(v)) xhat|``."""
        inner = self.square * self.inner(self.center(v), self.centered)
        return self._spread(v) + self.xhat * inner


# ---- the quantities: of each row, or summed over all rows ----

Parts = Iterable[Part]


def _y(row: Row) -> Parts:
    yield row["scale"] * row.xhat, row.square
    if "beta" in row:
        yield row["beta"] * row.ones, RATIONAL


def _dx(row: Row) -> Parts:
    yield row.project(row["scale"] * row["dy"]), row.square
    if "dsum" in row:
        yield row["dsum"], RATIONAL


def _jvp(row: Row, x: str, gamma: str, beta: str) -> Parts:
    """Yield the tangent of y; `x`, `gamma`, `beta` name the tangents of these."""
    # The Jacobian of xhat is symmetric: the tangent of xhat is rstd project(tx).
    yield row["scale"] * row.project(row[x]), row.square
    if gamma in row:
        yield row[gamma] * row.xhat, row.square
    if beta in row:
        yield row[beta] * row.ones, RATIONAL


# Second order: the cotangents ddx, ddgamma, ddbeta of dx, dgamma, dbeta pulled back to dy, x, gamma.
# The sum that is differentiated is
#     L = <ddx, rstd project(g)> + <ddgamma * dy, xhat> + <ddbeta, dy>.
# project is symmetric, so that the gradient with respect to dy is a jvp.


def _double_dx(row: Row) -> Parts:
    dy, u = row["dy"], row["ddx"]
    g = row["scale"] * dy
    if "ddgamma" in row:
        yield row.project(row["ddgamma"] * dy), row.square
    # With a = mean(u xhat), b = mean(g xhat), m = mean(u (g - mean(g))), and so for u centered:
    # <u, rstd project(g)> = n rstd (m - a b), and m - a b = mean(u project(g)). The gradients of
    # rstd, a and b are -rstd**2 xhat / n, rstd project(u) / n and rstd project(g) / n. Together:
    # -rstd**2 (xhat mean(u project(g)) + project(u) b + project(g) a).
    pu, pg = row.project(u), row.project(g)
    u, g = row.center(u), row.center(g)
    across = pu * row.inner(g, row.centered) + pg * row.inner(u, row.centered)
    yield (row.xhat * row.inner(u, pg) + across) * -row.square, row.square


class Quantity(NamedTuple):
    """How a row gives a quantity, whether rows are summed, and the argument it needs."""

    parts: Callable[[Row], Parts]
    summed: bool
    needs: str


NORM = {
    "y": Quantity(_y, False, "x"),
    "dx": Quantity(_dx, False, "dy"),
    "dgamma": Quantity(lambda row: [(row["dy"] * row.xhat, row.square)], True, "dy"),
    "dbeta": Quantity(lambda row: [(row["dy"], RATIONAL)], True, "dy"),
    "ty": Quantity(partial(_jvp, x="tx", gamma="tgamma", beta="tbeta"), False, "tx"),
    "xhat": Quantity(lambda row: [(row.xhat, row.square)], False, "x"),
}
DOUBLE_BACKWARD = {
    "ddy": Quantity(partial(_jvp, x="ddx", gamma="ddgamma", beta="ddbeta"), False, "ddx"),
    "dx": Quantity(_double_dx, False, "dy"),
    "dgamma": Quantity(lambda r: [(r["dy"] * r.project(r["ddx"]), r.square)], True, "dy"),
}
