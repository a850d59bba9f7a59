"""What `make gpu` runs: cases of the correctness sweep, of the sanitizers and of the benchmark."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# Arrays of the size of x that must be moved: the forward reads x and writes y, the backward reads
# dy and x and writes dx. gamma, beta, their gradients and the statistics are not counted.
PASSES = {"forward": 2, "backward": 3}

# Around every boundary of the launch plan: lanes, vectors, warps, blocks, the generic path.
LENGTHS = (
    1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 257, 511, 512,
    768, 1000, 1023, 1024, 1025, 2048, 3072, 4095, 4096, 4097, 5120, 8191, 8192, 8193, 12_288,
    16_384, 32_767, 32_768, 65_535, 65_536,
)  # fmt: skip
# None, one, a tail of a warp, of a chunk, of 132 multiprocessors; and a few chunks a block.
ROWS = (0, 1, 2, 3, 31, 33, 127, 131, 132, 133, 1000, 4097)
VARIANTS = (
    "plain",
    "no gamma",
    "gamma float32",
    "one element later",
    "row stride",
    "mean 1e4",
    "subnormal",
    "a NaN row",
    "an Inf",
)
# Elements of a case at most: the reference on the host takes a second for them.
_MOST = 2**22

BENCH_SHAPES = (
    (8192, 1024), (8192, 4096), (4096, 8192), (65_536, 768), (1024, 65_536), (32_768, 256),
    (16_384, 2048), (2048, 16_384), (8192, 4095), (8192, 4097), (132, 8192), (16, 4096),
    (1, 65_536), (1_000_000, 64),
)  # fmt: skip
BENCH_DTYPES = ("bfloat16", "float32")

# A few rows each, so that a sanitizer is done with them in minutes: every kind of row path.
SANITIZED = tuple(
    (rows, n)
    for rows, n in (
        (3, 1), (70, 7), (33, 31), (70, 33), (19, 768), (70, 1000), (17, 4097), (5, 8200),
        (3, 65_536), (64, 3300), (70, 64), (40, 257),
    )
)  # fmt: skip


class Case(NamedTuple):
    """One problem of the correctness sweep."""

    rows: int
    n: int
    dtype: str
    variant: str

    @property
    def label(self) -> str:
        """The words for it, by which it is known to have been done."""
        return f"{self.rows}x{self.n} {self.dtype} {self.variant}"


def correctness_cases() -> list[Case]:
    """
    Return the sweep, pruned: every length, every number of rows, every variant, not all at once.

    Each pair of (length, dtype) meets three numbers of rows and three variants, in rotation.
    """
    cases = []
    turn = itertools.count()
    for n in LENGTHS:
        for dtype in DTYPES:
            for _ in range(3):
                k = next(turn)
                rows, variant = ROWS[5 * k % len(ROWS)], VARIANTS[k % len(VARIANTS)]
                while rows * n > _MOST:
                    rows = rows // 4
                cases.append(Case(rows, n, dtype, variant))
    return list(dict.fromkeys(cases))


def count_bytes(shape: tuple[int, int], dtype: str, direction: str) -> int:
    """Bytes that a pass must move."""
    return PASSES[direction] * math.prod(shape) * ITEMSIZE[dtype]


def buffer_sets(shape: tuple[int, int], dtype: str, cache_bytes: int) -> int:
    """Sets of arrays to go through in turn, so that none is in the cache when its turn comes."""
    one = count_bytes(shape, dtype, "backward")
    # Three times the cache in all, and three sets at least: replacement is not exactly by age.
    return max(3, math.ceil(3 * cache_bytes / one))
