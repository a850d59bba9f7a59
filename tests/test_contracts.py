"""Promises beside y and gradients: imports, versions, NaN, layers, caches; and single keywords at their limits."""

import pickle
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreter import python
from norms import JUDGES, NORMS, assert_contract, assert_same, compute, draw, exactly
from rationals import DTYPES, NAMES, nearest, rational, square_root

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.testing.plain import plain_backward, plain_forward

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch tensorflow jax autograd cupy dask distributed matplotlib sympy scipy thinc onnxruntime"
)


def test_importing_and_ordinary_calls_load_nothing_heavy():
    code = (
        "import sys, numpy as np, stablenorm as sn\n"
        "y, cache = sn.layer_norm_forward(np.ones((2, 3)), where=[[True], [False]], backend='numpy')\n"
        "sn.layer_norm_backward(y, cache); sn.diagnose(y)\n"
        f"print(*(m for m in {HEAVY!r}.split() if m in sys.modules))"
    )
    assert python(code).split() == []


def test_one_version_everywhere():
    for file in ("pyproject.toml", "CITATION.cff", "docs/conf.py"):
        text = (ROOT / file).read_text("utf-8")
        said = re.findall(r'(?m)^version(?: = release)?(?: = |: )"?([^"\n]*)"?$', text)
        assert said == [sn.__version__], file


@pytest.mark.parametrize("n", [1, 2, 3, 127, 768, 50_000])
def test_a_constant_row_is_exactly_beta(dtype, backend, n):
    """PyTorch is off by 1e-4, NumPy's two-pass by 1 (pytorch 188372); n = 1 is always constant."""
    x = np.repeat([[0.1], [12345.678], [-3e4], [1e-7]], n, axis=1).astype(dtype)
    gamma, beta = np.full(n, 1e3, dtype), np.linspace(-1, 1, n).astype(dtype)
    y, cache = sn.layer_norm_forward(x, gamma, beta, 1e-12, backend=backend)
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))
    dx, dgamma, _ = sn.layer_norm_backward(np.ones_like(x), cache)
    np.testing.assert_array_equal(dgamma, np.zeros(n, dtype))
    np.testing.assert_array_equal(dx, np.zeros_like(x))


# One number of these arrays is spoiled; "signs": two of one column of dy, by both signs; "row": a row of x is 0 instead.
SPOILED = "x", "row", "dy", "dy without beta", "signs", "gamma", "beta", "gamma and beta", "old"


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(
    # The kernels alone treat many rows otherwise.
    ("backend", "shape"),
    [*((name, (35, 17)) for name in BACKENDS), *(("native", (300, 6)) for _ in [*BACKENDS][1:])],
)
@pytest.mark.parametrize("place", SPOILED)
def test_nan_and_inf_stay_in_their_row_and_columns(
    place, backend, shape, rounding, kind, dtype, rng
):
    """The formula in float64 says which results are lost, and how; all others keep their bits."""
    if place == "old" and rounding == "nearest":
        pytest.skip("sums with old values are not correctly rounded")
    arrays = dict(zip(("x", "gamma", "beta", "dy"), draw(rng, shape, dtype), strict=True))
    arrays["old"] = np.ones(shape[1], dtype)

    def results(x, gamma, beta, dy, old):
        case = x, gamma, None if "without" in place else beta, 0.0, dy
        keywords = {"accumulate": (old, old)} if place == "old" else {}
        return compute(case, kind, rounding=rounding, backend=backend, **keywords)

    clean = results(**arrays)
    for bad in (-np.nan, -np.inf):
        spoiled = {name: array.copy() for name, array in arrays.items()}
        for name in spoiled.keys() & place.removesuffix(" without beta").split():
            # "old" gets positive ones: sums lose the sign of a NaN.
            spoiled[name][..., 3].reshape(-1)[-1:] = -bad if place == "old" else bad
        if place == "row":
            spoiled["x"][1] = 0
        if place == "signs":
            spoiled["dy"][[0, -1], 2] = bad, -bad
        x, gamma, beta, dy, old = (array.astype(np.float64) for array in spoiled.values())
        # The formula of RMS norm would leave zeros beside an infinite x.
        x[~np.isfinite(x).all(axis=1)] = np.nan
        y, cache = plain_forward(x, gamma, beta, 0.0, kind)
        dx, *sums = plain_backward(dy, cache, kind)
        # The order of sums decides which elements of such a row are infinite.
        dx[~np.isfinite(dx).all(axis=1)] = np.nan
        sums = (total + old if place == "old" else total for total in sums)
        right = dict(zip(NAMES, (y, dx, *sums), strict=True))
        for output, actual in results(**spoiled).items():
            expected, lost = right[output], ~np.isfinite(right[output])
            np.testing.assert_array_equal(actual[~lost], clean[output][~lost])
            if rounding == "nearest":
                # "nearest" writes one bit pattern of NaN.
                expected[np.isnan(expected)] = np.nan
                assert_same([actual[lost]], [expected[lost].astype(dtype)], output)
            elif output == "dx":
                assert not np.isfinite(actual[lost].astype(float)).any()
            else:
                np.testing.assert_array_equal(actual[lost].astype(float), expected[lost])


