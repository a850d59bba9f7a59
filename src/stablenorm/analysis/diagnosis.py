"""
What a layer norm would lose on given data: `Diagnosis`, and the instrument that makes one.

The losses are predicted from one sweep over the data, which the caller hands in with the blocks.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stablenorm._types import Array
from stablenorm.analysis import _diagnose_plot, _diagnose_text
from stablenorm.analysis._diagnose_collect import Block, Collector, Row, Summary
from stablenorm.analysis._diagnose_count import Instruments
from stablenorm.analysis._diagnose_methods import METHODS, title_of
from stablenorm.analysis._diagnose_predict import PerRow
from stablenorm.analysis.families import format_of

__all__ = ["Diagnosis", "PerRow", "Row", "Summary", "diagnose_blocks"]


@dataclass(frozen=True)
class Diagnosis:
    """
    What a layer norm would lose on given data; made by `stablenorm.diagnose`.

    Attributes
    ----------
    shape : tuple of int
        Of the data.
    dtype : str
        The dtype that it was judged as.
    axis : tuple of int
        The axes normalized together.
    n : int
        Elements of a row.
    eps : float
        Added to the variance.
    summary : Summary
        All rows together.
    worst : tuple of Row
        The rows that a two-pass loses most on, the worst first; before them those that have no
        layer norm: not finite, or constant with eps 0.
    per_row : PerRow or None
        Numbers of every row; None for a file, whose rows may be too many.
    """

    shape: tuple[int, ...]
    dtype: str
    axis: tuple[int, ...]
    n: int
    eps: float
    summary: Summary
    worst: tuple[Row, ...]
    per_row: PerRow | None = None

    @property
    def bits(self) -> int:
        """The precision p of the dtype: what can be lost."""
        return format_of(self.dtype).p

    @property
    def methods(self) -> dict[str, str]:
        """What each method is, by its name."""
        return {name: title_of(name, self.dtype) for name in METHODS}

    def as_dict(self) -> dict[str, Any]:
        """
        Return everything but `per_row` as plain dicts, lists, str, int, float and None.

        Returns
        -------
        dict
            The attributes by name, with `bits` and `methods`. What JSON has no number for is a
            string, "nan", "inf" or "-inf".

        Examples
        --------
        >>> import numpy as np
        >>> from stablenorm import diagnose
        >>> held = diagnose(np.array([[1.0, 2.0, 4.0]])).as_dict()
        >>> held["summary"]["rows"], held["worst"][0]["index"]
        (1, 0)
        """
        return _diagnose_text.as_dict(self)

    def to_json(self, path: Any = None) -> str:
        """
        Return `as_dict` as JSON text, and write it to a file if one is named.

        Parameters
        ----------
        path : str or path-like, optional
            The file to write, in UTF-8. Default: none.

        Returns
        -------
        str
            The text.
        """
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def plot(self, path: Any, *, format: str | None = None) -> None:
        """
        Draw how many rows lose how many bits, and the condition numbers.

        Parameters
        ----------
        path : str, path-like or binary file
            Where to write the picture.
        format : {"png", "svg", "pdf"}, optional
            Default: by the ending of `path`.

        Raises
        ------
        ImportError
            If Matplotlib is not there.
        """
        _diagnose_plot.plot_diagnosis(self, path, format)

    def __str__(self) -> str:
        """Give the summary, the methods, and the worst rows."""
        return _diagnose_text.as_text(self)

    def __rich__(self) -> Any:
        """Give the same as tables for a rich console."""
        return _diagnose_text.as_rich(self)


def diagnose_blocks(
    blocks: Iterable[Array],
    instruments: Instruments,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    axis: tuple[int, ...],
    eps: float,
    top: int = 10,
    keep_rows: bool = False,
    threads: int = 1,
) -> Diagnosis:
    """
    Diagnose data that comes in blocks of rows.

    Parameters
    ----------
    blocks : iterable of array
        Shape (rows, n) each, in order; any of the four dtypes, and cast to `dtype` here. With one
        thread, a block may be overwritten once the next one has been asked for.
    instruments : Instruments
        `PLAIN` of `stablenorm.analysis._diagnose_count`, or a fast copy.
    shape, axis : tuple of int
        Of the whole data.
    dtype : dtype
        What the data is judged as.
    eps : float
        Added to the variance.
    top : int, default: 10
        How many of the worst rows to describe.
    keep_rows : bool, default: False
        Whether to keep numbers of every row: about 65 bytes each.
    threads : int, default: 1
        How many blocks to work on at a time.

    Returns
    -------
    Diagnosis
        Of all blocks together.
    """
    n = math.prod(shape[i] for i in axis)
    rows = math.prod(shape) // n
    dtype = np.dtype(dtype)
    collector = Collector(n, dtype, eps, instruments, top, rows if keep_rows else 0)

    def measured(block: Array, first: int) -> Block:
        """Return what is found in a block, whose first row that is."""
        # What is too large for a narrower dtype is infinite in it, and counted as that.
        with np.errstate(all="ignore"):
            x = block.astype(dtype, copy=False)
        return collector.measure(x, first)

    for found in _in_order(measured, blocks, threads):
        collector.add(found)
    return Diagnosis(
        shape,
        dtype.name,
        axis,
        n,
        eps,
        collector.summary(),
        collector.worst(),
        collector.per_row() if keep_rows else None,
    )


def _in_order(
    work: Callable[[Array, int], Any], blocks: Iterable[Array], threads: int
) -> Iterator[Any]:
    """Yield what `work` returns for each block and its first row, in order, on so many threads."""
    first = 0
    if threads == 1:
        for block in blocks:
            yield work(block, first)
            first += len(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        # Two for each: one at work, one that waits for this thread or for a worker.
        under_way: deque[Future[Any]] = deque()
        try:
            for block in blocks:
                if len(under_way) == 2 * threads:
                    yield under_way.popleft().result()
                under_way.append(pool.submit(work, block, first))
                first += len(block)
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
