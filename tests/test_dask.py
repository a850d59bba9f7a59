"""Dask arrays have the bits of the whole call; nothing is computed early; errors name the cure."""

import weakref

import dask
import dask.array as da
import numpy as np
import pytest
from norms import FINITE, NORMS, assert_contract, assert_same, compute, exactly

import stablenorm as sn
from stablenorm.testing.families import FAMILIES, Case, make_case


@pytest.fixture(params=["synchronous", "threads"])
def scheduler(request):
    with dask.config.set(scheduler=request.param, num_workers=3):
        yield request.param


def same(actual, expected):
    assert_same(actual, expected)
    assert [np.shape(array) for array in actual] == [np.shape(array) for array in expected]


def cut(rng, array, axes=(-1,)):
    """Return a Dask array in random chunks, also empty ones and ones of one row; `axes` stay whole."""
    whole = {axis % array.ndim for axis in axes}
    chunks = []
    for axis, length in enumerate(array.shape):
        inner = [] if axis in whole else sorted(rng.integers(0, length + 1, 3))
        chunks.append(tuple(np.diff([0, *inner, length]).tolist()))
    return da.from_array(array, chunks=tuple(chunks))


def make(rng, dtype=np.float32, shape=(5, 9, 8)):
    """Return x, gamma, beta and dy with many integers: their sums tie."""
    x, dy = rng.standard_normal((2, *shape)) + 3
    x[:2], dy[:2] = rng.integers(-3, 4, (2, 2, *shape[1:]))
    gamma, beta = rng.integers(1, 4, (2, shape[-1]))
    return tuple(array.astype(dtype) for array in (x, gamma, beta, dy))


def uncomputable(shape=(4, 6), chunks=(2, 6), dtype=np.float32):
    """Return an array whose blocks fail the test if they are computed."""

    def never(_):
        pytest.fail("computed before it was asked for")

    zeros = da.zeros(shape, chunks=chunks, dtype=dtype)
    return zeros.map_blocks(never, dtype=dtype, meta=np.empty((0,) * len(shape), dtype))


def results(case, chunked, kind="layer", pulled=None, **keywords):
    """Return y, the statistics and the gradients twice: of the whole call, and lazy."""
    forward, backward, _ = NORMS[kind]
    lazy = {name: chunked(v) for name, v in keywords.items() if name in ("residual", "where")}
    both = []
    for wrap, options in ((np.asarray, keywords), (chunked, keywords | lazy)):
        y, cache = forward(wrap(case[0]), *case[1:4], **options)
        pull = {name: wrap(array) for name, array in (pulled or {}).items()}
        gradients = backward(wrap(case[4]), cache, **pull)
        asked = backward(wrap(case[4]), cache, wrt=("beta", "x")) if pulled else ()
        both.append((y, cache.mean, cache.rstd, *gradients, *asked))
    return both


@pytest.mark.parametrize("name", FINITE)
def test_families(name, dtype, rng):
    """Every bit of "nearest", of y and dx by default; the sums keep the contract, whatever the blocks."""
    if not FAMILIES[name].applies(dtype, 7):
        return
    case = make_case(name, dtype, 7, max(6, FAMILIES[name].smallest_rows))
    options = {"backend": "numpy" if dtype == np.float16 else None}
    kind = sorted(NORMS)[rng.random() < 0.3]
    for rounding in ("fast", "nearest"):
        expected, lazy = results(case, lambda a: cut(rng, a), kind, rounding=rounding, **options)
        actual = dask.compute(lazy, scheduler="synchronous")[0]
        count = None if rounding == "nearest" else 4
        same(actual[:count], expected[:count])
        if rounding == "fast":
            assert_contract(exactly(case, kind), {"dgamma": actual[4], "dbeta": actual[5]})
            # Threads compute the blocks in another order.
            same(dask.compute(lazy, scheduler="threads", num_workers=3)[0], actual)


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize(
    ("axis", "lead", "mask"),
    # The last case of the first line has a gamma of the shape of x, with its axes in another order.
    [(0, (), None), (1, (), None), ((0, 2), (), None), ((1, -1), (), None), ((0, 1, 2), (), None),
     (2, (5, 1), None), (2, (9,), None), (2, (5, 9), None), ((0, 2), (9,), None), (1, (5, 8), (1, 8)),
     *((2, (), mask) for mask in [(5, 9, 1), (9, 1), (5, 9, 8), (8,)])],
)  # fmt: skip
def test_axes_leading_gammas_masks_and_what_is_added(rng, axis, lead, mask):
    x, _, _, dy = make(rng)
    residual, dsum = rng.standard_normal((2, *x.shape)).astype(np.float32)
    axes = axis if isinstance(axis, tuple) else (axis,)
    gamma = rng.standard_normal(lead + tuple(x.shape[i] for i in sorted(i % 3 for i in axes)))
    inside = mask in ((5, 9, 8), (8,))
    where = {} if mask is None else {"where": rng.integers(0, 2, mask) == 1}
    expected, lazy = results(
        Case(x, gamma.astype(np.float32), None, 1e-5, dy),
        lambda a: cut(rng, a, axes) if a.ndim > 1 else a,
        pulled={"dsum": dsum},
        **where | {"axis": axis, "residual": residual, "rounding": "fast" if inside else "nearest"},
    )
    count = 4 if inside else None
    same(dask.compute(lazy)[0][:count], expected[:count])


