"""The bounds of rounding="nearest" on the contract page: what could break them, or leave float64's range."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest
from mpmath import mp, mpf

from stablenorm import (
    layer_norm_backward,
    layer_norm_forward,
)

numba = pytest.importorskip("numba")
memory = pytest.importorskip("stablenorm.cpu.memory")
nearest = pytest.importorskip("stablenorm.cpu.nearest")
pairs = pytest.importorskip("stablenorm.cpu.pairs")
tiles = pytest.importorskip("stablenorm.cpu.tiles")
wide = pytest.importorskip("stablenorm.cpu.wide")
wide_tiles = pytest.importorskip("stablenorm.cpu.wide_tiles")

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "accuracy-contract.md"
# Titles of the tables: of each step, of what the code takes.
TABLES = {
    "layer": ("At each step", "In the kernels,"),
    "rms": ("Of RMS norm", "There, the code takes"),
}
U = 2.0**-53


@functools.cache
def compiled(kind):
    """
    Return what gives the pairs of a row's forward and of a tile's backward, with the code's bounds.

    Of RMS norm gamma is a pair, as with a gamma_offset.
    """
    layer = kind == "layer"

    @numba.njit(cache=True)
    def at(array):
        return memory.pointer_at(array.ctypes.data, np.float64)

    @numba.njit(error_model="numpy", cache=True)
    def forward(x, k, gamma, gamma_low, beta, eps, lanes, xhat, y):
        n, low = x.size, None if layer else at(gamma_low)
        d, d_low, square, square_low = wide._measure(at(x), n, k, at(lanes), layer)
        product, product_low = pairs.multiply(d, d_low, d, d_low)
        var = pairs.add(square, square_low, -product, -product_low)
        extreme, found, single = wide.statistics(at(x), n, eps, at(lanes), layer)
        row = found if layer else (None, None, None, found[3], found[4])
        spread = nearest.spread_of(single, row[3])
        for j in range(n):
            xhat[j, 0], xhat[j, 1] = wide.xhat_of(x[j], *row)
            given = at(x), at(gamma), low, at(beta), row, spread
            y[j, 0], y[j, 1], y[j, 2] = nearest._y(given, j)
            y[j, 2] *= nearest.row_bound(n)
        return extreme, (d, d_low, square, square_low, *var), found, spread

    @numba.njit(error_model="numpy", cache=True)
    def backward(dy, x, gamma, gamma_low, rows, spreads, lanes, words, sums, means, dx):
        n, factors = x.shape[1], (at(words[0]), at(words[1]), at(words[2]), at(words[3]))
        extreme, totals = False, (at(sums[0]), at(sums[1]), at(sums[2]), at(sums[3]))
        low = None if layer else at(gamma_low)
        for i in range(len(x)):
            if i > 0 and i % tiles.ROWS_OF_PART == 0:
                wide_tiles._settle(totals, n)
            if layer:
                row = rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3], rows[i, 4]
            else:
                row = None, None, None, rows[i, 3], rows[i, 4]
            arrays = at(dy[i]), at(x[i]), at(gamma), low
            found = wide.pull(arrays, n, row, totals, factors, at(lanes), layer)
            bad, of_g, of_products, range_of_dy = found
            extreme |= bad
            sizes = at(sums[4]), at(sums[5])
            spread = spreads[i]
            nearest.add_sizes(at(dy[i]), at(x[i]), factors, n, row[0], spread, range_of_dy, sizes)
            means[i, 0], means[i, 1] = of_g
            means[i, 2], means[i, 3] = of_products
            if layer:
                means[i, 4], means[i, 5] = wide.smallest(at(dy[i]), at(gamma), low, n)
            size = nearest.size_of(arrays, factors, n, layer, True)
            both = (of_g if layer else None), of_products
            for j in range(n):
                dx[i, j] = nearest._dx((at(x[i]), factors, both, row, size), j)
                dx[i, j, 2] *= nearest.row_bound(n) * row[3]
        wide_tiles._settle(totals, n)
        return extreme

    return forward, backward


def exactly(array):
    return np.vectorize(mpf, otypes=[object])(array)


def both(words):
    """Return high + low."""
    return exactly(words[..., 0]) + exactly(words[..., 1])


def formulas(title):
    """Return the rows of formulas of the table on the page that follows these words."""
    table = PAGE.read_text("utf8").split(title)[1].split("\n\n")[1]
    rows = [re.findall("`(.*?)`", line) for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def largest(part, whole):
    part, whole = np.broadcast_arrays(part, whole)
    # mpmath rounds as well.
    assert (part[whole == 0] < 2.0**-300).all()
    return max((float(a / b) for a, b in zip(part.flat, whole.flat, strict=True) if b), default=0.0)


def rate(kind, x, dy, gamma, beta, k, eps=1e-5):
    """Return the largest error over bound of each step, and of what the code takes for the bounds."""
    steps_of, code_of = map(formulas, TABLES[kind])
    # As a gamma_offset leaves them.
    low = gamma * 2.0**-54 * (kind == "rms")
    (rows, n), height = x.shape, len(x) + -len(x) % 8
    lanes, words, factors = np.empty(4 * wide.LANES), [], np.empty((4, n))
    xhat, y, dx = np.empty((*x.shape, 2)), np.empty((*x.shape, 3)), np.empty((*x.shape, 3))
    means, sums = np.zeros((rows, 6)), np.zeros((6, n + 8))
    forward, backward = compiled(kind)
    for i in range(rows):
        words.append(forward(x[i], k[i], gamma, low, beta, eps, lanes, xhat[i], y[i]))
    extreme, six, row, spreads = (np.array(each) for each in zip(*words, strict=True))
    assert not extreme.any()
    assert not backward(dy, x, gamma, low, row, spreads, lanes, factors, sums, means, dx)
    names = {
        "n": n, "R": height, "T": 1, "H": 5 * -(-n // 16) + 35, "abs": abs,
        "mean": lambda a: a.mean(axis=-1, keepdims=True), "sum": lambda a: a.sum(axis=0),
        "sqrt": np.vectorize(mp.sqrt, otypes=[object]), "m": both(means[:, None, 4:]),
        "x": exactly(x), "dy": exactly(dy), "gamma": exactly(gamma) + exactly(low),
        "k": exactly(k)[:, None], "beta": exactly(beta), "mean_of": lambda a: 0 * a,
    }  # fmt: skip
    if kind == "layer":
        names["mean_of"] = names["mean"]
    for line in (
        "c = x - mean_of(x)", "var = mean(c * c)", f"rstd = 1 / sqrt(var + {eps!r})", "xhat = c * rstd",
        "w = sqrt(mean(xhat**2))", "g = gamma * dy", "S = sqrt(mean((g - m)**2))",
        "y = gamma * xhat + beta", "dgamma = sum(dy * xhat)", "dbeta = sum(dy)",
        "dx = rstd * (g - mean_of(g) - xhat * mean(g * xhat))",
    ):  # fmt: skip
        name, formula = line.split(" = ")
        names[name] = eval(formula, names)
    found = {
        "mean(x**2)": both(six[:, None, 2:4]), "mean(g * xhat)": both(means[:, None, 2:4]),
        "mean(x - k)": both(six[:, None, :2]), "mean((x - k)**2)": both(six[:, None, 2:4]),
        "var": both(six[:, None, 4:]), "rstd": both(row[:, None, 3:]),
        "mean(x)": both(row[:, None]) + exactly(row[:, None, 2]), "xhat": both(xhat), "y": both(y),
        "mean(g - m)": both(means[:, None, :2]), "mean((g - m) * xhat)": both(means[:, None, 2:4]),
        "dx": both(dx), "dgamma": both(sums[:2, :n].T), "dbeta": both(sums[2:4, :n].T),
    }  # fmt: skip
    rated, errors = {}, {}
    for name, (formula,) in steps_of.items():
        errors[name] = abs(found[name] - eval(name, names))
        if name in ("y", "dx"):
            # The rounding of the low part is counted apart.
            errors[name] -= U * abs(exactly((y if name == "y" else dx)[..., 1]))
        rated[name] = largest(errors[name], eval(formula, names) * U * U)
    sizes = y[..., 2], dx[..., 2], *sums[4:, :n] * nearest.sums_bound.py_func(n, height, 1)
    for (name, (formula,)), size in zip(code_of.items(), sizes, strict=True):
        page, steps = (eval(each, names) * U * U for each in (formula, steps_of[name][0]))
        code = exactly(size)
        rated[f"{name}, in the code"] = largest(errors[name], code)
        # Of a constant g, all is exact. Else: what the steps add up to, what the page says of the
        # code, and what the code computes, in float64 and a little more, are in this order.
        page, steps = (np.where(code == 0, 0, each) for each in (page, steps))
        assert largest(steps, page) <= 1
        assert largest(page, code * (1 + mpf(2) ** -30)) <= 1
        assert largest(code, page * 1.04) <= 1
    return rated


def cases(rng):
    """Yield x, dy, gamma, beta and k: made worst for some of the steps."""
    draw, zero = rng.standard_normal, np.zeros(6)
    for n in (2, 3, 5, 33, 150):
        x = draw((40 if n < 9 else 1, n))
        # A guess that is just good enough.
        yield x, draw(x.shape), draw(n), np.zeros(n), x.mean(axis=1) + 1.4 * x.std(axis=1)
    shape, n = (6, 40), 40
    for x in (1e8 + draw(shape), 2.0**53 + 2 * rng.integers(0, 3, shape)):
        yield x, 1e8 + draw(shape), draw(n), draw(n), x.mean(axis=1)
    spread = draw((2, *shape)) * np.exp2(rng.uniform(-60, 60, (2, *shape)))
    yield *spread, draw(n), draw(n), zero
    yield draw(shape), 1e8 + draw(shape), np.ones(n), draw(n), zero
    # One large term in each lane, and then equal ones that all go to the low parts.
    n, sign = 480, np.where(np.arange(480) // 16 % 2, -1.0, 1.0)
    x, v = 2.0**-27 * rng.uniform(0.5, 0.99, (2, 1, 1)) * sign
    sums = np.repeat(2.0**-54 * rng.uniform(0.5, 1.99, (1, 1)), n, axis=1)
    x[:, :16] = v[:, :16] = np.where(np.arange(16) % 2, -1.0, 1.0)
    sums[:, :16] = 1
    for each in ((x, x), (sums, v), (v, sums)):
        yield *each, np.ones(n), np.zeros(n), zero[:1]
    # The same along the rows.
    dy = np.tile(2.0**-54 * rng.uniform(0.5, 1.99, 16), (130, 1))
    dy[0] = 1
    yield np.tile(draw(16), (130, 1)), dy, np.ones(16), np.zeros(16), np.zeros(130)


@pytest.mark.parametrize("kind", TABLES)
def test_no_input_breaks_a_bound(kind, rng):
    worst = {}
    with mp.workprec(700):
        for *case, k in cases(rng):
            for name, share in rate(kind, *case, k if kind == "layer" else 0 * k).items():
                worst[name] = max(share, worst.get(name, 0.0))
    assert max(worst.values()) < 1, worst
    # Nor are they idle: most steps come within a hundredth, the sums over rows within a tenth.
    assert min(worst.values()) > 0.001
    assert min(worst[name] for name in ("dgamma", "dbeta", "dbeta, in the code")) > 0.1


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_a_large_dy_leaves_no_nan(rounding, backend):
    """Where all that the kernels' sums along a row see of it is 0."""

    def gradients(x, dy):
        ones = np.ones(x.shape[1])
        _, cache = layer_norm_forward(x, ones, ones, eps=0.0, backend=backend, rounding=rounding)
        return layer_norm_backward(dy, cache)

    x, dy = np.tile([1.0, 2.0, 4.0], (3, 1)), np.full((3, 3), 1.7e308) * [[1], [1], [-1]]
    np.testing.assert_array_equal(gradients(x, dy).dbeta, 1.7e308)
    # Half of the columns, between which and dy and xhat nothing adds up.
    x, dy = 2.0**-100 * np.tile([1.0, 1.0, -1.0, -1.0], (1, 4)), np.zeros((1, 16))
    dy[0, 1::4] = 2.0**1000 * np.array([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_array_equal(gradients(x, dy).dx, np.where(dy, np.copysign(np.inf, dy), 0.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [0, 1])
def test_more_digits_than_a_pair_has_are_left_to_the_reference(axis, dtype, backend):
    """Also of rows that are gathered from anywhere."""
    one, two = (2.0**190, 2.0**90 + 2.0**38) if dtype is np.float64 else (2.0**120, 2.0**60)
    terms = np.array([one, two, 3.0, -one, -two, 0, 0, 0], dtype)
    dy = np.moveaxis(np.tile(terms.reshape(2, 4, 1), 5), -1, axis).copy()
    x, zero = np.random.default_rng(0).standard_normal(dy.shape).astype(dtype), np.zeros(5, dtype)
    _, cache = layer_norm_forward(x, axis=axis, beta=zero, rounding="nearest", backend=backend)
    np.testing.assert_array_equal(layer_norm_backward(dy, cache).dbeta, 3.0)
