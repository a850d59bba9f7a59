"""Memory of large results that something still holds, in any thread or process, is let be."""

import copy
import gc
import io
import mmap
import os
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import recycled
from recycled import BYTE, FLOAT32, NBYTES, SHAPE, new, place

from stablenorm._recycling import LEAST
from stablenorm.workspace import Workspace, get_idle_bytes, set_idle_limit

# Fixtures.
recycler, known = recycled.recycler, recycled.known


# ---- in use is in use ----


class Subclass(np.ndarray):
    pass


def root(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


HOLDERS = {
    "itself": lambda a: a,
    "a slice of a slice": lambda a: a[3:][::2],
    "a reshaped view of a view": lambda a: a[2:].T.reshape(2, 512, 1022),
    "another dtype": lambda a: a.view(np.uint8)[:, :3],
    "a strided trick": lambda a: np.lib.stride_tricks.sliding_window_view(a, 3, axis=1),
    "a view of a subclass": lambda a: a.view(Subclass)[1:].view(np.ndarray)[1:],
    "a memoryview of a slice": lambda a: memoryview(a[4:])[1:],
    "DLPack": lambda a: np.from_dlpack(a)[1:],
    "an iterator": lambda a: a.flat,
    "the base of a slice": lambda a: a[1:].base,
    "the first of its bases": root,
    "a view of the first of its bases": lambda a: root(a)[4:].view(np.float32),
    "what the first of its bases refers to": lambda a: root(a).base,
    "an array of that": lambda a: np.asarray(root(a).base[0]),
    "ctypes": np.ctypeslib.as_ctypes,
    "a pickle buffer": pickle.PickleBuffer,
    "an object array": lambda a: np.array([a[1:], None], object),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.usefixtures("known")
def test_whatever_holds_it_keeps_it_in_use(holder):
    array = new()
    array.fill(1)
    where = place(array)
    held = HOLDERS[holder](array)
    del array
    gc.collect()
    for _ in range(2):
        other = new()
        assert place(other) != where
        other.fill(2)
        del other
    assert get_idle_bytes() == NBYTES
    del held
    gc.collect()
    assert get_idle_bytes() == 2 * NBYTES
    assert place(new()) == where


@pytest.mark.usefixtures("known")
def test_garbage_in_a_cycle_comes_back_when_it_is_collected():
    array = new()
    where = place(array)
    cycle = [array]
    cycle.append(cycle)
    del array, cycle
    gc.collect()
    assert place(new()) == where


@pytest.mark.usefixtures("known")
def test_a_failed_ask_gives_its_memory_back(recycler):
    new()
    with pytest.raises(TypeError, match="buffer is too small"):
        recycler.empty((2048, 1024), FLOAT32, NBYTES)
    assert get_idle_bytes() == NBYTES


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_arrays_are_like_any_other(dtype):
    dtype = np.dtype(dtype)
    shape = (3, 1001, 1003)
    new(shape, dtype)
    arrays = [new(shape, dtype) for _ in range(5)]
    for array in arrays:
        assert type(array) is np.ndarray
        assert array.dtype is dtype
        assert (array.shape, array.flags.c_contiguous) == (shape, True)
        assert array.flags.aligned
        assert array.flags.writeable
        assert place(array) % 64 == 0
        array.flags.writeable = False
        array.flags.writeable = True
    # Apart within a page, so that a load is not taken for one of what was just stored.
    assert len({place(array) % 4096 // 256 for array in arrays}) == 5


@pytest.mark.usefixtures("known")
def test_copies_own_their_memory():
    array = new()
    array[:] = np.arange(1024)
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    buffers = []
    stream = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
    copies = [
        pickle.loads(pickle.dumps(array)),
        pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers]),
        copy.copy(array),
        copy.deepcopy(array),
        array.copy(),
        root(array).copy().view(np.float32)[: array.size].reshape(SHAPE),
        np.load(file),
    ]
    expected = array.tobytes()
    del buffers, array
    assert get_idle_bytes() == NBYTES
    new().fill(-1)
    assert all(other.tobytes() == expected for other in copies)
    del copies
    gc.collect()
    assert get_idle_bytes() == NBYTES


@pytest.mark.usefixtures("known")
def test_a_workspace_is_apart_from_it():
    work = Workspace()
    array, other = work.empty(SHAPE, FLOAT32), new()
    del array
    assert (work.nbytes, get_idle_bytes()) == (NBYTES, 0)
    del other
    assert (work.nbytes, get_idle_bytes()) == (NBYTES, NBYTES)
    set_idle_limit(0)
    assert (work.nbytes, get_idle_bytes()) == (NBYTES, 0)


# ---- threads, processes, the system ----


def test_many_threads(recycler):
    set_idle_limit(4 * NBYTES)
    wrong = []
    start = threading.Barrier(8)

    def loop(mark):
        start.wait()
        parts = [None] * 3
        for i in range(400):
            array = new((LEAST + (i % 3 << 20),), BYTE)
            array[:: 1 << 16] = mark
            parts[i % 3] = array[1 << 16 :]
            del array
            if not all((part[:: 1 << 16] == mark).all() for part in parts if part is not None):
                wrong.append(mark)
            # Each thread may have one more that it has not trimmed yet.
            if get_idle_bytes() > 4 * NBYTES + 8 * (6 << 20):
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
    assert 0 < get_idle_bytes() <= 4 * NBYTES
    assert recycler._now >= 8 * 400 - 8


@pytest.mark.usefixtures("known")
def test_the_slower_of_two_threads_takes_another_piece(recycler):
    """Both have seen the same idle memory; one takes it while the other is about to."""
    quicker = []

    class Late(dict):
        def pop(self, *args):
            if not quicker:
                quicker.append(None)
                quicker[0] = new()
            return super().pop(*args)

    held = [new() for _ in range(2)]
    places = {place(array) for array in held}
    del held
    recycler._idle = Late(recycler._idle)
    slower = new()
    assert {place(slower), place(quicker[0])} == places


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("known")
def test_a_child_after_a_fork_has_its_own():
    array = new()
    array.fill(1)
    where = place(new())
    pid = os.fork()
    if pid == 0:
        other = new()
        other.fill(2)
        right = place(other) == where and (array == 1).all()
        array.fill(3)
        del array
        right = right and get_idle_bytes() == NBYTES and (other == 2).all()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (array == 1).all()
    assert get_idle_bytes() == NBYTES


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
def test_page_faults_vanish():
    import resource  # noqa: PLC0415  # not on every system

    def faults(empty):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            array = empty(40 << 20)
            array[::4096] = 1
            del array
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def recycler_empty(nbytes):
        return new((nbytes,), BYTE)

    # Straight from the system: NumPy's allocator may have 40 MiB left from whatever ran before.
    fresh = faults(lambda nbytes: np.frombuffer(mmap.mmap(-1, nbytes), BYTE))
    # A size asked for once keeps nothing yet.
    faults(recycler_empty)
    # 20 pages of 2 MiB, or 10240 of 4 KiB, for each of 20; and next to none.
    assert fresh >= 20 * 20
    assert faults(recycler_empty) <= 24


EXIT = """
import sys
import numpy as np
from stablenorm import _recycling
from stablenorm.workspace import Workspace, get_idle_bytes

dtype = np.dtype(np.uint8)
new = lambda: _recycling.empty((1 << 22,), dtype)
arrays = [new() for _ in range(4)]
cycle = [new(), new]
cycle.append(cycle)
work = Workspace()
arrays += [work.empty(1 << 22), work.empty(1 << 22)]
arrays.pop(1)
_recycling.kept = arrays[2]
np.kept = arrays[3][1:]
assert get_idle_bytes() == 1 << 22
# What sys holds goes after the global names of all modules; the last of a list first.
sys.kept = [_recycling, _recycling.recycler, work, new(), work.empty(1 << 22)]
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
