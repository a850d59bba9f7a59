"""Threads and processes: broken by a bit, a fork, an interrupt or the end of a process while helpers are about."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
from interpreter import python, run_python

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward, threads

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Python says of every fork beside threads that it may hang. That it does not is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

# More than enough to wake helpers, and more tiles than threads, in forward and backward.
MANY_TILES = (2048, 130)


@pytest.fixture(autouse=True)
def four_threads():
    before = stablenorm.get_num_threads()
    stablenorm.set_num_threads(4)
    yield
    stablenorm.set_num_threads(before)


def make(seed, shape=MANY_TILES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((2, *shape)) + 3).astype(dtype)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return x, gamma, beta, dy


def run(x, gamma, beta, dy):
    y, cache = layer_norm_forward(x, gamma, beta)
    return [v.tobytes() for v in (y, *layer_norm_backward(dy, cache))]


def count_threads():
    """Return how many threads this process has, those of C++ included; None where the system does not say."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else None


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
from test_processes import count_threads

def forwards(rows, calls):
    x = np.ones((rows, 1024), np.float32)
    for _ in range(calls):
        stablenorm.layer_norm_forward(x)
    return count_threads() - before

before = count_threads()
print(forwards(60, 1), forwards(60, 9), forwards(600, 9))
"""


@pytest.mark.skipif(count_threads() is None, reason="this system does not count threads")
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


def in_child(work, seconds=30):
    """Run `work` in a forked child; fail if it fails, or does not end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  # nothing may reach the pytest of this copy
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the forked child hangs")


# ---- fork, and processes ----


@forking
def test_a_child_after_a_fork_has_helpers_of_its_own():
    arguments = make(7)
    expected = run(*arguments)

    def work():
        before = count_threads()
        assert run(*arguments) == expected
        assert before is None or (before, count_threads()) == (1, 4)

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


POOL = """
import multiprocessing, sys
import numpy as np
import stablenorm

def work(seed):
    x, dy = np.random.default_rng(seed).standard_normal((2, 2048, 130)).astype(np.float32)
    y, cache = stablenorm.layer_norm_forward(x)
    return y.tobytes(), layer_norm_backward(dy, cache).dx.tobytes()

from stablenorm import layer_norm_backward

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    expected = [work(seed) for seed in range(4)]
    with context.Pool(2) as pool:
        actual = pool.map_async(work, range(4)).get(50)
    raise SystemExit(actual != expected)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(tmp_path, method):
    # A file of its own: a spawned process must be able to import it.
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", script, method],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        # The path of a socket has 104 bytes at most, and TMPDIR may have as many.
        env={**os.environ, "TMPDIR": "/tmp"},
    )
    assert (result.returncode, result.stderr) == (0, "")


# ---- the end ----

EXIT = """
import threading, time
import numpy as np
import stablenorm
stablenorm.set_num_threads(4)
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
    """Right after a parallel call; and with calls of daemon threads going on."""
    result = run_python(EXIT.format(daemon=daemon), timeout=30)
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
