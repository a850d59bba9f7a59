"""Any call has the bits of the same call on plain rows, whatever its axes, memory, dtypes and keywords."""

import itertools

import calls
import numpy as np
import pytest
from calls import Call, Place, put
from hypothesis import example, given, settings
from norms import JUDGES, NORMS, SECOND_ORDER, compute, exactly, is_in_float64
from rationals import NAMES

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.reference.equations import round_to

f2, bf, f4, f8 = calls.KINDS
KEPT = "x", "mean", "rstd"
SECOND = "ddy", "ddx", "ddgamma"
# A sum is returned if its parameter is there.
SUMS = {"dgamma": "gamma", "dbeta": "beta", "ddgamma": "gamma"}


def assert_untouched_around(view, memory):
    at = view.ctypes.data - memory.ctypes.data, view.strides
    for buffer in (around := memory.copy(), untouched := np.full_like(memory, calls.POISON)):
        np.ndarray(view.shape, view.dtype, buffer.data, *at)[...] = 0
    assert around.tobytes() == untouched.tobytes()


def as_laid_out(call, made, backend):
    """Return the results of the call by name; no input may change."""
    forward, backward, _ = NORMS[call.kind]
    get, x, dy = made.laid_out.get, made.arrays["x"], made.arrays["dy"]
    outs = [None if place is None else put(np.zeros_like(x), place) for place in call.outs[:2]]
    y_out, dx_out = (pair and pair[0] for pair in outs)
    options = {
        "axis": call.axis, "gamma_offset": call.gamma_offset, "rounding": call.rounding,
        "residual": get("residual"), "where": get("where"), "backend": backend,
    }  # fmt: skip
    parameters = get("gamma"), get("beta"), call.eps
    y, cache = forward(get("x"), *parameters, **options, out=y_out)
    pulled = {n: made.laid_out[n] for n in ("dsum",) if n in made.arrays}
    pulled["accumulate"] = "accumulate" in call.keywords
    if call.apart is not None:
        pulled["sum_axes"] = made.summed

    def gradients(dy, dx, **wrt):
        sums = [
            put(made.arrays[name], place or Place())
            if name in made.arrays and (place or pulled["accumulate"])
            else None
            for name, place in zip(calls.OLD, call.outs[2:], strict=True)
        ]
        out = sn.Gradients(dx, *(pair and pair[0] for pair in sums))
        returned = backward(dy, cache, out=out, **pulled, **wrt)
        for result, there in zip(returned[1:], sums, strict=True):
            if result is not None and there is not None:
                assert result is there[0]
                assert_untouched_around(*there)
        return returned

    grads, wanted = gradients(get("dy"), dx_out), call.seed % 3
    alone = gradients(get("dy"), None, wrt=("x", "gamma", "beta")[wanted])
    for i, (one, other) in enumerate(zip(grads, alone, strict=True)):
        assert (other is not None) == (i == wanted and one is not None)
        if other is not None:
            assert_same_bits(one, other)
    for result, out in ((y, outs[0]), (grads.dx, outs[1])):
        if out is not None:
            assert result is out[0]
            assert_untouched_around(*out)
    results = {name: getattr(cache, name) for name in KEPT} | {"y": y} | grads._asdict()
    if "tangents" in call.keywords:
        jvp, double_backward = SECOND_ORDER[call.kind]
        tx, *others = map(get, calls.TANGENTS)
        results["ty"] = jvp(tx, cache, *others)
        second = double_backward(tx, get("dy"), cache, ddgamma=others[0], ddbeta=others[1])
        results |= zip(SECOND, second, strict=True)
    for name in SUMS.keys() & results.keys():
        parameter = made.arrays.get(SUMS[name])
        assert (results[name] is None) == (parameter is None)
        assert parameter is None or call.apart is not None or results[name].shape == parameter.shape
    for name, array in made.arrays.items():
        assert get(name).astype(array.dtype).tobytes() == array.tobytes(), name
    # Write over the input, without a cache.
    places = [Place() if isinstance(place, str) else place for place in call.places]
    over = put(x, places[0])[0]
    norm = getattr(sn, f"{call.kind}_norm")
    assert_same_bits(y, norm(over, *parameters, **options, out=over))
    if dy.dtype == x.dtype:
        over = put(dy, places[1])[0]
        for one, other in zip(grads, gradients(over, over), strict=True):
            if one is not None:
                assert_same_bits(one, other)
    return {name: array for name, array in results.items() if array is not None}


def of_part(call, made, i):
    """Return the i-th part as plain rows, its keywords, and the rows that a mask leaves."""
    arrays, counts = made.part(i), slice(None)
    if call.mask == "rows":
        counts = arrays.pop("where")[:, 0]
    case = arrays.pop("x")[counts], arrays.pop("gamma", None), arrays.pop("beta", None), call.eps
    case = *case, arrays.pop("dy")[counts]
    old = [arrays.pop(name, None) for name in calls.OLD]
    if "accumulate" in call.keywords:
        arrays["accumulate"] = old
    arrays |= {name: arrays[name][counts] for name in calls.LIKE_X if name in arrays}
    return case, arrays | {"gamma_offset": call.gamma_offset}, counts


