r"""
Derivatives of a program by differences of the program itself, each with its own error bound.

L = <u, forward(args)> is moved along a direction D of one argument, whose entries are powers of
two in proportion to that argument's own scale, to x + step D and x - step D. Both are *formed in
floating point*, and L(x+) - L(x-) is compared with <gradient, x+ - x->: that difference of the
two arrays is exact, whereas 2 step D is not what the program saw once x has an offset.

L itself is never formed. <u, y+ - y-> is: the subtraction of neighbours is exact (Sterbenz), and
outputs that did not move contribute nothing, not even their rounding errors. The sum is NumPy's
pairwise one; its error, at most (log2(size) + 8) roundings of sum|u (y+ - y-)|, is part of the
bound. `math.fsum` would remove a term that is smaller than all the others.

The secants at steps of about 2^-2 .. 2^-9 go through a Richardson tableau in step^2 (L. F.
Richardson 1911; the stopping idea is that of C. J. F. Ridders, Adv. Eng. Software 4 (1982) 75).
For every entry the weights of the secants it is made of are kept, so that the bound of an entry is

    disagreement with its two parents + sum |weight| * noise / step

and the entry of least bound is returned. The second term keeps an accidental agreement of two
entries from being taken for accuracy. The noise is measured, see `measure_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._types import Array, bfloat16, check_dtype

Forward = Callable[..., Any]

# In units of the argument's scale. A quarter is the largest step at which the series in step^2
# of such maps as a normalization still converges fast; with 2^-9 the plain secant has a
# truncation error of 4e-6, below which only the extrapolated entries matter.
_STEPS = tuple(2.0**-k for k in range(2, 10))

# Bits of the significand; half an ulp is at most 2^-digits of the number.
_DIGITS = {np.dtype(np.float16): 11, bfloat16: 8, np.dtype(np.float32): 24}

# Points on the line on which noise is measured: x and 8 more leave 4 differences of order 5 and
# 3 of order 6.
_POINTS = 9
_ORDERS = (5, 6)
# Their distance, in units of scale: the fifth difference of a smooth function is then 2^-55 of it,
# out of sight below float64, and the distance is an ulp of a float16.
_SPACING = 2.0**-11
# The tiny moves: with 8 of them, the rounding of a sum of two floats, the hardest to disturb, goes
# unseen once in 2^8 rows; 18 runs then leave 9 degrees of freedom. Six times their size is how far
# x goes, and the square of that, 2^-56, is what they add to the noise of a smooth function.
_RUNS, _MOVES = 18, 8
_TINY = 2.0**-31
# From a standard deviation to a bound: with the two ends of a secant independent, 5.6 standard
# deviations of their difference.
_SIGMAS = 4.0


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Return u, the largest relative error of one rounding to `dtype`."""
    return 2.0 ** -_DIGITS.get(dtype, 53)


class Derivative(NamedTuple):
    """
    Along one direction D: <gradient, D>, the same by secants, and a bound on the latter's error.

    `noise` bounds what rounding in the forward does to the terms u y that moved, taken together
    as independent: in their sum, which is what `bound` knows of, it may happen to cancel.
    """

    actual: float
    numeric: float
    bound: float
    noise: float


_UNKNOWN = Derivative(math.nan, math.nan, math.inf, math.inf)


