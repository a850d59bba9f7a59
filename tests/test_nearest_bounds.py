"""The bounds of rounding="nearest" on the contract page: what could break them, or leave float64's range."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mpmath import mp, mpf

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.types import bfloat16

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "explanation" / "error-analysis.md"
NATIVE = HERE.parent / "src" / "stablenorm" / "native"
# As CMakeLists.txt has them.
FLAGS = "-std=c++17 -shared -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi"
# Titles of the tables: of each step, of what the code takes.
TABLES = {
    "layer": ("At each step", "In the kernels,"),
    "rms": ("Of RMS norm", "There, the code takes"),
}
U = 2.0**-53


@pytest.fixture(scope="session")
def steps(builds):
    """The steps of the kernels, compiled from their own header."""
    compiler = shutil.which("c++")
    if compiler is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("there is no C++ compiler, or the kernels are not for this processor")
    flags = ["-mavx2", "-mfma", "-mf16c"] if platform.machine() == "x86_64" else []
    library = builds / f"bounds-{os.getpid()}.so"
    command = [compiler, *FLAGS.split(), *flags, "-I", NATIVE, HERE / "bounds.cpp", "-o", library]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("sums_bound_of", "sum_bound"):
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


def given_to(*arguments):
    """Return arguments as C takes them."""
    kinds = {int: ctypes.c_ssize_t, float: ctypes.c_double}
    return [
        kinds[type(each)](each) if type(each) in kinds else ctypes.c_void_p(each.ctypes.data)
        for each in arguments
    ]


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


def rate(steps, kind, x, dy, gamma, beta, k, eps=1e-5):
    """Return the largest error over bound of each step, and of what the code takes for the bounds."""
    steps_of, code_of = map(formulas, TABLES[kind])
    # As a gamma_offset leaves them.
    low = gamma * 2.0**-54 * (kind == "rms")
    (rows, n), layer = x.shape, int(kind == "layer")
    apart, height = n + 64, rows + -rows % 8
    parameters = np.zeros((3, apart))
    parameters[:, :n] = gamma, low, beta
    words, means = np.zeros((rows, 12)), np.zeros((rows, 6))
    sums, xhat, y, dx = (
        np.zeros((*lead, apart)) for lead in ((6,), (rows, 2), (rows, 3), (rows, 3))
    )
    for i in range(rows):
        forward = layer, x[i], n, float(k[i]), parameters, eps, apart, words[i], y[i]
        assert not steps.forward_row(*given_to(*forward))
        if i > 0 and i % 64 == 0:
            steps.settle_sums(*given_to(sums, apart, n))
        row = words[i, 6:].copy()
        backward = layer, dy[i], x[i], n, row, parameters, apart, means[i], xhat[i], dx[i], sums
        steps.backward_row(*given_to(*backward))
    steps.settle_sums(*given_to(sums, apart, n))
    xhat, y, dx = (np.moveaxis(each[..., :n], 1, -1) for each in (xhat, y, dx))
    sums, six, row = sums[:, :n], words[:, :6], words[:, 6:]
    names = {
        "n": n, "R": height, "T": 1, "H": 1.45 * n + 60, "abs": abs,
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
        "dx": both(dx), "dgamma": both(sums[:2].T), "dbeta": both(sums[2:4].T),
    }  # fmt: skip
    rated, errors = {}, {}
    for name, (formula,) in steps_of.items():
        errors[name] = abs(found[name] - eval(name, names))
        if name in ("y", "dx"):
            # The rounding of the low part is counted apart.
            errors[name] -= U * abs(exactly((y if name == "y" else dx)[..., 1]))
        rated[name] = largest(errors[name], eval(formula, names) * U * U)
    sizes = y[..., 2], dx[..., 2], *sums[4:] * steps.sums_bound_of(*given_to(n, height, 1))
    for (name, (formula,)), size in zip(code_of.items(), sizes, strict=True):
        page, limit = (eval(each, names) * U * U for each in (formula, steps_of[name][0]))
        code = exactly(size)
        rated[f"{name}, in the code"] = largest(errors[name], code)
        # Of a constant g, all is exact. Else: what the steps add up to, what the page says of the
        # code, and what the code computes, in float64 and a little more, are in this order.
        page, limit = (np.where(code == 0, 0, each) for each in (page, limit))
        assert largest(limit, page) <= 1
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
    n, sign = 480, np.where(np.arange(480) // 8 % 2, -1.0, 1.0)
    x, v = 2.0**-27 * rng.uniform(0.5, 0.99, (2, 1, 1)) * sign
    sums = np.repeat(2.0**-54 * rng.uniform(0.5, 1.99, (1, 1)), n, axis=1)
    x[:, :8] = v[:, :8] = np.where(np.arange(8) % 2, -1.0, 1.0)
    sums[:, :8] = 1
    for each in ((x, x), (sums, v), (v, sums)):
        yield *each, np.ones(n), np.zeros(n), zero[:1]
    # The same along the rows.
    dy = np.tile(2.0**-54 * rng.uniform(0.5, 1.99, 16), (130, 1))
    dy[0] = 1
    yield np.tile(draw(16), (130, 1)), dy, np.ones(16), np.zeros(16), np.zeros(130)


@pytest.mark.parametrize("kind", TABLES)
def test_no_input_breaks_a_bound(kind, rng, steps):
    worst = {}
    with mp.workprec(700):
        for *case, k in cases(rng):
            for name, share in rate(steps, kind, *case, k if kind == "layer" else 0 * k).items():
                worst[name] = max(share, worst.get(name, 0.0))
    assert max(worst.values()) < 1, worst
    # Nor are they idle: all steps come within a thousandth, the sums over rows within a tenth.
    assert min(share for name, share in worst.items() if "in the code" not in name) > 0.001
    assert min(worst[name] for name in ("dgamma", "dbeta", "dbeta, in the code")) > 0.1


def rate_narrow(steps, kind, far, x, dy, gamma, beta, eps):
    """Return the largest error over bound of what float64 decides: of each element, and by the bounds of a row."""
    (rows, n), layer = x.shape, int(kind == "layer")
    apart = n + 64
    given, sums, rated = np.zeros((6, apart)), np.zeros((4, apart)), {}
    given[0, :n], given[2, :n], given[3] = gamma, beta, 1.0
    exact_gamma, exact_beta, worst = exactly(gamma), exactly(beta), np.zeros(2)
    terms, kept = [], np.zeros((4, rows))

    def see(name, error, bound):
        rated[name] = max(rated.get(name, 0.0), largest(error, exactly(bound)))

    for i in range(rows):
        words, (xhat, y, dx) = np.zeros(9), np.zeros((3, 2, apart))
        arrays = given, apart, words, xhat, y, dx, sums
        steps.narrow_row(*given_to(layer, far, dy[i], x[i], n, eps, *arrays))
        v, g = exactly(x[i].astype(float)), exact_gamma * exactly(dy[i].astype(float))
        c = v - v.mean() * layer
        rstd = 1 / mp.sqrt((c * c).mean() + eps)
        h = c * rstd
        terms.append((exactly(dy[i].astype(float)) * h, exactly(dy[i].astype(float))))
        found = xhat[0, :n]
        see("xhat", abs(exactly(found) - h), words[1] * np.abs(found) + words[2])
        found, bound = y[:, :n]
        error = abs(exactly(found) - (h * exact_gamma + exact_beta))
        see("y", error, bound)
        see("y, by rows", error, words[3] * (np.abs(gamma) + np.abs(beta)))
        found, bound = dx[:, :n]
        error = abs(exactly(found) - rstd * (g - g.mean() * layer - h * (g * h).mean()))
        see("dx", error, bound)
        see("dx, by rows", error, np.full(n, words[5]))
        worst = np.maximum(worst, words[1:3])
        kept[:, i] = words[[0, 6, 7, 8]]
    worst[0] += min(rows, 32) * U
    closely = np.zeros((2, 2, 3, apart))
    for deep in (0, 1):
        steps.sum_closely_of(
            *given_to(layer, deep, dy, x, rows, n, eps, kept, apart, closely[deep])
        )
    for which, name in enumerate(("dgamma", "dbeta")):
        of_sums = worst if which == 0 else (0.0, min(rows, 32) * U)
        squares = [map(float, sums[k, :n]) for k in (2, 3)]
        bounds = [
            steps.sum_bound(*map(ctypes.c_double, (*of_sums, *each, rows)))
            for each in zip(*squares, strict=True)
        ]
        exact = np.sum([each[which] for each in terms], axis=0)
        see(name, abs(exactly(sums[which, :n]) - exact), np.array(bounds))
        for close, title in zip(closely, ("dgamma, closely", "dgamma, in pairs"), strict=True):
            high, low, bound = close[which, :, :n]
            error = abs(exactly(high) + exactly(low) - exact)
            if which == 0:
                see(title, error, bound)
            else:
                assert (error[bound == 0] == 0).all()
    return rated


def narrow_cases(rng):
    """Yield x, dy, gamma, beta and eps of float32: rows whose roundings all go one way, and such as lose digits."""
    draw = rng.standard_normal
    for n in (2, 3, 7, 40, 333, 2100):
        shape = (16, n) if n < 50 else (2, n)
        yield draw(shape), draw(shape), draw(n), draw(n), 1e-5
        yield 100 + draw(shape), 100 + draw(shape), np.ones(n), np.zeros(n), 0.0
        yield 1 + 2.0**-23 * rng.integers(0, 3, shape), draw(shape), draw(n), draw(n), 1e-12
        yield (
            *draw((2, *shape)) * np.exp2(rng.uniform(-40, 40, (2, *shape))),
            draw(n),
            draw(n),
            1e-5,
        )
        # The first element is most of each sum; all that follow are rounded alike.
        x, dy = 2.0**-12 * rng.uniform(0.5, 0.9, (2, *shape))
        x[:, :16] = dy[:, :16] = np.where(np.arange(min(n, 16)) % 2, -1.0, 1.0)
        yield x, dy, np.ones(n), np.zeros(n), 1e-5
        # The same of g alone, and of a product of more digits; dx that is all slope.
        yield draw(shape), dy, rng.uniform(1, 2, n), np.zeros(n), 1e-5
        yield x, x, rng.uniform(0.99, 1.01, n), np.zeros(n), 0.0
        yield 1e-20 * draw(shape), draw(shape), draw(n), draw(n), 1e-5


@pytest.mark.parametrize(("kind", "far"), [("layer", 0), ("layer", 1), ("rms", 0)])
def test_no_input_breaks_a_bound_of_float64(kind, far, rng, steps):
    worst = {}
    with mp.workprec(300):
        for *case, eps in narrow_cases(rng):
            x, dy, gamma, beta = (each.astype(np.float32) for each in case)
            parameters = gamma.astype(float), beta.astype(float)
            for name, share in rate_narrow(steps, kind, far, x, dy, *parameters, eps).items():
                worst[name] = max(share, worst.get(name, 0.0))
    assert max(worst.values()) < 1, worst
    # Nor are they idle.
    idle = {name for name, share in worst.items() if not share > 0.02}
    assert idle <= {"dgamma, in pairs"}, worst


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", TABLES)
def test_what_is_not_in_doubt_rounds_alike_within_its_bound(kind, dtype, rng, steps):
    """With bounds so large that a test of one side only, or of an end, would be found in some elements of a hundred."""
    n, found, apart = 1000, 0, 1024
    for power in (-22, -24, -26) if dtype is np.float16 else (-35, -37, -39):
        x, dy = rng.standard_normal((2, n)).astype(np.float32)
        given, bounds = np.zeros((3, apart)), np.zeros(2)
        given[0, :n], given[2, :n] = rng.standard_normal((2, n))
        v, out = np.zeros((2, apart)), np.zeros((2, apart), dtype)
        marks = np.zeros((2, apart), np.uint8)
        how = int(kind == "layer"), int(dtype is np.float16)
        errors = 2.0**power / n**0.5, 2.0**power
        steps.doubts_of(*given_to(*how, dy, x, n, given, apart, *errors, bounds, v, out, marks))
        sizes = np.stack([abs(given[0]) + abs(given[2]), np.ones(apart)])
        # Of a bound, some is for the rounding of the ends.
        error = 0.999 * bounds[:, None] * sizes
        certain = marks[:, :n] == 0
        for end in (v - error, v + error):
            same = end.astype(dtype) == out
            assert same[:, :n][certain].all()
        found += certain.sum(axis=1)
    assert (n // 4 < found).all()
    assert (found < 3 * n).all()


@pytest.mark.parametrize("kind", TABLES)
def test_what_is_a_bound_above_a_midpoint_rounds_up(kind, rng, steps):
    """Where dx less its bound is written, that may be a midpoint, which rounds to even."""
    n, tried, wrong = 16384, np.zeros(1, np.int64), np.zeros(1, np.int64)
    x, dy = rng.standard_normal((2, n)).astype(np.float32)
    gamma = rng.standard_normal(n + 64)
    steps.at_midpoints_of(*given_to(int(kind == "layer"), dy, x, n, gamma, tried, wrong))
    assert tried[0] > 20
    assert wrong[0] == 0


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


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_sums_among_the_smallest_numbers_are_rounded_to_the_digits_that_these_have(dtype, backend):
    """The midpoints there are numbers where there are all digits: such sums were taken for certain."""
    last = 2.0**-149 if dtype == np.float32 else 2.0**-133
    ones, x = np.ones(8, dtype), 49.0 * np.array([[-5, -1, 1, 1, 1, 1, 1, 1]])
    dy = (last * np.arange(1.0, 16.0, 2.0)).astype(dtype)[None]
    how = {"rounding": "nearest", "backend": backend}
    _, cache = layer_norm_forward(x.astype(dtype), ones, ones, 0.0, **how)
    dgamma = layer_norm_backward(dy, cache).dgamma
    assert (dgamma.astype(float) / last).tolist() == [-2, -2, 2, 4, 4, 6, 6, 8]
    # dbeta of float32: a little more than 2.5 of the last bit; in float32 itself, 4 of it.
    dy = np.zeros((3, 8), np.float32)
    dy[0], dy[1], dy[2] = 2.0**-93, 2.5 * last + 2.0**-149, -(2.0**-93)
    _, cache = layer_norm_forward(dy + x.astype(np.float32), ones, ones, **how)
    dbeta = layer_norm_backward(dy, cache).dbeta
    assert (dbeta.astype(float) / last).tolist() == [3 if dtype == bfloat16 else 4] * 8
