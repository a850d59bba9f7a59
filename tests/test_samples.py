"""Gamma and beta with leading axes, and sum_axes=: the bits of one ordinary call for each part."""

import itertools

import numpy as np
import pytest
from norms import NORMS, assert_same

from stablenorm import (
    check_gradients,
    cpu,
    get_num_threads,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    set_num_threads,
)
from stablenorm.cpu import jobs
from stablenorm.cpu.jobs import DONE, REFERENCE, do_each

ALL = slice(None)


def parts(lead, lengths):
    """Yield the index of each part in an array of these leading lengths, and in one with this lead."""
    each = [[ALL] if one == 1 else range(length) for one, length in zip(lead, lengths, strict=True)]
    for place in itertools.product(*each):
        yield place, tuple(0 if one is ALL else one for one in place)


# The shape of x, what is normalized, and the leading axes of gamma and beta.
SHAPES = [
    ((3, 5, 8), -1, (3, 1), (3, 1)),
    ((3, 5, 8), 2, (5,), ()),
    ((2, 3, 4, 5), (1, 3), (2, 1), (1, 4)),
    ((4, 2, 3), 0, (2, 3), (3,)),
    ((4, 3, 2, 5), (2, 3), (3,), (4, 1)),
]


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(("shape", "axis", "of_gamma", "of_beta"), SHAPES)
def test_each_part_is_an_ordinary_call(
    rng, shape, axis, of_gamma, of_beta, rounding, dtype, backend
):
    axes = tuple(np.atleast_1d(axis) % len(shape))
    lengths = tuple(length for i, length in enumerate(shape) if i not in axes)
    normalized = tuple(shape[i] for i in axes)
    x, dy = rng.standard_normal((2, *shape)).astype(dtype)
    gamma = rng.standard_normal(of_gamma + normalized).astype(dtype)
    beta = rng.standard_normal(of_beta + normalized).astype(dtype)
    how = {"rounding": rounding, "backend": backend}
    y, cache = layer_norm_forward(x, gamma, beta, axis=axis, **how)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    assert layer_norm(x, gamma, beta, axis=axis, **how).tobytes() == y.tobytes()

    # With the normalized axes last.
    last = range(-len(axes), 0)
    x, dy, y, dx = (np.moveaxis(each, axes, last) for each in (x, dy, y, dx))
    inner = tuple(last)
    leads = [(1,) * (len(lengths) - len(of)) + of for of in (of_gamma, of_beta)]
    both = np.broadcast_arrays(
        *(each.reshape(lead + normalized) for each, lead in zip((gamma, beta), leads, strict=True))
    )
    for place, index in parts(np.broadcast_shapes(*leads), lengths):
        expected, _ = layer_norm_forward(x[place], *(p[index] for p in both), axis=inner, **how)
        assert y[place].tobytes() == expected.tobytes()
    for place, index in parts(leads[0], lengths):
        _, part = layer_norm_forward(x[place], both[0][index], axis=inner, **how)
        expected = layer_norm_backward(dy[place], part)
        assert dx[place].tobytes() == expected.dx.tobytes()
        found = dgamma.reshape(leads[0] + normalized)[index]
        assert found.tobytes() == expected.dgamma.tobytes()
    for place, index in parts(leads[1], lengths):
        _, part = layer_norm_forward(x[place], beta=both[1][index], axis=inner, **how)
        found = dbeta.reshape(leads[1] + normalized)[index]
        assert found.tobytes() == layer_norm_backward(dy[place], part).dbeta.tobytes()


@pytest.mark.parametrize("shape", [(3, 5, 8), (0, 5, 8), (3, 0, 8)])
@pytest.mark.parametrize("sum_axes", [0, -2, (), (0, 1)])
def test_sum_axes_names_what_is_summed(rng, shape, sum_axes, dtype, backend):
    x, dy = rng.standard_normal((2, *shape)).astype(dtype)
    gamma, beta = rng.standard_normal((2, 8)).astype(dtype)
    _, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    dx, *totals = layer_norm_backward(dy, cache, sum_axes=sum_axes)
    lead = tuple(
        1 if i in np.atleast_1d(sum_axes) % 3 else length for i, length in enumerate(shape[:2])
    )
    kept = tuple(length for i, length in enumerate(shape[:2]) if lead[i] != 1)
    whole = layer_norm_backward(dy, cache)
    assert dx.tobytes() == whole.dx.tobytes()
    assert [total.shape for total in totals] == [(*kept, 8)] * 2
    for place, index in parts(lead, shape[:2]):
        _, part = layer_norm_forward(x[place], gamma, beta, backend=backend)
        expected = layer_norm_backward(dy[place], part)[1:]
        for total, one in zip(totals, expected, strict=True):
            assert total.reshape(*lead, 8)[index].tobytes() == one.tobytes()


