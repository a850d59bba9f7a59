"""
The CPU kernels in C++: `reference.forward` and `reference.backward`, compiled ahead of time.

They check nothing: `functional` does. Tiles of rows depend on the shape alone, so that no bit depends on the number of
threads; all additions are written out, so that no bit depends on the processor. rows.h and back_rows.h have the equations
for float16, bfloat16 and float32, pair_rows.h for float64. With rounding="nearest", pair_rows.h also computes rows and
columns that float64 leaves uncertified, and this module finishes those that pairs leave, with integers.

STABLENORM_INSTRUCTIONS names the instruction set to use, one of `INSTRUCTIONS`; by default the best.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from stablenorm import control, memory, reference
from stablenorm.arrays import as_rows
from stablenorm.call import Backward, Forward
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from stablenorm.records import NAMES, Array, Cache, Gradients, Norm, Statistics, new_norm
from stablenorm.reference import uncertified
from stablenorm.reference.sums import PARTIAL
from stablenorm.threads import get_num_threads

try:
    from stablenorm import _core
except ImportError as error:
    msg = (
        f"stablenorm's kernels in C++ are not built ({error}); install a wheel, or a C++17 compiler and "
        "then stablenorm"
    )
    raise ImportError(msg) from error

# The instruction sets of this processor that have kernels, the best first.
INSTRUCTIONS: list[str] = _core.instructions()

# The bit of a row's mark: the sums over rows lack its terms.
_UNSUMMED = 2


def use(instructions: str) -> None:
    """Use the kernels of an instruction set."""
    if instructions not in INSTRUCTIONS:
        msg = f"STABLENORM_INSTRUCTIONS must be one of {', '.join(INSTRUCTIONS)}, got {instructions!r}"
        raise ValueError(msg)
    _core.use(instructions)


if not INSTRUCTIONS:
    msg = "stablenorm's kernels in C++ need a processor with AVX2, FMA and F16C, which this one has not"
    raise ImportError(msg)
if "STABLENORM_INSTRUCTIONS" in os.environ:
    use(os.environ["STABLENORM_INSTRUCTIONS"])

# The kernels themselves; they return None if a call is not one of plain rows.
plain_forward, plain_backward = _core.forward, _core.backward

# The faster constructor of a NamedTuple.
_new = tuple.__new__


def forward(call: Forward) -> Any:
    """Do what `reference.forward` does; it does what kernels decline."""
    done = plain_forward(
        call.x,
        call.norm,
        -1,
        call.y,
        None,
        call.keep,
        call.residual,
        None,
        call.threads,
        call.total,
    )
    if done is None:
        statistics = reference.forward(_declined(call))
        if call.x.dtype == np.float64:
            # No row has the digits of pairs: the backward sends them to integers.
            lost = np.full(len(call.x), np.nan)
            tail = None if statistics.mean is None else lost
            statistics = statistics._replace(rstd_lo=lost, mean_tail=tail)
        return statistics
    return done[1].statistics if call.keep else None


def backward(call: Backward) -> None:
    """Do what `reference.backward` does; it does what kernels decline."""
    norm, sums, partial = call.norm, (call.dgamma, call.dbeta), None
    wanted = []
    for name, result in zip(NAMES, (call.dx, *sums), strict=True):
        if result is not None:
            wanted.append(name)
    if PARTIAL in (getattr(sums[0], "dtype", None), getattr(sums[1], "dtype", None)):
        partial = np.zeros((2, call.x.shape[1], 3))
    elif call.dbeta is not None:
        # Kernels return the gradient of what there is: dbeta stands for beta, which no backward reads.
        norm = new_norm((norm.gamma, call.dbeta, norm.eps, norm.kind, 0.0, norm.rounding))
    cache = _new(Cache, (call.x, norm, (1,), call.statistics, "native", None))
    out = (call.dx, *((None, None) if partial is not None else sums))
    done = plain_backward(
        call.dy, cache, norm.kind, tuple(wanted), out, call.dsum, call.threads, partial
    )
    if done is None:
        reference.backward(_declined(call))
    elif partial is not None:
        for total, words in zip(sums, partial.view(PARTIAL)[..., 0], strict=True):
            if total is not None:
                total[...] = words


def _declined(call: Any) -> Any:
    """Return a call whose gamma or beta is out of range, for integers where pairs would be needed."""
    needs_pairs = call.x.dtype == np.float64
    return call._replace(norm=_nearest(call.norm)) if needs_pairs else call


# ---- uncertified rows and columns: kernels call these functions before they return ----


def _rows(axes: Any, *arrays: Any) -> list[Any]:
    """Return arrays of the shape of x as rows, or copies of them."""
    return [v if v is None else as_rows(v, axes) for v in arrays]


def _put(result: Array | None, axes: Any, rows: Any) -> None:
    """Write rows of results to an array, unless they are its memory."""
    if result is not None and not np.may_share_memory(rows, result):
        moved = np.moveaxis(result, axes, range(result.ndim - len(axes), result.ndim))
        moved[...] = rows.reshape(moved.shape)


def _finish_forward(
    x: Array, y: Array, norm: Norm, stats: Statistics | None, marks: Array, axes: Any
) -> None:
    """Write y of the marked rows, and the statistics of rows that are out of range."""
    of_x, of_y = _rows(axes, x, y)
    lost = None if stats is None else stats.out_of_range
    uncertified.finish_forward(Forward(of_x, norm, of_y), np.flatnonzero(marks), stats, lost)
    _put(y, axes, of_y)


def _finish_backward(
    dy: Array, x: Array, norm: Norm, stats: Statistics, out: Gradients, dsum: Array | None,
    axes: Any, marks: Array, columns: Array, partial: Any, unrounded: bool,
) -> None:  # fmt: skip
    """Write dx of the marked rows, add the rows that are not in the sums, and write the uncertified columns."""
    of_dy, of_x, of_dx, of_dsum = _rows(axes, dy, x, out.dx, dsum)
    call = Backward(of_dy, of_x, norm, stats, of_dx, dsum=of_dsum)
    # Partial sums are there if a row is not in the sums, or if they are what is asked for.
    parts: Any = None if partial is None else partial.reshape(2, -1, 3).view(PARTIAL)[..., 0]
    sums = (v if v is None else v.reshape(-1) for v in (out.dgamma, out.dbeta))
    dgamma, dbeta = parts if unrounded else sums
    of_sums = call._replace(dgamma=dgamma, dbeta=dbeta)
    unsummed = np.flatnonzero(marks & _UNSUMMED)
    others = parts if len(unsummed) else None
    uncertified.finish_sums(of_sums, columns.reshape(2, -1) != 0, unsummed, others)
    if of_dx is not None:
        uncertified.write_dx(call, np.flatnonzero(marks))
        _put(out.dx, axes, of_dx)


# ---- calls that overflowed: an infinity may be the rounding errors of huge terms that cancel ----


def _nearest(norm: Norm) -> Norm:
    """Return a norm with rounding to nearest."""
    gamma, beta = (None if v is None else v.reshape(-1) for v in (norm.gamma, norm.beta))
    return norm._replace(gamma=gamma, beta=beta, rounding="nearest")


def _repeat_forward(x: Array, y: Array, norm: Norm, axes: Any) -> None:
    """Compute rows whose y is not finite again, with rounding to nearest."""
    of_x, of_y = _rows(axes, x, y)
    if (rows := np.flatnonzero(reference.lost(of_y, of_x))).size:
        few = Forward(of_x[rows], _nearest(norm), of_y[rows], keep=False)
        forward(few)
        of_y[rows] = few.y
        _put(y, axes, of_y)


def _repeat_backward(
    dy: Array, x: Array, norm: Norm, out: Gradients, dsum: Array | None, axes: Any,
    marks: Array | None,
) -> None:  # fmt: skip
    """
    Compute rows of dx and columns of sums that are not finite again, with rounding to nearest.

    Where dx takes the place of dy, `marks` tell its rows, whose dy is left. Then sums stay.
    """
    of_dy, of_x, of_dx, of_dsum = _rows(axes, dy, x, out.dx, dsum)
    none = Statistics(None, None, np.zeros(len(of_x)))
    if of_dx is not None:
        rows = np.flatnonzero(reference.lost(of_dx, of_x, of_dy) if marks is None else marks)
        of_rows = None if of_dsum is None else of_dsum[rows]
        few = Backward(of_dy[rows], of_x[rows], norm, none, of_dx[rows], dsum=of_rows)
        _differentiate(few)
        of_dx[rows] = few.dx
        _put(out.dx, axes, of_dx)
    for name, total in (("dgamma", out.dgamma), ("dbeta", out.dbeta)):
        if marks is None and total is not None and not np.isfinite(total).all():
            again = np.empty_like(total).reshape(-1)
            call: Any = Backward(of_dy, of_x, norm, none)
            _differentiate(call._replace(**{name: again}))
            np.copyto(total, again.reshape(total.shape), where=~np.isfinite(total))


def _differentiate(call: Backward) -> None:
    """Do a backward from a forward of its own, with rounding to nearest."""
    norm = _nearest(call.norm)._replace(beta=None)
    if call.x.size:
        statistics = forward(Forward(call.x, norm, np.empty_like(call.x)))
        backward(call._replace(statistics=statistics, norm=norm))


_core.prepare(
    Norm, Cache, Statistics, Gradients, get_num_threads, _finish_forward, _finish_backward,
    _repeat_forward, _repeat_backward, memory.default_limit,
    *(form.dtype.type for form in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)),
)  # fmt: skip
memory.use(_core)
control.use(_core)
