"""Broken where an axis, a place in memory, a dtype or a keyword changes a bit of plain rows, or that bit is wrong."""

import itertools

import calls
import numpy as np
import pytest
from calls import Call, Place, put
from hypothesis import example, given, settings
from norms import JUDGES, NORMS, SECOND_ORDER, compute, exactly
from rationals import NAMES

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.functional import plain
from stablenorm.reference.doubledouble import round_to

f2, bf, f4, f8 = calls.KINDS
KEPT = "x", "mean", "rstd"
SECOND = "ddy", "ddx", "ddgamma"
# Each is there if its parameter is.
SUMS = {"dgamma": "gamma", "dbeta": "beta", "ddgamma": "gamma"}


def assert_untouched_around(view, memory):
    at = view.ctypes.data - memory.ctypes.data, view.strides
    for held in (found := memory.copy(), untouched := np.full_like(memory, calls.POISON)):
        np.ndarray(view.shape, view.dtype, held.data, *at)[...] = 0
    assert found.tobytes() == untouched.tobytes()


def as_given(call, made, backend):
    """Return the results of the call by their names; no input may change."""
    forward, backward, _ = NORMS[call.kind]
    given, x, dy = made.laid_out.get, made.arrays["x"], made.arrays["dy"]
    outs = [None if place is None else put(np.zeros_like(x), place) for place in call.outs[:2]]
    y_out, dx_out = (each and each[0] for each in outs)
    how = {
        "axis": call.axis, "gamma_offset": call.gamma_offset, "rounding": call.rounding,
        "residual": given("residual"), "where": given("where"), "backend": backend,
    }  # fmt: skip
    parameters = given("gamma"), given("beta"), call.eps
    y, cache = forward(given("x"), *parameters, **how, out=y_out)
    pulled = {n: made.laid_out[n] for n in ("dsum", "drstd", "dmean") if n in made.arrays}
    pulled["accumulate"] = "accumulate" in call.given
    if call.apart is not None:
        pulled["sum_axes"] = made.summed

    def gradients(dy, dx, **wrt):
        sums = [
            put(made.arrays[name], place or Place())
            if name in made.arrays and (place or pulled["accumulate"])
            else None
            for name, place in zip(calls.OLD, call.outs[2:], strict=True)
        ]
        out = sn.Gradients(dx, *(each and each[0] for each in sums))
        found = backward(dy, cache, out=out, **pulled, **wrt)
        for result, there in zip(found[1:], sums, strict=True):
            if result is not None and there is not None:
                assert result is there[0]
                assert_untouched_around(*there)
        return found

    found, wanted = gradients(given("dy"), dx_out), call.seed % 3
    alone = gradients(given("dy"), None, wrt=("x", "gamma", "beta")[wanted])
    for i, (one, other) in enumerate(zip(found, alone, strict=True)):
        assert (other is not None) == (i == wanted and one is not None)
        if other is not None:
            assert_same_bits(one, other)
    for result, out in ((y, outs[0]), (found.dx, outs[1])):
        if out is not None:
            assert result is out[0]
            assert_untouched_around(*out)
    results = {name: getattr(cache, name) for name in KEPT} | {"y": y} | found._asdict()
    if "tangents" in call.given:
        jvp, double_backward = SECOND_ORDER[call.kind]
        tx, *others = map(given, calls.TANGENTS)
        results["ty"] = jvp(tx, cache, *others)
        second = double_backward(tx, given("dy"), cache, ddgamma=others[0], ddbeta=others[1])
        results |= zip(SECOND, second, strict=True)
    for name in SUMS.keys() & results.keys():
        parameter = made.arrays.get(SUMS[name])
        assert (results[name] is None) == (parameter is None)
        assert parameter is None or call.apart is not None or results[name].shape == parameter.shape
    for name, array in made.arrays.items():
        assert given(name).astype(array.dtype).tobytes() == array.tobytes(), name
    # In the place of the input, and without a cache.
    places = [Place() if isinstance(place, str) else place for place in call.places]
    over = put(x, places[0])[0]
    norm = getattr(sn, f"{call.kind}_norm")
    assert_same_bits(y, norm(over, *parameters, **how, out=over))
    if dy.dtype == x.dtype:
        over = put(dy, places[1])[0]
        for one, other in zip(found, gradients(over, over), strict=True):
            if one is not None:
                assert_same_bits(one, other)
    return {name: each for name, each in results.items() if each is not None}


