"""Threads: the same bits with any number, and right results whatever threads the caller has."""

import os
import threading
import time
import weakref

import numpy as np
import pytest
import shared_calls
from interpreter import python, run_python
from shared_calls import make, run

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward, threads

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Fixture.
four_threads = shared_calls.four_threads


# ---- the number of threads ----


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
    monkeypatch.delenv("STABLENORM_NUM_THREADS", raising=False)
    affinity = getattr(os, "sched_getaffinity", None)
    assert stablenorm.get_num_threads() == (len(affinity(0)) if affinity else os.cpu_count())


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5", "1e1", "\N{SUPERSCRIPT TWO}"])
def test_a_bad_number_of_threads_is_one_clear_error(monkeypatch, value):
    monkeypatch.setattr(threads, "_chosen", None)
    monkeypatch.setenv("STABLENORM_NUM_THREADS", value)
    with pytest.raises(
        ValueError, match=f"STABLENORM_NUM_THREADS must be a positive integer.*{value}"
    ):
        stablenorm.get_num_threads()


COUNT = """
import numpy as np
import stablenorm
from shared_calls import count_threads

def forwards(rows, calls):
    x = np.ones((rows, 1024), np.float32)
    for _ in range(calls):
        stablenorm.layer_norm_forward(x)
    return count_threads() - before

before = count_threads()
print(forwards(60, 1), forwards(60, 9), forwards(600, 9))
"""


@pytest.mark.skipif(
    shared_calls.count_threads() is None, reason="this system does not count threads"
)
def test_how_many_helpers_a_fresh_process_starts():
    """None for one small input; without them, the tests of this file could pass on one thread."""
    for count, helpers in (("3", "2"), ("1", "0")):
        assert python(COUNT, STABLENORM_NUM_THREADS=count).split() == ["0", helpers, helpers]
    failed = run_python(COUNT, STABLENORM_NUM_THREADS="two")
    assert failed.stderr.splitlines()[-1] == (
        "ValueError: STABLENORM_NUM_THREADS must be a positive integer, got 'two'; unset or correct it"
    )


# ---- threads of the caller ----


def test_calls_from_many_threads_at_once():
    data = [make(seed, (700 + 300 * seed, 130)) for seed in range(8)]
    expected = [run(*arguments) for arguments in data]
    barrier = threading.Barrier(8)
    wrong = []

    def work(mine):
        barrier.wait()
        wrong.extend(mine for _ in range(5) if run(*data[mine]) != expected[mine])

    callers = [threading.Thread(target=work, args=(mine,)) for mine in range(8)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


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
