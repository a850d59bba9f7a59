"""Broken where an axis, a place in memory, a dtype or a keyword changes a bit of plain rows, or that bit is wrong."""

import itertools
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from norms import (
    NORMS,
    SECOND_ORDER,
    assert_contract,
    assert_nearest,
    assert_same,
    compute,
    exactly,
)
from rationals import NAMES

import stablenorm
from stablenorm import Gradients, layer_norm_backward, layer_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.functional import plain
from stablenorm.reference.rounding import round_to

KINDS = f2, bf, f4, f8 = [
    np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
]
# The dtypes of x, dy, gamma, beta; None for a parameter that is left out.
MIXTURES = [
    *((kind,) * 4 for kind in (*KINDS, f4, f4, f8, f8)),
    (f2, f2, f4, f4),
    (bf, bf, f4, f4),
    (f4, f4, None, None),
    # Float64 beside narrower arrays.
    (f4, f8, f8, bf),
    (f8, bf, f2, None),
    (f2, f4, bf, f8),
]
POISON = 0xA5


# ---- places in memory ----


class Place(NamedTuple):
    """Where an array lies: the axis that is last, and the bytes between elements, between rows and in front."""

    first: int = 0
    step: int = 1
    gap: int = 0
    offset: int = 0
    backwards: bool = False


def put(array, place):
    """Return a copy of `array` in poisoned memory, and that memory."""
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


def assert_untouched_around(view, memory):
    at = view.ctypes.data - memory.ctypes.data, view.strides
    for held in (found := memory.copy(), untouched := np.full_like(memory, POISON)):
        np.ndarray(view.shape, view.dtype, held.data, *at)[...] = 0
    assert found.tobytes() == untouched.tobytes()


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Each returns an array of the same shape and values. "broadcast": `make` repeats values along the first axis.
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
    axis: int | tuple[int, ...]
    # Those of x, dy, gamma, beta, as in `MIXTURES`.
    dtypes: tuple[Any, ...]
    # Those of x, dy, gamma and beta, residual and dsum.
    places: tuple[Any, ...] = (Place(),) * 4
    # The places of y and dx; None: without `out`.
    outs: tuple[Any, ...] = (None, None)
    offset: float = 0.0
    eps: float = 1e-5
    kind: str = "layer"
    rounding: str = "fast"
    gamma_offset: float = 0.0
    # None, "rows" or "elements".
    mask: str | None = None
    # Of residual, dsum, statistics, accumulate, tangents; and the dtype of the first two, if not that of x.
    given: tuple[str, ...] = ()
    other: Any = None
    # Axes along which gamma and beta vary; these, and others along which the sums are kept apart.
    varying: tuple[int, ...] = ()
    apart: tuple[int, ...] | None = None
    # Elements are multiples of 1/4, so that ties abound; some rows are constant, infinite or out of range.
    hard: bool = False
    # Bytes of x that are copied at a time.
    block: int = plain.BLOCK

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
    # Lengths around the eight lanes of the kernels and the groups of 32 rows, and rows that are none.
    few = [1, 1, 2, 3, 4, 5, 7, 9, 17]
    lengths = st.sampled_from([*few, 8, 31, 40, 65] if len(axes) == 1 else few)
    rows = st.sampled_from([0, 1, 1, 2, 3, 5, 33] if ndim - len(axes) == 1 else [0, 1, 1, 2, 3, 5])
    shape = tuple(draw(lengths if i in axes else rows) for i in range(ndim))
    signed = tuple(i - ndim if draw(st.booleans()) else i for i in axes)
    others = sorted(set(range(ndim)) - set(axes))
    some = st.sets(st.sampled_from(others)).map(sorted).map(tuple) if others else st.just(())
    varying = draw(st.just(()) | some)
    mask, names = draw(st.sampled_from([None, None, "rows", "elements"])), []
    for name in ("residual", "dsum", "statistics", "accumulate", "tangents"):
        names += [name] * draw(st.sampled_from([0, 0, 1]))
    if varying and "tangents" in names:
        names.remove("tangents")
    # rounding="nearest" has no mask inside of rows, no statistics and no second order.
    fast_only = mask == "elements" or {"statistics", "tangents"} & {*names}
    dtypes = draw(st.sampled_from(MIXTURES))
    return Call(
        draw(st.integers(0, 2**32 - 1)),
        shape,
        signed[0] if len(signed) == 1 and draw(st.booleans()) else signed,
        dtypes,
        tuple(draw(PLACES | st.sampled_from(sorted(INPUTS))) for _ in range(4)),
        tuple(draw(st.none() | PLACES) for _ in range(2)),
        draw(st.sampled_from([0.0, 1.0, 100.0])),
        draw(st.sampled_from([0.0, 1e-5, 1.0])),
        draw(st.sampled_from(sorted(NORMS))),
        "fast" if fast_only else draw(st.sampled_from(["fast", "nearest"])),
        0.0 if dtypes[2] is None else draw(st.sampled_from([0.0, 0.0, 1.0])),
        mask,
        tuple(names),
        draw(st.sampled_from([None, None, *KINDS])),
        varying,
        draw(st.none() | some.map(lambda more: tuple(sorted({*more, *varying})))),
        draw(st.sampled_from([False, False, True])),
        draw(st.sampled_from([plain.BLOCK, 1, 100])),
    )


