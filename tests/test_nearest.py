"""rounding="nearest": ties, zeros, the range, sums of parts; digests and elements next to midpoints."""

import itertools
import math
import time
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from norms import assert_right, bits, compute
from rationals import NAMES, nearest, textbook, unit

from stablenorm import exact_layer_norm, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.cli import main
from stablenorm.cli import run as command
from stablenorm.formats import format_of
from stablenorm.records import bfloat16
from stablenorm.reference.equations import round_to
from stablenorm.reference.sums import PARTIAL, merged, rounded
from stablenorm.testing import digest, digest_inputs, near_midpoints, published_digests
from stablenorm.testing.families import Case


def ties(dtype, rng):
    """Yield rows with a rational xhat, and gamma, beta and dy of few bits: ties and zeros abound."""
    small = lambda *shape: rng.integers(-40, 41, shape) / 8
    step = 2.0 ** (1 - format_of(dtype).digits)
    two = np.array([[1, -3], [5, 4], [2**-9, 2**9]])
    halves = rng.permuted(np.tile([3, 3, 7, 7, 3, 7.0], (4, 1)), axis=1)
    square = np.arange(1.0, 8) * [[1], [2], [-3]]
    # Their square roots differ by rational factors.
    pairs = np.repeat(small(3, 5), 2, axis=0) * [[1], [1], [2], [4], [5], [3]]
    for x in (two, halves, square, pairs):
        rows, n = x.shape
        for gamma, beta in ((1 + step * small(n), small(n)), (small(n), 0 * small(n))):
            opposite = np.resize([1, -1], (n, rows)).T
            for dy in (small(rows, n), 1 + step * small(rows, n), opposite):
                x, gamma, beta, dy = (a.astype(dtype) for a in (x, gamma, beta, dy))  # noqa: PLW2901
                yield Case(x, gamma, beta, 0.0, dy)


def test_ties_and_exact_zeros(dtype, rng):
    for case in ties(dtype, rng):
        assert_right(case, roundings=["nearest"])


F4, F8, HUGE = np.float32, np.float64, 1.7e308
# The dtypes of dy and dbeta, and a column of dy, whose sum is dbeta.
COLUMNS = [
    # The large terms cancel, then the sum is a little above a midpoint; its low part is larger than its high part.
    (np.float16, np.float16, [2.0**14, 1, 2.0**-11, -(2.0**14), 2.0**-24]),
    *((dtype, dtype, [2.0**56, 1, 2.0**-digits, -(2.0**56), 2.0**-55])
      for dtype, digits in ((bfloat16, 8), (F4, 24), (F8, 53))),
    # The same for a pair of sums that does not hold the last term.
    (F8, F8, [1.0, 2.0**-53, 2.0**-160]),
    # Sums with more digits than a pair.
    (F4, F4, [2.0**120, 2.0**60, 3.0, -(2.0**120), -(2.0**60), 0, 0, 0]),
    (F8, F8, [2.0**190, 2.0**90 + 2.0**38, 3.0, -(2.0**190), -(2.0**90) - 2.0**38, 0, 0, 0]),
    # A midpoint of subnormal numbers, which have fewer digits.
    (F4, bfloat16, [2.0**-93, 2.5 * 2.0**-133 + 2.0**-149, -(2.0**-93)]),
    # Sums along a row overflow.
    (F8, F8, [HUGE, HUGE, -HUGE]),
]  # fmt: skip


