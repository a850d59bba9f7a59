"""The public functions on Dask arrays whose rows are whole: bits, laziness, names, errors."""

import subprocess
import sys

import dask
import dask.array as da
import numpy as np
import pytest
from dask._task_spec import DataNode, Task, TaskRef

from stablenorm import (
    LayerNorm,
    diagnose,
    get_num_threads,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_jvp,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    set_num_threads,
)
from stablenorm.dask import norms as lazy
from stablenorm.dask.graph import tree
from stablenorm.formats import format_of
from stablenorm.functional import calls

FORWARDS = {"layer": layer_norm_forward, "rms": rms_norm_forward}
BACKWARDS = {"layer": layer_norm_backward, "rms": rms_norm_backward}
WITHOUT_CACHE = {"layer": layer_norm, "rms": rms_norm}


SCHEDULERS = {"synchronous": 1, "threads": 3}


@pytest.fixture(params=SCHEDULERS)
def scheduler(request):
    with dask.config.set(scheduler=request.param, num_workers=SCHEDULERS[request.param]):
        yield request.param


def same(actual, expected):
    """Assert equal bits, dtypes and shapes; None is the same as None."""
    assert (actual is None) == (expected is None)
    if expected is not None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


def cut(rng, array, axes=(-1,)):
    """Return a Dask array in random chunks, some of them empty, some of one row; `axes` whole."""
    whole = {axis % array.ndim for axis in axes}
    chunks = []
    for axis, length in enumerate(array.shape):
        inner = [] if axis in whole else sorted(rng.integers(0, length + 1, 3))
        chunks.append(tuple(np.diff([0, *inner, length]).tolist()))
    return da.from_array(array, chunks=tuple(chunks))


def make(rng, dtype=np.float32, shape=(5, 9, 8)):
    """Return x, gamma, beta and dy, with integers among them: their sums tie."""
    x, dy = rng.standard_normal((2, *shape)) + 3
    x[:2], dy[:2] = rng.integers(-3, 4, (2, 2, *shape[1:]))
    gamma, beta = rng.integers(1, 4, (2, shape[-1]))
    return tuple(each.astype(dtype) for each in (x, gamma, beta, dy))


def never():
    pytest.fail("computed before it was asked for")


def uncomputable(shape=(4, 6), chunks=(2, 6), dtype=np.float32):
    return da.map_blocks(lambda _: never(), da.zeros(shape, chunks=chunks, dtype=dtype), dtype=dtype,
                         meta=np.empty((0,) * len(shape), dtype))  # fmt: skip


# ---- the same bits ----


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_y_and_statistics_have_the_bits_of_the_whole_call(rng, dtype, kind, rounding):
    x, gamma, beta, _ = make(rng, dtype)
    given = {"gamma": gamma, "beta": beta, "rounding": rounding, "eps": 0.0}
    if dtype.itemsize > 2:
        # Of 16 bits, kernels would be compiled for this alone.
        given["gamma_offset"] = 0.5
    expected, whole = FORWARDS[kind](x, **given)
    for scheduler in SCHEDULERS:
        lazy = cut(rng, x)
        y, cache = FORWARDS[kind](lazy, **given)
        assert y.chunks == lazy.chunks
        without = WITHOUT_CACHE[kind](lazy, **given)
        found = dask.compute(y, without, cache.mean, cache.rstd, cache, scheduler=scheduler)
        for actual, wanted in zip(
            found[:4], (expected, expected, whole.mean, whole.rstd), strict=True
        ):
            same(actual, wanted)
        computed = found[-1]
        assert type(computed) is type(whole)
        for actual, wanted in zip(computed.statistics, whole.statistics, strict=True):
            same(actual, wanted)


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, -1), (0, 1, 2)])
def test_other_axes(rng, axis):
    x = make(rng)[0]
    axes = axis if isinstance(axis, tuple) else (axis,)
    gamma = rng.standard_normal([x.shape[i] for i in sorted(i % 3 for i in axes)]).astype(
        np.float32
    )
    y, cache = layer_norm_forward(cut(rng, x, axes), gamma, axis=axis)
    expected, whole = layer_norm_forward(x, gamma, axis=axis)
    same(y.compute(), expected)
    same(cache.compute().mean, whole.mean)