@pytest.mark.parametrize("axis", [{}, {"axis": (1, 2)}], ids=["the last axes", "these"])
@pytest.mark.parametrize(("layer", "kind"), [(sn.LayerNorm, "layer"), (sn.RMSNorm, "rms")])
def test_layers_hold_what_they_say_and_pass_on_the_rest(rng, dtype, axis, layer, kind):
    x, residual, dy, dsum = rng.standard_normal((4, 2, 3, 4)).astype(dtype)
    norm, (forward, backward, _) = layer((3, 4), **axis, dtype=dtype), NORMS[kind]
    keywords = {"residual": residual, "where": np.arange(2)[:, None, None] == 0}
    y, cache = forward(x, *map(norm.parameters.get, ("gamma", "beta")), axis=(1, 2), **keywords)
    assert_same((norm.forward(x, **keywords), norm.cache.x), (y, cache.x))
    assert norm.gradients == {}
    assert_same([norm.backward(dy, dsum=dsum)], [backward(dy, cache, dsum=dsum).dx])
    shapes = {name: gradient.shape for name, gradient in norm.gradients.items()}
    assert shapes == dict.fromkeys(norm.parameters, (3, 4))
    assert "eps=1e-05" in repr(norm)


def test_parameters_of_a_layer():
    parameters = sn.LayerNorm(4, gamma=False, dtype="bfloat16").parameters
    assert {name: array.dtype for name, array in parameters.items()} == {"beta": ml_dtypes.bfloat16}


# ---- the statistics that a cache shows ----


def hard(rng):
    """Return rows out of range, rows that need a third word of the mean, and an rstd too large for float64."""
    x = rng.standard_normal((6, 33)) * [[1], [1e300], [1e-310], [1], [1], [1]]
    for row, value in ((3, 1.7), (4, 1e200)):
        x[row] = value + np.spacing(value) * (x[row] > 1)
    x[5] -= x[5].mean()
    return x


