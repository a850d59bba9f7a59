"""docs/evidence/performance.md and the block of README: every figure, and how it was obtained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cases import (
    BEYOND,
    CALL,
    IN_CACHE,
    OURS,
    OURS_OFF,
    OURS_OUT,
    TORCH_CALL,
    Record,
)
from gates import check_gates, ratios
from page import byte_words, digits, origin_line, seconds, table

from stablenorm.cli.bench import PASSES
from stablenorm.cli.parts import DTYPES

# What README compares with, and the shapes it has a row for.
RIVALS = ("PyTorch", "plain NumPy")
README_SHAPES = (*IN_CACHE[:1], *IN_CACHE[2:], BEYOND[1], BEYOND[3])
# Why a target is not met, by its first words after the direction; shown where it is not.
WHY = {
    "PyTorch's time over ours": "in cache both are bound by arithmetic; ours is in float64, theirs "
    "in float32.",
    "the same, both on": "with its pages kept, PyTorch too is bound by memory; ours does "
    "more arithmetic per element, in float64.",
    "no shape slower": "where x stays in the caches the arithmetic decides: ours is in float64, "
    "with compensated sums over rows; PyTorch's is in float32.",
    "plain NumPy's time": "at 1 MiB plain NumPy does not wait for memory either.",
    "`out=` on 256 MiB": "rows of 64 to 256 elements pay for what a row costs besides its elements: "
    "three sums over lanes, a division and a root; longer ones, where the processor is slow against "
    "its memory, for arithmetic in float64.",
    "slowest over fastest": "the same.",
    "halving n": "the same; and with one or two elements nothing else is left.",
    "float64 `out=`": "float64 is computed in double-double, 60 to 90 operations per element.",
    "elements per second of float16": "half the bytes, but the same arithmetic and dearer "
    "conversions.",
    "elements per second of bfloat16": "half the bytes, but the same arithmetic and dearer "
    "conversions.",
}
WAYS = "forward", "backward"


def page(run: dict[str, Any], records: Sequence[Record]) -> str:
    """Write the whole page; `run` says of the run what is not in its records."""
    shapes = [r for r in records if r.suite == "shapes"]
    wide = [r for r in shapes if r.dtype == "float32"]
    parts = [
        "# Performance",
        origin_line(run["command"], run) + _circumstances(run),
        HOW.format(threads=run["threads"], command=run["command"]) + _agreement(run),
        "## Targets",
        "float32 unless another type is named; ratios of medians within this run.",
        gate_table(records),
        "## One call on (1, 1, 64)",
        _call_table(records),
        "## float32, in cache",
        IN_CACHE_TEXT,
        *_shape_tables([r for r in wide if r.shape in IN_CACHE]),
        "## float32, beyond",
        _beyond_text([r for r in wide if r.shape in BEYOND]),
        *_shape_tables([r for r in wide if r.shape in BEYOND]),
        "## Both on an allocator that keeps its pages",
        *_kept(run, records),
    ]
    for dtype in DTYPES[1:]:
        here = [r for r in shapes if r.dtype == dtype]
        parts += [f"## {dtype}", *_shape_tables(here)] if here else []
    parts += [
        "## All dtypes, beside one another",
        "`out=`, one shape, interleaved.",
        _dtype_table([r for r in records if r.suite == "dtypes"]),
        "## Over n, at 256 MiB",
        "![throughput over n](../figures/throughput_n.png)",
        _sweep([r for r in records if r.suite == "n"], "n", -1),
        "## Over size, at n = 1024",
        "![throughput over size](../figures/throughput_size.png)",
        _sweep([r for r in records if r.suite == "rows"], "rows", 0),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


HOW = """How to read it:

- A time is the median over rounds, in two digits, with the quartiles in brackets. In a round every
  candidate runs once, in an order that rotates, after a pause and after 10 ms of calls that are not
  counted; a sample lasts 0.3 ms or one call, whichever is longer (`stablenorm.timing`).
- "1.6x faster" means that theirs takes 1.6 times as long as ours; **"1.2x slower"**, in bold, that ours
  takes 1.2 times as long as theirs; "level", that the intervals between the quartiles overlap.
