"""Layer norm of rows in parts: of any cut of the columns, rounding="nearest" has the bits of the whole."""

import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
from rationals import NAMES

from stablenorm import (
    RowMoments,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.oracle import exact_layer_norm, exact_rms_norm
from stablenorm.reference import moments, partial
from stablenorm.reference.bounded import Bounded
from stablenorm.reference.doubledouble import Wide
from stablenorm.testing.families import FAMILIES, Case, make_case
from stablenorm.types import Norm

WHOLE = {
    "layer": (layer_norm_forward, layer_norm_backward),
    "rms": (rms_norm_forward, rms_norm_backward),
}
EXACT = {"layer": exact_layer_norm, "rms": exact_rms_norm}
# One for each way of losing digits, and of undecided elements.
HARD = ("F01", "F03", "F07", "F09", "F11", "F12", "F16", "F21", "F27", "F28b", "F34", "F36")
FINITE = [name for name in HARD if FAMILIES[name].finite]


def cuts(n, parts, rng):
    """Return `parts` slices that make up range(n); some may be empty."""
    inner = np.sort(rng.integers(0, n + 1, parts - 1)) if parts < n else np.arange(1, n)
    edges = [0, *inner.tolist(), n]
    return [slice(*both) for both in itertools.pairwise(edges)]


def in_parts(case, columns, kind="layer", rounding="fast", offset=0.0):
    """Return y, dx, dgamma of PARTIAL by name, and of y and dx which rows are undecided."""
    x, gamma, beta, eps, dy = case
    norms = [Norm(gamma[c], beta[c], eps, kind, offset, rounding) for c in columns]
    each = list(zip(columns, norms, strict=True))
    of_x = moments.of_x(moments.merged([moments.moments(x[:, c], norm) for c, norm in each]), eps)
    y, dx, dgamma = np.empty_like(x), np.empty_like(x), np.empty(x.shape[1], partial.PARTIAL)
    open_y, open_dx = np.zeros((2, len(x)), bool)
    of_g = [moments.moments_of_g(dy[:, c], x[:, c], norm, of_x) for c, norm in each]
    of_g = moments.of_g(moments.merged(of_g))
    for c, norm in each:
        open_y |= moments.forward(x[:, c], norm, of_x, y[:, c])
        open_dx |= moments.backward(dy[:, c], x[:, c], norm, of_x, of_g, dx[:, c])
        dgamma[c] = moments.dgamma(dy[:, c], x[:, c], norm, of_x)
    return {"y": y, "dx": dx, "dgamma": dgamma}, {"y": open_y, "dx": open_dx}


def whole(case, kind="layer", offset=0.0):
    forward, backward = WHOLE[kind]
    how = {"gamma_offset": offset, "rounding": "nearest", "backend": "numpy"}
    y, cache = forward(*case[:4], **how)
    return dict(zip(NAMES, (y, *backward(case.dy, cache)), strict=True))


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_nearest(case, columns, **how):
    """Assert the bits of the whole where they are decided; return what share of the rows is not."""
    found, undecided = in_parts(case, columns, rounding="nearest", **how)
    expected = whole(case, **how)
    for name, rows in undecided.items():
        wrong = (bits(found[name]) != bits(expected[name])) & ~rows[:, None]
        assert not wrong.any(), (name, np.argwhere(wrong)[0], columns, case)
    dgamma, left = partial.rounded(found["dgamma"], case.gamma.dtype)
    wrong = (bits(dgamma) != bits(expected["dgamma"])) & ~left
    assert not wrong.any(), ("dgamma", np.argwhere(wrong)[0], columns, case)
    return max(rows.mean() for rows in (*undecided.values(), left))


@pytest.mark.parametrize("name", HARD)
def test_nearest(name, rng):
    for number, (kind, dtype) in enumerate(itertools.product(WHOLE, ("float32", "float64"))):
        n = (9, 34, 67, 130)[number]
        case = make_case(name, dtype, n, max(3, FAMILIES[name].smallest_rows))
        assert_nearest(case, cuts(n, 3, rng), kind=kind)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_nearest_of_parts_of_one_column(dtype, kind, rng):
    for name, n in (("F03", 2), ("F16", 3), ("F11", 9)):
        assert_nearest(make_case(name, dtype, n, 3), cuts(n, n, rng), kind=kind)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_nearest_leaves_nothing_open_of_ordinary_rows(kind, dtype, rng):
    case = make_case("F01", dtype, 300, 20)
    assert assert_nearest(case, cuts(300, 7, rng), kind=kind) == 0


def test_nearest_of_an_offset_and_of_mixed_dtypes(rng):
    x, gamma, beta, eps, dy = make_case("F02", "float16", 40, 5)
    for kinds in ("f2 f4 f4 f2", "f4 f8 f8 f4", "f4 f4 f4 f8", "f8 f2 f4 f4"):
        arrays = zip((x, gamma, beta, dy), kinds.split(), strict=True)
        x_, gamma_, beta_, dy_ = (array.astype(kind) for array, kind in arrays)
        case = Case(x_, gamma_, beta_, eps, dy_)
        assert assert_nearest(case, cuts(40, 4, rng), kind="rms", offset=1.0) == 0
        assert assert_nearest(case, cuts(40, 4, rng), offset=0.1) == 0


def test_nearest_of_ties(dtype, rng):
    """Numbers of few bits, eps = 0: xhat is +-1 or rational, and many elements are ties or 0."""
    x = rng.permuted(np.tile([3.0, 3, 7, 7, 3, 7, 3, 7], (30, 1)), axis=1)
    gamma, beta, dy = (rng.integers(-40, 41, (3, 30, 8)) / 8).astype(dtype)
    case = Case(x.astype(dtype), gamma[0], beta[0], 0.0, dy)
    for parts in (8, 3):
        assert_nearest(case, cuts(8, parts, rng))
        assert_nearest(case, cuts(8, parts, rng), kind="rms")


def test_nearest_of_what_is_not_finite(dtype, rng):
    for which in range(4):
        case = make_case("F01", dtype, 9, 6)
        for value in (np.inf, -np.inf, np.nan):
            array = case[(0, 1, 2, 4)[which]]
            array.flat[rng.integers(array.size)] = value
            assert_nearest(case, cuts(9, 3, rng))


def test_a_row_of_nan_beside_an_infinite_dy(rng):
    case = make_case("F01", np.float32, 9, 6)
    case.x[1, 4], case.dy[3, 2] = np.nan, np.inf
    assert_nearest(case, cuts(9, 3, rng))


@pytest.mark.parametrize("name", FINITE)
def test_contract(name, rng):
    for number, (kind, dtype) in enumerate(itertools.product(EXACT, ("float32", "float64"))):
        n = (9, 34, 67, 130)[number]
        case = make_case(name, dtype, n, max(2, FAMILIES[name].smallest_rows))
        found, _ = in_parts(case, cuts(n, (9, 3)[number % 2], rng), kind)
        found["dgamma"], _ = partial.rounded(found["dgamma"], case.gamma.dtype)
        for which, result in EXACT[kind](*case).check_contract(**found).items():
            assert result.passed, (which, result)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_outlier_beside_a_single_cotangent_keeps_the_contract(dtype, rng):
    """The mean of their part is far from mean(g): its product with the outlier is large, and cancels."""
    x, dy = rng.standard_normal((2, 8, 4999)).astype(dtype)
    x[:, 6], dy[:, :5], dy[:, 6:] = 1e18, 0, 0
    gamma, beta = np.ones((2, 4999), dtype)
    case = Case(x, gamma, beta, 1e-5, dy)
    found, _ = in_parts(case, [slice(0, 4), slice(4, 7), slice(7, 4999)])
    assert exact_layer_norm(*case).check_contract(dx=found["dx"])["dx"].passed


def test_dx_of_a_constant_g_is_0_in_rows_without_variance(dtype):
    """With an offset g is rounded, to the same number wherever it is needed."""
    for n in (1, 5):
        x, dy, gamma = np.full((3, 1, n), 1.1, dtype)
        found, _ = in_parts(
            Case(x, gamma[0], gamma[0], 5e-324, dy),
            [slice(0, n - n // 2), slice(n - n // 2, n)],
            offset=0.1,
        )
        assert not found["dx"].any()


def test_errors_do_not_grow_with_the_number_of_parts(rng):
    x = rng.standard_normal((4, 1000))
    norm = Norm(rounding="nearest")
    parts = [moments.moments(x[:, c], norm) for c in cuts(1000, 1000, rng)]
    rstd = moments.of_x(moments.merged(parts), norm.eps).factor
    assert (rstd["error"] < 300 * 2.0**-106 * rstd["high"]).all()


def assert_within(number, expected, power=1):
    """Assert that ``expected ** power``, or of -2 its root, is where the bounds say."""
    words = np.broadcast_arrays(number.hi, number.lo, number.bound.hi)
    flat = zip(*(word.ravel().tolist() for word in words), strict=True)
    for (high, low, bound), wanted in zip(flat, np.ravel(expected), strict=True):
        exact = 1 / wanted if power == -2 else wanted
        value, error = Fraction(high) + Fraction(low), Fraction(bound) / 2**106
        if power == -2:
            value, error = value**2, 2 * value * error
        assert abs(value - exact) <= error


@pytest.mark.parametrize("bound", [0.0, 50.0])
def test_every_operation_has_its_error_in_the_bound(bound, rng):
    """Of numbers that differ from what is carried by all of their bounds."""

    def number():
        high = rng.random((3, 9)) + 1
        low = (rng.random((3, 9)) - 0.5) * 2.0**-53
        error = Wide(bound * high, np.zeros((3, 9)))
        words = zip(high.ravel(), low.ravel(), error.hi.ravel(), strict=True)
        exact = [Fraction(a) + Fraction(b) + Fraction(c) / 2**106 for a, b, c in words]
        return Bounded(Wide(high, low), error), np.array(exact).reshape(3, 9)

    (a, exact_a), (b, exact_b) = number(), number()
    for _ in range(20):
        assert_within(a + b, exact_a + exact_b)
        assert_within(a - b, exact_a - exact_b)
        assert_within(a * b, exact_a * exact_b)
        assert_within(a.divided(7), exact_a / 7)
        assert_within(a.mean(), exact_a.sum(axis=1) / 9)
        assert_within(a.sum_rows(), exact_a.sum(axis=0))
        assert_within(a.rsqrt(), exact_a, -2)
        (a, exact_a), (b, exact_b) = number(), number()


def assert_bound(number, square, sign, size):
    """Assert that the bound of a number that travels reaches the root of `square`, and little beyond."""
    high, low, error, exponent = number.tolist()
    value = sign * (Fraction(high) + Fraction(low)) * Fraction(2) ** exponent
    error = Fraction(error) * Fraction(2) ** exponent
    assert max(value - error, 0) ** 2 <= square <= (value + error) ** 2
    assert error <= size / 2**90


@pytest.mark.parametrize("name", ["F01", "F03", "F07", "F12", "F21"])
def test_bounds_are_true_and_close(name, rng):
    """Of the mean less k, of rstd, and of mean((g - mean(g)) xhat), against rational numbers."""
    x, gamma, beta, eps, dy = make_case(name, "float64", 24, 6)
    parts = []
    for c in cuts(24, 5, rng):
        norm = Norm(gamma[c], beta[c], eps, rounding="nearest")
        parts.append((norm, x[:, c], dy[:, c]))
    of_x = moments.of_x(moments.merged([moments.moments(x, norm) for norm, x, _ in parts]), eps)
    of_g = [moments.moments_of_g(dy, x, norm, of_x) for norm, x, dy in parts]
    of_g = moments.of_g(moments.merged(of_g))
    for i in range(len(x)):
        row, g = ([Fraction(v) for v in each] for each in (x[i].tolist(), dy[i].tolist()))
        g = [a * Fraction(b) for a, b in zip(g, gamma.tolist(), strict=True)]
        mean, mean_g = sum(row) / 24, sum(g) / 24
        var = sum((v - mean) ** 2 for v in row) / 24
        along = sum((a - mean_g) * (v - mean) for a, v in zip(g, row, strict=True)) / 24
        signed = lambda v: (v * v, -1 if v < 0 else 1)
        size, size_g = (sum(abs(v - sum(u) / 24) for v in u) / 24 for u in (row, g))
        assert_bound(of_x.shift[i], *signed(mean - Fraction(of_x.k[i])), size)
        assert_bound(of_g.shift[i], *signed(mean_g - Fraction(of_g.k[i])), size_g)
        square = 1 / (var + Fraction(eps))
        assert_bound(of_x.factor[i], square, 1, Fraction(float(square) ** 0.5))
        assert_bound(of_g.factor[i], along**2 * square, -1 if along < 0 else 1, size_g)


# ---- RowMoments ----


@pytest.mark.parametrize("name", ["F01", "F03", "F07", "F09", "F12", "F16"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_row_moments_are_those_of_the_cache(name, kind, dtype, rng):
    case = make_case(name, dtype, 60, 4)
    _, cache = WHOLE[kind][0](case.x, eps=case.eps, backend="numpy")
    some = [RowMoments(kind) for _ in range(3)]
    for number, columns in enumerate(cuts(60, 7, rng)):
        some[number % 3].update(case.x[:, columns])
    first, second, third = some
    third.merge(pickle.loads(pickle.dumps(first)))
    second.merge(third)
    # Float64 data: both are nearly always rounded right; others: of float64 sums.
    bound = 0 if dtype == np.float64 else 2.0**-48
    mean, rstd = second.finish(case.eps)
    spread = np.abs(case.x.astype(float) - cache.mean).mean(axis=-1, keepdims=True)
    np.testing.assert_array_less(
        abs(mean - cache.mean), bound * spread + np.spacing(abs(cache.mean))
    )
    np.testing.assert_allclose(rstd, cache.rstd, rtol=bound + 2.0**-52)


def test_row_moments_of_equal_elements(dtype):
    """As in a cache, rstd is infinite with eps = 0."""
    some, equal = RowMoments(), np.full((1, 11), 1.7, dtype)
    for columns in (slice(1), slice(1, 4), slice(4, 11)):
        some.update(equal[:, columns])
    mean, rstd = some.finish(eps=0.0)
    assert (mean, rstd) == (equal[0, 0], np.inf)
    assert layer_norm_forward(equal, eps=0.0, backend="numpy")[1].rstd == np.inf
    assert some.finish(eps=0.25)[1] == 2.0


def test_row_moments_take_leading_axes_and_parts_without_columns():
    x = np.arange(48.0).reshape(2, 3, 8)[:, ::-1]
    moments = RowMoments()
    for part in (x[..., :0], x[..., :5], x[..., 5:], x[..., 8:]):
        moments.update(part)
    mean, rstd = moments.finish()
    np.testing.assert_array_equal(mean, x.mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(rstd, (x.var(axis=-1, keepdims=True) + 1e-5) ** -0.5)


def test_row_moments_refuse_in_one_line():
    some = RowMoments()
    with pytest.raises(ValueError, match="must have columns, got none yet; call update"):
        some.finish()
    some.update(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"leading shape \(2,\), got \(3,\)"):
        some.update(np.ones((3, 3)))
    with pytest.raises(TypeError, match=r"x must be float16, .* got int64"):
        some.update(np.ones((2, 3), int))
    with pytest.raises(ValueError, match="x must have columns"):
        some.update(np.float64(1.0))
    with pytest.raises(ValueError, match='kind must be "layer" or "rms"'):
        RowMoments("group")
    with pytest.raises(ValueError, match='other must be of kind "layer", got "rms"'):
        some.merge(RowMoments("rms"))
    with pytest.raises(TypeError, match="other must be a RowMoments, got int"):
        some.merge(1)
    with pytest.raises(ValueError, match="eps must be finite"):
        some.finish(-1.0)
