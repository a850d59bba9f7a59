"""The launch plan of the CUDA kernels: what no test of the kernels themselves would notice."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from stablenorm.cuda import plan as _cuda_plan
from stablenorm.cuda.plan import (
    DOUBLE,
    DOUBLE_PAIRS,
    FLOAT_PAIRS,
    GRID_BARRIER,
    ONE_CHUNK,
    TICKETS,
    arithmetic,
    final_mode,
    grid_blocks,
    largest_cluster,
    pack_parameters,
    plan_backward,
    plan_forward,
)

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
KINDS = [(x, which) for x in (F16, BF16, F32) for which in (DOUBLE, FLOAT_PAIRS)]
KINDS += [(F64, DOUBLE_PAIRS), (F32, DOUBLE_PAIRS)]
ROWS = (1, 2, 15, 16, 17, 33, 511, 4097, 65536, 131_073, 1_000_000)
LENGTHS = (1, 2, 3, 8, 31, 33, 64, 100, 129, 256, 257, 513, 768, 1025, 2047, 2049, 3000, 4096, 4097)
LENGTHS += (6144, 8191, 8192, 8193, 65_536, 1 << 20)
# What every device grants unasked, and what blocks may ask for on compute capability 12.0, 8.0
# and 9.0 (CUDA programming guide, table of technical specifications).
LIMITS = (48 << 10, 99 << 10, 163 << 10, 227 << 10)

kinds = pytest.mark.parametrize(("x", "which"), KINDS)


def value(plan, name):
    (found,) = (d for d in plan.defines if d.startswith(f"-DLN_{name}="))
    return int(found.partition("=")[2])


def plans(x, which, rows=4096):
    for n, limit in itertools.product(LENGTHS, LIMITS):
        yield n, limit, plan_forward(rows, n, x, which, shared_limit=limit)
        yield n, limit, plan_backward(rows, n, x, x, which, shared_limit=limit)


@kinds
def test_every_column_of_a_row_has_a_thread(x, which):
    for n, _, plan in plans(x, which):
        held = value(plan, "ROW_THREADS") * value(plan, "VECTORS") * (16 // x.itemsize)
        assert held == 0 or held >= n, (n, plan)


@kinds
def test_the_block_is_whole_rows_and_whole_warps(x, which):
    for n, _, plan in plans(x, which):
        threads = value(plan, "ROW_THREADS")
        assert plan.block == threads * plan.rows_per_block == value(plan, "BLOCK"), (n, plan)
        assert plan.block % 32 == 0, (n, plan)
        assert plan.block <= 512, (n, plan)
        # A row within a warp is added up by halves of a power of two, beyond by whole warps.
        assert threads % 32 == 0 or 32 % threads == 0, (n, plan)


@kinds
def test_shared_memory_is_within_the_limit(x, which):
    for n, limit, plan in plans(x, which):
        assert plan.shared_bytes <= limit, (n, plan)
        # The sums of the segments lie over what the chunks needed: 8 segments of 32 pairs.
        if plan.entry == "layer_norm_backward":
            assert plan.shared_bytes >= 8 * 32 * (8 if which == FLOAT_PAIRS else 16), (n, plan)


@pytest.mark.parametrize("x", [F16, BF16, F32])
def test_rows_of_8192_stay_in_registers_where_shared_memory_allows(x):
    plan = plan_backward(4096, 8192, x, x, DOUBLE, shared_limit=227 << 10)
    assert value(plan, "VECTORS") > 0
    assert value(plan, "SHARED_SUMS") == 1
    assert value(plan_backward(4096, 8192, x, x, DOUBLE), "VECTORS") == 0


@pytest.mark.parametrize(
    ("kib", "n", "resident"),
    [
        *((227, 5001, 1), (227, 8192, 1), (227, 8193, 0), (163, 5001, 1), (163, 8192, 1)),
        *((99, 4608, 1), (99, 4609, 0), (99, 5001, 0), (99, 8192, 0)),
    ],
)
def test_what_a_block_may_ask_for_decides_which_rows_stay_in_registers(kib, n, resident):
    plan = plan_backward(4096, n, F32, F32, DOUBLE, shared_limit=kib << 10)
    assert (value(plan, "VECTORS") > 0) == (value(plan, "SHARED_SUMS") == 1) == resident


@kinds
@pytest.mark.parametrize("rows", ROWS)
def test_chunks_cover_the_rows_once(x, which, rows):
    for n in LENGTHS:
        plan = plan_backward(rows, n, x, x, which)
        assert (plan.chunks - 1) * plan.chunk_rows < rows <= plan.chunks * plan.chunk_rows, (
            n,
            plan,
        )
        # A last chunk of fewer rows is legal; a row slot never straddles two chunks.
        assert plan.chunk_rows % plan.rows_per_block == 0, (n, plan)


@kinds
def test_the_sum_of_a_chunk_does_not_lose_a_digit_with_more_rows(x, which):
    """At most 512 additions one after the other: a float64 sum errs by 2**-44 of its terms."""
    for n, rows in itertools.product(LENGTHS, (65_536, 1_000_000, 1 << 30)):
        plan = plan_backward(rows, n, x, x, which)
        assert plan.chunk_rows <= 512 * plan.rows_per_block, (n, plan)


@kinds
def test_one_chunk_fits_what_the_generic_path_holds(x, which):
    """It has no partial sums to come back to, since one chunk needs no workspace."""
    for rows in range(1, 40):
        plan = plan_backward(rows, 1 << 20, x, x, which)
        assert value(plan, "VECTORS") == 0
        assert plan.chunks > 1 or rows <= _cuda_plan.GENERIC_ROWS


def test_one_chunk_of_more_is_refused(monkeypatch):
    monkeypatch.setattr(_cuda_plan, "_LEAST_ROWS", 2 * _cuda_plan.GENERIC_ROWS)
    with pytest.raises(ValueError, match="must have at most 16 rows, got 17"):
        plan_backward(17, 1 << 20, F32, F32, DOUBLE)
    # Nothing is summed, or the sums are in registers: nothing to come back to.
    assert plan_backward(17, 1 << 20, F32, F32, DOUBLE, summing=False).chunks == 1
    assert plan_backward(17, 64, F32, F32, DOUBLE).chunks == 1


@kinds
def test_partial_sums_are_a_small_part_of_the_traffic(x, which):
    for n in (1024, 4096, 65_536):
        plan = plan_backward(65_536, n, x, x, which)
        # Written once and read once, beside two reads and a write of every element. A quarter
        # of them are for float64 data, whose sums are twice as wide.
        assert 2 * plan.workspace_bytes < 0.25 * 3 * x.itemsize * 65_536 * n, (n, plan)


def test_bits_depend_on_nothing_but_shape_and_dtype():
    """No field of a plan comes from the device but for the limit on shared memory."""
    for n in (1, 100, 768, 4096):
        below = plan_backward(4096, n, F32, F32, DOUBLE)
        above = plan_backward(4096, n, F32, F32, DOUBLE, shared_limit=227 << 10)
        assert below == above


def test_dx_is_computed_alike_whether_or_not_anything_is_summed():
    with_sums = plan_backward(4096, 768, F32, F32, DOUBLE)
    without = plan_backward(4096, 768, F32, F32, DOUBLE, summing=False)
    assert with_sums.defines == without.defines
    assert without.workspace_bytes == 0


@kinds
def test_a_row_is_computed_alike_in_any_batch(x, which):
    for n in LENGTHS:
        backward = {plan_backward(rows, n, x, x, which).defines for rows in ROWS}
        forward = {plan_forward(rows, n, x, which).defines for rows in ROWS}
        assert len(backward) == len(forward) == 1, n


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), DOUBLE),
        ((9, 0), DOUBLE),
        ((10, 0), DOUBLE),
        ((8, 6), FLOAT_PAIRS),
        ((8, 9), FLOAT_PAIRS),
        # Blackwell Ultra has a hundredth of its float32 rate.
        ((10, 3), FLOAT_PAIRS),
        ((12, 0), FLOAT_PAIRS),
    ],
)
def test_arithmetic(capability, expected):
    x = np.zeros(1, np.float32)
    assert arithmetic(capability, x, None) == expected
    assert arithmetic(capability, x, np.zeros(1)) == DOUBLE_PAIRS


def test_mixed_dtypes_take_the_path_for_anything():
    assert value(plan_backward(8, 64, BF16, F32, DOUBLE), "VECTORS") == 0
    assert value(plan_forward(8, 64, F32, DOUBLE_PAIRS), "VECTORS") == 0


# ---- clusters ----

# From which n on nothing holds a row any more, in a cluster of 8: dtype, arithmetic, KiB of shared
# memory, forward, backward.
LONGEST = [
    (F32, DOUBLE, 227, 65_536, 65_536),
    (BF16, DOUBLE, 227, 65_536, 65_536),
    (F64, DOUBLE_PAIRS, 227, 32_768, 16_384),
    (F32, FLOAT_PAIRS, 99, 65_536, 36_864),
    (BF16, FLOAT_PAIRS, 99, 65_536, 36_864),
    (BF16, DOUBLE, 48, 65_536, 32_768),
]


@pytest.mark.parametrize(("x", "which", "kib", "forward", "backward"), LONGEST)
def test_a_cluster_holds_rows_eight_times_as_long(x, which, kib, forward, backward):
    limits = {"shared_limit": kib << 10, "cluster_limit": 8}
    for n in (forward, forward + 1):
        plan = plan_forward(4096, n, x, which, **limits)
        assert (plan.cluster == 8, value(plan, "VECTORS") > 0) == (n == forward,) * 2
    for n in (backward, backward + 1):
        plan = plan_backward(4096, n, x, x, which, **limits)
        assert (plan.cluster == 8, value(plan, "VECTORS") > 0) == (n == backward,) * 2


# Lines of the table of docs/how-to/gpu.md, what is planned, KiB of shared memory, blocks of a row.
DOCUMENTED = [
    ("forward, one block", "forward", 48, 1),
    ("forward, a cluster", "forward", 48, 8),
    ("backward, one block, 99 KiB", "backward", 99, 1),
    ("backward, one block, 163 or 227 KiB", "backward", 163, 1),
    ("backward, one block, 163 or 227 KiB", "backward", 227, 1),
    ("backward, a cluster, 99 KiB", "backward", 99, 8),
    ("backward, a cluster, 227 KiB", "backward", 227, 8),
]


@pytest.mark.parametrize(("line", "direction", "kib", "cluster"), DOCUMENTED)
def test_the_page_says_how_long_rows_are_read_once(pytestconfig, line, direction, kib, cluster):
    text = (pytestconfig.rootpath / "docs" / "how-to" / "gpu.md").read_text()
    (cells,) = (row.split("|")[2:5] for row in text.splitlines() if row.startswith(f"| {line} |"))
    of_cells = {
        0: ((F16, DOUBLE), (BF16, FLOAT_PAIRS)),
        1: ((F32, DOUBLE), (F32, FLOAT_PAIRS)),
        2: ((F64, DOUBLE_PAIRS),),
    }
    for at, cell in enumerate(cells):
        for x, which in of_cells[at]:
            limits = {"shared_limit": kib << 10, "cluster_limit": cluster}
            vectors = [
                value(
                    plan_forward(64, n, x, which, **limits)
                    if direction == "forward"
                    else plan_backward(64, n, x, x, which, **limits),
                    "VECTORS",
                )
                for n in (int(cell), int(cell) + 1)
            ]
            assert [count > 0 for count in vectors] == [True, False], (x, which, vectors)


@kinds
def test_the_blocks_of_a_cluster_have_every_column_and_no_more_than_they_hold(x, which):
    for n, limit in itertools.product(LENGTHS, LIMITS):
        limits = {"shared_limit": limit, "cluster_limit": 8}
        for plan in (
            plan_forward(4096, n, x, which, **limits),
            plan_backward(4096, n, x, x, which, **limits),
        ):
            assert plan.cluster == value(plan, "CLUSTER")
            assert plan.shared_bytes <= limit
            if plan.cluster == 1:
                continue
            threads = value(plan, "ROW_THREADS")
            held = threads * value(plan, "VECTORS") * (16 // x.itemsize)
            # Nobody has nothing to do, and one row at a time, in whole warps.
            assert (plan.cluster - 1) * held < n <= plan.cluster * held, (n, plan)
            assert threads == plan.block <= 512, (n, plan)
            assert plan.rows_per_block == 1, (n, plan)
            assert threads % 32 == 0, (n, plan)


def test_rows_that_a_block_holds_are_its_own():
    for n in (4096, 8192):
        plan = plan_backward(4096, n, F32, F32, DOUBLE, shared_limit=227 << 10, cluster_limit=8)
        assert plan == plan_backward(4096, n, F32, F32, DOUBLE, shared_limit=227 << 10)


def test_clusters_are_of_9_0_and_above():
    for capability in ((9, 0), (10, 0), (10, 3), (12, 0)):
        assert largest_cluster(capability) == 8
    for capability in ((7, 5), (8, 0), (8, 9)):
        assert largest_cluster(capability) == 1


def test_clusters_never_wait_for_one_another():
    """How many are resident is an estimate."""
    plan = plan_backward(4096, 65_536, F32, F32, DOUBLE, shared_limit=227 << 10, cluster_limit=8)
    assert final_mode(plan, 8, 1000) == TICKETS
    assert plan.segments == 8


def test_a_grid_is_of_whole_clusters():
    limits = {"shared_limit": 227 << 10, "cluster_limit": 8}
    backward = plan_backward(1024, 65_536, F32, F32, DOUBLE, **limits)
    forward = plan_forward(1024, 65_536, F32, DOUBLE, **limits)
    # 64 chunks of 16 rows: four turns for each of 16 clusters.
    assert backward.chunks == 64
    for resident, clusters in ((132, 16), (8, 1), (7, 1), (10_000, 64)):
        assert grid_blocks(backward, 1024, resident) == 8 * clusters
        if clusters < 64:
            assert grid_blocks(forward, 1024, resident) == 8 * clusters
    assert grid_blocks(forward, 3, 132) == 24


def test_every_rank_of_a_cluster_has_tickets_of_its_own():
    # The barrier's word, and for each of 8 ranks 8 segments and their end.
    assert _cuda_plan.COUNTERS >= 1 + 8 * (8 + 1)


# ---- the launch ----


def test_a_grid_that_cannot_be_resident_gets_no_barrier():
    plan = plan_backward(65_536, 1024, BF16, BF16, DOUBLE)
    assert final_mode(plan, 132, 132) == GRID_BARRIER
    assert final_mode(plan, 133, 132) == TICKETS
    assert final_mode(plan, 1, 0) == TICKETS
    assert final_mode(plan_backward(16, 1024, BF16, BF16, DOUBLE), 1, 132) == ONE_CHUNK


def test_the_grid_is_no_larger_than_its_work():
    backward = plan_backward(100, 1024, F32, F32, DOUBLE)
    assert grid_blocks(backward, 100, 1000) == backward.chunks
    assert grid_blocks(backward, 100, 3) == 3
    forward = plan_forward(100, 64, F32, DOUBLE)
    assert grid_blocks(forward, 100, 1000) == -(-100 // forward.rows_per_block)
    # A grid of no block at all is no launch.
    assert grid_blocks(forward, 0, 1000) == 1


def test_tickets_have_a_counter_each():
    for rows, n in itertools.product(ROWS, LENGTHS):
        plan = plan_backward(rows, n, F32, F32, DOUBLE)
        # The grid barrier, one for each of 8 segments, the ticket of the segments.
        assert 1 <= plan.segments <= 8 <= _cuda_plan.COUNTERS - 2
        assert plan.segments <= plan.chunks


def test_workspace_holds_partials_and_then_segments():
    plan = plan_backward(65_536, 1000, F32, F32, DOUBLE)
    partials = plan.chunks * 2 * 1000 * 8
    assert plan.workspace_bytes == partials + plan.segments * 2 * 1000 * 16
    packed = pack_parameters(plan, 65_536, 1000, partials=1 << 20)
    assert int.from_bytes(packed[14 * 8 : 15 * 8], "little") == (1 << 20) + partials


def test_pairs_are_aligned_behind_any_number_of_partials():
    for (x, which), n in itertools.product(KINDS, LENGTHS):
        plan = plan_backward(65_537, n, x, x, which)
        partials = _cuda_plan._partials_bytes(plan, n)
        assert partials == plan.chunks * 2 * n * (16 if which == DOUBLE_PAIRS else 8)
        assert partials % 16 == 0


def test_a_parameter_that_the_kernel_does_not_have():
    plan = plan_forward(1, 1, F32, DOUBLE)
    with pytest.raises(ValueError, match=r"must be those of layer_norm.cu, got \['gama'\]"):
        pack_parameters(plan, 1, 1, gama=0)


def test_parameters_are_those_of_the_source(pytestconfig):
    """Names and order of struct Parameters; eight bytes each, the integers at the end four."""
    source = (pytestconfig.rootpath / "src" / "stablenorm" / "cuda" / "layer_norm.cu").read_text()
    body = source.partition("struct Parameters {")[2].partition("};")[0]
    names = []
    for line in body.splitlines():
        declaration = line.partition("//")[0].strip().rstrip(";")
        names += [part.split()[-1].lstrip("*") for part in declaration.split(",") if part]
    assert tuple(names) == _cuda_plan.PARAMETER_NAMES
    assert len(pack_parameters(plan_forward(1, 1, F32, DOUBLE), 1, 1)) == 208
