"""The host shim finds what it is there to find: each test plants one fault in a small kernel."""

import struct

import host_shim
import numpy as np
import pytest
from host_shim import READ, WRITE, Tensor

pytestmark = host_shim.needs_shim

# The sum of x (n): warps by shuffles, blocks in shared memory, the grid by tickets. `fault` plants
# one, 0 none: so that the compiler runs once.
KERNEL = """
struct alignas(16) Two { double x, y; };
struct Parameters {
    const double* x; double* out; unsigned* tickets; double* partials; long long n, fault;
};
extern "C" __global__ void total(const Parameters p) {
    extern __shared__ __align__(16) double slots[];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0xffffffffu;
    const long long fault = p.fault;
    double sum = 0;
    if (fault == READS_EARLY) sum = p.partials[gridDim.x - 1];
    if (fault == MISALIGNED) sum = reinterpret_cast<const Two*>(p.x + threadIdx.x)->x;
    if (fault == DIVERGES && warp == 0) __syncthreads();
    if (fault == RETURNS_BEFORE_BARRIER && warp == 1) return;
    if (fault == RETURNS_BEFORE_SHUFFLE && threadIdx.x == 5) return;
    const long long stop = fault == READS_PAST_END ? p.n + 1 : p.n;
    for (long long col = blockIdx.x * 64 + threadIdx.x; col < stop; col += gridDim.x * 64)
        sum += p.x[col];
    for (int lanes = 16; lanes; lanes /= 2)
        sum += __shfl_xor_sync(fault == HALF_A_WARP ? 0xffffu : all, sum, lanes);
    if (lane == 0) slots[fault == LEAVES_SHARED ? warp + 1 : warp] = sum;
    if (fault == ONLY_SHUFFLE) __shfl_xor_sync(all, sum, 1);
    else if (fault != NO_BARRIER) __syncthreads();
    if (threadIdx.x == 32) p.partials[blockIdx.x + (fault == WRITES_PAST_END)] = slots[0] + slots[1];
    if (fault == WRITTEN_BY_TWO) p.partials[0] = 0;
    if (fault == OVERWRITES && threadIdx.x == 63) slots[0] = 0;
    if (fault != NO_ORDER_IN_BLOCK) __syncthreads();
    if (threadIdx.x != 0) return;
    if (fault == SPINS) while (atomicAdd(p.tickets, 0) == 0) __nanosleep(20);
    if (fault != NO_RELEASE) __threadfence();
    const bool last = atomicAdd(p.tickets, 1) == gridDim.x - 1;
    if (fault != NO_ACQUIRE) __threadfence();
    if (!last) return;
    double of_grid = fault == READS_OUTPUT ? *p.out : 0;
    for (unsigned block = 0; block < gridDim.x; ++block) of_grid += p.partials[block];
    *p.out = of_grid;
    if (fault == WRITES_INPUT) *const_cast<double*>(p.x) = 0;
}
"""
FAULTS = {
    "READS_PAST_END": "reads 8 bytes outside of every tensor",
    "WRITES_PAST_END": "writes 8 bytes outside of every tensor",
    "WRITES_INPUT": "writes into x, byte 0",
    "READS_OUTPUT": "reads from out, byte 0",
    "READS_EARLY": "reads byte 16 of partials, which nobody wrote",
    "MISALIGNED": "misaligned",
    "LEAVES_SHARED": "writes 8 bytes outside of every tensor",
    "NO_BARRIER": "shared memory, which (nobody wrote|block . wrote: a race)",
    "ONLY_SHUFFLE": "shared memory, which (nobody wrote|block . wrote: a race)",
    "OVERWRITES": "byte 0 of shared memory, which block . (read|wrote): a race",
    "WRITTEN_BY_TWO": "writes byte 0 of partials, which block . wrote: a race",
    "NO_ORDER_IN_BLOCK": "reads byte .* of partials, which block . wrote: a race",
    "NO_RELEASE": "reads byte .* of partials, which block . wrote: a race",
    "NO_ACQUIRE": "reads byte .* of partials, which block . wrote: a race",
    "DIVERGES": "different __syncthreads, lines",
    "RETURNS_BEFORE_BARRIER": "waits at __syncthreads",
    "RETURNS_BEFORE_SHUFFLE": "waits at shuffles",
    "HALF_A_WARP": "less than a warp, mask 0000ffff",
    "SPINS": "no thread makes progress",
}
DEFINES = tuple(f"{name}={number}" for number, name in enumerate(FAULTS, 1))
GRID, BLOCK, N = 3, 64, 300
RIGHTS = {"x": READ, "out": WRITE, "tickets": READ | WRITE, "partials": READ | WRITE}


def run(builds, fault=None, seed=0, cooperative=False):
    arrays = {
        "x": np.arange(N, dtype=np.float64),
        "out": np.full(1, np.nan),
        "tickets": np.zeros(2, np.uint32),
        "partials": np.full(GRID, np.nan),
    }
    tensors = [Tensor(k, a.ctypes.data, a.nbytes, RIGHTS[k]) for k, a in arrays.items()]
    number = 0 if fault is None else 1 + list(FAULTS).index(fault)
    parameters = struct.pack("<4Q2q", *(t.address for t in tensors), N, number)
    kernel = host_shim.build(KERNEL, builds, "total", DEFINES)
    sizes = GRID, BLOCK, 8 * (BLOCK // 32), parameters, tensors
    return arrays, host_shim.launch(kernel, *sizes, seed=seed, cooperative=cooperative)


def test_the_kernel_is_right_under_every_schedule(builds):
    for seed in range(6):
        arrays, traffic = run(builds, seed=seed, cooperative=seed % 2 == 0)
        assert arrays["out"][0] == N * (N - 1) / 2
        x, _, _, partials = traffic
        assert (x[0].sum(), partials[1].sum()) == (8 * N, 8 * GRID)


@pytest.mark.parametrize("fault", FAULTS)
def test_finds(fault, builds):
    with pytest.raises(host_shim.LaunchError, match=FAULTS[fault]):
        run(builds, fault)
    # The launch that failed left threads in the middle of the kernel: the next one begins anew.
    assert run(builds)[0]["out"][0] == N * (N - 1) / 2


def test_a_race_is_found_whoever_comes_first(builds):
    messages = ""
    for seed in range(8):
        with pytest.raises(host_shim.LaunchError, match="a race") as caught:
            run(builds, "OVERWRITES", seed)
        messages += str(caught.value)
    assert "writes byte 0" in messages
    assert "reads byte 0" in messages


def test_float_atomics_do_not_compile(builds):
    # Their sum would depend on the schedule.
    text = 'extern "C" __global__ void wrong(float* x) { atomicAdd(x, 1.0f); }'
    with pytest.raises(RuntimeError, match="atomicAdd"):
        host_shim.build(text, builds, "wrong")