- stablenorm: `layer_norm_forward(x, gamma, beta)`, which keeps what the backward needs, and
  `layer_norm_backward(dy, cache)`, all three gradients, with {threads} threads. Results of 1 MiB or
  more come from recycled memory ([Reusing memory](../how-to/workspace.md)). "recycling off": the same with
  `set_idle_limit(0)`. "out=": results are written into arrays that exist.
- "of copy": what must be read and written (forward x and y; backward dy, x and dx) over the time,
  as a part of what a plain copy moves with as many threads: of the same arrays in the same rounds
  where x is 256 MiB, of 256 MiB otherwise. Arrays in cache may exceed 1.
- PyTorch: `torch.native_layer_norm`, which returns the statistics too, and ATen's
  `native_layer_norm_backward`, {threads} threads. JAX: the usual formula and its vjp, both jitted. ONNX Runtime:
  the operator LayerNormalization, which has no backward. plain NumPy: `stablenorm.testing.plain`, on one
  thread. NumPy backend: ours without Numba.
"""

KEPT = """jemalloc preloaded, as PyTorch's tuning guide recommends, with `dirty_decay_ms:-1` and
`muzzy_decay_ms:-1`, so that it never returns a page; our recycling is off. Both sides then use the
same allocator."""

IN_CACHE_TEXT = """x of up to 8 MiB: x, y, dy and dx fit into the 32 MiB of the last-level cache, and malloc keeps
the pages that are freed, for everybody."""


def gate_table(records: Sequence[Record]) -> str:
    """One line a target, forward beside backward; below, why those not met are not."""
    lines, reasons = [], []
    found = {gate.target: gate for gate in check_gates(records)}
    for target in dict.fromkeys(name.partition(": ")[2] for name in found):
        both = [found.get(f"{way}: {target}") for way in WAYS]
        missed = [way for way, gate in zip(WAYS, both, strict=True) if gate and gate.met is False]
        known = any(gate and gate.met is not None for gate in both)
        met = f"**no: {' and '.join(missed)}**" if missed else "yes" if known else "not measured"
        lines.append([target, *(gate.figure if gate else "" for gate in both), met])
        why = next((why for start, why in WHY.items() if target.startswith(start)), "")
        if missed and why and why not in reasons:
            reasons.append(f"- {target.partition(':')[0]}: {why}")
    text = table(("target", *WAYS, "met?"), lines)
    return "\n\n".join([text, "Why not:", "\n".join(reasons)]) if reasons else text


def compared(peer: Record, ours: Record) -> str:
    """Say who is faster, and how much; level where the quartiles overlap."""
    if peer.low <= ours.high and ours.low <= peer.high:
        return "level"
    if peer.seconds > ours.seconds:
        return f"{_times(peer.seconds / ours.seconds)}x faster"
    return f"**{_times(ours.seconds / peer.seconds)}x slower**"


def _times(ratio: float) -> str:
    # 1.04 in two digits would be "1.0x", which says nothing.
    return digits(ratio, 3 if ratio < 1.1 else 2)


def _spread(record: Record) -> str:
    text, unit = seconds(record.seconds).split()
    size = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    return f"{text} {unit} ({digits(record.low / size)} to {digits(record.high / size)})"


def _shape_tables(records: Sequence[Record]) -> list[str]:
    """Forward and backward: one line a shape."""
    parts = []
    for way in WAYS:
        here = [r for r in records if r.direction == way]
        names = {r.candidate for r in here}
        # Small results are not recycled: there is nothing to switch off.
        off = OURS_OFF in names and any(r.nbytes >= 2**20 for r in here)
        others = [n for n in dict.fromkeys(r.candidate for r in here) if not _is_ours(n)]
        head = [
            "x",
            "size",
            "stablenorm",
            *(["recycling off"] if off else []),
            "out=",
            "of copy, out=",
        ]
        lines = []
        for shape in dict.fromkeys(r.shape for r in here):
            at = {r.candidate: r for r in here if r.shape == shape}
            ours, out = at[OURS], at[OURS_OUT]
            lines.append(
                [
                    _words(shape), byte_words(ours.nbytes), _spread(ours),
                    *([_off(at)] if off else []),
                    seconds(out.seconds), f"{out.speed / out.copy:.2g}",
                    *(compared(at[o], ours) if o in at else "-" for o in others),
                ]
            )  # fmt: skip
        named = [o.partition(",")[0].replace("backend numpy", "NumPy backend") for o in others]
        parts += [f"{way.capitalize()}:", table([*head, *named], lines)]
    return parts


def _off(at: dict[str, Record]) -> str:
    if at[OURS].nbytes < 2**20:
        return "-"
    return seconds(at[OURS_OFF].seconds)


def _is_ours(name: str) -> bool:
    return name in (OURS, OURS_OFF, OURS_OUT) or name.startswith("copy")


def _beyond_text(records: Sequence[Record]) -> str:
    # One shape, to name the faults of.
    at = {
        r.candidate: r
        for r in records
        if (r.shape, r.direction) == (BEYOND[1], "forward") and r.faults >= 0
    }
    text = (
        "Most of the gap to PyTorch and NumPy here is memory management: malloc returns blocks "
        "beyond 32 MiB to the system, which clears new pages in the next call"
    )
    if {OURS, OURS_OFF, "PyTorch"} <= set(at):
        text += (
            f" (page faults per forward of {_words(BEYOND[1])}: PyTorch {at['PyTorch'].faults}, ours "
            f"{at[OURS].faults}, with recycling off {at[OURS_OFF].faults})"
        )
    return (
        f"{text}; ours recycles results, ONNX Runtime keeps an arena. The arithmetic alone is "
        "compared [below](#both-on-an-allocator-that-keeps-its-pages)."
    )


def _kept(run: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """The two comparisons in which nobody waits for new pages."""
    if run["kept"]:
        return [f"Not run: {run['kept']}."]
    parts = [KEPT]
    here = [r for r in records if r.suite == "kept"]
    lines = []
    for shape in dict.fromkeys(r.shape for r in here):
        cells = [_words(shape)]
        for way in WAYS:
            at = {r.candidate: r for r in here if (r.shape, r.direction) == (shape, way)}
            cells += [_spread(at[OURS]), _spread(at["PyTorch"]), compared(at["PyTorch"], at[OURS])]
        lines.append(cells)
    head = [f"{way}, {what}" for way in WAYS for what in ("stablenorm", "PyTorch", "")]
    parts.append(table(["x", *(h.removesuffix(", ") for h in head)], lines))
    lines = []
    per_thread, usual = (
        {
            (r.shape, r.direction, r.candidate): r
            for r in records
            if (r.suite, r.dtype) == (suite, "float32")
        }
        for suite in ("alone", "shapes")
    )
    for shape in dict.fromkeys(key[0] for key in per_thread):
        cells = [_words(shape)]
        for way in WAYS:
            for found in (usual, per_thread):
                pair = [found.get((shape, way, name)) for name in ("plain NumPy", OURS)]
                cells.append(compared(pair[0], pair[1]) if pair[0] and pair[1] else "-")
        lines.append(cells)
    parts += [
        "Plain NumPy runs on one thread, ours on two. One thread each, on the same allocator:",
        table(["x", *(f"{way}, {what}" for way in WAYS for what in ("as called", "one thread each"))], lines),
    ]  # fmt: skip
    return parts


def _call_table(records: Sequence[Record]) -> str:
    found = {(r.candidate, r.direction): r for r in records if r.suite == "call"}
    words = {
        CALL: "`layer_norm`",
        OURS: "`layer_norm_forward`, `layer_norm_backward`",
        TORCH_CALL: "PyTorch, `torch.nn.functional.layer_norm`",
        "PyTorch": "PyTorch, `torch.native_layer_norm`, ATen's backward",
    }
    lines = [
        (text, *(_spread(found[name, way]) if (name, way) in found else "" for way in WAYS))
        for name, text in words.items()
    ]
    return table(("", "forward", "backward"), lines)


def _dtype_table(records: Sequence[Record]) -> str:
    lines = [
        (r.dtype, r.direction, _spread(r), digits(_elements(r)),
         f"{r.speed / r.copy:.2g}")
        for r in records
        if r.candidate == OURS_OUT
    ]  # fmt: skip
    return table(("dtype", "direction", "time", "10^9 elements per second", "of copy"), lines)


def _elements(record: Record) -> float:
    """10^9 elements per second."""
    size = 1
    for length in record.shape:
        size *= length
    return size / record.seconds / 1e9


def _sweep(records: Sequence[Record], head: str, axis: int) -> str:
    """One line a length, GB/s: out= beside the copy of that row and direction, and PyTorch."""
    columns = [(way, name) for way in WAYS for name in (OURS_OUT, "copy", "PyTorch")]
    lines = []
    for shape in sorted({r.shape for r in records}, key=lambda s: s[axis]):
        at = {(r.direction, r.candidate): r for r in records if r.shape == shape}
        speeds = {key: record.speed for key, record in at.items()}
        speeds |= {(way, "copy"): at[way, OURS_OUT].copy for way in WAYS}
        cells = [digits(speeds[key] / 1e9) if key in speeds else "-" for key in columns]
        lines.append([shape[axis], *cells])
    return "GB/s:\n\n" + table([head, *(f"{way}, {name}" for way, name in columns)], lines)


def readme_block(run: dict[str, Any], records: Sequence[Record]) -> str:
    """README's table: float32, forward and backward together, the fastest in bold."""
    here = {
        (r.shape, r.candidate, r.direction): r
        for r in records
        if r.suite == "shapes" and r.dtype == "float32"
    }
    lines = []
    for shape in README_SHAPES:
        both = {
            name: [here[shape, name, way] for way in WAYS]
            for name in (OURS, *RIVALS)
            if (shape, name, WAYS[1]) in here
        }
        ends = {
            name: (sum(r.low for r in pair), sum(r.high for r in pair))
            for name, pair in both.items()
        }
        total = {name: sum(r.seconds for r in pair) for name, pair in both.items()}
        best = min(total, key=lambda name: total[name])
        cells = [_words(shape)]
        for name in (OURS, *RIVALS):
            if name not in total:
                cells.append("-")
                continue
            # Level with the fastest: their intervals overlap.
            level = ends[name][0] <= ends[best][1]
            text = _one_unit(total[name], total[OURS])
            cells.append(f"**{text}**" if level else text)
        lines.append(cells)
    versions = run["versions"]
    heads = [f"PyTorch {'.'.join(versions.get('PyTorch', '').split('.')[:2])}".strip(), RIVALS[1]]
    return (
        table(("x", OURS, *heads), lines)
        + f"\n\n{run['processor']}, {run['threads']} threads, {run['date']}."
    )


