"""Elements next to midpoints: their answers by mpmath, the search, and who misrounds them."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.testing import Case, make_case, near_midpoints
from stablenorm.testing.midpoints import search

NAMES = ("y", "dx", "dgamma", "dbeta")


def value(case):
    """Return the element, by the formulas as they are written, to more bits than any input spans."""
    x, dy = ([[mpf(float(v)) for v in row] for row in each] for each in (case.x, case.dy))
    gamma, beta = ([mpf(float(v)) for v in each] for each in (case.gamma, case.beta))
    n, j = len(gamma), case.where[-1]
    xhat, rstd = [], []
    for row in x:
        mean = sum(row) / n
        rstd.append(1 / mp.sqrt(sum((v - mean) ** 2 for v in row) / n + mpf(case.eps)))
        xhat.append([(v - mean) * rstd[-1] for v in row])
    if case.output == "dbeta":
        return sum(row[j] for row in dy)
    if case.output == "dgamma":
        return sum(row[j] * h[j] for row, h in zip(dy, xhat, strict=True))
    i = case.where[0]
    if case.output == "y":
        return gamma[j] * xhat[i][j] + beta[j]
    g = [a * b for a, b in zip(gamma, dy[i], strict=True)]
    along = sum(a * h for a, h in zip(g, xhat[i], strict=True)) / n
    return rstd[i] * (g[j] - sum(g) / n - xhat[i][j] * along)


def test_the_answers_are_those_of_mpmath():
    for case in near_midpoints():
        about = ml_dtypes.finfo(case.expected.dtype)
        with mp.workprec(1300):
            exact = value(case)
            # frexp gives a fraction from 0.5 on.
            exponent = max(int(mp.frexp(exact)[1]) - 1, about.minexp)
            place = exact / mpf(2) ** (exponent - about.nmant)
            below = int(mp.floor(place))
            distance = place - below - 0.5
            assert abs(distance - case.distance) <= 1e-15 * abs(case.distance) + mpf(2) ** -1200
        even = below + below % 2
        nearest = even if case.distance == 0 else below + (case.distance > 0)
        assert float(case.expected) == math.ldexp(nearest, exponent - about.nmant)


def test_all_outputs_and_dtypes_are_there_and_near():
    found = near_midpoints()
    names = ("float16", "bfloat16", "float32", "float64")
    kinds = {(e.output, e.expected.dtype.name, e.distance == 0) for e in found}
    assert kinds == set(itertools.product(NAMES, names, (True, False)))
    for each in found:
        inputs = {array.dtype.name for array in (each.x, each.gamma, each.dy)}
        if not inputs & {"float16", "bfloat16"}:
            assert abs(each.distance) <= 1e-8
    assert len({len(each.gamma) for each in found}) >= 7


@pytest.mark.parametrize("output", ["y", "dx", "dgamma"])
def test_the_search_finds_the_first_of_all_significands(output):
    case = make_case("F02", "bfloat16", 5)
    where = (2,) if output == "dgamma" else (0, 2)
    argument, place = ("gamma", (2,)) if output == "y" else ("dy", (0, 2))
    limit, near, last = 2.0**-5, [], None
    for significand in range(255, 127, -1):
        array = getattr(case, argument).copy()
        array[place] = math.ldexp(significand, math.frexp(float(array[place]))[1] - 8)
        changed = case._replace(**{argument: array})
        exact = float(exact_layer_norm(*changed).value(output, where))
        binade = math.copysign(1, exact), math.frexp(exact)[1]
        last = last or binade
        # frexp's exponent less 8 is that of the ulp.
        if binade == last and abs(math.ldexp(exact, 8 - last[1]) % 1 - 0.5) <= limit:
            near.append(changed)
    found = search(case, output, where, argument, place, limit)
    assert near
    np.testing.assert_array_equal(getattr(found, argument), getattr(near[-1], argument))


def test_the_search_finds_what_is_kept():
    for each in near_midpoints():
        case, j = Case(*each[:5]), each.where[-1]
        place = {"y": ("gamma", (j,)), "dgamma": ("dy", (1, j))}.get(each.output)
        # The exponent decides, whatever the significand was; for ties there are several.
        if place and each.distance:
            limit = 1.001 * abs(each.distance)
            again = search(case, each.output, each.where, *place, limit)
            assert getattr(again, place[0])[place[1]] == getattr(case, place[0])[place[1]]


def run(case, backend, **options):
    y, cache = layer_norm_forward(*case[:4], backend=backend, **options)
    outputs = dict(zip(NAMES, (y, *layer_norm_backward(case.dy, cache)), strict=True))
    return outputs[case.output][case.where]


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_within_half_an_ulp_and_a_thousandth_misses_some(backend):
    found = near_midpoints()
    missed = [each for each in found if run(each, backend) != each.expected]
    # Each kind of arithmetic is fooled.
    kinds = {(each.output, each.expected.dtype.name) for each in missed}
    assert {("dx", "float32"), ("dx", "float64"), ("y", "float32"), ("y", "float64")} <= kinds