class Loss:
    """L = <u, forward(args)>, seen through differences of outputs; counts the calls."""

    def __init__(self, forward: Forward, args: list[Array | None], rng: np.random.Generator):
        self.args = args
        self.calls = 0
        self._forward = forward
        y, self.cache = self._call(args)
        self.shape, self.dtype = y.shape, y.dtype
        self.y = _flat(y)
        # Signed, since many maps annihilate the ones; multiples of 1/16 below 4, which every one
        # of the four dtypes holds exactly, so that dy is the same in all of them.
        u = np.round(rng.standard_normal(y.size) * 16).clip(-63, 63) / 16
        self.u = np.where(u == 0, 0.0625, u)
        # By argument: samples of the noise of u y, and its usual size relative to u y.
        self.noise: dict[int, list[Array]] = {}
        self.level: dict[int, float] = {}

    def _call(self, args: list[Array | None]) -> tuple[Array, Any]:
        self.calls += 1
        # Copies: what the forward does to its arguments must not reach the next call.
        result = self._forward(*(None if a is None else a.copy() for a in args))
        if not (isinstance(result, tuple) and len(result) == 2):
            msg = f"forward must return (y, cache), got {type(result).__name__}"
            raise TypeError(msg)
        y = np.asarray(result[0])
        check_dtype("the y that forward returns", y)
        return y, result[1]

    def cotangent(self) -> Array:
        """Return u as dy: of the shape and dtype of y."""
        return self.u.reshape(self.shape).astype(self.dtype)

    def output(self, position: int, where: int | slice, values: Array) -> Array:
        """Return y, flat float64, with the entries `where` of one argument set to `values`."""
        args = list(self.args)
        moved = np.array(args[position], order="C")
        moved.reshape(-1)[where] = values.astype(moved.dtype)
        args[position] = moved
        y, _ = self._call(args)
        if y.shape != self.shape:
            msg = f"forward must return y of one shape, got {self.shape}, then {y.shape}"
            raise ValueError(msg)
        return _flat(y)


def _flat(y: Array) -> Array:
    return y.astype(np.float64).reshape(-1)


def powers_of_two(scale: Array) -> Array:
    """Round down to powers of two, so that dividing by them is exact."""
    return np.ldexp(0.5, np.frexp(scale)[1])


def measure_noise(loss: Loss, position: int, scale: Array, rng: np.random.Generator) -> None:
    """
    Store, for one argument, samples of the rounding noise of every output element.

    All elements of the argument move at once, by random multiples of their ulp, so that every
    rounding in the forward is drawn anew; the samples then serve all directions. Twice:

    - along a line, in the manner of ECNoise (J. J. More and S. M. Wild, SIAM J. Sci. Comput. 33
      (2011) 1292): high differences of y on equidistant points remove what is smooth and leave
      noise of a known multiple. The points are far enough apart to see float16 inside;
    - at random integer combinations of a few tiny moves: what is orthogonal to every linear
      effect of theirs is noise. The line alone misses a rounding now and then: equal moves leave
      that of a sum of 8 elements as it is if they add up to a multiple of 8 ulp. (So does a
      two-level design, whose levels are parities, as roundings are.)
    """
    base = np.asarray(loss.args[position])
    x = _flat(base)
    # An ulp of x: the moved x needs no rounding, and has new last bits.
    exponent = np.frexp(np.maximum(np.abs(x), _TINY * scale))[1]
    quantum = np.ldexp(1.0, np.maximum(exponent - _DIGITS.get(base.dtype, 53), -1074))

    def moves(size: float, count: int) -> Array:
        ulps = np.maximum(size * scale / quantum, 1)
        # None near 0: each element is to leave its rounding behind.
        factors = rng.uniform(1, 2, (count, x.size)) * rng.choice([-1, 1], (count, x.size))
        return np.round(factors * ulps) * quantum

    def outputs(offsets: Array) -> Array:
        values = [loss.output(position, slice(None), x + offset) for offset in offsets[1:]]
        table = np.array([loss.y, *values]) * loss.u
        # An output that is not finite near x has no noise to speak of: its bound will be
        # infinite, by the floor that `_noise` takes from y, or by the secants.
        return np.where(np.isfinite(table), table, 0.0)

    (move,) = moves(_SPACING, 1)
    table = outputs(np.arange(_POINTS)[:, None] * move)
    # The k-th difference of noise of variance 1 has variance (2k)! / (k!)^2.
    samples = [np.diff(table, k, axis=0) / math.sqrt(math.comb(2 * k, k)) for k in _ORDERS]
    # The first run is x itself.
    design = rng.integers(-3, 4, size=(_RUNS, _MOVES)) * (np.arange(_RUNS) > 0)[:, None]
    linear = np.column_stack([np.ones(_RUNS), design])
    noise_only = np.linalg.qr(linear, mode="complete").Q[:, linear.shape[1] :]
    samples.append(noise_only.T @ outputs(design @ moves(_TINY, _MOVES)))
    loss.noise[position] = samples
    # Seven differences can all be small; those of all outputs together cannot. The median, so that
    # one ill-conditioned row does not speak for the others.
    sigma = np.sqrt(np.max([np.mean(np.square(each), axis=0) for each in samples], axis=0))
    size = np.abs(loss.u * loss.y)
    relative = float(np.median(sigma[size > 0] / size[size > 0])) if (size > 0).any() else 0.0
    # Whatever was measured, every output was rounded to its dtype: half an ulp.
    loss.level[position] = max(_SIGMAS * relative, 2 * unit_roundoff(loss.dtype))