def test_sum_axes_writes_into_out_and_only_what_is_asked(rng):
    x, dy = rng.standard_normal((2, 3, 5, 8), np.float32)
    gamma, beta = rng.standard_normal((3, 1, 8), np.float32), np.zeros(8, np.float32)
    _, cache = layer_norm_forward(x, gamma, beta)
    expected = layer_norm_backward(dy.copy(), cache, sum_axes=1)
    out = np.empty((8, 6), np.float32).T[::2]
    found = layer_norm_backward(dy, cache, sum_axes=1, out=(dy, out, None))
    assert found.dx is dy
    assert found.dgamma is out
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # Sums that cannot be seen as (parts, n).
    room = None, None, np.empty((3, 10, 8), np.float32)[:, ::2]
    only = layer_norm_backward(dy, cache, sum_axes=(), wrt="beta", out=room)
    assert only.dx is only.dgamma is None
    assert only.dbeta is room[2]
    np.testing.assert_array_equal(only.dbeta, dy)


def check_samples(x, gamma, beta, dy, *, kind="layer", given=None, pulled=None, **how):
    """Hold all results of each sample, with its part of what is given besides, against a call of it."""
    forward, backward, _ = NORMS[kind]
    given, pulled = given or {}, pulled or {}
    y, cache = forward(x, gamma, beta, **given, **how)
    found = backward(dy, cache, **pulled)
    for i in range(len(x)):
        arguments = x[i], gamma[i, 0], None if beta is None else beta[i, 0]
        expected, alone = forward(*arguments, **{k: v[i] for k, v in given.items()}, **how)
        dx, *sums = backward(dy[i], alone, **{k: v[i] for k, v in pulled.items()})
        assert_same(
            (y[i], cache.x[i], cache.mean[i], cache.rstd[i], found.dx[i]),
            (expected, alone.x, alone.mean, alone.rstd, dx), i,
        )  # fmt: skip
        assert_same((total if total is None else total[i, 0] for total in found[1:]), sums, i)


def test_residual_and_dsum_go_with_gamma_of_each_sample(rng, backend):
    x, residual, dy, dsum = rng.standard_normal((4, 3, 5, 8))
    gamma, beta = rng.standard_normal((2, 3, 1, 8))
    given, pulled = {"residual": residual}, {"dsum": dsum}
    check_samples(x, gamma, beta, dy, given=given, pulled=pulled, backend=backend)


@pytest.mark.parametrize("last", [1, 8])
def test_a_mask_and_what_is_added_go_with_gamma_of_each_sample(rng, last, backend):
    x, dy, dsum = rng.standard_normal((3, 3, 5, 8)).astype(np.float32)
    gamma, beta, *old = rng.standard_normal((4, 3, 1, 8)).astype(np.float32)
    where, dmean = rng.random((3, 5, last)) < 0.6, rng.standard_normal((3, 5, 1))
    given, pulled = {"where": where}, {"dmean": dmean, "dsum": dsum}
    check_samples(x, gamma, beta, dy, given=given, pulled=pulled, backend=backend)
    # Added to what was there; and sums of each sample, with one gamma for all.
    _, cache = layer_norm_forward(x, gamma, beta, **given, backend=backend)
    out = None, *(each.copy() for each in old)
    added = layer_norm_backward(dy, cache, out=out, accumulate=True)
    _, cache = layer_norm_forward(x, gamma[0, 0], beta[0, 0], **given, backend=backend)
    sums = layer_norm_backward(dy, cache, sum_axes=1)
    for i in range(3):
        _, alone = layer_norm_forward(
            x[i], gamma[i, 0], beta[i, 0], where=where[i], backend=backend
        )
        out = None, *(each[i, 0].copy() for each in old)
        expected = layer_norm_backward(dy[i], alone, out=out, accumulate=True)
        assert_same((each[i, 0] for each in added[1:]), expected[1:])
        # dgamma and dbeta do not depend on gamma.
        assert_same((each[i] for each in sums[1:]), layer_norm_backward(dy[i], alone)[1:])


def test_hard_rows_of_one_sample_keep_their_words(rng, backend):
    """Exponents, third words: of some samples alone, and of others none."""
    x, dy = rng.standard_normal((2, 4, 2, 8))
    x[1] *= 1e300
    x[2] = 1e15 + np.arange(8) * 0.125
    check_samples(x, rng.standard_normal((4, 1, 8)), None, dy, backend=backend)


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
def test_rms_norm_with_an_offset(rng, rounding, backend):
    x, dy = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    gamma, beta = rng.standard_normal((2, 3, 1, 8)).astype(np.float32)
    how = {"gamma_offset": 1.0, "rounding": rounding, "backend": backend}
    check_samples(x, gamma, beta, dy, kind="rms", **how)


def views(layout, *arrays):
    """Return arrays of these elements, (samples, rows, n), in another layout."""
    if layout == "every second row":
        return [np.repeat(each, 2, axis=1)[:, ::2] for each in arrays]
    if layout == "columns first":
        return [np.asfortranarray(each) for each in arrays]
    if layout == "samples in the middle":
        return [np.ascontiguousarray(each.swapaxes(0, 1)).swapaxes(0, 1) for each in arrays]
    return arrays


@pytest.fixture
def all_at_once(monkeypatch):
    """Return a list of what becomes of calls for all samples."""
    found = []
    monkeypatch.setattr(cpu, "do_each", lambda *given: found.append(do_each(*given)) or found[-1])
    return found


