"""From and to 16 bits: each conversion of the compiled kernels against `reference.rounding.round_to`."""

import pytest
from interpreter import python

pytest.importorskip("numba")


CONVERSIONS = """
import ml_dtypes
import numpy as np
from numba import njit
from stablenorm.cpu import memory
from stablenorm.reference.rounding import round_to

@njit
def at(array):
    return memory.pointer_at(array.ctypes.data, array.dtype)

@njit
def convert(source, to):
    memory.wide_vectors()
    for j in range(source.size):
        memory.put(at(to), j, memory.get(at(source), j))

@njit
def convert_nearly(source, to, doubt):
    for j in range(source.size):
        doubt[j] = memory.put_nearly(at(to), j, memory.get(at(source), j), np.int32(0))

def all_of(dtype):
    return np.arange(2**16, dtype=np.uint16).view(dtype)

for dtype, as_bits in ((np.dtype(np.float16), np.int16), (np.dtype(ml_dtypes.bfloat16), np.uint16)):
    every = all_of(dtype)
    wide = np.empty(every.size)
    convert(every.view(as_bits), wide)
    with np.errstate(all="ignore"):
        expected = every.astype(np.float64)
    nan = np.isnan(expected)
    assert (np.isnan(wide) == nan).all(), dtype
    assert wide[~nan].tobytes() == expected[~nan].tobytes(), dtype

    # Every finite value, every midpoint of two, the one on the way to infinity included, and the
    # float64 on both sides of each; then what lies far outside.
    finite = np.sort(np.abs(expected[np.isfinite(expected)]))
    finite = np.unique(finite)
    beyond = 2 * finite[-1] - finite[-2]
    middle = (finite + np.append(finite[1:], beyond)) / 2
    quarters = np.concatenate([(finite + middle) / 2, (middle + np.append(finite[1:], beyond)) / 2])
    near = np.concatenate([finite, middle, quarters, [beyond]])
    near = np.concatenate([near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)])
    far = [0.0, 5e-324, 2.0**-1022, finite[1] / 4, 1e-50, 1e39, 3.5e38, 1.7e308, np.inf, np.nan]
    # A NaN whose payload float32 would lose.
    odd_nan = np.array([0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF], np.uint64).view(np.float64)
    values = np.concatenate([near, far, odd_nan])
    values = np.concatenate([values, -values])
    actual = np.empty(values.size, as_bits)
    convert(values, actual)
    with np.errstate(all="ignore"):
        rounded = round_to(values, dtype)
    nan = np.isnan(values)
    assert np.isnan(actual.view(dtype)[nan].astype(np.float64)).all(), dtype
    wrong = (actual.view(np.uint16) != rounded.view(np.uint16)) & ~nan
    assert not wrong.any(), (dtype, values[wrong][:5], actual.view(dtype)[wrong][:5])
    print(values.size)

    doubt = np.zeros(values.size, np.int32)
    convert_nearly(values, actual, doubt)
    wrong = (actual.view(np.uint16) != rounded.view(np.uint16)) & ~nan & (doubt >= 0)
    assert not wrong.any(), (dtype, values[wrong][:5], actual.view(dtype)[wrong][:5])
    ordinary = np.random.default_rng(0).standard_normal(1 << 16)
    convert_nearly(ordinary, np.empty(1 << 16, as_bits), doubt[: 1 << 16])
    assert (doubt[: 1 << 16] < 0).mean() < 2**-11, dtype
"""


def test_conversions_from_and_to_16_bits():
    counts = python(CONVERSIONS)
    # Six values about each of 2**15 bit patterns and midpoints, of both signs.
    assert min(map(int, counts.split())) > 2**18
