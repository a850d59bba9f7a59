"""Any call: shapes, axes, places in memory, dtypes, keywords: the bits of plain rows, and right."""

import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from norms import NORMS, assert_contract, assert_nearest, compute, exactly

import stablenorm
from stablenorm import Gradients

KINDS = f2, bf, f4, f8 = [
    np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
]

# Of x, dy, gamma, beta; None for a parameter that is not given. Not every mixture there is, for
# each of which a kernel would have to be compiled first.
MIXTURES = [
    *((kind,) * 4 for kind in (*KINDS, f4, f4, f8, f8)),
    (f2, f2, f4, f4),
    (bf, bf, f4, f4),
    (f4, f4, None, None),
    # A float64 gamma beside narrower arrays; test_contracts.py has the same mixtures.
    (f4, f8, f8, bf),
]
POISON = 0xA5


# ---- places in memory ----


class Place(NamedTuple):
    """Where an array lies: which axis is last, what is left out between elements, rows, in front."""

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


def swapped(array):
    # bfloat16 has no other byte order.
    return array if array.dtype == bf else array.astype(array.dtype.newbyteorder())


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


# Each has the shape and the values of its argument.
INPUTS = {
    "other byte order": swapped,
    "read-only": read_only,
    # Of values that are the same along the first axis, as `make` sees to.
    "broadcast": lambda array: np.broadcast_to(array[:1].copy(), array.shape),
}


def lay_out(array, place):
    if array is None or array.ndim == 0:
        return array
    return INPUTS[place](array) if isinstance(place, str) else put(array, place)[0]


# ---- calls ----


class Call(NamedTuple):
    """A recipe: what Hypothesis prints of a call that fails."""

    seed: int
    shape: tuple[int, ...]
    axis: int | tuple[int, ...]
    # Of x, dy, gamma, beta; as `MIXTURES`.
    dtypes: tuple[Any, ...]
    # Of x, dy, gamma and beta, residual and dsum.
    places: tuple[Any, ...] = (Place(),) * 4
    # Of y and dx; None if they are not given.
    outs: tuple[Any, ...] = (None, None)
    offset: float = 0.0
    eps: float = 1e-5
    kind: str = "layer"
    rounding: str = "fast"
    gamma_offset: float = 0.0
    # None, "rows" or "elements".
    mask: str | None = None
    # Of residual, dsum, statistics, accumulate; the dtype of the first two, if it is not that of x.
    given: tuple[str, ...] = ()
    other: Any = None
    # Axes along which gamma and beta vary; these, and others of which the sums are kept apart.
    varying: tuple[int, ...] = ()
    apart: tuple[int, ...] | None = None
    save: str = "x"


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
    mask, given = draw(st.sampled_from([None, None, "rows", "elements"])), []
    for name in ("residual", "dsum", "statistics", "accumulate"):
        given += [name] * draw(st.sampled_from([0, 0, 1]))
    # Not there with rounding="nearest": a mask inside of rows, and statistics.
    fast_only = mask == "elements" or "statistics" in given
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
        tuple(given),
        draw(st.sampled_from([None, None, *KINDS])),
        varying,
        draw(st.none() | some.map(lambda more: tuple(sorted({*more, *varying})))),
        draw(st.sampled_from(["x", "x", "recompute"])) if others else "x",
    )


def has_kernels(call):
    """Each mixture of types has kernels of its own, and so have the keywords."""
    if not (call.given or call.mask or call.gamma_offset) and (call.kind, call.rounding) == (
        "layer", "fast",
    ):  # fmt: skip
        return True
    with_offset = f4 if call.kind == "rms" else f8
    return call.dtypes in ((f4,) * 4, (f8,) * 4) and (
        not call.gamma_offset or call.dtypes[0] == with_offset
    )


class Made(NamedTuple):
    """The arrays of a call, plain, by their names; and how its axes are taken apart."""

    arrays: dict[str, Any]
    axes: tuple[int, ...]
    apart: tuple[int, ...]
    summed: tuple[int, ...]
    # Of the sums, with 1 for what is summed, and then the normalized lengths.
    lead: tuple[int, ...]
    lengths: tuple[int, ...]

    def in_parts(self, array):
        """Return (parts, rows, n) of an array of the shape of x, or with 1 along the normalized axes."""
        moved = array.transpose(*self.apart, *self.summed, *self.axes)
        parts = int(np.prod([array.shape[i] for i in self.apart]))
        rows = int(np.prod([array.shape[i] for i in self.summed]))
        n = int(np.prod([array.shape[i] for i in self.axes]))
        return np.ascontiguousarray(moved).reshape(parts, rows, n)

    def of_parts(self, array):
        """Return (parts, n) of gamma, beta or of a sum over rows."""
        if array is None:
            return None
        shape = self.lead + self.lengths
        whole = array if array.size == np.prod(shape) else np.broadcast_to(array, shape)
        return whole.reshape(-1, int(np.prod(self.lengths)))


