"""Threads change no bit; forks, interrupts and the end of the process neither hang nor crash."""

import multiprocessing
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from interpreter import python, run_python
from norms import compute, draw

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm import threads as of_threads

pytest.importorskip("stablenorm.native", exc_type=ImportError)

pytestmark = [
    # Python warns that a fork beside threads may hang. These tests show that ours do not.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
    pytest.mark.parametrize("threads", [4], indirect=True),
    pytest.mark.usefixtures("threads"),
]

forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
TASKS = Path("/proc/self/task")
counting = pytest.mark.skipif(not TASKS.is_dir(), reason="this system does not count threads")


def make(seed, shape=(2048, 130)):
    """Return enough rows to wake helpers, and more tiles than threads."""
    return draw(np.random.default_rng(seed), shape)


def run(x, gamma, beta, dy):
    return [array.tobytes() for array in compute((x, gamma, beta, 1e-5, dy)).values()]


def count_threads():
    """Return the number of threads of this process, those of C++ included; None if the system does not say."""
    return len(list(TASKS.iterdir())) if TASKS.is_dir() else None


# ---- the number of threads ----


def test_the_environment_and_the_processors_decide_until_it_is_set(monkeypatch):
    monkeypatch.setattr(of_threads, "_chosen", None)
    for value in ("two", "0", "-1", "1.5", "1e1", "\N{SUPERSCRIPT TWO}"):
        monkeypatch.setenv("STABLENORM_NUM_THREADS", value)
        said = (
            f"STABLENORM_NUM_THREADS must be an integer from 1 to 2147483647, got '{value}'; unset"
        )
        with pytest.raises(ValueError, match=said):
            stablenorm.get_num_threads()
    monkeypatch.delenv("STABLENORM_NUM_THREADS")
    affinity = getattr(os, "sched_getaffinity", None)
    assert stablenorm.get_num_threads() == (len(affinity(0)) if affinity else os.cpu_count())
    stablenorm.set_num_threads(np.int64(3))
    assert stablenorm.get_num_threads() == 3


COUNT = """
import numpy as np
import stablenorm
from test_processes import count_threads

def forwards(rows, calls):
    x = np.ones((rows, 1024), np.float32)
    for _ in range(calls):
        stablenorm.layer_norm_forward(x)
    return count_threads() - before

before = count_threads()
print(forwards(60, 1), forwards(60, 9), forwards(600, 9))
"""


@counting
def test_how_many_helpers_a_fresh_process_starts():
    """One small input starts none. Without helpers the tests of this file could pass on one thread."""
    for count, helpers in (("3", "2"), ("1", "0")):
        assert python(COUNT, STABLENORM_NUM_THREADS=count).split() == ["0", helpers, helpers]


# ---- threads of the caller ----


def test_calls_from_many_threads_at_once():
    data = [make(seed, (700 + 300 * seed, 130)) for seed in range(8)]
    expected = [run(*arguments) for arguments in data]
    barrier = threading.Barrier(8)

    def work(mine):
        barrier.wait()
        return all(run(*data[mine]) == expected[mine] for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_helpers_let_go_of_the_arrays():
    x, gamma, beta, dy = make(5)
    y, cache = layer_norm_forward(x, gamma, beta)
    gradients = layer_norm_backward(dy, cache)
    references = [weakref.ref(v) for v in (x, y, dy, gamma, beta, gradients.dx, gradients.dgamma)]
    del x, y, dy, gamma, beta, cache, gradients
    deadline = time.monotonic() + 5
    while any(r() is not None for r in references):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@counting
def test_helpers_that_left_the_processor_of_the_caller_may_come_back():
    arguments = make(6)
    for _ in range(200):
        run(*arguments)
    tasks, deadline = [int(task.name) for task in TASKS.iterdir()], time.monotonic() + 5
    # A helper that is about to come back may wait for a processor.
    while any(os.sched_getaffinity(task) != os.sched_getaffinity(0) for task in tasks):
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- fork ----


def in_child(work, seconds=30):
    """Run `work` in a forked child; fail if it fails, or does not end."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(seconds)
    hangs = child.is_alive()
    child.kill()
    assert (hangs, child.exitcode) == (False, 0)


@forking
def test_a_child_after_a_fork_has_helpers_of_its_own():
    arguments = make(7)
    expected = run(*arguments)

    def work():
        before = count_threads()
        assert run(*arguments) == expected
        assert (before, count_threads()) in ((1, 4), (None, None))

    in_child(work)
    in_child(lambda: in_child(work))
    assert run(*arguments) == expected


@forking
def test_fork_while_another_thread_is_in_a_call():
    arguments, others = make(8), make(9, (3000, 130))
    expected = run(*arguments)
    stop = threading.Event()

    def call():
        while not stop.is_set():
            run(*others)

    def work():
        for _ in range(3):
            assert run(*arguments) == expected

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(8):
            in_child(work)
    finally:
        stop.set()
        thread.join()


# ---- the end ----

EXIT = """
import sys, threading, time
import numpy as np
import stablenorm
stablenorm.set_num_threads(4)
# Memory of results that lives to the end: in a cycle, and by names that go before and after those of all modules.
new = lambda: stablenorm.memory.empty((1 << 22,), np.dtype(np.uint8))
cycle = [new()]
cycle.append(cycle)
np.kept, sys.kept = new()[1:], [stablenorm.memory, new()]
x = np.ones((4096, 1024), np.float32)
out = np.empty_like(x)
stablenorm.layer_norm(x, out=out)
def work():
    while True:
        stablenorm.layer_norm(x, out=out)
if {daemon}:
    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)
print("end", flush=True)
"""


@pytest.mark.parametrize("daemon", [False, True])
def test_the_interpreter_ends_at_once(daemon):
    """It ends in silence, right after a parallel call, or with daemon threads in calls."""
    result = run_python(EXIT.format(daemon=daemon), flags=("-X", "dev"), timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


INTERRUPTED = """
import os, random, signal, threading, time
import numpy as np
from stablenorm import layer_norm_backward, layer_norm_forward, set_num_threads

set_num_threads(3)
x, dy = np.random.default_rng(0).standard_normal((2, 2048, 130)).astype(np.float32)
gamma = x[0].copy()
y, cache = layer_norm_forward(x, gamma)
expected = [v.tobytes() for v in (y, *layer_norm_backward(dy, cache)[:2])]
out, dx = np.empty_like(x), np.empty_like(x)

def loop(seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        out.fill(0)
        _, cache = layer_norm_forward(x, gamma, out=out)
        layer_norm_backward(dy, cache, out=(dx, None, None))

signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed(0)
for _ in range(40):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.004))
        loop()
        raise SystemExit("no interrupt came")
    except KeyboardInterrupt:
        # Nobody still writes.
        left = out.tobytes(), dx.tobytes()
        time.sleep(0.0005)
        assert left == (out.tobytes(), dx.tobytes()), "still writing"
        y, cache = layer_norm_forward(x, gamma)
        assert expected == [v.tobytes() for v in (y, *layer_norm_backward(dy, cache)[:2])]
# A shell starts what runs in its background with SIGINT ignored, and Python leaves that so.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
loop()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timer")
def test_keyboard_interrupts():
    result = run_python(INTERRUPTED)
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert result.returncode == -signal.SIGINT
