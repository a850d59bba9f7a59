"""rounding="nearest": the same bits for any instruction set, threads, tiles, chunks and backend."""

import hashlib
import platform
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreter import python
from norms import compute

import stablenorm
from stablenorm.testing import digest as published
from stablenorm.testing import digest_inputs, published_digests

jobs = pytest.importorskip("stablenorm.cpu.jobs")
layout = pytest.importorskip("stablenorm.cpu.layout")


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


def run(x, gamma, beta, dy, **options):
    return compute((x, gamma, beta, 1e-5, dy), rounding="nearest", **options).values()


def digest(arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def digests(dtype, **options):
    shapes = (300, 33), (40, 500), (8, 1), (10, 2)
    return [digest(run(*make(dtype, *shape), **options)) for shape in shapes]


def published_by(dtype):
    """Return the names of the published inputs of this dtype alone, and the digests of their results."""
    for name, case in digest_inputs().items():
        if case.x.dtype == case.gamma.dtype == case.dy.dtype == dtype:
            yield name, tuple(map(published, compute(case, rounding="nearest").values()))


ANOTHER_PROCESSOR = """
from numba.core.registry import cpu_target
from test_nearest_same_bits import digests, published_by
name, features = cpu_target.target_context.codegen().magic_tuple()[1:]
print(digests("float64") + [name, features] + list(published_by("float64")))
"""


def test_another_instruction_set_changes_no_bit():
    """Vectors of 128 bits, and no FMA: the farthest from what a processor of today has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("no x86-64")
    environment = {
        "NUMBA_CPU_NAME": "x86-64-v2",
        "NUMBA_CPU_FEATURES": "",
        "PYTHONPATH": Path(__file__).parent,
    }
    found = eval(python(ANOTHER_PROCESSOR, **environment))
    expected = digests("float64", backend="numpy")
    assert found[:6] == [*expected, "x86-64-v2", ""]
    assert len(found) > 8
    assert all(published_digests()[name] == results for name, results in found[6:])


@pytest.fixture
def other_plans():
    """Forget, at the end, what is planned with other tiles."""
    threads = stablenorm.get_num_threads()
    yield
    jobs.make_plan.cache_clear()
    stablenorm.set_num_threads(threads)


@pytest.mark.usefixtures("other_plans")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_and_tiles_change_no_bit(dtype, monkeypatch):
    expected, tiles = digests(dtype, backend="numpy"), set()
    for threads, forward, backward, most in (
        (1, 14, 16, 64),
        (2, 9, 9, 64),
        (3, 20, 20, 1),
        (3, 10, 11, 5),
    ):
        monkeypatch.setattr(layout, "_FORWARD_TILE", 1 << forward)
        monkeypatch.setattr(layout, "_LEAST_FORWARD_TILE", 1 << forward)
        monkeypatch.setattr(layout, "_BACKWARD_TILE", 1 << backward)
        monkeypatch.setattr(layout, "_MOST_TILES", most)
        monkeypatch.setattr(layout, "_FEWEST_TILES", 1)
        jobs.make_plan.cache_clear()
        stablenorm.set_num_threads(threads)
        tiles.add((layout.forward_rows(300, 33), layout.backward_rows(300, 33)))
        assert digests(dtype) == expected
    assert len(tiles) == 4
