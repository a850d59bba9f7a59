"""Memory for results: the process keeps what comes again, and never much."""

import os
import threading
import weakref

import lent_memory
import numpy as np
import pytest
from lent_memory import BYTE, NBYTES, new, place

from stablenorm import memory
from stablenorm.memory import get_idle_bytes, get_idle_limit, set_idle_limit

# Fixtures.
pool, known = lent_memory.pool, lent_memory.known


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
