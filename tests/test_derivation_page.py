"""Every formula of docs/explanation/derivation.md is checked with symbols, under its number."""

import itertools
import re
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
project = lambda v, xhat: center(v) - xhat * mean(times(center(v), xhat))
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
    dx = property(lambda r: r.rstd * project(r.g, r.xhat))
    into_centered = property(lambda r: r.rstd * (r.g - r.xhat * mean(times(r.g, r.xhat))))
    removed = property(lambda r: (r.along_ones + r.xhat * r.xhat.T) / r.n)
    jacobian = property(lambda r: r.rstd * (sp.eye(r.n) - r.removed))
    # The projection of an RMS norm removes nothing along the ones.
    along_ones = property(lambda r: (sp.ones if r.kind == "layer" else sp.zeros)(r.n, r.n))

    def is_zero(self, claim):
        elements = claim if isinstance(claim, sp.MatrixBase) else [claim]
        return all(sp.expand(e.subs(EPS, R**-2 - self.var)) == 0 for e in elements)


def make_row(n, kind="layer", freedoms=None, free=False):
    """Build a row; with `free`, centered are symbols of their own, before the mean is subtracted."""
    x = column("x", n)
    c = column("c", n) if free else center(x) if kind == "layer" else x
    others = (column(name, n) for name in ("gamma", "beta", "dy"))
    return Row(x, *others, c, c.dot(c) / (freedoms or n), kind)


def two_rows(row, parameter, factor):
    """Return the gradient of a parameter from two rows, less the sum over the rows."""
    other = row._replace(dy=column("du", row.n), centered=column("d", row.n))
    return diff(row.loss + other.loss, parameter) - factor(row) - factor(other)


def moved(row, x, eps=EPS):
    """Return xhat after a change of x and eps, less xhat."""
    change = dict(zip(row.x, x, strict=True)) | {EPS: eps}
    return (row.xhat.subs(change, simultaneous=True) - row.xhat).applyfunc(sp.simplify)


def across(row):
    """Return any v without its parts along the ones and along centered, times a number."""
    v, c = center(column("v", row.n)), row.centered
    return v * c.dot(c) - c * c.dot(v)


def tangent(row):
    tx, tgamma, tbeta = (column(name, row.n) for name in ("tx", "tgamma", "tbeta"))
    ty = times(row.gamma, row.rstd * project(tx, row.xhat)) + times(tgamma, row.xhat) + tbeta
    return tx, tgamma, tbeta, ty


def jvp(row):
    *tangents, ty = tangent(row)
    moves = zip([*row.x, *row.gamma, *row.beta], [t for v in tangents for t in v], strict=True)
    return sum((diff(row.y, [s]) * t for s, t in moves), sp.zeros(row.n, 1)) - ty


def adjoint(row):
    tx, tgamma, tbeta, ty = tangent(row)
    pulled = row.dx.dot(tx) + times(row.dy, row.xhat).dot(tgamma) + row.dy.dot(tbeta)
    return row.dy.dot(ty) - pulled


def with_offset(row):
    """Return the gradients of the loss with an offset of gamma, less those of the page."""
    offset = row._replace(gamma=row.gamma + T * sp.ones(row.n, 1))
    x, gamma = diff(offset.loss, row.x), diff(offset.loss, row.gamma)
    return (x - row.jacobian * offset.g).col_join(gamma - times(row.dy, row.xhat))


def with_residual(row):
    """Return the gradients by x and r of a loss of y and of x + r, less those of the page."""
    r, dsum = column("r", row.n), column("dsum", row.n)
    added = dict(zip(row.x, row.x + r, strict=True))
    loss = (row.loss + dsum.dot(row.x)).subs(added, simultaneous=True)
    dx = (row.jacobian * row.g + dsum).subs(added, simultaneous=True)
    # Back to a row of its own, so that eps can be eliminated.
    back = dict(zip(row.x, row.x - r, strict=True))
    both = (diff(loss, row.x) - dx).col_join(diff(loss, r) - dx)
    return both.subs(back, simultaneous=True)


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


