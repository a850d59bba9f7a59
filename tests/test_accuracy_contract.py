"""docs/explanation/error-analysis.md: its table of K bounds the error before the final rounding."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from norms import FINITE
from rationals import magnitudes

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.call import Forward
from stablenorm.reference import blocks, equations
from stablenorm.testing import FAMILIES, make_case, plain_forward
from stablenorm.types import Norm

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "error-analysis.md"
U = 2.0**-53


def bounds(h, k):
    """Return K of each output, as the page writes it."""
    rows = re.findall(r"(?m)^\| (y|dx|dgamma|dbeta) \| `(.*)` \|$", PAGE.read_text("utf8"))
    return {name: eval(formula, {"h": h, "k": k}) for name, formula in rows}


def before_rounding(case):
    """Return the outputs of the reference as the float64 that it rounds, and S of each."""
    y = np.empty(case.x.shape)
    statistics = blocks.forward(Forward(case.x, Norm(case.gamma, case.beta, case.eps), y))
    x, gamma, beta, dy = (a.astype(np.float64) for a in (case.x, case.gamma, case.beta, case.dy))
    xhat, rstd = blocks.rebuilt(x.copy(), statistics, slice(None))
    found = {
        "y": y,
        "dx": rstd * equations.project(gamma * dy, xhat),
        "dgamma": blocks.sum_rows(dy * xhat)[0],
        "dbeta": blocks.sum_rows(dy)[0],
    }
    return found, magnitudes("layer", x, gamma, beta, case.eps, dy)[0]


# Blocks of NumPy's pairwise sum begin at 128 elements.
LENGTHS = 2, 100, 768
CASES = [(name, n) for name in FINITE for n in LENGTHS if FAMILIES[name].applies("float32", n)]


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
    # By the plain formula, in float64.
    y = plain_forward(case.x.astype(np.float64), case.gamma, case.beta, case.eps)[0]
    error = abs(y - exact_layer_norm(*case).rounded("y", np.float64))
    assert (error > bounds(21, 1)["y"] * U * before_rounding(case)[1]["y"]).any()


@pytest.mark.parametrize("output", ["y", "dx"])
def test_a_few_of_a_billion_float32_are_the_other_neighbour(output):
    """An error of e ulp before rounding is one for a share 2 |e| of the exact values."""
    case = make_case("F01", "float32", 16, 4)
    found = before_rounding(case)[0][output]
    exact = exact_layer_norm(*case)
    places = np.ndenumerate(found)
    errors = [abs(float(Fraction(float(v)) - exact.value(output, index))) for index, v in places]
    ulp = np.spacing(abs(found).astype(np.float32)).astype(np.float64)
    assert 1e-9 < np.mean(2 * np.reshape(errors, ulp.shape) / ulp) < 1e-8
