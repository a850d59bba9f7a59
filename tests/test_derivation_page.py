"""The results of docs/explanation/derivation.md are the derivatives of its forward, checked with symbols, under its numbers."""

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import sympy as sp

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "derivation.md"

EPS = sp.Symbol("eps", positive=True)
# rstd as an unknown of its own. With eps = 1/rstd**2 - var every expression becomes rational, and
# expanding decides whether it is zero.
R = sp.Symbol("rstd", positive=True)


column = lambda name, n: sp.Matrix(sp.symbols(f"{name}:{n}", real=True))
mean = lambda v: sum(v) / len(v)
times = lambda a, b: a.multiply_elementwise(b)
center = lambda v: v - mean(v) * sp.ones(len(v), 1)
diff = lambda expression, symbols: sp.Matrix([sp.diff(expression, s) for s in symbols])


class Row(NamedTuple):
    """One row in symbols."""

    x: sp.Matrix
    gamma: sp.Matrix
    beta: sp.Matrix
    dy: sp.Matrix
    centered: sp.Matrix
    var: sp.Expr
    kind: str

    n = property(lambda r: len(r.x))
    rstd = property(lambda r: (r.var + EPS) ** sp.Rational(-1, 2))
    xhat = property(lambda r: r.centered * r.rstd)
    g = property(lambda r: times(r.gamma, r.dy))
    y = property(lambda r: times(r.gamma, r.xhat) + r.beta)
    loss = property(lambda r: r.dy.dot(r.y))
    removed = property(lambda r: (r.along_ones + r.xhat * r.xhat.T) / r.n)
    jacobian = property(lambda r: r.rstd * (sp.eye(r.n) - r.removed))
    # The projection of an RMS norm removes nothing along the ones.
    along_ones = property(lambda r: (sp.ones if r.kind == "layer" else sp.zeros)(r.n, r.n))

    def is_zero(self, claim):
        elements = claim if isinstance(claim, sp.MatrixBase) else [claim]
        return all(sp.expand(e.subs(EPS, R**-2 - self.var)) == 0 for e in elements)


def make_row(n, kind, freedoms=None):
    x = column("x", n)
    c = center(x) if kind == "layer" else x
    others = (column(name, n) for name in ("gamma", "beta", "dy"))
    return Row(x, *others, c, c.dot(c) / (freedoms or n), kind)


def two_rows(row, parameter, factor):
    """Return the gradient of a parameter from two rows, less the sum over the rows."""
    other = row._replace(dy=column("du", row.n), centered=column("d", row.n))
    return diff(row.loss + other.loss, parameter) - factor(row) - factor(other)


def jvp(row):
    tx, tgamma, tbeta = tangents = [column(name, row.n) for name in ("tx", "tgamma", "tbeta")]
    ty = times(row.gamma, row.jacobian * tx) + times(tgamma, row.xhat) + tbeta
    moves = zip([*row.x, *row.gamma, *row.beta], [t for v in tangents for t in v], strict=True)
    return sum((diff(row.y, [s]) * t for s, t in moves), sp.zeros(row.n, 1)) - ty


def masked(row, mask):
    """Return the row of the unmasked elements with their own n, and its dx less the page's."""
    m, n = sp.Matrix(mask), sum(mask)
    subtracted = row.x.dot(m) / n * m if row.kind == "layer" else 0 * m
    centered = times(m, row.x) - subtracted
    short = row._replace(centered=centered, var=centered.dot(centered) / n)
    outer = (m * m.T if row.kind == "layer" else 0 * m * m.T) + short.xhat * short.xhat.T
    dx = short.rstd * (sp.diag(*mask) - outer / n) * row.g
    return short, diff(row.dy.dot(times(m, short.y)), row.x) - dx


def cotangents(row):
    """Return ddx, ddgamma, ddbeta, and Phi of the page: their product with the backward."""
    ddx, ddgamma, ddbeta = (column(name, row.n) for name in ("ddx", "ddgamma", "ddbeta"))
    pulled = row.jacobian * row.g
    phi = ddx.dot(pulled) + ddgamma.dot(times(row.dy, row.xhat)) + ddbeta.dot(row.dy)
    return ddx, ddgamma, ddbeta, phi


def second_order(row):
    ddx, ddgamma, ddbeta, phi = cotangents(row)
    pushed = row.jacobian * ddx
    ddy = times(row.gamma, pushed) + times(ddgamma, row.xhat) + ddbeta
    return (diff(phi, row.dy) - ddy).col_join(diff(phi, row.gamma) - times(row.dy, pushed))


def second_order_of_x(row):
    ddx, ddgamma, _, phi = cotangents(row)
    pushed, pulled = row.jacobian * ddx, row.jacobian * row.g
    dx = row.jacobian * times(ddgamma, row.dy) - row.rstd * (
        mean(times(row.g, row.xhat)) * pushed
        + mean(times(ddx, row.xhat)) * pulled
        + row.xhat * mean(times(ddx, pulled))
    )
    return diff(phi, row.x) - dx


# A result is right if its expression is zero for a row `r`, of both kinds of norm.
RESULTS = {
    "D3": lambda r: two_rows(r, r.gamma, lambda row: times(row.dy, row.xhat)),
    "D4": lambda r: two_rows(r, r.beta, lambda row: row.dy),
    "D12": lambda r: (r.xhat.jacobian(r.x) - r.jacobian).row_join(r.jacobian - r.jacobian.T),
    "D11": lambda r: diff(r.loss, r.x) - r.jacobian * r.g,
    "D21": jvp,
    "D28": masked,
    "D29": second_order,
    "D30": second_order_of_x,
}
KINDS = "layer", "rms"


def holds(name, kind, n, freedoms=None):
    row = make_row(n, kind, freedoms)
    if name != "D28":
        return row.is_zero(RESULTS[name](row))
    masks = [mask for mask in itertools.product((0, 1), repeat=n) if any(mask)]
    return all(short.is_zero(claim) for short, claim in (masked(row, mask) for mask in masks))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RESULTS)
def test_result(name, kind, n):
    assert f"**{name}.**" in PAGE.read_text("utf8")
    assert holds(name, kind, n)


def test_a_variance_over_n_minus_1_breaks_what_depends_on_it():
    # The checks can fail: the unbiased variance breaks these formulas and no others.
    right = {name for name in RESULTS if all(holds(name, kind, 2, freedoms=1) for kind in KINDS)}
    assert right == {"D3", "D4", "D28", "D29"}
