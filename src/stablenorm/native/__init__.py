"""
The CPU kernels in C++: `reference.forward` and `reference.backward`, compiled ahead of time.

They check nothing: `functional` does. Tiles of rows depend on the shape alone, so that no bit depends on the number of
threads; all additions are written out, so that none depends on the processor. rows.h and back_rows.h have the equations
of float16, bfloat16 and float32, pair_rows.h those of float64. With rounding="nearest", pair_rows.h also computes the
rows and columns whose float64 results cannot be rounded safely. Rows and columns that pairs leave are finished here, by
the reference.

STABLENORM_INSTRUCTIONS names the instruction set to use, one of `INSTRUCTIONS`; by default the best.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from stablenorm import memory, reference
from stablenorm.call import Backward, Forward, sample
from stablenorm.reference.partial import PARTIAL, merged, rounded
from stablenorm.threads import get_num_threads
from stablenorm.types import NAMES, Array, Cache, Gradients, Norm, Statistics, joined

try:
    from stablenorm import _core
except ImportError as error:
    msg = (
        f"stablenorm's kernels in C++ are not built ({error}); install a wheel, or a C++17 compiler and "
        "then stablenorm"
    )
    raise ImportError(msg) from error

# Those that this processor has kernels for, the best first.
INSTRUCTIONS: list[str] = _core.instructions()

# The mark of a row that pairs are not for; a row of which an element is uncertified has another.
_EXTREME = 1


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

# The kernels themselves: what they return, or None where a call is not one of plain rows.
plain_forward, plain_backward = _core.forward, _core.backward
tile_rows = _core.tile_rows


def forward(call: Forward) -> Any:
    """Do what `reference.forward` does."""
    x, norm, y, keep, residual, total, where, samples, threads = call
    if where is not None:
        return NotImplemented
    found = plain_forward(x, norm, -1, y, None, keep, residual, None, threads, total, samples)
    if found is not None:
        return found[1].statistics if keep else None
    if samples > 1:
        # A gamma of extreme size is one sample's matter.
        each = [forward(sample(call, i)) for i in range(samples)]
        return joined(each) if keep else None
    kept = reference.forward(call)
    # A backward takes double-double statistics for those of float64 data.
    return (
        kept if x.dtype == np.float64 or not keep else kept._replace(rstd_lo=None, mean_tail=None)
    )


def backward(call: Backward) -> Any:
    """Do what `reference.backward` does; that does what is rare."""
    if call.sums == "exact" or call.where is not None:
        return NotImplemented
    if call.dmean is not None or call.drstd is not None:
        return NotImplemented
    # Kernels add to partial sums of "fast" that are in the range of float64.
    sums, apart = call[5:7], call.sums == "pairs" and call.norm.rounding == "nearest"
    if call.sums == "pairs":
        apart = apart or any(each is not None and each["exponent"].any() for each in sums)
    made = [np.zeros_like(each) if apart and each is not None else each for each in sums]
    out = call.dx, *made
    cache = Cache(call.x, call.norm, (1,), call.statistics, "native")
    wanted = tuple(name for name, array in zip(NAMES, out, strict=True) if array is not None)
    found = plain_backward(
        call.dy, cache, call.norm.kind, wanted, out, call.dsum, None, None, None, False,
        call.threads, call.plan_rows, call.samples,
    )  # fmt: skip
    if found is None and call.samples > 1:
        for i in range(call.samples):
            one = sample(call, i)
            if backward(one) is NotImplemented:
                reference.backward(one)
        return None
    if found is None:
        return NotImplemented
    for total, part in zip(sums, made, strict=True):
        if apart and total is not None:
            total[...] = merged(total, part)
    return None


# ---- rows and columns that the kernels leave, which call these before they return ----


def _finish_forward(
    x: Array, y: Array, norm: Norm, kept: Statistics | None, marks: Array, samples: int
) -> Statistics | None:
    """Write y of the marked rows; return the statistics of all rows, with those of extreme rows."""
    x, y = _as_matrix(x), _as_matrix(y)
    for one, part in _samples_of(norm, np.flatnonzero(marks), len(x), samples):
        found = np.empty((len(part), x.shape[1]), y.dtype)
        some = reference.forward(Forward(x[part], one, found, kept is not None))
        y[part] = found
        # The statistics of rows that are merely uncertified are as good as these.
        extreme = marks[part] == _EXTREME
        if kept is not None and extreme.any():
            kept = _with_extreme(kept, some.of_rows(extreme), part[extreme], marks == _EXTREME)
    return kept


def _with_extreme(kept: Statistics, some: Statistics, rows: Array, extreme: Array) -> Statistics:
    """Return statistics with those of the extreme rows, which may need an exponent, and their marks."""
    for name, word in kept._asdict().items():
        if word is not None and name not in ("exponent", "extreme"):
            made = getattr(some, name)
            word[rows] = 0.0 if made is None else made
    exponent = kept.exponent
    if some.exponent is not None:
        exponent = np.zeros((len(extreme), 2), np.int16) if exponent is None else exponent
        exponent[rows] = some.exponent
    if some.mean_tail is not None and kept.mean_tail is None and kept.rstd_lo is not None:
        kept = kept._replace(mean_tail=np.zeros(len(extreme)))
        kept.mean_tail[rows] = some.mean_tail  # type: ignore[index]
    return kept._replace(exponent=exponent, extreme=extreme.view(np.uint8))


def _finish_backward(
    dy: Array, x: Array, norm: Norm, kept: Statistics, out: Gradients, dsum: Array | None,
    marks: Any, open_: Any, partial: Any, samples: int,
) -> None:  # fmt: skip
    """Write dx of the marked rows, and the sums of samples that have some or whose columns are open."""
    dy, x, dsum = _as_matrix(dy), _as_matrix(x), None if dsum is None else _as_matrix(dsum)
    n, count = x.shape[1], len(x) // samples
    rows = np.flatnonzero(marks) if marks is not None else np.empty(0, int)
    touched = np.zeros(samples, bool)
    for left in (marks, open_):
        if left is not None:
            touched |= left.reshape(samples, -1).any(axis=1)
    for i in np.flatnonzero(touched).tolist():
        own = slice(i * count, (i + 1) * count)
        dgamma, dbeta = (None if each is None else each.reshape(samples, n)[i] for each in out[1:])
        one = norm if samples == 1 else norm.sample(i)
        call = Backward(dy[own], x[own], one, kept.of_rows(own), None, dgamma, dbeta)
        columns = None if open_ is None else open_.reshape(samples, 2, n)[i]
        extreme = np.flatnonzero(marks[own] == _EXTREME) if marks is not None else rows
        if extreme.size and partial is not None:
            _add_extreme(call, extreme, partial.reshape(samples, 2, n, 4)[i], columns)
        if columns is not None:
            _finish_columns(call, columns)
    # The sums come first: dx may be written over dy.
    dx: Any = out.dx
    for one, part in _samples_of(norm, rows, len(x), samples) if dx is not None else ():
        found = np.empty((len(part), n), x.dtype)
        added = None if dsum is None else dsum[part]
        some = Backward(dy[part], x[part], one, kept.of_rows(part), found, dsum=added)
        reference.backward(some)
        _as_matrix(dx)[part] = found


def _add_extreme(call: Backward, rows: Array, others: Array, open_: Any) -> None:
    """Write the sums, given those over the rows that are not extreme; mark columns that stay open."""
    totals = call.dgamma, call.dbeta
    parts = [None if total is None else np.zeros(total.shape, PARTIAL) for total in totals]
    dgamma, dbeta = parts
    dy, x, kept = call.dy[rows], call.x[rows], call.statistics.of_rows(rows)
    reference.backward(Backward(dy, x, call.norm, kept, None, dgamma, dbeta, sums="pairs"))
    for i, (total, part) in enumerate(zip(totals, parts, strict=True)):
        if total is None or part is None:
            continue
        both = merged(others[i].view(PARTIAL).reshape(part.shape), part)
        if total.dtype == PARTIAL:
            total[...] = both
            continue
        total[...], undecided = rounded(both, total.dtype)
        if open_ is not None:
            open_[i] = undecided


def _finish_columns(call: Backward, open_: Array) -> None:
    """Round the open columns of dgamma and of dbeta correctly, with integers."""
    for i, name in enumerate(("dgamma", "dbeta")):
        total, columns = getattr(call, name), np.flatnonzero(open_[i])
        if total is not None and columns.size:
            # Integers take a microsecond an element: the other sum is left alone.
            alone: Any = {"dgamma": None, "dbeta": None, name: total}
            total[columns] = reference.nearest.columns_of_sums(call._replace(**alone), columns)[i]


def _samples_of(norm: Norm, rows: Array, count: int, samples: int) -> Any:
    """Yield the norm of each sample that has some of the rows, and these."""
    if samples == 1:
        if rows.size:
            yield norm, rows
        return
    of_sample = rows // (count // samples)
    for i in np.unique(of_sample):
        yield norm.sample(i), rows[of_sample == i]


def _as_matrix(array: Array) -> Array:
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


_core.prepare(
    Norm, Cache, Statistics, Gradients, NAMES, get_num_threads, _finish_forward, _finish_backward,
    memory.default_limit,
)  # fmt: skip
memory.use(_core)
