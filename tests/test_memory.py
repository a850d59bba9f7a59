"""Memory for results: the process keeps what comes again, and never much; a `Workspace` keeps all."""

import copy
import os
import pickle
import threading
import weakref

import lent_memory
import numpy as np
import pytest
from lent_memory import BYTE, FLOAT32, NBYTES, SHAPE, new, place

from stablenorm import LayerNorm, memory
from stablenorm.memory import Workspace, get_idle_bytes, get_idle_limit, set_idle_limit

# Fixtures.
pool, known, work = lent_memory.pool, lent_memory.known, lent_memory.work


# ---- large results of the process ----


@pytest.mark.usefixtures("pool")
def test_small_ones_and_those_asked_for_once_hold_nothing():
    for size in (*[NBYTES - 1] * 3, *(NBYTES << i for i in range(8))):
        array = new((size,), BYTE)
        assert array.flags.owndata
        gone = weakref.ref(array)
        del array
        assert gone() is None
    assert get_idle_bytes() == 0


@pytest.mark.usefixtures("known")
def test_idle_memory_stays_within_the_limit():
    set_idle_limit(3 * NBYTES + NBYTES // 2)
    held = [new() for _ in range(6)]
    places = [place(array) for array in held]
    assert get_idle_bytes() == 0
    for i in range(6):
        held[i] = None
        assert get_idle_bytes() == min(i + 1, 3) * NBYTES
    # The latest stay, and go first.
    assert [place(array) for array in [new() for _ in range(3)]] == places[:2:-1]


@pytest.mark.usefixtures("known")
def test_a_limit_of_zero_switches_it_off():
    kept, used = new(), new()
    used.fill(3)
    del kept
    set_idle_limit(0)
    assert (get_idle_bytes(), get_idle_limit()) == (0, 0)
    assert new().flags.owndata
    assert (used == 3).all()
    del used
    assert get_idle_bytes() == 0
    set_idle_limit(NBYTES)
    assert not new().flags.owndata
    assert get_idle_bytes() == NBYTES


@pytest.mark.usefixtures("known")
def test_idle_memory_makes_room_when_there_is_none(monkeypatch):
    def full(_):
        raise MemoryError

    new((4 * 1024, 256))
    new()
    monkeypatch.setattr(memory, "_new_memory", full)
    assert get_idle_bytes() == NBYTES
    assert new((4 * 1024, 256)).flags.owndata
    assert get_idle_bytes() == 0
    with pytest.raises(MemoryError):
        new((1 << 60,), BYTE)


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1e9, TypeError), ("1", TypeError)])
def test_a_limit_is_a_number_of_bytes(bad, error):
    with pytest.raises(error, match=rf"nbytes must be .*, got {bad!r}; "):
        set_idle_limit(bad)
    assert get_idle_limit() == 64 * NBYTES
    set_idle_limit(np.int64(7))
    assert get_idle_limit() == 7


def test_by_default_it_is_a_small_share_of_the_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "Path", lambda _, name: tmp_path / name)
    pages = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 28}
    monkeypatch.setattr(os, "sysconf", pages.get)
    assert memory.default_limit() == 512 << 20
    # A container may allow less than the machine.
    (tmp_path / "memory.max").write_text("134217728\n")
    assert memory.default_limit() == 1 << 23
    monkeypatch.delattr(os, "sysconf")
    assert memory.default_limit() == 1 << 23


def test_it_is_found_without_a_lock(monkeypatch):
    """A child forked while another thread finds it would wait for that thread, which it does not have."""
    begun, end = threading.Event(), threading.Event()

    def found():
        if not begun.is_set():
            begun.set()
            end.wait(2)
            return 1
        return 2

    monkeypatch.setattr(memory, "default_limit", found)
    pool = memory.Pool()
    other = threading.Thread(target=lambda: pool.limit)
    other.start()
    begun.wait()
    assert pool.limit == 2
    end.set()
    other.join()


# ---- a workspace ----


