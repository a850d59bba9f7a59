"""`stablenorm bench`, and the timing behind it."""

import gc
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import stablenorm.cli.bench as job
import stablenorm.timing as instrument
from stablenorm.backends import BACKENDS
from stablenorm.cli import main, parts
from stablenorm.timing import make_copy, measure_copy, measure_interleaved

pytestmark = pytest.mark.usefixtures("plain_terminal")


@pytest.fixture
def quick(monkeypatch):
    """A copy of 64 KiB and two milliseconds a candidate: the command, not its figures."""
    hasty = partial(measure_interleaved, settle=0)
    monkeypatch.setattr(job, "measure_interleaved", hasty)
    # Of the copy.
    monkeypatch.setattr(instrument, "measure_interleaved", hasty)
    monkeypatch.setattr(instrument, "WARM", 0)
    # Of the heap of all tests it takes 40 ms, eight times in each run.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(job, "measure_copy", partial(measure_copy, nbytes=2**16))
    monkeypatch.setattr(job, "_LIMIT", 0.002)


# Of the timing: functions whose time, or whose order of calls, is known.


def test_candidates_take_turns_in_rotating_order():
    calls = []
    nap = partial(time.sleep, 0.001)
    candidates = {name: (lambda name=name: (calls.append(name), nap())) for name in "abc"}
    timings = measure_interleaved(candidates, rounds=3, settle=0)
    runs = [name for name, before in zip(calls, [None, *calls], strict=False) if name != before]
    # First each is calibrated; then three rounds; neighbours of one name melt into one.
    assert "".join(runs) == "abc" + "abc" + "bca" + "cab"
    for timing in timings.values():
        # A sleep never ends early; how late it ends is the system's affair.
        assert 0.00099 <= timing.low <= timing.median <= timing.high
        assert (timing.rounds, timing.calls) == (3, 1)


def test_each_sample_is_warmed_up_by_calls_that_do_not_count():
    """A first call after another candidate takes 30 times as long: it is in no sample."""
    last = [None]

    def cold(name):
        time.sleep(0.0003 if last[0] == name else 0.01)
        last[0] = name

    timings = measure_interleaved({name: partial(cold, name) for name in "ab"}, rounds=5, settle=0)
    assert max(timing.low for timing in timings.values()) < 0.01


def test_a_burst_has_as_many_calls_as_it_takes():
    timing = measure_interleaved({"": lambda: None}, rounds=1)[""]
    # Of a call of tens of nanoseconds 0.3 ms hold thousands, and not millions.
    assert 100 < timing.calls < 1_000_000
    assert 0 < timing.median < 1e-5


def test_a_slow_call_at_first_does_not_make_bursts_of_one():
    """Once: the second call met the threads of another library, and took 24 ms instead of 5 us."""
    pauses = iter([0, 0.024])
    timing = measure_interleaved({"": lambda: time.sleep(next(pauses, 0))}, rounds=1)[""]
    assert timing.calls > 1


def test_a_limit_ends_it_after_the_least_rounds():
    nap = {"nap": partial(time.sleep, 0.001)}
    assert measure_interleaved(nap, rounds=50, least=2, limit=0)["nap"].rounds == 2


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_meanwhile_and_then_as_before(was_on):
    seen = []

    def fail():
        seen.append(gc.isenabled())
        if len(seen) > 2:
            raise RuntimeError

    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(RuntimeError):
            measure_interleaved({"": fail})
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
    assert seen == [False, False, False]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_copy_copies_all_of_it(threads):
    source, target = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    make_copy(source, target, threads)()
    np.testing.assert_array_equal(target, source)


# Of the command.


def run(capsys, *arguments, status=0):
    assert main(["bench", *map(str, arguments)]) == status
    return capsys.readouterr()


@pytest.mark.usefixtures("quick")
def test_a_table_and_a_file(capsys):
    shown = run(
        capsys, "--shape", 2, 3, 8, "--shape", 16, "--dtype", "float32", "--dtype", "bfloat16",
        "--rounding", "fast", "--rounding", "nearest", "--kind", "rms", "--json", "r.json",
    )  # fmt: skip
    assert shown.err == ""
    for word in ("2 x 3 x 8", "16", "bfloat16", "backward", "out=", "GB/s", ", nearest", *BACKENDS):
        assert word in shown.out
    held = json.loads(Path("r.json").read_text())
    # Shapes, dtypes, directions, roundings, and fresh or out=.
    assert len(held["rows"]) == 2 * 2 * 2 * 2 * 2 * len(BACKENDS)
    assert {row["rounding"] for row in held["rows"]} == {"fast", "nearest"}
    assert held["kind"] == "rms"
    for row in held["rows"]:
        nbytes = (2 if row["direction"] == "forward" else 3) * np.prod(row["shape"])
        nbytes *= 2 if row["dtype"] == "bfloat16" else 4
        speed = row["bytes_per_second"]
        assert speed == pytest.approx(nbytes / row["seconds"])
        assert row["of_copy"] == pytest.approx(speed / held["copy_bytes_per_second"])
        assert row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]


@pytest.mark.usefixtures("quick")
def test_threads_and_backend_are_what_was_asked_for(capsys):
    before = parts.use_threads(None)
    try:
        shown = run(capsys, "--shape", 4, 5, "--threads", 3, "--backend", "numpy").out
        assert "3 threads" in shown
        assert "numba" not in shown
    finally:
        parts.use_threads(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", 3, 0], "--shape: must be >= 1, got 0"),
        (["--shape", 10**6, 10**6], "--shape must fit in memory, got 1000000 1000000, which takes"),
        (["--shape", 1, "--threads", 0], "--threads: must be >= 1, got 0"),
        (["--backend", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_what_cannot_be_run_is_one_line(capsys, arguments, message):
    shown = run(capsys, *arguments, status=2)
    assert message in shown.err
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_backend_that_cannot_be_loaded(capsys, monkeypatch):
    def without(name):
        if name == "numba":
            msg = 'Numba is needed for backend="numba": pip install numba'
            raise ImportError(msg)
        return name

    monkeypatch.setattr(job, "choose", without)
    assert job.usable_backends() == [name for name in BACKENDS if name != "numba"]
    shown = run(capsys, "--backend", "numba", status=2)
    assert shown.err == 'stablenorm: Numba is needed for backend="numba": pip install numba\n'
