"""How much of a forward's output is rounding, measured by running it nearby."""

from __future__ import annotations

import math

import numpy as np

from stablenorm._types import Array
from stablenorm.check._loss import Loss, digits, flat, norm, unit_roundoff

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
    x = flat(base)
    # An ulp of x: the moved x needs no rounding, and has new last bits.
    exponent = np.frexp(np.maximum(np.abs(x), _TINY * scale))[1]
    quantum = np.ldexp(1.0, np.maximum(exponent - digits(base.dtype), -1074))

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


def bound_noise(loss: Loss, position: int, reach: Array) -> tuple[float, float]:
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
    floor = loss.level[position] * norm((loss.u * reach)[places])
    return max(_SIGMAS * math.sqrt(summed), floor), max(_SIGMAS * math.sqrt(apart), floor)
