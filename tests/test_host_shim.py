"""The host shim finds what it is there to find: each test plants one fault in a small kernel."""

import struct

import host_shim
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(bool(host_shim.why_not()), reason=host_shim.why_not())

# The sum of x (n): warps by shuffles, blocks in shared memory, the grid by tickets. `fault` plants
# one, 0 none: so that the compiler runs once.
KERNEL = """
extern "C" __global__ void total(
    const float* x, float* out, unsigned* tickets, float* partials, long long n, long long fault)
{
    extern __shared__ __align__(16) float slots[];
    __shared__ bool last;
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0xffffffffu;
    float sum = 0;
    if (fault == READS_EARLY) sum = partials[gridDim.x - 1];
    if (fault == MISALIGNED) sum = reinterpret_cast<const float2*>(x + threadIdx.x)->x;
    if (fault == DIVERGES && warp == 0) __syncthreads();
    if (fault == RETURNS_BEFORE_BARRIER && warp == 1) return;
    if (fault == RETURNS_BEFORE_SHUFFLE && threadIdx.x == 5) return;
    const long long stop = fault == READS_PAST_END ? n + 1 : n;
    for (long long col = blockIdx.x * blockDim.x + threadIdx.x; col < stop; col += gridDim.x * blockDim.x)
        sum = __fadd_rn(sum, x[col]);
    unsigned mask = all;
    if (fault == LACKS_LANE) mask = lane == 0 ? 0xfffffffeu : all;
    if (fault == READS_OTHER_LANE) mask = lane < 16 ? 0xffffu : 0xffff0000u;
    for (int lanes = 16; lanes; lanes /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(mask, sum, lanes));
    if (lane == 0) slots[fault == LEAVES_DYNAMIC ? warp + 1 : warp] = sum;
    if (fault == ONLY_SHUFFLE) __shfl_xor_sync(all, sum, 1);
    else if (fault != NO_BARRIER) __syncthreads();
    if (threadIdx.x == 0) {
        float of_block = 0;
        for (unsigned from = 0; from < blockDim.x / 32; ++from)
            of_block = __fadd_rn(of_block, slots[from]);
        partials[fault == WRITES_PAST_END ? blockIdx.x + 1 : blockIdx.x] = of_block;
        if (fault == SPINS) while (atomicAdd(tickets, 0) == 0) __nanosleep(20);
        if (fault == LEAVES_STATIC) (&last)[1] = true;
        if (fault != NO_RELEASE) __threadfence();
        last = atomicInc(tickets, gridDim.x - 1) == gridDim.x - 1;
        if (last && fault != NO_ACQUIRE) __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    float of_grid = fault == READS_OUTPUT ? *out : 0;
    for (unsigned block = 0; block < gridDim.x; ++block)
        of_grid = __fadd_rn(of_grid, partials[block]);
    *out = of_grid;
    if (fault == WRITES_INPUT) *const_cast<float*>(x) = 0;
}
"""
FAULTS = {
    "READS_PAST_END": "reads 4 bytes outside of every tensor, 0 bytes after the end of x",
    "WRITES_PAST_END": "writes 4 bytes outside of every tensor, 0 bytes after the end of partials",
    "WRITES_INPUT": "writes into x, byte 0",
    "READS_OUTPUT": "reads from out, byte 0",
    "READS_EARLY": "reads byte 8 of partials, which this launch has not written",
    "MISALIGNED": "misaligned",
    "LEAVES_DYNAMIC": "touches shared memory at byte 8, beyond",
    "LEAVES_STATIC": "touches shared memory .* beyond",
    "NO_BARRIER": "shared memory, which nobody wrote|no barrier is between",
    "ONLY_SHUFFLE": "no barrier is between",
    "DIVERGES": "different __syncthreads",
    "RETURNS_BEFORE_BARRIER": "__syncthreads",
    "RETURNS_BEFORE_SHUFFLE": "waits for lane 5, which has returned|waits at a shuffle",
    "LACKS_LANE": "lacks the own lane",
    "READS_OTHER_LANE": "reads lane 16, which is not in the mask",
    "SPINS": "no thread makes progress",
}
RACES = ("NO_RELEASE", "NO_ACQUIRE", "NO_BARRIER", "ONLY_SHUFFLE")
NUMBERS = {name: i + 1 for i, name in enumerate(dict.fromkeys([*FAULTS, *RACES]))}
DEFINES = [f"{name}={number}" for name, number in NUMBERS.items()]
GRID, BLOCK, N = 3, 64, 300


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("host_shim")


