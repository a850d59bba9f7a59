"""What the figures of `make gpu` must reach, and whether they do. Knows nothing of a GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_cases import BENCH_SHAPES, PASSES, count_bytes

OURS, OURS_GRAPH = "stablenorm", "stablenorm, graph"
# Chunks and their sum launched one after the other: what the single launch saves, or costs.
OURS_TWICE = "stablenorm, two launches"

# Of the measured two-reads-one-write ceiling. The large ones have their tail and their ramp behind
# them; at 65536 a row is read twice from the second-level cache; the last two are 300 and 50 MB.
_LARGE_BYTES = 200_000_000
_FRACTIONS = {"large": 0.85, "longest": 0.75, "short rows": 0.60, "small": 0.60}


class Record(NamedTuple):
    """One candidate on one case: median, p20 and p80 of its calls, in seconds."""

    shape: tuple[int, int]
    dtype: str
    direction: str
    candidate: str
    seconds: float
    low: float
    high: float


class Gate(NamedTuple):
    """One requirement; `met` is None where this run did not measure it."""

    requirement: str
    figure: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The one word (or two) of it."""
        return "not measured" if self.met is None else "met" if self.met else "NOT MET"


def summarize(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return median, p20 and p80."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), cuts[0], cuts[3]


def fraction(record: Record, triad: float) -> float:
    """Bytes a second that a record must have moved, over those of the triad."""
    return count_bytes(record.shape, record.dtype, record.direction) / record.seconds / triad


def check_gates(records: Iterable[Record], triad: float | None) -> list[Gate]:
    """Evaluate every gate on what was measured."""
    records = list(records)
    return [
        *_ceilings([r for r in records if r.direction == "backward"], triad),
        *(_odd(records, direction) for direction in PASSES),
        *(gate for direction in PASSES for gate in _peers(records, direction)),
    ]


def _kind(record: Record) -> str | None:
    rows, n = record.shape
    if (rows, n) == (65_536, 768):
        return "short rows"
    if (rows, n) == (8192, 1024):
        return "small"
    if n == 65_536 and rows > 1:
        return "longest"
    large = count_bytes(record.shape, record.dtype, "backward") >= _LARGE_BYTES
    return "large" if large and 1024 <= n <= 8192 else None


def _ceilings(records: list[Record], triad: float | None) -> list[Gate]:
    words = {
        "large": "n from 1024 to 8192 at 200 MB and more",
        "longest": "n = 65536",
        "short rows": "(65536, 768)",
        "small": "(8192, 1024), cold",
    }
    gates = []
    for kind, least in _FRACTIONS.items():
        text = f"backward, {words[kind]}: least fraction of the 2R1W ceiling >= {least:.2f}"
        here = [r for r in records if r.candidate == OURS and _kind(r) == kind]
        if triad is None or not here:
            gates.append(Gate(text, "-", None))
            continue
        worst = min(here, key=lambda r: fraction(r, triad))
        figure = fraction(worst, triad)
        gates.append(Gate(text, f"{figure:.2f} at {worst.shape} {worst.dtype}", figure >= least))
    return gates


def _odd(records: list[Record], direction: str) -> Gate:
    text = f"{direction}, odd n: least ratio of the best peer's time to ours >= 1"
    found = {
        key: min(others.values()) / ours
        for key, (ours, others) in _pairs(records, direction).items()
        if key[0][1] % 2 and others
    }
    if not found:
        return Gate(text, "-", None)
    worst = min(found, key=lambda key: found[key])
    return Gate(text, f"{found[worst]:.2f} at {worst[0]} {worst[1]}", found[worst] >= 1)


def _peers(records: list[Record], direction: str) -> list[Gate]:
    pairs = _pairs(records, direction)
    names = {name for _, others in pairs.values() for name in others}
    gates = []
    for name in sorted(names):
        found = [others[name] / ours for ours, others in pairs.values() if name in others]
        mean = statistics.geometric_mean(found)
        text = f"{direction}: geometric mean of {name}'s time over ours > 1"
        gates.append(Gate(text, f"{mean:.2f}, {len(found)} cases", mean > 1))
    return gates or [Gate(f"{direction}: faster than every peer in the geometric mean", "-", None)]


def _pairs(
    records: list[Record], direction: str
) -> Mapping[tuple[Any, ...], tuple[float, dict[str, float]]]:
    """Per case: our time and those of the peers."""
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in records:
        if r.direction == direction:
            cases.setdefault((r.shape, r.dtype), {})[r.candidate] = r.seconds
    return {
        key: (
            times[OURS],
            {k: v for k, v in times.items() if not k.startswith(("stablenorm", "copy"))},
        )
        for key, times in cases.items()
        if OURS in times and math.isfinite(times[OURS])
    }


def sorted_shapes(records: Iterable[Record]) -> list[tuple[int, int]]:
    """The shapes of `records`, in the order of the table."""
    here = {record.shape for record in records}
    return [shape for shape in BENCH_SHAPES if shape in here]
