"""Memory for results: idle memory is reused and limited; memory that something holds is not."""

import gc
import os

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm_forward, memory
from stablenorm.memory import empty, set_idle_limit

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Four MiB, an exact capacity: capacities are 4, 5, 6 or 7 times a power of two.
NBYTES = 4 << 20


@pytest.fixture(autouse=True)
def limit():
    """Begin with no idle memory and room for 60 arrays; restore the limit afterwards."""
    gc.collect(1)
    before = set_idle_limit(0)
    set_idle_limit(60 * NBYTES)
    yield
    set_idle_limit(before)


def get_idle_bytes():
    return memory._core.idle_bytes()


def new(shape=(1024, 1024), dtype=np.float32):
    return empty(shape, np.dtype(dtype))


def place(array):
    return array.__array_interface__["data"][0]


def same(one, other):
    """Tell whether two arrays begin in the same memory, at any place in its first page."""
    return abs(one - other) < 4096


def test_idle_memory_stays_within_the_limit():
    set_idle_limit(3 * NBYTES + NBYTES // 2)
    arrays = [new() for _ in range(6)]
    places = [place(array) for array in arrays]
    assert get_idle_bytes() == 0
    for i in range(6):
        arrays[i] = None
        assert get_idle_bytes() == min(i + 1, 3) * NBYTES
    # The latest memory stays, and is reused first.
    again = [new() for _ in range(3)]
    assert all(same(place(array), at) for array, at in zip(again, places[:2:-1], strict=True))
    assert (set_idle_limit(0), get_idle_bytes()) == (3 * NBYTES + NBYTES // 2, 0)
    again.clear()
    assert get_idle_bytes() == 0
    assert set_idle_limit(np.int64(NBYTES)) == 0
    new()
    assert get_idle_bytes() == NBYTES


def test_the_default_limit_is_a_small_share_of_the_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "Path", lambda _, name: tmp_path / name)
    pages = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 28}
    monkeypatch.setattr(os, "sysconf", pages.get)
    assert memory.default_limit() == 512 << 20
    # A container may allow less than the machine.
    (tmp_path / "memory.max").write_text("134217728\n")
    assert memory.default_limit() == 1 << 23
    monkeypatch.delattr(os, "sysconf")
    assert memory.default_limit() == 1 << 23


# ---- memory that something holds ----


class Subclass(np.ndarray):
    pass


HOLDERS = {
    "a slice of a slice": lambda a: a[3:][::2],
    "a view of a subclass": lambda a: a.view(Subclass)[1:].view(np.ndarray)[1:],
    "a memoryview of a slice": lambda a: memoryview(a[4:])[1:],
    "DLPack": lambda a: np.from_dlpack(a)[1:],
    "ctypes": np.ctypeslib.as_ctypes,
    "a cache": lambda a: layer_norm_forward(a.view(Subclass))[1],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_something_holds_is_not_reused(holder):
    array = new()
    array.fill(1)
    where = place(array)
    held = HOLDERS[holder](array)
    del array
    # Collect young objects alone: a full collection takes 0.1 s.
    gc.collect(1)
    before = get_idle_bytes()
    for _ in range(2):
        other = new()
        assert not same(place(other), where)
        other.fill(2)
        del other
    assert get_idle_bytes() <= before + NBYTES
    del held
    gc.collect(1)
    # The memory that came back last is reused first.
    assert same(place(new()), where)


@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16, "i4,f8"])
def test_arrays_are_like_any_other(dtype):
    dtype, shape = np.dtype(dtype), (3, 701, 303)
    arrays = [new(shape, dtype) for _ in range(5)]
    for array in arrays:
        assert (type(array), array.dtype, array.shape) == (np.ndarray, dtype, shape)
        assert array.flags.carray
        assert place(array) % 64 == 0
        array.flags.writeable = False
        array.flags.writeable = True
    # Arrays begin at different places of a page: a load must not look like one of a recent store.
    starts = {place(array) % 4096 // 256 for array in arrays}
    assert len(starts) >= 4
    arrays[0].fill(1)
    arrays[0].resize((6, *shape[1:]), refcheck=False)
    assert (arrays[0][:3] == np.ones((), dtype)).all()
