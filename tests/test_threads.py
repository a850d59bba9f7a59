"""Threads: the same bits with any number, and right results whatever threads the caller has."""

import functools
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
module = pytest.importorskip("stablenorm.cpu.pool")
memory = pytest.importorskip("stablenorm.cpu.memory")
processor = pytest.importorskip("stablenorm.cpu.processor")

# Fixtures.
four_threads, pool = shared_calls.four_threads, shared_calls.pool


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


@functools.cache
def counting():
    """Compile, once it is needed, what counts the tiles that each takes; return how to call it."""

    @numba.njit
    def at(place, index):
        return memory.pointer_at(place + 8 * index, np.int64)

    @numba.cfunc(numba.void(numba.int64, numba.int64, numba.int64))
    def count_tile(record, tile, me):
        """The first of all waits for another to take one."""
        processor.atomic_add(at(record, 1 + me), 1)
        processor.atomic_add(at(record, 9 + tile), 1)
        for _ in range(at(record, 0)[0]):
            others = 0
            for part in range(8):
                others += part != me and processor.atomic_load(at(record, 1 + part)) > 0
            if others:
                break
            processor.pause()

    @numba.njit("void(int64, int64[::1], int64, int64[::1], int64)", nogil=True)
    def counted(function, record, tiles, words, helpers):
        module.run(function, record.ctypes.data, tiles, words.ctypes.data, helpers)

    return lambda *arguments: counted(count_tile.address, *arguments)


def taken_by(helpers, tiles, patience=1_000_000):
    """Return how many tiles each takes, and how often each tile is taken, by so many helpers."""
    record = np.zeros(9 + tiles, np.int64)
    # 0.07 s: far more than a thread takes to come where processors are free.
    record[0] = patience
    stablenorm.set_num_threads(helpers + 1)
    words, count = module.pool_for(99, False, None)
    assert count == helpers
    counting()(record, tiles, words, count)
    return list(record[1:9]), list(record[9:])


def test_helpers_really_take_part(pool):
    """Without this, the tests of this file could pass on one thread."""
    assert run(*make(2))
    assert len(pool.alarms) == 3
    # Of helpers that fall asleep while this thread is preempted, none comes: not each time.
    assert any(sum(count > 0 for count in taken_by(3, 7)[0]) >= 2 for _ in range(100))
    assert sum(taken_by(3, 7)[0]) == 7


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 5, 31, 1000])
@pytest.mark.parametrize("helpers", [0, 1, 2, 5])
def test_every_tile_is_taken_once(pool, tiles, helpers):
    for _ in range(20):
        assert taken_by(helpers, tiles, patience=0)[1] == [1] * tiles
    assert pool.words[module._TAKEN] == pool.words[module._WORKING] == 0


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


def test_a_small_input_starts_and_wakes_nobody(pool, dtype):
    # A float64 element takes four times as long.
    few = 4 if dtype == np.float64 else 1
    run(*make(3, (60 // few, 1024), dtype))
    layer_norm(make(3, (1023 // few, 64), dtype)[0])
    assert pool.alarms == []
    run(*make(3))
    # Longer than they spin and nap.
    time.sleep(0.1)
    asleep = [pool.words[module._ASLEEP + me * module._APART] for me in (1, 2, 3)]
    run(*make(3, (60 // few, 1024), dtype))
    assert asleep == [1, 1, 1]
    assert asleep == [pool.words[module._ASLEEP + me * module._APART] for me in (1, 2, 3)]


def test_without_new_threads_the_caller_does_it_all(pool, monkeypatch):
    expected = run(*make(4))
    assert pool.alarms

    def start(_self):
        msg = "can't start new thread"
        raise RuntimeError(msg)

    other = module._Pool()
    monkeypatch.setattr(module, "_pool", other)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert run(*make(4)) == expected
    assert other.alarms == []


# ---- threads of the caller ----


@pytest.mark.usefixtures("pool")
def test_calls_from_many_threads_at_once():
    stablenorm.set_num_threads(3)
    before, most = set(helpers_alive()), []
    data = [make(seed, (700 + 300 * seed, 130)) for seed in range(8)]
    expected = [run(*arguments) for arguments in data]
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


def test_a_sleeping_helper_is_woken(pool):
    for _ in range(3):
        taken_by(1, 2, patience=0)
        # Longer than it spins and naps.
        deadline = time.monotonic() + 5
        while not pool.words[module._ASLEEP + module._APART] and time.monotonic() < deadline:
            time.sleep(0.001)
        # One that is woken, but finds nothing to do before this thread is preempted, sleeps again.
        assert any(min(taken_by(1, 2)[0][:2]) for _ in range(100))
