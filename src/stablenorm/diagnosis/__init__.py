"""`diagnose` says how much a layer or RMS norm would lose on given data, row by row and in all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from stablenorm.arrays import as_rows, convert, is_lazy, normalize_axes, normalized_shape
from stablenorm.diagnosis.methods import METHODS, SPECIAL, PerRow, measure_rows
from stablenorm.diagnosis.results import Diagnosis, Row, Summary, describe_row
from stablenorm.formats import check_dtype, format_of, parse
from stablenorm.threads import get_num_threads
from stablenorm.types import Array, check_count, check_eps

__all__ = ["Diagnosis", "PerRow", "Row", "Summary", "diagnose"]

# Elements of a block, the work of one thread at a time: some 3 ms, ten times the fixed cost of a block.
BLOCK = 1 << 19


def diagnose(
    x: ArrayLike,
    eps: float = 1e-5,
    *,
    kind: str = "layer",
    axis: int | tuple[int, ...] | None = -1,
    dtype: DTypeLike | None = None,
    top: int = 10,
) -> Diagnosis:
    """
    Say what a layer or RMS norm of `x` would lose, row by row and in all.

    Parameters
    ----------
    x : array
        Data: float16, bfloat16, float32 or float64, any number of leading dimensions, any
        strides. Not modified.
    eps : float, default: 1e-5
        Added to the variance before the square root. Finite and >= 0.
    kind : {"layer", "rms"}, default: "layer"
        Which norm.
    axis : int, tuple of int or None, default: -1
        The axes normalized together; None for all.
    dtype : dtype, optional
        One of the four that the data would have in the layer norm. Default: its own.
    top : int, default: 10
        How many of the worst rows to describe in a sentence.

    Returns
    -------
    Diagnosis
        The condition numbers of y and dx, the bits of y that methods in common use lose, what is
        special about rows, and the worst of them.

    Raises
    ------
    TypeError
        If a dtype is not one of the four, or `top` is not an int.
    ValueError
        If `kind` is neither, `axis` is not an axis of `x` or has length zero, `eps` is negative or not
        finite, or `top` is negative.

    Notes
    -----
    Bits lost: log2 of the RMS error of y over the row, in units of ``2**-p max(rms(y), smallest
    normal)``, between 0 and p, the precision of the dtype. A constant row, whose y is 0, is
    measured against 1. gamma and beta are left out.

    The methods compute in float32, or in float64 for float64 data, with several running sums, as
    vectorized code does. In another order a method seldom loses two bits more or less; in a plain loop
    it loses more. The condition number bounds them all. "Saved" is y as a backward rebuilds it from a
    mean and an rstd rounded to that format.

    The condition number of y is ``rms(x) / std``. That of dx, ``rms(x) std / (var + eps)``, is for
    a cotangent at right angles to 1 and xhat, as a random one of more than two elements nearly is.
    Those of RMS norm are at most 1, as without a mean nothing cancels; it loses bits where x^2 is held
    in too narrow a format: in float16 the square of 256 overflows.

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
    if is_lazy(x):
        msg = "x must be an array in memory, got a Dask array; pass x.compute(), or some rows of it"
        raise TypeError(msg)
    array = convert("x", x)
    axes = normalize_axes(axis, array.ndim)
    normalized_shape(array.shape, axes)
    if kind not in METHODS:
        msg = f"kind must be {' or '.join(METHODS)}, got {kind!r}"
        raise ValueError(msg)
    judged = array.dtype if dtype is None else parse(dtype).newbyteorder("=")
    check_dtype("dtype", np.empty(0, judged))
    eps, top = check_eps(eps), check_count("top", top, least=0)
    # The caller's np.errstate says whether an overflow is told.
    rows = as_rows(array, axes).astype(judged, copy=False)
    per_row = _measure(rows, eps, kind)
    order = _worst_first(per_row, kind)[:top].tolist()
    worst = tuple(describe_row(row, rows[row], per_row, kind) for row in order)
    summary, n = _summarize(per_row, judged, kind), rows.shape[1]
    return Diagnosis(array.shape, judged.name, axes, n, eps, summary, worst, per_row, kind)


def _measure(rows: Array, eps: float, kind: str) -> PerRow:
    """Return the numbers of all rows, block by block on several threads."""
    step = max(1, BLOCK // rows.shape[1])
    # Without rows, one empty block.
    blocks = (rows[start : start + step] for start in range(0, max(1, len(rows)), step))
    with ThreadPoolExecutor(get_num_threads()) as pool:
        # An interrupt ends the call soon: the blocks that have not begun are cancelled.
        parts = pool.map(lambda block: measure_rows(block, eps, kind), blocks)
        return PerRow(*(np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)))


def _worst_first(found: PerRow, kind: str) -> Array:
    """Return the indices of the rows, those that lose most first, equals in their own order."""
    # Rows that have no y at all come first: not finite, undefined. Then by bits of the two-pass, in
    # an RMS norm those of float16, which loses most; the condition number, which constant rows do
    # not have, counts less than a bit.
    condition = np.where(np.isfinite(found.condition_y), found.condition_y, 1.0)
    lost = np.rint(found.lost[0 if kind == "layer" else -1]) + 1.0 - 1.0 / condition
    return np.lexsort((-lost, ~found.marks[1], ~found.marks[0]))


def _summarize(found: PerRow, dtype: np.dtype[Any], kind: str) -> Summary:
    """Return what is counted of some rows."""
    # Constant rows have no condition number, and some rows no y to lose bits of.
    y, dx = (v[np.isfinite(v)] for v in (found.condition_y, found.condition_dx))
    # By powers of two up to 63: elements that differ at all do so by 2**-53 of their size, so that
    # no row of less than 2**20 elements has a larger one.
    powers = (np.minimum(np.frexp(np.maximum(v, 1.0))[1] - 1, 63) for v in (y, dx))
    of_y, of_dx = (np.bincount(v, minlength=64) for v in powers)
    bits = (np.rint(v[~np.isnan(v)]).astype(np.intp) for v in found.lost)
    lost = (np.bincount(v, minlength=format_of(dtype).digits + 1) for v in bits)
    marks = np.count_nonzero(found.marks, axis=1).tolist()
    return Summary(
        len(found.mean), dict(zip(SPECIAL[kind], marks, strict=True)),
        dict(zip(METHODS[kind], lost, strict=True)), of_y, of_dx,
        float(y.max(initial=0.0)), float(dx.max(initial=0.0)),
    )  # fmt: skip
