"""Memory of large results: kept for what comes again, and never much."""

import os
import weakref

import numpy as np
import pytest
import recycled
from recycled import BYTE, NBYTES, new, place

from stablenorm import _recycling
from stablenorm._recycling import LEAST, Memory, Recycler, empty
from stablenorm.workspace import get_idle_bytes, get_idle_limit, set_idle_limit

# Fixtures.
recycler, known = recycled.recycler, recycled.known


def other_asks(count):
    """Ask so many times for what is too large to be kept; nothing of it is touched."""
    for _ in range(count):
        assert new((2 * get_idle_limit(),), BYTE).flags.owndata


# ---- what is kept ----


def test_small_ones_are_ordinary(recycler):
    for _ in range(3):
        array = empty((LEAST - 1,), BYTE)
        assert array.flags.owndata
    assert not recycler._asked
    assert get_idle_bytes() == 0


def test_what_is_asked_for_once_holds_nothing():
    for i in range(8):
        array = new((LEAST << i,), BYTE)
        assert array.flags.owndata
        gone = weakref.ref(array)
        del array
        assert gone() is None
    assert get_idle_bytes() == 0


@pytest.mark.usefixtures("known")
def test_from_the_second_on_memory_comes_again():
    first = new()
    where = place(first)
    assert not first.flags.owndata
    assert get_idle_bytes() == 0
    del first
    assert get_idle_bytes() == NBYTES
    second = new()
    assert place(second) == where
    assert get_idle_bytes() == 0
    third = new()
    assert not np.shares_memory(second, third)


def test_a_loop_alternates_between_two():
    places = set()
    array = new()
    for _ in range(10):
        array = new()
        places.add(place(array))
    assert len(places) == 2


@pytest.mark.usefixtures("known")
def test_it_takes_up_to_twice_as_much_but_no_more():
    rooms = [(1024 * 5 // 4, 1024), (2048, 1024), (2560, 1024)]
    for shape in rooms:
        new(shape)
    held = [new(shape) for shape in rooms]
    larger, twice, more = map(place, held)
    # The latest to come back is not the first to go.
    del held
    taken = [new() for _ in range(3)]
    assert [place(array) for array in taken[:2]] == [larger, twice]
    assert place(taken[2]) != more


@pytest.mark.usefixtures("known")
def test_recent_is_64_asks(recycler):
    other_asks(_recycling._RECENT - 1)
    assert not new().flags.owndata
    other_asks(_recycling._RECENT)
    assert new().flags.owndata
    assert recycler._now == 2 * _recycling._RECENT + 2


@pytest.mark.usefixtures("known")
def test_what_is_idle_for_64_asks_is_let_go():
    held = [new() for _ in range(3)]
    del held
    other_asks(10)
    where = place(new())
    other_asks(_recycling._RECENT - 11)
    # 64 asks after all three came back, 53 after one of them did once more.
    assert get_idle_bytes() == 3 * NBYTES
    other_asks(1)
    assert get_idle_bytes() == NBYTES
    assert place(new()) == where


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
def test_what_is_in_use_counts_for_nothing():
    set_idle_limit(NBYTES)
    held = [new() for _ in range(6)]
    for i, array in enumerate(held):
        array.fill(i)
    first = new()
    del first
    assert get_idle_bytes() == NBYTES
    assert [array[0, 0] for array in held] == list(range(6))
    assert all((array == i).all() for i, array in enumerate(held))


@pytest.mark.usefixtures("known")
def test_one_larger_than_the_limit_drives_nothing_out():
    large = (4 * 1024, 1024)
    new(large)
    array = new(large)
    small = new()
    del small
    set_idle_limit(2 * NBYTES)
    del array
    assert get_idle_bytes() == NBYTES
    assert new(large).flags.owndata


@pytest.mark.usefixtures("known")
def test_a_limit_of_zero_switches_it_off():
    kept, used = new(), new()
    used.fill(3)
    del kept
    assert get_idle_bytes() == NBYTES
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
    array, other = new(), new()
    del other
    monkeypatch.setattr(Memory, "__init__", lambda *_: (_ for _ in ()).throw(MemoryError))
    new((2 * 1024, 1024))
    assert get_idle_bytes() == NBYTES
    assert new((2 * 1024, 1024)).flags.owndata
    assert get_idle_bytes() == 0
    del array
    with pytest.raises(MemoryError):
        empty((1 << 60,), BYTE)


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1e9, TypeError), ("1", TypeError)])
def test_a_limit_is_a_number_of_bytes(bad, error):
    with pytest.raises(error, match=rf"nbytes must be .*, got {bad!r}; "):
        set_idle_limit(bad)
    assert get_idle_limit() == 64 * NBYTES
    set_idle_limit(np.int64(7))
    assert get_idle_limit() == 7


def test_by_default_it_is_a_small_share_of_the_memory(monkeypatch):
    for available, limit in ((1 << 30, 64 << 20), (1 << 40, 512 << 20)):
        monkeypatch.setattr(_recycling, "_available", lambda available=available: available)
        assert Recycler().limit == limit


def test_a_container_may_allow_less_than_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(_recycling, "Path", lambda _, name: tmp_path / name)
    machine = _recycling._available()
    assert machine >= 1 << 28
    (tmp_path / "memory.max").write_text("max\n")
    assert _recycling._available() == machine
    (tmp_path / "memory.max").write_text("134217728\n")
    assert _recycling._available() == 1 << 27
    monkeypatch.delattr(os, "sysconf")
    assert _recycling._available() == 1 << 27