def make(call):
    ndim, rng = len(call.shape), np.random.default_rng(call.seed)
    axes = tuple(sorted(i % ndim for i in np.atleast_1d(call.axis)))
    others = tuple(i for i in range(ndim) if i not in axes)
    apart = call.varying if call.apart is None else call.apart
    lengths = tuple(call.shape[i] for i in axes)
    varies = tuple(call.shape[i] if i in call.varying else 1 for i in others)
    lead = tuple(call.shape[i] if i in apart else 1 for i in others)
    parameters = (varies if call.varying else ()) + lengths
    x_dtype, dy_dtype, *of_parameters = call.dtypes
    more, statistics = (
        call.other or x_dtype,
        tuple(1 if i in axes else n for i, n in enumerate(call.shape)),
    )
    wanted = {
        "x": (call.shape, x_dtype), "dy": (call.shape, dy_dtype),
        "gamma": (parameters, of_parameters[0]), "beta": (parameters, of_parameters[1]),
        "residual": (call.shape, more), "dsum": (call.shape, more),
        "dmean": (statistics, f8), "drstd": (statistics, f8),
    }  # fmt: skip
    places = dict(zip(("x", "dy", "gamma", "beta"), call.places, strict=True))
    places |= {"residual": call.places[2], "dsum": call.places[3]}
    arrays = {}
    for name, (shape, dtype) in wanted.items():
        values = call.offset * (name == "x") + rng.standard_normal(shape)
        if places.get(name) == "broadcast":
            values[...] = values[:1]
        arrays[name] = None if dtype is None else values.astype(dtype)
    for name in ("residual", "dsum", "dmean", "drstd"):
        if name not in call.given and not (
            name.startswith("d") and name != "dsum" and "statistics" in call.given
        ):
            arrays[name] = None
    if call.kind == "rms":
        arrays["dmean"] = None
    of_sums = (
        tuple(call.shape[i] for i in apart)
        if call.apart is not None
        else parameters[: -len(lengths)]
    )
    for name, dtype in zip(("old_dgamma", "old_dbeta"), of_parameters, strict=True):
        old = rng.standard_normal(of_sums + lengths)
        arrays[name] = (
            old.astype(dtype) if dtype is not None and "accumulate" in call.given else None
        )
    if call.mask is not None:
        where = rng.random(statistics if call.mask == "rows" else call.shape) < 0.6
        arrays["where"] = where
        hidden = ~np.broadcast_to(where, call.shape)
        for name, value in (("x", np.nan), ("dy", np.inf)):
            if "broadcast" not in places[name]:
                arrays[name][hidden] = value
    summed = tuple(i for i in others if i not in apart)
    return Made(arrays, axes, apart, summed, lead, lengths)


def as_given(call, made, backend):
    """Return y, dx, dgamma, dbeta, mean and rstd of the call as it is; no input may change."""
    forward, backward, _ = NORMS[call.kind]
    places = dict(zip(("x", "dy", "gamma", "beta"), call.places, strict=True))
    places |= {"residual": call.places[2], "dsum": call.places[3]}
    arrays = {n: lay_out(a, places.get(n, Place())) for n, a in made.arrays.items()}
    x, dy = arrays["x"], arrays["dy"]
    outs = [None if p is None else put(np.zeros_like(made.arrays["x"]), p) for p in call.outs]
    y_out, dx_out = (None if each is None else each[0] for each in outs)
    given = {
        "axis": call.axis, "gamma_offset": call.gamma_offset, "rounding": call.rounding,
        "residual": arrays["residual"], "where": arrays.get("where"), "backend": backend,
    }  # fmt: skip
    first = x, arrays["gamma"], arrays["beta"], call.eps
    y, cache = forward(*first, **given, out=y_out, save=call.save)
    pulled = {name: arrays[name] for name in ("dsum", "drstd", "dmean") if arrays[name] is not None}
    if call.apart is not None:
        pulled["sum_axes"] = made.summed
    old = [None if arrays[n] is None else arrays[n].copy() for n in ("old_dgamma", "old_dbeta")]
    pulled["accumulate"] = "accumulate" in call.given
    found = backward(dy, cache, out=Gradients(dx_out, *old), **pulled)
    assert y_out is None or y is y_out
    assert dx_out is None or found.dx is dx_out
    for each in outs:
        if each is not None:
            assert_untouched_around(*each)
    for name, array in made.arrays.items():
        before = array if array is None else arrays[name].astype(array.dtype)
        assert array is None or before.tobytes() == array.tobytes(), name
    # In the place of the input, and without a cache.
    alone = getattr(stablenorm, f"{call.kind}_norm")
    over = put(made.arrays["x"], Place() if isinstance(places["x"], str) else places["x"])[0]
    assert_same_bits(y, alone(over, *first[1:], **given, out=over))
    over = put(made.arrays["dy"].astype(x.dtype.newbyteorder("=")), Place())[0]
    if dy.dtype == over.dtype:
        old = [None if arrays[n] is None else arrays[n].copy() for n in ("old_dgamma", "old_dbeta")]
        assert_same_bits(found.dx, backward(over, cache, out=(over, *old), **pulled).dx)
    if call.save == "recompute":
        cache = forward(*first, **given)[1]
    return y, *found, cache.mean, cache.rstd


