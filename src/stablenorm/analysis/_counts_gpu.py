"""
What the fused GPU kernel does on 16- and 32-bit data, in float64 arithmetic: a model of its source.

A row is read once into registers, where all its passes find it; sums over rows are kept in registers
for a chunk of rows, then written once: `chunks` of them are added up at the end of the same launch.
Counted is what the equations need: a sum of n numbers is n - 1 additions, however many lanes repeat
the last of them; lanes beyond n are not counted.
"""

from __future__ import annotations

from stablenorm.analysis._counts import Term

# Chunks of rows with sums of their own, whatever the GPU: two a multiprocessor of the largest of today.
GPU_CHUNKS = 256

GPU_FORWARD = (
    Term("sum of x", "rows n - rows", loaded="rows n", read="rows n s", memory="rows n s"),
    Term("mean", "rows", "2 rows"),
    Term("sums of x - mean and of its square", "2 rows n - rows", "rows n"),
    Term(
        "mean of the rest, var, rstd",
        "4 rows",
        "5 rows",
        divisions="2 rows",
        written="24 rows",
        memory="24 rows",
    ),
    Term(
        "y: xhat, times gamma plus beta, rounded once",
        "rows n",
        "2 rows n",
        loaded="2 n",
        stored="rows n",
        read="2 n s",
        written="rows n s",
        memory="rows n s + 2 n s",
    ),
)

GPU_BACKWARD = (
    Term("statistics", "rows", read="24 rows", memory="24 rows"),
    Term(
        "sum of g",
        fused="rows n",
        loaded="2 rows n + n",
        read="2 rows n s + n s",
        memory="2 rows n s + n s",
    ),
    Term("mean of g", "rows", "2 rows"),
    Term("sum of (g - mean(g)) * xhat", "rows n", "3 rows n"),
    Term("mean of that", "rows", "2 rows"),
    Term("dbeta: dy added to its sum", "rows n"),
    Term("dgamma: dy * xhat added to its sum", fused="rows n"),
    Term(
        "dx: xhat and g once more, projected, rounded once",
        "2 rows n",
        "3 rows n",
        stored="rows n",
        written="rows n s",
        memory="rows n s",
    ),
    Term(
        "sums of chunks: written, read, added up",
        "14 chunks n + 2 n",
        stored="2 n",
        read="16 chunks n",
        written="16 chunks n + 2 n s",
        memory="2 n s",
    ),
)
