"""The text of docs/evidence/performance.md and the table of README, with the origin of every figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cases import BEYOND, CALL, IN_CACHE, OURS_OUT, TORCH_CALL, Result
from page import digits, origin_line, seconds, table, unit_of
from peers import OURS

from stablenorm.output import quantity
from stablenorm.timing import PASSES, Timing

# The peers and the shapes of README's table.
RIVALS = ("PyTorch", "plain NumPy")
README_SHAPES = (*IN_CACHE[:1], *IN_CACHE[2:], BEYOND[1], BEYOND[3])
# The results of a suite by shape and dtype, then by direction.
Pairs = dict[tuple[tuple[int, ...], str], dict[str, Result]]


def page(run: dict[str, Any], results: Sequence[Result]) -> str:
    """Return the page without its part on keywords; `run` has the origin and the agreement."""
    shapes = pairs(results, "shapes")
    missing = "".join(f" Not measured: {name} ({why})." for name, why in run["missing"].items())
    used = "; ".join(f"{peer} {worst:.2g}" for peer, worst in run["agreement"].items())
    refused = "; ".join(run["refused"])
    agreement = f"Largest part of that tolerance used: {used}. " + (
        f"Not timed, because results disagreed: {refused}." if refused else "All agreed."
    )
    alt = (
        "Time of PyTorch and of plain NumPy divided by the time of stablenorm, over the size of x: above 1 in most "
        "places, below 1 where PyTorch is faster."
    )
    pictures = "\n".join(
        f"![{alt}](../_static/speed-{theme}.svg){{.only-{theme}}}" for theme in ("light", "dark")
    )
    return f"""{pictures}

*Above 1, a peer takes longer than stablenorm; below 1, it is faster. Each point is a shape of the tables below.*