@pytest.fixture(params=[1, 2])
def threads(request):
    before = get_num_threads()
    set_num_threads(request.param)
    yield
    set_num_threads(before)


# Rows of four tiles, the last one short; samples of a row; rows shorter than a vector.
@pytest.mark.parametrize("shape", [(5, 75, 512), (300, 1, 300), (4, 3, 5)])
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(
    "layout",
    ["plain", "in place", "past the caches", "every second row", "columns first",
     "samples in the middle"],
)  # fmt: skip
@pytest.mark.usefixtures("threads")
def test_samples_dealt_out_to_threads(rng, monkeypatch, all_at_once, layout, rounding, shape):
    if layout == "past the caches":
        monkeypatch.setattr(jobs, "PAST_CACHES", 0)
    of_x = np.float16 if shape[1] == 1 else np.float32
    x, dy = views(layout, *rng.standard_normal((2, *shape)).astype(of_x))
    gamma, beta = rng.standard_normal((2, shape[0], 1, shape[2])).astype(np.float32)
    some = range(0, shape[0], max(1, shape[0] // 5))
    expected = []
    for one in some:
        y, cache = layer_norm_forward(x[one], gamma[one, 0], beta[one, 0], rounding=rounding)
        expected.append((y, cache.mean, cache.rstd, *layer_norm_backward(dy[one], cache)))
    out = x.copy() if layout == "in place" else None
    y = layer_norm(x if out is None else out, gamma, beta, rounding=rounding, out=out)
    again, cache = layer_norm_forward(x, gamma, beta, rounding=rounding)
    assert again.tobytes() == y.tobytes()
    out = (dy, None, None) if layout == "in place" else None
    found = y, cache.mean, cache.rstd, *layer_norm_backward(dy, cache, out=out)
    for one, each in zip(some, expected, strict=True):
        for whole, part in zip(found, each, strict=True):
            assert whole[one].tobytes() == part.tobytes()
    # Neither the first call nor the last, as rows that are extreme would need their input again.
    times = 1 if layout == "in place" and rounding == "nearest" else 3
    assert all_at_once == [REFERENCE if layout == "columns first" else DONE] * times


def test_samples_left_to_the_reference_are_added_once(rng, all_at_once):
    """The kernels have added to dgamma when they find a row that is extreme."""
    x, dy = rng.standard_normal((2, 4, 3, 8))
    gamma, old = rng.standard_normal((2, 4, 1, 8))
    dy[2, 1] *= 1e300
    _, cache = layer_norm_forward(x, gamma)
    out = np.empty_like(x), old.copy(), None
    layer_norm_backward(dy, cache, wrt=("x", "gamma"), out=out, accumulate=True)
    assert all_at_once == [DONE] * 2
    for i in range(4):
        _, part = layer_norm_forward(x[i], gamma[i, 0])
        alone = np.empty_like(x[i]), old[i, 0].copy(), None
        layer_norm_backward(dy[i], part, wrt=("x", "gamma"), out=alone, accumulate=True)
        assert_same((out[0][i], out[1][i, 0]), alone[:2])


def test_few_large_samples_have_all_threads_each(rng, all_at_once):
    x = rng.standard_normal((3, 514, 512), np.float32)
    gamma = rng.standard_normal((3, 1, 512), np.float32)
    layer_norm(x, gamma)
    assert all_at_once == [REFERENCE]


@pytest.mark.parametrize("kind", NORMS)
def test_finite_differences(rng, kind):
    x = rng.standard_normal((2, 3, 5))
    gamma, beta = rng.standard_normal((2, 1, 5)), rng.standard_normal((3, 5))
    assert check_gradients(*NORMS[kind][:2], (x, gamma, beta), rng=rng).passed


X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 4), r"gamma must have shape \(4,\) to match x.* over axis 2, or that after axes that "),
        ((5, 4), r" that broadcast against \(2, 3\), got \(5, 4\)"),
        ((1, 2, 3, 4), r"broadcast against \(2, 3\), got \(1, 2, 3, 4\)"),
        ((2, 3, 1), r"gamma must have shape \(4,\) to match x normalized over axis 2, got \(2, 3, 1\)"),
    ],
)  # fmt: skip
def test_leading_axes_that_do_not_broadcast_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(X, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("sum_axes", "error", "message"),
    [
        (2, ValueError, r"sum_axes must name axes of x.*not what is normalized, axis 2; got 2"),
        (3, ValueError, "which has 3 dimensions.*got 3"),
        ((0, -3), ValueError, "each once"),
        ("a", TypeError, "sum_axes must be an int or a tuple of ints, got 'a'"),
        (0, ValueError, "sum_axes must name no axis along which gamma varies, got 0"),
    ],
)
def test_wrong_sum_axes_are_refused(sum_axes, error, message):
    _, cache = layer_norm_forward(X, np.ones((2, 1, 4), np.float32))
    with pytest.raises(error, match=message):
        layer_norm_backward(X, cache, sum_axes=sum_axes)
