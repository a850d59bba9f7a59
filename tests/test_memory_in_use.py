"""Memory that something still holds, in any thread or process, is let be; the rest comes again."""

import gc
import mmap
import os
import pickle
import subprocess
import sys
import threading
from typing import NamedTuple

import lent_memory
import ml_dtypes
import numpy as np
import pytest
from lent_memory import BYTE, FLOAT32, NBYTES, SHAPE, place

from stablenorm import layer_norm_forward, memory
from stablenorm.memory import Pool

# Fixtures.
pool = lent_memory.pool


class Source(NamedTuple):
    """Where arrays come from, and the pool that their memory goes back to."""

    new: object
    pool: Pool


@pytest.fixture
def source(pool):
    """A source that has seen the shape and dtype of every ask before."""

    def again(shape=SHAPE, dtype=FLOAT32):
        memory.empty(shape, np.dtype(dtype))
        return memory.empty(shape, np.dtype(dtype))

    return Source(again, pool)


class Subclass(np.ndarray):
    pass


def root(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


HOLDERS = {
    "itself": lambda a: a,
    "a slice of a slice": lambda a: a[3:][::2],
    "another dtype": lambda a: a.view(np.uint8)[:, :3],
    "a strided trick": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3, axis=1),
    "a view of a subclass": lambda a: a.view(Subclass)[1:].view(np.ndarray)[1:],
    "a memoryview of a slice": lambda a: memoryview(a[4:])[1:],
    "DLPack": lambda a: np.from_dlpack(a)[1:],
    "a view of the first of its bases": lambda a: root(a)[4:].view(np.float32),
    "what the first of its bases refers to": lambda a: root(a).base,
    "an array of that": lambda a: np.asarray(root(a).base[0]),
    "ctypes": np.ctypeslib.as_ctypes,
    "a pickle buffer": pickle.PickleBuffer,
    "a cache": lambda a: layer_norm_forward(a.view(Subclass).reshape(512, 512))[1],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_holds_it_keeps_it_in_use(source, holder):
    array = source.new()
    array.fill(1)
    where = place(array)
    held = HOLDERS[holder](array)
    del array
    # Of the young alone, which they are: a full one takes 0.1 s of all that the tests hold.
    gc.collect(1)
    before = source.pool.idle_bytes
    for _ in range(2):
        other = source.new()
        assert place(other) != where
        other.fill(2)
        del other
    assert source.pool.idle_bytes <= before + NBYTES
    del held
    gc.collect(1)
    # The latest to come back goes first.
    assert place(source.new()) == where


def test_a_failed_ask_gives_its_memory_back(pool):
    with pytest.raises(TypeError, match="buffer is too small"):
        pool.lend((2048, 1024), FLOAT32, NBYTES)
    assert pool.idle_bytes == NBYTES


@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16, "i4,f8"])
def test_arrays_are_like_any_other(source, dtype):
    dtype, shape = np.dtype(dtype), (3, 701, 303)
    arrays = [source.new(shape, dtype) for _ in range(5)]
    for array in arrays:
        assert type(array) is np.ndarray
        assert array.dtype == dtype
        assert (array.shape, array.flags.c_contiguous) == (shape, True)
        assert array.flags.aligned
        assert array.flags.writeable
        assert place(array) % 64 == 0
        array.flags.writeable = False
        array.flags.writeable = True
    # Apart within a page, so that a load is not taken for one of what was just stored.
    assert len({place(array) % 4096 // 256 for array in arrays}) >= 4


# ---- threads, processes, the system ----


def test_many_threads(source):
    source.pool.limit = 4 * NBYTES
    wrong = []
    start = threading.Barrier(8)

    def loop(mark):
        start.wait()
        parts = [None] * 3
        for i in range(200):
            array = source.new((NBYTES + (i % 3 << 18),), BYTE)
            array[:: 1 << 16] = mark
            parts[i % 3] = array[1 << 16 :]
            del array
            if not all((part[:: 1 << 16] == mark).all() for part in parts if part is not None):
                wrong.append(mark)
            # Each thread may have one more that it has not released yet.
            if source.pool.idle_bytes > 4 * NBYTES + 8 * (2 << 20):
                wrong.append("idle")

    interval = sys.getswitchinterval()
    # So that threads take turns within an ask.
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=loop, args=(mark,)) for mark in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []
    assert 0 < source.pool.idle_bytes <= 4 * NBYTES


def test_the_slower_of_two_threads_takes_another_piece(pool):
    """Both have seen the same idle memory; one takes it while the other is about to."""
    quicker = []

    class Late(dict):
        def pop(self, *args):
            if not quicker:
                quicker.append(None)
                quicker[0] = pool.lend(SHAPE, FLOAT32, NBYTES)
            return super().pop(*args)

    held = [pool.lend(SHAPE, FLOAT32, NBYTES) for _ in range(2)]
    places = {place(array) for array in held}
    del held
    pool._idle = Late(pool._idle)
    slower = pool.lend(SHAPE, FLOAT32, NBYTES)
    assert {place(slower), place(quicker[0])} == places


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_after_a_fork_has_its_own(source):
    array = source.new()
    array.fill(1)
    where = place(source.new())
    pid = os.fork()
    if pid == 0:
        other = source.new()
        other.fill(2)
        right = place(other) == where and (array == 1).all()
        array.fill(3)
        del array
        right = right and source.pool.idle_bytes == NBYTES and (other == 2).all()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (array == 1).all()
    assert source.pool.idle_bytes == NBYTES


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_page_faults_vanish(source):
    import resource  # noqa: PLC0415  # not on every system

    def faults(empty):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            array = empty(16 << 20)
            array[::4096] = 1
            del array
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # Straight from the system: NumPy's allocator may have 16 MiB left from whatever ran before.
    fresh = faults(lambda nbytes: np.frombuffer(mmap.mmap(-1, nbytes), BYTE))
    faults(lambda nbytes: source.new((nbytes,), BYTE))
    # 8 pages of 2 MiB, or 4096 of 4 KiB, for each of 20; and next to none.
    assert fresh >= 20 * 8
    assert faults(lambda nbytes: source.new((nbytes,), BYTE)) <= 24


EXIT = """
import sys
import numpy as np
from stablenorm import memory

new = lambda: memory.empty((1 << 22,), np.dtype(np.uint8))
arrays = [new(), new(), new()]
cycle = [new()]
cycle.append(cycle)
memory.kept = arrays[1]
np.kept = arrays[2][1:]
# What sys holds goes after the global names of all modules; the last of a list first.
sys.kept = [memory, memory.pool, new()]
"""


def test_arrays_that_live_to_the_end_of_the_process_go_in_silence():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", EXIT],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == ("", "")
