"""rounding="nearest" of the reference: every bit is that of the exact result, rounded once."""

from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import chain

import ml_dtypes
import numpy as np
import pytest
from rationals import NAMES, neighbours, sample

from stablenorm.arrays import as_rows
from stablenorm.oracle import exact_layer_norm
from stablenorm.reference import backward_nearest, columns_nearest, forward_nearest, nearest
from stablenorm.testing.families import FAMILIES, make_case
from stablenorm.types import Gradients

FINITE = [name for name, family in FAMILIES.items() if family.finite]


def compute(x, gamma, beta, eps, dy):
    """Return y, dx, dgamma and dbeta by name, and the statistics."""
    y = np.empty_like(x)
    statistics = forward_nearest(x, gamma, beta, eps, y)
    out = Gradients(np.empty_like(x), np.empty_like(gamma), np.empty_like(beta))
    backward_nearest(dy, x, gamma, eps, statistics, out)
    return dict(zip(NAMES, (y, *out), strict=True)), statistics


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_nearest(**case):
    exact = exact_layer_norm(**case)
    for name, array in compute(**case)[0].items():
        expected = exact.rounded(name, array.dtype)
        wrong = np.argwhere(bits(array) != bits(expected))
        assert not wrong.size, (name, array.dtype, len(wrong), wrong[0], case)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *((name, n) for name in FINITE for n in (1, 2, 3, 40, 257)),
        *((name, 2049) for name in ("F01", "F07", "F11", "F27", "F32", "F35")),
    ],
)
def test_families(name, n, dtype):
    if FAMILIES[name].applies(dtype, n):
        assert_nearest(**make_case(name, dtype, n)._asdict())


@pytest.mark.parametrize("name", ["F01", "F07", "F09", "F12", "F16", "F33", "F35"])
@pytest.mark.parametrize("dtypes", ["f2 f4 f4 f2", "f4 f8 f8 f4", "f4 f4 f4 f8", "f8 f2 f4 f4"])
def test_mixtures(name, dtypes, rng):
    """Of x, gamma, beta and dy."""
    shapes = (6, 9), 9, 9, (6, 9)
    x, gamma, beta, eps, dy = make_case(name, "f2", 9, 6)
    x, gamma, beta, dy = (
        (array * (1 + rng.random(shape))).astype(dtype)
        for array, shape, dtype in zip((x, gamma, beta, dy), shapes, dtypes.split(), strict=True)
    )
    assert_nearest(x=x, gamma=gamma, beta=beta, eps=eps, dy=dy)


def test_many_rows(dtype):
    assert_nearest(**make_case("F38", dtype, 3, 700)._asdict())
    # More than a block, and rows that cancel in pairs: dgamma is exactly 0.
    x, gamma, beta, eps, dy = make_case("F35", dtype, 2100, 34)
    got = compute(x, gamma, beta, eps, dy)[0]
    assert not bits(got["dgamma"]).any()
    assert not bits(got["dbeta"]).any()


def ties(dtype, rng):
    """Rows of which xhat is rational, with gamma, beta and dy of few bits: ties and zeros abound."""
    small = lambda *shape: rng.integers(-40, 41, shape) / 8
    step = float(np.spacing(dtype.type(1)))
    rows = {
        "two": np.array([[1, -3], [5, 4], [2**-9, 2**9]]),
        "halves": rng.permuted(np.tile([3, 3, 7, 7, 3, 7.0], (4, 1)), axis=1),
        "square": np.tile(np.arange(1.0, 8), (3, 1)) * [[1], [2], [-3]],
        "pairs": np.repeat(small(3, 5), 2, axis=0) * [[1], [1], [2], [4], [-1], [3]],
    }
    for x in rows.values():
        n = x.shape[1]
        for gamma, beta in ((1 + step * small(n), small(n)), (small(n), 0 * small(n))):
            for dy in (
                small(*x.shape),
                1 + step * small(*x.shape),
                np.resize([1, -1], (len(x), n)),
            ):
                parts = (a.astype(dtype) for a in (x, gamma, beta, dy))
                yield dict(zip(("x", "gamma", "beta", "dy"), parts, strict=True)) | {"eps": 0.0}


def test_ties_and_exact_zeros(dtype, rng):
    for case in ties(dtype, rng):
        assert_nearest(**case)


