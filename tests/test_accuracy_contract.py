"""docs/explanation/error-analysis.md: its table of K bounds the error before the final rounding."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from rationals import magnitudes

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.call import Forward
from stablenorm.reference import blocks, equations
from stablenorm.testing import FAMILIES, make_case
from stablenorm.types import Norm

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "error-analysis.md"
U = 2.0**-53


def is_finite(name, n):
    family = FAMILIES[name]
    return family.finite and family.applies("float32", n)


def bounds(h, k):
    """Return K of each output, as the page writes it."""
    rows = re.findall(
        r"^\| (y|dx|dgamma|dbeta) \| `(.*)` \|$", PAGE.read_text("utf8"), re.MULTILINE
    )
    return {name: eval(formula, {"h": h, "k": k}) for name, formula in rows}


def before_rounding(case):
    """Return the outputs of the reference as the float64 that it rounds, and S of each."""
    x, gamma, beta, eps, dy = case
    y = np.empty(x.shape)
    statistics = blocks.forward(Forward(x, Norm(gamma, beta, eps), y))
    xhat, rstd = blocks.rebuilt(x.astype(np.float64), statistics, slice(None))
    gamma, beta, dy = (a.astype(np.float64) for a in (gamma, beta, dy))
    g = gamma * dy
    found = {
        "y": y,
        "dx": rstd * equations.project(g, xhat),
        "dgamma": blocks.sum_rows(dy * xhat)[0],
        "dbeta": blocks.sum_rows(dy)[0],
    }

    given = x.astype(np.float64), gamma, beta.astype(np.float64), eps, dy
    return found, magnitudes("layer", *given)[0]


# Blocks of NumPy's pairwise sum begin at 128 elements.
CASES = [(name, n) for name in FAMILIES for n in (2, 100, 768) if is_finite(name, n)]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_the_error_before_rounding_is_within_the_bound_of_the_page(name, n):
    """And after it, that of an element which does not cancel is at most 0.501 ulp."""
    case = make_case(name, "float32", n, max(4, FAMILIES[name].smallest_rows))
    found, magnitudes = before_rounding(case)
    height = 18 + math.ceil(math.log2(n / 128)) if n >= 128 else min(n - 1, 18)
    limits = bounds(height, math.ceil(math.log2(len(case.x))) + 1)
    exact = exact_layer_norm(*case)
    for output, values in found.items():
        right = exact.rounded(output, np.float64)
        with np.errstate(invalid="ignore"):
            error = abs(values - right)
        # What is rounded off the exact value, to compare in float64, is not ours.
        allowed = limits[output] * U * magnitudes[output] + U * abs(right)
        assert (error <= allowed).all(), f"{output}: {(error / allowed).max():.3g} of the bound"
    y, cache = layer_norm_forward(*case[:4])
    actual = {"y": y, "dx": layer_norm_backward(case.dy, cache).dx}
    for output, error in exact.ulp_errors(**actual).items():
        ordinary = abs(exact.rounded(output, np.float64)) >= magnitudes[output] / 1000
        assert (error[ordinary] <= 0.501).all()


def test_the_bound_is_not_idle():
    """A mean that is not corrected breaks it, by the rounding of the mean alone."""
    case = make_case("F07", "float32", 768)
    x = case.x.astype(np.float64)
    mean = x.mean(axis=-1, keepdims=True)
    exact = exact_layer_norm(*case)
    centered = x - mean
    xhat = centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + case.eps)
    y = case.gamma * xhat + case.beta
    _, magnitudes = before_rounding(case)
    error = abs(y - exact.rounded("y", np.float64))
    assert (error > bounds(21, 1)["y"] * U * magnitudes["y"]).any()


@pytest.mark.parametrize("output", ["y", "dx"])
def test_a_few_of_a_billion_float32_are_the_other_neighbour(output):
    """An error of e ulp before rounding is one for a share 2 |e| of the exact values."""
    case = make_case("F01", "float32", 16, 4)
    found = before_rounding(case)[0][output]
    exact = exact_layer_norm(*case)
    errors = [
        abs(float(Fraction(float(value)) - exact.value(output, index)))
        for index, value in np.ndenumerate(found)
    ]
    ulp = np.spacing(abs(found).astype(np.float32)).astype(np.float64)
    assert 1e-9 < np.mean(2 * np.reshape(errors, ulp.shape) / ulp) < 1e-8
