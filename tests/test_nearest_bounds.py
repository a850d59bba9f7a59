"""No input exceeds a bound of rounding="nearest", as the headers of native/ compute it."""

from fractions import Fraction

import numpy as np
import pytest
from compiled import functions_of
from rationals import NAMES, rational, textbook

KINDS = ["layer", "rms"]
U = 2.0**-53


@pytest.fixture(scope="session")
def steps(builds):
    return functions_of("bounds", builds)


def parameters(gamma, beta):
    """Return gamma and beta with room behind, as bounds.cpp takes them, and their stride."""
    padded = np.zeros((2, len(gamma) + 64))
    padded[:, : len(gamma)] = gamma, beta
    return padded, padded.shape[1]


def in_pairs(steps, kind, x, dy, gamma, beta, eps):
    """Return y, dx, dgamma and dbeta, each as high parts, low parts and bounds."""
    padded, apart = parameters(gamma, beta)
    (rows, n), like_x = x.shape, (len(x), 3, apart)
    y, dx, sums = np.zeros(like_x), np.zeros(like_x), np.zeros((2, 3, apart))
    case = (array.astype(np.float64) for array in (dy, x))
    arguments = int(kind == "layer"), *case, rows, n, float(eps), padded, apart
    assert steps("in_pairs", *arguments, y, dx, sums) == 0
    return [np.moveaxis(array[..., :n], -2, 0) for array in (y, dx, *sums)]


def largest(error, bound):
    """Return the largest share of a bound that an error uses; a bound of 0 allows no error."""
    # The square root is rounded, after 150 digits.
    assert (error[bound == 0] < 2.0**-300).all()
    return float((error[bound != 0] / bound[bound != 0]).max(initial=0))


# ---- pairs, against the formulas in rational arithmetic ----