def decimal_layer_norm(x, gamma, beta, eps, dy):
    """The equations, in decimals of as many digits as the context has."""
    xs, dys = ([list(map(Decimal, row)) for row in a.astype(float).tolist()] for a in (x, dy))
    scale, shift = (list(map(Decimal, a.astype(float).tolist())) for a in (gamma, beta))
    mean = lambda v: sum(v) / len(v)
    y, dx, terms = [], [], []
    for row, cotangent in zip(xs, dys, strict=True):
        c = [v - mean(row) for v in row]
        rstd = 1 / (mean([v * v for v in c]) + Decimal(eps)).sqrt()
        h = [v * rstd for v in c]
        g = [a * b for a, b in zip(scale, cotangent, strict=True)]
        inner = mean([a * b for a, b in zip(g, h, strict=True)])
        y.append([a * b + d for a, b, d in zip(scale, h, shift, strict=True)])
        dx.append([rstd * (a - mean(g) - b * inner) for a, b in zip(g, h, strict=True)])
        terms.append([a * b for a, b in zip(cotangent, h, strict=True)])
    return dict(zip(NAMES, (y, dx, [list(map(sum, zip(*terms, strict=True)))],
                            [list(map(sum, zip(*dys, strict=True)))]), strict=True))  # fmt: skip


def test_decimal_arithmetic_agrees(dtype, rng):
    """A third witness: what is closer to a midpoint or to 0 than 10^-400 is there."""
    cases = [sample(dtype, 3, 5, rng) for _ in range(5)]
    names = "x", "gamma", "beta", "dy"
    cases = [dict(zip(names, case, strict=True)) | {"eps": 1e-5} for case in cases]
    with localcontext(Context(prec=600)):
        for case in (*cases, *ties(dtype, rng)):
            got = compute(**case)[0]
            for name, rows in decimal_layer_norm(**case).items():
                for value, found in zip(chain(*rows), got[name].ravel(), strict=True):
                    exact = Fraction(round(value, 400))
                    below, above = neighbours(exact, dtype)
                    low, high = (abs(Fraction(float(v)) - exact) for v in (below, above))
                    even = below if int(bits(below[None])[0]) % 2 == 0 else above
                    expected = even if low == high else below if low < high else above
                    assert float(found) == float(expected), (name, case)
                    assert np.signbit(found) == (exact < 0)


def test_overflow_and_underflow_are_those_of_one_rounding(dtype):
    """y = gamma and -gamma: around the largest number and around the smallest, and their midpoints."""
    info = ml_dtypes.finfo(dtype)
    if dtype == np.float64:
        # No gamma lies between two of its numbers: their sum with beta does.
        gamma = np.array([float(info.max), float(info.max), 5e-324, -5e-324])
        beta = np.array([2.0**970, 2.0**969, 0, 0])
    else:
        largest, least = float(info.max), float(info.smallest_subnormal)
        middle = largest + (largest - float(np.nextafter(info.max, dtype.type(0)))) / 2
        gamma = np.array([middle, np.nextafter(middle, 0), least / 2, np.nextafter(least / 2, 1)])
        beta = np.zeros(4)
    x = np.array([[1, 1, -1, -1], [-1, -1, 1, 1]], dtype)
    assert_nearest(
        x=x, gamma=gamma, beta=beta, eps=0.0, dy=np.array([[1, 2, 3, 4], [4, 3, 1, 1.0]])
    )
    y = compute(x, gamma, beta, 0.0, x)[0]["y"].astype(float)
    assert np.isinf(y[0, 0])
    assert y[0, 1] == float(info.max)