def of_part(call, made, i):
    """Return the i-th part as plain rows, its keywords, and which rows count."""
    some, counts = made.part(i), slice(None)
    if call.mask == "rows":
        counts = some.pop("where")[:, 0]
    case = some.pop("x")[counts], some.pop("gamma", None), some.pop("beta", None), call.eps
    case = *case, some.pop("dy")[counts]
    old = [some.pop(name, None) for name in calls.OLD]
    if "accumulate" in call.given:
        some["accumulate"] = old
    some |= {name: some[name][counts] for name in calls.LIKE_X if name in some}
    return case, some | {"gamma_offset": call.gamma_offset}, counts


def as_rows(call, case, keywords, backend):
    """Return the results of plain rows by their names."""
    how = {"backend": backend, "rounding": call.rounding}
    found = compute(case, call.kind, **how, **keywords)
    how |= {n: keywords[n] for n in ("gamma_offset", "residual", "where") if n in keywords}
    cache = NORMS[call.kind][0](*case[:4], **how)[1]
    if "tx" in keywords:
        cotangents = {ddx: keywords.get(tx) for tx, ddx in calls.TANGENTS.items()}
        second = compute(case, call.kind, **how, **cotangents)
        found |= zip(SECOND, second.values(), strict=False)
    found |= {name: getattr(cache, name) for name in KEPT}
    return {name: each for name, each in found.items() if each is not None}


def assert_same_bits(expected, actual):
    """The sign and the payload of a NaN mean nothing."""
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    one, other = (v.astype(np.float64) for v in (expected, actual))
    nan = np.isnan(one)
    assert (nan == np.isnan(other)).all()
    assert one[~nan].tobytes() == other[~nan].tobytes()


def check(call, backends=tuple(BACKENDS)):
    made, plainly = calls.make(call), {}
    for backend in backends:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain, "BLOCK", call.block)
            results = as_given(call, made, backend)
        sums = {name: made.of_parts(results.pop(name)) for name in SUMS if name in results}
        results = {name: made.in_parts(array) for name, array in results.items()}
        for i in range(len(results["y"])):
            case, keywords, counts = of_part(call, made, i)
            expected = as_rows(call, case, keywords, backend)
            for name, array in results.items():
                assert_same_bits(expected[name], array[i][counts])
            assert expected.keys() == results.keys() | sums.keys()
            for name, array in sums.items():
                if name in sn.Gradients._fields:
                    assert_same_bits(expected[name], array[i])
                elif len(results["y"]) == 1:
                    # Rows that do not count add zeros: no zero stays a negative one.
                    assert_same_bits(expected[name] + 0, array[i] + 0)
            if call.mask == "rows":
                hidden = {name: array[i][~counts] for name, array in results.items()}
                # The sum with a residual is there, whatever it is.
                given = made.in_parts(made.arrays["x"])[i][~counts]
                assert (np.isnan(given) == np.isnan(hidden["x"])).all()
                assert not any(hidden[name].any() for name in {"y", "rstd", "ty"} & hidden.keys())
                alone = made.arrays.get("dsum", np.zeros(()))
                dx = np.broadcast_to(round_to(alone.astype(f8), case[0].dtype), call.shape)
                assert_same_bits(made.in_parts(dx)[i][~counts], hidden["dx"])
            if i == 0:
                plainly[backend] = expected
    if plainly:
        one, *others = plainly.values() if call.rounding == "nearest" else [{}]
        for name, each in ((name, each) for each in others for name in one.keys() & NAMES):
            assert_same_bits(one[name], each[name])
        case, keywords, _ = of_part(call, made, 0)
        # The exact arithmetic of a row takes milliseconds.
        if not call.infinite() and case[0].size <= 800:
            exact = exactly(case, call.kind, **keywords)
            for found in plainly.values():
                first = {name: found[name] for name in ("ty", *NAMES) if name in found}
                JUDGES[call.rounding](exact, first)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls.calls())
