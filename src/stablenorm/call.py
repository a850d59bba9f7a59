"""
The record of a call: `functional` makes it, and a backend does it.

Arrays are plain rows: those of the shape of x are (rows, n), with unit stride within a row; gamma, beta and their gradients
are (n,). An array that is missing, or not wanted, is None. A backend writes the results of all that the record asks for.
"""

from typing import Any, NamedTuple

from stablenorm.records import Norm, Statistics


class Forward(NamedTuple):
    """The record of a forward, which writes y and returns the statistics."""

    x: Any
    norm: Norm
    y: Any
    # Whether the statistics are wanted.
    keep: bool = True
    # Added to x; the sum goes into `total`, which is then what is normalized.
    residual: Any = None
    total: Any = None
    # The most threads; by default `get_num_threads`.
    threads: int | None = None


class Backward(NamedTuple):
    """The record of a backward, which writes dx, dgamma and dbeta."""

    dy: Any
    x: Any
    norm: Norm
    statistics: Statistics
    dx: Any = None
    # Sums rounded to their dtype; or, if that is `reference.sums.PARTIAL`, not yet.
    dgamma: Any = None
    dbeta: Any = None
    # Added to dx, and of its shape.
    dsum: Any = None
    threads: int | None = None
