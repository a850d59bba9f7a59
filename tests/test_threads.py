"""Threads: the same bits with any number, and right results whatever threads the caller has."""

import os
import threading
import time
import weakref

import numpy as np
import pytest
import shared_calls
from interpreter import run_python
from shared_calls import helpers_alive, make, run

import stablenorm
from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward, threads

numba = pytest.importorskip("numba")
_helpers = pytest.importorskip("stablenorm.kernels._helpers")
_sharing = pytest.importorskip("stablenorm.kernels._sharing")

# Fixtures.
four_threads, crew = shared_calls.four_threads, shared_calls.crew


# ---- the number of threads ----


# Tiles that do not divide the rows, one tile, long rows, short ones, and one row alone.
@pytest.mark.parametrize(
    "shape", [(2048, 130), (67, 1001), (3001, 37), (9, 20_000), (1, 70_000), (33_000, 2)]
)
def test_the_number_of_threads_changes_no_bit(dtype, shape):
    if dtype == np.float64:
        shape = (-(-shape[0] // 3), shape[1])  # double-double takes its time
    arguments = make(1, shape, dtype)
    results = []
    for count in (1, 2, 3, 8):
        stablenorm.set_num_threads(count)
        results.append(run(*arguments))
    assert results.count(results[0]) == 4


@numba.njit(error_model="numpy")
def count_tiles(crew, me, tiles, taken, patience, failing):
    """Count the tiles that each takes; the first of all waits for another to take one."""
    tile = _sharing.take(crew, me, -1)
    while tile < tiles:
        _sharing.add_atomically(_sharing._at(taken, me), 1)
        if failing == me:
            raise MemoryError
        for _ in range(patience):
            others = 0
            for part in range(8):
                others += part != me and _sharing.read_atomically(_sharing._at(taken, part)) > 0
            if others:
                break
            _sharing.pause()
        tile = _sharing.take(crew, me, tile)


share_counting = _sharing.sharing(count_tiles)


@numba.njit(nogil=True)
def counted(tiles, taken, patience, failing, crew, helpers):
    arguments = (tiles, _sharing.pointer(taken), patience, failing)
    share_counting(arguments, tiles, _sharing.pointer(crew), helpers)


def taken_by(count, tiles, *, failing=-1):
    """Return how many tiles each takes, of the caller and `count` helpers."""
    taken = np.zeros(8, np.int64)
    # Some seconds: far more than a thread takes to come.
    counted(tiles, taken, 50_000_000, failing, *crew_of(count))
    return list(taken)


def crew_of(helpers):
    stablenorm.set_num_threads(helpers + 1)
    words, count = _helpers.crew_for(1 << 20, 100)
    assert count == helpers
    return words, count


def test_helpers_really_take_part(crew):
    """Without this, the tests of this file could pass on one thread."""
    assert run(*make(2))
    assert len(crew.helpers) == 3
    taken = taken_by(3, 7)
    assert sum(taken) == 7
    assert sum(count > 0 for count in taken) >= 2


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 31, 1000])
@pytest.mark.parametrize("helpers", [0, 1, 2, 5])
def test_every_tile_is_taken_once(crew, tiles, helpers):
    seen = np.zeros((20, tiles), np.int64)
    words, count = crew_of(helpers)
    for calls in seen:
        counted_each(calls, words, count)
    assert (seen == 1).all()
    assert words[_sharing._LENT] == 0
    assert crew.words is words


@numba.njit(error_model="numpy")
def mark_tiles(crew, me, tiles, seen):
    tile = _sharing.take(crew, me, -1)
    while tile < tiles:
        _sharing.add_atomically(_sharing._at(seen, tile), 1)
        tile = _sharing.take(crew, me, tile)


share_marking = _sharing.sharing(mark_tiles)


@numba.njit(nogil=True)
def counted_each(seen, crew, helpers):
    arguments = (seen.size, _sharing.pointer(seen))
    share_marking(arguments, seen.size, _sharing.pointer(crew), helpers)


@pytest.mark.parametrize(
    ("count", "error", "text"),
    [
        (0, ValueError, "count must be at least 1, got 0"),
        (-3, ValueError, "count must be at least 1, got -3"),
        (2.0, TypeError, "count must be an int, got 2.0"),
        ("2", TypeError, "count must be an int, got '2'"),
        (None, TypeError, "count must be an int, got None"),
    ],
)
def test_set_num_threads_refuses(count, error, text):
    with pytest.raises(error, match=text):
        stablenorm.set_num_threads(count)
    assert stablenorm.get_num_threads() == 4
    stablenorm.set_num_threads(np.int64(3))
    assert stablenorm.get_num_threads() == 3


