"""
Floating-point operations and bytes of a layer or RMS norm, as formulas of rows, n and s.

Three programs are counted: the plain formula in NumPy, the reference, and the fused CPU kernel. They do
the same algebra. What tells them apart is how often each byte is moved. s is the bytes of an element of
x, gamma, beta and dy alike. A flop is an addition, subtraction, multiplication, division or square root
of reals; a fused multiply-add is two. Work done once per row (a division, a root) is left out of the
flops: it is a part 1/n.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import check_dtype, parse

DIRECTIONS = ("forward", "backward")
# Elements of a block of the reference, `reference.blocks.BLOCK`.
_BLOCK = 1 << 15


class Cost(NamedTuple):
    """
    The work of one forward or one backward.

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
    Count what a program does, forward or backward.

    Parameters
    ----------
    program : {"plain NumPy", "reference", "fused CPU kernel"}
        Whose operations.
    direction : {"forward", "backward"}
        All outputs of it.
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : dtype or str
        Of x, gamma, beta and dy alike: float16, bfloat16, float32 or float64.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.

    Returns
    -------
    Cost
        Flops, bytes moved and bytes held.

    Examples
    --------
    >>> from stablenorm.cost import count_cost
    >>> cost = count_cost("fused CPU kernel", "forward", (1000, 768), "float32")
    >>> cost.moved == 1000 * (8 * 768 + 24) + 8 * 768
    True
    """
    both = PROGRAMS[program](*matrix, _itemsize(dtype), kind == "layer")
    return both[DIRECTIONS.index(direction)]


def count_kept(matrix: tuple[int, int], dtype: Any, kind: str = "layer") -> dict[str, int]:
    """
    Count the bytes that must live from the forward to the backward, beside x and gamma.

    By what is kept, of so many rows and elements of a row in `dtype`; this package keeps the first.

    Examples
    --------
    >>> from stablenorm.cost import count_kept
    >>> next(iter(count_kept((1000, 768), "float32").items()))
    ('x itself, mean and rstd', 24000)
    """
    rows, n = matrix
    s, is_layer = _itemsize(dtype), kind == "layer"
    word = 16 if s == 8 else 8
    return {
        "x itself, mean and rstd" if is_layer else "x itself and rstd": _statistics(s, is_layer)
        * rows,
        "xhat and rstd, as accurate as the results": word * rows * n + word * rows,
        "xhat and rstd, as plain NumPy keeps them": (rows * n + rows) * max(s, 4),
        "y itself and rstd: xhat = (y - beta) / gamma, and gamma may be 0": word * rows,
    }


def _plain(rows: int, n: int, s: int, is_layer: bool) -> tuple[Cost, Cost]:
    """
    Count the two-pass formula: NumPy operations on whole arrays, each a pass over memory.

    It computes in c bytes per element: 8 for float64, else 4. A pass reads its operands and writes its result, in c
    but for x, dy, y and dx. Forward: x to c; sum of x 1, x - mean 1, its square 1, sum of squares 1, x - mean again 1,
    times rstd 1, times gamma 1, plus beta 1; y rounded: 8 flops, 16 c. Backward: dy to c; g 1, g * xhat 1, sums of
    both 2, g - mean(g) 1, xhat times its mean 1, the difference 1, times rstd 1, dy * xhat 1, dgamma 1, dbeta 1; dx
    rounded: 11 flops, 23 c. RMS norm lacks the three passes of the mean, and the two of mean(g).

    Four arrays live at the addition of beta: x in c, xhat, gamma * xhat and the sum; and four while dx is formed: dy
    in c, g, and two of the terms.
    """
    c, size = max(s, 4), rows * n
    passes = ((8, 16), (11, 23)) if is_layer else ((5, 11), (9, 20))
    forward, backward = (
        Cost(flops * size, (2 * s + wide * c) * size, 4 * c * size) for flops, wide in passes
    )
    return forward, backward


def _reference(rows: int, n: int, s: int, is_layer: bool) -> tuple[Cost, Cost]:
    """
    Count the reference, which takes blocks of rows that stay in the second-level cache.

    Flops per element, in float64. Forward: sum of x 1, x - mean 1, sum of that 1, less its mean 1,
    square 1, sum of squares 1, times rstd 1, times gamma 1, plus beta 1: 9. Backward: xhat from x 3,
    dy * xhat 1, dgamma 1, dbeta 1, g 1, sum of g 1, g - mean(g) 1, times xhat 1, sum of that 1, xhat
    times its mean 1, the difference 1, times rstd 1: 14. On float64 data each of these is done on
    pairs of float64, where an addition takes 20 flops and a product 20 to 24: 184 and 288. RMS norm has four
    additions less in each: 5 and 10, and on pairs 104 and 208, in 12 and 19 blocks.

    Memory moves what it must. Held are the results, and temporary blocks of 8 bytes per element: 3
    forward and 6 backward, on pairs 14 and 21.
    """
    flops, blocks = ((184, 288), (14, 21)) if s == 8 else ((9, 14), (3, 6))
    if not is_layer:
        flops, blocks = ((104, 208), (12, 19)) if s == 8 else ((5, 10), blocks)
    block = 8 * min(max(1, _BLOCK // n), rows) * n
    return _least(rows, n, s, is_layer, flops, (blocks[0] * block, blocks[1] * block))


def _fused(rows: int, n: int, s: int, is_layer: bool) -> tuple[Cost, Cost]:
    """
    Count the fused CPU kernel: a row is read from memory once and then found in the caches.

    Flops per element, in float64. Forward: x - k 1, its sum 1, its square added 2, and for y x - mean
    1, times rstd plus a shift 2, times gamma plus beta 2: 9; on float64 data in pairs 29 + 31 = 60.
    Backward: xhat 3, g - m 2, its sum 1, their product added 2, dbeta 1, dy * xhat added to dgamma 2;
    dx, which forms x - mean and g - m again, 7: 18; in pairs 73 + 31 = 104.

    RMS norm, forward: its square added 2, times rstd 1, times gamma plus beta 2: 5; in pairs 11 + 18 = 29.
    Backward: xhat 1, g 1, their product added 2, dbeta 1, dgamma 2; dx 4: 11; in pairs 43 + 23 = 66.

    Held are the results. Partial sums over rows, at most 4 MiB, are left out.
    """
    flops = (((5, 11), (29, 66)), ((9, 18), (60, 104)))[is_layer][s == 8]
    return _least(rows, n, s, is_layer, flops, (0, 0))


def _least(
    rows: int, n: int, s: int, is_layer: bool, flops: tuple[int, int], temporary: tuple[int, int]
) -> tuple[Cost, Cost]:
    """
    Count a forward and a backward that move no byte more than they must.

    Forward: x in, y and statistics out, gamma and beta in. Backward: dy and x in, dx out, statistics
    and gamma in, dgamma and dbeta out.
    """
    size, statistics, columns = s * rows * n, _statistics(s, is_layer) * rows, s * n
    moved = 2 * size + statistics + 2 * columns, 3 * size + statistics + 3 * columns
    held = size + statistics + temporary[0], size + 2 * columns + temporary[1]
    forward, backward = map(Cost, (each * rows * n for each in flops), moved, held)
    return forward, backward


PROGRAMS: dict[str, Callable[[int, int, int, bool], tuple[Cost, Cost]]] = {
    "plain NumPy": _plain,
    "reference": _reference,
    "fused CPU kernel": _fused,
}


def _statistics(s: int, is_layer: bool) -> int:
    """Bytes per row: two words of the mean and one of rstd, one more each of float64 data; no mean of RMS norm."""
    return (8 + 16 * is_layer) + (8 + 8 * is_layer) * (s == 8)


def _itemsize(dtype: Any) -> int:
    kind = parse(dtype)
    check_dtype("dtype", np.empty(0, kind))
    return kind.itemsize
