"""Dask arrays with several chunks along a normalized axis: the bits of the whole array, the graph."""

import itertools

import numpy as np
import pytest

from stablenorm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.formats import format_of
from stablenorm.oracle import exact_layer_norm, exact_rms_norm

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")

CALLS = {
    "layer": (layer_norm_forward, layer_norm_backward, exact_layer_norm),
    "rms": (rms_norm_forward, rms_norm_backward, exact_rms_norm),
}


@pytest.fixture(autouse=True)
def synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def cut(rng, *arrays):
    """Return Dask arrays in the same random chunks along all axes, some of them empty."""
    chunks = []
    for length in arrays[0].shape:
        inner = sorted(rng.integers(0, length + 1, 2))
        chunks.append(tuple(np.diff([0, *inner, length]).tolist()))
    return [da.from_array(array, chunks=tuple(chunks)) for array in arrays]


def make(rng, dtype=np.float32, shape=(7, 30), axes=(1,)):
    """Return x, gamma, beta and dy, with small integers in some of the rows: elements that tie."""
    x, dy = rng.standard_normal((2, *shape)) + 3
    x[:2], dy[:2] = rng.integers(-2, 3, (2, 2, *shape[1:]))
    gamma, beta = rng.integers(1, 4, (2, *(shape[axis] for axis in axes)))
    return tuple(each.astype(dtype) for each in (x, gamma, beta, dy))


