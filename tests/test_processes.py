"""Forks, processes, interrupts and the end of one, with helpers about: right results, no hang."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
import shared_calls
from interpreter import run_python
from shared_calls import count_threads, make, run

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Python says of every fork beside threads that it may hang. That it does not is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

# Fixture.
four_threads = shared_calls.four_threads


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