def of_part(call, made, i):
    """Return the i-th part as plain rows, what else it is given, and which rows count."""
    arrays = made.arrays
    counts, keywords = slice(None), {"gamma_offset": call.gamma_offset}
    if call.mask is not None:
        where = made.in_parts(arrays["where"])[i]
        if call.mask == "rows":
            counts = where[:, 0]
        else:
            keywords["where"] = where
    for name in ("residual", "dsum", "dmean", "drstd"):
        if arrays[name] is not None:
            keywords[name] = made.in_parts(arrays[name])[i][counts]
    if "accumulate" in call.given:
        old = (made.of_parts(arrays[name]) for name in ("old_dgamma", "old_dbeta"))
        keywords["accumulate"] = [None if each is None else each[i] for each in old]
    gamma, beta = (made.of_parts(arrays[name]) for name in ("gamma", "beta"))
    parameters = [None if each is None else each[i] for each in (gamma, beta)]
    x, dy = (made.in_parts(arrays[name])[i][counts] for name in ("x", "dy"))
    return (x, *parameters, call.eps, dy), keywords, counts


def assert_same_bits(expected, actual):
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    assert have_same_bits(expected, actual)


def have_same_bits(expected, actual):
    """The sign and the payload of a NaN mean nothing."""
    one, other = (v.astype(np.float64) for v in (expected, actual))
    nan = np.isnan(one)
    return (nan == np.isnan(other)).all() and one[~nan].tobytes() == other[~nan].tobytes()


def check(call):
    made, plain = make(call), {}
    for backend in ("numpy", "numba") if has_kernels(call) else ("numpy",):
        y, dx, *sums, mean, rstd = as_given(call, made, backend)
        in_parts = {"y": y, "dx": dx, "mean": mean, "rstd": rstd}
        in_parts = {name: made.in_parts(array) for name, array in in_parts.items()}
        of_parts = dict(zip(("dgamma", "dbeta"), map(made.of_parts, sums), strict=True))
        for i in range(len(in_parts["y"])):
            case, keywords, counts = of_part(call, made, i)
            how = {"backend": backend, "rounding": call.rounding}
            expected = compute(case, call.kind, **how, **keywords)
            for name in ("y", "dx"):
                assert_same_bits(expected[name], in_parts[name][i][counts])
            for name, array in of_parts.items():
                assert (array is None) == (name not in expected)
                if array is not None:
                    assert_same_bits(expected[name], array[i])
            if call.mask == "rows":
                assert not in_parts["y"][i][~counts].any()
                assert not in_parts["rstd"][i][~counts].any()
                assert "dsum" in call.given or not in_parts["dx"][i][~counts].any()
            plain.setdefault(i, {})[backend] = expected
    if plain:
        case, keywords, _ = of_part(call, made, 0)
        # The exact arithmetic of a row takes milliseconds.
        if backends_differ(plain[0], case, call.rounding) or case[0].size <= 40:
            exact = exactly(case, call.kind, **keywords)
            judge = assert_nearest if call.rounding == "nearest" else assert_contract
            for results in plain[0].values():
                judge(exact, results)


def backends_differ(results, case, rounding):
    """
    Tell whether y or dx, of at most 32 bits, differs in a bit between the backends.

    It may where it cancels almost completely. The others differ by a few roundings of float64.
    """
    if len(results) < 2:
        return False
    differ, arrays = False, (case[0], case[4], *case[1:3])
    narrow = all(v is None or v.dtype.itemsize < 8 for v in arrays)
    for name, expected in results["numpy"].items():
        actual = results["numba"][name]
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
def test_any_call(call):
    check(call)


def test_every_place_over_all_axes():
    """Arrays without a (rows, n) view, of which one row is all there is, were refused."""
    places = [Place(), Place(1), Place(0, 2), Place(0, 1, 0, 1), Place(0, 1, 8, 0, True)]
    for place, out in itertools.product((*INPUTS, *places), (None, *places)):
        check(Call(1, (3, 4), (0, 1), (f4,) * 4, (place,) * 4, (out, out), 1.0, 1e-5))