def hard_cases(rng):
    """Yield x, dy, gamma, beta, eps that are hard for one step of pairs."""
    draw, shape, n = rng.standard_normal, (6, 40), 40
    for length in (2, 3, 5, 33, 150):
        x = draw((40 if length < 9 else 1, length))
        # The kernels guess the mean from these elements: the guess is just good enough.
        x[:, :: max(length // 8, 1)] += 1.4 * (length > 9)
        yield x, draw(x.shape), draw(length), np.zeros(length), 1e-5
    for x in (1e8 + draw(shape), 2.0**53 + 2 * rng.integers(0, 3, shape)):
        yield x, 1e8 + draw(shape), draw(n), draw(n), 1e-5
    spread = draw((2, *shape)) * np.exp2(rng.uniform(-60, 60, (2, *shape)))
    yield *spread, draw(n), draw(n), 1e-5
    yield draw(shape), 1e8 + draw(shape), np.ones(n), draw(n), 1e-5
    # One large term in each lane, and then equal ones that all go to the low parts.
    n, sign = 480, np.where(np.arange(480) // 8 % 2, -1.0, 1.0)
    x, v = 2.0**-27 * rng.uniform(0.5, 0.99, (2, 1, 1)) * sign
    sums = np.repeat(2.0**-54 * rng.uniform(0.5, 1.99, (1, 1)), n, axis=1)
    x[:, :8] = v[:, :8] = np.where(np.arange(8) % 2, -1.0, 1.0)
    sums[:, :8] = 1
    for pair in ((x, x), (sums, v), (v, sums)):
        yield *pair, np.ones(n), np.zeros(n), 1e-5
    # The same along the rows.
    dy = np.tile(2.0**-54 * rng.uniform(0.5, 1.99, 16), (130, 1))
    dy[0] = 1
    yield np.tile(draw(16), (130, 1)), dy, np.ones(16), np.zeros(16), 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_breaks_a_bound_of_pairs(kind, rng, steps):
    worst = dict.fromkeys(NAMES, 0.0)
    for case in hard_cases(rng):
        pairs = in_pairs(steps, kind, *case)
        x, dy, gamma, beta, eps = case
        values = textbook(x, gamma, beta, eps, dy, kind, digits=150)
        for name, (high, rest, bound) in zip(NAMES, pairs, strict=True):
            error = abs(rational(high) + rational(rest) - values[name])
            if name in ("y", "dx"):
                # The bound leaves out the rounding of the low part.
                error -= Fraction(U) * abs(rational(rest))
            worst[name] = max(worst[name], largest(error, bound))
    assert max(worst.values()) < 1, worst
    # The bounds are not idle either.
    assert min(worst.values()) > 0.0005, worst
    assert min(worst["dgamma"], worst["dbeta"]) > 0.05, worst


# ---- float64, against pairs ----


def narrow_cases(rng):
    """Yield x, dy, gamma, beta and eps: rows whose roundings all go one way, and rows that lose digits."""
    draw = rng.standard_normal
    for n in (2, 3, 7, 40, 333, 2100):
        shape, ones, zero = (16, n) if n < 50 else (2, n), np.ones(n), np.zeros(n)
        yield draw(shape), draw(shape), draw(n), draw(n), 1e-5
        yield 100 + draw(shape), 100 + draw(shape), ones, zero, 0.0
        yield 1 + 2.0**-23 * rng.integers(0, 3, shape), draw(shape), draw(n), draw(n), 1e-12
        spread = draw((2, *shape)) * np.exp2(rng.uniform(-40, 40, (2, *shape)))
        yield *spread, draw(n), draw(n), 1e-5
        # The first element is most of each sum; all that follow are rounded alike.
        x, dy = 2.0**-12 * rng.uniform(0.5, 0.9, (2, *shape))
        x[:, :16] = dy[:, :16] = np.where(np.arange(min(n, 16)) % 2, -1.0, 1.0)
        yield x, dy, ones, zero, 1e-5
        # The same for g alone, with a gamma of more digits; then a dx that is all slope.
        yield draw(shape), dy, rng.uniform(1, 2, n), zero, 1e-5
        yield x, x, rng.uniform(0.99, 1.01, n), zero, 0.0
        yield 1e-20 * draw(shape), draw(shape), draw(n), draw(n), 1e-5


@pytest.mark.parametrize(("kind", "far"), [("layer", 0), ("layer", 1), ("rms", 0)])
def test_no_input_breaks_a_bound_of_float64(kind, far, rng, steps):
    worst = {}
    for *arrays, eps in narrow_cases(rng):
        case = x, dy, gamma, beta = [array.astype(np.float32) for array in arrays]
        (rows, n), (padded, apart) = x.shape, parameters(gamma, beta)
        y, dx = np.zeros((2, rows, 3, apart))
        sums, close = np.zeros((2, 2, apart)), np.zeros((2, 2, 3, apart))
        arguments = int(kind == "layer"), far, dy, x, rows, n, eps, padded, apart
        steps("in_float64", *arguments, y, dx, sums, close)
        of_y, of_dx, *of_sums = in_pairs(steps, kind, *case, eps)
        zero = np.zeros(apart)
        judged = {
            name + end: (array[:, 0], zero, array[:, i], value)
            for name, array, value in (("y", y, of_y), ("dx", dx, of_dx))
            for i, end in ((1, ""), (2, " by row"))
        }
        for k, name in enumerate(NAMES[2:]):
            judged[name] = sums[k, 0], zero, sums[k, 1], of_sums[k]
            judged |= {f"{name} closely, {i}": (*close[i, k], of_sums[k]) for i in (0, 1)}
        for name, (*pair, value) in judged.items():
            high, low, bound = (array[..., :n] for array in pair)
            share = largest(abs(high - value[0] + (low - value[1])), bound)
            worst[name] = max(worst.get(name, 0.0), share)
    assert max(worst.values()) < 1, worst
    # The bounds are not idle, except those of sums of pairs, which are exact to their last bits.
    idle = {name for name, share in worst.items() if share < 0.02}
    assert idle <= {"dgamma closely, 1", "dbeta closely, 0", "dbeta closely, 1"}, worst


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_certain_results_round_alike_within_their_bound(kind, dtype, rng, steps):
    """Errors are large: without a test of one side, or of an end, a few elements in a hundred would be wrong."""
    n, certain = 1000, 0
    for power in (-22, -24, -26) if dtype is np.float16 else (-35, -37, -39):
        x, dy = rng.standard_normal((2, n)).astype(np.float32)
        padded, apart = parameters(*rng.standard_normal((2, n)))
        bounds, v, out = np.zeros(2), np.zeros((2, apart)), np.zeros((2, apart), dtype)
        marks = np.zeros((2, apart), np.uint8)
        arguments = int(kind == "layer"), int(dtype is np.float16), dy, x, n, padded, apart
        steps("with_errors", *arguments, 2.0**power / n**0.5, 2.0**power, bounds, v, out, marks)
        sizes = np.stack([abs(padded[0]) + abs(padded[1]), np.ones(apart)])
        # A part of the bound is for the rounding of the ends.
        error = 0.999 * bounds[:, None] * sizes
        for end in (v - error, v + error):
            assert ((end.astype(dtype) == out) | (marks == 1))[:, :n].all()
        certain += (marks[:, :n] == 0).sum(axis=1)
    assert (n // 4 < certain).all()
    assert (certain < 3 * n).all()
