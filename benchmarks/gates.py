"""What the figures are to reach, and whether they do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cases import CALL, LARGE, LAYER, OURS, OURS_OUT, TORCH_CALL, Record

from stablenorm.cli.bench import PASSES

# By shape; more is better.
Ratios = dict[tuple[int, ...], float]


class Gate(NamedTuple):
    """One target: what is to be `bound` or more, on each shape or as a mean, and why it may not be."""

    text: str
    find: Callable[[list[Record]], Ratios]
    bound: float
    mean: bool = False
    why: str = ""


class Found(NamedTuple):
    """What a direction has of one target; `met` is None where this run did not measure it."""

    figure: str
    met: bool | None


def ratios(records: Iterable[Record], suite: str, peer: str, ours: str = OURS) -> Ratios:
    """Time of `peer` over ours, per shape of float32: above 1 ours is faster."""
    here = [r for r in records if r.suite == suite and r.dtype == "float32"]
    times = {r.shape: r.seconds for r in here if r.candidate == ours}
    return {r.shape: r.seconds / times[r.shape] for r in here if r.candidate == peer}


def _single(records: list[Record]) -> Ratios:
    """With one row a call is all overhead, and PyTorch's users call F.layer_norm."""
    found, called = ratios(records, "shapes", "PyTorch"), ratios(records, "call", TORCH_CALL)
    return found | {shape: called[shape] for shape in called if shape in found}


def _called(records: list[Record]) -> Ratios:
    forward = ratios(records, "call", TORCH_CALL, CALL)
    return forward or ratios(records, "call", "PyTorch")


def _copied(records: list[Record], lengths: Callable[[int], bool]) -> Ratios:
    here = [r for r in records if (r.suite, r.candidate) == ("n", OURS_OUT)]
    return {r.shape: r.speed / r.copy for r in here if lengths(r.shape[-1]) and r.nbytes >= LARGE}


GATES = (
    Gate(
        "PyTorch's time over ours, nine shapes, geometric mean",
        lambda records: ratios(records, "shapes", "PyTorch"),
        2.0,
        mean=True,
        why="in cache both are bound by arithmetic; ours is in float64, theirs in float32.",
    ),
    Gate(
        "the same, both on an allocator that keeps its pages, five shapes",
        lambda records: ratios(records, "kept", "PyTorch"),
        1.2,
        mean=True,
        why="with its pages kept, PyTorch too is bound by memory; ours does more arithmetic per "
        "element, in float64.",
    ),
    Gate(
        "PyTorch's time over ours, each shape",
        _single,
        0.95,
        why="one row pays for its way through Python, 5 us and more; other shapes in cache for "
        "arithmetic in float64, where PyTorch's is in float32, and for waking a helper thread.",
    ),
    Gate(
        "plain NumPy's time over ours, one thread each",
        lambda records: ratios(records, "alone", "plain NumPy"),
        5.0,
        why="at 1 MiB plain NumPy does not wait for memory either.",
    ),
    Gate(
        "`out=` on 256 MiB, part of the speed of a copy, n of 128 and more",
        lambda records: _copied(records, lambda n: n >= 128),
        0.95,
        why="where the processor is slow against its memory, arithmetic in float64 is what is waited "
        "for.",
    ),
    Gate(
        "the same, n = 64",
        lambda records: _copied(records, lambda n: n == 64),
        0.85,
        why="short rows pay for a division and a root per row, and for 24 bytes of statistics.",
    ),
    Gate(
        "the same, n of 16 and less: stated, without a target",
        lambda records: _copied(records, lambda n: n <= 16),
        0.0,
    ),
    Gate(
        "a call on (1, 1, 64): `F.layer_norm` over `layer_norm`, ATen's backward over ours", _called, 1.0
    ),
    Gate(
        "RMS norm: the layer norm's time over its, nine shapes, geometric mean",
        lambda records: ratios(records, "rms", LAYER),
        1.0,
        mean=True,
    ),
    Gate(
        "RMS norm: PyTorch's time over ours, nine shapes, geometric mean",
        lambda records: ratios(records, "rms", "PyTorch"),
        2.0,
        mean=True,
    ),
)  # fmt: skip


def check_gates(records: Sequence[Record]) -> dict[str, dict[str, Found]]:
    """Return by target and by direction what was measured."""
    found = {}
    for gate in GATES:
        here = {d: gate.find([r for r in records if r.direction == d]) for d in PASSES}
        found[gate.text] = {d: _judge(gate, values) for d, values in here.items()}
    return found


def _judge(gate: Gate, found: Ratios) -> Found:
    if not found:
        return Found("-", None)
    worst = min(found, key=lambda shape: found[shape])
    value = statistics.geometric_mean(found.values()) if gate.mean else found[worst]
    where = "" if gate.mean or len(found) == 1 else f" at ({', '.join(map(str, worst))})"
    return Found(f"{value:.3g}{where}", value >= gate.bound)