class Made(NamedTuple):
    """The arrays of a call by their names, plain and as they lie; and how its axes are taken apart."""

    arrays: dict[str, Any]
    laid_out: dict[str, Any]
    axes: tuple[int, ...]
    apart: tuple[int, ...]
    summed: tuple[int, ...]
    # The shape of the sums, with 1 for the axes in `summed`.
    shape: tuple[int, ...]

    def in_parts(self, array):
        """Return (parts, rows, n) of an array of the shape of x, or with 1 along the normalized axes."""
        groups = self.apart, self.summed, self.axes
        moved = np.ascontiguousarray(array.transpose(*itertools.chain(*groups)))
        return moved.reshape([math.prod(array.shape[i] for i in group) for group in groups])

    def of_parts(self, array):
        """Return (parts, n) of gamma, beta or of a sum over rows."""
        if array is None:
            return None
        whole = array if array.size == math.prod(self.shape) else np.broadcast_to(array, self.shape)
        return whole.reshape(-1, math.prod(self.shape[-len(self.axes) :]))

    def old(self):
        """Return copies of the values that dgamma and dbeta are added to."""
        arrays = (self.arrays[name] for name in ("old_dgamma", "old_dbeta"))
        return [None if each is None else each.copy() for each in arrays]


PLACED = "x", "dy", "gamma", "beta", "residual", "dsum"
KEPT = "x", "mean", "rstd"
SECOND = "ddy", "ddx", "ddgamma"
SUMS = "dgamma", "dbeta", "ddgamma"
TANGENTS = {"tx": "ddx", "tgamma": "ddgamma", "tbeta": "ddbeta"}


def make(call):
    shape, rng = call.shape, np.random.default_rng(call.seed)
    axes = tuple(sorted(i % len(shape) for i in np.atleast_1d(call.axis)))
    others = [i for i in range(len(shape)) if i not in axes]
    apart = call.varying if call.apart is None else call.apart
    lengths = tuple(shape[i] for i in axes)
    varies = tuple(shape[i] if i in call.varying else 1 for i in others if call.varying)
    of_sums = varies if call.apart is None else tuple(shape[i] for i in apart)
    of_rows = tuple(1 if i in axes else length for i, length in enumerate(shape))
    of_x, of_dy, of_gamma, of_beta = call.dtypes
    more, given = call.other or of_x, call.given
    wanted = {
        "x": (shape, of_x), "dy": (shape, of_dy),
        "gamma": (varies + lengths, of_gamma), "beta": (varies + lengths, of_beta),
        "residual": (shape, more if "residual" in given else None),
        "dsum": (shape, more if "dsum" in given else None),
        "dmean": (of_rows, f8 if "statistics" in given and call.kind == "layer" else None),
        "drstd": (of_rows, f8 if "statistics" in given else None),
        "old_dgamma": (of_sums + lengths, of_gamma if "accumulate" in given else None),
        "old_dbeta": (of_sums + lengths, of_beta if "accumulate" in given else None),
        "tx": (shape, of_x if "tangents" in given else None),
        "tgamma": (lengths, of_gamma if "tangents" in given else None),
        "tbeta": (lengths, of_beta if "tangents" in given else None),
    }  # fmt: skip
    places = dict(zip(PLACED, (*call.places, *call.places[2:]), strict=True))
    arrays = {"where": None}
    for name, (lengths_, dtype) in wanted.items():
        values = call.offset * (name == "x") + rng.standard_normal(lengths_)
        if call.hard:
            values = np.round(4 * values) / 4 + 0.0
        if call.hard and name in {"x", "dy"}:
            values *= rng.choice([1] * 9 + [0, 2.0**300 if of_x == of_dy == f8 else 1], of_rows)
            values[rng.random(shape) < (0.02 if call.infinite() else 0)] = np.inf
        if places.get(name) == "broadcast":
            values[...] = values[:1]
        arrays[name] = None if dtype is None else values.astype(dtype)
    if call.mask is not None:
        arrays["where"] = rng.random(of_rows if call.mask == "rows" else shape) < 0.6
        hidden = ~np.broadcast_to(arrays["where"], shape)
        for name, value in (("x", np.nan), ("dy", np.inf)):
            if places[name] != "broadcast":
                arrays[name][hidden] = value
    laid_out = {name: lay_out(each, places.get(name, Place())) for name, each in arrays.items()}
    summed = tuple(i for i in others if i not in apart)
    lead = tuple(shape[i] if i in apart else 1 for i in others)
    return Made(arrays, laid_out, axes, apart, summed, lead + lengths)