def _noise(loss: Loss, position: int, reach: Array) -> tuple[float, float]:
    """
    Bound the noise of one evaluation of <u, y>, over the outputs that moved; see Derivative.

    `reach` is the largest magnitude that each of them had, 0 for those that did not move.
    """
    changed = reach > 0
    if not changed.any():
        changed, reach = np.ones_like(changed), np.abs(loss.y)
    places = np.flatnonzero(changed)
    if not np.isfinite(loss.y[changed]).all():
        return math.inf, math.inf
    summed = apart = 0.0
    for samples in loss.noise[position]:
        terms = samples[:, places]
        summed = max(summed, float(np.mean(np.square(terms.sum(axis=1)))))
        apart = max(apart, float(np.mean(np.sum(np.square(terms), axis=1))))
    # At least the usual noise of all outputs, in unrelated directions.
    floor = loss.level[position] * float(np.linalg.norm((loss.u * reach)[places]))
    return max(_SIGMAS * math.sqrt(summed), floor), max(_SIGMAS * math.sqrt(apart), floor)


class _Secant(NamedTuple):
    """One row of the tableau: what the secant at `step` says, and what disturbs it."""

    step: float
    numeric: float
    actual: float
    # Errors other than noise: of the sum, and of a centre that is not exactly x.
    error: float


def _secant(
    loss: Loss, position: int, where: int | slice, scale: Array, gradient: Array, step: float
) -> tuple[_Secant, Array, Array] | None:
    """Form x+ and x-, evaluate, and compare; None where the dtype cannot make this step."""
    base = np.asarray(loss.args[position])
    x = _flat(base)[where]

    def rounded(values: Array) -> Array:
        with np.errstate(over="ignore"):
            return values.astype(base.dtype).astype(np.float64)

    # Symmetric about x exactly: each side takes the step that the other one could make.
    minus = rounded(x - (rounded(x + step * scale) - x))
    plus = rounded(x + (x - minus))
    taken = plus - minus
    # Rounding x may take the step off by a sixteenth: more, and the tableau, which believes in
    # one direction, has nothing to gain from it.
    if not np.linalg.norm(taken / (2 * step * scale) - 1) <= np.sqrt(np.size(x)) / 16:
        return None
    y_plus = loss.output(position, where, plus)
    y_minus = loss.output(position, where, minus)
    if not (np.isfinite(y_plus).all() and np.isfinite(y_minus).all()):
        return None
    # The step that was taken; for a single element, this makes `actual` the gradient itself.
    # Relative to the largest scale, whose square may overflow.
    largest = np.max(np.abs(scale))
    relative = scale / largest
    step = float(np.sum(taken / largest * relative) / (2 * np.sum(relative * relative)))
    moved = y_plus - y_minus
    terms = loss.u * moved
    numeric = float(np.sum(terms)) / (2 * step)
    actual = float(np.sum(gradient * taken)) / (2 * step)
    roundings = (math.log2(terms.size + 1) + 8) * float(np.sum(np.abs(terms))) / (2 * step)
    off_centre = float(np.max(np.abs((plus - x) - (x - minus)) / (2 * np.abs(scale))))
    bend = abs(float(np.sum(loss.u * (y_plus + y_minus - 2 * loss.y)))) / step**2
    # 8: the few operations on `actual` and on the tableau.
    error = 2.0**-53 * (roundings + 8 * abs(actual)) + bend * off_centre
    return _Secant(step, numeric, actual, error), y_plus, y_minus