def test_gamma_and_beta_may_be_dask_arrays_and_bytes_in_any_order(rng):
    x, gamma, beta, _ = make(rng)
    lazy, of_ones = da.from_array(gamma, chunks=3), da.from_array(beta, chunks=1)
    y, cache = sn.layer_norm_forward(cut(rng, x.astype(">f4")), lazy, of_ones)
    assert y.dtype == np.float32
    same([y.compute()], [sn.layer_norm(x, gamma, beta)])
    assert cache.gamma is lazy


# ---- hard sums of parts ----


def of_rows(case, **options):
    """Return dgamma and dbeta in blocks of one row, and of the whole call."""
    x, dy = (da.from_array(array, chunks=(1, -1)) for array in (case.x, case.dy))
    _, cache = sn.layer_norm_forward(x, *case[1:4], **options)
    sums = dask.compute(sn.layer_norm_backward(dy, cache)[1:], scheduler="synchronous")[0]
    whole = compute(case, **options)
    return sums, (whole["dgamma"], whole["dbeta"])


@pytest.mark.parametrize("size", [1.7e308, 2.0**-1060, 1.0])
def test_parts_that_cancel_leave_the_rest(size, rng):
    x, dy = rng.standard_normal((2, 12, 5))
    dy[:4], dy[8:] = size, -size
    x[8:] = x[:4]
    dy[4:8] *= 2.0**-1050
    case = Case(x, np.ones(5), np.ones(5), 1e-5, dy)
    sums, expected = of_rows(case, rounding="nearest")
    same(sums, expected)
    assert sums[1].any()
    assert np.isfinite(sums[0]).all()
    (dgamma, dbeta), _ = of_rows(case)
    assert_contract(exactly(case), {"dgamma": dgamma, "dbeta": dbeta})


@pytest.mark.parametrize(
    ("name", "where", "values"),
    # NaN; NaN and an infinity; both infinities in one column; a constant row.
    [("x", (7, 2), np.nan), ("dy", ([7, 1], [2, 3]), [np.nan, -np.inf]),
     ("dy", ([0, 9], 4), [np.inf, -np.inf]), ("x", 7, 3)],
)  # fmt: skip
def test_nan_and_infinity_in_one_part(name, where, values, dtype, rng):
    x, dy = rng.standard_normal((2, 10, 6)).astype(dtype)
    {"x": x, "dy": dy}[name][where] = values
    case = Case(x, np.ones(6, dtype), np.ones(6, dtype), 0.0, dy)
    same(*of_rows(case, rounding="nearest"))
    for one, other in zip(*of_rows(case), strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))


@pytest.mark.parametrize(("rounding", "chunks"), [("fast", 12), ("nearest", 80)])
def test_sums_of_narrow_data_hold_no_chunk_for_later(rounding, chunks):
    """Exact sums alone need x and dy again: for them Dask holds all chunks until the sums are known."""
    alive, most = weakref.WeakValueDictionary(), []

    def make(zeros):
        array = zeros + np.arange(4, dtype=np.float32)
        alive[id(array)] = array
        most.append(len(alive))
        return array

    x = da.zeros((80, 4), np.float32, chunks=(1, 4)).map_blocks(make, meta=np.empty((0, 0), "f4"))
    _, cache = sn.layer_norm_forward(x, np.ones(4), np.ones(4), rounding=rounding)
    dask.compute(sn.layer_norm_backward(x, cache)[1:], scheduler="synchronous")
    assert max(most) <= chunks
    assert (max(most) > 12) == (rounding == "nearest")


# ---- processes, no rows, nothing computed early ----


def test_other_processes_give_the_same_bits(rng):
    """Tasks can be pickled, and their bits do not depend on the process."""
    x, gamma, beta, dy = make(rng)
    case, chunked = Case(x, gamma, beta, 1e-5, dy), lambda a: cut(rng, a)
    lazy = [results(case, chunked, rounding=rounding)[1] for rounding in ("fast", "nearest")]
    ways = {"scheduler": "processes", "num_workers": 2}, {"scheduler": "synchronous"}
    for pair in zip(*(dask.compute(*lazy, **way) for way in ways), strict=True):
        same(*pair)


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_an_array_of_no_rows(rounding):
    x, zeros = np.empty((0, 8), np.float32), np.zeros(8, np.float32)
    expected, lazy = results(Case(x, zeros, zeros, 1e-5, x), da.from_array, rounding=rounding)
    same(dask.compute(lazy)[0], expected)


