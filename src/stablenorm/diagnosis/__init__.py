"""
`diagnose` says how much a layer or RMS norm would lose on your data, row by row and in all.

Its result, a `Diagnosis`, is shown as sentences, text, plain data, or a picture.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from stablenorm.arrays import as_rows, convert, is_lazy, normalize_axes, normalized_shape
from stablenorm.diagnosis.methods import METHODS, SPECIAL, PerRow, measure_rows
from stablenorm.figures import COLORS, new_figure
from stablenorm.formats import check_dtype, format_of, parse
from stablenorm.text import plain, shape_text, to_json, wrapped
from stablenorm.threads import get_num_threads
from stablenorm.types import Array, check_count, check_eps

__all__ = ["Diagnosis", "PerRow", "Row", "Summary", "diagnose"]

# Elements of a block, the work of one thread at a time: about 3 ms, ten times a block's fixed cost.
BLOCK = 1 << 19
# The sentence about a row names these two methods; the others are near one of them, or lose more.
_TOLD = {
    "layer": {"two-pass": "a {working} two-pass", "one-pass": "E[x^2] - E[x]^2"},
    "rms": {"one-pass": "mean(x^2) in {working}", "float16": "in float16"},
}


@dataclass(frozen=True)
class Row:
    """
    One row, and its losses.

    Attributes
    ----------
    index : int
        Number of the row, in C order over the axes that are not normalized.
    mean, std : float
        NaN if the row is not finite. For kind "rms": 0, and the root mean square.
    condition_y, condition_dx : float
        Factor by which a relative error of x grows in y and in dx.
    lost : dict of str to float
        Bits of y lost by each method, as in `Diagnosis.methods`.
    marks : tuple of str
        Peculiarities of the row, as in `Summary.marks`.
    advice : str
        The same in a sentence.
    """

    index: int
    mean: float
    std: float
    condition_y: float
    condition_dx: float
    lost: dict[str, float]
    marks: tuple[str, ...]
    advice: str


class Summary(NamedTuple):
    """
    All rows together.

    Attributes
    ----------
    rows : int
        Number of rows.
    marks : dict of str to int
        For each peculiarity, the number of rows that have it.
    lost : dict of str to array
        For each method, the number of rows that lose 0, 1, ..., p bits, rounded.
    condition_y, condition_dx : array
        Number of rows whose condition number is in [2^k, 2^(k+1)); below 1 counts as k = 0.
        Constant rows are not counted: theirs is infinite for y.
    largest_condition_y, largest_condition_dx : float
        The largest finite ones.
    """

    rows: int
    marks: dict[str, int]
    lost: dict[str, Array]
    condition_y: Array
    condition_dx: Array
    largest_condition_y: float
    largest_condition_dx: float


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
    summary : Summary
        All rows together.
    worst : tuple of Row
        Rows without y (not finite, or constant with eps 0), then the rows on which a two-pass (in
        an RMS norm, float16) loses most bits, the worst first.
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
    summary: Summary
    worst: tuple[Row, ...]
    per_row: PerRow
    kind: str = "layer"

    @property
    def bits(self) -> int:
        """The precision p of the dtype: a method can lose so many bits."""
        return format_of(parse(self.dtype)).digits

    @property
    def methods(self) -> dict[str, str]:
        """A description of each method, by its name."""
        return {name: _filled(title, self.dtype) for name, title in METHODS[self.kind].items()}

    def as_dict(self) -> dict[str, Any]:
        """
        Return all but `per_row` as plain dicts, lists, str, int and float, with `bits` and `methods`.

        Numbers that JSON lacks are strings: "nan", "inf" or "-inf".
        """
        names = "shape", "dtype", "axis", "n", "eps", "kind", "bits", "methods", "summary", "worst"
        return dict(plain({name: getattr(self, name) for name in names}))

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    def plot(self, path: Any, *, format: str | None = None) -> None:
        """
        Draw how many rows lose how many bits.

        `path` is a file or its name; `format` "png", "svg" or "pdf", by default the name's ending.
        It needs Matplotlib.
        """
        figure = new_figure(10, 4)
        figure.suptitle(_headline(self), fontsize=12, fontweight="bold", parse_math=False)
        axes = figure.subplots()
        # Lines differ by dashes and widths as well: a line beneath another one stays visible.
        dashes, widths = ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2))), (3.4, 3.0, 2.6, 2.2, 1.8)
        axes.set_prop_cycle(color=COLORS[:5], ls=dashes, lw=widths)
        for title, counts in zip(self.methods.values(), self.summary.lost.values(), strict=True):
            axes.plot(np.cumsum(counts[::-1])[::-1] / max(int(counts.sum()), 1), label=title)
        axes.set(xlim=(0, self.bits), ylim=(0, 1.02), xlabel=f"bits of y lost, of {self.bits}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.set_title("Share of rows that lose at least so many", fontsize=10, loc="left")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path, format=format, dpi=150)

    def __str__(self) -> str:
        """Give the summary, the methods, and the worst rows."""
        return "\n".join(part for line in lines_of(self) for part in wrapped(line))


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

    Returns
    -------
    Diagnosis
        The condition numbers of y and dx, the bits of y that common methods lose, the marks of
        special rows, and the worst rows.

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

    The condition number of y is ``rms(x) / std``. The one of dx, ``rms(x) std / (var + eps)``, is for
    a cotangent orthogonal to 1 and xhat, as a random one nearly is if n > 2. Those of RMS norm are at
    most 1, since nothing cancels without a mean; RMS norm loses bits if x^2 is held in too narrow a
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
    # The caller's np.errstate decides whether an overflow of this cast warns.
    rows = as_rows(array, axes).astype(judged, copy=False)
    per_row = _measure(rows, eps, kind)
    order = _worst_first(per_row, kind)[:top].tolist()
    worst = tuple(_describe_row(row, rows[row], per_row, kind) for row in order)
    asked = array.shape, judged.name, axes, rows.shape[1], eps
    return Diagnosis(*asked, _summarize(per_row, judged, kind), worst, per_row, kind)


def _measure(rows: Array, eps: float, kind: str) -> PerRow:
    """Return the numbers of all rows, block by block on several threads."""
    step = max(1, BLOCK // rows.shape[1])
    # Without rows, one empty block.
    blocks = (rows[start : start + step] for start in range(0, max(1, len(rows)), step))
    with ThreadPoolExecutor(min(get_num_threads(), os.cpu_count() or 1)) as pool:
        # An interrupt ends the call soon: the blocks that have not begun are cancelled.
        parts = pool.map(lambda block: measure_rows(block, eps, kind), blocks)
        return PerRow(*(np.concatenate(field, axis=-1) for field in zip(*parts, strict=True)))


def _worst_first(per_row: PerRow, kind: str) -> Array:
    """Return the indices of the rows, those that lose most first, equals in their own order."""
    # Rows without y come first: not finite, undefined. The others are sorted by bits lost by the
    # two-pass, in an RMS norm by float16, which loses most. The condition number, which constant rows
    # lack, counts less than a bit.
    condition = np.where(np.isfinite(per_row.condition_y), per_row.condition_y, 1.0)
    lost = np.rint(per_row.lost[0 if kind == "layer" else -1]) + 1.0 - 1.0 / condition
    return np.lexsort((-lost, ~per_row.marks[1], ~per_row.marks[0]))


def _summarize(per_row: PerRow, dtype: np.dtype[Any], kind: str) -> Summary:
    """Count the rows by marks, bits lost and condition numbers."""
    # Constant rows have no condition number, and rows without y lose no bits.
    y, dx = (v[np.isfinite(v)] for v in (per_row.condition_y, per_row.condition_dx))
    # Powers of two up to 63 suffice: elements that differ at all do so by 2**-53 of their size, so
    # no row of fewer than 2**20 elements has a larger condition number.
    powers = (np.minimum(np.frexp(np.maximum(v, 1.0))[1] - 1, 63) for v in (y, dx))
    of_y, of_dx = (np.bincount(v, minlength=64) for v in powers)
    bits = (np.rint(v[~np.isnan(v)]).astype(np.intp) for v in per_row.lost)
    lost = (np.bincount(v, minlength=format_of(dtype).digits + 1) for v in bits)
    marks = np.count_nonzero(per_row.marks, axis=1).tolist()
    return Summary(
        len(per_row.mean), dict(zip(SPECIAL[kind], marks, strict=True)),
        dict(zip(METHODS[kind], lost, strict=True)), of_y, of_dx,
        float(y.max(initial=0.0)), float(dx.max(initial=0.0)),
    )  # fmt: skip


# ---- sentences and lines ----


def _filled(text: str, dtype: DTypeLike) -> str:
    """Name the dtype that layer norms of such data are computed in."""
    return text.replace("{working}", np.result_type(parse(dtype), np.float32).name)


def _describe_row(index: int, x: Array, per_row: PerRow, kind: str) -> Row:
    """Describe row `index`, with elements `x`."""
    mean, std, of_y, of_dx = (float(field[index]) for field in per_row[:4])
    lost = dict(zip(METHODS[kind], per_row.lost[:, index].tolist(), strict=True))
    marks = tuple(compress(SPECIAL[kind], per_row.marks[:, index]))
    if "not finite" in marks:
        places = np.flatnonzero(~np.isfinite(x))
        said = [f"not finite: {places.size} of {x.size} elements, the first at {places[0]}"]
    elif "undefined" in marks:
        # The row is constant as well, but its y is not beta.
        said = [f"undefined ({SPECIAL[kind]['undefined']})"]
    else:
        said = [f"{mark} ({SPECIAL[kind][mark]})" for mark in marks]
        # From 4 on, |mean| / std is mentioned: it costs two bits.
        if not said or abs(mean) >= 4.0 * std > 0:
            ratio = f"|mean|/std = {abs(mean) / std:.2g}"
            said.insert(0, ratio if kind == "layer" else f"rms = {std:.2g}")
        (first, one), (second, two) = _TOLD[kind].items()
        losses = f"{round(lost[first])} of {format_of(x.dtype).digits} bits of y"
        said.append(f"{one} loses {losses}, {two} {round(lost[second])}")
    advice = _filled(f"row {index}: {'; '.join(said)}", x.dtype)
    return Row(index, mean, std, of_y, of_dx, lost, marks, advice)


def _headline(diagnosis: Diagnosis) -> str:
    data, rows = f"{shape_text(diagnosis.shape)} as {diagnosis.dtype}", diagnosis.summary.rows
    norm = f"eps {diagnosis.eps:g}{', RMS norm' * (diagnosis.kind == 'rms')}"
    return f"{data}: {rows} row{'s' * (rows != 1)} of {diagnosis.n}, {norm}"


def _median(counts: Array) -> int:
    """Return the median of whole numbers; ``counts[k]`` of them are k."""
    return int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """Return the diagnosis in lines of any length."""
    summary, lines = diagnosis.summary, [_headline(diagnosis)]
    if summary.condition_y.any():
        y, dx = summary.largest_condition_y, summary.largest_condition_dx
        # The median is known to a power of two.
        of_y = min(2.0 ** (_median(summary.condition_y) + 1), y)
        of_dx = min(2.0 ** (_median(summary.condition_dx) + 1), dx)
        lines.append(
            f"  condition number of y: at most {of_y:.2g} in the median row, {y:.2g} in the worst; "
            f"of dx: {of_dx:.2g}, {dx:.2g}"
        )
    for name, meaning in SPECIAL[diagnosis.kind].items():
        if count := summary.marks[name]:
            text = f"  {name}: {count} row{'s' * (count != 1)} ({meaning})"
            lines.append(_filled(text, diagnosis.dtype))
    if summary.rows:
        lines.append(f"  bits of y lost, of {diagnosis.bits}: median row, worst row, rows losing 4")
        longest = max(map(len, diagnosis.methods.values()))
        for title, counts in zip(diagnosis.methods.values(), summary.lost.values(), strict=True):
            cells = "-", "-", "-"
            if counts.any():
                several = f"{counts[4:].sum() / counts.sum():.1%}"
                cells = str(_median(counts)), str(np.flatnonzero(counts)[-1]), several
            lines.append("    {:{}} {:>4} {:>4} {:>9}".format(title, longest, *cells))
        lines += ["  worst rows:", *(f"    {row.advice}" for row in diagnosis.worst)]
    else:
        lines.append("  no rows: nothing to say")
    return lines
