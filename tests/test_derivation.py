"""The formulas of `reference` are the derivative of the forward: by symbols, not by numbers."""

import numpy as np
import pytest
import sympy as sp

from stablenorm.reference import project


def forward(x, gamma, beta, eps):
    n = len(x)
    mean = sum(x) / n
    var = sum((element - mean) ** 2 for element in x) / n
    rstd = (var + eps) ** sp.Rational(-1, 2)
    xhat = [(element - mean) * rstd for element in x]
    y = [c * v + b for c, v, b in zip(gamma, xhat, beta, strict=True)]
    return y, xhat, rstd


def symbols(name, n):
    return list(sp.symbols(f"{name}:{n}", real=True))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_backward_is_the_derivative(n):
    x, gamma, beta, dy = (symbols(name, n) for name in ("x", "gamma", "beta", "dy"))
    eps = sp.symbols("eps", positive=True)
    y, xhat, rstd = forward(x, gamma, beta, eps)
    loss = sum(u * v for u, v in zip(dy, y, strict=True))
    g = [c * u for c, u in zip(gamma, dy, strict=True)]
    # `project` itself, on symbols: the code that runs, not a copy of it.
    projected = project_symbols(g, xhat)
    for i in range(n):
        assert sp.simplify(sp.diff(loss, x[i]) - rstd * projected[i]) == 0
        assert sp.simplify(sp.diff(loss, gamma[i]) - dy[i] * xhat[i]) == 0
        assert sp.simplify(sp.diff(loss, beta[i]) - dy[i]) == 0


def project_symbols(v, xhat):
    n = len(v)
    mean = sum(v) / n
    q = [element - mean for element in v]
    inner = sum(a * b for a, b in zip(q, xhat, strict=True)) / n
    return [a - b * inner for a, b in zip(q, xhat, strict=True)]


def test_the_symbolic_projection_is_the_one_that_runs(rng):
    v, xhat = rng.standard_normal((2, 7))
    expected = np.array(project_symbols(list(v), list(xhat)), dtype=float)
    actual = project(v[None], xhat[None])[0]
    # Two summation orders of 7 terms of size 1: a few ulp of the largest.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=16 * 2.0**-53 * np.abs(v).max() * 7)


def test_gamma_after_the_projection_is_wrong():
    n = 3
    x, gamma, beta, dy = (symbols(name, n) for name in ("x", "gamma", "beta", "dy"))
    y, xhat, rstd = forward(x, gamma, beta, sp.Integer(1))
    loss = sum(u * v for u, v in zip(dy, y, strict=True))
    point = dict(zip([*x, *gamma, *beta, *dy], [1, 2, 4, 1, 2, 3, 0, 0, 0, 1, 0, 2], strict=True))
    wrong = gamma[0] * rstd * project_symbols(dy, xhat)[0]
    assert abs(sp.N((sp.diff(loss, x[0]) - wrong).subs(point))) > 1e-3
