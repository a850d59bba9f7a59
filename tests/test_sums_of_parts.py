"""Sums over parts of the rows: merged, and rounded where their bounds allow it (test_dask.py: of calls)."""

from fractions import Fraction

import numpy as np
from rationals import nearest

from stablenorm.reference.partial import PARTIAL, merged, rounded


def fraction(part):
    """Return the value and the error of one element."""
    unit = Fraction(2) ** int(part["exponent"])
    return (Fraction(float(part["high"])) + Fraction(float(part["low"]))) * unit, Fraction(
        float(part["error"])
    ) * unit


def some_parts(rng, count):
    parts = np.zeros(count, PARTIAL)
    spread = rng.integers(-70, 70, count) * rng.integers(0, 2, count)
    parts["high"] = rng.standard_normal(count) * 2.0**spread * (rng.random(count) < 0.9)
    parts["low"] = (
        parts["high"] * 2.0 ** rng.integers(-80, -54, count) * rng.choice([0, 1, -1], count)
    )
    parts["error"] = 2.0 ** rng.integers(-110, 5, count) * rng.choice([0, 1], count)
    parts["exponent"] = rng.integers(-1, 2, count) * rng.choice([0, 1, 900, 3000], count)
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


def test_an_error_that_nobody_knows_stays_unknown(rng):
    a, b = some_parts(rng, 50), some_parts(rng, 50)
    a["error"], b["error"] = np.nan, 0
    total = merged(a, b)
    assert np.isnan(total["error"]).all()
    a["error"] = 0
    for word in ("high", "low", "exponent"):
        assert total[word].tobytes() == merged(a, b)[word].tobytes()
    assert not rounded(total, np.dtype("f4"))[1].any()


def test_an_infinite_error_leaves_all_open(dtype):
    parts = np.array([(1.0, 0.0, np.inf, 0), (np.inf, 0.0, 0.0, 0), (1.0, 0.0, 0.0, 0)], PARTIAL)
    exact = np.array([(2.0, 0.0, 0.0, 1)] * 3, PARTIAL)
    assert rounded(merged(parts, exact), np.dtype(dtype))[1].tolist() == [True, False, False]


def test_rounded_decides_what_the_error_allows(dtype, rng):
    parts = some_parts(rng, 600)
    parts["exponent"] = rng.choice([0, 0, -1, -140, -1074], 600)
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
            assert {float(end) for end in ends} == {float(value)}, part
        else:
            # But for the rounding of the sum with the bound.
            wider = e + Fraction(2) ** -101 * abs(v)
            assert len({nearest(end, dtype).tobytes() for end in (v - wider, v + wider)}) == 2
        assert not open_ or e
        seen.add((bool(open_), e == 0))
    assert seen == {(False, True), (False, False), (True, False)}
