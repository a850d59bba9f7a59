"""What is timed: the cases, and how one of them is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from agreement import check_ours, check_peer, compute
from peers import RESULTS, Peer, copies

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm._bench import (
    DTYPES,
    PASSES,
    Problem,
    make_candidates,
    make_problem,
    type_of,
    usable_backends,
)
from stablenorm.analysis.timing import COPY_BYTES, Timing, make_copy, measure_interleaved
from stablenorm.backends import choose

OURS, OURS_OUT, CALL = "stablenorm", "stablenorm out=", "layer_norm"
NUMPY_COPY = "copy, NumPy"
SHAPES = (
    (1, 1, 64),
    (1, 1, 4096),
    (2, 128, 64),
    (2, 128, 1024),
    (4, 512, 1024),
    (4, 512, 4096),
    (32, 512, 768),
    (16, 512, 1024),
    (64, 2048, 256),
)
# float32 of this many is 256 MiB.
ELEMENTS = 2**26
# As large as what the machine's copy is measured on; an odd n leaves a few elements over.
LARGE = 0.99 * COPY_BYTES
# Powers of two; no multiple of any vector (3, 17); and the n that broke others' padding (769).
LENGTHS = (*(2**power for power in range(17)), 3, 17, 769)
# The last one is 512 MiB, beyond what the copy is measured on.
ROWS = tuple(2**power for power in range(18))
SUITES = ("call", "shapes", "n", "rows", "dtypes")


class Case(NamedTuple):
    """One problem to time."""

    suite: str
    shape: tuple[int, ...]
    dtype: str


class Effort(NamedTuple):
    """How long to measure: rounds at most, rounds at least, seconds between the two."""

    rounds: int
    least: int
    limit: float


class Record(NamedTuple):
    """One candidate on one case: seconds a call, and bytes a second beside those of the copy."""

    suite: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    candidate: str
    seconds: float
    low: float
    high: float
    rounds: int
    speed: float
    copy: float


def make_cases(smoke: bool) -> list[Case]:
    """Return all cases; `smoke` makes the large ones tiny."""
    elements, most = (2**12, 2**4) if smoke else (ELEMENTS, ROWS[-1])
    shapes = [shape for shape in SHAPES if not smoke or math.prod(shape) <= 2**15]
    lengths = [n for n in sorted(LENGTHS) if n <= elements]
    return [
        Case("call", SHAPES[0], "float32"),
        *(Case("shapes", shape, dtype) for dtype in DTYPES for shape in shapes),
        *(Case("n", (elements // n, n), "float32") for n in lengths),
        *(Case("rows", (rows, 1024), "float32") for rows in ROWS if rows <= most),
        # One case: all dtypes beside one another.
        Case("dtypes", (elements // 1024, 1024), "all"),
    ]


def measure_machine(threads: int, effort: Effort) -> dict[str, float]:
    """Bytes a second of copies of 256 MiB, pages touched: NumPy's in threads, and the peers'."""
    source, target = np.ones((2, COPY_BYTES // 4), np.float32)
    candidates = _copies(source, target, threads)
    timings = measure_interleaved(candidates, **effort._asdict())
    return {name: 2 * COPY_BYTES / timing.median for name, timing in timings.items()}


def measure_case(
    case: Case, peers: Iterable[Peer], threads: int, effort: Effort, machine: float
) -> tuple[list[Record], dict[str, float]]:
    """
    Check agreement, then time forward and backward.

    Returns the records, and per peer the largest part of its tolerance that a result used; one
    that uses more than all of it does not agree and is not timed.
    """
    if case.suite == "dtypes":
        return _measure_dtypes(case, threads, effort, machine), {}
    problem = make_problem(case.shape, case.dtype)
    ours = compute(problem)
    candidates = _ours(problem, case.suite)
    check_ours(problem, ours, _written(problem))
    used = {}
    for peer in peers:
        if case.dtype not in peer.dtypes or (case.suite != "shapes" and peer.name != "PyTorch"):
            continue
        calls = peer.make(problem)
        used[peer.name] = max(check_peer(peer, calls, problem, ours).values())
        if used[peer.name] <= 1:
            for direction, more in (("forward", calls.forward), ("backward", calls.backward)):
                for name, call in more.items():
                    # The second way to call PyTorch matters to the overhead of a call alone.
                    if case.suite == "call" or name == peer.name:
                        candidates[direction][name] = call
    # Held no longer: with large arrays it is the memory of one more candidate.
    ours.clear()
    records = []
    beside = _copies(problem.x, problem.y, threads) if problem.x.nbytes >= LARGE else {}
    for direction, ways in candidates.items():
        records += _measure(case, direction, ways | beside, effort, machine)
    return records, used


def _ours(problem: Problem, suite: str) -> dict[str, dict[str, Callable[[], Any]]]:
    default = choose(None)
    calls = {
        direction: {OURS: ways["fresh"], OURS_OUT: ways["out="]}
        for direction, ways in make_candidates(problem, default).items()
    }
    if suite == "call":
        x, gamma, beta, _, y, _ = problem
        calls["forward"][CALL] = lambda: layer_norm(x, gamma, beta)
        calls["forward"][f"{CALL} out="] = lambda: layer_norm(x, gamma, beta, out=y)
    if suite == "shapes":
        for backend in usable_backends():
            if backend != default:
                for direction, ways in make_candidates(problem, backend).items():
                    calls[direction][f"backend {backend}"] = ways["fresh"]
    return calls


def _written(problem: Problem) -> dict[str, Any]:
    """Return our results as `out=` has them."""
    y, cache = layer_norm_forward(problem.x, problem.gamma, problem.beta, out=problem.y)
    gradients = layer_norm_backward(problem.dy, cache, out=problem.gradients)
    return dict(zip(RESULTS, (y, *gradients), strict=True))


def _copies(source: Any, target: Any, threads: int) -> dict[str, Callable[[], Any]]:
    return {NUMPY_COPY: make_copy(source, target, threads), **copies(source, target)}


def _measure(
    case: Case,
    direction: str,
    candidates: dict[str, Callable[[], Any]],
    effort: Effort,
    machine: float,
) -> list[Record]:
    timings = measure_interleaved(candidates, **effort._asdict())
    nbytes = math.prod(case.shape) * type_of(case.dtype).itemsize
    moved = {name: (2 if _is_copy(name) else PASSES[direction]) * nbytes for name in timings}
    speeds = {name: moved[name] / timing.median for name, timing in timings.items()}
    # Beside a copy of the same arrays in the same rounds, where there is one; the machine's else.
    copy = max((speed for name, speed in speeds.items() if _is_copy(name)), default=machine)
    return [
        _record(case, direction, name, timing, speeds[name], copy)
        for name, timing in timings.items()
    ]


def _measure_dtypes(case: Case, threads: int, effort: Effort, machine: float) -> list[Record]:
    """Time `out=` of one shape in all dtypes, interleaved, and the copy of the float32 arrays."""
    problems = {dtype: make_problem(case.shape, dtype) for dtype in DTYPES}
    for problem in problems.values():
        check_ours(problem, compute(problem), _written(problem))
    every = {dtype: make_candidates(problem, None) for dtype, problem in problems.items()}
    wide = problems["float32"]
    records = []
    for direction in PASSES:
        candidates = {dtype: every[dtype][direction]["out="] for dtype in DTYPES}
        if wide.x.nbytes >= LARGE:
            candidates |= _copies(wide.x, wide.y, threads)
        timings = measure_interleaved(candidates, **effort._asdict())
        speed = {
            name: (2 if _is_copy(name) else PASSES[direction])
            * (wide if _is_copy(name) else problems[name]).x.nbytes
            / timing.median
            for name, timing in timings.items()
        }
        copy = max((speed[name] for name in speed if _is_copy(name)), default=machine)
        for name, timing in timings.items():
            dtype, candidate = ("float32", name) if _is_copy(name) else (name, OURS_OUT)
            here = case._replace(dtype=dtype)
            records.append(_record(here, direction, candidate, timing, speed[name], copy))
    return records


def _record(
    case: Case, direction: str, candidate: str, timing: Timing, speed: float, copy: float
) -> Record:
    median, low, high, rounds, _ = timing
    return Record(
        case.suite,
        case.shape,
        case.dtype,
        direction,
        candidate,
        median,
        low,
        high,
        rounds,
        speed,
        copy,
    )


def _is_copy(candidate: str) -> bool:
    return candidate.startswith("copy, ")
