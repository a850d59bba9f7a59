"""Arrays that are copied to plain rows block by block: layouts, masks, samples, exact ties at the ends of blocks."""

import ml_dtypes
import numpy as np
import pytest
from norms import assert_same

from stablenorm import (
    layer_norm_backward,
    layer_norm_double_backward,
    layer_norm_forward,
    layer_norm_jvp,
)
from stablenorm.functional import plain

# Channels first: rows of 40 that lie 400 elements apart, of several tiles.
SHAPE = (3, 40, 20, 20)


@pytest.fixture(params=[1, 1 << 14])
def small_blocks(request, monkeypatch):
    """Blocks of one tile or sample each, and of a few."""
    monkeypatch.setattr(plain, "BLOCK", request.param)


def draw(rng, dtype, shape=SHAPE):
    x, dy, dsum = rng.standard_normal((3, *shape)) * np.exp2(rng.integers(-2, 3, (3, *shape)))
    if dtype == np.float64:
        # A row that pairs are not for.
        x[1, :, 2, 3] *= 2.0**300
    gamma, beta = rng.integers(-4, 5, (2, 40)) / 4
    return [each.astype(dtype) for each in (x, dy, dsum, gamma, beta)]


def as_rows(array):
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.usefixtures("small_blocks")
def test_channels_first_have_the_bits_of_rows(rng, dtype, rounding, backend):
    """The sums of "numpy" are as exact, but merged otherwise."""
    if backend == "numpy" and rounding == "nearest":
        pytest.skip("an element takes a microsecond")
    x, dy, dsum, gamma, beta = draw(rng, dtype)
    how = {"backend": backend, "rounding": rounding}
    y, cache = layer_norm_forward(x, gamma, beta, axis=1, **how)
    found = layer_norm_backward(dy, cache, dsum=dsum)
    expected, same = layer_norm_forward(as_rows(x), gamma, beta, **how)
    wanted = layer_norm_backward(as_rows(dy), same, dsum=as_rows(dsum))
    assert_same([as_rows(y), as_rows(found.dx)], [expected, wanted.dx])
    assert_same(cache.statistics, same.statistics)
    if backend == "native":
        assert_same(found[1:], wanted[1:])
    # dx over dy; dgamma and dbeta added to old values.
    rows_of_dy, start = as_rows(dy), (np.ones_like(gamma), np.ones_like(beta))
    wanted = layer_norm_backward(
        rows_of_dy, same, dsum=as_rows(dsum), out=(None, *map(np.copy, start)), accumulate=True
    )
    again = layer_norm_backward(
        dy, cache, dsum=dsum, out=(dy, *map(np.copy, start)), accumulate=True
    )
    assert_same([as_rows(again.dx)], [wanted.dx])
    if backend == "native":
        assert_same(again[1:], wanted[1:])


@pytest.mark.parametrize("lead", [(3, 1, 1), (1, 20, 1), (3, 1, 20)])
@pytest.mark.usefixtures("small_blocks")
def test_samples_have_the_bits_of_calls_of_their_own(rng, lead, backend):
    x, dy, dsum, _, _ = draw(rng, np.float32)
    gamma, beta = rng.standard_normal((2, *lead, 40)).astype(np.float32)
    where = rng.random((3, 1, 20, 20)) < 0.7
    for keywords in ({}, {"where": where}):
        y, cache = layer_norm_forward(x, gamma, beta, axis=1, backend=backend, **keywords)
        found = layer_norm_backward(dy, cache, dsum=dsum)
        for place in np.ndindex(lead):
            some = tuple(
                slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(place, lead, strict=True)
            )
            some = (some[0], slice(None), *some[1:])
            own = {name: each[some] for name, each in keywords.items()}
            own_y, one = layer_norm_forward(
                x[some], gamma[place], beta[place], axis=1, backend=backend, **own
            )
            wanted = layer_norm_backward(dy[some], one, dsum=dsum[some])
            given = y[some], found.dx[some], found.dgamma[place], found.dbeta[place]
            assert_same(given, (own_y, *wanted))


@pytest.mark.usefixtures("small_blocks")
def test_masks_and_derivatives_have_the_bits_of_rows(rng, backend):
    x, dy, tx, gamma, beta = draw(rng, np.float32)
    rows = rng.random((3, 1, 20, 20)) < 0.5
    for where in (rows, rows & (x > -1)):
        y, cache = layer_norm_forward(x, gamma, beta, axis=1, where=where, backend=backend)
        expected, same = layer_norm_forward(
            as_rows(x), gamma, beta, where=as_rows(where), backend=backend
        )
        assert_same([as_rows(y), *cache.statistics], [expected, *same.statistics])
        dx, wanted = (layer_norm_backward(*each).dx for each in ((dy, cache), (as_rows(dy), same)))
        assert_same([as_rows(dx)], [wanted])
        ty, wanted = layer_norm_jvp(tx, cache), layer_norm_jvp(as_rows(tx), same)
        assert_same([as_rows(ty)], [wanted])
        ddy, dx, dgamma = layer_norm_double_backward(tx, dy, cache)
        wanted = layer_norm_double_backward(as_rows(tx), as_rows(dy), same)
        assert_same([as_rows(ddy), as_rows(dx), dgamma], wanted)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_sums_read_dy_before_dx_is_written_over_it(rng, axis, rounding, accumulate):
    """Extreme rows, and columns that are ties, are finished after the kernels."""
    pytest.importorskip("stablenorm.native", exc_type=ImportError)
    x = np.tile(np.array([1.0, -1.0, 1.0, -1.0]), (600, 1))
    x[7] *= 2.0**300
    dy = np.zeros((600, 4))
    dy[0], dy[599] = 1 + 2.0**-52, 2.0**-53
    dy[7] = rng.integers(1, 9, 4) * 2.0**-53
    if axis == 1:
        x, dy = (np.ascontiguousarray(each.reshape(-1, 20, 4).swapaxes(1, 2)) for each in (x, dy))
    gamma = np.ones(4)
    _, cache = layer_norm_forward(x, gamma, gamma, 0.0, axis=axis, rounding=rounding)
    old = [np.full(4, 0.0), np.full(4, 0.0)]
    expected = layer_norm_backward(dy, cache, out=(None, *old), accumulate=accumulate)
    expected = [each.copy() for each in expected]
    again = [np.full(4, 0.0), np.full(4, 0.0)]
    assert_same(layer_norm_backward(dy, cache, out=(dy, *again), accumulate=accumulate), expected)
