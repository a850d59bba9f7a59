"""Rows of few elements: every rest of vectors, pairs of rows and cache lines."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import Gradients, layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.oracle import exact_layer_norm

jobs = pytest.importorskip("stablenorm.cpu.jobs")

NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)]
LENGTHS = [*range(1, 42), 48, 63, 64, 65]
# Whole groups of 32 rows, whole vectors of 8, and all that is left of them.
ROWS = [1, 2, 7, 8, 9, 15, 31, 32, 33, 39, 40, 63, 64, 65, 70]
POISON = 0xA5


@pytest.fixture(params=NARROW, ids=str)
def dtype(request):
    return request.param


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


def make(rng, dtype, rows, n, offset=0.0):
    x = (rng.standard_normal((rows, n)) + offset).astype(dtype)
    dy = rng.standard_normal((rows, n)).astype(dtype)
    gamma, beta = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    return x, gamma, beta, dy


def run(x, gamma, beta, dy, backend="numba", eps=1e-5):
    y, cache = layer_norm_forward(x, gamma, beta, eps, backend=backend)
    return y, layer_norm_backward(dy, cache)


def assert_same_bits(expected, actual):
    assert expected.dtype == actual.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(expected).view(np.uint8), np.ascontiguousarray(actual).view(np.uint8)
    )


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
    np.ndarray(view.shape, view.dtype, memory.data, *place)[...] = 0
    untouched = np.full_like(memory, POISON)
    np.ndarray(view.shape, view.dtype, untouched.data, *place)[...] = 0
    np.testing.assert_array_equal(memory, untouched)


# ---- against the reference ----


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
@pytest.mark.usefixtures("streaming")
def test_y_and_dx_have_the_bits_of_the_reference(rng, dtype, n, offset):
    if offset > float(ml_dtypes.finfo(dtype).max):
        pytest.skip("no such float16")
    for rows in ROWS:
        case = make(rng, dtype, rows, n, offset)
        expected, of_reference = run(*case, backend="numpy")
        actual, gradients = run(*case)
        assert_same_bits(expected, actual)
        assert_same_bits(of_reference.dx, gradients.dx)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 32, 40])
@pytest.mark.parametrize("eps", [1e-5, 1e-300])
def test_any_scale_keeps_the_contract(rng, dtype, n, eps):
    """Subnormals and the largest, and rows of a single value, which have no variance."""
    x, gamma, beta, dy = make(rng, dtype, 41, n)
    finfo = ml_dtypes.finfo(dtype)
    scales = np.array([float(finfo.max) / 8, 2.0**-14, float(finfo.tiny) / 4])
    x = (x.astype(np.float64) * np.resize(scales, (41, 1))).astype(dtype)
    x[20:30] = x[20:30, :1]
    y, gradients = run(x, gamma, beta, dy, eps=eps)
    exact = exact_layer_norm(x, gamma, beta, eps, dy)
    results = exact.check_contract(y=y, **gradients._asdict())
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("dy_dtype", NARROW, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 17, 32])
def test_dy_may_have_another_type(rng, dtype, dy_dtype, n):
    x, gamma, beta, dy = make(rng, dtype, 70, n)
    dy = dy.astype(dy_dtype)
    expected, actual = (run(x, gamma, beta, dy, backend)[1] for backend in ("numpy", "numba"))
    for one, other in zip(expected, actual, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("n", [1, 3, 5, 17, 32])
@pytest.mark.usefixtures("streaming")
def test_many_tiles_have_the_bits_of_the_reference(rng, dtype, n):
    case = make(rng, dtype, (1 << 17) // n + 13, n)
    expected, of_reference = run(*case, backend="numpy")
    actual, gradients = run(*case)
    assert_same_bits(expected, actual)
    assert_same_bits(of_reference.dx, gradients.dx)


# ---- places in memory ----


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 12, 31, 32, 40])
@pytest.mark.parametrize("offset", [0, 1, 2, 12, 16, 48])
@pytest.mark.usefixtures("streaming")
def test_any_place_has_the_same_bits_and_keeps_its_neighbours(rng, dtype, n, offset):
    x, gamma, beta, dy = make(rng, dtype, 70, n)
    expected, of_x = run(x, gamma, beta, dy)
    for gap in (0, 6, 64 - n * dtype.itemsize % 64):
        for rows in (1, 7, 33, 70):
            inputs = [placed(v[:rows], offset, gap)[0] for v in (x, dy)]
            y, y_memory = placed(np.zeros((rows, n), dtype), offset, gap)
            _, cache = layer_norm_forward(inputs[0], gamma, beta, out=y, backend="numba")
            assert_same_bits(expected[:rows], y)
            assert_untouched_around(y, y_memory)
            dx, dx_memory = placed(np.zeros((rows, n), dtype), offset, gap)
            layer_norm_backward(inputs[1], cache, out=Gradients(dx, None, None))
            assert_same_bits(of_x.dx[:rows], dx)
            assert_untouched_around(dx, dx_memory)


@pytest.mark.parametrize("n", [1, 2, 5, 32])
@pytest.mark.usefixtures("streaming")
def test_rows_in_reverse_and_one_row_many_times(rng, dtype, n):
    x, gamma, beta, dy = make(rng, dtype, 41, n)
    expected, of_x = run(x, gamma, beta, dy)
    y, gradients = run(placed(x, 0, 8, True)[0], gamma, beta, placed(dy, 2, 0, True)[0])
    assert_same_bits(expected, y)
    assert_same_bits(of_x.dx, gradients.dx)
    y, gradients = run(
        np.broadcast_to(x[:1], x.shape), gamma, beta, np.broadcast_to(dy[:1], x.shape)
    )
    for row in (0, 31, 32, 40):
        assert_same_bits(expected[0], y[row])
        assert_same_bits(of_x.dx[0], gradients.dx[row])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 32])
def test_a_row_has_the_same_bits_wherever_it_is(rng, dtype, n):
    x, gamma, beta, dy = make(rng, dtype, 70, n, 3.0)
    expected, of_x = run(x, gamma, beta, dy)
    for start in range(0, 70, 3):
        for rows in (1, 2, 8, 35):
            part = slice(start, start + rows)
            y, gradients = run(x[part], gamma, beta, dy[part])
            assert_same_bits(expected[part], y)
            assert_same_bits(of_x.dx[part], gradients.dx)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 17, 32])
@pytest.mark.usefixtures("streaming")
def test_results_in_the_place_of_inputs(rng, dtype, n):
    x, gamma, beta, dy = make(rng, dtype, 1000, n)
    expected, cache = layer_norm_forward(x, gamma, beta, backend="numba")
    of_x = layer_norm_backward(dy, cache).dx
    layer_norm_backward(dy, cache, out=Gradients(dy, None, None))
    assert_same_bits(of_x, dy)
    layer_norm(x, gamma, beta, out=x, backend="numba")
    assert_same_bits(expected, x)


# ---- sums over rows ----


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17, 32, 40])
@pytest.mark.parametrize("rows", [1, 7, 33, 70, 1000])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_sums_over_rows_keep_the_contract(rng, dtype, n, rows, offset):
    x, gamma, beta, dy = make(rng, dtype, rows, n, offset)
    y, gradients = run(x, gamma, beta, dy)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    results = exact.check_contract(y=y, **gradients._asdict())
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("n", [1, 3, 17])
def test_many_rows_do_not_drift(n):
    """One float64 after the other would lose 2**-53 of the sum with each row, and all one way."""
    rows = 200_000
    dy = np.random.default_rng(0).random((rows, n), dtype=np.float32) + 0.5
    dbeta = run(dy, None, np.zeros(n, np.float32), dy)[1].dbeta
    # Below 2**19, of multiples of 2**-24: exact in float64.
    np.testing.assert_array_equal(dbeta, dy.sum(axis=0, dtype=np.float64).astype(np.float32))


@pytest.mark.parametrize("n", [2, 5, 32])
@pytest.mark.parametrize("rows", [1, 3, 9, 33])
def test_rows_that_fill_up_a_vector_add_nothing(rng, dtype, n, rows):
    """Without eps, rstd of a row of zeros is infinite, and its xhat NaN."""
    x, gamma, beta, dy = make(rng, dtype, rows, n)
    gradients = run(x, gamma, beta, dy, eps=0.0)[1]
    exact = exact_layer_norm(x, gamma, beta, 0.0, dy)
    results = exact.check_contract(**gradients._asdict())
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("n", [2, 3, 5, 17, 32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_in_their_row_and_columns(rng, dtype, n, bad):
    x, gamma, beta, dy = make(rng, dtype, 35, n)
    y, clean = run(x, gamma, beta, dy)
    for row in (0, 13, 31, 34):
        others = np.arange(35) != row
        columns = np.arange(n) != 1
        bad_x, bad_dy = x.copy(), dy.copy()
        bad_x[row, 1] = bad_dy[row, 1] = bad
        spoiled, of_bad_x = run(bad_x, gamma, beta, dy)
        assert_same_bits(y[others], spoiled[others])
        assert_same_bits(clean.dx[others], of_bad_x.dx[others])
        assert np.isnan(spoiled[row].astype(np.float64)).all()
        assert_same_bits(clean.dbeta, of_bad_x.dbeta)
        of_bad_dy = run(x, gamma, beta, bad_dy)[1]
        assert_same_bits(clean.dx[others], of_bad_dy.dx[others])
        assert not np.isfinite(of_bad_dy.dx[row].astype(np.float64)).any()
        assert_same_bits(clean.dgamma[columns], of_bad_dy.dgamma[columns])
        assert_same_bits(clean.dbeta[columns], of_bad_dy.dbeta[columns])
        assert not np.isfinite([of_bad_dy.dgamma[1], of_bad_dy.dbeta[1]]).any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("streaming")
def test_of_one_element_nothing_is_left_but_beta(rng, dtype, rows):
    x, gamma, beta, dy = make(rng, dtype, rows, 1, 1e3)
    y, (dx, dgamma, dbeta) = run(x, gamma, beta, dy)
    assert_same_bits(np.broadcast_to(beta.astype(dtype), x.shape), y)
    np.testing.assert_array_equal(dx, np.zeros_like(x))
    np.testing.assert_array_equal(dgamma, np.zeros(1, np.float32))
    # Of 11 or 8 or 24 bits each, and not far apart: exact in float64.
    np.testing.assert_array_equal(dbeta, dy.astype(np.float64).sum(axis=0).astype(np.float32))
