"""docs/evidence/performance.md and the block of README: every figure, and how it was obtained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cases import BEYOND, CALL, COPY, IN_CACHE, OURS, OURS_OUT, TORCH_CALL, Record
from page import byte_words, digits, origin_line, seconds, table, unit_of

from stablenorm.cli.bench import PASSES

# What README compares with, and the shapes it has a row for.
RIVALS = ("PyTorch", "plain NumPy")
README_SHAPES = (*IN_CACHE[:1], *IN_CACHE[2:], BEYOND[1], BEYOND[3])
# What is no peer.
OWN = (OURS, OURS_OUT, COPY)
# The candidates of one shape, dtype and direction, by name.
At = dict[str, Record]


def page(run: dict[str, Any], records: Sequence[Record]) -> str:
    """Write the whole page; `run` says of the run what is not in its records."""
    shapes = [r for r in records if r.suite == "shapes"]
    wide = [r for r in shapes if r.dtype == "float32"]
    missing = "".join(f" Not measured: {name} ({why})." for name, why in run["missing"].items())
    used = "; ".join(f"{peer} {worst:.2g}" for peer, worst in run["agreement"].items())
    refused = "; ".join(run["refused"])
    agreement = f"Largest part of that tolerance used: {used}. " + (
        f"Not timed, since they did not agree: {refused}." if refused else "All agreed."
    )
    return f"""# Performance

{origin_line("make bench", run)}{missing}

{HOW.format(threads=run["threads"], agreement=agreement)}

## One call on (1, 1, 64)

{_call_table(records)}

## float32, in cache

{IN_CACHE_TEXT}

{_shape_tables([r for r in wide if r.shape in IN_CACHE])}

## float32, beyond

{BEYOND_TEXT}

{_shape_tables([r for r in wide if r.shape in BEYOND])}

## Both on an allocator that keeps its pages

{_kept(run, records)}

## Other types

{_types_table([r for r in shapes if r.dtype != "float32"])}

## Over n, at 256 MiB

{_sweep([r for r in records if r.suite == "n"])}
"""


HOW = """How to read it:

- A time is the median over rounds, in two digits, with the quartiles in brackets. In a round every
  candidate runs once, in an order that rotates. Before each sample there is a pause and 10 ms of calls
  that are not counted. A sample lasts 0.3 ms or one call, whichever is longer (`stablenorm.timing`).
- "1.6x faster": theirs takes 1.6 times as long as ours. **"1.2x slower"**, in bold: ours takes 1.2 times
  as long as theirs. "level": the intervals between the quartiles overlap.
- stablenorm: `layer_norm_forward(x, gamma, beta)`, which keeps what the backward needs, and
  `layer_norm_backward(dy, cache)`, all three gradients, with {threads} threads. Results of 1 MiB or
  more come from recycled memory ([Reusing memory](../how-to/reuse-memory.md)). "out=": results are
  written into arrays that exist.
- "of copy": the bytes that must be read and written (forward x and y; backward dy, x and dx) per
  second, as a part of what a plain copy moves with as many threads. Where x is 256 MiB, the copy is
  of the same arrays in the same rounds; otherwise it is of 256 MiB. Arrays in cache may exceed 1.
- PyTorch: `torch.native_layer_norm`, which returns the statistics too, and ATen's
  `native_layer_norm_backward`, {threads} threads. JAX: the usual formula and its vjp, both jitted. ONNX
  Runtime: the operator LayerNormalization, which has no backward. plain NumPy:
  `stablenorm.testing.plain`, on one thread. NumPy backend: ours without Numba.