def differentiate(
    loss: Loss,
    position: int,
    where: int | slice,
    scale: Array,
    gradient: Array,
    enough: float,
    rng: np.random.Generator,
) -> Derivative:
    """
    Compare <gradient, D> with secants along D; `scale` holds D, signed powers of two.

    Stops early once the bound is below `enough` (the backward's own rounding: nothing finer can
    be judged) or two further steps have not improved it.
    """
    rows: list[_Secant] = []
    reach = np.zeros(loss.y.size)
    noise = _noise(loss, position, reach)
    best = _UNKNOWN._replace(actual=float(np.sum(gradient * scale)))
    tableau: list[Array] = []
    stale = 0
    for power in _STEPS:
        # Not quite halved, so that the last bits of x are drawn anew at every step: a forward
        # whose rounding errors are the same at all steps would hide them from the tableau.
        step = power * (1 + rng.random() / 4)
        found = _secant(loss, position, where, scale, gradient, step)
        if found is None:
            continue
        row, *ends = found
        moved = ends[0] != ends[1]
        # Outputs that moved before and now stand still: the step is below the resolution of the
        # forward (float16 inside, say), and a derivative of zero would be an artefact.
        if reach.any() and not moved.any():
            break
        # The first step goes farthest; later ones seldom move an output that it did not.
        if (moved & (reach == 0)).any():
            reach[moved] = np.max(np.abs([loss.y, *ends]), axis=0)[moved]
            noise = _noise(loss, position, reach)
        rows.append(row)
        tableau, entry = _extend(tableau, rows, noise)
        stale = 0 if entry.bound < best.bound else stale + 1
        best = min(best, entry, key=lambda derivative: derivative.bound)
        # Never on a difference: beside a kink, only the steps that do not reach it are right.
        agrees = abs(best.actual - best.numeric) <= best.bound
        if len(rows) >= 4 and agrees and (best.bound <= enough or stale >= 2):
            break
    return best


def _extend(
    previous: list[Array], rows: list[_Secant], noise: tuple[float, float]
) -> tuple[list[Array], Derivative]:
    """
    Add the newest secant to the tableau; return its row and the entry of least bound in it.

    An entry is (actual, numeric, then the weight of each secant in it).
    """
    k = len(rows) - 1
    entry = np.zeros(2 + len(_STEPS))
    entry[:2], entry[2 + k] = (rows[k].actual, rows[k].numeric), 1
    line = [entry]
    best = _UNKNOWN
    disturbance = np.array([noise[0] / row.step + row.error for row in rows])
    for j in range(1, k + 1):
        # Eliminates the term in step^(2j): neighbours weighted by their squared steps.
        q = (rows[k - j].step / rows[k].step) ** 2
        entry = (q * line[j - 1] - previous[j - 1]) / (q - 1)
        line.append(entry)
        residual, *parents = (float(e[1] - e[0]) for e in (entry, line[j - 1], previous[j - 1]))
        disagreement = max(abs(residual - parent) for parent in parents)
        bound = disagreement + float(np.abs(entry[2 : 3 + k]) @ disturbance)
        if bound < best.bound:
            best = Derivative(float(entry[0]), float(entry[1]), bound, noise[1])
    return line, best
