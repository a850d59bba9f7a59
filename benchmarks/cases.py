"""What is timed: the cases, and how one of them is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from agreement import check_ours, check_peer
from peers import EPS, Peer

from stablenorm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    set_num_threads,
)
from stablenorm.backends import choose
from stablenorm.cli.bench import PASSES, Problem, make_candidates, make_problem, usable_backends
from stablenorm.cli.parts import DTYPES
from stablenorm.formats import parse
from stablenorm.timing import COPY_BYTES, make_copy, measure_interleaved
from stablenorm.types import Array

# Ours: as called, and with results written into arrays given.
OURS, OURS_OUT, CALL = "stablenorm", "out=", "layer_norm"
COPY, TORCH_CALL, LAYER = "copy", "PyTorch F.layer_norm", "layer norm"
# Up to 8 MiB, x, y, dy and dx fit into the last-level cache of 32 MiB, and malloc keeps pages that
# are freed: it returns blocks beyond 32 MiB to the system at once, and never smaller ones once some
# were used.
IN_CACHE = ((1, 1, 64), (1, 1, 4096), (2, 128, 64), (2, 128, 1024), (4, 512, 1024))
BEYOND = ((4, 512, 4096), (32, 512, 768), (16, 512, 1024), (64, 2048, 256))
# Of the other types one shape of each kind.
SOME = (*IN_CACHE[::2], IN_CACHE[3], BEYOND[1])
# float32 of this many is 256 MiB.
ELEMENTS = 2**26
# As large as what the machine's copy is measured on; an odd n leaves a few elements over.
LARGE = 0.99 * COPY_BYTES
# Powers of two, and the n that broke others' padding (769).
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 769, 1024, 4096, 16384, 65536)


class Effort(NamedTuple):
    """How long to measure: rounds at most, rounds at least, seconds between the two."""

    rounds: int
    least: int
    limit: float


# rms: RMS norm, beside our layer norm. kept: both sides on an allocator that keeps its pages. alone: one thread each. n: over the length.
# Small cases: enough rounds for a median that a neighbour's noise does not move. Large ones run
# against the limit of seconds; all of them together take less than ten minutes.
SUITES = {
    "call": Effort(51, 15, 10),
    "shapes": Effort(21, 5, 3),
    "rms": Effort(21, 5, 3),
    "kept": Effort(21, 5, 4),
    "alone": Effort(9, 3, 3),
    "n": Effort(9, 3, 2),
}


class Case(NamedTuple):
    """One problem to time."""

    suite: str
    shape: tuple[int, ...]
    dtype: str


class Record(NamedTuple):
    """One candidate on one case: seconds per call with quartiles, the copy's bytes per second."""

    suite: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    candidate: str
    seconds: float
    low: float
    high: float
    copy: float

    @property
    def nbytes(self) -> int:
        """The size of x."""
        return math.prod(self.shape) * parse(self.dtype).itemsize

    @property
    def speed(self) -> float:
        """Bytes per second: those that must be read and written."""
        moved = 2 if self.candidate == COPY else PASSES[self.direction]
        return moved * self.nbytes / self.seconds