def test_gamma_may_be_a_dask_array_in_other_chunks(rng):
    x, gamma, beta, _ = make(rng)
    lazy = da.from_array(gamma, chunks=3)
    y, cache = layer_norm_forward(cut(rng, x), lazy, da.from_array(beta, chunks=(1,)))
    same(y.compute(), layer_norm(x, gamma, beta))
    assert cache.gamma is lazy
    same(cache.compute().gamma, gamma)
    assert layer_norm_forward(cut(rng, x), gamma)[1].gamma is gamma


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("shape", [(5, 1, 8), (9, 8), (5, 9, 8)])
def test_gamma_with_leading_axes(rng, shape):
    x, _, beta, _ = make(rng)
    gamma = rng.standard_normal(shape).astype(np.float32)
    y, cache = layer_norm_forward(cut(rng, x), gamma, beta)
    expected, whole = layer_norm_forward(x, gamma, beta)
    same(y.compute(), expected)
    same(cache.compute().rstd, whole.rstd)


def test_residual(rng):
    x, gamma, _, other = make(rng)
    y, cache = layer_norm_forward(cut(rng, x), gamma, residual=cut(rng, other))
    expected, whole = layer_norm_forward(x, gamma, residual=other)
    same(y.compute(), expected)
    same(cache.x.compute(), whole.x)
    same(cache.compute().x, whole.x)


@pytest.mark.parametrize("shape", [(5, 9, 1), (9, 1), (5, 9, 8), (8,)])
@pytest.mark.parametrize("lazy", [False, True])
def test_masks(rng, shape, lazy):
    x, gamma, beta, _ = make(rng)
    where = rng.integers(0, 2, shape) == 1
    y, cache = layer_norm_forward(
        cut(rng, x), gamma, beta, where=da.from_array(where, chunks=2) if lazy else where
    )
    expected, whole = layer_norm_forward(x, gamma, beta, where=where)
    same(y.compute(), expected)
    computed = cache.compute()
    same(computed.where, whole.where)
    same(computed.mean, whole.mean)


def test_the_other_byte_order(rng):
    x = make(rng)[0]
    y = layer_norm(cut(rng, x.astype(">f4")))
    assert y.dtype == np.float32
    same(y.compute(), layer_norm(x))


def gradients_of(given, chunks, lazy, dy, kind="layer", **keywords):
    """Return the gradients of the whole call, and lazy ones."""
    x, *parameters = given
    options = {name: keywords.pop(name) for name in ("rounding", "axis") if name in keywords}
    _, whole = FORWARDS[kind](x, *parameters, **options)
    _, cache = FORWARDS[kind](lazy, *parameters, **options)
    return BACKWARDS[kind](dy, whole, **keywords), BACKWARDS[kind](chunks, cache, **keywords)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_nearest_gradients_have_the_bits_of_the_whole_call(rng, dtype, kind):
    x, gamma, beta, dy = make(rng, dtype)
    # Columns that tie, whose sums only integers decide.
    x[..., :2], dy[..., :2] = rng.integers(-3, 4, (2, *x.shape[:-1], 2))
    # One mixture of types: each has kernels of its own, compiled in two seconds.
    mixed = (kind, dtype) == ("layer", np.float64)
    both = zip((dy, dy.astype(np.float32) if mixed else dy), SCHEDULERS, strict=True)
    for cotangent, scheduler in both:
        expected, lazy = gradients_of(
            (x, gamma, beta), cut(rng, cotangent), cut(rng, x), cotangent, kind, rounding="nearest"
        )
        found = dask.compute(lazy, scheduler=scheduler)[0]
        for actual, wanted in zip(found, expected, strict=True):
            same(actual, wanted)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_default_dx_has_the_bits_of_the_whole_call_and_the_sums_keep_the_contract(rng, dtype, kind):
    x, gamma, beta, dy = make(rng, dtype)
    lazy_x = cut(rng, x)
    expected, lazy = gradients_of((x, gamma, beta), cut(rng, dy), lazy_x, dy, kind)
    assert lazy.dx.chunks == lazy_x.chunks
    assert [each.shape for each in lazy[1:]] == [gamma.shape, beta.shape]
    found = dask.compute(lazy, scheduler="synchronous")[0]
    same(found.dx, expected.dx)
    for actual, wanted in zip(found[1:], expected[1:], strict=True):
        # Both are within half an ulp and a little: neighbours at most.
        ulp = 2.0 ** (1 - format_of(dtype).digits) * np.abs(wanted.astype(float))
        assert (np.abs(actual.astype(float) - wanted.astype(float)) <= 1.01 * ulp + 1e-12).all()
    for workers in (1, 3):
        again = dask.compute(lazy, scheduler="threads", num_workers=workers)[0]
        for actual, wanted in zip(again, found, strict=True):
            same(actual, wanted)


