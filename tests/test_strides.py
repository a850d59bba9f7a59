"""Arrays of any strides, normalized over any axes: each result has the bits of plain rows, and is written in its place."""

import math
import sys

import numpy as np
import pytest
from calls import KINDS
from norms import NORMS

import stablenorm
from stablenorm import memory

pytest.importorskip("stablenorm.native", exc_type=ImportError)

# Shapes and axes: fewer rows than a strip, a rest of one row, runs of rows that end inside a strip, rows shorter than a
# block of a transpose, two axes, and no row beside the one.
SHAPES = [
    ((3, 40, 19), 1), ((2, 5, 37), -1), ((33, 7), 0), ((4, 9, 3, 5), 1), ((4, 9, 3, 5), (1, 2)),
    ((130, 24, 6), 1), ((2, 300, 50), 1), ((2, 70, 17), (0, 2)), ((19,), 0),
]  # fmt: skip


def layouts(array):
    """Yield copies of an array in memory of other orders and steps, forwards and backwards, and at an odd address."""
    yield array.copy()
    yield array.copy(order="F")
    yield np.moveaxis(np.moveaxis(array, 0, -1).copy(), -1, 0)
    for axis, length in enumerate(array.shape):
        for step in (2, -1):
            at = (slice(None),) * axis + (slice(None, None, step),)
            lengths = (*array.shape[:axis], length * abs(step), *array.shape[axis + 1 :])
            new = np.empty(lengths, array.dtype)[at]
            new[...] = array
            yield new
    new = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    new[...] = array
    yield new


def bits(result):
    return result if result is None else result.tobytes()


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("kind", NORMS)
def test_all_layouts_have_the_same_bits(rng, kind, shape, axis, dtype, rounding):
    forward, backward = NORMS[kind][:2]
    axes = tuple(i % len(shape) for i in (axis if isinstance(axis, tuple) else (axis,)))
    order = *(i for i in range(len(shape)) if i not in axes), *axes
    lengths = tuple(shape[i] for i in axes)
    n = math.prod(lengths)
    rows = lambda array: array.transpose(order).reshape(-1, n)
    # Few digits, so that some results are ties, which go to integers, and columns of bfloat16 are summed again.
    x, dy, more = (np.round(rng.standard_normal((3, *shape)) * 4) / 4).astype(dtype)
    dy += 1
    parameters = rng.standard_normal((len("gb") if kind == "layer" else 1, *lengths)).astype(dtype)
    vectors = [v.reshape(n) for v in parameters]
    y, cache = forward(rows(x), *vectors, rounding=rounding)
    grads = backward(rows(dy), cache, dsum=rows(more))
    alone = backward(rows(dy), cache)
    y_of_sum, of_sum = forward(rows(x), *vectors, rounding=rounding, residual=rows(more))
    options = {"axis": axis, "rounding": rounding}
    # Each array has another layout than the others.
    places = [list(layouts(array)) for array in (x, dy, more, more)]
    turned = (place[i:] + place[:i] for i, place in enumerate(places))
    for of_x, of_dy, of_more, out in zip(*turned, strict=True):
        other, of_other = forward(of_x, *parameters, **options)
        assert bits(rows(other)) == bits(y)
        assert list(map(bits, of_other.statistics)) == list(map(bits, cache.statistics))
        results = backward(of_dy, of_other, dsum=of_more, out=(out, None, None))
        assert results.dx is out
        assert bits(rows(out)) == bits(grads.dx)
        assert list(map(bits, results[1:])) == list(map(bits, grads[1:]))
        results = backward(of_dy, of_other, out=(out, None, None))
        assert bits(rows(out)) == bits(alone.dx)
        assert list(map(bits, results[1:])) == list(map(bits, alone[1:]))
        _, of_other = forward(of_x, *parameters, **options, residual=of_more, out=out)
        assert bits(rows(out)) == bits(y_of_sum)
        assert bits(rows(of_other.x)) == bits(of_sum.x)
        assert (bits(of_x), bits(of_dy), bits(of_more)) == (bits(x), bits(dy), bits(more))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("kind", NORMS)
def test_results_over_an_input_of_any_layout(rng, kind, dtype):
    """Where dx takes the place of dy, or y that of x, rows that are not written yet keep their input."""
    forward, backward = NORMS[kind][:2]
    x, dy = rng.standard_normal((2, 3, 40, 19)).astype(dtype)
    x[0, :, 3], dy[1] = x[0, :, 3] * 2.0**14, dy[1] * 2.0**12
    if dtype == np.float64:
        # Out of the range of pairs: integers compute them from x.
        x[1, :, 5] *= 2.0**300
    gamma = rng.standard_normal(40).astype(dtype)
    y, cache = forward(x, gamma, axis=1)
    dx = backward(dy, cache).dx
    for of_x, of_dy in zip(layouts(x), layouts(dy), strict=True):
        backward(of_dy, cache, out=(of_dy, None, None))
        assert bits(of_dy) == bits(dx)
        getattr(stablenorm, f"{kind}_norm")(of_x, gamma, axis=1, out=of_x)
        assert bits(of_x) == bits(y)


def test_inputs_with_a_stride_of_zero(rng):
    x, dy = rng.standard_normal((2, 2, 24, 1), np.float32)
    wide = (2, 24, 40)
    for axis in (1, 2):
        plain = [np.broadcast_to(v, wide).copy() for v in (x, dy)]
        forward, backward = NORMS["layer"][:2]
        y, cache = forward(plain[0], axis=axis)
        of_view, of_views = forward(np.broadcast_to(x, wide), axis=axis)
        assert bits(of_view) == bits(y)
        dx = backward(np.broadcast_to(dy, wide), of_views).dx
        assert bits(dx) == bits(backward(plain[1], cache).dx)


def test_another_axis_takes_few_calls_of_python(rng):
    x, dy = rng.standard_normal((2, 2, 24, 40), np.float32)
    count = 0

    def profile(_, event, __):
        nonlocal count
        count += event == "call"

    forward, backward = NORMS["layer"][:2]
    cache = forward(x, axis=1)[1]
    for call in (lambda: forward(x, axis=1), lambda: backward(dy, cache)):
        call()
        count = 0
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
        assert count <= 30


def test_scratch_memory_is_for_strips_not_for_whole_arrays(rng):
    x = rng.standard_normal((32, 1024, 256), np.float32)
    y = np.empty_like(x)
    before = memory.set_idle_limit(0)
    memory.set_idle_limit(1 << 40)
    NORMS["layer"][0](x, axis=1, out=y)
    kept = memory.set_idle_limit(before)
    assert kept == 1 << 40
    assert memory._core.idle_bytes() < x.nbytes // 8
