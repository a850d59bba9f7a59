"""
How `layer_norm.cu` is compiled and launched for given data: which kernel, threads, chunks, memory.

Everything that decides a bit of a result is a function of the dtypes, rows and n: never of the device,
of alignment or of what else runs. The grid, the rows on their way, and who adds up the partial sums
depend on the device and change no bit.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

Dtype = np.dtype[Any]

_VECTOR_BYTES = 16
_WARP = 32
_BLOCK = 256

# Longest rows of the fast kernels, in the forward 32 elements for each of 512 threads; and of a block in the
# backward, two sums over rows for each column in half of the registers of a multiprocessor.
_LONGEST, _LONGEST_PART = 16384, 4096

# Longest rows that a warp holds in the backward, 16 elements a lane; beyond, it has warps of three kinds.
_SHORT = 512

# Elements of a thread beside its sums over rows: with 8, at most 80 registers.
_ELEMENTS = 8

# Chunks of the backward for each block of a multiprocessor: with 132 of them, 97 % are busy.
_CHUNKS = 128

# Rows of a chunk at most, for each slot of a block, so that a plain float64 sum errs by at most 2**-46 of
# its terms; and at most otherwise, so that the row sums of a chunk fit shared memory.
_MOST_ROWS_PER_SLOT, _MOST_ROWS = 128, 512

# Shared memory of a multiprocessor that CUDA keeps for each block.
_RESERVED = 1024


class Kernel(NamedTuple):
    """Compile-time configuration of `layer_norm.cu`: each field is the definition LN_ and its name."""

    forward: bool
    # Names of the dtypes of x (of y, dy and dx too), gamma (and dgamma), beta (and dbeta).
    x: str
    gamma: str
    beta: str
    # Whether the arithmetic is that of pairs.
    pairs: bool
    # Elements of a row, or of each of the equal parts that blocks share; 0: the general kernel, for any number.
    n: int = 0
    parts: int = 1
    # Threads of a row, and rows that a block has in hand at a time.
    row_threads: int = _BLOCK
    slots: int = 1
    # Fast kernels: 16-byte vectors of x that a thread has, whether they begin at multiples of 16 bytes, warps that
    # find row sums, beside the threads of the row, and rows on their way.
    vectors: int = 1
    aligned: bool = False
    row_warps: int = 0
    stages: int = 0
    # A block, and how many of them are to fit a multiprocessor.
    threads: int = _BLOCK
    shared_bytes: int = 0
    least_blocks: int = 2

    @property
    def entry(self) -> str:
        """Name of the compiled function."""
        return "layer_norm_forward" if self.forward else "layer_norm_backward"

    @property
    def defines(self) -> tuple[str, ...]:
        """Definitions for the compiler."""
        fields = {"entry": self.entry, **self._asdict()}.items()
        return tuple(
            f"LN_{name.upper()}={int(value) if isinstance(value, bool) else value}"
            for name, value in fields
        )

    @property
    def number_bytes(self) -> int:
        """Bytes of a sum: pairs for float64, else float64."""
        return 16 if self.pairs else 8

    def count_blocks(self, chunks: int, most: int) -> int:
        """Return the blocks of a grid: `most` at most, but no fewer than share a row."""
        return max(1, min(chunks, most // self.parts)) * self.parts

    def counter_bytes(self, grid: int) -> int:
        """Return the bytes of the counter, and of the boxes behind it by which blocks that share rows talk."""
        return 32 + (64 * grid * self.row_warps * self.parts if self.parts > 1 else 0)


def choose_kernel(
    n: int,
    forward: bool,
    x: Dtype,
    gamma: Dtype | None,
    beta: Dtype | None,
    shared: int = 227 << 10,
    aligned: bool = True,
) -> Kernel:
    """
    Return how to compile for rows of `n`.

    A block may have `shared` bytes of shared memory, at least 99 KiB; rows that are `aligned` begin at multiples of
    16 bytes.
    """
    names = [(x if dtype is None else dtype).name for dtype in (x, gamma, beta)]
    kernel = Kernel(forward, names[0], names[1], names[2], x.itemsize == 8)
    vector = _VECTOR_BYTES // x.itemsize
    parts = 1 if forward or n <= _LONGEST_PART else 2 if n <= 2 * _LONGEST_PART else 4
    odd = parts > 1 and n % (parts * vector) > 0
    if kernel.pairs or n > _LONGEST or odd:
        return _general(kernel, n, vector)
    plan = _forward if forward else _warps if n > _SHORT else _short
    kernel, n = kernel._replace(n=n // parts, parts=parts, aligned=aligned), n // parts
    return plan(kernel, -(-n // vector), vector, shared)


def _staged(kernel: Kernel, fixed: int, stage: int, most: int, shared: int) -> Kernel:
    """Return a kernel with as many stages as fit beside `fixed` bytes."""
    room = (shared + _RESERVED) // kernel.least_blocks - _RESERVED
    stages = min(most, (room - fixed) // stage)
    return kernel._replace(stages=stages, shared_bytes=fixed + stages * stage)


def _forward(kernel: Kernel, count: int, vector: int, shared: int) -> Kernel:
    # Few threads, many elements each, several rows a block: latencies hide behind other rows.
    threads = min(512, _lanes(-(-count // (4 if count > 64 else 2))))
    vectors = -(-count // threads)
    slots = max(1, (_BLOCK if threads <= 64 else 2 * _BLOCK) // threads)
    block = threads * slots
    kernel = kernel._replace(
        row_threads=threads, slots=slots, vectors=vectors, threads=block, least_blocks=1
    )
    tables = 16 * threads * vectors * vector if kernel.n <= 4096 else 0
    stage = _VECTOR_BYTES * vectors * block
    most = min(4, (96 << 10) // stage)
    return _staged(kernel, tables + block + 8 * slots, stage, most, shared)


def _short(kernel: Kernel, count: int, vector: int, shared: int) -> Kernel:
    threads = min(_WARP, _lanes(-(-count * vector // _ELEMENTS)))
    vectors = -(-count // threads)
    blocks = 2 if vectors * vector <= _ELEMENTS else 1
    kernel = kernel._replace(
        row_threads=threads, slots=_BLOCK // threads, vectors=vectors, least_blocks=blocks
    )
    stage = 2 * _VECTOR_BYTES * vectors * _BLOCK
    # gamma in float64; a vector of sums of each thread.
    fixed = 8 * vector * (threads * vectors + _BLOCK)
    return _staged(kernel, fixed, stage, 4, shared)


def _warps(kernel: Kernel, count: int, vector: int, shared: int) -> Kernel:
    vectors = _ELEMENTS // vector
    threads = _lanes(-(-count // vectors))
    blocks = 2 if threads <= 128 else 1
    kernel = kernel._replace(row_threads=threads, vectors=vectors, least_blocks=blocks)
    # gamma in float64 and float32; of a stage x and dy, a record of 48 bytes and three barriers.
    fixed, stage = 12 * count * vector, 2 * _VECTOR_BYTES * count + 48 + 24
    # Each stage belongs to one row warp. Odd rows take as many to ask for them. 20 warps leave 96 registers a
    # thread, 24 leave 80.
    odd, columns = kernel.n % vector != 0, threads // _WARP
    most = 4 if odd or blocks == 2 else 19 - columns if columns < 16 else 7
    stages = _staged(kernel, fixed, stage, 16, shared).stages
    warps = min(stages, 8, most)
    block = threads + _WARP * (warps + (warps if odd else 1))
    kernel = kernel._replace(row_warps=warps, threads=block)
    return _staged(kernel, fixed, stage, stages // warps * warps, shared)


def _general(kernel: Kernel, n: int, vector: int) -> Kernel:
    if n <= 4 * _WARP * vector:
        kernel = kernel._replace(row_threads=_WARP, slots=_BLOCK // _WARP)
    # Two turns of a sum for each warp; the sums of the slots, and the rows of a chunk: four numbers and 16 bytes each.
    numbers = 2 * (_BLOCK // _WARP) + (0 if kernel.forward else _BLOCK * vector + 4 * _MOST_ROWS)
    rows = 0 if kernel.forward else 16 * _MOST_ROWS
    return kernel._replace(shared_bytes=numbers * kernel.number_bytes + rows)


def _lanes(threads: int) -> int:
    """Round up to whole warps, or below a warp to a power of two."""
    return -(-threads // _WARP) * _WARP if threads > _WARP // 2 else 1 << (threads - 1).bit_length()


def cut(rows: int, kernel: Kernel) -> tuple[int, int]:
    """Return the number of chunks, runs of neighboring rows whose sums one block forms; and the rows of each."""
    if kernel.forward:
        return -(-rows // kernel.slots), kernel.slots
    most = max(_MOST_ROWS, _MOST_ROWS_PER_SLOT * kernel.slots * (kernel.n > 0))
    number = _CHUNKS * kernel.least_blocks // kernel.parts
    # A multiple of so many chunks keeps every multiprocessor as busy as they do.
    waves = max(1, -(-rows // (number * most)))
    size = -(-rows // (number * waves * kernel.slots)) * kernel.slots
    return -(-rows // size), size


# struct Parameters of layer_norm.cu: addresses, integers and, at the end, eps, of eight bytes each.
_PARAMETERS = struct.Struct("22qd")


def pack(*values: float) -> np.ndarray[Any, Any]:
    """Return the fields of struct Parameters as an array of one element."""
    # A third of the time of np.array.
    return np.frombuffer(_PARAMETERS.pack(*values), f"V{_PARAMETERS.size}")
