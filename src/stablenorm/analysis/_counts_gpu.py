"""
What the fused GPU kernel does on 16- and 32-bit data, in float64 arithmetic, as its source says.

A row is read once into the registers of its `threads`, where all passes find it; rows too long for
that are read once more by every later pass, which `again` (0 or 1) turns on. Lanes calculate
whether they have an element or not: `columns` of a row, and `filled` rows, as rows go in turns of
as many as a block has in hand. What is one number a row each of its threads calculates for itself.
A sum over the threads of a row takes `halvings` additions in each: lanes by halves, then warps.

Sums over rows are kept for a chunk of rows, then `parts` of them (none if there is one chunk) are
written and added up in the same launch, in `segments`, these by `merges`. Rows too long for one
block are shared by a cluster of them, which are counted as one; its last blocks write the sums of
the `ticketed` segments, and read them again to add them up. xhat is counted once
where both dx and dgamma need it: a compiler shares it. Forwards run in `blocks`, each of which
reads gamma and beta once (`staged`, 0 or 1), or for every row (`unstaged`).
"""

from __future__ import annotations

from typing import NamedTuple

from stablenorm.analysis._counts import Term


class Launch(NamedTuple):
    """How the GPU kernel is launched for some data: what its counts depend on."""

    # Threads of a row and vectors of 16 bytes in the registers of each, 0: none; rows in hand.
    threads: int
    vectors: int
    slots: int
    staged: bool
    # Of the backward; 1 each of a forward.
    chunks: int
    chunk_rows: int
    segments: int
    blocks: int
    # Blocks of a cluster.
    cluster: int = 1


# Rows of which the backward without registers keeps what it needs to go through their columns.
_BATCH = 16
_VECTOR_BYTES, _WARP = 16, 32


def count_lanes(launch: Launch, rows: int, n: int, s: int) -> dict[str, int]:
    """Give the names of the formulas below their values."""
    slots, chunks, cluster = launch.slots, launch.chunks, launch.cluster
    threads = launch.threads * cluster
    columns = threads * launch.vectors * (_VECTOR_BYTES // s)
    # Lanes by halves, then the warps of a block, then the blocks of a cluster, one by one.
    lanes, warps = min(launch.threads, _WARP), max(launch.threads // _WARP, 1)
    if launch.vectors == 0:
        turn = threads * (_VECTOR_BYTES // s)
        columns = -(-n // turn) * turn
    whole, rest = divmod(rows, launch.chunk_rows)
    batches = whole * -(-launch.chunk_rows // _BATCH) + -(-rest // _BATCH)
    parts = chunks if chunks > 1 else 0
    # Segments are filled one after the other: the last ones may be left without a chunk.
    segments = -(-parts // -(-chunks // launch.segments)) if parts else 0
    # Put away and taken up again after each batch, but for the last, or the first.
    again = batches if launch.vectors == 0 else chunks
    return {
        "threads": threads,
        "columns": columns,
        "filled": -(-rows // slots) * slots,
        "halvings": lanes.bit_length() - 1 + warps - 1 + cluster - 1,
        "again": int(launch.vectors == 0),
        "staged": int(launch.staged),
        "unstaged": int(not launch.staged),
        "blocks": launch.blocks // cluster,
        "chunks": chunks,
        "parts": parts,
        "segments": segments,
        "merges": max(0, segments - 1),
        "ticketed": segments if cluster > 1 and segments > 1 else 0,
        # Sums that are settled when they are put away: by every lane, or for each slot of a column.
        "settled": again * columns if slots == 1 else chunks * slots * n,
        "put": again * n if parts else 0,
        "retaken": (again - chunks) * n,
    }


GPU_FORWARD = (
    Term(
        "sum of x",
        "filled columns + filled threads halvings",
        loaded="rows n",
        read="rows n s",
        memory="rows n s",
    ),
    Term("mean", "filled threads", "2 filled threads", divisions="filled threads"),
    Term(
        "sums of x - mean and of its square",
        "2 filled columns + 2 filled threads halvings",
        "filled columns",
        loaded="again rows n",
        read="again rows n s",
    ),
    Term(
        "mean of the rest, var, rstd",
        "4 filled threads",
        "5 filled threads",
        divisions="2 filled threads",
        kept="3 rows",
        written="24 rows",
        memory="24 rows",
    ),
    Term(
        "y: xhat, times gamma plus beta, rounded once",
        "filled columns",
        "2 filled columns",
        loaded="again rows n + 2 staged blocks n + 2 unstaged filled n",
        stored="rows n",
        read="again rows n s + 2 staged blocks n s + 2 unstaged filled n s",
        written="rows n s",
        memory="rows n s + 2 n s",
    ),
)

GPU_BACKWARD = (
    Term(
        "statistics, mean of the rest times rstd",
        "rows threads",
        fetched="3 rows threads",
        read="24 rows threads",
        memory="24 rows",
    ),
    Term(
        "sum of g",
        "filled threads halvings",
        "filled columns",
        loaded="2 rows n - again rows n + staged blocks n + unstaged filled n",
        read="2 rows n s - again rows n s + staged blocks n s + unstaged filled n s",
        memory="2 rows n s + n s",
    ),
    Term("mean of g", "filled threads", "2 filled threads", divisions="filled threads"),
    Term(
        "sum of (g - mean(g)) * xhat",
        "filled columns + filled threads halvings",
        "3 filled columns",
        loaded="2 again rows n + unstaged filled n",
        read="2 again rows n s + unstaged filled n s",
    ),
    Term("mean of that", "filled threads", "2 filled threads"),
    Term("dbeta: dy added to its sum", "filled columns"),
    Term("dgamma: dy * xhat added to its sum", fused="filled columns"),
    Term(
        "dx: xhat and g once more, projected, rounded once",
        "2 filled columns",
        "3 filled columns",
        loaded="2 again rows n + unstaged filled n",
        stored="rows n",
        read="2 again rows n s + unstaged filled n s",
        written="rows n s",
        memory="rows n s",
    ),
    Term(
        "sums of chunks settled and put away",
        "14 settled + 2 put",
        fetched="2 retaken",
        kept="2 put",
        read="16 retaken",
        written="16 put",
    ),
    Term(
        "chunks added up, rounded once",
        "14 parts n + 12 segments n + 40 merges n + 12 n",
        fetched="2 parts n + 4 ticketed n",
        stored="2 n",
        kept="4 ticketed n",
        read="16 parts n + 32 ticketed n",
        written="2 n s + 32 ticketed n",
        memory="2 n s",
    ),
)