- Before a case is timed, its results are compared. y and dx of ours must be within an ulp of the NumPy
  reference (float64 and sums: 2 ulp; elements that cancel: the contract). A peer must be within 16
  roundings of its dtype, relative to the magnitudes that enter (`benchmarks/agreement.py`). {agreement}"""

KEPT = """jemalloc is preloaded, as PyTorch's tuning guide recommends, with `dirty_decay_ms:-1` and
`muzzy_decay_ms:-1`, so that it never returns a page. Our recycling is off. Both sides then use the
same allocator."""

IN_CACHE_TEXT = """x has at most 8 MiB: x, y, dy and dx fit into the 32 MiB of the last-level cache, and malloc keeps
the pages that are freed, for everybody."""

BEYOND_TEXT = """Most of the gap to PyTorch and NumPy here is memory management. malloc returns blocks beyond
32 MiB to the system, and the system clears new pages in the next call. stablenorm recycles results,
ONNX Runtime keeps an arena. The arithmetic alone is compared
[below](#both-on-an-allocator-that-keeps-its-pages)."""


def compared(peer: Record | None, ours: Record | None) -> str:
    """Say who is faster, and how much; level where the quartiles overlap."""
    if peer is None or ours is None:
        return "-"
    if peer.low <= ours.high and ours.low <= peer.high:
        return "level"
    ratio = max(peer.seconds / ours.seconds, ours.seconds / peer.seconds)
    # 1.04 in two digits would be "1.0x", which says nothing.
    times = digits(ratio, 3 if ratio < 1.1 else 2)
    return f"{times}x faster" if peer.seconds > ours.seconds else f"**{times}x slower**"


def _group(records: Iterable[Record], way: str) -> dict[tuple[tuple[int, ...], str], At]:
    """Return the candidates of a direction, by shape and dtype, as they were measured."""
    found: dict[tuple[tuple[int, ...], str], At] = {}
    for r in records:
        if r.direction == way:
            found.setdefault((r.shape, r.dtype), {})[r.candidate] = r
    return found


def _spread(record: Record | None) -> str:
    if record is None:
        return ""
    size, _ = unit_of(record.seconds)
    return (
        f"{seconds(record.seconds)} ({digits(record.low / size)} to {digits(record.high / size)})"
    )


def _of_copy(record: Record) -> str:
    return f"{record.speed / record.copy:.2g}"


def _shape_tables(records: Sequence[Record]) -> str:
    """Forward and backward: one line a shape."""
    parts = []
    for way in PASSES:
        groups = _group(records, way)
        others = dict.fromkeys(name for at in groups.values() for name in at if name not in OWN)
        lines = []
        for (shape, _), at in groups.items():
            ours, out = at[OURS], at[OURS_OUT]
            times = _spread(ours), seconds(out.seconds), _of_copy(out)
            peers = [compared(at.get(name), ours) for name in others]
            lines.append([_words(shape), byte_words(ours.nbytes), *times, *peers])
        named = [o.partition(",")[0].replace("backend numpy", "NumPy backend") for o in others]
        head = ("x", "size", "stablenorm", "out=", "of copy, out=", *named)
        parts += [f"{way.capitalize()}:", table(head, lines)]
    return "\n\n".join(parts)


def _types_table(records: Sequence[Record]) -> str:
    """One line a shape of each dtype but float32."""
    lines = []
    both = [_group(records, way) for way in PASSES]
    for shape, dtype in both[0]:
        cells = []
        for groups in both:
            at = groups[shape, dtype]
            cells += [
                _spread(at[OURS]),
                _of_copy(at[OURS_OUT]),
                compared(at.get("PyTorch"), at[OURS]),
            ]
        lines.append([dtype, _words(shape), *cells])
    head = [
        f"{way}, {what}" for way in PASSES for what in ("stablenorm", "of copy, out=", "PyTorch")
    ]
    return table(("dtype", "x", *head), lines)


def _kept(run: dict[str, Any], records: Sequence[Record]) -> str:
    """The two comparisons in which nobody waits for new pages."""
    if run["kept"]:
        return f"Not run: {run['kept']}."
    by_suite = {
        (suite, way): _group([r for r in records if r.suite == suite and r.dtype == "float32"], way)
        for suite in ("kept", "alone", "shapes")
        for way in PASSES
    }
    kept, alone = [], []
    for key in by_suite["kept", "forward"]:
        cells = [_words(key[0])]
        for way in PASSES:
            theirs, ours = (by_suite["kept", way][key].get(name) for name in ("PyTorch", OURS))
            cells += [_spread(ours), _spread(theirs), compared(theirs, ours)]
        kept.append(cells)
    for key in by_suite["alone", "forward"]:
        pairs = [
            by_suite[suite, way].get(key, {}) for way in PASSES for suite in ("shapes", "alone")
        ]
        alone.append(
            [_words(key[0]), *(compared(at.get("plain NumPy"), at.get(OURS)) for at in pairs)]
        )
    heads = [
        ["x", *(f"{way}, {what}" for way in PASSES for what in whats)]
        for whats in (("stablenorm", "PyTorch", "compared"), ("as called", "one thread each"))
    ]
    between = "Plain NumPy runs on one thread, ours on two. One thread each, on the same allocator:"
    return "\n\n".join([KEPT, table(heads[0], kept), between, table(heads[1], alone)])


def _call_table(records: Sequence[Record]) -> str:
    found = {(r.candidate, r.direction): r for r in records if r.suite == "call"}
    words = {
        CALL: "`layer_norm`",
        OURS: "`layer_norm_forward`, `layer_norm_backward`",
        TORCH_CALL: "PyTorch, `torch.nn.functional.layer_norm`",
        "PyTorch": "PyTorch, `torch.native_layer_norm`, ATen's backward",
    }
    lines = [
        (text, *(_spread(found.get((name, way))) for way in PASSES)) for name, text in words.items()
    ]
    return table(("", *PASSES), lines)


def _sweep(records: Sequence[Record]) -> str:
    """One line a length, GB/s: out= beside the copy of that row and direction, and PyTorch."""
    columns = [(way, name) for way in PASSES for name in (OURS_OUT, "copy", "PyTorch")]
    lines = []
    for shape in sorted({r.shape for r in records}, key=lambda s: s[-1]):
        at = {(r.direction, r.candidate): r for r in records if r.shape == shape}
        speeds = {key: record.speed for key, record in at.items()}
        speeds |= {(way, "copy"): at[way, OURS_OUT].copy for way in PASSES}
        cells = [digits(speeds[key] / 1e9) if key in speeds else "-" for key in columns]
        lines.append([shape[-1], *cells])
    return "GB/s:\n\n" + table(["n", *(f"{way}, {name}" for way, name in columns)], lines)


def readme_block(run: dict[str, Any], records: Sequence[Record]) -> str:
    """README's table: float32, forward and backward together, the fastest in bold."""
    wide = [r for r in records if r.suite == "shapes" and r.dtype == "float32"]
    both = [_group(wide, way) for way in PASSES]
    lines = []
    for shape in README_SHAPES:
        pairs = {
            name: [groups[shape, "float32"][name] for groups in both]
            for name in (OURS, *RIVALS)
            if name in both[1][shape, "float32"]
        }
        total = {name: math.fsum(r.seconds for r in pair) for name, pair in pairs.items()}
        fastest = min(pairs.values(), key=lambda pair: math.fsum(r.seconds for r in pair))
        size, unit = unit_of(total[OURS])
        cells = []
        for name in (OURS, *RIVALS):
            text = f"{digits(total[name] / size)} {unit}" if name in total else "-"
            # Level with the fastest: their intervals overlap.
            level = name in pairs and sum(r.low for r in pairs[name]) <= sum(
                r.high for r in fastest
            )
            cells.append(f"**{text}**" if level else text)
        lines.append([_words(shape), *cells])
    version = ".".join(run["versions"].get("PyTorch", "").split(".")[:2])
    return (
        table(("x", OURS, f"PyTorch {version}".strip(), RIVALS[1]), lines)
        + f"\n\n{run['processor']}, {run['threads']} threads, {run['date']}."
    )


def _words(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"