def as_given(call, made, backend):
    """Return the results of the call by their names; no input may change."""
    forward, backward, _ = NORMS[call.kind]
    given = made.laid_out
    outs = [None if p is None else put(np.zeros_like(made.arrays["x"]), p) for p in call.outs]
    y_out, dx_out = (each and each[0] for each in outs)
    how = {
        "axis": call.axis, "gamma_offset": call.gamma_offset, "rounding": call.rounding,
        "residual": given["residual"], "where": given["where"], "backend": backend,
    }  # fmt: skip
    parameters = given["gamma"], given["beta"], call.eps
    y, cache = forward(given["x"], *parameters, **how, out=y_out)
    pulled = {n: given[n] for n in ("dsum", "drstd", "dmean") if given[n] is not None}
    pulled |= {"accumulate": "accumulate" in call.given}
    if call.apart is not None:
        pulled["sum_axes"] = made.summed
    found = backward(given["dy"], cache, out=Gradients(dx_out, *made.old()), **pulled)
    for result, out in ((y, outs[0]), (found.dx, outs[1])):
        if out is not None:
            assert result is out[0]
            assert_untouched_around(*out)
    results = {name: getattr(cache, name) for name in KEPT} | {"y": y} | found._asdict()
    if given["tx"] is not None:
        jvp, double_backward = SECOND_ORDER[call.kind]
        tx, *others = (given[name] for name in TANGENTS)
        results["ty"] = jvp(tx, cache, *others)
        second = double_backward(tx, given["dy"], cache, ddgamma=others[0], ddbeta=others[1])
        results |= zip(SECOND, second, strict=True)
    for name, array in made.arrays.items():
        if array is not None:
            assert given[name].astype(array.dtype).tobytes() == array.tobytes(), name
    # In the place of the input, and without a cache.
    places = [Place() if isinstance(place, str) else place for place in call.places]
    over = put(made.arrays["x"], places[0])[0]
    norm = getattr(stablenorm, f"{call.kind}_norm")
    assert_same_bits(y, norm(over, *parameters, **how, out=over))
    of_x = made.arrays["x"].dtype
    if given["dy"].dtype == of_x and (of_x == f8 or not call.infinite()):
        over = put(made.arrays["dy"], places[1])[0]
        again = backward(over, cache, out=(over, *made.old()), **pulled)
        for one, other in zip(found, again, strict=True):
            assert one is other is None or assert_same_bits(one, other) is None
    return results


def of_part(call, made, i):
    """Return the i-th part as plain rows, its keywords, and which rows count."""
    arrays, counts, keywords = made.arrays, slice(None), {"gamma_offset": call.gamma_offset}
    if call.mask is not None:
        where = made.in_parts(arrays["where"])[i]
        counts, more = (where[:, 0], {}) if call.mask == "rows" else (counts, {"where": where})
        keywords |= more
    for name in ("residual", "dsum", "dmean", "drstd", "tx"):
        if arrays[name] is not None:
            keywords[name] = made.in_parts(arrays[name])[i][counts]
    if "tx" in keywords:
        keywords |= {
            name: None if arrays[name] is None else arrays[name].ravel()
            for name in ("tgamma", "tbeta")
        }
    if "accumulate" in call.given:
        old = (made.of_parts(each) for each in made.old())
        keywords["accumulate"] = [None if each is None else each[i] for each in old]
    parameters = (made.of_parts(arrays[name]) for name in ("gamma", "beta"))
    x, dy = (made.in_parts(arrays[name])[i][counts] for name in ("x", "dy"))
    given = (None if each is None else each[i] for each in parameters)
    return (x, *given, call.eps, dy), keywords, counts