def test_a_sum_of_large_parts_that_cancel_is_not_rounded_before_the_end(rng):
    """Of parts rounded to float32 nothing would be left."""
    x = rng.standard_normal((4, 8)).astype(np.float32)
    dy = np.repeat([[1.0], [2.0**40], [-(2.0**40)], [2.0**-30]], 8, 1).astype(np.float32)
    expected, lazy = gradients_of(
        (x, None, x[0]), da.from_array(dy, chunks=(1, 8)), da.from_array(x, chunks=(1, 8)), dy
    )
    assert lazy.dgamma is expected.dgamma is None
    same(lazy.dbeta.compute(), np.full(8, 1.0 + 2.0**-30, np.float32))


@pytest.mark.parametrize("axis", [0, (0, 2), (0, 1, 2)])
def test_gradients_along_other_axes(rng, axis):
    x, _, _, dy = make(rng)
    axes = axis if isinstance(axis, tuple) else (axis,)
    gamma = rng.standard_normal([x.shape[i] for i in axes]).astype(np.float32)
    expected, lazy = gradients_of(
        (x, gamma, gamma), cut(rng, dy), cut(rng, x, axes), dy, axis=axis, rounding="nearest"
    )
    for actual, wanted in zip(dask.compute(lazy)[0], expected, strict=True):
        same(actual, wanted)


@pytest.mark.parametrize("shape", [(5, 1, 8), (9, 8), (5, 9, 8)])
def test_gradients_of_a_gamma_with_leading_axes(rng, shape):
    x, _, beta, dy = make(rng)
    gamma = rng.standard_normal(shape).astype(np.float32)
    expected, lazy = gradients_of(
        (x, gamma, beta), cut(rng, dy), cut(rng, x), dy, rounding="nearest"
    )
    for actual, wanted in zip(dask.compute(lazy)[0], expected, strict=True):
        same(actual, wanted)


@pytest.mark.parametrize(
    ("shape", "chunks", "axis"),
    [((4, 4, 4), (4, 1, 4), (0, 2)), ((5, 4, 4), (5, (0, 1, 3), 4), (0, 2))],
)
def test_a_gamma_whose_axes_are_not_where_those_of_x_are(rng, shape, chunks, axis):
    """Of the shape of x, but in another order."""
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    gamma = rng.standard_normal((shape[1], shape[0], shape[2])).astype(np.float32)
    expected, lazy = gradients_of(
        (x, gamma, None), da.from_array(dy), da.from_array(x, chunks=chunks), dy,
        axis=axis, rounding="nearest",
    )  # fmt: skip
    for actual, wanted in zip(dask.compute(lazy)[0], expected, strict=True):
        same(actual, wanted)


def test_columns_that_tie_are_asked_again(dtype, monkeypatch):
    """Of ones, xhat is 1 but for the error of rstd: whether a sum is a tie only integers can tell."""
    asked = []
    exact = lazy.exact_parts
    monkeypatch.setattr(lazy, "exact_parts", lambda *given: asked.append(1) or exact(*given))
    digits = format_of(dtype).digits
    x = np.array([[1, -1, 1, -1]] * 9).astype(dtype)
    dy = np.zeros((9, 4))
    # Halfway to the next number, which is the even one.
    dy[0], dy[8] = 1 + 2.0 ** (1 - digits), 2.0**-digits
    of_x, of_dy = (da.from_array(each.astype(dtype), chunks=(1, 4)) for each in (x, dy))
    _, cache = layer_norm_forward(of_x, x[0], x[0], eps=0.0, rounding="nearest")
    dgamma, dbeta = dask.compute(layer_norm_backward(of_dy, cache)[1:], scheduler="sync")[0]
    assert len(asked) == 9
    same(dgamma, ((1 + 2.0 ** (2 - digits)) * x[0].astype(float)).astype(dtype))
    same(dbeta, np.full(4, 1 + 2.0 ** (2 - digits)).astype(dtype))


