"""
How `layer_norm.cu` is compiled and launched for given data: arithmetic, threads, chunks, memory.

Everything that decides a bit of a result is a function of dtype, rows and n, and of what the kind of
device decides: arithmetic, and how long a row may be before it is shared or read again. Never of
the number of multiprocessors, of alignment or of what else runs. The grid and the way of adding up
the partial sums depend on the device, and change no bit.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from stablenorm._types import any_float64, bfloat16

# The codes that layer_norm.cu knows dtypes by.
DTYPE_CODES = {
    np.dtype(np.float16): 0,
    bfloat16: 1,
    np.dtype(np.float32): 2,
    np.dtype(np.float64): 3,
}

# The codes of its ways to calculate: float64; pairs of float64; pairs of float32.
DOUBLE, DOUBLE_PAIRS, FLOAT_PAIRS = 0, 1, 2

# Compute capabilities whose float64 runs at half or a third of the float32 rate (the CUDA
# programming guide's table of arithmetic throughput); elsewhere it is one 32nd or 64th.
_FAST_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})

# Ways of adding up the chunks, `Parameters.final_mode`.
ONE_CHUNK, TICKETS, GRID_BARRIER = 0, 1, 2

# Unsigned 32-bit words, zero before the first launch that ever uses them: the grid barrier; for
# each block of the largest cluster a ticket for each segment and the ticket of the segments.
COUNTERS = 128

# Chunks are summed in this many runs of neighbours, and these in order: enough to keep loads of
# the final sum in flight, few enough for one word of `COUNTERS` each.
_SEGMENTS = 8

# Blocks that may share a row. More than 8 are not portable: a device may refuse them (CUDA
# programming guide, thread block clusters).
_CLUSTERS = (1, 2, 4, 8)

# Compute capability from which on blocks form clusters (the same chapter).
_CLUSTERED = (9, 0)

# With less than this to add up, one block does it while a second round of tickets would wait.
_ONE_SEGMENT_BYTES = 200 << 10

# Chunks of the backward: two blocks on each of 128 multiprocessors (132 on an H100: 97 % busy).
_CHUNKS = 256

# Blocks of a cluster times chunks. One block of 512 threads on each of 132 multiprocessors, less
# what does not make up a cluster, is at most 16 clusters of 8 or 66 of 2: about four turns each.
_CLUSTERED_CHUNKS = 512

# Rows of a chunk at least, so that writing the partial sums stays below a tenth of the traffic;
# and at most, for each row slot, so that a plain float64 sum errs by at most 2**-46 of its terms.
_LEAST_ROWS, _MOST_ROWS_PER_SLOT = 16, 128

# Threads of a block where several rows share it.
_BLOCK = 256
_LONGEST_BLOCK = 512

# The same where a warp has a row in the backward and a lane two vectors of it: 16 sums a thread
# take more than the 128 registers that two blocks of 256 leave, and fit the 168 of two of 192.
_WIDE_LANE_BLOCK = 192
_WARP = 32
_VECTOR_BYTES = 16

# Rows whose statistics the generic backward holds while it goes through their columns.
GENERIC_ROWS = 16

# What it holds of each, at most: struct Projection.
_PROJECTION_BYTES = 128

# A word of shared memory by which one thread tells its block who came last.
_FLAG_BYTES = 16

# Shared memory that every device grants without being asked.
SHARED_BYTES = 48 << 10

# Elements a thread holds at once, of each tensor, by bytes of an element: the forward, and that of
# a cluster, where more of them make the cluster smaller; the backward with its sums over rows in
# registers; with these in shared memory. One vector more and the compiler spills at 128 registers
# a thread, in the backward (tests/test_kernel_compile.py).
_FORWARD_ELEMENTS = {2: 16, 4: 8, 8: 4}
_CLUSTERED_FORWARD_ELEMENTS = {2: 16, 4: 16, 8: 8}
_BACKWARD_ELEMENTS = {2: 8, 4: 8, 8: 2}
_SHARED_SUM_ELEMENTS = {2: 16, 4: 16, 8: 4}


class Plan(NamedTuple):
    """One compiled kernel and the part of its launch that depends on the data alone."""

    # Of the `extern "C"` function, and the names to define with `-D` when compiling it.
    entry: str
    defines: tuple[str, ...]
    block: int
    # Rows that a block has in hand at a time: its threads divided by those of a row.
    rows_per_block: int
    shared_bytes: int
    # Of the backward: 1, all rows and 1 where nothing is summed over rows.
    chunks: int
    chunk_rows: int
    segments: int
    workspace_bytes: int
    # Blocks that share a row.
    cluster: int = 1


def largest_cluster(capability: tuple[int, int]) -> int:
    """Return how many blocks may share a row on a device of this compute capability."""
    return _CLUSTERS[-1] if capability >= _CLUSTERED else 1


def arithmetic(capability: tuple[int, int], *arrays: object) -> int:
    """Return the arithmetic for `arrays` (None aside) on a device of this compute capability."""
    if any_float64(*arrays):
        return DOUBLE_PAIRS
    return DOUBLE if capability in _FAST_FLOAT64 else FLOAT_PAIRS


def plan_forward(
    rows: int,
    n: int,
    x: np.dtype[np.generic],
    which: int,
    *,
    shared_limit: int = SHARED_BYTES,
    cluster_limit: int = 1,
) -> Plan:
    """
    Return how to compile and launch the forward for x of `rows` rows of `n` elements.

    `shared_limit` is the shared memory that a block may ask for on this device, `cluster_limit`
    the blocks that may share a row.
    """
    mixed = (which == DOUBLE_PAIRS) != _is_wide(x)
    for cluster in _clusters(cluster_limit):
        elements = _FORWARD_ELEMENTS if cluster == 1 else _CLUSTERED_FORWARD_ELEMENTS
        table = _row_threads(-(-n // cluster), x, elements[x.itemsize], mixed)
        if table.vectors:
            break
    else:
        cluster = 1
    block = table.threads * table.slots
    shared = _reduction_bytes(block, which, cluster)
    staged = 2 * table.columns * _held_bytes(which)
    # What is past the default limit is not worth the blocks that it displaces.
    is_staged = table.vectors > 0 and shared + staged <= min(SHARED_BYTES, shared_limit)
    return Plan(
        "layer_norm_forward",
        _defines(True, x, x, which, table, is_staged, False, cluster),
        block,
        table.slots,
        shared + (staged if is_staged else 0),
        1,
        rows,
        1,
        0,
        cluster,
    )


def plan_backward(
    rows: int,
    n: int,
    x: np.dtype[np.generic],
    dy: np.dtype[np.generic],
    which: int,
    *,
    summing: bool = True,
    shared_limit: int = SHARED_BYTES,
    cluster_limit: int = 1,
) -> Plan:
    """
    Return how to compile and launch the backward.

    `summing` tells whether dgamma or dbeta is wanted; dx has the same bits either way.
    `shared_limit` is the shared memory that a block may ask for on this device: with 128 KiB,
    rows twice as long, or more, are read once. `cluster_limit` is how many blocks may share a row:
    with 8, rows eight times as long.
    """
    for cluster in _clusters(cluster_limit):
        share = -(-n // cluster)
        table, shared_sums = _backward_threads(share, x, dy, which, shared_limit, cluster)
        if table.vectors:
            break
    else:
        cluster = 1
    block = table.threads * table.slots
    number, pair = _number_bytes(which), _pair_bytes(which)
    shared = _reduction_bytes(block, which, cluster)
    sums = 0
    if shared_sums:
        sums = 2 * table.columns * number
    elif table.slots > 1:
        sums = table.slots * table.columns * number
    staged = table.columns * _held_bytes(which)
    limit = shared_limit if shared_sums else min(SHARED_BYTES, shared_limit)
    is_staged = table.vectors > 0 and shared + staged + sums <= limit
    of_chunks = sums + (staged if is_staged else 0)
    if table.vectors == 0:
        of_chunks = GENERIC_ROWS * _PROJECTION_BYTES
    wanted = _CHUNKS if cluster == 1 else _CLUSTERED_CHUNKS // cluster
    chunk_rows = _chunk_rows(rows, table.slots, wanted)
    chunks = max(1, -(-rows // chunk_rows))
    if summing and table.vectors == 0 and chunks == 1 and rows > GENERIC_ROWS:
        # It would go back to partial sums that one chunk has no workspace for.
        msg = f"one chunk of columns in a loop must have at most {GENERIC_ROWS} rows, got {rows}"
        raise ValueError(msg)
    partials = 2 * n * number * chunks
    segments = 1 if partials <= _ONE_SEGMENT_BYTES else min(_SEGMENTS, chunks)
    return Plan(
        "layer_norm_backward",
        _defines(False, x, dy, which, table, is_staged, shared_sums, cluster),
        block,
        table.slots,
        # The final sum takes the place of what the chunks needed.
        shared + max(of_chunks, _SEGMENTS * _WARP * pair),
        chunks,
        chunk_rows,
        segments,
        partials + 2 * n * pair * segments if summing and chunks > 1 else 0,
        cluster,
    )


def final_mode(plan: Plan, grid: int, resident_blocks: int) -> int:
    """
    Return how the chunks are added up.

    `resident_blocks` is how many blocks the device can hold at once under a cooperative launch,
    0 where it knows none: a grid barrier among more would wait forever.
    """
    if plan.workspace_bytes == 0:
        return ONE_CHUNK
    # How many clusters are resident is an estimate of the driver's, which "is not guaranteed to be
    # achievable" (CUDA driver API, cuOccupancyMaxActiveClusters). Their last blocks share the
    # columns instead.
    if plan.cluster > 1:
        return TICKETS
    # With one segment the last block is done before all blocks could have met.
    if plan.segments == 1 or grid > resident_blocks:
        return TICKETS
    return GRID_BARRIER


def grid_blocks(plan: Plan, rows: int, resident_blocks: int) -> int:
    """Return the number of blocks to launch, given how many the device holds at once."""
    forward = plan.entry == "layer_norm_forward"
    work = -(-rows // plan.rows_per_block) if forward else plan.chunks
    return plan.cluster * max(1, min(work, resident_blocks // plan.cluster))


# struct Parameters of layer_norm.cu, field by field.
_PARAMETERS = struct.Struct("<16Q6qd6i")
PARAMETER_NAMES = (
    *("x", "dy", "gamma", "beta", "out", "dgamma", "dbeta"),
    *("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail", "exponent"),
    *("partials", "segment_sums", "counters"),
    *("rows", "n", "x_stride", "dy_stride", "out_stride", "chunk_rows"),
    "eps",
    *("gamma_type", "beta_type", "chunks", "segments", "final_mode", "unused"),
)


def pack_parameters(plan: Plan, rows: int, n: int, **values: float) -> bytes:
    """
    Return the bytes of the one argument of a kernel; what `values` lacks is 0.

    Of the workspace give `partials` alone.
    """
    values = {
        "rows": rows,
        "n": n,
        "chunk_rows": plan.chunk_rows,
        "chunks": plan.chunks,
        "segments": plan.segments,
        "segment_sums": values.get("partials", 0) + _partials_bytes(plan, n),
        **values,
    }
    if unknown := values.keys() - set(PARAMETER_NAMES):
        msg = f"parameters must be those of layer_norm.cu, got {sorted(unknown)}"
        raise ValueError(msg)
    return _PARAMETERS.pack(*(values.get(name, 0) for name in PARAMETER_NAMES))


def _partials_bytes(plan: Plan, n: int) -> int:
    pair = 8 if f"-DLN_ARITHMETIC={FLOAT_PAIRS}" in plan.defines else 16
    return max(0, plan.workspace_bytes - 2 * n * pair * plan.segments)


def _number_bytes(which: int) -> int:
    return 16 if which == DOUBLE_PAIRS else 8


def _pair_bytes(which: int) -> int:
    return 8 if which == FLOAT_PAIRS else 16


def _held_bytes(which: int) -> int:
    """Return the bytes that an element of gamma is held in."""
    return 8 if which == DOUBLE_PAIRS else 4


def _is_wide(dtype: np.dtype[np.generic]) -> bool:
    return dtype.itemsize == 8


def _is_crowded(x: np.dtype[np.generic], which: int) -> bool:
    return which == DOUBLE_PAIRS and x.itemsize == 2


class _Table(NamedTuple):
    """Threads of a row, vectors of a thread (0: any number), rows of a block, columns held."""

    threads: int
    vectors: int
    slots: int
    columns: int


def _clusters(limit: int) -> list[int]:
    return [blocks for blocks in _CLUSTERS if blocks <= limit]


def _row_threads(n: int, x: np.dtype[np.generic], elements: int, mixed: bool) -> _Table:
    """Return the table's line for rows of n, of which a thread holds `elements` at most."""
    vector = _VECTOR_BYTES // x.itemsize
    most = elements // vector
    # Mixed dtypes, which are rare, are left to the path that takes anything.
    if mixed or n > _LONGEST_BLOCK * elements:
        return _Table(_BLOCK, 0, 1, 0)
    if n <= _WARP * vector:
        threads, vectors = 1, 1
        while threads * vector < n:
            threads *= 2
    elif n <= _WARP * elements:
        threads, vectors = _WARP, most
    else:
        # One vector a thread as long as a small block suffices: registers for more blocks.
        vectors = 1 if n <= _BLOCK * vector else most
        threads = _WARP * -(-n // (_WARP * vectors * vector))
    slots = max(1, _BLOCK // threads)
    return _Table(threads, vectors, slots, threads * vectors * vector)


def _backward_threads(
    n: int,
    x: np.dtype[np.generic],
    dy: np.dtype[np.generic],
    which: int,
    shared_limit: int,
    cluster: int,
) -> tuple[_Table, bool]:
    """Return the table's line, and whether the sums over rows are in shared memory."""
    mixed = dy != x or (which == DOUBLE_PAIRS) != _is_wide(x)
    table = _row_threads(n, x, _BACKWARD_ELEMENTS[x.itemsize], mixed)
    if table.vectors > 1 and table.threads == _WARP:
        table = table._replace(slots=_WIDE_LANE_BLOCK // _WARP)
    if table.vectors or mixed:
        return table, False
    longer = _row_threads(n, x, _SHARED_SUM_ELEMENTS[x.itemsize], mixed)
    # With gamma beside the sums: read from memory, it takes registers that are not there.
    shared = longer.columns * (2 * _number_bytes(which) + _held_bytes(which))
    block = longer.threads * longer.slots
    if longer.vectors == 0 or _reduction_bytes(block, which, cluster) + shared > shared_limit:
        return table, False
    return longer, True


def _chunk_rows(rows: int, slots: int, chunks: int) -> int:
    most = max(512, _MOST_ROWS_PER_SLOT * slots)
    # A multiple of so many chunks keeps every multiprocessor as busy as they do.
    waves = max(1, -(-rows // (chunks * most)))
    least = max(_LEAST_ROWS, -(-rows // (chunks * waves)))
    return -(-least // slots) * slots


def _reduction_bytes(block: int, which: int, cluster: int) -> int:
    """Return the bytes of a flag, and of two turns of two sums for every warp, and every block."""
    sums = -(-block // _WARP) + (cluster if cluster > 1 else 0)
    return _FLAG_BYTES + 2 * 2 * sums * _number_bytes(which)


def _defines(
    forward: bool,
    x: np.dtype[np.generic],
    dy: np.dtype[np.generic],
    which: int,
    table: _Table,
    is_staged: bool,
    shared_sums: bool,
    cluster: int,
) -> tuple[str, ...]:
    block = table.threads * table.slots
    values = {
        "FORWARD": int(forward),
        "X": DTYPE_CODES[x],
        "DY": DTYPE_CODES[dy],
        "ARITHMETIC": which,
        "BLOCK": block,
        "ROW_THREADS": table.threads,
        "VECTORS": table.vectors,
        "STAGED": int(is_staged),
        "SHARED_SUMS": int(shared_sums),
        # Two blocks of 256 or one of 512 on a multiprocessor: 128 registers a thread, and 168
        # where two have 192. Pairs of float64 for a vector of eight 16-bit elements take more.
        "LEAST_BLOCKS": 1 if _is_crowded(x, which) else max(1, _LONGEST_BLOCK // block),
        "CLUSTER": cluster,
    }
    return tuple(f"-DLN_{name}={value}" for name, value in values.items())