def rare_cases():
    """Yield cases, and keywords of their calls."""
    ones = np.ones((3, 1), np.float32)
    # dx of one column vanishes: dsum alone is rounded, whatever its size.
    dsum = np.array([[2.0], [-1e57], [1e120]])
    yield Case(ones.astype(float), None, None, 1e-5, ones), {"dsum": dsum}
    # Rows of equal elements have xhat 0 and an rstd of 10^150; the others cancel: zero in every unit.
    x = np.array([[1000, 1000], [1000, 1004], [1000, 996]], np.float32)
    yield Case(x, x[0], None, 1e-300, np.full_like(x, 3)), {}
    # A large beta sends the forward to the reference, and tiny rows let dgamma underflow to -0.
    x, dy = np.array([[1.82512575e-309, -3.03630258e-309]]), np.array([[-1.0, 1.0]]) / 64
    yield Case(x, np.ones(2), np.array([1e200, 1.0]), 1e30, dy), {}
    # Products of a large dy and xhat overflow or cancel, but leave no NaN.
    x, dy = 2.0**-100 * np.tile([1.0, 1.0, -1.0, -1.0], (1, 4)), np.zeros((1, 16))
    dy[0, 1::4] = 2.0**1000 * np.array([1.0, -1.0, 1.0, -1.0])
    yield Case(x, np.ones(16), np.ones(16), 0.0, dy), {}
    # A dgamma among the smallest numbers is rounded to their digits.
    x, dy = 49.0 * np.array([[-5, -1, 1, 1, 1, 1, 1, 1]]), np.arange(1.0, 16.0, 2.0)[None]
    for dtype, last in ((np.float32, 2.0**-149), (bfloat16, 2.0**-133)):
        ones = np.ones(8, dtype)
        yield Case(x.astype(dtype), ones, ones, 0.0, (last * dy).astype(dtype)), {}
    for of_dy, of_beta, column in COLUMNS:
        dy = np.repeat(np.array(column)[:, None], 4, axis=1).astype(of_dy)
        x = np.random.default_rng(0).standard_normal(dy.shape).astype(of_dy)
        yield Case(x, None, np.zeros(4, of_beta), 1e-5, dy), {}


@pytest.mark.parametrize(("case", "keywords"), list(rare_cases()))
def test_rare_cases(case, keywords):
    assert_right(case, **keywords)


def test_overflow_and_underflow_are_those_of_one_rounding(dtype):
    """y is gamma, -gamma or a sum with beta around the largest number, the smallest, and midpoints."""
    form = format_of(dtype)
    ulp, least = 2.0 ** (form.emax + 1 - form.digits), 2.0 ** (form.emin + 1 - form.digits)
    # In float64, a product below the least number is zero.
    gamma = np.array([form.largest, form.largest, least, 0.4 * least, 1.5 * least, 1.0])
    beta = np.array([ulp / 2, ulp / 4, -least / 2, 0, 0, 0])
    x = np.array([[1, 1, 1, -1, -1, -1], [-1, -1, -1, 1, 1, 1]], dtype)
    dy = (np.full(x.shape, form.largest) * [[0.5], [0.6]]).astype(dtype)
    case = Case(x, gamma, beta, 0.0, dy)
    assert_right(case, roundings=["nearest"])


