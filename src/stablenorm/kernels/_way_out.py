"""How results reach memory: through the caches or past them, in whole lines if so."""

from __future__ import annotations

from stablenorm.kernels._inner import inner
from stablenorm.kernels._memory import LINE
from stablenorm.kernels._narrow import GROUP
from stablenorm.kernels._vector_memory import address, itemsize, prefetch_to_write

# By ordinary stores; row by row past the caches; or, where rows are short or begin at unlike
# places of their lines, through a stage of STAGE bytes that stays in the first-level cache and is
# then copied out past it.
PLAIN, STREAMED, STAGED = 0, 1, 2
STAGE = 1 << 14

# Shorter rows are staged: the two lines that a row shares with its neighbours cost too much.
_LONG_ENOUGH_TO_STREAM = 4096


@inner
def way_out(n, width, out, stride, streaming):
    if not streaming:
        return PLAIN
    # Elements across the bounds of lines cannot be streamed at all: the processor would fault.
    aligned = address(out) % width == 0 and stride % LINE == 0
    if aligned and (address(out) % LINE == 0 or n * width >= _LONG_ENOUGH_TO_STREAM):
        return STREAMED
    return STAGED if stride == n * width else PLAIN


@inner
def staged_rows(n, width, way):
    """Return how many rows are computed before they are copied out: whole groups."""
    if way != STAGED:
        return 1 << 60
    return max(STAGE // (n * width) // GROUP, 1) * GROUP


@inner
def whole_lines(at, n, width):
    """
    Return the columns from and to which a row that begins at address `at` fills whole lines.

    Only these may be streamed: the rest shares its line with a neighbouring row, and a line
    half streamed and half stored goes to memory twice.
    """
    head = min(-at % LINE // width, n)
    return head, n - (n - head) % (LINE // width)


@inner
def expect_edges(out, at, stride, n, like):
    """
    Ask for the lines that rows to come share with their neighbours, if they do.

    A store waits for its line, and all later stores, streamed ones too, wait behind it.
    """
    if (address(out) + at) % LINE:
        prefetch_to_write(out, at, stride, like)
        prefetch_to_write(out, at + n * itemsize(out), stride, like)