def outliers(rng, n):
    """Return a row whose guess of the mean, from eight outliers, costs log2(n / 8) bits unless it is made again."""
    x = rng.standard_normal((1, n)).astype(np.float32)
    x[:, :: n // 8] += 1e4
    return x


usual = lambda rng, dtype: np.add([[0], [1], [100]], rng.standard_normal((3, 33))).astype(dtype)
ROWS = {"hard": hard} | {str(dtype): partial(usual, dtype=dtype) for dtype in DTYPES}
ROWS["outliers"] = partial(outliers, n=10_000)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("rows", ROWS)
def test_statistics_are_near_the_exact_ones(rng, rows, backend, eps):
    x, limit = ROWS[rows](rng), Fraction(501, 1000)
    ulp = lambda value: limit * Fraction(float(np.spacing(abs(float(value)))))
    in_pairs = x.dtype == np.float64 and backend == "native"
    c = Fraction(1, 2**98 if in_pairs else 2**48)
    cache = sn.layer_norm_forward(x, eps=eps, backend=backend)[1]
    exact = sn.exact_layer_norm(x, eps=eps)
    assert cache.mean.dtype == cache.rstd.dtype == np.float64
    for row, (mean, rstd) in enumerate(zip(cache.mean.flat, cache.rstd.flat, strict=True)):
        center, square = exact.mean(row), exact.var(row) + Fraction(eps)
        spread = abs(rational(x[row]) - center).mean()
        assert abs(Fraction(float(mean)) - center) <= ulp(center) + c * spread
        if rstd == np.inf:
            assert square * Fraction(np.finfo(float).max) ** 2 < 1
        else:
            right = 1 / square_root(square, 60)
            assert abs(Fraction(float(rstd)) - right) <= ulp(rstd) + c * right
    if rows == "hard":
        assert cache.statistics.out_of_range[[1, 4]].all() == in_pairs
        assert np.isinf(cache.rstd[2]) == (eps == 0)


def test_statistics_of_what_is_not_finite(backend):
    x = np.array([[1, np.nan], [1, np.inf], [1, 3]], np.float32)
    cache = sn.layer_norm_forward(x, eps=0.0, backend=backend)[1]
    assert np.isnan([cache.mean[:2], cache.rstd[:2]]).all()
    assert (cache.mean[2], cache.rstd[2]) == (2, 1)


def test_a_cache_prints_on_one_line():
    x = np.ones((2, 3, 4), np.float16)
    _, cache = sn.layer_norm_forward(x, np.ones(4, np.float32), backend="numpy")
    assert repr(cache) == (
        "Cache(x: float16 (2, 3, 4), gamma: float32 (4,), beta: None, axis: (2,), "
        "statistics: 144 bytes, backend: 'numpy', rounding: 'fast')"
    )
    assert pickle.loads(pickle.dumps(cache)).mean.tolist() == cache.mean.tolist()
    assert len(tuple(cache)) == len(cache._fields)


@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_and_rounded_once_to_the_wider_dtype(dtype, second, rng):
    """Sums of a short number and a power of two are midpoints, or a little above them."""
    x = np.exp2(rng.integers(-12, 12, 900)) * rng.integers(1, 8, 900)
    residual = np.exp2(rng.integers(-60, 4, 900)) * rng.integers(-3, 4, 900) * (1 + 2.0**-40)
    # A little above midpoints of bfloat16 and float32.
    x[:3] = 2.0**-130, -(2.0**-130), 1
    residual[:3] = 1 + 2.0**-8, 1 + 2.0**-8, 2.0**-24 + 2.0**-70
    x, residual = x.astype(dtype)[None], residual.astype(second)[None]
    if dtype != second and dtype.itemsize == second.itemsize:
        with pytest.raises(
            TypeError, match=r"residual must have dtype .*residual.astype\(x.dtype\)"
        ):
            sn.layer_norm(x, residual=residual)
        return
    wide = max(dtype, second, key=lambda kind: kind.itemsize)
    sums = (rational(x) + rational(residual)).flat
    expected = np.array([[nearest(value, wide) for value in sums]]).astype(wide)
    exact = sn.exact_layer_norm(x, residual=residual)
    actual = (sn.layer_norm_forward(x, residual=residual, backend=name)[1].x for name in BACKENDS)
    assert_same([exact.x, *actual], [expected] * (1 + len(BACKENDS)))
    of_sum = sn.exact_layer_norm(expected).rounded("y", np.float64)
    np.testing.assert_array_equal(exact.rounded("y", np.float64), of_sum)


@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize("of_out", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_another_dtype_are_rounded_once_to_it(dtype, of_out, rounding, backend, rng):
    """Rows of ordinary and of hard numbers; of another axis as well, which has the same bits."""
    for rows, n, offset in ((5, 33, 0.0), (3, 300, 100.0)):
        x, gamma, beta, dy = draw(rng, (rows, n), dtype)
        case = (x + np.asarray(offset, dtype)).astype(dtype), gamma, beta, 1e-5, dy
        exact = exactly(case)
        options = {"rounding": rounding, "backend": backend}
        out = np.empty(x.shape, of_out), *(np.empty(n, of_out) for _ in range(2))
        y, cache = sn.layer_norm_forward(*case[:4], **options, out=np.empty(x.shape, of_out))
        gradients = sn.layer_norm_backward(dy, cache, out=out)
        assert cache.x.dtype == dtype
        results = dict(zip(NAMES, (y, *gradients), strict=True))
        assert {array.dtype for array in results.values()} == {of_out}
        JUDGES[rounding](exact, results, (rows, n), backend == "numpy" or dtype != of_out)
        turned = sn.layer_norm(case[0].T, gamma, beta, 1e-5, axis=0, out=out[0].T, **options)
        assert_same([np.ascontiguousarray(turned.T)], [y])


@pytest.mark.parametrize("kind", NORMS)
def test_a_wider_residual_is_a_plain_call_of_the_sum(kind, backend, rng):
    forward, backward, _ = NORMS[kind]
    x, gamma, beta, dy = draw(rng, (4, 40), np.float16)
    residual = rng.standard_normal(x.shape).astype(np.float32)
    y, cache = forward(x, gamma, beta, residual=residual, backend=backend)
    of_sum, plain = forward(x + residual, gamma, beta, backend=backend, out=np.empty_like(x))
    assert_same([y, cache.x], [of_sum, plain.x])
    assert (y.dtype, cache.x.dtype) == (np.float16, np.float32)
    # dy is widened; dx is the gradient of the sum, in its dtype, unless an out has another.
    narrow = backward(dy, cache, out=(np.empty_like(x), None, None)).dx
    wide = backward(dy.astype(np.float32), plain)
    assert_same(backward(dy, cache), wide)
    assert_same([narrow], [backward(dy, plain, out=(np.empty_like(x), None, None)).dx])


# ---- where ----


@pytest.mark.parametrize("kind", NORMS)
def test_a_row_without_variance_is_nan_where_it_counts(kind, backend):
    x = np.array([[0.0, 0.0, 5.0], [1.0, 2.0, 4.0]])
    dy, dsum = np.ones((2, 3)), np.full((2, 3), 0.1)
    where = np.array([[True, True, False], [True, True, True]])
    forward, backward, _ = NORMS[kind]
    exact = NORMS[kind][2](x, np.ones(3), np.ones(3), 0.0, dy=dy, dsum=dsum, where=where)
    y, cache = forward(x, np.ones(3), np.ones(3), 0.0, where=where, backend=backend)
    results = backward(dy, cache, dsum=dsum)._asdict() | {"y": y}
    assert y[0, 2] == 0.0
    assert results["dx"][0, 2] == 0.1
    assert_contract(exact, results, in_float64=True)
    y[0, 2] = np.nan
    assert not exact.check_contract(y=y)["y"].passed


def test_the_mask_may_change_after_the_forward(rng, backend):
    x, gamma, beta, dy = draw(rng, (8, 9))
    for where in (rng.random((8, 1)) < 0.5, rng.random((8, 9)) < 0.5):
        cache = sn.layer_norm_forward(x, gamma, beta, where=where, backend=backend)[1]
        before = sn.layer_norm_backward(dy, cache)
        where[...] = ~where
        assert_same(sn.layer_norm_backward(dy, cache), before)


# ---- jvp and double backward ----


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_large_means_of_the_cotangents_cost_nothing(rng, size):
    """A mean of the cotangents must be subtracted first: products with xhat sum to zero, rounding errors stay."""
    x, _, beta, dy = draw(rng, (1, 768))
    x, dy = x + np.float32(0.5), dy + np.float32(1e6)
    ones, zeros, ddx = np.ones_like(beta), np.zeros_like(beta), np.full_like(x, size)
    # The element has the smallest xhat: it adds almost nothing to other sums.
    ddx[0, abs(x - x.mean()).argmin()] += 1
    exact = exactly((x, ones, beta, 1e-3, dy), ddx=ddx, ddgamma=zeros, ddbeta=beta)
    cache = sn.layer_norm_forward(x, ones, beta, 1e-3)[1]
    results = sn.layer_norm_double_backward(ddx, dy, cache, ddgamma=zeros, ddbeta=beta)
    assert_contract(exact, dict(zip(("ddy", "dx", "dgamma"), results, strict=True)))
    assert_contract(exact, {"ddy": sn.layer_norm_jvp(ddx, cache, zeros, beta)})


def test_second_order_of_rows_out_of_range_leaves_others_as_they_are(rng):
    tx, x, dy = rng.standard_normal((3, 4, 9))
    few = sn.layer_norm_jvp(tx, sn.layer_norm_forward(x)[1])
    x[1:3] *= np.array([[1e250], [1e-250]])
    cache = sn.layer_norm_forward(x, np.ones(9))[1]
    ty = sn.layer_norm_jvp(tx, cache)
    exact = sn.exact_layer_norm(x, np.ones(9), tx=tx)
    assert_contract(exact, {"ty": ty}, in_float64=True)
    np.testing.assert_array_equal(ty[[0, 3]], few[[0, 3]])
    dx = sn.layer_norm_double_backward(tx, dy, cache)[1]
    assert np.isfinite(dx[[0, 3]]).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("whole", [False, True])
def test_second_order_of_a_masked_row_is_that_of_what_counts(rng, kind, whole):
    x, gamma, beta, dy = draw(rng, (4, 9), np.float64)
    ddx, ddgamma, ddbeta, _ = draw(rng, (4, 9), np.float64)
    mask = rng.random((4, 1 if whole else 9)) < 0.6
    mask[0], mask[1] = False, True
    shown = np.broadcast_to(mask, x.shape)
    x[~shown] = dy[~shown] = ddx[~shown] = np.nan

    def second(rows, js, names=("ddx", "ddgamma", "ddbeta"), **where):
        case = x[rows, js], gamma[js], beta[js], 1e-5, dy[rows, js]
        keywords = zip(names, (ddx[rows, js], ddgamma[js], ddbeta[js]), strict=True)
        return compute(case, kind, **dict(keywords), **where)

    results = second(..., slice(None), where=mask)
    ty = second(..., slice(None), ("tx", "tgamma", "tbeta"), where=mask)["ty"]
    np.testing.assert_array_equal(results["ddy"], ty)
    expected = {name: np.zeros_like(array) for name, array in results.items()}
    for i, js in enumerate(shown):
        for name, alone in second(i, js).items() if js.any() else ():
            expected[name][(js if name == "dgamma" else (i, js))] += alone
    for name, right in expected.items():
        np.testing.assert_allclose(results[name], right, rtol=0, atol=1e-13 * np.abs(right).max())