def test_sums_are_merged_in_the_order_of_the_blocks_a_few_at_a_time(monkeypatch):
    tasks, letters = {}, [chr(i) for i in range(65, 65 + 70)]
    monkeypatch.setattr(lazy, "merged", lambda *each: "".join(each))
    leaves = [DataNode(each, each) for each in letters]
    last = tree(("sum",), [TaskRef(each) for each in letters], lazy._merged, tasks)
    assert max(len(task.args) for task in tasks.values()) == 8
    assert len(tasks) == 9 + 2 + 1
    graph = tasks | {each.key: each for each in leaves}
    assert dask.get(graph, last.key) == "".join(letters)


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_masks_residual_and_dsum_in_the_backward(rng, rounding):
    x, gamma, beta, dy = make(rng)
    where, (other, dsum) = rng.integers(0, 2, (5, 9, 1)) == 1, rng.standard_normal((2, *x.shape))
    other, dsum = other.astype(np.float32), dsum.astype(np.float32)
    given = {"rounding": rounding, "where": where}
    _, whole = layer_norm_forward(x, gamma, beta, residual=other, **given)
    _, cache = layer_norm_forward(cut(rng, x), gamma, beta, residual=cut(rng, other), **given)
    expected = layer_norm_backward(dy, whole, dsum=dsum)
    lazy = layer_norm_backward(cut(rng, dy), cache, dsum=cut(rng, dsum))
    same(lazy.dx.compute(), expected.dx)
    if rounding == "nearest":
        same(lazy.dgamma.compute(), expected.dgamma)
    # And the cache that is computed is one like any other.
    for actual, wanted in zip(
        layer_norm_backward(dy, cache.compute()), layer_norm_backward(dy, whole), strict=True
    ):
        same(actual, wanted)


def test_the_class_takes_dask_arrays(rng):
    x, gamma, _, dy = make(rng)
    found = []
    for given, cotangent in ((x, dy), (cut(rng, x), cut(rng, dy))):
        norm = LayerNorm(8, rounding="nearest")
        norm.parameters["gamma"][:] = gamma
        found.append((norm.forward(given), norm.backward(cotangent), norm.gradients))
    for actual, wanted in zip(*([*each[:2], *each[2].values()] for each in found), strict=True):
        same(wanted.compute(), actual)


def test_only_what_is_asked(rng):
    x, gamma, beta, dy = make(rng)
    for wrt, asked in (("x", (0,)), (("gamma",), (1,)), (("beta", "x"), (0, 2))):
        expected, lazy = gradients_of(
            (x, gamma, beta), cut(rng, dy), cut(rng, x), dy, wrt=wrt, rounding="nearest"
        )
        assert tuple(i for i in range(3) if lazy[i] is not None) == asked
        for i in asked:
            same(lazy[i].compute(), expected[i])


def test_an_array_of_no_rows():
    x = np.empty((0, 8), np.float32)
    for rounding in ("fast", "nearest"):
        expected, lazy = gradients_of(
            (x, x[:0].sum(0), x.sum(0)), da.from_array(x), da.from_array(x), x, rounding=rounding
        )
        for actual, wanted in zip(dask.compute(lazy)[0], expected, strict=True):
            same(actual, wanted)
    y, cache = layer_norm_forward(da.from_array(x))
    assert (y.compute().shape, cache.compute().mean.shape) == ((0, 8), (0, 1))


@pytest.mark.parametrize(("kind", "axis"), [("layer", 2), ("rms", (0, 2)), ("layer", (0, 1, 2))])
def test_diagnosis_is_that_of_the_whole_array(rng, kind, axis, scheduler):
    x = rng.standard_normal((6, 9, 40)).astype(np.float32) + 100
    x[1, 2, 3], x[4, 5:7] = np.nan, 3.0
    axes = axis if isinstance(axis, tuple) else (axis,)
    lazy = diagnose(cut(rng, x, axes), kind=kind, axis=axis, eps=0.0, dtype="float16", top=7)
    assert dask.utils.key_split(lazy.key).startswith("diagnose")
    found = lazy.compute(scheduler=scheduler)
    assert (
        found.as_dict()
        == diagnose(x, kind=kind, axis=axis, eps=0.0, dtype="float16", top=7).as_dict()
    )
    assert found.per_row is None


