"""
The record of a call: `functional` makes it, once, and a backend does it.

Arrays are plain rows: those of the shape of x are (rows, n), with unit stride within a row; gamma, beta and their gradients
are (n,). With `samples`, the rows are that many equal parts, each with its own gamma and beta, (samples, n). An array that is
missing, or not wanted, is None.

The operation of a backend takes the record. It may decline, by returning NotImplemented before it writes anything: then
`backends.run` takes samples apart, and the reference does a sample. Otherwise it does all of the call.
"""

from typing import Any, NamedTuple

from stablenorm.types import Array, Norm, Statistics


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
    # bool, (rows, n): the elements that count, some in each row. y is 0 elsewhere.
    where: Any = None
    samples: int = 1
    # The most threads; by default `get_num_threads`.
    threads: int | None = None


class Backward(NamedTuple):
    """The record of a backward, which writes dx, dgamma and dbeta."""

    dy: Any
    x: Any
    norm: Norm
    statistics: Statistics
    dx: Any = None
    dgamma: Any = None
    dbeta: Any = None
    # Added to dx, and of its shape.
    dsum: Any = None
    # One float64 for each row, the cotangents of `Cache.mean` and `Cache.rstd`.
    dmean: Array | None = None
    drstd: Array | None = None
    # The mask of `Forward`. dx is dsum or 0 elsewhere.
    where: Any = None
    # "rounded"; "pairs": partial sums, as in `reference.doubledouble`, are added to those in dgamma and
    # dbeta; "exact": exact sums are added to those of the columns that do not hold 0; for
    # `functional` alone, "added": sums are added to values, and rounded once.
    sums: str = "rounded"
    samples: int = 1
    threads: int | None = None
    # The rows of the whole call if this one is a block of it; else 0.
    plan_rows: int = 0


class Jvp(NamedTuple):
    """The record of a jvp, which writes ty; tangents that are None are 0."""

    tx: Any
    x: Any
    norm: Norm
    statistics: Statistics
    tgamma: Array | None
    tbeta: Array | None
    ty: Any
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
    ddy: Any
    dx: Any
    dgamma: Array | None
    where: Any = None


# The operation of each record.
OPERATIONS = {
    Forward: "forward", Backward: "backward", Jvp: "jvp", DoubleBackward: "double_backward",
}  # fmt: skip

# The fields that hold arrays of the shape of x: inputs and results.
READ = frozenset({"x", "dy", "residual", "dsum", "where", "tx", "ddx"})
WRITTEN = frozenset({"y", "total", "dx", "ty", "ddy"})
# Results that are sums over rows.
SUMS = "dgamma", "dbeta"


def change(call: Any, read: Any, written: Any, rows: slice | Array | None) -> Any:
    """Return a call of some rows, None: all; `read` maps its inputs of the shape of x, `written` its results."""
    values = list(call)
    for i, name in enumerate(call._fields):
        if values[i] is None:
            continue
        if name in READ:
            values[i] = read(values[i])
        elif name in WRITTEN:
            values[i] = written(values[i])
        elif name == "statistics" and rows is not None:
            values[i] = values[i].of_rows(rows)
        elif name in ("dmean", "drstd") and rows is not None:
            values[i] = values[i][rows]
    return tuple.__new__(type(call), values)


def of_rows(call: Any, rows: slice | Array) -> Any:
    """Return a call of some rows of plain arrays."""
    return change(call, lambda array: array[rows], lambda array: array[rows], rows)


def sample(call: Any, i: int) -> Any:
    """Return the call of one sample of a call; its arrays are views."""
    if call.samples == 1:
        return call
    count = len(call.x) // call.samples
    return of_sample(of_rows(call, slice(i * count, (i + 1) * count)), i)


def of_sample(call: Any, i: Any) -> Any:
    """Return a call with its rows, but parameters and sums of one sample, or of a slice of them."""
    gamma, beta = (None if parameter is None else parameter[i] for parameter in call.norm[:2])
    norm = call.norm._replace(gamma=gamma, beta=beta)
    sums = {n: total[i] for n in SUMS if (total := getattr(call, n, None)) is not None}
    return call._replace(norm=norm, samples=1, **sums)