def test_odd_requests(work):
    assert work.empty(2**13 - 1).flags.owndata
    assert work.nbytes == 0
    assert work.empty(np.int64(100_000)).dtype == np.float64
    # At most a quarter more than was asked for.
    assert 800_000 <= work.nbytes <= 1_000_000
    assert work.empty(()).shape == ()
    assert work.empty((0, 10**6)).shape == (0, 10**6)
    with pytest.raises(ValueError, match="negative dimensions"):
        work.empty((-1, 10**6))
    with pytest.raises(TypeError, match="dtype must not hold Python objects"):
        work.empty(10**6, object)
    with pytest.raises(TypeError):
        work.empty(1e6)
    with pytest.raises(MemoryError):
        work.empty(2**60, np.uint8)
    like = work.empty_like(np.zeros((300, 401), "i4,f8", "F")[:, ::-1])
    assert (like.dtype, like.shape) == (np.dtype("i4,f8"), (300, 401))
    assert like.flags.c_contiguous


def test_clear_releases_what_nobody_uses(work):
    array, other = (work.empty(SHAPE, FLOAT32) for _ in range(2))
    del other
    assert repr(work) == f"<Workspace of {2 * NBYTES} bytes>"
    work.clear()
    assert work.nbytes == NBYTES
    where = place(array)
    del array
    assert work.nbytes == NBYTES
    assert place(work.empty(SHAPE, FLOAT32)) == where
    work.clear()
    assert work.nbytes == 0


def test_arrays_outlive_the_workspace():
    work = Workspace()
    array, other = (work.empty(SHAPE, FLOAT32) for _ in range(2))
    del other
    array.fill(3)
    gone = weakref.ref(work)
    del work
    # At once, with all that it kept: no cycle has to be collected.
    assert gone() is None
    fresh = np.zeros(SHAPE, np.float32)
    assert (array == 3).all()
    assert (fresh == 0).all()


def test_copies_of_a_workspace_are_new_and_empty(work):
    array = work.empty(SHAPE, FLOAT32)
    for other in (copy.copy(work), copy.deepcopy(work), pickle.loads(pickle.dumps(work))):
        assert other.nbytes == 0
        assert not np.shares_memory(other.empty(SHAPE, FLOAT32), array)


# ---- a layer with a workspace ----


def test_layers_share_one_and_keep_what_backward_needs(rng, dtype, work):
    """The first layer's y is the second's x: it stays in use until the backward."""
    x, dy = (rng.standard_normal((128, 1024)).astype(dtype) for _ in range(2))
    # Parameters of x's own type: no kernel has to be compiled for this test alone.
    plain = [LayerNorm(1024, dtype=dtype) for _ in range(2)]
    shared = [LayerNorm(1024, dtype=dtype, workspace=work) for _ in range(2)]
    sizes = []
    for _ in range(3):
        results = []
        for first, second in (plain, shared):
            first.parameters["gamma"][:] = np.linspace(-1, 2, 1024)
            y = second.forward(first.forward(x))
            results.append((y.tobytes(), first.backward(second.backward(dy)).tobytes()))
            del y
        assert results[0] == results[1]
        sizes.append(work.nbytes)
    # Two y and two dx, and what a helper thread still holds for a moment.
    assert 2 * x.nbytes <= sizes[-1] <= 8 * x.nbytes
    assert pickle.loads(pickle.dumps(shared[0])).workspace.nbytes == 0


@pytest.mark.parametrize("n", [4, 40_000])
def test_a_layer_takes_the_other_byte_order(work, n):
    """Results are in this machine's, and so must the memory for them be."""
    x = np.linspace(0, 1, 2 * n, dtype=np.float32).reshape(2, n)
    plain, norm = LayerNorm(n), LayerNorm(n, workspace=work)
    np.testing.assert_array_equal(norm.forward(x.astype(">f4")), plain.forward(x))
    np.testing.assert_array_equal(norm.backward(x.astype(">f4")), plain.backward(x))
