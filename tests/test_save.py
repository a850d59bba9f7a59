"""`save=`: what is kept of a forward, and what the backward makes of it."""

import numpy as np
import pytest
from norms import assert_same

import stablenorm
from stablenorm import layer_norm_backward, layer_norm_forward


def draw(rng, dtype, shape=(64, 96), offset=0.5):
    x, dy = rng.standard_normal((2, *shape))
    gamma, beta = 1 + 0.1 * rng.standard_normal(shape[-1]), 0.1 * rng.standard_normal(shape[-1])
    return [each.astype(dtype) for each in (x + offset, gamma, beta, dy)]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_recompute_gives_the_same_bits(rng, dtype, backend, kind, rounding):
    forward, backward = (getattr(stablenorm, f"{kind}_norm_{p}") for p in ("forward", "backward"))
    x, gamma, beta, dy = draw(rng, dtype)
    if dtype.itemsize == 2 and kind == "rms":
        # Other kernels would only be compiled for this.
        backend = "numpy"
    if dtype == np.float64:
        # Rows that the kernels leave to the reference, and some that need more words.
        x[3] *= 1e300
        x[4] = 1e6 + np.spacing(1e6) * (x[4] > 0)
    options = {"backend": backend, "rounding": rounding}
    y, cache = forward(x, gamma, beta, save="recompute", **options)
    expected_y, expected = forward(x, gamma, beta, **options)
    assert cache.statistics.nbytes == 0
    assert y.tobytes() == expected_y.tobytes()
    assert_same(backward(dy, cache), backward(dy, expected))
    if rounding == "fast" and dtype.itemsize > 2:
        jvp = getattr(stablenorm, f"{kind}_norm_jvp")
        assert_same([jvp(dy, cache)], [jvp(dy, expected)])
    with pytest.raises(AttributeError, match='not kept with save="recompute"'):
        assert cache.mean is None


@pytest.mark.parametrize("save", ["y", "recompute"])
@pytest.mark.parametrize(("axis", "order"), [(-1, "C"), (-1, "F"), (1, "C"), ((0, 2), "C")])
def test_what_is_kept_works_with_all_the_rest(rng, backend, save, axis, order):
    """Axes, layouts, masks, gamma for each sample; x is exact again where its last place is 1."""
    x, dy = (rng.integers(-40, 40, (4, 6, 5)).astype(np.float32) for _ in range(2))
    x, lengths = np.asarray(x + np.float32(2**23), order=order), np.array(x.shape)[np.r_[axis]]
    gamma, beta = np.full(lengths, 2.0, np.float32), np.ones(lengths, np.float32)
    where = rng.random((4, 6, 5)) < 0.7
    for masked in (None, where, np.broadcast_to(where.all(axis, keepdims=True), x.shape)):
        options = {"axis": axis, "backend": backend, "where": masked}
        y, cache = layer_norm_forward(x, gamma, beta, save=save, **options)
        assert cache.x is (y if save == "y" else x)
        expected = layer_norm_forward(x, gamma, beta, **options)[1]
        assert_same(layer_norm_backward(dy, cache), layer_norm_backward(dy, expected))
    several = np.broadcast_to(gamma, (*np.delete(x.shape, axis), *lengths))
    y, cache = layer_norm_forward(x, several, beta, axis=axis, backend=backend, save=save)
    expected = layer_norm_forward(x, several, beta, axis=axis, backend=backend)[1]
    assert_same(layer_norm_backward(dy, cache), layer_norm_backward(dy, expected))