def test_nothing_is_computed_before_it_is_asked_for():
    x, gamma = uncomputable(), uncomputable((6,), (6,))
    y, cache = sn.layer_norm_forward(x, gamma, residual=x, where=uncomputable(dtype=bool))
    assert "\n" not in repr(cache)
    gradients = sn.layer_norm_backward(x, cache, dsum=x)
    assert (gradients.dx.shape, gradients.dgamma.shape) == ((4, 6), (6,))
    assert (cache.axis, cache.rstd.shape, sn.layer_norm(x).shape) == ((1,), (4, 1), (4, 6))
    norm = sn.LayerNorm(6)
    assert norm.backward(norm(x)).shape == norm.cache.x.shape == (4, 6)
    # The cache is a record that Dask leaves as it is.
    assert dask.compute(cache) == dask.persist(cache) == (cache,)
    with pytest.raises(pytest.fail.Exception, match="before it was asked for"):
        y.compute(scheduler="synchronous")


# ---- errors, when the graph is made ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: sn.layer_norm(x, axis=0, residual=x), ValueError,
         r"x has 2 chunks along axis -2, which is normalized; x.rechunk\({-2: -1}\) first"),
        (lambda x: sn.layer_norm(x[x[:, 0] > 0]), ValueError, "known chunk sizes.*compute_chunk"),
        (lambda x: sn.layer_norm(x, gamma=x[0][x[0] > 0]), ValueError, "gamma must have known chunk"),
        (lambda x: sn.layer_norm(x.astype(int)), TypeError, "x must be float16.*got int64"),
        (lambda x: sn.layer_norm(x, gamma=np.ones(5)), ValueError, r"gamma must have shape \(6,\)"),
        (lambda x: sn.layer_norm(x, residual=x[:3]), ValueError, r"residual must have shape \(4, 6\)"),
        (lambda x: sn.layer_norm(x, where=x[:3] > 0), ValueError, "where must broadcast to the shape"),
        (lambda x: sn.layer_norm(x, where=x[x[:, 0] > 0] > 0), ValueError, "where must have known chunk"),
        (lambda x: sn.layer_norm(x, backend="fast"), ValueError, "backend must be one of"),
        (lambda x: sn.layer_norm(x, out=np.empty((4, 6))), ValueError, "out cannot be combined with a Dask array.*store"),
        (lambda x: sn.layer_norm(np.ones((4, 6)), x[0]), TypeError, r"gamma must be in memory.*compute"),
        (lambda x: sn.layer_norm(np.ones((4, 6)), where=x > 0), TypeError, "where must be in memory"),
        (lambda x: sn.layer_norm_jvp(x, sn.layer_norm_forward(x)[1]), ValueError, r"a Dask array.*call forward on x.compute\(\)"),
        (lambda x: sn.layer_norm_backward(x[:3], sn.layer_norm_forward(x)[1]), ValueError,
         r"dy must have shape \(4, 6\), that of the y of this cache, got \(3, 6\)"),
        (lambda x: sn.layer_norm_backward(np.ones((4, 6)), sn.layer_norm_forward(x)[1]), TypeError,
         "dy must be a Dask array.*from_array"),
        (lambda x: sn.layer_norm_backward(x, sn.layer_norm_forward(np.ones((4, 6)))[1]), TypeError,
         "dy must be in memory"),
        (lambda x: sn.rms_norm_backward(x, sn.layer_norm_forward(x)[1]), ValueError, "pass this one to layer"),
        (lambda x: sn.layer_norm_backward(x, sn.layer_norm_forward(x)), TypeError, "write y, cache ="),
        (lambda x: sn.layer_norm_backward(x, sn.layer_norm_forward(x)[1], wrt="dx"), ValueError, "wrt must"),
        *((lambda x, options=options: sn.layer_norm_backward(x, sn.layer_norm_forward(x)[1], **options), ValueError,
           f"{next(iter(options))} cannot be combined with a Dask array.*; ")
          for options in ({"sum_axes": 0}, {"accumulate": True}, {"out": (1, None, None)})),
        (sn.diagnose, TypeError, r"x must be in memory here, got a Dask array; pass x.compute\(\)"),
        (lambda x: sn.layer_norm(x.map_blocks(np.ma.asarray)), TypeError, "Dask array of NumPy arrays"),
    ],
)  # fmt: skip
def test_errors_come_with_the_call_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call(uncomputable())
    assert "\n" not in str(raised.value)