def as_rows(call, case, keywords, backend):
    """Return the results of plain rows by name."""
    options = {"backend": backend, "rounding": call.rounding}
    results = compute(case, call.kind, **options, **keywords)
    options |= {n: keywords[n] for n in ("gamma_offset", "residual", "where") if n in keywords}
    cache = NORMS[call.kind][0](*case[:4], **options)[1]
    if "tx" in keywords:
        cotangents = {ddx: keywords.get(tx) for tx, ddx in calls.TANGENTS.items()}
        second = compute(case, call.kind, **options, **cotangents)
        results |= zip(SECOND, second.values(), strict=False)
    results |= {name: getattr(cache, name) for name in KEPT}
    return {name: array for name, array in results.items() if array is not None}


def assert_same_bits(expected, actual):
    """Compare all bits except the sign and the payload of NaN."""
    assert expected.shape == actual.shape
    assert expected.dtype == actual.dtype
    one, other = (v.astype(np.float64) for v in (expected, actual))
    nan = np.isnan(one)
    assert (nan == np.isnan(other)).all()
    assert one[~nan].tobytes() == other[~nan].tobytes()


def check(call, backends=tuple(BACKENDS)):
    made, plainly = calls.make(call), {}
    for backend in backends:
        results = as_laid_out(call, made, backend)
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
                # A cache holds x + residual also of masked rows.
                x = made.in_parts(made.arrays["x"])[i][~counts]
                assert (np.isnan(x) == np.isnan(hidden["x"])).all()
                assert not any(hidden[name].any() for name in {"y", "rstd", "ty"} & hidden.keys())
                alone = made.arrays.get("dsum", np.zeros(()))
                dx = np.broadcast_to(round_to(alone.astype(f8), case[0].dtype), call.shape)
                assert_same_bits(made.in_parts(dx)[i][~counts], hidden["dx"])
            if i == 0:
                plainly[backend] = expected
    if plainly:
        one, *others = plainly.values() if call.rounding == "nearest" else [{}]
        for name, other in ((name, other) for other in others for name in one.keys() & NAMES):
            assert_same_bits(one[name], other[name])
        case, keywords, _ = of_part(call, made, 0)
        # Exact arithmetic takes milliseconds a row.
        if not call.infinite() and case[0].size <= 800:
            exact = exactly(case, call.kind, **keywords)
            for backend, results in plainly.items():
                first = {name: results[name] for name in ("ty", *NAMES) if name in results}
                JUDGES[call.rounding](exact, first, call, is_in_float64(backend, keywords))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(calls.calls())
# dx of one column is only a residue of rounding g: reversed rows went to the reference, which has another residue.
@example(Call(1, (5, 1), -1, (f4, f4, f8, f8), outs=(None, Place(gap=8, backwards=True)) * 2))
# Integers finish sums of a gamma with an axis of length one.
@example(Call(13, (1, 8), -1, (f8,) * 4, varying=(0,), hard=True))
@example(Call(13, (1, 8), -1, (f8,) * 4, varying=(0,), hard=True, rounding="nearest"))
# Ties, zeros and rows out of range are finished after the kernels: sums must read dy before dx is written over it.
@example(Call(1, (4, 60), 0, (f8,) * 4, hard=True, keywords=("accumulate",)))
@example(Call(2, (60, 2), -1, (f8,) * 4, eps=0.0, hard=True, rounding="nearest"))
def test_any_call(call):
    check(call)


@pytest.mark.parametrize("dtype", [f2, bf, f4], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_every_length_has_the_bits_of_the_reference(rng, dtype, offset):
    """Shapes with whole and broken groups of 32 rows, vectors of 8, and tiles."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    shapes = itertools.product((1, 7, 8, 15, 33, 64, 70), (*range(1, 34), 40, 63, 65, 769, 1040))
    for rows, n in (*shapes, (9973, 13)):
        x, dy = rng.standard_normal((2, rows, n))
        gamma, beta = rng.standard_normal((2, n)).astype(f4)
        case = (x + offset).astype(dtype), gamma, beta, 1e-5, dy.astype(dtype)
        results = [compute(case, backend=backend) for backend in BACKENDS]
        # dgamma and dbeta may differ where they cancel.
        for name in ("y", "dx"):
            assert_same_bits(*(result[name] for result in results))


# Channels first: rows of 40 with a stride of 400 elements, in several tiles; samples of these; samples of four tiles, of
# one row, of rows shorter than a vector.
CHANNELS = (3, 40, 20, 20), 1
LARGE = [
    *((*CHANNELS, dtype, (), hard) for dtype in calls.KINDS for hard in (False, True)),
    *((*CHANNELS, f4, varying, False) for varying in ((0,), (2,), (0, 3))),
    *((*way, f8, (0,), True) for way in (CHANNELS, ((4, 6, 8), -1))),
    *((shape, -1, f4, (0,), False) for shape in ((5, 75, 512), (4, 3, 5), (3, 514, 512))),
    ((300, 1, 300), -1, f2, (0,), False),
    # The bits of float64 sums reveal another length of tiles.
    ((5, 16, 3000), 1, (f4, f4, f8, f8), (0,), False),
]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(("shape", "axis", "dtype", "varying", "hard"), LARGE)
@pytest.mark.usefixtures("threads")
def test_large_calls(shape, axis, dtype, varying, hard, rounding):
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    keywords = ("dsum", "accumulate")[: 2 - (rounding == "nearest")] if axis == 1 else ()
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 4
    call = Call(1, shape, axis, dtypes, varying=varying, hard=hard, rounding=rounding)
    check(call._replace(keywords=keywords), ["native"])
