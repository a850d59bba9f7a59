"""`diagnose`: what a layer norm would lose on given data, found by the fastest sweep there is."""

from __future__ import annotations

import functools
import importlib
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from stablenorm._shapes import as_rows, normalize_axes, normalized_shape
from stablenorm._threads import get_num_threads
from stablenorm._types import Array, check_dtype, check_eps
from stablenorm.analysis._diagnose_count import PLAIN, Instruments, write_rows
from stablenorm.analysis._diagnose_predict import Room, measured_rows
from stablenorm.analysis.diagnosis import Diagnosis, diagnose_blocks
from stablenorm.backends import choose

# Elements and rows of a block, a millisecond's work each: ten times what it takes to hand one to a
# thread, and to add up what comes of it.
_ELEMENTS, _ROWS = 1 << 22, 1 << 15
# Of fewer rows, so many blocks, for threads to share, as long as these are a quarter of that.
_BLOCKS = 8

# Rows of so few elements have condition numbers of their own.
_FEW = 2


def diagnose(
    x: ArrayLike,
    eps: float = 1e-5,
    *,
    axis: int | tuple[int, ...] = -1,
    dtype: DTypeLike | None = None,
    top: int = 10,
) -> Diagnosis:
    """
    Say what a layer norm of `x` would lose, row by row and in all.

    Parameters
    ----------
    x : array
        Data: float16, bfloat16, float32 or float64, any number of leading dimensions, any
        strides. Not modified.
    eps : float, default: 1e-5
        Added to the variance before the square root. Finite and >= 0.
    axis : int or tuple of int, default: -1
        The axes normalized together.
    dtype : dtype, optional
        One of the four that the data would have in the layer norm. Default: its own.
    top : int, default: 10
        How many of the worst rows to describe in a sentence.

    Returns
    -------
    Diagnosis
        The condition numbers of y and dx, the share that eps has, the bits of y that methods in
        common use lose, what is special about rows, and the worst of them.

    Raises
    ------
    TypeError
        If a dtype is not one of the four, or `top` is not an int.
    ValueError
        If `axis` is not an axis of `x` or has length zero, `eps` is negative or not finite, or
        `top` is negative.

    See Also
    --------
    layer_norm : Loses none of them.

    Notes
    -----
    Bits lost: log2 of the RMS error of y over the row, in units of ``2**-p max(rms(y), smallest
    normal)``, between 0 and p, the precision of the dtype. A constant row, whose y is 0, is
    measured against 1. gamma and beta are left out: what they scale and shift is y.

    The methods compute in float32, or float64 for float64 data. "Saved" is y as a backward rebuilds
    it from a mean and an rstd rounded to that format; "float16" holds mean, var and eps in it.
    Their sums are formed along with the sweep over the data as compiled code forms them, sixteen
    running sums joined by halves. In another order a method loses more or less, seldom by more
    than two bits, but a sum that happens to be exact in one order need not be so in another; the
    condition number bounds them all.

    The condition number of y is ``rms(x) / std``; that of dx, ``rms(x) std / (var + eps)``, is for a
    cotangent at right angles to 1 and xhat, which a random one nearly is.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import diagnose
    >>> x = np.random.default_rng(0).standard_normal((4, 768)).astype(np.float32)
    >>> x[2] += 20000
    >>> found = diagnose(x)
    >>> found.worst[0].index, found.worst[0].lost["saved float32"] > 8
    (2, True)
    """
    x = _checked(x)
    axes = normalize_axes(axis, x.ndim)
    normalized_shape(x.shape, axes)
    kind = x.dtype if dtype is None else np.dtype(dtype)
    check_dtype("dtype", np.empty(0, kind))
    rows = as_rows(x, axes)
    # Each thread sweeps and predicts blocks of its own: what Python does for one, others need not wait for.
    step = rows_of_block(*rows.shape)
    threads = min(get_num_threads(), -(-rows.shape[0] // step)) or 1
    return diagnose_blocks(
        (rows[start : start + step] for start in range(0, rows.shape[0], step)),
        fastest_instruments(threads == 1),
        shape=x.shape,
        dtype=kind,
        axis=axes,
        eps=check_eps(eps),
        top=check_top(top),
        keep_rows=True,
        threads=threads,
    )


def rows_of_block(rows: int, n: int) -> int:
    """Return how many rows to take at a time."""
    return max(1, min(rows, max(rows // _BLOCKS, _ROWS // 4), _ROWS, _ELEMENTS // n))


def fastest_instruments(shared: bool = True) -> Instruments:
    """Return the compiled ones, alone or with helpers; or the plain, where there is no Numba."""
    if choose(None) == "numba":
        # Half a second, so not before it is needed.
        counting = importlib.import_module("stablenorm.kernels._sweep_count")
        return Instruments(functools.partial(_measured, shared), counting.count_rows)
    return PLAIN


def _measured(shared: bool, x: Array, limits: Array, eps: float, into: Room) -> None:
    """Write what is known of rows: of ordinary ones as the sweep says, of others as its twin."""
    compiled = importlib.import_module("stablenorm.kernels._sweep")
    hard: Any = slice(None)
    if x.shape[1] > _FEW:
        compiled.measure_rows(x, limits, into, shared)
        hard = np.flatnonzero(into.marks >= compiled.HARD)
        if not hard.size:
            return
    again = x[hard]
    write_rows(into, hard, measured_rows(compiled.sweep_rows(again, shared), again, eps))


def _checked(x: ArrayLike) -> Array:
    if isinstance(x, np.ma.MaskedArray):
        msg = "x must be a plain array, got a masked one, whose mask would be ignored"
        raise TypeError(msg)
    array = np.asarray(x)
    check_dtype("x", array)
    return array


def check_top(top: Any) -> int:
    """Return `top` as an int, or raise."""
    try:
        number = operator.index(top)
    except TypeError:
        msg = f"top must be an int, got {top!r}"
        raise TypeError(msg) from None
    if number < 0:
        msg = f"top must be >= 0, got {number}"
        raise ValueError(msg)
    return number