def make_cases() -> list[Case]:
    """Return all cases."""
    return [
        Case("call", IN_CACHE[0], "float32"),
        *(Case("shapes", shape, "float32") for shape in IN_CACHE + BEYOND),
        *(Case("rms", shape, "float32") for shape in IN_CACHE + BEYOND),
        *(Case("shapes", shape, dtype) for dtype in DTYPES if dtype != "float32" for shape in SOME),
        *(Case("kept", shape, "float32") for shape in (IN_CACHE[-1], *BEYOND)),
        *(Case("alone", shape, "float32") for shape in (IN_CACHE[3], BEYOND[1])),
        *(Case("n", (ELEMENTS // n, n), "float32") for n in LENGTHS),
    ]


def measure_machine(threads: int, effort: Effort) -> float:
    """Bytes per second of a copy of 256 MiB, pages touched."""
    source, target = np.ones((2, COPY_BYTES // 4), np.float32)
    timings = measure_interleaved({COPY: make_copy(source, target, threads)}, **effort._asdict())
    return 2 * COPY_BYTES / timings[COPY].median


def measure_case(
    case: Case, peers: Iterable[Peer], threads: int, effort: Effort, machine: float
) -> tuple[list[Record], dict[str, float]]:
    """
    Check agreement, then time forward and backward.

    Returns the records, and per peer the largest part of its tolerance that a result used; one
    that uses more than all of it does not agree and is not timed.
    """
    problem = make_problem(case.shape, case.dtype)
    rms = case.suite == "rms"
    ways = _rms(problem) if rms else _ours(problem, case)
    ours = _rms_results(ways) if rms else check_ours(problem, choose(None))
    used = {}
    for peer in peers:
        if case.dtype not in peer.dtypes or not _wanted(peer.name, case):
            continue
        make = peer.make_rms if rms else peer.make
        if make is None:
            continue
        calls = make(problem, EPS)
        used[peer.name] = check_peer(calls, problem, ours)
        if used[peer.name] <= 1:
            ways["forward"][peer.name] = calls.forward
            if calls.backward:
                ways["backward"][peer.name] = calls.backward
            if case.suite == "call":
                ways["forward"] |= calls.other
    # Held no longer: with large arrays it is the memory of one more candidate.
    ours.clear()
    beside: dict[str, Callable[[], Any]] = {}
    if problem.x.nbytes >= LARGE:
        beside[COPY] = make_copy(problem.x, problem.y, threads)
    if case.suite == "alone":
        set_num_threads(1)
    try:
        return [
            record
            for direction, candidates in ways.items()
            for record in _measure(case, direction, candidates | beside, effort, machine)
        ], used
    finally:
        set_num_threads(threads)


def _wanted(peer: str, case: Case) -> bool:
    if case.suite == "alone":
        return peer == "plain NumPy"
    return peer == "PyTorch" or (case.suite in ("shapes", "kept") and case.dtype == "float32")


def _rms(problem: Problem) -> dict[str, dict[str, Callable[[], Any]]]:
    """RMS norm, which PyTorch has without beta, and the layer norm that it takes the place of."""
    x, gamma, beta, dy, *_ = problem
    forward = partial(rms_norm_forward, x, gamma, eps=EPS)
    layer = partial(layer_norm_forward, x, gamma, beta, EPS)
    cache, kept = forward()[1], layer()[1]
    return {
        "forward": {OURS: forward, LAYER: layer},
        "backward": {
            OURS: partial(rms_norm_backward, dy, cache),
            LAYER: partial(layer_norm_backward, dy, kept),
        },
    }


def _rms_results(ways: dict[str, dict[str, Callable[[], Any]]]) -> dict[str, Array]:
    y, gradients = ways["forward"][OURS]()[0], ways["backward"][OURS]()
    return {"y": y, "dx": gradients.dx, "dgamma": gradients.dgamma}


def _ours(problem: Problem, case: Case) -> dict[str, dict[str, Callable[[], Any]]]:
    default = choose(None)
    made = make_candidates(problem, default)
    ways = {direction: {OURS: calls["fresh"]} for direction, calls in made.items()}
    if case.suite in ("shapes", "n"):
        for direction, calls in made.items():
            ways[direction][OURS_OUT] = calls["out="]
    if case.suite == "call":
        x, gamma, beta, *_ = problem
        ways["forward"][CALL] = lambda: layer_norm(x, gamma, beta)
    if case.suite == "shapes" and case.dtype == "float32":
        for backend in set(usable_backends()) - {default}:
            for direction, calls in make_candidates(problem, backend).items():
                ways[direction][f"backend {backend}"] = calls["fresh"]
    return ways


def _measure(
    case: Case,
    direction: str,
    candidates: dict[str, Callable[[], Any]],
    effort: Effort,
    machine: float,
) -> list[Record]:
    timings = measure_interleaved(candidates, **effort._asdict())
    records = [
        Record(*case, direction, name, timing.median, timing.low, timing.high, 0.0)
        for name, timing in timings.items()
    ]
    # Beside a copy of the same arrays in the same rounds, where there is one; the machine's else.
    copy = next((r.speed for r in records if r.candidate == COPY), machine)
    return [record._replace(copy=copy) for record in records]