def test_before_it_is_set_it_is_what_the_process_may_use(monkeypatch):
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    affinity = getattr(os, "sched_getaffinity", None)
    assert stablenorm.get_num_threads() == (len(affinity(0)) if affinity else os.cpu_count())


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5", "1e1", "\N{SUPERSCRIPT TWO}"])
def test_a_bad_numba_num_threads_is_one_clear_error(monkeypatch, value):
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setenv("NUMBA_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"NUMBA_NUM_THREADS must be a positive integer.*{value}"):
        stablenorm.get_num_threads()


COUNT_HELPERS = """
import threading
import numpy as np
import stablenorm
x = np.ones((2048, 130), np.float32)
y, cache = stablenorm.layer_norm_forward(x)
stablenorm.layer_norm_backward(x, cache)
print(sum(thread.name == "stablenorm" for thread in threading.enumerate()))
"""


def test_numba_num_threads_of_a_fresh_process():
    assert run_python(COUNT_HELPERS, NUMBA_NUM_THREADS="3").stdout == "2\n"
    assert run_python(COUNT_HELPERS, NUMBA_NUM_THREADS="1").stdout == "0\n"
    # Not Numba's own warning, nor "Numba cannot be loaded": with warnings as errors, this is all.
    failed = run_python(COUNT_HELPERS, NUMBA_NUM_THREADS="two")
    assert failed.stderr.splitlines()[-1] == (
        "ValueError: NUMBA_NUM_THREADS must be a positive integer, got 'two'; unset or correct it"
    )


def test_a_small_input_starts_nobody(crew, dtype, monkeypatch):
    # Calls are never so dense.
    monkeypatch.setattr(_helpers, "DENSE", 0.0)
    # A float64 element takes four times as long.
    few = 4 if dtype == np.float64 else 1
    run(*make(3, (60 // few, 1024), dtype))
    layer_norm(make(3, (1023 // few, 64), dtype)[0])
    assert crew.helpers == []


def test_dense_small_calls_are_shared(crew, monkeypatch):
    monkeypatch.setattr(_helpers, "DENSE", np.inf)
    arguments = make(3, (60, 1024))
    stablenorm.set_num_threads(1)
    expected = run(*arguments)
    stablenorm.set_num_threads(2)
    assert run(*arguments) == expected
    assert len(crew.helpers) == 1
    # Not worth the 10 microseconds of any thread.
    monkeypatch.setattr(_helpers, "LEAST_SHARED", 1 << 17)
    stablenorm.set_num_threads(3)
    assert run(*arguments) == expected
    assert len(crew.helpers) == 1


def test_one_thread_means_one(crew):
    stablenorm.set_num_threads(1)
    run(*make(3))
    assert crew.helpers == []


def test_without_new_threads_the_caller_does_it_all(crew, monkeypatch):
    expected = run(*make(4))
    assert crew.helpers

    def start(_self):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    other = _helpers._Crew()
    monkeypatch.setattr(_helpers, "_crew", other)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert run(*make(4)) == expected
    assert other.helpers == []


# ---- threads of the caller ----


def test_calls_from_many_threads_at_once(crew):
    stablenorm.set_num_threads(3)
    data = [make(seed, (700 + 300 * seed, 130)) for seed in range(8)]
    expected = [run(*arguments) for arguments in data]
    before, most = set(helpers_alive()) - {h.thread for h in crew.helpers}, []
    barrier = threading.Barrier(8)
    wrong = []

    def work(mine):
        barrier.wait()
        for _ in range(5):
            if run(*data[mine]) != expected[mine]:
                wrong.append(mine)
            most.append(len(set(helpers_alive()) - before))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(most) == 40
    assert max(most) == 2


def test_helpers_let_go_of_the_arrays():
    x, gamma, beta, dy = make(5)
    y, cache = layer_norm_forward(x, gamma, beta)
    gradients = layer_norm_backward(dy, cache)
    references = [weakref.ref(v) for v in (x, y, dy, gamma, beta, gradients.dx, gradients.dgamma)]
    del x, y, dy, gamma, beta, cache, gradients
    deadline = time.monotonic() + 5
    while any(r() is not None for r in references) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(r() is None for r in references)


@pytest.mark.parametrize("who", [0, 1])
def test_a_failing_tile_is_an_error_not_a_hang(crew, who):
    """A compiled job can run out of memory, with a tile taken that nobody will finish."""
    for _ in range(20):
        with pytest.raises(MemoryError):
            taken_by(1, 50, failing=who)
    assert crew.words[_sharing._LENT] == crew.words[_sharing._INSIDE] == 0
    assert run(*make(6)) == run(*make(6))
    assert [h.thread.is_alive() for h in crew.helpers] == [True]


@pytest.mark.usefixtures("crew")
def test_a_sleeping_helper_is_woken():
    for _ in range(3):
        # Longer than it spins.
        time.sleep(0.02)
        assert sum(count > 0 for count in taken_by(1, 2)) == 2


def test_without_a_pipe_the_caller_does_it_all(crew, monkeypatch):
    def pipe():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", pipe)
    assert run(*make(4)) == run(*make(4))
    assert crew.helpers == []
