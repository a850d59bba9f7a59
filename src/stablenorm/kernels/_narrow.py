"""
float16, bfloat16 and float32: the equations of `reference`, in float64, rounded once.

Four rows are in flight at a time: they share what is read of gamma, beta and the sums over rows,
and their divisions and square roots overlap. Each row is read from memory once: its later passes
find it in the caches, and while they run, the rows to come are asked for.

Of a row that goes alone, four spans of columns are in flight while they are summed, each in the
place of a row. A row's own arithmetic is the same whether it is one of four or alone.

Parameters are float32 here, which holds the 16-bit types exactly. Strides are in bytes.

This is what `_narrow_forward` and `_narrow_backward` share.
"""

from __future__ import annotations

from stablenorm.kernels._inner import inner
from stablenorm.kernels._memory import LINE
from stablenorm.kernels._vector_memory import address, pointer_at

# Columns that one lane sums one after the other, 128 of them, before the partial sum is put
# aside: an error of at most 2**-46 of what is summed, where a row of 65 536 would allow 2**-40.
SPAN = 1024

# Rows in flight. Eight gained nothing at any n, and need registers that only AVX-512 has.
GROUP = 4

# Longer rows go one by one in the forward: four of them no longer fit a second-level cache of 1 MiB
# with what is written.
LONGEST_IN_GROUP = 16384

# Of rows up to this length the forward measures the next four before it normalizes these: n = 64
# takes 0.92 of the time, 128 and 256 0.95, 1024 the same.
LONGEST_AHEAD = 512

# Columns of the four spans of a row that are in flight together if it goes alone: a sum is a chain,
# each addition waiting for the one before. A row of 4096 takes 0.93 us forward, 1.42 otherwise.
# (2-core AMD EPYC 9005, November 2026, float32, as all figures of this file.)
SPANS = GROUP * SPAN

# Each of the three passes over a row asks for a third of the lines of the rows to come, so that
# memory is busy throughout: one third in each was 35 % faster beyond the caches than none, all
# in one pass 20 to 30 %, at n = 1024.
TURN = 3 * LINE


@inner
def eight(scratch, index):
    """Return the `index`-th eight float64 of `scratch`."""
    return pointer_at(address(scratch) + 64 * index, scratch)
