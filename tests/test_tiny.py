"""Rows of every length, anywhere in memory: the bits of the reference, and nothing beside them."""

import ml_dtypes
import numpy as np
import pytest
from norms import assert_contract, assert_same, compute

from stablenorm import Gradients, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm

jobs = pytest.importorskip("stablenorm.cpu.jobs")

NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
LENGTHS = [*range(1, 42), 48, 63, 64, 65]
# Whole groups of 32 rows, whole vectors of 8, and all that is left of them.
ROWS = [1, 2, 7, 8, 9, 15, 31, 32, 33, 39, 40, 63, 64, 65, 70]
POISON = 0xA5


@pytest.fixture(params=NARROW, ids=str)
def narrow(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["streaming", "plain"])
def streaming(request, monkeypatch):
    """Everything goes past the caches, or nothing."""
    monkeypatch.setattr(jobs, "PAST_CACHES", 0 if request.param else 1 << 60)
    jobs.make_plan.cache_clear()
    yield
    jobs.make_plan.cache_clear()


def make(rng, dtype, rows, n, offset=0.0):
    x = (rng.standard_normal((rows, n)) + offset).astype(dtype)
    dy = rng.standard_normal((rows, n)).astype(dtype)
    gamma, beta = rng.standard_normal((2, n)).astype(np.promote_types(dtype, np.float32))
    return x, gamma, beta, dy


def run(x, gamma, beta, dy, backend="numba"):
    y, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    return y, *layer_norm_backward(dy, cache)


def judge(x, gamma, beta, dy, eps):
    case = x, gamma, beta, eps, dy
    assert_contract(exact_layer_norm(*case), compute(case, backend="numba"))


def placed(array, offset, gap, backwards=False):
    """Return `array` in poisoned memory: `offset` bytes after a line, `gap` bytes between rows."""
    rows, n = array.shape
    stride = n * array.itemsize + gap
    memory = np.full(rows * stride + 512, POISON, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + offset
    if backwards:
        start, stride = start + (rows - 1) * stride, -stride
    view = np.ndarray(array.shape, array.dtype, memory.data, start, (stride, array.itemsize))
    view[...] = array
    return view, memory


def assert_untouched_around(view, memory):
    place = (view.ctypes.data - memory.ctypes.data, view.strides)
    for held in (memory, untouched := np.full_like(memory, POISON)):
        np.ndarray(view.shape, view.dtype, held.data, *place)[...] = 0
    assert memory.tobytes() == untouched.tobytes()


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.usefixtures("streaming")
def test_y_and_dx_have_the_bits_of_the_reference(rng, narrow, offset):
    if offset > float(ml_dtypes.finfo(narrow).max):
        pytest.skip("no such float16")
    for n in LENGTHS:
        for rows in ROWS:
            case = make(rng, narrow, rows, n, offset)
            # The sums may differ where they cancel.
            assert_same(run(*case)[:2], run(*case, backend="numpy")[:2], (rows, n))


def test_dy_may_have_another_type(rng):
    """One pair of types: each has a backward of its own to compile, for three seconds."""
    # Of n = 2, nearly all of dx cancels.
    for n in (1, 3, 4, 5, 17, 32):
        x, gamma, beta, dy = make(rng, ml_dtypes.bfloat16, 70, n)
        dy = dy.astype(np.float16)
        assert_same(*(run(x, gamma, beta, dy, backend)[1:] for backend in ("numpy", "numba")))


@pytest.mark.parametrize("n", [1, 3, 5, 17, 32])
@pytest.mark.usefixtures("streaming")
def test_many_tiles_have_the_bits_of_the_reference(rng, narrow, n):
    case = make(rng, narrow, (1 << 17) // n + 13, n)
    assert_same(run(*case)[:2], run(*case, backend="numpy")[:2])


# ---- places in memory ----


# 64, 100, 769: staged unless aligned; 1040, 2056: long enough to stream.
@pytest.mark.parametrize("n", [*range(1, 10), 12, 31, 32, 40, 64, 100, 769, 1040, 2056])
@pytest.mark.usefixtures("streaming")
def test_any_place_has_the_same_bits_and_keeps_its_neighbours(rng, dtype, n):
    x, gamma, beta, dy = make(rng, dtype, 70 if n < 64 else 13, n)
    expected = run(x, gamma, beta, dy)[:2]
    for offset in (0, 1, 2, 4, 8, 12, 16, 32, 48):
        for gap in (0, 6, 24, 64 - n * dtype.itemsize % 64):
            for rows in (1, 7, 33, 70) if gap == 6 else (13,):
                inputs = [placed(v[:rows], offset, gap)[0] for v in (x, dy)]
                y, y_memory = placed(np.zeros_like(x[:rows]), offset, gap)
                _, cache = layer_norm_forward(inputs[0], gamma, beta, out=y, backend="numba")
                dx, dx_memory = placed(np.zeros_like(x[:rows]), offset, gap)
                layer_norm_backward(inputs[1], cache, out=Gradients(dx, None, None))
                assert_same((y, dx), [each[:rows] for each in expected], (offset, gap, rows))
                assert_untouched_around(y, y_memory)
                assert_untouched_around(dx, dx_memory)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 32])
@pytest.mark.usefixtures("streaming")
def test_results_in_the_place_of_inputs(rng, dtype, n, backend):
    x, gamma, beta, dy = make(rng, dtype, 1000, n)
    expected, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    of_x = layer_norm_backward(dy, cache).dx
    layer_norm_backward(dy, cache, out=Gradients(dy, None, None))
    layer_norm(x, gamma, beta, out=x, backend=backend)
    assert_same((x, dy), (expected, of_x))


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


# ---- the contract, where bits may differ ----


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 32, 40])
@pytest.mark.parametrize("eps", [1e-5, 1e-300])
def test_any_scale_keeps_the_contract(rng, narrow, n, eps):
    """Subnormals and the largest, and rows of a single value, which have no variance."""
    x, gamma, beta, dy = make(rng, narrow, 41, n)
    finfo = ml_dtypes.finfo(narrow)
    scales = np.array([float(finfo.max) / 8, 2.0**-14, float(finfo.tiny) / 4])
    x = (x.astype(np.float64) * np.resize(scales, (41, 1))).astype(narrow)
    x[20:30] = x[20:30, :1]
    judge(x, gamma, beta, dy, eps)


@pytest.mark.parametrize(
    ("rows", "n"),
    [(1, 1), (7, 1), (300, 1), (33, 2), (70, 3), (7, 5), (300, 8), (1, 17), (33, 17), (70, 40)],
)
@pytest.mark.parametrize(("offset", "eps"), [(0.0, 1e-5), (1e3, 1e-5), (0.0, 0.0)])
def test_sums_over_rows_keep_the_contract(rng, narrow, rows, n, offset, eps):
    """Without eps, rstd of the rows of zeros that fill up a vector is infinite, and their xhat NaN."""
    judge(*make(rng, narrow, rows, n, offset), eps if n > 1 else 1e-5)