def as_rows(call, case, keywords, backend):
    """Return the results of plain rows by their names."""
    how = {"backend": backend, "rounding": call.rounding}
    found = compute(case, call.kind, **how, **keywords)
    how |= {n: keywords[n] for n in ("gamma_offset", "residual", "where") if n in keywords}
    cache = NORMS[call.kind][0](*case[:4], **how)[1]
    if "tx" in keywords:
        cotangents = {ddx: keywords[tx] for tx, ddx in TANGENTS.items()}
        second = compute(case, call.kind, **how, **cotangents)
        found |= zip(SECOND, second.values(), strict=False)
    return found | {name: getattr(cache, name) for name in KEPT}


def assert_same_bits(expected, actual):
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    assert have_same_bits(expected, actual)


def have_same_bits(expected, actual):
    """The sign and the payload of a NaN mean nothing."""
    one, other = (v.astype(np.float64) for v in (expected, actual))
    nan = np.isnan(one)
    return (nan == np.isnan(other)).all() and one[~nan].tobytes() == other[~nan].tobytes()


def check(call, backends=tuple(BACKENDS)):
    made, plainly = make(call), {}
    for backend in backends:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "BLOCK", call.block)
            results = as_given(call, made, backend)
        sums = {name: made.of_parts(results.pop(name, None)) for name in SUMS}
        results = {name: made.in_parts(array) for name, array in results.items()}
        for i in range(len(results["y"])):
            case, keywords, counts = of_part(call, made, i)
            expected = as_rows(call, case, keywords, backend)
            for name, array in results.items():
                assert_same_bits(expected[name], array[i][counts])
            for name, array in sums.items():
                assert (array is None) == (name not in expected)
                if array is not None and (name in Gradients._fields or len(results["y"]) == 1):
                    assert_same_bits(expected[name], array[i])
            if call.mask == "rows":
                hidden = {name: array[i][~counts] for name, array in results.items()}
                assert not any(hidden[name].any() for name in {"y", "rstd", "ty"} & hidden.keys())
                alone = np.zeros(()) if made.arrays["dsum"] is None else made.arrays["dsum"]
                dx = np.broadcast_to(round_to(alone.astype(f8), case[0].dtype), call.shape)
                assert_same_bits(made.in_parts(dx)[i][~counts], hidden["dx"])
            plainly.setdefault(i, {})[backend] = expected
    if plainly:
        case, keywords, _ = of_part(call, made, 0)
        differ = backends_differ(plainly[0], case, call.rounding)
        # The exact arithmetic of a row takes milliseconds.
        if not call.infinite() and (differ or case[0].size <= 40):
            exact = exactly(case, call.kind, **keywords)
            judge = assert_nearest if call.rounding == "nearest" else assert_contract
            for found in plainly[0].values():
                judge(exact, {name: found[name] for name in ("ty", *NAMES) if name in found})


def backends_differ(results, case, rounding):
    """
    Tell whether y or dx, of at most 32 bits, differs in a bit between the backends.

    It may where it cancels almost completely. The others differ by a few roundings of float64.
    """
    if len(results) < 2:
        return False
    differ, arrays = False, (case[0], case[4], *case[1:3])
    narrow = all(v is None or v.dtype.itemsize < 8 for v in arrays)
    for name in results["numpy"].keys() & NAMES:
        expected = results["numpy"][name]
        actual = results["native"][name]
        if rounding == "nearest":
            assert_same_bits(expected, actual)
        elif name in ("y", "dx") and narrow:
            differ |= not have_same_bits(expected, actual)
        else:
            one, other = (v.astype(np.float64) for v in (expected, actual))
            u = float(ml_dtypes.finfo(expected.dtype).eps)
            # Each within 0.75 ulp of the exact one: 2 ulp, of at most u each, apart, unless it
            # cancels: then c = 2**-44 of a sum of at most 125 rows of such size.
            dy = np.abs(arrays[1].astype(np.float64))
            size = dy[np.isfinite(dy)].max(initial=1) * 125
            np.testing.assert_allclose(one, other, rtol=2 * u, atol=2.0**-44 * size)
    return differ


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls())
# Statistics of samples along a later axis were compared by no test.
@example(Call(1, (3, 4, 5), -1, (f4,) * 4, varying=(1,)))
def test_any_call(call):
    check(call)