# Statistics of samples along a later axis were compared by no test.
@example(Call(1, (3, 4, 5), -1, (f4,) * 4, given=("statistics",), varying=(1,)))
# Residues of rounding g are all of dx of one column: the reference, where reversed rows went, has others.
@example(Call(1, (5, 1), -1, (f4, f4, f8, f8), outs=(None, Place(gap=8, backwards=True)) * 2))
# Blocks of copies were merged in another order than rows as they lie. And sums that integers finish, of a gamma with an
# axis of one.
@example(Call(1, (20, 3000), 0, (f4, f4, f8, f8), block=1))
@example(Call(13, (1, 8), -1, (f8,) * 4, varying=(0,), hard=True))
@example(Call(13, (1, 8), -1, (f8,) * 4, varying=(0,), hard=True, rounding="nearest"))
# Ties, zeros and rows out of range, which are finished after the kernels: sums read dy before dx is written over it.
@example(Call(1, (4, 60), 0, (f8,) * 4, hard=True, block=1, given=("accumulate",)))
@example(Call(2, (60, 2), -1, (f8,) * 4, eps=0.0, hard=True, rounding="nearest"))
def test_any_call(call):
    check(call)


@pytest.mark.parametrize("dtype", [f2, bf, f4], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_every_length_has_the_bits_of_the_reference(rng, dtype, offset):
    """Whole groups of 32 rows, whole vectors of 8, many tiles, and all that is left of them."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    shapes = itertools.product((1, 7, 8, 15, 33, 64, 70), (*range(1, 34), 40, 63, 65, 769, 1040))
    for rows, n in (*shapes, (9973, 13)):
        x, dy = rng.standard_normal((2, rows, n))
        gamma, beta = rng.standard_normal((2, n)).astype(f4)
        case = (x + offset).astype(dtype), gamma, beta, 1e-5, dy.astype(dtype)
        found = [compute(case, backend=backend) for backend in BACKENDS]
        # The sums may differ where they cancel.
        for name in ("y", "dx"):
            assert_same_bits(*(each[name] for each in found))


# Channels first: rows of 40 that lie 400 elements apart, of several tiles; samples of these; samples of rows of four
# tiles, of one row, of rows shorter than a vector.
CHANNELS = (3, 40, 20, 20), 1
LARGE = [
    *((*CHANNELS, dtype, (), hard) for dtype in calls.KINDS for hard in (False, True)),
    *((*CHANNELS, f4, varying, False) for varying in ((0,), (2,), (0, 3))),
    *((*way, f8, (0,), True) for way in (CHANNELS, ((4, 6, 8), -1))),
    *((shape, -1, f4, (0,), False) for shape in ((5, 75, 512), (4, 3, 5), (3, 514, 512))),
    ((300, 1, 300), -1, f2, (0,), False),
    # The bits of float64 sums tell tiles of other lengths.
    ((5, 16, 3000), 1, (f4, f4, f8, f8), (0,), False),
]


@pytest.mark.parametrize(("block", "threads"), [(1, 2), (1 << 14, 1)], indirect=["threads"])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(("shape", "axis", "dtype", "varying", "hard"), LARGE)
@pytest.mark.usefixtures("threads")
def test_large_calls(shape, axis, dtype, varying, hard, rounding, block):
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    given = ("dsum", "accumulate") if axis == 1 else ()
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 4
    call = Call(1, shape, axis, dtypes, varying=varying, hard=hard, rounding=rounding)
    check(call._replace(given=given, block=block), ["native"])
