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
from stablenorm.call import SUMS, Backward, Forward, of_rows, sample
from stablenorm.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from stablenorm.reference import uncertified
from stablenorm.reference.doubledouble import PARTIAL, merged
from stablenorm.threads import get_num_threads
from stablenorm.types import NAMES, Array, Cache, Gradients, Norm, Statistics

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
tile_rows = _core.tile_rows


def forward(call: Forward) -> Any:
    """Do what `reference.forward` does."""
    x, norm, y, keep, residual, total, where, samples, threads = call
    if where is not None:
        return NotImplemented
    done = plain_forward(x, norm, -1, y, None, keep, residual, None, threads, total, samples)
    if done is None:
        return NotImplemented
    return done[1].statistics if keep else None


def backward(call: Backward) -> Any:
    """Do what `reference.backward` does; decline rare options."""
    if call.sums == "exact" or call.where is not None:
        return NotImplemented
    if call.dmean is not None or call.drstd is not None:
        return NotImplemented
    # Kernels add to partial sums of "fast".
    sums, merges = call[5:7], call.sums == "pairs" and call.norm.rounding == "nearest"
    made = [np.zeros_like(total) if merges and total is not None else total for total in sums]
    out = call.dx, *made
    cache = Cache(call.x, call.norm, (1,), call.statistics, "native")
    wanted = tuple(name for name, array in zip(NAMES, out, strict=True) if array is not None)
    done = plain_backward(
        call.dy, cache, call.norm.kind, wanted, out, call.dsum, None, None, None, False,
        call.threads, call.plan_rows, call.samples,
    )  # fmt: skip
    if done is None:
        return NotImplemented
    for total, part in zip(sums, made, strict=True):
        if merges and total is not None:
            total[...] = merged(total, part)
    return None


# ---- uncertified rows and columns: kernels call these functions before they return ----


def _finish_forward(
    x: Array, y: Array, norm: Norm, stats: Statistics | None, marks: Array, _: int
) -> None:
    """Write y of the marked rows, and the statistics of rows that are out of range."""
    shape = -1, x.shape[-1]
    call = Forward(x.reshape(shape), norm, y.reshape(shape))
    uncertified.finish_forward(call, np.flatnonzero(marks), stats)


def _finish_backward(
    dy: Array, x: Array, norm: Norm, stats: Statistics, out: Gradients, dsum: Array | None,
    marks: Array, columns: Array, partial: Any, samples: int,
) -> None:  # fmt: skip
    """Write dx of the marked rows, add the rows that are not in the sums, and write the uncertified columns."""
    n = x.shape[-1]
    like_x = (v if v is None else v.reshape(-1, n) for v in (dy, x, out.dx, dsum))
    of_dy, of_x, of_dx, of_dsum = like_x
    shape = (n,) if samples == 1 else (samples, n)
    sums: Any = [total if total is None else total.reshape(shape) for total in out[1:]]
    call = Backward(of_dy, of_x, norm, stats, of_dx, sums[0], sums[1], of_dsum, samples=samples)
    if partial is not None:
        parts = partial.reshape(samples, 2, n, 3).view(PARTIAL)[..., 0]
        unsummed = marks.reshape(samples, -1) & _UNSUMMED != 0
        asked = columns.reshape(samples, 2, n) != 0
        for i in np.flatnonzero(unsummed.any(axis=1) | asked.any(axis=(1, 2))).tolist():
            others = np.flatnonzero(unsummed[i])
            uncertified.finish_sums(sample(call, i), asked[i], others, parts[i])
    if of_dx is not None:
        uncertified.write_dx(call, np.flatnonzero(marks))


# ---- calls that overflowed: an infinity may be the rounding errors of huge terms that cancel ----


def _nearest(norm: Norm, samples: int) -> Norm:
    """Return a norm with rounding to nearest, gamma and beta of the shape of rows."""
    shape = (-1,) if samples == 1 else (samples, -1)
    gamma, beta = (None if v is None else v.reshape(shape) for v in norm[:2])
    return norm._replace(gamma=gamma, beta=beta, rounding="nearest")


def _repeat_forward(x: Array, y: Array, norm: Norm, samples: int) -> None:
    """Compute rows whose y is not finite again, with rounding to nearest."""
    of_x, of_y = (v.reshape(-1, v.shape[-1]) for v in (x, y))
    whole = Forward(of_x, _nearest(norm, samples), of_y, keep=False, samples=samples)
    for i in range(samples):
        one = sample(whole, i)
        rows = np.flatnonzero(reference.lost(one.y, one.x))
        few = of_rows(one, rows)
        if rows.size and forward(few) is NotImplemented:
            reference.forward(few)
        one.y[rows] = few.y


def _repeat_backward(
    dy: Array, x: Array, norm: Norm, out: Gradients, dsum: Array | None,
    marks: Array | None, accumulate: bool, samples: int,
) -> None:  # fmt: skip
    """
    Compute rows of dx and columns of sums that are not finite again, with rounding to nearest.

    Where dx takes the place of dy, `marks` tell its rows, whose dy is left. Then sums stay, as those do that were added.
    """
    n = x.shape[-1]
    like_x: Any = (v if v is None else v.reshape(-1, n) for v in (dy, x, out.dx, dsum))
    of_dy, of_x, of_dx, of_dsum = like_x
    none = Statistics(None, None, np.zeros(len(of_x)))
    whole = Backward(
        of_dy, of_x, _nearest(norm, samples), none, of_dx, dsum=of_dsum, samples=samples
    )
    if marks is None and not accumulate:
        shape = (n,) if samples == 1 else (samples, n)
        dgamma, dbeta = (v if v is None else v.reshape(shape) for v in out[1:])
        whole = whole._replace(dgamma=dgamma, dbeta=dbeta)
    for i in range(samples):
        one = sample(whole, i)
        if one.dx is not None:
            marked = None if marks is None else marks.reshape(samples, -1)[i]
            lost = reference.lost(one.dx, one.x, one.dy) if marked is None else marked
            few = of_rows(one, rows := np.flatnonzero(lost))._replace(dgamma=None, dbeta=None)
            _differentiate(few)
            one.dx[rows] = few.dx
        for name in SUMS:
            total = getattr(one, name)
            if total is not None and total.dtype != PARTIAL and not np.isfinite(total).all():
                alone = {"dx": None, "dgamma": None, "dbeta": None, name: np.empty_like(total)}
                _differentiate(again := one._replace(**alone))
                np.copyto(total, getattr(again, name), where=~np.isfinite(total))


def _differentiate(call: Backward) -> None:
    """Do a backward from a forward of its own."""
    if call.x.size:
        once = Forward(call.x, call.norm, np.empty_like(call.x))
        done = forward(once)
        statistics = reference.forward(once) if done is NotImplemented else done
        if backward(call := call._replace(statistics=statistics)) is NotImplemented:
            reference.backward(call)


_core.prepare(
    Norm, Cache, Statistics, Gradients, get_num_threads, _finish_forward, _finish_backward,
    _repeat_forward, _repeat_backward, memory.default_limit,
    *(form.dtype.type for form in (FLOAT32, BFLOAT16, FLOAT16, FLOAT64)),
)  # fmt: skip
memory.use(_core)
control.use(_core)