# ---- lazy, as other collections of Dask ----


def test_nothing_is_computed_before_it_is_asked_for():
    x, gamma = uncomputable(), uncomputable((6,), (6,))
    y, cache = layer_norm_forward(x, gamma, residual=x, where=uncomputable(dtype=bool))
    assert repr(cache).startswith("LazyCache(x: float32 (4, 6), 2 blocks, gamma: float32 (6,)")
    assert "\n" not in repr(cache)
    gradients = layer_norm_backward(x, cache, dsum=x)
    assert dask.is_dask_collection(diagnose(x))
    assert (gradients.dx.shape, gradients.dgamma.shape) == ((4, 6), (6,))
    assert (cache.axis, cache.rstd.shape, layer_norm(x).shape) == ((1,), (4, 1), (4, 6))
    with pytest.raises(pytest.fail.Exception, match="before it was asked for"):
        y.compute(scheduler="synchronous")


def test_names_tell_what_a_task_does_and_are_the_same_each_time(rng):
    x, gamma, beta, _ = make(rng)
    lazy = da.from_array(x, chunks=(2, 3, 8))
    (y, cache), (again, _) = (layer_norm_forward(lazy, gamma, beta) for _ in range(2))
    assert y.name == again.name
    assert y.name != layer_norm_forward(lazy, gamma, beta, eps=1e-6)[0].name
    names = {dask.utils.key_split(key) for key in (*y.dask, *cache.mean.dask)}
    assert {"layer-norm-forward", "layer-norm-forward-y", "layer-norm-mean"} <= names
    assert dask.utils.key_split(rms_norm(lazy).name) == "rms-norm"
    dgamma = layer_norm_backward(lazy, cache).dgamma
    names |= {dask.utils.key_split(key) for key in dgamma.dask}
    assert {
        f"layer-norm-gradients{each}" for each in ("", "-sum", "-sum-merged", "-dgamma")
    } <= names
    assert dgamma.name == layer_norm_backward(lazy, cache).dgamma.name
    assert not any("lambda" in name for name in names)


@pytest.mark.usefixtures("scheduler")
def test_compute_persist_and_optimize_of_y_and_cache_together(rng):
    x, gamma, beta, _ = make(rng)
    # By tasks: what is in memory is left in a graph as it is.
    of_x, of_gamma = cut(rng, x).map_blocks(np.copy), da.from_array(gamma).map_blocks(np.copy)
    lazy = layer_norm_forward(of_x, of_gamma, beta)
    expected, whole = layer_norm_forward(x, gamma, beta)
    for y, cache in (lazy, dask.persist(*lazy), dask.optimize(*lazy), (lazy[0], lazy[1].persist())):
        assert dask.is_dask_collection(cache)
        actual, computed = dask.compute(y, cache)
        same(actual, expected)
        for one, other in zip(computed, whole, strict=True):
            if isinstance(other, np.ndarray):
                same(one, other)
        same(computed.mean, whole.mean)
    persisted = dask.persist(*lazy)[1].__dask_graph__()
    assert not any(isinstance(each, Task) for each in dict(persisted).values())


