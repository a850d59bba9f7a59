"""The steps of docs/explanation/derivation.md, each checked by symbols: page and test together."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import sympy as sp

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "derivation.md"

EPS = sp.Symbol("eps", positive=True)
# rstd as an unknown of its own. With eps = 1/rstd**2 - var every expression becomes rational, and
# "is it zero" becomes a question that expanding decides.
R = sp.Symbol("rstd", positive=True)


class Row(NamedTuple):
    """One row in symbols; `centered` are symbols of their own where x - mean is not meant."""

    x: sp.Matrix
    gamma: sp.Matrix
    beta: sp.Matrix
    dy: sp.Matrix
    centered: sp.Matrix
    var: sp.Expr
    rstd: sp.Expr

    @property
    def n(self):
        return len(self.x)

    @property
    def xhat(self):
        return self.centered * self.rstd

    @property
    def g(self):
        return times(self.gamma, self.dy)

    @property
    def y(self):
        return times(self.gamma, self.xhat) + self.beta

    @property
    def loss(self):
        return self.dy.dot(self.y)

    @property
    def dx(self):
        return self.rstd * project(self.g, self.xhat)

    def zero(self, claim):
        """Tell whether an expression, or each element of a matrix, is zero whatever the numbers."""
        elements = claim if isinstance(claim, sp.MatrixBase) else [claim]
        return all(sp.expand(e.subs(EPS, R**-2 - self.var)) == 0 for e in elements)


def column(name, n):
    return sp.Matrix(sp.symbols(f"{name}:{n}", real=True))


def mean(v):
    return sum(v) / len(v)


def times(a, b):
    return a.multiply_elementwise(b)


def ones(n):
    return sp.ones(n, 1)


def project(v, xhat):
    """`reference.project`, on columns of symbols; test_derivation.py holds the two together."""
    return v - mean(v) * ones(len(v)) - xhat * mean(times(v, xhat))


def make_row(n, centered=None, freedoms=None):
    """Build a row; `freedoms` divides the sum of squares (n, unless the row is to be wrong)."""
    x = column("x", n)
    c = x - mean(x) * ones(n) if centered is None else centered
    var = c.dot(c) / (freedoms or n)
    rstd = (var + EPS) ** sp.Rational(-1, 2)
    return Row(x, column("gamma", n), column("beta", n), column("dy", n), c, var, rstd)


def diff(expression, symbols):
    return sp.Matrix([sp.diff(expression, s) for s in symbols])


# ---- the steps: what is zero if the step is right ----


def centered_sums_to_zero(row, _):
    return [sum(row.centered)]


def size_of_xhat(row, _):
    size = mean(times(row.xhat, row.xhat))
    return [size - row.var / (row.var + EPS), size - (1 - EPS * row.rstd**2)]


def dgamma_of_two_rows(row, _):
    # A second row of its own numbers, the same gamma.
    other = row._replace(dy=column("du", row.n), centered=column("d", row.n))
    claim = times(row.dy, row.xhat) + times(other.dy, other.xhat)
    return [diff(row.loss + other.loss, row.gamma) - claim]


def dbeta_of_two_rows(row, _):
    other = row._replace(dy=column("du", row.n))
    return [diff(row.loss + other.loss, row.beta) - (row.dy + other.dy)]


def into_xhat(row, _):
    xhat = column("xhat", row.n)
    loss = row.dy.dot(times(row.gamma, xhat) + row.beta)
    return [diff(loss, xhat) - row.g]


def derivative_of_rstd(_row, _free):
    var = sp.Symbol("var", positive=True)
    rstd = (var + EPS) ** sp.Rational(-1, 2)
    return [sp.simplify(sp.diff(rstd, var) + rstd**3 / 2)]


def derivative_of_var(_row, free):
    return [diff(free.var, free.centered) - 2 * free.centered / free.n]


def into_centered(_row, free):
    return [diff(free.loss, free.centered) - from_xhat_to_centered(free)]


def from_xhat_to_centered(row):
    return row.rstd * (row.g - row.xhat * mean(times(row.g, row.xhat)))


def through_the_mean(row, _):
    n, v = row.n, column("v", row.n)
    jacobian = row.centered.jacobian(row.x)
    return [jacobian - (sp.eye(n) - sp.ones(n, n) / n), jacobian.T * v - (v - mean(v) * ones(n))]


def mean_of_it(row, _):
    return [mean(from_xhat_to_centered(row)) - row.rstd * mean(row.g)]


def the_gradient(row, _):
    return [diff(row.loss, row.x) - row.dx]


def jacobian(row):
    n, xhat = row.n, row.xhat
    return row.rstd * (sp.eye(n) - sp.ones(n, n) / n - xhat * xhat.T / n)


def the_jacobian(row, _):
    return [row.xhat.jacobian(row.x) - jacobian(row)]


def along_the_ones(row, _):
    return [jacobian(row) - jacobian(row).T, jacobian(row) * ones(row.n)]


def along_xhat(row, _):
    return [jacobian(row) * row.xhat - EPS * row.rstd**3 * row.xhat]


def across_both(row, _):
    # Any v less its parts along the ones and along centered (times its square, to stay rational).
    v = column("v", row.n)
    v = v - mean(v) * ones(row.n)
    v = v * row.centered.dot(row.centered) - row.centered * row.centered.dot(v)
    return [v.dot(ones(row.n)), v.dot(row.xhat), jacobian(row) * v - row.rstd * v]


def trace(row, _):
    return [jacobian(row).trace() - (row.n - 2) * row.rstd - EPS * row.rstd**3]


def shift(row, _):
    t = sp.Symbol("t", real=True)
    moved = row.xhat.subs(dict(zip(row.x, row.x + t * ones(row.n), strict=True)), simultaneous=True)
    # Not through `zero`: var of the moved row is another expression.
    return [sp.expand((moved - row.xhat).applyfunc(sp.simplify))]


def scale(row, _):
    s = sp.Symbol("s", positive=True)
    moved = dict(zip(row.x, s * row.x, strict=True)) | {EPS: s**2 * EPS}
    return [(row.xhat.subs(moved, simultaneous=True) - row.xhat).applyfunc(sp.simplify)]


def where_dx_lies(row, _):
    along = row.xhat.dot(row.dx)
    return [sum(row.dx), along - EPS * row.rstd**3 * row.xhat.dot(row.g)]


def centered_first(row, _):
    q = row.g - mean(row.g) * ones(row.n)
    return [mean(times(row.g, row.xhat)) - mean(times(q, row.xhat))]


def tangent(row):
    tx, tgamma, tbeta = (column(name, row.n) for name in ("tx", "tgamma", "tbeta"))
    ty = times(row.gamma, row.rstd * project(tx, row.xhat)) + times(tgamma, row.xhat) + tbeta
    return tx, tgamma, tbeta, ty


def the_jvp(row, _):
    tx, tgamma, tbeta, ty = tangent(row)
    direction = list(zip([*row.x, *row.gamma, *row.beta], [*tx, *tgamma, *tbeta], strict=True))
    return [sum((diff(row.y, [s]) * t for s, t in direction), sp.zeros(row.n, 1)) - ty]


def adjoint(row, _):
    tx, tgamma, tbeta, ty = tangent(row)
    pulled = row.dx.dot(tx) + times(row.dy, row.xhat).dot(tgamma) + row.dy.dot(tbeta)
    return [row.dy.dot(ty) - pulled]


# Name: the formula as the page shows it, and the check of it.
STEPS = {
    "D1": (r"\sum_i c_i = 0", centered_sums_to_zero),
    "D2": (
        (
            r"\operatorname{mean}(\hat x^2) = \frac{\text{var}}{\text{var} + \varepsilon}"
            r" = 1 - \varepsilon\, \text{rstd}^2"
        ),
        size_of_xhat,
    ),
    "D3": (r"d\gamma_i = \sum_r dy_{ri}\, \hat x_{ri}", dgamma_of_two_rows),
    "D4": (r"d\beta_i = \sum_r dy_{ri}", dbeta_of_two_rows),
    "D5": (r"\frac{\partial L}{\partial \hat x_i} = \gamma_i\, dy_i = g_i", into_xhat),
    "D6": (
        r"\frac{d\, \text{rstd}}{d\, \text{var}} = -\tfrac{1}{2}\, \text{rstd}^3",
        derivative_of_rstd,
    ),
    "D7": (r"\frac{\partial\, \text{var}}{\partial c_i} = \frac{2}{n} c_i", derivative_of_var),
    "D8": (
        (
            r"\frac{\partial L}{\partial c_i} = \text{rstd}\,"
            r" \bigl(g_i - \hat x_i\, \operatorname{mean}(g \hat x)\bigr)"
        ),
        into_centered,
    ),
    "D9": (
        (
            r"\frac{\partial c_i}{\partial x_j} = \delta_{ij} - \frac{1}{n},"
            r" \qquad dx = \frac{\partial L}{\partial c}"
            r" - \operatorname{mean}\Bigl(\frac{\partial L}{\partial c}\Bigr)"
        ),
        through_the_mean,
    ),
    "D10": (
        (
            r"\operatorname{mean}\Bigl(\frac{\partial L}{\partial c}\Bigr)"
            r" = \text{rstd}\, \operatorname{mean}(g)"
        ),
        mean_of_it,
    ),
    "D11": (
        (
            r"dx = \text{rstd}\, \bigl(g - \operatorname{mean}(g)"
            r" - \hat x\, \operatorname{mean}(g \hat x)\bigr)"
        ),
        the_gradient,
    ),
    "D12": (
        (
            r"J = \frac{\partial \hat x}{\partial x} = \text{rstd}\,"
            r" \Bigl(I - \frac{1}{n} \mathbf 1 \mathbf 1^{\mathsf T}"
            r" - \frac{1}{n} \hat x \hat x^{\mathsf T}\Bigr)"
        ),
        the_jacobian,
    ),
    "D13": (r"\hat x(x + t \mathbf 1) = \hat x(x)", shift),
    "D14": (r"\hat x(s x;\, s^2 \varepsilon) = \hat x(x;\, \varepsilon), \qquad s > 0", scale),
    "D15": (
        (
            r"\mathbf 1^{\mathsf T} dx = 0, \qquad \hat x^{\mathsf T} dx"
            r" = \varepsilon\, \text{rstd}^3\; \hat x^{\mathsf T} g"
        ),
        where_dx_lies,
    ),
    "D16": (r"J = J^{\mathsf T}, \qquad J \mathbf 1 = 0", along_the_ones),
    "D17": (r"J \hat x = \varepsilon\, \text{rstd}^3\, \hat x", along_xhat),
    "D18": (
        r"J v = \text{rstd}\, v \quad \text{for every } v \perp \mathbf 1, \hat x",
        across_both,
    ),
    "D19": (
        r"\operatorname{tr} J = (n - 2)\, \text{rstd} + \varepsilon\, \text{rstd}^3",
        trace,
    ),
    "D20": (
        (
            r"\operatorname{mean}(g \hat x)"
            r" = \operatorname{mean}\bigl((g - \operatorname{mean}(g))\, \hat x\bigr)"
        ),
        centered_first,
    ),
    "D21": (
        (
            r"ty = \gamma\, \text{rstd}\, \bigl(tx - \operatorname{mean}(tx)"
            r" - \hat x\, \operatorname{mean}(tx\, \hat x)\bigr) + t\gamma\, \hat x + t\beta"
        ),
        the_jvp,
    ),
    "D22": (
        (
            r"\langle dy, ty \rangle = \langle dx, tx \rangle"
            r" + \langle d\gamma, t\gamma \rangle + \langle d\beta, t\beta \rangle"
        ),
        adjoint,
    ),
}


def failing(n, freedoms=None, steps=STEPS):
    """Return the steps that do not hold for a row of n symbols."""
    row = make_row(n, freedoms=freedoms)
    free = make_row(n, centered=column("c", n), freedoms=freedoms)
    return {
        name
        for name in steps
        for claim in STEPS[name][1](row, free)
        if not (free if STEPS[name][1] in ON_FREE else row).zero(claim)
    }


# Steps about centered as the variable, before the mean is taken into account.
ON_FREE = (derivative_of_var, into_centered)


def on_the_page():
    """Return the display formula of every named step, by name."""
    found = re.findall(
        r"^\*\*(D\d+)\.\*\*.*?^\$\$\n(.*?)\n\$\$$", PAGE.read_text("utf8"), re.MULTILINE | re.DOTALL
    )
    return {name: " ".join(formula.split()) for name, formula in found}


def test_every_step_of_the_page_is_checked_as_the_page_writes_it():
    assert on_the_page() == {name: formula for name, (formula, _) in STEPS.items()}


def test_every_name_on_the_page_is_a_step():
    assert set(re.findall(r"\bD\d+\b", PAGE.read_text("utf8"))) == set(STEPS)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_step(name, n):
    assert failing(n, steps=[name]) == set()


def test_a_variance_over_n_minus_1_breaks_what_depends_on_it():
    # The checks can fail: with the unbiased variance these formulas are wrong, the others are not.
    wrong = {"D2", "D7", "D8", "D11", "D12", "D17", "D19", "D15", "D21"}
    assert failing(3, freedoms=2) == wrong