VAR, T = sp.symbols("var t", positive=True)
# A step is right if its expression is zero for a row `r`; for the steps in FREE, `centered` is a variable.
STEPS = {
    "D1": lambda r: sum(r.centered),
    "D2": lambda r: (
        sp.Matrix([r.var / (r.var + EPS), 1 - EPS * r.rstd**2])
        - mean(times(r.xhat, r.xhat)) * sp.ones(2, 1)
    ),
    "D3": lambda r: two_rows(r, r.gamma, lambda row: times(row.dy, row.xhat)),
    "D4": lambda r: two_rows(r, r.beta, lambda row: row.dy),
    "D5": lambda r: diff(r.dy.dot(times(r.gamma, column("h", r.n))), column("h", r.n)) - r.g,
    "D6": lambda _: sp.simplify(
        sp.diff((VAR + EPS) ** -sp.S.Half, VAR) + (VAR + EPS) ** sp.Rational(-3, 2) / 2
    ),
    "D7": lambda r: diff(r.var, r.centered) - 2 * r.centered / r.n,
    "D8": lambda r: diff(r.loss, r.centered) - r.into_centered,
    "D9": lambda r: r.centered.jacobian(r.x).T * column("v", r.n) - center(column("v", r.n)),
    "D10": lambda r: mean(r.into_centered) - r.rstd * mean(r.g),
    "D11": lambda r: diff(r.loss, r.x) - r.dx,
    "D12": lambda r: r.xhat.jacobian(r.x) - r.jacobian,
    "D13": lambda r: moved(r, r.x + T * sp.ones(r.n, 1)),
    "D14": lambda r: moved(r, T * r.x, T**2 * EPS),
    "D15": lambda r: sp.Matrix([sum(r.dx), r.xhat.dot(r.dx) - EPS * r.rstd**3 * r.xhat.dot(r.g)]),
    "D16": lambda r: (r.jacobian - r.jacobian.T).row_join(r.jacobian * sp.ones(r.n, 1)),
    "D17": lambda r: r.jacobian * r.xhat - EPS * r.rstd**3 * r.xhat,
    "D18": lambda r: r.jacobian * across(r) - r.rstd * across(r),
    "D19": lambda r: r.jacobian.trace() - (r.n - 2) * r.rstd - EPS * r.rstd**3,
    "D20": lambda r: mean(times(r.g, r.xhat)) - mean(times(center(r.g), r.xhat)),
    "D21": jvp,
    "D22": adjoint,
    "D23": lambda r: diff(r.loss, r.x) - r.into_centered,
    "D24": lambda r: r.xhat.jacobian(r.x) - r.jacobian,
    "D25": with_offset,
    "D26": with_residual,
    "D27": lambda r: (diff(r.rstd, r.x) + r.rstd**2 * r.xhat / r.n).col_join(
        diff(mean(r.x), r.x) - sp.ones(r.n, 1) / r.n
    ),
    "D28": masked,
    "D29": second_order,
    "D30": second_order_of_x,
}
FREE, RMS, BOTH = {"D7", "D8"}, {"D23", "D24"}, {"D25", "D26", "D27", "D28", "D29", "D30"}
CASES = [
    (name, kind)
    for name in STEPS
    for kind in ("layer", "rms")
    if name in BOTH or (kind == "rms") == (name in RMS)
]


def holds(name, kind, n, freedoms=None):
    row = make_row(n, kind, freedoms, free=name in FREE)
    if name != "D28":
        return row.is_zero(STEPS[name](row))
    masks = [mask for mask in itertools.product((0, 1), repeat=n) if any(mask)]
    return all(short.is_zero(claim) for short, claim in (masked(row, mask) for mask in masks))


def test_every_step_of_the_page_is_checked():
    assert set(re.findall(r"\bD\d+\b", PAGE.read_text("utf8"))) == set(STEPS)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_step(name, kind, n):
    assert holds(name, kind, n)


def test_a_variance_over_n_minus_1_breaks_what_depends_on_it():
    # The checks can fail: the unbiased variance breaks these formulas and no others.
    wrong = {"D2", "D7", "D8", "D11", "D12", "D15", "D17", "D19", "D21", "D23", "D24"}
    wrong |= {"D25", "D26", "D27", "D30"}
    assert {name for name, kind in CASES if not holds(name, kind, 2, freedoms=1)} == wrong
