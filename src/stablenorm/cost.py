"""
Floating-point operations and bytes of a layer or RMS norm, as formulas of rows, n and s.

Three programs are counted: the plain formula in NumPy, the reference, and the fused CPU kernel. They do
the same algebra, but differ in how often they move each byte. s is the bytes of an element of x, gamma,
beta and dy alike. A flop is an addition, subtraction, multiplication, division or square root of reals;
a fused multiply-add is two. Flops leave out what is done once per row, a part 1/n.
"""

from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import check_dtype, parse
from stablenorm.reference.equations import BLOCK

DIRECTIONS = ("forward", "backward")
# For forward and backward, each for at most 32 bits and for float64: the flops per element, as the page
# "Time and memory" counts them, and the words per element that the passes of plain NumPy move, or the
# blocks that the reference allocates.
PROGRAMS = {
    "plain NumPy": {"layer": (((8, 16), (8, 16)), ((11, 23), (11, 23))),
                    "rms": (((5, 11), (5, 11)), ((9, 20), (9, 20)))},
    "reference": {"layer": (((11, 3), (11, 3)), ((14, 7), (14, 7))),
                  "rms": (((5, 3), (5, 3)), ((10, 6), (10, 6)))},
    "fused CPU kernel": {"layer": (((9, 0), (60, 0)), ((18, 0), (104, 0))),
                         "rms": (((5, 0), (29, 0)), ((11, 0), (66, 0)))},
}  # fmt: skip


class Cost(NamedTuple):
    """
    The flops and bytes of one forward or one backward.

    `moved` is the bytes that memory must read and write where the arrays are larger than the
    caches; `held` is the new bytes held at the worst moment, results included.
    """

    flops: int
    moved: int
    held: int


def count_cost(
    program: str, direction: str, matrix: tuple[int, int], dtype: Any, kind: str = "layer"
) -> Cost:
    """
    Count what a program does, forward or backward, in flops, bytes moved and bytes held.

    Parameters
    ----------
    program : {"plain NumPy", "reference", "fused CPU kernel"}
        The program whose operations are counted.
    direction : {"forward", "backward"}
        The direction; all its outputs are computed.
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : dtype or str
        The dtype of x, gamma, beta and dy: float16, bfloat16, float32 or float64.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.

    Examples
    --------
    >>> from stablenorm.cost import count_cost
    >>> cost = count_cost("fused CPU kernel", "forward", (1000, 768), "float32")
    >>> cost.moved == 1000 * (8 * 768 + 24) + 8 * 768
    True
    """
    (rows, n), s, backward = matrix, _itemsize(dtype), DIRECTIONS.index(direction)
    flops, extra = PROGRAMS[program][kind][backward][s == 8]
    size = rows * n
    if program == "plain NumPy":
        # Elements of x, dy, y and dx have s bytes, all others c. At most four arrays of c exist at a time.
        c = max(s, 4)
        return Cost(flops * size, (2 * s + extra * c) * size, 4 * c * size)
    # A forward must read x, gamma and beta, and write y and the statistics. A backward must read dy, x,
    # the statistics and gamma, and write dx and the two sums.
    statistics, block = rows * _statistics(s, kind), 8 * min(max(1, BLOCK // n), rows) * n
    held = s * size + (2 * s * n if backward else statistics) + extra * block
    return Cost(flops * size, (2 + backward) * s * (size + n) + statistics, held)


def count_kept(matrix: tuple[int, int], dtype: Any, kind: str = "layer") -> dict[str, int]:
    """
    Count the bytes that must live from the forward to the backward, beside x and gamma.

    The keys name the ways to save a forward of `matrix`, rows and elements of a row; this package has the first.

    Examples
    --------
    >>> from stablenorm.cost import count_kept
    >>> next(iter(count_kept((1000, 768), "float32").items()))
    ('x itself, mean and rstd', 24000)
    """
    (rows, n), s = matrix, _itemsize(dtype)
    word, statistics = 16 if s == 8 else 8, ", mean and rstd" if kind == "layer" else " and rstd"
    return {
        f"x itself{statistics}": rows * _statistics(s, kind),
        "xhat and rstd, as accurate as the results": word * rows * (n + 1),
        "xhat and rstd, as plain NumPy keeps them": max(s, 4) * rows * (n + 1),
        "y itself and rstd: xhat = (y - beta) / gamma, and gamma may be 0": word * rows,
    }


def _statistics(s: int, kind: str) -> int:
    """Return bytes per row: two words of the mean (none for RMS norm), one of rstd; one more of each for float64."""
    return 8 * {"layer": (3, 5), "rms": (1, 2)}[kind][s == 8]


def _itemsize(dtype: Any) -> int:
    kind = parse(dtype)
    check_dtype("dtype", np.empty(0, kind))
    return kind.itemsize
