"""Results that go past the caches have the same bits, wherever rows and lines begin."""

import numpy as np
import pytest

from stablenorm import Gradients, layer_norm_backward, layer_norm_forward

jobs = pytest.importorskip("stablenorm.cpu.jobs")


@pytest.fixture(params=[True, False], ids=["streaming", "plain"])
def streaming(request, monkeypatch):
    """Everything goes past the caches, or nothing."""
    plans = jobs.forward_plan, jobs.backward_plan
    monkeypatch.setattr(jobs, "PAST_CACHES", 0 if request.param else 1 << 60)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def place(shape, dtype, offset, gap):
    """Return an array `offset` bytes after a line, `gap` bytes between rows, and all around it."""
    rows, n = shape
    stride = n * dtype.itemsize + gap
    memory = np.full(rows * stride + 512, 0xA5, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    array = np.ndarray(shape, dtype, memory.data, start, (stride, dtype.itemsize))
    return array, memory


def untouched_around(array, memory):
    """Tell whether `memory` is as it was wherever `array` does not cover it."""
    covered = memory.copy()
    place = (array.ctypes.data - memory.ctypes.data, array.strides)
    np.ndarray(array.shape, array.dtype, covered.data, *place)[...] = 0
    untouched = np.full_like(memory, 0xA5)
    np.ndarray(array.shape, array.dtype, untouched.data, *place)[...] = 0
    return covered.tobytes() == untouched.tobytes()


# 3: short rows; 64, 100, 769: staged unless aligned; 1040, 2056: long enough to stream.
@pytest.mark.parametrize("n", [3, 64, 100, 769, 1040, 2056])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 16, 32, 48])
@pytest.mark.usefixtures("streaming")
def test_any_place_has_the_same_bits_and_keeps_its_neighbours(rng, dtype, n, offset):
    x, dy = (rng.standard_normal((13, n)).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    expected, cache = layer_norm_forward(x, gamma, beta, backend="numpy")
    of_x = layer_norm_backward(dy, cache)
    for gap in (0, 64 - n * dtype.itemsize % 64, 24):
        y, memory = place(x.shape, dtype, offset, gap)
        _, cache = layer_norm_forward(x, gamma, beta, out=y, backend="numba")
        assert y.tobytes() == expected.tobytes(), (gap, offset)
        assert untouched_around(y, memory)
        dx, memory = place(x.shape, dtype, offset, gap)
        gradients = layer_norm_backward(dy, cache, out=Gradients(dx, None, None))
        assert untouched_around(dx, memory)
        for one, other in zip(of_x, gradients, strict=True):
            assert one.tobytes() == other.tobytes(), (gap, offset)


@pytest.mark.usefixtures("streaming")
def test_hard_rows_among_streamed_ones(rng):
    x = rng.standard_normal((70, 33))
    x[5], x[40], x[69] = 1e300 * x[5], 1e-310, np.nan
    y, cache = layer_norm_forward(x, backend="numba")
    expected, by_reference = layer_norm_forward(x, backend="numpy")
    np.testing.assert_array_equal(y, expected)
    dx = layer_norm_backward(x[::-1], cache).dx
    np.testing.assert_array_equal(dx, layer_norm_backward(x[::-1], by_reference).dx)
    over = x[::-1].copy()
    layer_norm_backward(over, cache, out=(over, None, None))
    np.testing.assert_array_equal(over, dx)
