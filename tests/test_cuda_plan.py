"""The launch plan of the CUDA kernels: what no test of the kernels themselves would notice."""

import itertools

import pytest

from stablenorm.cuda.plan import choose_kernel, cut
from stablenorm.formats import FORMATS, parse

DTYPES = F16, BF16, F32, F64 = [form.dtype for form in FORMATS]
KINDS = list(itertools.product((True, False), DTYPES))
ROWS = (1, 2, 15, 16, 17, 33, 511, 4097, 65536, 131_073, 1_000_000, 1 << 30)
LENGTHS = (
    1, 2, 3, 8, 31, 33, 64, 65, 100, 129, 256, 257, 385, 513, 768, 776, 1024, 1025, 2047, 3000,
    4095, 4096, 4097, 8192, 16_384, 16_385, 65_536, 1 << 20,
)  # fmt: skip
# Shared memory of compute capability 9.0; of 8.6 and 12.0, which have the least.
SHARED = 227 << 10, 99 << 10
KERNELS = [
    (n, shared, choose_kernel(n, forward, x, x, x, shared))
    for (forward, x), n, shared in itertools.product(KINDS, LENGTHS, SHARED)
]


def test_threads_columns_and_memory():
    for n, shared, kernel in KERNELS:
        vector = 16 // parse(kernel.x).itemsize
        assert not kernel.n or kernel.row_threads * kernel.vectors * vector >= n / kernel.parts
        assert kernel.threads % 32 == 0
        assert kernel.threads <= 1024
        # A row within a warp is added up by halves of a power of two, beyond by whole warps.
        assert kernel.row_threads % 32 == 0 or 32 % kernel.row_threads == 0
        assert kernel.shared_bytes <= shared
        if not kernel.forward:
            # The end of the backward needs eight warps, and a pair of float64 for each thread.
            assert kernel.threads >= 256
            assert kernel.shared_bytes >= 16 * kernel.threads
        if kernel.row_warps:
            # A stage with two owners hangs or reads what is not there.
            assert kernel.stages % kernel.row_warps == 0
        if not kernel.n and not kernel.forward:
            # The rows of the largest chunk, and two turns of eight warps.
            largest = max(cut(rows, kernel)[1] for rows in ROWS)
            assert kernel.shared_bytes >= (4 * largest + 16) * kernel.number_bytes + 16 * largest


def test_the_device_decides_no_bit():
    for n, _, kernel in KERNELS:
        x = parse(kernel.x)
        small, large = (choose_kernel(n, kernel.forward, x, x, x, shared) for shared in SHARED)
        free = {"stages": 0, "row_warps": 0, "threads": 0, "shared_bytes": 0}
        assert small._replace(**free) == large._replace(**free), n


@pytest.mark.parametrize("rows", ROWS)
def test_chunks_cover_the_rows_once_and_lose_no_digit(rows):
    for kernel in {kernel for *_, kernel in KERNELS if not kernel.forward}:
        number, size = cut(rows, kernel)
        assert (number - 1) * size < rows <= number * size
        # A row slot never straddles two chunks.
        assert size % kernel.slots == 0
        # At most 512 additions one after the other: a float64 sum errs by 2**-44 of its terms.
        assert size <= 512 * kernel.slots
        if rows < 1 << 16:
            assert number <= 128 * kernel.least_blocks


def test_few_rows_are_chunks_of_one():
    assert cut(16, choose_kernel(4096, False, F32, F32, F32)) == (16, 1)