def test_what_is_not_finite(dtype):
    inf, nan = np.inf, np.nan
    x = np.array([[1, 2, 3, 6], [1, nan, 2, 3], [5, 5, 5, 5], [0, inf, 0, 0]], dtype)
    gamma, beta = np.array([inf, 1, nan, 0], dtype), np.array([1, inf, 0, -inf], dtype)
    none = [nan] * 4
    assert_same(
        compute(x, gamma, beta, 1e-5, x),
        y=[[-inf, inf, nan, -inf], none, [nan, inf, nan, -inf], none],
        dx=[none] * 4, dgamma=none, dbeta=[7, nan, 10, 14],
    )  # fmt: skip
    # Of a finite gamma: rows and columns that are finite still are the nearest.
    finite, ones = x[[0, 2]], np.ones(4, dtype)
    dy = np.array([[1, -inf, -inf, 3], [1, 0, 2, inf]], dtype)
    exact = exact_layer_norm(finite[:1], dy=ones[None])
    first = float(exact.rounded("dgamma", dtype)[0])
    assert_same(
        compute(finite, ones, ones, 1e-5, dy),
        y=exact_layer_norm(finite, beta=ones).rounded("y", dtype),
        dx=[none] * 2, dgamma=[first, inf, nan, nan], dbeta=[2, -inf, -inf, inf],
    )  # fmt: skip
    # Without a variance and without eps, dgamma of all columns is lost, and dx of that row.
    dy = np.array([[0, 0, 1, 0], [0, 0, 1, 0]], dtype)
    got = compute(finite, ones, ones, 0.0, dy)
    dx = exact_layer_norm(finite[:1], eps=0.0, dy=dy[:1]).rounded("dx", dtype)
    y = exact_layer_norm(finite[:1], beta=ones, eps=0.0).rounded("y", dtype)
    assert_same(got, y=[y[0], none], dx=[dx[0], none], dgamma=none, dbeta=[0, 0, 2, 0])


def assert_same(got, **expected):
    """Of NaN the bits too: the quiet one, its sign clear."""
    for name, array in got[0].items():
        np.testing.assert_array_equal(
            bits(array), bits(np.array(expected[name]).astype(array.dtype))
        )


def test_rows_layouts_and_columns_do_not_matter(dtype):
    case = make_case("F03", dtype, 12, 9)
    expected, _ = compute(*case)
    x, dy = (np.asfortranarray(a.reshape(3, 3, 12)) for a in (case.x, case.dy))
    x_rows, dy_rows = as_rows(x, (2,)), as_rows(dy, (2,))
    # In place: y over x, dx over dy.
    statistics = forward_nearest(as_rows(y := x.copy("K"), (2,)), *case[1:4], as_rows(y, (2,)))
    out = Gradients(dy_rows, *np.empty((2, 12), dtype))
    columns = np.array([7, 0, 3])
    some = columns_nearest(dy_rows, x_rows, case.eps, columns, dtype, dtype)
    backward_nearest(dy_rows, x_rows, case.gamma, case.eps, statistics, out)
    for name, array in zip(NAMES, (y, dy, *out[1:]), strict=True):
        assert array.reshape(expected[name].shape).tobytes() == expected[name].tobytes()
    for name, array in zip(NAMES[2:], some, strict=True):
        assert array.tobytes() == expected[name][columns].tobytes()


@pytest.mark.parametrize("name", FINITE)
def test_bounds_and_spread(name, monkeypatch):
    """What is rounded is within its bound of the exact value, with two thirds of it to spare."""
    seen = []
    inner = nearest._rounded
    monkeypatch.setattr(nearest, "_rounded", lambda *a: seen.append(a[:2]) or inner(*a))
    case = make_case(name, "f8", 11 if name != "F13" else 5)
    _, statistics = compute(*case)
    exact = exact_layer_norm(*case)
    shapes = [case.x.shape, (case.x.shape[1],), (case.x.shape[1],), case.x.shape]
    for what, shape, (v, bound) in zip(("y", "dgamma", "dbeta", "dx"), shapes, seen, strict=True):
        for index in np.ndindex(shape):
            place = index if len(shape) == 2 else (0, *index)
            error = abs(whole(v, place) - exact.value(what, index))
            assert error * 3 <= whole(bound, place) * Fraction(2) ** -106, (what, index)
    for row, spread in enumerate(statistics.spread.tolist()):
        var = exact.var(row)
        if var == 0:
            assert spread == 0 or (case.eps == 0 and np.isnan(spread))
        else:
            square = var / (var + Fraction(case.eps))
            below = Fraction(spread - 4 * float(np.spacing(spread)))
            assert below**2 < square <= Fraction(spread) ** 2


def whole(v, place):
    """Return an element of `Wide` as a fraction."""
    hi, lo, exponent = (np.broadcast_to(a, v.hi.shape)[place] for a in (v.hi, v.lo, v.exponent))
    return (Fraction(float(hi)) + Fraction(float(lo))) * Fraction(2) ** int(exponent)
