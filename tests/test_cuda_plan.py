"""The launch plan of the CUDA kernels: what no test of the kernels themselves would notice."""

import itertools
import struct

import ml_dtypes
import numpy as np
import pytest

from stablenorm.cuda.plan import FORMAT, PARAMETERS, choose_kernel, cut

F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
# dtype of x and of dy (None: a forward), pairs of float64.
KINDS = [(x, dy, x == F64) for x in (F16, BF16, F32, F64) for dy in (x, None)]
KINDS += [(F32, F32, True), (F32, None, True), (BF16, F32, False)]
ROWS = (1, 2, 15, 16, 17, 33, 511, 4097, 65536, 131_073, 1_000_000, 1 << 30)
LENGTHS = (1, 2, 3, 8, 31, 33, 64, 65, 100, 129, 256, 257, 513, 768, 1024, 1025, 2047, 2049, 3000)
LENGTHS += (4096, 4097, 8192, 65_536, 1 << 20)
KERNELS = [
    (n, choose_kernel(n, x, dy, x, x, pairs))
    for (x, dy, pairs), n in itertools.product(KINDS, LENGTHS)
]


def test_threads_columns_and_memory():
    for n, kernel in KERNELS:
        assert kernel.columns == 0 or kernel.columns >= n
        assert kernel.block % 32 == 0
        assert kernel.block <= 512
        # A row within a warp is added up by halves of a power of two, beyond by whole warps.
        assert kernel.row_threads % 32 == 0 or 32 % kernel.row_threads == 0
        # The slots of a block are added up one vector a thread.
        assert kernel.slots == 1 or kernel.vectors <= 1
        # What every device grants unasked.
        assert kernel.shared_bytes <= 48 << 10
        if kernel.vectors == 0 and not kernel.forward:
            # Two projections of each row of the largest chunk, and two turns of eight warps.
            largest = max(cut(rows, kernel.slots).rows for rows in ROWS)
            assert kernel.shared_bytes >= (2 * largest + 16) * kernel.number_bytes


@pytest.mark.parametrize("rows", ROWS)
def test_chunks_cover_the_rows_once_and_lose_no_digit(rows):
    for slots in {kernel.slots for _, kernel in KERNELS}:
        chunks = cut(rows, slots)
        assert (chunks.number - 1) * chunks.rows < rows <= chunks.number * chunks.rows
        # A row slot never straddles two chunks.
        assert chunks.rows % slots == 0
        # At most 512 additions one after the other: a float64 sum errs by 2**-44 of its terms.
        assert chunks.rows <= 512 * slots


def test_parameters_are_those_of_the_source(pytestconfig):
    """Names, order and types of struct Parameters."""
    source = (pytestconfig.rootpath / "src" / "stablenorm" / "cuda" / "layer_norm.cu").read_text()
    body = source.partition("struct Parameters {")[2].partition("};")[0]
    found = {}
    for line in body.splitlines():
        declaration = line.partition("//")[0].strip().rstrip(";")
        kind = {"long long": "q", "double ": "d", "int": "i"}
        code = next((c for word, c in kind.items() if declaration.startswith(word)), "Q")
        for part in filter(None, declaration.split(",")):
            found[part.split()[-1].lstrip("*")] = "Q" if "*" in declaration else code
    assert list(found.items()) == list(PARAMETERS.items())
    # Without padding, as C++ lays it out.
    assert struct.calcsize(FORMAT) == struct.calcsize(FORMAT.replace("<", "@")) == 184
