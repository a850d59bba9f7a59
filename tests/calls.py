"""Recipes of calls for test_any_call.py: every keyword, and arrays of any shape, dtype and place in memory."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from norms import NORMS
from rationals import DTYPES

KINDS = f2, bf, f4, f8 = DTYPES
# The dtypes of x, dy, gamma, beta; None for a parameter that is left out.
MIXTURES = [
    *((kind,) * 4 for kind in (*KINDS, f4, f4, f8, f8)),
    (f2, f2, f4, f4),
    (bf, bf, f4, f4),
    (f4, f4, None, None),
    # float64 beside narrower arrays; a narrower dy.
    (f4, f4, f8, bf),
    (f4, bf, f8, f4),
    (f8, bf, f2, None),
    (f2, f2, bf, f8),
    (bf, bf, f2, bf),
]
POISON = 0xA5


# ---- places in memory ----


class Place(NamedTuple):
    """A place in memory: the first axis in it, the step of elements, bytes between rows and in front."""

    first: int = 0
    step: int = 1
    gap: int = 0
    offset: int = 0
    backwards: bool = False


def put(array, place):
    """Copy `array` into poisoned memory; return the copy and the memory."""
    order = (*range(place.first, array.ndim), *range(min(place.first, array.ndim)))
    strides, stride = {}, array.itemsize * place.step
    for axis in reversed(order):
        strides[axis] = stride
        stride = stride * array.shape[axis] + place.gap
    memory = np.full(max(stride, 1) + 256, POISON, np.uint8)
    start = -memory.ctypes.data % 64 + 64 + place.offset
    if place.backwards and array.size:
        start += sum((array.shape[axis] - 1) * strides[axis] for axis in order)
    sign = -1 if place.backwards else 1
    signed = [sign * strides[axis] for axis in range(array.ndim)]
    view = np.ndarray(array.shape, array.dtype, memory.data, start, signed)
    view[...] = array
    return view, memory


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Functions to an array of the same shape and values. For "broadcast", `make` repeats values along the first axis.
INPUTS = {
    # bfloat16 has no other byte order.
    "other byte order": lambda a: a if a.dtype == bf else a.astype(a.dtype.newbyteorder()),
    "read-only": read_only,
    "broadcast": lambda a: np.broadcast_to(a[:1].copy(), a.shape),
}


def lay_out(array, place):
    if array is None or array.ndim == 0:
        return array
    return INPUTS[place](array) if isinstance(place, str) else put(array, place)[0]


# ---- calls ----


class Call(NamedTuple):
    """A recipe: Hypothesis prints it if the call fails."""

    seed: int
    shape: tuple[int, ...]
    axis: int | tuple[int, ...] | None
    # Dtypes of x, dy, gamma, beta, as in `MIXTURES`.
    dtypes: tuple[Any, ...]
    # Places of x, dy, gamma and beta, residual and dsum.
    places: tuple[Any, ...] = (Place(),) * 4
    # Places of y, dx, dgamma and dbeta; None: no `out`, except for the sums with accumulate.
    outs: tuple[Any, ...] = (None,) * 4
    offset: float = 0.0
    eps: float = 1e-5
    kind: str = "layer"
    rounding: str = "fast"
    gamma_offset: float = 0.0
    # None, "rows" or "elements".
    mask: str | None = None
    # A subset of residual, dsum, accumulate, tangents; the dtype of the first two if it is narrower than that of x.
    keywords: tuple[str, ...] = ()
    other: Any = None
    # Axes along which gamma and beta vary; axes that sum_axes leaves out, None: no sum_axes.
    varying: tuple[int, ...] = ()
    apart: tuple[int, ...] | None = None
    # Elements are multiples of 1/4, so that ties abound; a few rows are constant, infinite or out of range.
    hard: bool = False

    def infinite(self):
        return self.hard and self.seed % 3 == 0


PLACES = st.builds(
    Place, st.integers(0, 3), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 6, 24, 64]),
    st.sampled_from([0, 0, 1, 2, 4, 8, 12, 48]), st.booleans(),
)  # fmt: skip


@st.composite
def calls(draw):
    ndim = draw(st.integers(1, 4))
    axes = draw(st.permutations(range(ndim)))[: draw(st.integers(1, ndim))]
    # Lengths around the eight lanes of the kernels and the groups of 32 rows; no rows.
    few = [1, 1, 2, 3, 4, 5, 7, 9, 17]
    lengths = st.sampled_from([*few, 8, 31, 40, 65] if len(axes) == 1 else few)
    rows = st.sampled_from([0, 1, 1, 2, 3, 5, 33] if ndim - len(axes) == 1 else [0, 1, 1, 2, 3, 5])
    shape = tuple(draw(lengths if i in axes else rows) for i in range(ndim))
    signed = tuple(i - ndim if draw(st.booleans()) else i for i in axes)
    others = sorted(set(range(ndim)) - set(axes))
    subset = st.sets(st.sampled_from(others)).map(sorted).map(tuple) if others else st.just(())
    varying = draw(st.just(()) | subset)
    mask, names = draw(st.sampled_from([None, None, "rows", "elements"])), []
    for name in ("residual", "dsum", "accumulate", "tangents"):
        names += [name] * draw(st.sampled_from([0, 0, 1]))
    if varying and "tangents" in names:
        names.remove("tangents")
    # rounding="nearest" has no mask inside of rows, no old sums and no second order.
    fast_only = mask == "elements" or {"accumulate", "tangents"} & {*names}
    dtypes = draw(st.sampled_from(MIXTURES))
    ways = [signed, *list(signed) * (len(axes) == 1), *[None] * (len(axes) == ndim)]
    return Call(
        draw(st.integers(0, 2**32 - 1)),
        shape,
        draw(st.sampled_from(ways)),
        dtypes,
        tuple(draw(PLACES | st.sampled_from(sorted(INPUTS))) for _ in range(4)),
        tuple(draw(st.none() | PLACES) for _ in range(4)),
        draw(st.sampled_from([0.0, 1.0, 100.0])),
        draw(st.sampled_from([0.0, 1e-5, 1.0])),
        draw(st.sampled_from(sorted(NORMS))),
        "fast" if fast_only else draw(st.sampled_from(["fast", "nearest"])),
        0.0 if dtypes[2] is None else draw(st.sampled_from([0.0, 0.0, 1.0])),
        mask,
        tuple(names),
        draw(st.sampled_from([None, None, *KINDS])),
        varying,
        draw(st.none() | subset.map(lambda more: tuple(sorted({*more, *varying})))),
        draw(st.sampled_from([False, False, True])),
    )


LIKE_X = "x", "dy", "residual", "dsum", "tx", "where"
OLD = "old_dgamma", "old_dbeta"
TANGENTS = {"tx": "ddx", "tgamma": "ddgamma", "tbeta": "ddbeta"}


class Made(NamedTuple):
    """The arrays of a call by name, plain and laid out in memory; its axes in three groups."""

    arrays: dict[str, Any]
    laid_out: dict[str, Any]
    axes: tuple[int, ...]
    apart: tuple[int, ...]
    summed: tuple[int, ...]
    # The shape of the sums, with 1 for the axes in `summed`.
    shape: tuple[int, ...]

    def in_parts(self, array):
        """Return (parts, rows, n) of an array with the shape of x, or with 1 along the normalized axes."""
        groups = self.apart, self.summed, self.axes
        moved = np.ascontiguousarray(array.transpose(*itertools.chain(*groups)))
        return moved.reshape([math.prod(array.shape[i] for i in group) for group in groups])

    def of_parts(self, array):
        """Return (parts, n) of gamma, beta or a sum over rows."""
        whole = array if array.size == math.prod(self.shape) else np.broadcast_to(array, self.shape)
        return whole.reshape(-1, math.prod(self.shape[-len(self.axes) :]))

    def part(self, i):
        """Return the arrays of the i-th part, as plain rows."""
        split = {name: self.in_parts if name in LIKE_X else self.of_parts for name in self.arrays}
        return {name: split[name](array)[i] for name, array in self.arrays.items()}


def make(call):
    shape, rng = call.shape, np.random.default_rng(call.seed)
    named = range(len(shape)) if call.axis is None else np.atleast_1d(call.axis)
    axes = tuple(sorted(i % len(shape) for i in named))
    others = [i for i in range(len(shape)) if i not in axes]
    apart = call.varying if call.apart is None else call.apart
    lengths = tuple(shape[i] for i in axes)
    varies = tuple(shape[i] if i in call.varying else 1 for i in others if call.varying) + lengths
    of_sums = varies if call.apart is None else tuple(shape[i] for i in apart) + lengths
    of_rows = tuple(1 if i in axes else length for i, length in enumerate(shape))
    of_x, of_dy, of_gamma, of_beta = call.dtypes
    is_narrower = call.other is not None and call.other.itemsize < of_x.itemsize
    more = shape, call.other if is_narrower else of_x
    # Second order has no numbers for rows out of range.
    large = 2.0**300 if of_x == of_dy == f8 and "tangents" not in call.keywords else 1
    wanted = {"x": (shape, of_x), "dy": (shape, of_dy)}
    wanted |= {"gamma": (varies, of_gamma), "beta": (varies, of_beta)}
    wanted |= {"old_dgamma": (of_sums, of_gamma), "old_dbeta": (of_sums, of_beta)}
    keywords = {
        **{name: {name: more} for name in ("residual", "dsum")},
        "tangents": dict(zip(TANGENTS, map(wanted.get, ("x", "gamma", "beta")), strict=True)),
    }
    for name in call.keywords:
        wanted |= keywords.get(name, {})
    places = dict(zip(LIKE_X[:4], (*call.places[:2], *call.places[3:] * 2), strict=True))
    places |= {"gamma": call.places[2], "beta": call.places[3]}
    arrays = {}
    for name, (lengths_, dtype) in wanted.items():
        if dtype is None:
            continue
        values = call.offset * (name == "x") + rng.standard_normal(lengths_)
        if call.hard:
            values = np.round(4 * values) / 4 + 0.0
        if call.hard and name == "gamma":
            # The kernels leave samples with such a gamma to the reference.
            of_samples = varies[: -len(lengths)] + (1,) * len(lengths)
            values *= rng.choice([1] * 4 + [large**3], of_samples)
        if call.hard and name in {"x", "dy"}:
            values *= rng.choice([1] * 9 + [0, large], of_rows)
            values[rng.random(shape) < (0.02 if call.infinite() else 0)] = np.inf
        if places.get(name) == "broadcast":
            values[...] = values[:1]
        arrays[name] = values.astype(dtype)
    if call.mask is not None:
        arrays["where"] = rng.random(of_rows if call.mask == "rows" else shape) < 0.6
        hidden = ~np.broadcast_to(arrays["where"], shape)
        for name, value in (("x", np.nan), ("dy", np.inf)):
            if places[name] != "broadcast":
                arrays[name][hidden] = value
    laid_out = {name: lay_out(array, places.get(name, Place())) for name, array in arrays.items()}
    summed = tuple(i for i in others if i not in apart)
    lead = tuple(shape[i] if i in apart else 1 for i in others)
    return Made(arrays, laid_out, axes, apart, summed, lead + lengths)