{origin_line("make bench", run)}{missing}
"1.6x faster": their median is 1.6 times ours. **"1.2x slower"**, in bold: our median is 1.2 times theirs. Times are medians,
with their quartiles in brackets: [how it was measured](#how-it-was-measured).

## One call on (1, 1, 64)

{_call_table(results)}

## float32, in cache

{IN_CACHE_TEXT}

{_shape_tables(shapes, IN_CACHE)}

## float32, beyond

{BEYOND_TEXT}

{_shape_tables(shapes, BEYOND)}

## Both on an allocator that keeps its pages

{_kept(run, results)}

## Other types

{_types_table(shapes)}

## Over n, at 256 MiB

{_sweep(pairs(results, "n"))}

## How it was measured

{HOW.format(threads=run["threads"], agreement=agreement)}
"""


HOW = """- A time is the median over rounds, in two digits, with the quartiles in brackets. In a round every
  candidate runs once, in an order that rotates. Before each sample there is a pause and 10 ms of calls
  that are not counted. A sample lasts 0.3 ms or one call, whichever is longer (`stablenorm.timing`).
- "1.6x faster": their median is 1.6 times ours. **"1.2x slower"**, in bold: our median is 1.2 times theirs.
  "level": less than 1.05. A "~" before the figure: the intervals between the quartiles overlap.
- stablenorm: `layer_norm_forward(x, gamma, beta)`, which keeps what the backward needs, and
  `layer_norm_backward(dy, cache)`, all three gradients, with {threads} threads. Results of 1 MiB or
  more come from recycled memory ([Reusing memory](../how-to/memory.md#reusing-memory)). "out=": results are
  written into existing arrays.
- "of copy": the bytes that must be read and written (forward x and y; backward dy, x and dx) per
  second, as a fraction of the speed of a plain copy with the same number of threads. If x is 256 MiB, the copy is
  of the same arrays in the same rounds; otherwise it is of 256 MiB. The fraction may exceed 1 for arrays in cache.
- PyTorch: `torch.native_layer_norm`, which returns the statistics too, and ATen's
  `native_layer_norm_backward`, {threads} threads. JAX: the usual formula and its vjp, both jitted. ONNX
  Runtime: the operator LayerNormalization, which has no backward. plain NumPy:
  `stablenorm.testing.plain`, on one thread. NumPy backend: ours without the kernels.
- Before a case is timed, its results are compared. The exact oracle checks that some of our rows keep the accuracy
  contract. A peer must be within 16 roundings of its dtype, relative to the magnitudes of the terms
  (`benchmarks/agreement.py`). {agreement}"""

# The page calls medians level if their ratio is smaller.
LEVEL = 1.05

KEPT = """jemalloc is preloaded, as PyTorch's tuning guide recommends, with `dirty_decay_ms:-1` and
`muzzy_decay_ms:-1`, so that it never returns a page. Our recycling is off. Both sides then use the
same allocator."""

IN_CACHE_TEXT = """x has at most 8 MiB: x, y, dy and dx fit into the 32 MiB of the last-level cache, and malloc keeps
freed pages, for every candidate."""

BEYOND_TEXT = """Most of the gap to PyTorch and NumPy here is memory management. malloc returns blocks beyond
32 MiB to the system, and the system clears new pages in the next call. stablenorm recycles results,
ONNX Runtime keeps an arena. The arithmetic alone is compared
[below](#both-on-an-allocator-that-keeps-its-pages)."""


def pairs(results: Iterable[Result], suite: str) -> Pairs:
    """Return the results of a suite by shape and dtype, in the order of the measurement."""
    by_shape: Pairs = {}
    for r in results:
        if r.suite == suite:
            by_shape.setdefault((r.shape, r.dtype), {})[r.direction] = r
    return by_shape


def compared(peer: Timing | None, ours: Timing) -> str:
    """Say whose median is shorter, and by which factor, with "~" if the quartiles overlap."""
    if peer is None:
        return "-"
    ratio = max(peer.median / ours.median, ours.median / peer.median)
    if ratio < LEVEL:
        return "level"
    mark = "~" if peer.low <= ours.high and ours.low <= peer.high else ""
    # 1.06 in two digits would be "1.1x".
    times = mark + digits(ratio, 3 if ratio < 1.1 else 2)
    return f"{times}x faster" if peer.median > ours.median else f"**{times}x slower**"


def _spread(time: Timing | None) -> str:
    if time is None:
        return ""
    size, _ = unit_of(time.median)
    return f"{seconds(time.median)} ({digits(time.low / size)} to {digits(time.high / size)})"


def _of_copy(result: Result) -> str:
    return f"{result.speed(OURS_OUT) / result.copy:.2g}"


def _heads(*columns: str) -> list[str]:
    """Return the heads of these columns, first for the forward, then for the backward."""
    return [f"{direction}, {column}" for direction in PASSES for column in columns]


def _shape_tables(shapes: Pairs, wanted: Sequence[tuple[int, ...]]) -> str:
    """Return a table of the forward and one of the backward in float32, one line a shape."""
    parts = []
    for direction in PASSES:
        results = [shapes[shape, "float32"][direction] for shape in wanted]
        others = [name for name in results[0].times if name not in (OURS, OURS_OUT)]
        lines = []
        for r in results:
            ours, out = r.times[OURS], r.times[OURS_OUT]
            times = _spread(ours), seconds(out.median), _of_copy(r)
            peers = [compared(r.times.get(name), ours) for name in others]
            lines.append([r.shape, quantity(r.nbytes, "B"), *times, *peers])
        named = [o.partition(",")[0].replace("backend numpy", "NumPy backend") for o in others]
        head = ("x", "size", "stablenorm", "out=", "of copy, out=", *named)
        parts += [f"{direction.capitalize()}:", table(head, lines)]
    return "\n\n".join(parts)


def _types_table(shapes: Pairs) -> str:
    """Return a table of the dtypes other than float32, one line a dtype and shape."""
    lines = []
    for (shape, dtype), both in shapes.items():
        cells: list[Any] = [dtype, shape]
        for r in both.values():
            ours, theirs = r.times[OURS], r.times.get("PyTorch")
            cells += [_spread(ours), _of_copy(r), compared(theirs, ours)]
        if dtype != "float32":
            lines.append(cells)
    return table(["dtype", "x", *_heads("stablenorm", "of copy, out=", "PyTorch")], lines)


def _kept(run: dict[str, Any], results: Sequence[Result]) -> str:
    """Return the comparison on an allocator that keeps its pages, so nobody waits for new ones."""
    if run["kept"]:
        return f"Not run: {run['kept']}."
    lines = []
    for (shape, _), both in pairs(results, "kept").items():
        cells: list[Any] = [shape]
        for r in both.values():
            ours, theirs = r.times[OURS], r.times.get("PyTorch")
            cells += [_spread(ours), _spread(theirs), compared(theirs, ours)]
        lines.append(cells)
    return f"{KEPT}\n\n{table(['x', *_heads('stablenorm', 'PyTorch', 'compared')], lines)}"


def _call_table(results: Sequence[Result]) -> str:
    by_direction = [r.times for r in results if r.suite == "call"]
    texts = {
        CALL: "`layer_norm`",
        OURS: "`layer_norm_forward`, `layer_norm_backward`",
        TORCH_CALL: "PyTorch, `torch.nn.functional.layer_norm`",
        "PyTorch": "PyTorch, `torch.native_layer_norm`, ATen's backward",
    }
    lines = [
        (t, *(_spread(times.get(name)) for times in by_direction)) for name, t in texts.items()
    ]
    return table(("", *PASSES), lines)


def _sweep(lengths: Pairs) -> str:
    """Return a table of GB/s, one line a length: ours with out=, a copy of the same arrays, and PyTorch."""
    lines = []
    for (shape, _), both in lengths.items():
        cells = []
        for r in both.values():
            theirs = r.speed("PyTorch") if "PyTorch" in r.times else None
            speeds = r.speed(OURS_OUT), r.copy, theirs
            cells += ["-" if speed is None else digits(speed / 1e9) for speed in speeds]
        lines.append([shape[-1], *cells])
    return "GB/s:\n\n" + table(["n", *_heads("out=", "copy", "PyTorch")], lines)


def speed_lines(results: Sequence[Result]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the points of the picture, by peer and direction: bytes of x, and their time over ours."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for r in sorted(results, key=lambda r: r.nbytes):
        if r.suite == "shapes" and r.dtype == "float32":
            for peer in filter(r.times.__contains__, RIVALS):
                ratio = r.times[peer].median / r.times[OURS].median
                lines.setdefault((peer, r.direction), []).append((r.nbytes, ratio))
    return lines


def readme_block(run: dict[str, Any], results: Sequence[Result]) -> str:
    """Return README's table: float32, forward and backward together, the fastest in bold."""
    shapes = pairs(results, "shapes")
    lines = []
    for shape in README_SHAPES:
        forward, backward = (r.times for r in shapes[shape, "float32"].values())
        # Sums of medians and of quartiles.
        both = {
            name: Timing(*map(math.fsum, zip(forward[name], backward[name], strict=True)))
            for name in (OURS, *RIVALS)
            if name in backward
        }
        fastest = min(both.values())
        size, unit = unit_of(both[OURS].median)
        cells = []
        for name in (OURS, *RIVALS):
            text = f"{digits(both[name].median / size)} {unit}" if name in both else "-"
            # Bold: the interval overlaps that of the fastest.
            is_fast = name in both and both[name].low <= fastest.high
            cells.append(f"**{text}**" if is_fast else text)
        lines.append([shape, *cells])
    version = ".".join(run["versions"].get("PyTorch", "").split(".")[:2])
    return (
        table(("x", OURS, f"PyTorch {version}".strip(), RIVALS[1]), lines)
        + f"\n\n{run['processor']}, {run['threads']} threads, {run['date']}. {_against_torch(results)}"
    )


def _against_torch(results: Sequence[Result]) -> str:
    """Say in how many cells PyTorch is faster, and how long it takes on an allocator that keeps its pages."""
    cells, on_one_allocator = (
        [r.times for r in results if r.suite == suite and "PyTorch" in r.times]
        for suite in ("shapes", "kept")
    )
    lost = sum("slower" in compared(times["PyTorch"], times[OURS]) for times in cells)
    text = f"Over all shapes, dtypes and directions, PyTorch is faster in {lost} of {len(cells)} cases."
    if on_one_allocator:
        ratios = [times["PyTorch"].median / times[OURS].median for times in on_one_allocator]
        mean = digits(math.prod(ratios) ** (1 / len(ratios)), 3)
        text += (
            " In the largest shapes most of the gap is memory, which stablenorm reuses. With both on an allocator "
            f"that keeps its pages, PyTorch takes {mean} times as long (geometric mean of {len(ratios)} cases)."
        )
    return text
