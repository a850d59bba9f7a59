"""Threads: the same bits with any number, and right results whatever the caller does with his."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref

import numpy as np
import pytest

import stablenorm
from stablenorm import _threads, layer_norm, layer_norm_backward, layer_norm_forward

numba = pytest.importorskip("numba")
_helpers = pytest.importorskip("stablenorm.kernels._helpers")
_sharing = pytest.importorskip("stablenorm.kernels._sharing")

# Python says of every fork beside threads that it may hang. That it does not is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

# More than SMALL elements, and more tiles than threads, in forward and backward.
MANY_TILES = (2048, 130)


@pytest.fixture(autouse=True)
def four_threads():
    before = stablenorm.get_num_threads()
    stablenorm.set_num_threads(4)
    yield
    stablenorm.set_num_threads(before)


@pytest.fixture
def crew(monkeypatch):
    """Replace the helpers of this process by a crew that has started nobody yet."""
    fresh = _helpers._Crew()
    monkeypatch.setattr(_helpers, "_crew", fresh)
    return fresh


def make(seed, shape=MANY_TILES, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, dy = (rng.standard_normal((2, *shape)) + 3).astype(dtype)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(dtype)
    return x, gamma, beta, dy


def run(x, gamma, beta, dy):
    y, cache = layer_norm_forward(x, gamma, beta)
    return [v.tobytes() for v in (y, *layer_norm_backward(dy, cache))]


def helpers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "stablenorm"]


def python(code, *, timeout=60, flags=(), **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


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
    monkeypatch.setattr(_threads, "_chosen", None)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    affinity = getattr(os, "sched_getaffinity", None)
    assert stablenorm.get_num_threads() == (len(affinity(0)) if affinity else os.cpu_count())


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5", "1e1", "\N{SUPERSCRIPT TWO}"])
def test_a_bad_numba_num_threads_is_one_clear_error(monkeypatch, value):
    monkeypatch.setattr(_threads, "_chosen", None)
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
    assert python(COUNT_HELPERS, NUMBA_NUM_THREADS="3").stdout == "2\n"
    assert python(COUNT_HELPERS, NUMBA_NUM_THREADS="1").stdout == "0\n"
    # Not Numba's own warning, nor "Numba cannot be loaded": with warnings as errors, this is all.
    failed = python(COUNT_HELPERS, NUMBA_NUM_THREADS="two")
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


# ---- fork, and processes ----


@forking
def test_a_child_after_a_fork_has_helpers_of_its_own(crew):
    arguments = make(7)
    expected = run(*arguments)
    assert len(crew.helpers) == 3

    def work():
        assert helpers_alive() == []
        assert run(*arguments) == expected
        assert len(helpers_alive()) == 3

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


@forking
def test_a_fork_waits_for_numba_to_be_loaded_and_to_compile():
    held, waited = threading.Event(), []

    def hold():
        with _threads.starting:
            held.set()
            time.sleep(0.3)
            waited.append("all of it")

    def work():
        assert waited
        thread = threading.Thread(target=_threads.starting.acquire, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    in_child(work)
    thread.join()
    with _threads.starting:
        in_child(lambda: run(*make(10)))


FORK_DURING_THE_FIRST_CALL = """
import os, threading, time
import numpy as np
import stablenorm
x = np.arange(2048 * 130, dtype=np.float32).reshape(2048, 130)
thread = threading.Thread(target=stablenorm.layer_norm, args=(x,))
thread.start()
time.sleep(0.05)
pid = os.fork()
if pid == 0:
    y = stablenorm.layer_norm(x)
    os._exit(not np.array_equal(y, stablenorm.layer_norm(x, backend="numpy")))
thread.join()
for _ in range(3000):
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.01)
os.kill(pid, 9)
raise SystemExit("the child hangs")
"""


@forking
def test_fork_during_the_first_call_of_another_thread():
    flags = ("-W", "ignore::DeprecationWarning")
    result = python(FORK_DURING_THE_FIRST_CALL, flags=flags)
    assert (result.returncode, result.stderr) == (0, "")


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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
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
    result = python(EXIT.format(daemon=daemon), timeout=30)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


INTERRUPTED = """
import os, random, signal, threading, time
import numpy as np
from stablenorm import layer_norm_backward, layer_norm_forward, set_num_threads
from stablenorm.kernels import _helpers, _sharing

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
for _ in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.004))
        loop()
        raise SystemExit("no interrupt came")
    except KeyboardInterrupt:
        # Nobody still writes, nor keeps the helpers.
        left = out.tobytes(), dx.tobytes()
        time.sleep(0.0005)
        assert left == (out.tobytes(), dx.tobytes()), "still writing"
        assert _helpers._crew.words[_sharing._LENT] == 0, "kept"
        y, cache = layer_norm_forward(x, gamma)
        assert expected == [v.tobytes() for v in (y, *layer_norm_backward(dy, cache)[:2])]
print(len(_helpers._crew.helpers), flush=True)
# A shell starts what runs in its background with SIGINT ignored, and Python leaves that so.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
loop()
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timer")
def test_keyboard_interrupts():
    result = python(INTERRUPTED)
    assert result.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert result.returncode == -signal.SIGINT
    assert result.stdout == "2\n"
