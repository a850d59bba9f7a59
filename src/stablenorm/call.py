"""
The record of a call: what `functional` makes, once, of what was given, and a backend does.

Arrays of the shape of x are seen as (rows, n), as `Arrays.rows` returns them; those of a call with `samples`
as (samples, rows, n), and gamma and beta as (samples, n). What is not wanted, or not given, is None.

The operation of a backend takes the record. It may decline, by returning NotImplemented before anything is
written: then the reference does all of it. Otherwise it returns with all of it done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from stablenorm.types import Array, Gradients, Norm, Statistics


class Forward(NamedTuple):
    """The record of a forward, which returns the statistics."""

    x: Any
    norm: Norm
    # None where the statistics alone are wanted.
    y: Any
    # Whether the statistics are wanted.
    keep: bool = True
    # Added to x; the sum goes into `total`, which is then what is normalized.
    residual: Any = None
    total: Any = None
    # bool, (rows, 1) or (rows, n): what counts. y and the statistics are 0 elsewhere.
    where: Any = None
    # How many parts of x have a gamma and beta of their own.
    samples: int | None = None
    # How many threads may take part; by default `get_num_threads`.
    threads: int | None = None

    def sample(self, i: int) -> Forward:
        """Return the call of one sample."""
        x, norm, y, keep, residual, total, where, _, threads = self
        added = part(residual, i), part(total, i)
        return Forward(
            x[i], norm.sample(i), part(y, i), keep, *added, part(where, i), None, threads
        )


class Backward(NamedTuple):
    """The record of a backward, which writes into those arrays of `out` that are not None."""

    dy: Any
    x: Any
    norm: Norm
    statistics: Statistics
    out: Gradients
    # Of the shape of x, added to dx.
    dsum: Any = None
    # Of one float64 for each row, the cotangents of `Cache.mean` and `Cache.rstd`.
    dmean: Array | None = None
    drstd: Array | None = None
    # As in `Forward`. dx is dsum or 0 elsewhere.
    where: Any = None
    # float64 (2, n): what dgamma and dbeta are added to before they are rounded; with samples (samples, 2, n).
    old: Array | None = None
    # "rounded"; "pairs", not rounded, as `reference.partial` has them; or "exact": then dgamma and dbeta
    # have True where an exact sum is wanted, and get it.
    sums: str = "rounded"
    samples: int | None = None
    threads: int | None = None

    def sample(self, i: int) -> Backward:
        """Return the call of one sample."""
        like_x = {name: part(getattr(self, name), i) for name in ("dy", "x", "dsum", "where")}
        of_rows = {name: part(getattr(self, name), i) for name in ("dmean", "drstd", "old")}
        return self._replace(
            **like_x,
            **of_rows,
            norm=self.norm.sample(i),
            statistics=self.statistics.of_rows(i),
            out=Gradients._make(part(each, i) for each in self.out),
            samples=None,
        )


class Jvp(NamedTuple):
    """The record of a jvp, which writes ty; tangents that are None are 0."""

    tx: Any
    x: Any
    norm: Norm
    statistics: Statistics
    tgamma: Array | None
    tbeta: Array | None
    ty: Any
    # bool, (rows, n).
    where: Any = None


class DoubleBackward(NamedTuple):
    """The record of a double backward, which writes ddy, dx and, if it is not None, dgamma."""

    ddx: Any
    dy: Any
    x: Any
    norm: Norm
    statistics: Statistics
    ddgamma: Array | None
    ddbeta: Array | None
    out: tuple[Any, Any, Array | None]
    where: Any = None


def part(array: Any, i: Any) -> Any:
    """Return what is at `i`, None of None."""
    return None if array is None else array[i]
