"""What the figures must reach, and whether they do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cases import CALL, LARGE, OURS, OURS_OUT, SHAPES, Record

from stablenorm._bench import PASSES, type_of

TORCH, PLAIN, TORCH_CALL = "PyTorch", "plain NumPy", "PyTorch F.layer_norm"


class Gate(NamedTuple):
    """One requirement; `met` is None where this run did not measure it."""

    requirement: str
    figure: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """The one word (or two) of it."""
        return "not measured" if self.met is None else "met" if self.met else "NOT MET"


def check_gates(records: Sequence[Record]) -> list[Gate]:
    """Evaluate every gate, forward and backward, on what was measured."""
    gates = []
    for direction in PASSES:
        here = [record for record in records if record.direction == direction]
        gates += [
            gate._replace(requirement=f"{direction}: {gate.requirement}")
            for check in (_torch, _plain, _copy, _linear, _cliff, _narrow, _wide)
            for gate in check(here)
        ]
    return gates + _overhead(records)


def ratios(records: Iterable[Record], peer: str, ours: str = OURS) -> dict[tuple[int, ...], float]:
    """Time of `peer` over ours, per shape: above 1 ours is faster."""
    times: dict[str, dict[tuple[int, ...], float]] = {peer: {}, ours: {}}
    for record in records:
        if record.candidate in times:
            times[record.candidate][record.shape] = record.seconds
    return {
        shape: seconds / times[ours][shape]
        for shape, seconds in times[peer].items()
        if shape in times[ours]
    }


def _torch(records: list[Record]) -> list[Gate]:
    found = ratios(_select(records, "shapes"), TORCH)
    mean, least = (
        "geometric mean of PyTorch's time over ours, nine shapes: >= 2.0",
        ("no shape slower than PyTorch: least ratio >= 1.0"),
    )
    if set(found) != set(SHAPES):
        return [_unknown(mean), _unknown(least)]
    shape = min(found, key=lambda key: found[key])
    return [
        _at_least(mean, statistics.geometric_mean(found.values()), 2.0),
        _at_least(least, found[shape], 1.0, f" at {_words(shape)}"),
    ]


def _plain(records: list[Record]) -> list[Gate]:
    found = ratios(_select(records, "shapes"), PLAIN)
    text = "plain NumPy two-pass over ours, geometric mean of nine shapes: >= 10"
    if set(found) != set(SHAPES):
        return [_unknown(text)]
    low = min(found, key=lambda key: found[key])
    mean = statistics.geometric_mean(found.values())
    return [_at_least(text, mean, 10, f"; least {found[low]:.2f} at {_words(low)}")]


def _copy(records: list[Record]) -> list[Gate]:
    """n below 64 is left to its own gate: 24 bytes of statistics a row are then no trifle."""
    found = {
        record: record.speed / record.copy
        for record in records
        if record.candidate == OURS_OUT
        and record.dtype == "float32"
        and _nbytes(record) >= LARGE
        and record.shape[-1] >= 64
    }
    text = "out= on 256 MiB and more: least fraction of the copy >= 0.90"
    if not found:
        return [_unknown(text)]
    worst = min(found, key=lambda key: found[key])
    median = statistics.median(found.values())
    return [_at_least(text, found[worst], 0.9, f" at {_words(worst.shape)}; median {median:.2f}")]


def _linear(records: list[Record]) -> list[Gate]:
    found = _by_length(records, lambda n: 64 <= n <= 16384)
    text = "time per element flat for n from 64 to 16384 at 256 MiB, slowest over fastest: <= 1.25"
    if len(found) < 2:
        return [_unknown(text)]
    slow, fast = (choose(found, key=lambda n: found[n]) for choose in (max, min))
    ratio = found[slow] / found[fast]
    return [Gate(text, f"{ratio:.2f} (n = {slow} over n = {fast})", ratio <= 1.25)]


def _cliff(records: list[Record]) -> list[Gate]:
    """Halving n doubles the rows: a constant cost a row doubles the time; more is a cliff."""
    found = _by_length(records, lambda n: n <= 64 and n & (n - 1) == 0)
    text = "no cliff for n from 32 to 1: halving n at most doubles the time per element: <= 2"
    steps = {n: found[n] / found[2 * n] for n in found if 2 * n in found}
    if not steps:
        return [_unknown(text)]
    worst = max(steps, key=lambda n: steps[n])
    return [Gate(text, f"{steps[worst]:.2f} (n = {worst} over {2 * worst})", steps[worst] <= 2)]


def _narrow(records: list[Record]) -> list[Gate]:
    times = {
        r.dtype: r.seconds
        for r in _select(records, "dtypes")
        # float64 of as many elements is twice as large: large for all means large for float32.
        if r.candidate == OURS_OUT and math.prod(r.shape) * 4 >= LARGE
    }
    gates = []
    for dtype in ("float16", "bfloat16"):
        text = f"{dtype}, elements a second over those of float32, beyond the caches: >= 1"
        known = dtype in times and "float32" in times
        gates.append(
            _at_least(text, times["float32"] / times[dtype], 1) if known else _unknown(text)
        )
    return gates


def _wide(records: list[Record]) -> list[Gate]:
    text = "float64 out=, fraction of the copy: >= 0.5"
    for record in _select(records, "dtypes"):
        if (record.dtype, record.candidate) == ("float64", OURS_OUT) and _nbytes(record) >= LARGE:
            return [_at_least(text, record.speed / record.copy, 0.5)]
    return [_unknown(text)]


def _overhead(records: Sequence[Record]) -> list[Gate]:
    gates = []
    for direction, ours, theirs, name in (
        ("forward", CALL, TORCH_CALL, "layer_norm, F.layer_norm"),
        ("forward", OURS, TORCH_CALL, "layer_norm_forward, F.layer_norm"),
        ("backward", OURS, TORCH, "layer_norm_backward, ATen's native_layer_norm_backward"),
    ):
        text = f"{direction}: a call on (1, 1, 64), {name}: theirs over ours >= 1"
        here = [r for r in _select(records, "call") if r.direction == direction]
        found = list(ratios(here, theirs, ours).values())
        if not found:
            gates.append(_unknown(text))
            continue
        times = {r.candidate: 1e6 * r.seconds for r in here}
        both = f" ({times[ours]:.2f} us, theirs {times[theirs]:.2f} us)"
        gates.append(_at_least(text, found[0], 1, both))
    return gates


def _by_length(records: list[Record], wanted: Callable[[int], bool]) -> dict[int, float]:
    """Seconds per element of `out=` in the sweep of n."""
    return {
        r.shape[-1]: r.seconds / math.prod(r.shape)
        for r in _select(records, "n")
        if r.candidate == OURS_OUT and wanted(r.shape[-1]) and _nbytes(r) >= LARGE
    }


def _select(records: Iterable[Record], suite: str) -> list[Record]:
    """Records of a suite; of float32 alone where the suite has a table for each dtype."""
    return [
        record
        for record in records
        if record.suite == suite and (suite == "dtypes" or record.dtype == "float32")
    ]


def _at_least(text: str, figure: float, bound: float, more: str = "") -> Gate:
    return Gate(text, f"{figure:.2f}{more}", figure >= bound)


def _unknown(text: str) -> Gate:
    return Gate(text, "-", None)


def _nbytes(record: Record) -> int:
    return math.prod(record.shape) * type_of(record.dtype).itemsize


def _words(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
