"""
Floating-point operations and bytes of three layer norms, forward and backward, as formulas.

Each private function counts one program and derives its formula. `rows` and `n` are the rows and
the elements of a row, `s` is the bytes of an element of x, gamma, beta and dy alike. A flop is an
addition, subtraction, multiplication, division or square root of reals; a fused multiply-add is
two. What is done once per row (a division, a root) is left out of the flops: it is a part 1/n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import check_dtype, parse

DIRECTIONS = ("forward", "backward")
# Elements of a block of the reference, `reference.equations._BLOCK`.
_BLOCK = 1 << 15


class Cost(NamedTuple):
    """
    What one forward or one backward does.

    `moved` is the bytes that memory must read and write where the arrays are larger than the
    caches; `held` is the new bytes held at the worst moment, results included.
    """

    flops: int
    moved: int
    held: int

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte moved."""
        return self.flops / self.moved


def count_cost(program: str, direction: str, matrix: tuple[int, int], dtype: Any) -> Cost:
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

    Returns
    -------
    Cost
        Flops, bytes moved and bytes held.

    Raises
    ------
    TypeError
        If the dtype is none of the four.

    Examples
    --------
    >>> from stablenorm.cost import count_cost
    >>> cost = count_cost("fused CPU kernel", "forward", (1000, 768), "float32")
    >>> cost.moved == 1000 * (8 * 768 + 24) + 8 * 768
    True
    """
    rows, n = matrix
    return PROGRAMS[program, direction](rows, n, _itemsize(dtype))


def count_kept(matrix: tuple[int, int], dtype: Any) -> dict[str, int]:
    """
    Count the bytes that must live from the forward to the backward, beside x and gamma.

    Parameters
    ----------
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : dtype or str
        Of x: float16, bfloat16, float32 or float64.

    Returns
    -------
    dict of str to int
        Bytes, by what is kept. The first entry is what this package keeps.

    Examples
    --------
    >>> from stablenorm.cost import count_kept
    >>> next(iter(count_kept((1000, 768), "float32").items()))
    ('x itself, mean and rstd', 24000)
    """
    rows, n = matrix
    s = _itemsize(dtype)
    word = 16 if s == 8 else 8
    return {
        "x itself, mean and rstd": _statistics(s) * rows,
        "xhat and rstd, as accurate as the results": word * rows * n + word * rows,
        "xhat and rstd, as plain NumPy keeps them": (rows * n + rows) * max(s, 4),
        "y itself and rstd: xhat = (y - beta) / gamma, and gamma may be 0": word * rows,
    }


def _plain_forward(rows: int, n: int, s: int) -> Cost:
    """
    Count the two-pass formula: NumPy operations on whole arrays, each a pass over memory.

    It computes in c bytes per element: 8 for float64, else 4. Per element of x:

    ===============================  =====  ============
    pass                             flops  bytes
    ===============================  =====  ============
    x in the arithmetic's precision  0      s + c
    sum of x                         1      c
    x - mean                         1      2 c
    its square                       1      2 c
    sum of the squares               1      c
    x - mean, once more              1      2 c
    times rstd: xhat                 1      2 c
    times gamma                      1      2 c
    plus beta                        1      2 c
    rounded to the dtype of x        0      c + s
    all                              8      2 s + 16 c
    ===============================  =====  ============

    At the addition of beta four arrays live: x in c, xhat, gamma * xhat and the sum.
    """
    c = max(s, 4)
    return Cost(8 * rows * n, (2 * s + 16 * c) * rows * n, 4 * c * rows * n)


def _plain_backward(rows: int, n: int, s: int) -> Cost:
    """
    Count the backward of the two-pass formula, which is given xhat and rstd.

    Per element of x, with c as in the forward:

    ======================================  =====  ============
    pass                                    flops  bytes
    ======================================  =====  ============
    dy in the arithmetic's precision        0      s + c
    g = gamma * dy                          1      2 c
    g * xhat                                1      3 c
    its sum over the row                    1      c
    sum of g over the row                   1      c
    g - mean(g)                             1      2 c
    xhat * mean(g * xhat)                   1      2 c
    their difference                        1      3 c
    times rstd: dx                          1      2 c
    dy * xhat                               1      3 c
    dgamma: its sum over the rows           1      c
    dbeta: sum of dy over the rows          1      c
    dx rounded to the dtype of x            0      c + s
    all                                     11     2 s + 23 c
    ======================================  =====  ============

    Four arrays live while dx is formed: dy in c, g, and two of the terms.
    """
    c = max(s, 4)
    return Cost(11 * rows * n, (2 * s + 23 * c) * rows * n, 4 * c * rows * n)


def _reference_forward(rows: int, n: int, s: int) -> Cost:
    """
    Count the reference, which takes blocks of rows that stay in the second-level cache.

    Memory moves x in and y out, gamma and beta, and the statistics of each row. Flops per element,
    in float64: sum of x 1, x - mean 1, sum of that 1, less its mean 1, square 1, sum of squares 1,
    times rstd 1, times gamma 1, plus beta 1: 9. On float64 data each of these is done on pairs of
    float64, where an addition takes 20 flops and a product 20 to 24: 184. Held are y, the
    statistics, and 3 (on pairs 14) temporary blocks of 8 bytes per element.
    """
    flops, blocks = (184, 14) if s == 8 else (9, 3)
    held = s * rows * n + _statistics(s) * rows + blocks * _block_bytes(rows, n)
    return Cost(flops * rows * n, _least_forward(rows, n, s), held)


def _reference_backward(rows: int, n: int, s: int) -> Cost:
    """
    Count the backward of the reference, block by block as in its forward.

    Flops per element, in float64: xhat from x 3, dy * xhat 1, dgamma 1, dbeta 1, g 1, sum of g 1,
    g - mean(g) 1, times xhat 1, sum of that 1, xhat times its mean 1, the difference 1, times
    rstd 1: 14. On pairs: 288. Held are the gradients and 6 (on pairs 21) temporary blocks.
    """
    flops, blocks = (288, 21) if s == 8 else (14, 6)
    held = s * rows * n + 2 * s * n + blocks * _block_bytes(rows, n)
    return Cost(flops * rows * n, _least_backward(rows, n, s), held)


def _fused_forward(rows: int, n: int, s: int) -> Cost:
    """
    Count the fused CPU kernel: a row is read from memory once and then found in the caches.

    Flops per element, in float64: x - k 1, its sum 1, its square added 2, and for y x - mean 1,
    times rstd plus a shift 2, times gamma plus beta 2: 9. On float64 data in pairs: 29 + 31 = 60.
    Held are y and the statistics.
    """
    flops = 60 if s == 8 else 9
    return Cost(flops * rows * n, _least_forward(rows, n, s), s * rows * n + _statistics(s) * rows)


def _fused_backward(rows: int, n: int, s: int) -> Cost:
    """
    Count the backward of the fused CPU kernel, which reads dy and x from memory once.

    Flops per element, in float64: xhat 3, g - m 2, its sum 1, their product added 2, dbeta 1,
    dy * xhat added to dgamma 2; dx, which forms x - mean and g - m again, 7: 18. On float64 data in
    pairs: 73 + 31 = 104. Held are the gradients and partial sums over rows, which are at most 4 MiB
    and left out here.
    """
    flops = 104 if s == 8 else 18
    return Cost(flops * rows * n, _least_backward(rows, n, s), s * rows * n + 2 * s * n)


PROGRAMS: dict[tuple[str, str], Callable[[int, int, int], Cost]] = {
    ("plain NumPy", "forward"): _plain_forward,
    ("plain NumPy", "backward"): _plain_backward,
    ("reference", "forward"): _reference_forward,
    ("reference", "backward"): _reference_backward,
    ("fused CPU kernel", "forward"): _fused_forward,
    ("fused CPU kernel", "backward"): _fused_backward,
}


def _least_forward(rows: int, n: int, s: int) -> int:
    """Count the bytes that every forward moves: x in, y and statistics out, gamma and beta in."""
    return 2 * s * rows * n + _statistics(s) * rows + 2 * s * n


def _least_backward(rows: int, n: int, s: int) -> int:
    """Count the same of a backward: dy and x in, dx out, gamma in, dgamma and dbeta out."""
    return 3 * s * rows * n + _statistics(s) * rows + 3 * s * n


def _statistics(s: int) -> int:
    """Bytes per row of the mean (two words) and rstd (one word, of float64 data two)."""
    return 32 if s == 8 else 24


def _block_bytes(rows: int, n: int) -> int:
    return 8 * min(max(1, _BLOCK // n), rows) * n


def _itemsize(dtype: Any) -> int:
    kind = parse(dtype)
    check_dtype("dtype", np.empty(0, kind))
    return kind.itemsize