def _one_unit(value: float, beside: float) -> str:
    """Two digits, in the unit of the row."""
    unit, size = next(
        (unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if beside >= size
    )
    return f"{digits(value / size)} {unit}"


def _words(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _circumstances(run: dict[str, Any]) -> str:
    missing = "; ".join(f"{name} ({why})" for name, why in run["missing"].items())
    text = f" Not measured, since they could not be imported: {missing}." if missing else ""
    # Where others work on the machine, a run without precedence times them as well.
    if run["real_time"]:
        text += " Run with real-time priority (`chrt -r 10`): others worked on the machine."
    return text


def _agreement(run: dict[str, Any]) -> str:
    used = "; ".join(f"{peer} {worst:.2g}" for peer, worst in run["agreement"].items())
    refused = "; ".join(run["refused"])
    last = f"Not timed, since they did not agree: {refused}." if refused else "All agreed."
    return (
        "- Before a case is timed, y and dx of ours must be within an ulp of the NumPy reference (float64 "
        "and sums: 2 ulp; elements that cancel: the contract), and a peer must be within 16 roundings of "
        "its dtype, relative to the magnitudes "
        f"that enter (`benchmarks/agreement.py`). Largest part of that tolerance used: {used}. {last}"
    )


def summary(records: Sequence[Record]) -> str:
    """What is printed at the end: the targets, and PyTorch beside ours."""
    lines = [gate_table(records)]
    for way in WAYS:
        here = [r for r in records if r.direction == way]
        for suite in ("shapes", "kept"):
            found = ratios(here, suite, "PyTorch")
            lines += [f"{way} {suite} {_words(s)}: {ratio:.2f}" for s, ratio in found.items()]
    return "\n".join(lines)


assert tuple(PASSES) == WAYS
