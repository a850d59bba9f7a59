"""What the figures are to reach, and whether they do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cases import BEYOND, CALL, IN_CACHE, LARGE, OURS, OURS_OUT, TORCH_CALL, Record

from stablenorm.cli.bench import PASSES

# By shape.
Ratios = dict[tuple[int, ...], float]


class Gate(NamedTuple):
    """One target; `met` is None where this run did not measure it."""

    target: str
    figure: str
    met: bool | None


def check_gates(records: Sequence[Record]) -> list[Gate]:
    """Evaluate every target, forward and backward, on what was measured."""
    gates = []
    for direction in PASSES:
        here = [record for record in records if record.direction == direction]
        gates += [
            gate._replace(target=f"{direction}: {gate.target}")
            for check in (_torch, _plain, _copy, _length, _dtypes, _call)
            for gate in check(here)
        ]
    return gates


def ratios(records: Iterable[Record], suite: str, peer: str, ours: str = OURS) -> Ratios:
    """Time of `peer` over ours, per shape of float32: above 1 ours is faster."""
    here = [r for r in records if r.suite == suite and r.dtype == "float32"]
    times = {r.shape: r.seconds for r in here if r.candidate == ours}
    return {r.shape: r.seconds / times[r.shape] for r in here if r.candidate == peer}


def _torch(records: list[Record]) -> list[Gate]:
    found = ratios(records, "shapes", "PyTorch")
    kept = ratios(records, "kept", "PyTorch")
    # With one row a call is all overhead, and PyTorch's users call F.layer_norm.
    called = ratios(records, "call", TORCH_CALL)
    single = found | {shape: called[shape] for shape in called if shape in found}
    return [
        _mean("PyTorch's time over ours, nine shapes: 2 or more", found, 2.0, len(IN_CACHE + BEYOND)),
        _mean(
            "the same, both on an allocator that keeps its pages, five shapes: 1.2 or more",
            kept, 1.2, 1 + len(BEYOND),
        ),
        _least("no shape slower than 1.05 times PyTorch: 0.95 or more", single, 0.95),
    ]  # fmt: skip


def _plain(records: list[Record]) -> list[Gate]:
    found = ratios(records, "alone", "plain NumPy")
    return [_least("plain NumPy's time over ours, one thread each: 5 or more", found, 5.0)]


def _copy(records: list[Record]) -> list[Gate]:
    """n below 64 has a target of its own: 24 bytes of statistics a row are then no trifle."""
    here = _large(records, lambda n: n >= 64)
    found = {r.shape: r.speed / r.copy for r in here}
    return [
        _least("`out=` on 256 MiB, part of the speed of a copy, n from 64: 0.9 or more", found, 0.9)
    ]


def _length(records: list[Record]) -> list[Gate]:
    per_element = {
        r.shape[-1]: r.seconds / math.prod(r.shape) for r in _large(records, lambda _: True)
    }
    flat = {n: t for n, t in per_element.items() if 64 <= n <= 16384}
    # Halving n doubles the rows: a constant cost a row doubles the time; more is a cliff.
    steps = {n: t / per_element[2 * n] for n, t in per_element.items() if 2 * n in per_element}
    short: Ratios = {(n,): ratio for n, ratio in steps.items() if n < 64}
    slowest: Ratios = {(n,): t / min(flat.values()) for n, t in flat.items()}
    return [
        _most("slowest over fastest time per element, n from 64 to 16384: 1.25 or less", slowest, 1.25),
        _most("halving n, from 64 down to 1, slows an element down: 2 times or less", short, 2.0),
    ]  # fmt: skip


def _dtypes(records: list[Record]) -> list[Gate]:
    here = {r.dtype: r for r in records if r.suite == "dtypes" and r.candidate == OURS_OUT}
    # Large enough for float32 means large enough for all.
    if "float32" in here and here["float32"].nbytes < LARGE:
        here = {}
    base = here.get("float32")
    gates = [
        _least(
            f"elements per second of {dtype} over those of float32, 256 MiB: 1 or more",
            {base.shape: base.seconds / here[dtype].seconds} if base else {},
            1.0,
        )
        for dtype in ("float16", "bfloat16")
    ]
    wide = {r.shape: r.speed / r.copy for r in here.values() if r.dtype == "float64"}
    return [*gates, _least("float64 `out=`, part of the speed of a copy: 0.5 or more", wide, 0.5)]


def _call(records: list[Record]) -> list[Gate]:
    ours, theirs = CALL, TORCH_CALL
    names = "`F.layer_norm` over `layer_norm`"
    if all(r.direction == "backward" for r in records) and records:
        ours, theirs, names = OURS, "PyTorch", "ATen's backward over `layer_norm_backward`"
    found = ratios(records, "call", theirs, ours)
    return [_least(f"a call on (1, 1, 64), {names}: 1 or more", found, 1.0)]


def _large(records: Iterable[Record], wanted: Callable[[int], bool]) -> list[Record]:
    """The sweep over n, on `out=`."""
    return [
        r
        for r in records
        if (r.suite, r.candidate) == ("n", OURS_OUT) and wanted(r.shape[-1]) and r.nbytes >= LARGE
    ]


def _mean(text: str, found: Ratios, bound: float, count: int) -> Gate:
    if len(found) != count:
        return Gate(text, "-", None)
    mean = statistics.geometric_mean(found.values())
    return Gate(text, f"{mean:.3g} (geometric mean)", mean >= bound)


def _least(text: str, found: Ratios, bound: float) -> Gate:
    if not found:
        return Gate(text, "-", None)
    worst = min(found, key=lambda shape: found[shape])
    return Gate(text, f"{found[worst]:.3g}{_where(worst, found)}", found[worst] >= bound)


def _most(text: str, found: Ratios, bound: float) -> Gate:
    if not found:
        return Gate(text, "-", None)
    worst = max(found, key=lambda shape: found[shape])
    return Gate(text, f"{found[worst]:.3g}{_where(worst, found)}", found[worst] <= bound)


def _where(worst: tuple[int, ...], found: Ratios) -> str:
    if len(found) == 1:
        return ""
    words = f"n = {worst[0]}" if len(worst) == 1 else f"({', '.join(map(str, worst))})"
    return f" at {words}"