def assert_same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(bits(actual), bits(expected))


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    ("shape", "axes"), [((7, 30), (1,)), ((4, 9, 5), (1,)), ((6, 5, 4), (0, 2)), ((12,), (0,))]
)
def test_nearest_has_the_bits_of_the_whole(kind, shape, axes, dtype, rng):
    forward, backward, _ = CALLS[kind]
    x, gamma, beta, dy = make(rng, dtype, shape, axes)
    how = {"axis": axes, "rounding": "nearest", "gamma_offset": float(rng.integers(2))}
    y, cache = forward(x, gamma, beta, **how, backend="numpy")
    expected = y, *backward(dy, cache)
    lazy_x, lazy_dy = cut(rng, x, dy)
    lazy_y, lazy_cache = forward(lazy_x, gamma, beta, **how)
    found = dask.compute(lazy_y, *backward(lazy_dy, lazy_cache))
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize("kind", CALLS)
def test_nearest_where_nearly_all_is_asked_again(kind, dtype, rng):
    """Of eps = 0 and numbers of few bits: y, dx and the sums over rows tie, or are 0."""
    forward, backward, _ = CALLS[kind]
    x = rng.permuted(np.tile([3.0, 3, 7, 7, 3, 7, 3, 7], (12, 1)), axis=1).astype(dtype)
    x[6:] = x[:6]
    gamma, beta = (rng.integers(-40, 41, (2, 8)) / 8).astype(dtype)
    # Of all bits of the dtype: sums of twelve often lie between two numbers. Of some columns, they are 0.
    digits = format_of(dtype).digits
    dy = (rng.integers(1 - 2**digits, 2**digits, (12, 8)) * 2.0 ** (3 - digits)).astype(dtype)
    dy[6:, :3] = -dy[:6, :3]
    how = {"eps": 0.0, "rounding": "nearest"}
    y, cache = forward(x, gamma, beta, **how, backend="numpy")
    expected = y, *backward(dy, cache)
    lazy_x, lazy_dy = (da.from_array(each, chunks=(5, 3)) for each in (x, dy))
    # Of 16 bits, dx alone has kernels that would be compiled for this test.
    how["backend"] = "numpy" if dtype.itemsize == 2 else None
    lazy_y, lazy_cache = forward(lazy_x, gamma, beta, **how)
    found = dask.compute(lazy_y, *backward(lazy_dy, lazy_cache))
    for actual, wanted in zip(found, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize("rounding", ["nearest", "fast"])
@pytest.mark.parametrize("kind", CALLS)
def test_gamma_dy_may_overflow_where_dx_does_not(kind, rounding, rng):
    forward, backward, exact = CALLS[kind]
    x, dy = rng.standard_normal((2, 5, 8))
    x, dy, gamma, beta = x * 1e30, dy * 1e30, rng.random(8) * -1e300, np.ones(8)
    y, cache = forward(x, gamma, beta, rounding=rounding)
    expected = y, *backward(dy, cache)
    lazy_x, lazy_dy = (da.from_array(each, chunks=(2, (0, 3, 5))) for each in (x, dy))
    y, cache = forward(lazy_x, gamma, beta, rounding=rounding)
    found = dask.compute(y, *backward(lazy_dy, cache))
    if rounding == "nearest":
        for actual, wanted in zip(found, expected, strict=True):
            assert_same(actual, wanted)
    names = "y", "dx", "dgamma", "dbeta"
    held = exact(x, gamma, beta, dy=dy).check_contract(**dict(zip(names, found, strict=True)))
    assert all(result.passed for result in held.values()), held


@pytest.mark.parametrize("kind", CALLS)
def test_default_keeps_the_contract(kind, dtype, rng):
    forward, backward, exact = CALLS[kind]
    x, gamma, beta, dy = make(rng, dtype)
    lazy_x, lazy_dy = cut(rng, x, dy)
    y, cache = forward(lazy_x, gamma, beta)
    found = dask.compute(y, *backward(lazy_dy, cache))
    names = "y", "dx", "dgamma", "dbeta"
    held = exact(x, gamma, beta, dy=dy).check_contract(**dict(zip(names, found, strict=True)))
    assert all(result.passed for result in held.values()), held
    again = dask.compute(
        forward(lazy_x, gamma, beta)[0], *backward(lazy_dy, cache), scheduler="threads"
    )
    for actual, wanted in zip(again, found, strict=True):
        assert_same(actual, wanted)


def test_the_cache_is_that_of_whole_rows(rng):
    x, gamma, beta, _ = make(rng, np.float64)
    (lazy_x,) = cut(rng, x)
    _, expected = layer_norm_forward(x, gamma, beta)
    _, cache = layer_norm_forward(lazy_x, gamma, da.from_array(beta, chunks=4))
    for one in (cache, cache.persist()):
        mean, rstd = dask.compute(one.mean, one.rstd)
        np.testing.assert_allclose(mean, expected.mean, rtol=1e-15, atol=1e-15)
        np.testing.assert_allclose(rstd, expected.rstd, rtol=1e-15)
    computed = cache.compute()
    assert type(computed) is type(expected)
    for actual, wanted in ((computed.mean, expected.mean), (computed.norm.beta, beta)):
        assert_same(actual, wanted)
    assert "LazyCache(x: float64 (7, 30), " in repr(cache)


def test_nothing_is_computed_before_it_is_asked_for_and_names_say_what_it_is():
    def never(block):
        raise AssertionError(block.shape)

    x = da.ones((6, 8), chunks=(2, 3)).map_blocks(never, dtype=float, meta=np.empty((0, 0)))
    y, cache = layer_norm_forward(x, np.ones(8), rounding="nearest")
    gradients = layer_norm_backward(x, cache)
    assert (y.chunks, gradients.dx.chunks, gradients.dgamma.shape) == (x.chunks, x.chunks, (8,))
    assert layer_norm(x).name.startswith("layer-norm-")
    assert rms_norm_forward(x)[0].name.startswith("rms-norm-forward-")
    assert layer_norm_forward(x, np.ones(8), rounding="nearest")[0].name == y.name
    assert gradients.dx.name.startswith("layer-norm-gradients-dx-")
    with pytest.raises(AssertionError):
        rms_norm(x).compute()


def test_only_what_is_asked_for(rng):
    x, gamma, _, dy = make(rng)
    lazy_x, lazy_dy = cut(rng, x, dy)
    _, cache = layer_norm_forward(lazy_x, gamma, rounding="nearest")
    expected = layer_norm_backward(dy, layer_norm_forward(x, gamma, rounding="nearest")[1])
    for wrt in itertools.chain(("x", "gamma"), (("x", "beta"),)):
        found = layer_norm_backward(lazy_dy, cache, wrt=wrt)
        for name, actual, wanted in zip(("x", "gamma", "beta"), found, expected, strict=True):
            assert (actual is None) == (name not in wrt or wanted is None)
            if actual is not None:
                assert_same(actual.compute(), wanted)


def test_rows_that_must_be_whole_are_asked_for_in_one_line():
    x = da.ones((6, 8), chunks=(2, 3))
    cure = r"one chunk along axis 1 for .*, got chunks \(3, 3, 2\); x.rechunk\({1: -1}\)"
    for given in ({"residual": x}, {"where": np.ones((6, 1), bool)}):
        with pytest.raises(ValueError, match=cure):
            layer_norm(x, **given)
    with pytest.raises(ValueError, match=cure):
        layer_norm(x, np.ones((6, 8)))
    with pytest.raises(ValueError, match=cure):
        layer_norm_backward(x, layer_norm_forward(x)[1], dsum=x)
