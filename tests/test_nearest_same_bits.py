"""rounding="nearest": the same bits for any instruction set, threads, tiles, chunks and backend."""

import ml_dtypes
import numpy as np
import pytest
from norms import compute

import stablenorm

native = pytest.importorskip("stablenorm.native", exc_type=ImportError)


def make(dtype, rows, n):
    """
    Return x, gamma, beta and dy; some rows are constant, or next to constant.

    The sums over rows are those of one row: others cancel, and leave rounding errors if there are any.
    """
    rng = np.random.default_rng(n)
    x, dy = rng.standard_normal((2, rows, n)) * np.exp2(rng.integers(-9, 9, (2, rows, n)))
    x[::7] = 3 + 2.0**-20 * (x[::7] > 4)
    dy[::5] = 1
    x[rows // 2 : -1], dy[rows // 2 : -1] = x[: (rows - 1) // 2], -dy[: (rows - 1) // 2]
    dy[rows // 2 - 1 : rows // 2] = 0
    dy[-1] = 2.0 ** (-8 - ml_dtypes.finfo(dtype).nmant) * rng.standard_normal(n)
    gamma, beta = rng.standard_normal((2, n))
    return tuple(each.astype(dtype) for each in (x, gamma, beta, dy))


def bits(dtype, **options):
    """Return the bytes of all results, of few and of many tiles."""
    found = []
    for shape in (300, 33), (40, 500), (8, 1), (10, 2):
        x, gamma, beta, dy = make(dtype, *shape)
        results = compute((x, gamma, beta, 1e-5, dy), rounding="nearest", **options).values()
        found += [array.tobytes() for array in results]
    return found


@pytest.fixture
def as_before():
    """Restore the instruction set and the number of threads."""
    threads = stablenorm.get_num_threads()
    yield
    native.use(native.INSTRUCTIONS[0])
    stablenorm.set_num_threads(threads)


@pytest.mark.usefixtures("as_before")
def test_no_instruction_set_changes_a_bit(dtype):
    """Those of the exact results, as the reference has them, whose tiles are others."""
    expected = bits(dtype, backend="numpy")
    for instructions in native.INSTRUCTIONS:
        native.use(instructions)
        for threads in (1, 3):
            stablenorm.set_num_threads(threads)
            assert bits(dtype, backend="native") == expected
