"""One rounding, decided by rational arithmetic: midpoints and their neighbours, every dtype."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from stablenorm.reference.doubledouble import Wide, two_prod, two_sum
from stablenorm.reference.rounding import round_sum_to, round_to


def nearest(value, dtype):
    """Round a Fraction to nearest even by comparing with the neighbours of a first guess."""
    info = ml_dtypes.finfo(dtype)
    if value == 0:
        return 0.0
    exponent = max(floor_log2(abs(value)), int(info.minexp)) - int(info.nmant)
    unit = Fraction(2) ** exponent
    steps = round(value / unit)  # Python rounds a Fraction half to even
    rounded = steps * unit
    largest = Fraction(float(info.max))
    return float("inf") * (1 if value > 0 else -1) if abs(rounded) > largest else float(rounded)


def floor_log2(value):
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def midpoints(dtype):
    info = ml_dtypes.finfo(dtype)
    bits = np.array([1, 3, 2**5 + 1, 2**10 - 1], dtype=np.float64)
    ones = 1 + bits * float(info.eps) / 2
    tiny = (bits[:2] / 2) * float(info.smallest_subnormal) if dtype != np.float64 else []
    largest = np.array([float(info.max)])
    edge = largest + (largest - float(np.nextafter(info.max, dtype.type(0)))) / 2
    return np.concatenate([ones, -ones, tiny, np.minimum(edge, np.finfo(np.float64).max)])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_no_double_rounding_around_midpoints(name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    at = midpoints(dtype)
    values = np.concatenate([at, np.nextafter(at, np.inf), np.nextafter(at, -np.inf)])
    with np.errstate(all="ignore"):
        actual = round_to(values, dtype).astype(np.float64)
    expected = [nearest(Fraction(float(v)), dtype) for v in values]
    np.testing.assert_array_equal(actual, expected)


def test_sums_of_two_round_once(dtype):
    """The second word decides at a midpoint of the first, with and without subnormals."""
    hi = midpoints(np.dtype(np.float32) if dtype == np.float64 else dtype)
    hi = np.concatenate([hi, np.array([1.0, 1.5, 3.0, 5.0, 2.0**52 + 1, 2.0**52 + 0.5])])
    hi = np.repeat(hi, 3)
    lo = np.tile([-1.0, 0.0, 1.0], len(hi) // 3) * np.abs(hi) * 2.0**-60
    for exponent in (0, 3, -1074, -1075, -1060, -1050, 900):
        shift = np.full(hi.shape, exponent, np.int32) if exponent else 0
        with np.errstate(all="ignore"):
            actual = round_sum_to(hi, lo, shift, dtype).astype(np.float64)
        expected = [
            nearest((Fraction(float(h)) + Fraction(float(t))) * Fraction(2) ** exponent, dtype)
            for h, t in zip(hi, lo, strict=True)
        ]
        np.testing.assert_array_equal(actual, expected, err_msg=f"exponent {exponent}")


def exact(v, index):
    pair = Fraction(float(v.hi[index])) + Fraction(float(v.lo[index]))
    exponent = np.broadcast_to(v.exponent, v.hi.shape)[index]
    return pair * Fraction(2) ** int(exponent)


def test_sums_and_products_are_error_free(rng):
    a, b = rng.standard_normal((2, 200)) * 10.0 ** rng.integers(-20, 20, (2, 200))
    for operation, combine in ((two_sum, Fraction.__add__), (two_prod, Fraction.__mul__)):
        value, error = operation(a, b)
        for i in range(len(a)):
            expected = combine(Fraction(a[i]), Fraction(b[i]))
            assert Fraction(value[i]) + Fraction(error[i]) == expected


@pytest.mark.parametrize("scale", [0, 150, 1000, -1000])
def test_wide_arithmetic_keeps_a_hundred_bits(rng, scale):
    a, b = (Wide.exactly(np.ldexp(rng.standard_normal((3, 5)), scale)) for _ in range(2))
    with np.errstate(all="ignore"):
        a = a * b  # fills the second words
        total, product, mean, root = a + b, a * b, b.mean(), (b * b).rsqrt()
    for i in np.ndindex(3, 5):
        added = exact(a, i) + exact(b, i)
        assert abs(exact(total, i) - added) <= abs(added) * Fraction(2) ** -103
        times = exact(a, i) * exact(b, i)
        assert abs(exact(product, i) - times) <= abs(times) * Fraction(2) ** -102
        assert abs(exact(root, i) * abs(exact(b, i)) - 1) <= Fraction(2) ** -102
    for row in range(3):
        expected = sum(exact(b, (row, j)) for j in range(5)) / 5
        size = sum(abs(exact(b, (row, j))) for j in range(5)) / 5
        assert abs(exact(mean, (row, 0)) - expected) <= size * Fraction(2) ** -102


def test_zero_never_sets_the_exponent():
    """0 * 2**1000 + 1 once lost the 1: a zero has no magnitude, whatever exponent it carries."""
    zero = Wide(np.zeros(1), np.zeros(1), np.array([5000], np.int32))
    assert (zero + Wide.exactly(np.array([2.0**-900]))).round_to(np.dtype(float))[0] == 2.0**-900