def test_every_place_over_all_axes():
    """Arrays without a (rows, n) view, of which one row is all there is, were refused."""
    places = [Place(), Place(1), Place(0, 2), Place(0, 1, 0, 1), Place(0, 1, 8, 0, True)]
    for place, out in itertools.product((*INPUTS, *places), (None, *places)):
        check(Call(1, (3, 4), (0, 1), (f4,) * 4, (place,) * 4, (out, out), 1.0, 1e-5))


@pytest.mark.parametrize("dtype", [f2, bf, f4], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_every_length_has_the_bits_of_the_reference(rng, dtype, offset):
    """Whole groups of 32 rows, whole vectors of 8, many tiles, and all that is left of them."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    shapes = itertools.product((1, 7, 8, 15, 33, 64, 70), (*range(1, 34), 40, 63, 65, 769, 1040))
    for rows, n in (*shapes, (9973, 13)):
        x, dy = rng.standard_normal((2, rows, n))
        case = (
            *((x + offset).astype(dtype), *rng.standard_normal((2, n)).astype(f4)),
            1e-5,
            dy.astype(dtype),
        )
        found = [compute(case, backend=backend) for backend in BACKENDS]
        # The sums may differ where they cancel.
        for name in ("y", "dx"):
            assert_same_bits(*(each[name] for each in found))


# Channels first: rows of 40 that lie 400 elements apart, of several tiles; samples of these; samples of rows of four
# tiles, of one row, of rows shorter than a vector.
CHANNELS = (3, 40, 20, 20), 1
LARGE = [
    *((*CHANNELS, dtype, (), hard) for dtype in KINDS for hard in (False, True)),
    *((*CHANNELS, f4, varying, False) for varying in ((0,), (2,), (0, 3))),
    *((*way, f8, (0,), True) for way in (CHANNELS, ((4, 6, 8), -1))),
    *((shape, -1, f4, (0,), False) for shape in ((5, 75, 512), (4, 3, 5), (3, 514, 512))),
    ((300, 1, 300), -1, f2, (0,), False),
]


@pytest.mark.parametrize(("block", "threads"), [(1, 2), (1 << 14, 1)], indirect=["threads"])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(("shape", "axis", "dtype", "varying", "hard"), LARGE)
@pytest.mark.usefixtures("threads")
def test_large_calls(shape, axis, dtype, varying, hard, rounding, block):
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    given = ("dsum", "accumulate") if axis == 1 else ()
    call = Call(1, shape, axis, (dtype,) * 4, varying=varying, hard=hard, rounding=rounding)
    check(call._replace(given=given, block=block), ["native"])


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_read_dy_before_dx_is_written_over_it(
    rng, axis, rounding, accumulate, backend, monkeypatch
):
    """A row out of range, and columns that are ties at the ends of blocks, are finished after the kernels."""
    x = np.tile(np.array([1.0, -1.0, 1.0, -1.0]), (60, 1))
    dy, one = np.zeros((60, 4)), np.ones(4)
    dy[0], dy[59] = 1 + 2.0**-52, 2.0**-53
    x[7], dy[7] = x[7] * 2.0**300, rng.integers(1, 9, 4) * 2.0**-53
    _, cache = layer_norm_forward(x, one, one, 0.0, rounding=rounding, backend=backend)
    expected = layer_norm_backward(dy, cache)
    monkeypatch.setattr(plain, "BLOCK", 1)
    if axis == 1:
        x, dy = (np.ascontiguousarray(each.reshape(-1, 20, 4).swapaxes(1, 2)) for each in (x, dy))
    _, cache = layer_norm_forward(x, one, one, 0.0, axis=axis, rounding=rounding, backend=backend)
    for dx in (None, dy):
        out = Gradients(dx, 0 * one, 0 * one)
        found = layer_norm_backward(dy, cache, out=out, accumulate=accumulate)
        assert_same(found[1:], expected[1:])
