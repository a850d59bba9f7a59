"""The cases that are timed, and how one of them is measured."""

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

# Ours: as called, and with results written into arrays given.
OURS_OUT, CALL = "out=", "layer_norm"
COPY, TORCH_CALL = "copy", "PyTorch F.layer_norm"
# Up to 8 MiB, x, y, dy and dx fit into the last-level cache of 32 MiB, and malloc keeps pages that
# are freed: it returns blocks beyond 32 MiB to the system at once, and never smaller ones once some
# were used.
IN_CACHE = ((1, 1, 64), (1, 1, 4096), (2, 128, 64), (2, 128, 1024), (4, 512, 1024))
BEYOND = ((4, 512, 4096), (32, 512, 768), (16, 512, 1024), (64, 2048, 256))
# The other types have one shape of each kind.
SOME = (*IN_CACHE[::2], IN_CACHE[3], BEYOND[1])
# float32 of this many is 256 MiB.
ELEMENTS = 2**26
# The size on which the machine's copy is measured; an odd n leaves a few elements over.
LARGE = 0.99 * COPY_BYTES
# Powers of two, and the n that broke others' padding (769). Of shorter rows, PyTorch's backward takes minutes.
LENGTHS = (64, 128, 256, 769, 1024, 4096, 16384, 65536)


class Case(NamedTuple):
    """One problem to time."""

    # kept: both sides on an allocator that keeps its pages. n: over the length.
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
        """The size of x."""
        return math.prod(self.shape) * parse(self.dtype).itemsize

    def speed(self, candidate: str) -> float:
        """Return the bytes that must be read and written, per second."""
        return PASSES[self.direction] * self.nbytes / self.times[candidate].median


def make_cases() -> list[Case]:
    """Return all cases."""
    return [
        Case("call", IN_CACHE[0], "float32"),
        *(Case("shapes", shape, "float32") for shape in IN_CACHE + BEYOND),
        *(Case("shapes", shape, dtype) for dtype in DTYPES if dtype != "float32" for shape in SOME),
        *(Case("kept", shape, "float32") for shape in (IN_CACHE[-1], *BEYOND)),
        *(Case("n", (ELEMENTS // n, n), "float32") for n in LENGTHS),
    ]


def measure_case(
    case: Case, peers: Iterable[Peer], threads: int, machine: float
) -> tuple[list[Result], dict[str, float]]:
    """
    Check agreement, then time forward and backward; `machine` copies so many bytes per second.

    Returns the results, and per peer the largest part of its tolerance that a result used; one
    that uses more than all of it does not agree and is not timed.
    """
    problem = make_problem(case.shape, case.dtype)
    ways = _ours(problem, case)
    ours = check_ours(problem)
    used = {}
    for peer in peers:
        if case.dtype not in peer.dtypes or not _wanted(peer.name, case):
            continue
        calls = peer.make(problem, EPS)
        used[peer.name] = check_peer(calls, problem, ours)
        if used[peer.name] <= 1:
            ways["forward"][peer.name] = calls.forward
            if calls.backward:
                ways["backward"][peer.name] = calls.backward
            if case.suite == "call":
                ways["forward"] |= calls.other
    # Held no longer: with large arrays it is the memory of one more candidate.
    ours.clear()
    beside = {}
    if problem.x.nbytes >= LARGE:
        beside[COPY] = make_copy(problem.x, problem.y, threads)
    results = []
    for direction, candidates in ways.items():
        # Small cases: enough rounds for a median that a neighbour's noise does not move. All cases
        # together take less than ten minutes.
        found = measure_interleaved(candidates | beside, rounds=51, least=5, limit=2)
        # Four digits are more than a timing has.
        times = {name: Timing(*(float(f"{v:.4g}") for v in t)) for name, t in found.items()}
        # The speed of a copy of the same arrays in the same rounds, where there is one.
        copied = times.pop(COPY, None)
        copy = 2 * problem.x.nbytes / copied.median if copied else machine
        results.append(Result(*case, direction, float(f"{copy:.4g}"), times))
    return results, used


def _wanted(peer: str, case: Case) -> bool:
    """Say whether the page compares with this peer there."""
    return peer == "PyTorch" or (case.suite == "shapes" and case.dtype == "float32")


def _ours(problem: Problem, case: Case) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return, per direction, the calls of ours that the page shows."""
    default = choose(None)
    kinds = {"shapes": {OURS: "fresh", OURS_OUT: "out="}, "n": {OURS_OUT: "out="}}
    shown = kinds.get(case.suite, {OURS: "fresh"})
    ways = {
        direction: {name: calls[kind] for name, kind in shown.items()}
        for direction, calls in make_candidates(problem, default).items()
    }
    if case.suite == "call":
        x, gamma, beta, *_ = problem
        ways["forward"][CALL] = lambda: layer_norm(x, gamma, beta)
    if case.suite == "shapes" and case.dtype == "float32":
        for backend in set(usable_backends()) - {default}:
            for direction, calls in make_candidates(problem, backend).items():
                ways[direction][f"backend {backend}"] = calls["fresh"]
    return ways