def test_sums_of_two_round_once(dtype):
    """The low word decides at a midpoint of the high one, also for subnormal numbers."""
    info = ml_dtypes.finfo(np.float32 if dtype == np.float64 else dtype)
    odd = np.array([1, 3, 2**5 + 1, 2**10 - 1], dtype=np.float64)
    ones, tiny = 1 + odd * float(info.eps) / 2, odd[:2] / 2 * float(info.smallest_subnormal)
    edge = float(info.max) * (1 + float(info.eps) / 4)
    at = np.array([*ones, *-ones, *tiny, edge, 1.0, 1.5, 3.0, 2.0**52 + 1, 2.0**52 + 0.5])
    high = np.concatenate([at, np.nextafter(at, np.inf), np.nextafter(at, -np.inf)]).repeat(3)
    low = np.tile([-1.0, 0.0, 1.0], len(high) // 3) * np.abs(high) * 2.0**-60
    with np.errstate(all="ignore"):
        actual = round_to(high, dtype, low).astype(np.float64)
    expected = [nearest(Fraction(h) + Fraction(t), dtype) for h, t in zip(high, low, strict=True)]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_every_number_of_16_bits(dtype, wide):
    """dbeta of one row is dy; y of a constant row is beta, rounded: around each number and each midpoint."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    x = np.resize(np.array([0, 1], dtype), (1, every.size))
    _, cache = layer_norm_forward(x, beta=np.zeros(every.size, wide), backend="native")
    with np.errstate(all="ignore"):
        dbeta = layer_norm_backward(every[None], cache, wrt="beta").dbeta
        expected = every.astype(wide) + wide(0)
        finite = np.unique(np.abs(expected[np.isfinite(expected)]))
        # Beyond the largest number only a midpoint, which rounds to infinity.
        half = np.append(np.diff(finite), finite[-1] - finite[-2]) / 2
        near = np.concatenate([finite, finite + half, finite + half / 2, finite + 1.5 * half])
        beside = [np.nextafter(near, wide(end)) for end in (np.inf, -np.inf)]
        far = [5e-324, 2.0**-1022, finite[1] / 4, 1e-50, 3.4e38, 1e39, 1.7e308, np.inf, np.nan]
        # The far numbers have a row of their own: they send it to integers.
        rows = np.concatenate([near, *beside]), np.array(far).astype(wide)
    np.testing.assert_array_equal(dbeta, expected)
    number = ~np.isnan(expected)
    assert dbeta[number].tobytes() == expected[number].tobytes()
    for row in rows:
        beta = np.concatenate([row, -row])
        y = layer_norm(np.ones((1, beta.size), dtype), beta=beta, backend="native")[0]
        with np.errstate(all="ignore"):
            rounds = round_to(beta.astype(np.float64) + 0.0, np.dtype(dtype))
        nan = np.isnan(beta)
        assert np.isnan(y[nan].astype(wide)).all()
        wrong = (bits(y) != bits(rounds)) & ~nan
        assert not wrong.any(), (beta[wrong][:5], y[wrong][:5])


# ---- sums of parts ----


def some_parts(rng, count):
    parts = np.zeros(count, PARTIAL)
    spread = 2.0 ** (rng.integers(-70, 70, count) * rng.integers(0, 2, count))
    parts["high"] = rng.standard_normal(count) * spread * (rng.random(count) < 0.9)
    parts["low"] = (
        parts["high"] * 2.0 ** rng.integers(-80, -54, count) * rng.choice([0, 1, -1], count)
    )
    parts["error"] = 2.0 ** rng.integers(-110, 5, count) * rng.choice([0, 1], count)
    return parts


def test_what_partial_sums_certify_is_right(dtype, rng):
    """Both ends of the bound of two sums round to the result, midpoints of the dtype and sums that cancel among them."""
    a, b = some_parts(rng, 1500), some_parts(rng, 1500)
    b[::3] = a[::3]
    b["high"][::3] *= -1 - 2.0**-52 * rng.integers(-1, 2, len(b[::3]))
    a["high"][1::3] %= 2.0**12
    short = a["high"][1::3].astype(dtype)
    a["high"][1::3] = short.astype(float) + np.spacing(short).astype(float) / 2
    b["high"][1::3] = b["low"][1::3] = 0
    values, uncertified = rounded(merged(a, b), dtype)
    for one, other, value in zip(
        a[~uncertified], b[~uncertified], values[~uncertified], strict=True
    ):
        high, low, error = (
            Fraction(float(one[k])) + Fraction(float(other[k])) for k in PARTIAL.names
        )
        ends = [nearest(high + low + e, dtype) for e in (-error, error)]
        assert [repr(end) for end in ends] == [repr(float(value))] * 2, (one, other)
    # Few are left open that need not be, and exact sums are none of them.
    assert not uncertified[(a["error"] == 0) & (b["error"] == 0)].any()
    assert uncertified.mean() < 0.5


def test_an_unknown_or_infinite_error(dtype, rng):
    a, b = some_parts(rng, 50), some_parts(rng, 50)
    a["error"], b["error"] = np.nan, 0
    assert not rounded(merged(a, b), dtype)[1].any()
    parts = np.array([(1.0, 0.0, np.inf), (np.inf, 0.0, 0.0), (1.0, 0.0, 0.0)], PARTIAL)
    # An infinite sum may have left float64's range only in between.
    exact = np.array([(2.0, 0.0, 0.0)] * 3, PARTIAL)
    assert rounded(merged(parts, exact), dtype)[1].tolist() == [True, True, False]


# ---- fixed inputs, and digests of their results ----


@pytest.mark.parametrize("name", published_digests())
def test_the_digests_are_those_of_the_exact_results(name):
    case = digest_inputs()[name]
    exact, dtypes = exact_layer_norm(*case), [case[i].dtype for i in (0, 0, 1, 2)]
    digests = tuple(digest(exact.rounded(*pair)) for pair in zip(NAMES, dtypes, strict=True))
    assert digests == published_digests()[name]


@pytest.mark.skipif("native" not in BACKENDS, reason="the digests are those of the kernels")
def test_the_kernels_have_the_same_bits_by_default_as_in_the_version_before():
    expected = Path(__file__).with_name("digests_fast.txt").read_text("utf-8").splitlines()
    cases = digest_inputs()
    actual = {name: " ".join(map(digest, compute(case).values())) for name, case in cases.items()}
    assert [f"{name:27} {digests}" for name, digests in actual.items()] == expected


def test_all_nan_are_one_and_the_order_of_bytes_is_fixed():
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert digest(nan[:1]) == digest(nan[1:])
    assert digest(np.ones(1, "<f4")) == digest(np.ones(1, ">f4")) != digest(np.zeros(1, "f4"))


@pytest.mark.usefixtures("plain_terminal")
def test_run_prints_them_and_says_whether_they_are_the_same(capsys, monkeypatch):
    assert main(["run", "--digests"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    expected = [[*name.split(), *digests] for name, digests in published_digests().items()]
    assert [line.split() for line in lines] == expected
    assert verdict == "All are as published."
    monkeypatch.setattr(command, "digest", lambda _: 12 * "0")
    assert main(["run", "--digests"]) == 1
    assert capsys.readouterr().out.endswith(" LINES DIFFER from those published.\n")


# ---- next to midpoints ----


def by_input(cases):
    """Yield the arguments of each input, and its elements, which follow one another."""
    for _, group in itertools.groupby(cases, lambda case: id(case.x)):
        first, *others = group
        yield first[:5], (first, *others)


def test_the_answers_are_those_of_the_formulas():
    for inputs, cases in by_input(near_midpoints()):
        # More digits than any input spans.
        results = textbook(*inputs, digits=400)
        for case in cases:
            exact = results[case.output][case.where]
            assert case.expected == nearest(exact, case.expected.dtype)
            place = exact / unit(exact, case.expected.dtype)
            distance = place - math.floor(place) - Fraction(1, 2)
            assert abs(distance - Fraction(case.distance)) <= 1e-15 * abs(case.distance) + 1e-300


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_fast_misrounds_some_of_each_output_and_nearest_none(backend, rounding):
    missed = []
    for inputs, cases in by_input(near_midpoints()):
        results = compute(inputs, backend=backend, rounding=rounding)
        wrong = [case for case in cases if results[case.output][case.where] != case.expected]
        missed += [(case.output, case.expected.dtype.name) for case in wrong]
    kinds = {output for output, _ in missed}
    assert kinds == {*NAMES} if rounding == "fast" else missed == []


# ---- exact cases ----


@pytest.mark.parametrize("n", [64, 256])
def test_elements_at_the_mean_of_their_row_stay_in_the_kernels(n, rng):
    """No bound certifies a y of 0: such rows went to Python's integers, 80 and 1 000 times as slow."""
    few = rng.integers(-4, 5, (512, n))
    every = np.concatenate([few[:, : n // 2], -few[:, : n // 2]], axis=1)
    every[:, 0] = every[:, n // 2] = 0

    def seconds(x, dy):
        x, dy = (v.astype(np.float32) for v in (x, dy))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            _, cache = layer_norm_forward(x, rounding="nearest", backend="native")
            layer_norm_backward(dy, cache)
            times.append(time.perf_counter() - start)
        return min(times)

    ordinary = seconds(rng.standard_normal(few.shape), rng.standard_normal(few.shape))
    # Alone on the machine 1.2 and 7 times as long.
    dy = rng.integers(-4, 5, few.shape)
    assert seconds(few, dy) < 4 * ordinary
    assert seconds(every, dy) < 20 * ordinary