def memory():
    return {
        "x": np.arange(N, dtype=np.float32),
        "out": np.full(1, np.nan, np.float32),
        "tickets": np.zeros(1, np.uint32),
        "partials": np.full(GRID, np.nan, np.float32),
    }


def run(folder, fault=None, seed=0, cooperative=False):
    arrays = memory()
    rights = dict(zip(arrays, (1, 2, 3, 7), strict=True))
    tensors = [host_shim.tensor(name, array, rights[name]) for name, array in arrays.items()]
    addresses = [tensor.address for tensor in tensors]
    params = struct.pack("<4Q2q", *addresses, N, NUMBERS.get(fault, 0))
    record = host_shim.launch(
        host_shim.build(KERNEL, folder, defines=DEFINES, count=True),
        "total",
        GRID,
        BLOCK,
        4 * (BLOCK // 32),
        params,
        tensors=tensors,
        schedule_seed=seed,
        cooperative=cooperative,
    )
    return arrays, record


def test_the_kernel_is_right_under_every_schedule(folder):
    for seed in range(6):
        arrays, record = run(folder, seed=seed, cooperative=seed % 2 == 0)
        assert arrays["out"][0] == N * (N - 1) / 2
        assert arrays["tickets"][0] == 0
        assert record.traffic["x"].loaded == 4 * N
        assert record.traffic["partials"].stored == 4 * GRID
        # A sum for each element, five exchanges a thread, two warps a block, three blocks.
        assert record.operations["add"] == N + 5 * GRID * BLOCK + 2 * GRID + GRID


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(fault, folder):
    with pytest.raises(host_shim.LaunchError, match=FAULTS[fault]):
        run(folder, fault)
    # The launch that failed left threads in the middle of the kernel: the next one begins anew.
    assert run(folder)[0]["out"][0] == N * (N - 1) / 2


def test_float_atomics_do_not_compile(folder):
    # Their sum would depend on the schedule.
    with pytest.raises(RuntimeError, match="atomicAdd"):
        host_shim.build("__global__ void wrong(float* x) { atomicAdd(x, 1.0f); }", folder)


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(host_shim.shutil, "which", lambda name: None if name == "setarch" else name)
    assert host_shim.why_not() == ""
    assert "setarch" in host_shim.why_not_threads()
    monkeypatch.setattr(host_shim.shutil, "which", lambda _: None)
    assert host_shim.why_not() == "the host shim needs g++"


def test_parameters_of_another_size_are_refused(folder):
    kernel = host_shim.build(KERNEL, folder, defines=DEFINES, count=True)
    with pytest.raises(ValueError, match="total takes 48 bytes of parameters, got 8"):
        host_shim.launch(kernel, "total", 1, 32, 8, bytes(8))


# ---- clusters ----

# Each thread gives its number to the same thread of the next block of the cluster.
RING = """
extern "C" __global__ void __cluster_dims__(SIZE, 1, 1) ring(float* out, long long fault) {
    extern __shared__ __align__(16) float slots[];
    const unsigned rank = blockIdx.x % SIZE, next = fault == BEYOND ? SIZE : (rank + 1) % SIZE;
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (fault != EARLY) __cluster_sync();
    if (fault == LEAVES && rank == 2) return;
    if (fault == OUTLIVED && rank == 1) return;
    float* slot = static_cast<float*>(__cluster_map_shared_rank(slots + threadIdx.x, next));
    if (fault == PAST_END) slot += blockDim.x;
    if (fault == OUTLIVED)
        for (int turn = 0; turn < 100 && rank == 0; ++turn) __syncthreads();
    *slot = at;
    if (fault == OUTLIVED) return;
    if (fault == OWN_BARRIER) __syncthreads();
    else if (fault == TWO_LINES && rank == 1) __cluster_sync();
    else __cluster_sync();
    out[at] = slots[threadIdx.x];
    if (fault == REUSED) *slot = 0;
}
"""
OF_CLUSTERS = {
    "EARLY": "block [0-9], which has not begun",
    "BEYOND": "asks for block 3 of a cluster of 3",
    "LEAVES": "others wait at a barrier of the cluster|which has returned",
    "OUTLIVED": "touches shared memory of block [14], which has returned",
    "PAST_END": "at byte 128, beyond what was asked for, of another block of the cluster",
    "OWN_BARRIER": "no barrier is between|nobody wrote",
    "TWO_LINES": "different barriers of it",
    "REUSED": "which thread [0-9]+ of another block (wrote|read): no barrier is between",
}
SIZE = 3
RING_DEFINES = [f"SIZE={SIZE}", *(f"{name}={i + 1}" for i, name in enumerate(OF_CLUSTERS))]


def run_ring(folder, fault=None, seed=0):
    out = np.full(2 * SIZE * 32, np.nan, np.float32)
    place = host_shim.tensor("out", out, 2)
    number = 0 if fault is None else 1 + list(OF_CLUSTERS).index(fault)
    host_shim.launch(
        host_shim.build(RING, folder, defines=RING_DEFINES),
        "ring",
        2 * SIZE,
        32,
        4 * 32,
        struct.pack("<Qq", place.address, number),
        tensors=[place],
        schedule_seed=seed,
        cluster=SIZE,
    )
    return out.reshape(2, SIZE, 32)


def test_blocks_of_a_cluster_reach_one_another_under_every_schedule(folder):
    numbers = np.arange(2 * SIZE * 32).reshape(2, SIZE, 32)
    for seed in range(6):
        np.testing.assert_array_equal(run_ring(folder, seed=seed), np.roll(numbers, 1, axis=1))


@pytest.mark.parametrize("fault", OF_CLUSTERS)
def test_finds_between_blocks(fault, folder):
    def under_any_schedule():
        for seed in range(6):
            run_ring(folder, fault, seed)

    with pytest.raises(host_shim.LaunchError, match=OF_CLUSTERS[fault]):
        under_any_schedule()


def test_a_grid_is_of_whole_clusters(folder):
    kernel = host_shim.build(RING, folder, defines=RING_DEFINES)
    with pytest.raises(ValueError, match="must be a multiple of the cluster, got 4 and 3"):
        host_shim.launch(kernel, "ring", 4, 32, 128, bytes(16), cluster=SIZE)


# ---- under ThreadSanitizer ----

needs_threads = pytest.mark.skipif(
    bool(host_shim.why_not_threads()), reason=host_shim.why_not_threads()
)


def run_threads(folder, fault=None):
    pointers = [(8 * i, name, 0) for i, name in enumerate(memory())]
    params = struct.pack("<4Q2q", 0, 0, 0, 0, N, NUMBERS.get(fault, 0))
    job = host_shim.Job("total", GRID, BLOCK, 8, params, memory(), pointers, launches=2)
    return host_shim.launch_threads(host_shim.build_threads(KERNEL, folder, defines=DEFINES), job)


@needs_threads
def test_threads_are_clean(folder):
    arrays, report = run_threads(folder)
    assert report == ""
    assert arrays["out"][0] == N * (N - 1) / 2


@needs_threads
@pytest.mark.parametrize("fault", RACES)
def test_threads_report_the_race(fault, folder):
    _, report = run_threads(folder, fault)
    assert "data race" in report
