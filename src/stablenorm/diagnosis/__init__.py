"""
`diagnose` says how much a layer or RMS norm would lose on your data, row by row and in all.

Its result, a `Diagnosis`, is shown as sentences, text or plain data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from stablenorm.arrays import as_rows, convert, normalize_axes, normalized_shape
from stablenorm.diagnosis.methods import METHODS, SPECIAL, PerRow, measure_rows
from stablenorm.formats import check_dtype, format_of, parse
from stablenorm.output import columns, plain, shape_text, to_json, wrapped
from stablenorm.records import Array
from stablenorm.scalars import check_count, check_eps
from stablenorm.threads import get_num_threads

__all__ = ["Diagnosis", "PerRow", "Row", "diagnose"]

# Elements of a block, the work of one thread at a time: about 3 ms, ten times a block's fixed cost.
BLOCK = 1 << 19
# Bits that a row must lose to be told: in another order of sums a method loses two more or less.
_LOSES = 2


@dataclass(frozen=True)
class Row:
    """
    One row, and its losses.

    Attributes
    ----------
    index : int
        Number of the row, in C order over the axes that are not normalized.
    lost : dict of str to float
        Bits of y lost by each method.
    marks : tuple of str
        Peculiarities of the row, as in `Diagnosis.marks`.
    count : int
        How many rows have these numbers; `index` is the first.
    advice : str
        What is lost, and what to do, in a sentence.
    """

    index: int
    lost: dict[str, float]
    marks: tuple[str, ...]
    count: int
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """
    The losses of a norm on your data; made by `stablenorm.diagnose`.

    Attributes
    ----------
    shape, axis : tuple of int
        Shape of the data, and the axes normalized together.
    dtype : str
        The dtype that the data was judged as.
    n : int
        Elements of a row.
    eps : float
        Added to the variance.
    marks : dict of str to int
        For each peculiarity, the number of rows that have it.
    lost : dict of str to tuple
        For each method the bits lost by the median row and by the worst one, and the share of rows that
        lose 4 or more; empty without rows that have a y.
    worst : tuple of Row
        Rows without y (not finite, or constant with eps 0), then rows on which the usual formula (the
        two-pass or, for an RMS norm, mean(x^2)) or E[x^2] - E[x]^2 loses two bits or more, the worst first.
        Equal rows are one.
    per_row : PerRow
        Numbers of every row, about 65 bytes each.
    kind : str
        "layer" or "rms".
    """

    shape: tuple[int, ...]
    dtype: str
    axis: tuple[int, ...]
    n: int
    eps: float
    marks: dict[str, int]
    lost: dict[str, tuple[int, int, float]]
    worst: tuple[Row, ...]
    per_row: PerRow
    kind: str

    @property
    def bits(self) -> int:
        """The precision p of the dtype: a method can lose so many bits."""
        return format_of(parse(self.dtype)).digits

    @property
    def verdict(self) -> str:
        """Whether anything is lost, and what to do: one sentence."""
        if self.worst:
            return self.worst[0].advice
        name = "RMS" if self.kind == "rms" else "layer"
        return f"nothing is lost: any {name} norm in float{64 if self.bits > 24 else 32} will do"

    def __repr__(self) -> str:
        """Return the data and the verdict."""
        return f"Diagnosis({_headline(self)}; {self.verdict})"

    def as_dict(self) -> dict[str, Any]:
        """
        Return all but `per_row` as plain dicts, lists, str, int and float, with the properties.

        Numbers that JSON lacks are strings: "nan", "inf" or "-inf".
        """
        names = "shape dtype axis n eps kind bits verdict marks lost worst"
        return dict(plain({name: getattr(self, name) for name in names.split()}))

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    def __str__(self) -> str:
        """Give the verdict, the worst rows, and the methods."""
        return "\n".join(part for line in lines_of(self) for part in wrapped(line))


def diagnose(
    x: ArrayLike,
    eps: float = 1e-5,
    *,
    kind: str = "layer",
    axis: int | tuple[int, ...] | None = -1,
    dtype: DTypeLike | None = None,
    top: int = 10,
    progress: Callable[[int, int], object] | None = None,
) -> Diagnosis:
    """
    Say what a layer or RMS norm of `x` would lose, row by row and in all.

    Parameters
    ----------
    x : array
        Data: float16, bfloat16, float32 or float64, of any dimensions and strides. Not modified.
    eps : float, default: 1e-5
        Added to the variance before the square root. Finite and >= 0.
    kind : {"layer", "rms"}, default: "layer"
        The norm.
    axis : int, tuple of int or None, default: -1
        The axes normalized together; None for all.
    dtype : dtype, optional
        The dtype to judge the data as, one of the four. Default: its own.
    top : int, default: 10
        Number of the worst rows to describe in a sentence.
    progress : callable, optional
        Called with the number of blocks done, and of all, after each block.

    Returns
    -------
    Diagnosis
        A verdict, the condition number of each row, the bits of y that common methods lose, the marks
        of special rows, and the worst rows.

    Raises
    ------
    TypeError
        If a dtype is not one of the four, or `top` is not an int.
    ValueError
        If `kind` is neither of the two, `axis` is not an axis of `x` or has length zero, `eps` is
        negative or not finite, or `top` is negative.

    Notes
    -----
    The bits lost are log2 of the RMS error of y over the row, in units of ``2**-p max(rms(y),
    smallest normal)``: between 0 and p, the precision of the dtype. A constant row, whose y is 0, is
    measured against 1. gamma and beta are left out.

    The methods compute in float32, or in float64 for float64 data, with several running sums, as
    vectorized code does. In another order a method seldom loses two bits more or less; in a plain loop
    it loses more. The condition number bounds them all. "Saved" means that a backward rebuilds y from
    a mean and an rstd rounded to that format.

    The condition number of y is ``rms(x) / std``. That of RMS norm is 1, since nothing cancels without a mean; RMS norm
    loses bits if x^2 is held in too narrow a
    format: in float16 the square of 256 overflows.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import diagnose
    >>> x = np.random.default_rng(0).standard_normal((4, 768)).astype(np.float32)
    >>> x[2] += 20000
    >>> worst = diagnose(x).worst[0]
    >>> worst.index, worst.lost["saved float32"] > 8
    (2, True)
    """
    array = convert("x", x)
    axes = normalize_axes(axis, array.ndim)
    normalized_shape(array.shape, axes)
    if kind not in METHODS:
        msg = f"kind must be {' or '.join(METHODS)}, got {kind!r}"
        raise ValueError(msg)
    judged = array.dtype if dtype is None else parse(dtype).newbyteorder("=")
    check_dtype("dtype", np.empty(0, judged))
    eps, top = check_eps(eps), check_count("top", top, least=0)
    # The caller's np.errstate decides whether an overflow of this cast warns.
    rows = as_rows(array, axes).astype(judged, copy=False)
    per_row = _measure(rows, eps, kind, progress)
    worst = tuple(
        _describe_row(index, count, rows[index], per_row, kind)
        for index, count in _worst_first(per_row)[:top]
    )
    marks = dict(zip(SPECIAL, np.count_nonzero(per_row.marks, axis=1).tolist(), strict=True))
    lost, n = _summarize(per_row, kind), rows.shape[1]
    return Diagnosis(array.shape, judged.name, axes, n, eps, marks, lost, worst, per_row, kind)


def _measure(rows: Array, eps: float, kind: str, progress: Any) -> PerRow:
    """Return the numbers of all rows, block by block on several threads."""
    step = max(1, BLOCK // rows.shape[1])
    # Without rows, one empty block.
    starts = range(0, max(1, len(rows)), step)
    parts = []
    with ThreadPoolExecutor(min(get_num_threads(), os.cpu_count() or 1)) as pool:
        # An interrupt ends the call soon: the blocks that have not begun are cancelled.
        for part in pool.map(lambda i: measure_rows(rows[i : i + step], eps, kind), starts):
            parts.append(part)
            if progress is not None:
                progress(len(parts), len(starts))
    return PerRow(*(np.concatenate(field, axis=-1) for field in zip(*parts, strict=True)))


def _worst_first(per_row: PerRow) -> list[tuple[int, int]]:
    """Return the rows to be told, those that lose most first: the first of equal rows, and how many there are."""
    # Rows without y lose more than all bits.
    usual, other = np.where(per_row.marks[:2].any(axis=0), 99, np.rint(per_row.lost[:2]))
    rows = np.flatnonzero(np.maximum(usual, other) >= _LOSES)
    # A row with NaN comes before one without variance. `unique` sorts by the first key, then by the next.
    keys = -np.stack((usual + per_row.marks[0], other, per_row.mean, per_row.std))[:, rows]
    _, first, counts = np.unique(keys, axis=1, return_index=True, return_counts=True)
    return list(zip(rows[first].tolist(), counts.tolist(), strict=True))


def _summarize(per_row: PerRow, kind: str) -> dict[str, tuple[int, int, float]]:
    """Return the bits lost by the median row and the worst, and the share of rows that lose 4 or more."""
    bits = np.rint(per_row.lost[:, ~np.isnan(per_row.lost[0])])
    return {
        name: (int(np.median(row)), int(row.max()), float((row >= 4).mean()))
        for name, row in zip(METHODS[kind], bits, strict=True)
        if row.size
    }


# ---- sentences and lines ----


def _describe_row(index: int, count: int, x: Array, per_row: PerRow, kind: str) -> Row:
    """Describe row `index`, with elements `x`, and as many equal ones."""
    lost = dict(zip(METHODS[kind], per_row.lost[:, index].tolist(), strict=True))
    marks = tuple(compress(SPECIAL, per_row.marks[:, index]))
    who = f"row {index}" + f" (of {count} equal rows)" * (count > 1)
    if "not finite" in marks:
        places = np.flatnonzero(~np.isfinite(x))
        said = f"is not finite, {places.size} of {x.size} elements, the first at {places[0]}: look upstream"
    elif "undefined" in marks:
        said = "has no y, since its variance and eps are 0: pass eps > 0"
    else:
        usual, other = (round(bits) for bits in list(lost.values())[:2])
        said = f"loses {usual} of {format_of(x.dtype).digits} bits in the usual formula"
        said += f", {other} in E[x^2] - E[x]^2" * (kind == "layer")
        cures = {"overflow": "scale the data", "constant": "take a larger eps"}
        cure = next((cures[mark] for mark in marks if mark in cures), "subtract the offset")
        said += f": {cure}, or use stablenorm"
    return Row(index, lost, marks, count, f"{who} {said}")


def _headline(diagnosis: Diagnosis) -> str:
    data = f"{shape_text(diagnosis.shape)} as {diagnosis.dtype}"
    norm = f"eps {diagnosis.eps:g}{', RMS norm' * (diagnosis.kind == 'rms')}"
    return f"{data}: {len(diagnosis.per_row.mean)} rows of {diagnosis.n}, {norm}"


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis in lines of any length, the verdict first."""
    lines = [diagnosis.verdict, *(f"  {row.advice}" for row in diagnosis.worst[1:])]
    for name, meaning in SPECIAL.items():
        if count := diagnosis.marks[name]:
            lines.append(f"  {name}: {count} row{'s' * (count != 1)} ({meaning})")
    cells = [(f"bits of y lost, of {diagnosis.bits}", "median row", "worst row", "rows losing 4")]
    for name, (median, worst, share) in diagnosis.lost.items():
        cells.append((METHODS[diagnosis.kind][name], str(median), str(worst), f"{share:.1%}"))
    return [*lines, _headline(diagnosis), *(f"  {line}" for line in columns(cells))]