# ---- errors, when the graph is made ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: layer_norm(x, axis=0, residual=x), ValueError,
         r"x has 2 chunks along axis -2, which is normalized; x.rechunk\({-2: -1}\) first"),
        (lambda x: layer_norm(x[x[:, 0] > 0]), ValueError, "chunks of known sizes.*compute_chunk"),
        (lambda x: layer_norm(x, gamma=x[0][x[0] > 0]), ValueError, "gamma must have chunks of known"),
        (lambda x: layer_norm(x.astype(int)), TypeError, "x must be float16.*got int64"),
        (lambda x: layer_norm(x, gamma=np.ones(5)), ValueError, r"gamma must have shape \(6,\)"),
        (lambda x: layer_norm(x, gamma=x), ValueError, None),
        (lambda x: layer_norm(x, residual=x[:3]), ValueError, r"residual must have shape \(4, 6\)"),
        (lambda x: layer_norm(x, where=x), TypeError, "where must be an array of bool, got float32"),
        (lambda x: layer_norm(x, where=x[:3] > 0), ValueError, "where must broadcast to the shape"),
        (lambda x: layer_norm(x, where=x[x[:, 0] > 0] > 0), ValueError, "where must have chunks of"),
        (lambda x: layer_norm(x, eps=-1), ValueError, "eps must be finite and >= 0"),
        (lambda x: layer_norm(x, axis=2), ValueError, "axis must name axes of x"),
        (lambda x: layer_norm(x[:, :0]), ValueError, "at least one element along axis 1"),
        (lambda x: layer_norm(x, rounding="up"), ValueError, "rounding must be"),
        (lambda x: layer_norm(x, backend="fast"), ValueError, "backend must be one of"),
        (lambda x: layer_norm(x, out=np.empty((4, 6))), ValueError, "out must be None.*store"),
        (lambda x: layer_norm_forward(x, save="y"), ValueError, 'save must be "x" for a Dask'),
        (lambda x: layer_norm(np.ones((4, 6)), x[0]), TypeError, r"gamma must be in memory.*compute"),
        (lambda x: layer_norm(np.ones((4, 6)), where=x > 0), TypeError, "where must be in memory"),
        (lambda x: layer_norm_jvp(x, layer_norm_forward(x)[1]), TypeError, r"pass cache.compute\(\)"),
        (lambda x: layer_norm_backward(x[:3], layer_norm_forward(x)[1]), ValueError,
         r"dy must have shape \(4, 6\), that of the y of this cache, got \(3, 6\)"),
        (lambda x: layer_norm_backward(np.ones((4, 6)), layer_norm_forward(x)[1]), TypeError,
         "dy must be a Dask array.*from_array"),
        (lambda x: layer_norm_backward(x, layer_norm_forward(np.ones((4, 6)))[1]), TypeError,
         "dy must be in memory"),
        (lambda x: rms_norm_backward(x, layer_norm_forward(x)[1]), ValueError, "pass this one to layer"),
        (lambda x: layer_norm_backward(x, layer_norm_forward(x)), TypeError, "write y, cache ="),
        (lambda x: layer_norm_backward(x, layer_norm_forward(x)[1], wrt="dx"), ValueError, "wrt must"),
        *((lambda x, given=given: layer_norm_backward(x, layer_norm_forward(x)[1], **given), ValueError,
           f"{next(iter(given))} must be left out for a Dask array.*; ")
          for given in ({"sum_axes": 0}, {"dmean": 1}, {"drstd": 1}, {"accumulate": True}, {"out": (1, None, None)})),
        (lambda x: diagnose(x, axis=0), ValueError, "x has 2 chunks along axis -2"),
        (lambda x: diagnose(x > 0), TypeError, "x must be float16.*got bool"),
        (lambda x: layer_norm(x.map_blocks(np.ma.asarray)), TypeError, "Dask array of NumPy arrays"),
    ],
)  # fmt: skip
def test_errors_come_with_the_call_in_one_line(call, error, message):
    x = uncomputable()
    if message is None:
        # A gamma of the shape of x is one for each row.
        assert call(x).shape == x.shape
        return
    with pytest.raises(error, match=message) as raised:
        call(x)
    assert "\n" not in str(raised.value)


def test_ordinary_calls_load_no_dask():
    code = (
        "import sys, numpy as np, stablenorm as s\n"
        "given = {'where': [[True], [False]], 'backend': 'numpy'}\n"
        "y, cache = s.layer_norm_forward(np.ones((2, 3)), **given)\n"
        "s.layer_norm_backward(y, cache); s.diagnose(y)\n"
        "print(*(m for m in ('dask', 'distributed', 'zarr') if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == []


def test_a_task_keeps_to_its_thread_where_the_scheduler_has_others(rng, monkeypatch):
    seen, forward = [], calls.forward
    before = get_num_threads()

    def spy(*given):
        seen.append(get_num_threads())
        return forward(*given)

    monkeypatch.setattr(calls, "forward", spy)
    y = layer_norm(cut(rng, make(rng)[0]))
    set_num_threads(4)
    try:
        for scheduler, threads in (("threads", 1), ("synchronous", 4)):
            seen.clear()
            y.compute(scheduler=scheduler)
            assert set(seen) == {threads}
            assert get_num_threads() == 4
    finally:
        set_num_threads(before)
