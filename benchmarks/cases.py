"""The cases to time, and the measurement of one case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from agreement import check_ours, check_peer
from peers import EPS, OURS, Peer

from stablenorm import layer_norm
from stablenorm.backends import choose
from stablenorm.formats import DTYPES, parse
from stablenorm.timing import (
    COPY_BYTES,
    PASSES,
    Problem,
    Timing,
    make_candidates,
    make_copy,
    make_problem,
    measure_interleaved,
    usable_backends,
)

# Names of candidates: ours with existing arrays for the results, and ours without a cache.
OURS_OUT, CALL = "out=", "layer_norm"
COPY, TORCH_CALL = "copy", "PyTorch F.layer_norm"
# With x up to 8 MiB, x, y, dy and dx fit into the last-level cache of 32 MiB, and malloc keeps freed
# pages. It returns blocks beyond 32 MiB to the system at once, smaller ones never once some were used.
IN_CACHE = ((1, 1, 64), (1, 1, 4096), (2, 128, 64), (2, 128, 1024), (4, 512, 1024))
BEYOND = ((4, 512, 4096), (32, 512, 768), (16, 512, 1024), (64, 2048, 256))
# Shapes for the dtypes other than float32, one of each kind.
OTHER_SHAPES = (*IN_CACHE[::2], IN_CACHE[3], BEYOND[1])
# 256 MiB of float32.
ELEMENTS = 2**26
# Bytes from which the arrays themselves are copied for comparison; an odd n leaves a few elements over.
LARGE = 0.99 * COPY_BYTES
# Powers of two, and the n that broke the padding of others (769). PyTorch's backward takes minutes for shorter rows.
LENGTHS = (64, 128, 256, 769, 1024, 4096, 16384, 65536)


class Case(NamedTuple):
    """One problem to time."""

    # "call", "shapes", "kept" (an allocator that keeps its pages, for ours and the peer) or "n" (many lengths).
    suite: str
    shape: tuple[int, ...]
    dtype: str


class Result(NamedTuple):
    """One case in one direction: the bytes per second of a copy, and the times of each candidate."""

    suite: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    copy: float
    times: dict[str, Timing]

    @property
    def nbytes(self) -> int:
        """Return the size of x."""
        return math.prod(self.shape) * parse(self.dtype).itemsize

    def speed(self, candidate: str) -> float:
        """Return the bytes that must be read and written, per second."""
        return PASSES[self.direction] * self.nbytes / self.times[candidate].median


def make_cases() -> list[Case]:
    """Return all cases."""
    return [
        Case("call", IN_CACHE[0], "float32"),
        *(Case("shapes", shape, "float32") for shape in IN_CACHE + BEYOND),
        *(Case("shapes", s, dtype) for dtype in DTYPES if dtype != "float32" for s in OTHER_SHAPES),
        *(Case("kept", shape, "float32") for shape in (IN_CACHE[-1], *BEYOND)),
        *(Case("n", (ELEMENTS // n, n), "float32") for n in LENGTHS),
    ]


def measure_case(
    case: Case, peers: Iterable[Peer], threads: int, machine: float
) -> tuple[list[Result], dict[str, float]]:
    """
    Check agreement, then time forward and backward; `machine` is the bytes per second of a copy.

    Returns the results, and by peer the largest part of the tolerance that its results use. A peer
    that uses more than 1 does not agree and is not timed.
    """
    problem = make_problem(case.shape, case.dtype)
    calls_by_direction = _ours(problem, case)
    ours = check_ours(problem)
    used = {}
    for peer in peers:
        if case.dtype not in peer.dtypes or not _wanted(peer.name, case):
            continue
        calls = peer.make(problem, EPS)
        used[peer.name] = check_peer(calls, problem, ours)
        if used[peer.name] <= 1:
            calls_by_direction["forward"][peer.name] = calls.forward
            if calls.backward:
                calls_by_direction["backward"][peer.name] = calls.backward
            if case.suite == "call":
                calls_by_direction["forward"] |= calls.other
    # Free our results: with large arrays they take the memory of one more candidate.
    ours.clear()
    copies = {COPY: make_copy(problem.x, problem.y, threads)} if problem.x.nbytes >= LARGE else {}
    results = []
    for direction, candidates in calls_by_direction.items():
        # 51 rounds give small cases a median that a neighbour's noise does not move. All cases
        # together take less than ten minutes.
        timings = measure_interleaved(candidates | copies, rounds=51, least=5, limit=2)
        # Four digits are more than a timing has.
        times = {name: Timing(*(float(f"{v:.4g}") for v in t)) for name, t in timings.items()}
        # A copy of the same arrays in the same rounds goes before the machine's.
        copied = times.pop(COPY, None)
        copy = 2 * problem.x.nbytes / copied.median if copied else machine
        results.append(Result(*case, direction, float(f"{copy:.4g}"), times))
    return results, used


def _wanted(peer: str, case: Case) -> bool:
    """Tell whether the page compares a case with this peer."""
    return peer == "PyTorch" or (case.suite == "shapes" and case.dtype == "float32")


def _ours(problem: Problem, case: Case) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return by direction our calls that the page shows."""
    default = choose(None)
    kinds = {"shapes": {OURS: "fresh", OURS_OUT: "out="}, "n": {OURS_OUT: "out="}}
    shown = kinds.get(case.suite, {OURS: "fresh"})
    ours = {
        direction: {name: calls[kind] for name, kind in shown.items()}
        for direction, calls in make_candidates(problem, default).items()
    }
    if case.suite == "call":
        x, gamma, beta, *_ = problem
        ours["forward"][CALL] = lambda: layer_norm(x, gamma, beta)
    if case.suite == "shapes" and case.dtype == "float32":
        for backend in set(usable_backends()) - {default}:
            for direction, calls in make_candidates(problem, backend).items():
                ours[direction][f"backend {backend}"] = calls["fresh"]
    return ours
