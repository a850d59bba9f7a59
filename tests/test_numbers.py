"""Broken by a second rounding, a midpoint, a conversion, or a bound that is too small, of the reference's numbers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from rationals import nearest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.reference.rounding import round_sum_to, round_to


def test_sums_of_two_round_once(dtype):
    """The second word decides at a midpoint of the first, with and without subnormals."""
    info = ml_dtypes.finfo(np.float32 if dtype == np.float64 else dtype)
    bits = np.array([1, 3, 2**5 + 1, 2**10 - 1], dtype=np.float64)
    ones, tiny = 1 + bits * float(info.eps) / 2, bits[:2] / 2 * float(info.smallest_subnormal)
    edge = float(info.max) * (1 + float(info.eps) / 4)
    at = np.array([*ones, *-ones, *tiny, edge, 1.0, 1.5, 3.0, 2.0**52 + 1, 2.0**52 + 0.5])
    hi = np.concatenate([at, np.nextafter(at, np.inf), np.nextafter(at, -np.inf)]).repeat(3)
    lo = np.tile([-1.0, 0.0, 1.0], len(hi) // 3) * np.abs(hi) * 2.0**-60
    with np.errstate(all="ignore"):
        actual = round_sum_to(hi, lo, dtype).astype(np.float64)
    expected = [nearest(Fraction(h) + Fraction(t), dtype) for h, t in zip(hi, lo, strict=True)]
    np.testing.assert_array_equal(actual, expected)


# ---- the kernels' conversions from and to 16 bits, against round_to ----


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits(dtype, wide):
    """dbeta of one row is dy; y of a constant row is beta, rounded: around each number and each midpoint."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    x = np.resize(np.array([0, 1], dtype), (1, every.size))
    _, cache = layer_norm_forward(x, beta=np.zeros(every.size, wide), backend="native")
    with np.errstate(all="ignore"):
        found = layer_norm_backward(every[None], cache, wrt="beta").dbeta
        expected = every.astype(wide) + wide(0)
        finite = np.unique(np.abs(expected[np.isfinite(expected)]))
    np.testing.assert_array_equal(found, expected)
    number = ~np.isnan(expected)
    assert found[number].tobytes() == expected[number].tobytes()
    # Behind the last number only its midpoint, which rounds to infinity.
    half = np.append(np.diff(finite), finite[-1] - finite[-2]) / 2
    near = np.concatenate([finite, finite + half, finite + half / 2, finite + 1.5 * half])
    with np.errstate(all="ignore"):
        beside = [np.nextafter(near, wide(end)) for end in (np.inf, -np.inf)]
        far = [5e-324, 2.0**-1022, finite[1] / 4, 1e-50, 3.4e38, 1e39, 1.7e308, np.inf, np.nan]
        beta = np.concatenate([near, *beside, np.array(far).astype(wide)])
        beta = np.concatenate([beta, -beta])
        expected = round_to(beta.astype(np.float64) + 0.0, np.dtype(dtype))
    found = layer_norm(np.ones((1, beta.size), dtype), beta=beta, backend="native")[0]
    nan = np.isnan(beta)
    assert np.isnan(found[nan].astype(wide)).all()
    wrong = (found.view(np.uint16) != expected.view(np.uint16)) & ~nan
    assert not wrong.any(), (beta[wrong][:5], found[wrong][:5])
    assert beta.size > 2**18


# ---- sums of parts ----


def fraction(part):
    """Return the value and the error of one element."""
    high, low, error = (Fraction(float(part[name])) for name in ("high", "low", "error"))
    return high + low, error


def some_parts(rng, count):
    parts = np.zeros(count, PARTIAL)
    spread = rng.integers(-70, 70, count) * rng.integers(0, 2, count)
    parts["high"] = rng.standard_normal(count) * 2.0**spread * (rng.random(count) < 0.9)
    parts["low"] = (
        parts["high"] * 2.0 ** rng.integers(-80, -54, count) * rng.choice([0, 1, -1], count)
    )
    parts["error"] = 2.0 ** rng.integers(-110, 5, count) * rng.choice([0, 1], count)
    return parts


def test_merged_bounds_its_error(rng):
    a, b = some_parts(rng, 1500), some_parts(rng, 1500)
    # Some cancel, but for the last of their bits.
    b[::3] = a[::3]
    b["high"][::3] *= -1 - 2.0**-52 * rng.integers(-1, 2, len(b[::3]))
    b["low"][::3] *= -1
    total, exact = merged(a, b), 0
    for one, other, both in zip(a, b, total, strict=True):
        (v, e), (w, f), (found, error) = map(fraction, (one, other, both))
        lost = abs(v + w - found)
        assert lost + e + f <= error
        # No more than it must, by a little.
        assert error <= (e + f + abs(v + w) * Fraction(2) ** -100) * Fraction(
            1 + 2.0**-40
        ) + Fraction(2) ** -1000 * max(abs(v), abs(w), e, f)
        exact += error == 0
    assert exact > 150


def test_an_unknown_or_infinite_error(dtype, rng):
    a, b = some_parts(rng, 50), some_parts(rng, 50)
    a["error"], b["error"] = np.nan, 0
    total = merged(a, b)
    assert np.isnan(total["error"]).all()
    assert not rounded(total, np.dtype("f4"))[1].any()
    parts = np.array([(1.0, 0.0, np.inf), (np.inf, 0.0, 0.0), (1.0, 0.0, 0.0)], PARTIAL)
    exact = np.array([(2.0, 0.0, 0.0)] * 3, PARTIAL)
    # An infinite sum may have left float64's range only in between.
    assert rounded(merged(parts, exact), np.dtype(dtype))[1].tolist() == [True, True, False]


def test_rounded_decides_what_the_error_allows(dtype, rng):
    parts = some_parts(rng, 600)
    # Midpoints, and next to them.
    parts["high"] %= 2.0**12
    parts["low"] = (
        np.spacing(parts["high"]) * 2.0**-20 * (parts["high"] != 0) * rng.choice([0, 1, -1], 600)
    )
    short = parts["high"].astype(dtype)
    parts["high"][::2] = (short.astype(float) + np.spacing(short).astype(float) / 2)[::2]
    values, undecided = rounded(parts, np.dtype(dtype))
    dtype, seen = np.dtype(dtype), set()
    for part, value, open_ in zip(parts, values, undecided, strict=True):
        v, e = fraction(part)
        ends = [nearest(end, dtype) for end in (v - e, v, v + e)]
        if not open_:
            assert {*ends} == {float(value)}, part
        else:
            # But for the rounding of the sum with the bound.
            wider = e + Fraction(2) ** -101 * abs(v)
            ends = (repr(nearest(end, dtype)) for end in (v - wider, v + wider))
            assert len({*ends}) == 2
        assert not open_ or e
        seen.add((bool(open_), e == 0))
    assert seen == {(False, True), (False, False), (True, False)}