def test_y_over_x_is_enough(rng, dtype, backend):
    """x is freed: y takes its place, and the backward is right to a few units in the last place."""
    x, gamma, beta, dy = draw(rng, dtype)
    expected = layer_norm_backward(dy, layer_norm_forward(x, gamma, beta, backend=backend)[1])
    y, cache = layer_norm_forward(x, gamma, beta, out=x, backend=backend, save="y")
    assert cache.x is y is x
    kept = y.copy()
    found = layer_norm_backward(dy, cache)
    assert y.tobytes() == kept.tobytes()
    unit = float(np.spacing(dtype.type(1)))
    # An element of xhat, of size up to 4, loses half a unit of y, and each result some of that.
    sizes = 1, np.sqrt(len(x)), np.sqrt(len(x))
    for one, other, size in zip(found, expected, sizes, strict=True):
        error = np.abs(one.astype(float) - other.astype(float)).max()
        assert error <= 8 * size * unit
    assert_same((found.dbeta,), (expected.dbeta,))


def test_gradients_are_not_written_over_what_x_is_made_from(rng):
    """y, and beta: the cache can be used any number of times. dy may be y, of sum(y**2) / 2."""
    x, gamma, beta, _ = draw(rng, np.float32)
    y, cache = layer_norm_forward(x, gamma, beta, save="y")
    for out, name in [((y, None, None), "y"), ((None, None, beta), "beta")]:
        with pytest.raises(ValueError, match=f"must not share memory with {name}, .* still needed"):
            layer_norm_backward(y, cache, out=out)


def test_rows_of_extreme_size_come_back(rng, backend):
    """Their rstd has an exponent of its own; the largest number is not rounded up to infinity."""
    x, gamma, beta, dy = draw(rng, np.float64, (4, 16), 0.0)
    x *= np.array([1e300, 1e-250, 1e-290, 1.0])[:, None]
    x[0, 0] = np.finfo(float).max
    for eps in (0.0, 1e-5):
        expected = layer_norm_forward(x, gamma, beta, eps, backend=backend)[1]
        cache = layer_norm_forward(x, gamma, beta, eps, backend=backend, save="y")[1]
        rows = slice(None) if eps == 0 else [0, 3]
        found, right = (layer_norm_backward(dy, each).dx[rows] for each in (cache, expected))
        limit = 64 * 2.0**-52 * np.abs(right).max(axis=1, keepdims=True)
        assert (np.abs(found - right) <= limit).all()


ONES, SMALL = np.ones(4), np.array([1, 1, 0.25, 1])


@pytest.mark.parametrize(
    ("kind", "gamma", "beta", "fits"),
    [
        (np.float64, [1, 0, 1, 1], [0, 0, 0, 0], False),
        ("bfloat16", ONES, 3 * ONES, True),
        ("bfloat16", SMALL, ONES, False),
        (np.float16, SMALL, 7 * ONES, True),
        (np.float16, SMALL, 8 * ONES, False),
        (np.float32, ONES, 2.0**17 * ONES, True),
        (np.float32, ONES, 2.0**18 * ONES, False),
        # y is subnormal, or infinite.
        (np.float16, 1e-6 * ONES, 0 * ONES, False),
        (np.float16, 4e4 * ONES, 0 * ONES, False),
        (np.float32, np.nan * ONES, ONES, False),
    ],
)
def test_what_y_cannot_carry_is_refused(kind, gamma, beta, fits):
    x = np.arange(8).reshape(2, 4).astype(stablenorm.types.bfloat16 if kind == "bfloat16" else kind)
    given = np.array(gamma, np.float32), np.array(beta, np.float32)
    if fits:
        layer_norm_forward(x, *given, save="y")
        return
    with pytest.raises(
        TypeError, match=r'save="y" needs a gamma .* use save="x" or save="recompute"'
    ):
        layer_norm_forward(x, *given, save="y")


def test_what_cannot_be_saved_is_refused():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ValueError, match='save must be "x", "y" or "recompute", got \'dx\''):
        layer_norm_forward(x, save="dx")
    with pytest.raises(ValueError, match='with rounding="nearest", which needs x itself'):
        layer_norm_forward(x, save="y", rounding="nearest")
    with pytest.raises(ValueError, match=r"with a residual, whose sum is cache\.x"):
        layer_norm_forward(x, save="y", residual=x)
