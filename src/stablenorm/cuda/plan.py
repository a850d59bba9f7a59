"""
How `layer_norm.cu` is compiled and launched for given data: arithmetic, threads, chunks, memory.

Everything that decides a bit of a result is a function of the dtypes, rows and n: never of the device,
of alignment or of what else runs. The grid, and who adds up the partial sums, depend on the device
and change no bit.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import FORMATS

Dtype = np.dtype[Any]

# The numbers that layer_norm.cu knows dtypes by.
_CODES = {each.dtype: code for code, each in enumerate(FORMATS)}

_VECTOR_BYTES = 16
_WARP = 32

# Threads of a block where several rows share it, or one row that they can hold in one vector each;
# and of the longest rows.
_BLOCK, _LONGEST_BLOCK = 256, 512

# Elements of x and of dy that a thread holds at once, by bytes of an element. One vector more and
# the compiler spills at 128 registers a thread, in the backward (tests/test_cuda_compile.py).
_ELEMENTS = {2: 8, 4: 8, 8: 2}

# Chunks of the backward: two blocks on each of 128 multiprocessors (132 on an H100: 97 % busy).
_CHUNKS = 256

# Rows of a chunk at least, so that writing the partial sums stays below a tenth of the traffic;
# and at most, for each row slot, so that a plain float64 sum errs by at most 2**-46 of its terms.
_LEAST_ROWS, _MOST_ROWS_PER_SLOT = 16, 128

# And at most in all, so that the projections of a chunk fit shared memory.
_MOST_ROWS = 512


class Kernel(NamedTuple):
    """What `layer_norm.cu` is compiled for: each field is the definition LN_ and its name."""

    forward: bool
    # Codes of dtypes. `dy` is that of x in a forward.
    x: int
    dy: int
    gamma: int
    beta: int
    # Pairs of float64 instead of float64.
    pairs: bool
    # Threads of a row, and rows that a block has in hand at a time.
    row_threads: int
    slots: int
    # 16-byte vectors of x that a thread holds; 0: columns in a loop.
    vectors: int
    # Blocks that are to fit a multiprocessor.
    least_blocks: int

    @property
    def entry(self) -> str:
        """Name of the compiled function."""
        return "layer_norm_forward" if self.forward else "layer_norm_backward"

    @property
    def defines(self) -> tuple[str, ...]:
        """Options for the compiler."""
        return tuple(f"-DLN_{name.upper()}={value:d}" for name, value in self._asdict().items())

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.row_threads * self.slots

    @property
    def columns(self) -> int:
        """Columns that a row's threads hold."""
        return self.row_threads * self.vectors * (_VECTOR_BYTES // FORMATS[self.x].dtype.itemsize)

    @property
    def number_bytes(self) -> int:
        """Bytes of a sum."""
        return 16 if self.pairs else 8

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: less than the 48 KiB that every device grants."""
        # Two turns of a sum for each warp; the sums of the row slots, or two projections of a row.
        numbers = 2 * (self.block // _WARP)
        if not self.forward:
            slots = self.slots * self.columns if self.slots > 1 else 0
            numbers += slots if self.vectors else 2 * _MOST_ROWS
        return numbers * self.number_bytes


class Chunks(NamedTuple):
    """Runs of neighboring rows whose sums are formed each by one block."""

    number: int
    rows: int


def choose_kernel(
    n: int, x: Dtype, dy: Dtype | None, gamma: Dtype | None, beta: Dtype | None, pairs: bool
) -> Kernel:
    """Return how to compile for rows of `n` elements. A forward has no `dy`."""
    vector, most = _VECTOR_BYTES // x.itemsize, _ELEMENTS[x.itemsize] * x.itemsize // _VECTOR_BYTES
    mixed = dy not in (None, x) or pairs != (x.itemsize == 8)
    if mixed or n > _LONGEST_BLOCK * most * vector:
        # Mixed dtypes, which are rare, are left to the path that takes anything.
        threads, vectors = _BLOCK, 0
    elif n <= _WARP * vector:
        threads, vectors = 1, 1
        while threads * vector < n:
            threads *= 2
    else:
        vectors = 1 if n <= _BLOCK * vector else most
        threads = _WARP * -(-n // (_WARP * vectors * vector))
    slots = max(1, _BLOCK // threads)
    # Two blocks of 256 or one of 512 on a multiprocessor: 128 registers a thread. Pairs of float64
    # for a vector of eight 16-bit elements take more.
    crowded = pairs and x.itemsize == 2
    least_blocks = 1 if crowded else max(1, _LONGEST_BLOCK // (threads * slots))

    def code(dtype: Dtype | None) -> int:
        return _CODES[x if dtype is None else dtype]

    codes = code(x), code(dy), code(gamma), code(beta)
    return Kernel(dy is None, *codes, pairs, threads, slots, vectors, least_blocks)


def cut(rows: int, slots: int) -> Chunks:
    """Cut `rows` into chunks for a kernel that has `slots` rows in hand."""
    most = max(_MOST_ROWS, _MOST_ROWS_PER_SLOT * slots)
    # A multiple of so many chunks keeps every multiprocessor as busy as they do.
    waves = max(1, -(-rows // (_CHUNKS * most)))
    least = max(_LEAST_ROWS, -(-rows // (_CHUNKS * waves)))
    size = -(-least // slots) * slots
    return Chunks(max(1, -(-rows // size)), size)


# struct Parameters of layer_norm.cu, field by field.
PARAMETERS = {
    **dict.fromkeys(("x", "dy", "gamma", "beta", "out", "dgamma", "dbeta"), "Q"),
    **dict.fromkeys(("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail", "exponent"), "Q"),
    **dict.fromkeys(("partials", "counter"), "Q"),
    **dict.fromkeys(("rows", "n", "x_stride", "dy_stride", "out_stride", "chunk_rows"), "q"),
    "eps": "d",
    **dict.fromkeys(("chunks", "barrier"), "i"),
}
FORMAT = "<" + "".join(PARAMETERS.values())


def pack_parameters(**values: float) -> bytes:
    """Return the bytes of the one argument of a kernel; what `values` lacks is 0."""
    # struct refuses one too many, if `values` has an unknown name.
    return struct.pack(FORMAT, *(dict.fromkeys(PARAMETERS, 0) | values).values())
