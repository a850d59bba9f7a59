"""Broken by promises beside y and gradients: imports, names, dtypes, empties, layers, what a cache shows."""

import pickle
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interpreter import python
from norms import NORMS, assert_same, compute, draw
from rationals import DTYPES, NAMES, rational, square_root

import stablenorm as sn
from stablenorm.backends import BACKENDS
from stablenorm.testing.plain import plain_backward, plain_forward

ROOT = Path(__file__).parents[1]
HEAVY = "torch tensorflow jax autograd cupy dask distributed matplotlib rich sympy scipy thinc onnxruntime"


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
    """PyTorch gives 1e-4, NumPy's two-pass +-1 (pytorch 188372); n = 1 is always constant."""
    x = np.repeat([[0.1], [12345.678], [-3e4], [1e-7]], n, axis=1).astype(dtype)
    gamma, beta = np.full(n, 1e3, dtype), np.linspace(-1, 1, n).astype(dtype)
    y, cache = sn.layer_norm_forward(x, gamma, beta, 1e-12, backend=backend)
    np.testing.assert_array_equal(y, np.broadcast_to(beta, y.shape))
    dx, dgamma, _ = sn.layer_norm_backward(np.ones_like(x), cache)
    np.testing.assert_array_equal(dgamma, np.zeros(n, dtype))
    np.testing.assert_array_equal(dx, np.zeros_like(x))


# Spoiled are a number of these arrays; two of one column of dy, by both signs; all the variance of a row.
SPOILED = "x", "row", "dy", "dy without beta", "signs", "gamma", "beta", "gamma and beta", "old"


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("rounding", ["fast", "nearest"])
@pytest.mark.parametrize(
    # Only the kernels do many rows otherwise.
    ("backend", "shape"),
    [*((name, (35, 17)) for name in BACKENDS), *(("native", (300, 6)) for _ in [*BACKENDS][1:])],
)
@pytest.mark.parametrize("what", SPOILED)
def test_nan_and_inf_stay_in_their_row_and_columns(
    what, backend, shape, rounding, kind, dtype, rng
):
    """The formula in float64 says what is lost, and how; all else has the bits that it has otherwise."""
    arrays = dict(zip(("x", "gamma", "beta", "dy"), draw(rng, shape, dtype), strict=True))
    arrays["old"] = np.ones(shape[1], dtype)

    def results(x, gamma, beta, dy, old):
        case = x, gamma, None if "without" in what else beta, 0.0, dy
        given = {"accumulate": (old, old)} if what == "old" else {}
        return compute(case, kind, rounding=rounding, backend=backend, **given)

    clean = results(**arrays)
    for bad in (-np.nan, -np.inf):
        spoiled = {name: array.copy() for name, array in arrays.items()}
        for name in spoiled.keys() & what.removesuffix(" without beta").split():
            # Sums lose the sign of a NaN.
            spoiled[name][..., 3].reshape(-1)[-1:] = -bad if what == "old" else bad
        if what == "row":
            spoiled["x"][1] = 0
        if what == "signs":
            spoiled["dy"][[0, -1], 2] = bad, -bad
        x, gamma, beta, dy, old = (each.astype(np.float64) for each in spoiled.values())
        # By the formula of RMS norm, an infinite x would leave zeros beside it.
        x[~np.isfinite(x).all(axis=1)] = np.nan
        y, kept = plain_forward(x, gamma, beta, 0.0, kind)
        dx, *sums = plain_backward(dy, kept, kind)
        # It depends on the order of sums, which elements of such a row are infinite.
        dx[~np.isfinite(dx).all(axis=1)] = np.nan
        sums = (each + old if what == "old" else each for each in sums)
        right = dict(zip(NAMES, (y, dx, *sums), strict=True))
        for output, actual in results(**spoiled).items():
            expected, lost = right[output], ~np.isfinite(right[output])
            np.testing.assert_array_equal(actual[~lost], clean[output][~lost])
            if rounding == "nearest":
                # NaN has one bit pattern there.
                expected[np.isnan(expected)] = np.nan
                assert_same([actual[lost]], [expected[lost].astype(dtype)], output)
            elif output == "dx":
                assert not np.isfinite(actual[lost].astype(float)).any()
            else:
                np.testing.assert_array_equal(actual[lost].astype(float), expected[lost])


@pytest.mark.parametrize(("name", "most"), [("float16", 24), ("float32", 24), ("float64", 40)])
def test_the_cache_is_small(rng, name, most):
    x = (rng.standard_normal((100, 768)) + 0.5).astype(name)
    assert sn.layer_norm_forward(x)[1].statistics.nbytes <= most * 100


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
    assert {name: each.dtype for name, each in parameters.items()} == {"beta": ml_dtypes.bfloat16}


# ---- the statistics that a cache shows ----


def hard(rng):
    """Rows out of range, rows that need a third word of the mean, and an rstd that float64 cannot hold."""
    x = rng.standard_normal((6, 33)) * [[1], [1e300], [1e-310], [1], [1], [1]]
    for row, value in ((3, 1.7), (4, 1e200)):
        x[row] = value + np.spacing(value) * (x[row] > 1)
    x[5] -= x[5].mean()
    return x


def outliers(rng, n):
    """If its guess of the mean, from these, is not made again, the forward loses log2(n / 8) bits of the variance."""
    x = rng.standard_normal((1, n)).astype(np.float32)
    x[:, :: n // 8] += 1e4
    return x


usual = lambda rng, dtype: (np.array([[0], [1], [100]]) + rng.standard_normal((3, 33))).astype(
    dtype
)
ROWS = {"hard": hard} | {str(dtype): partial(usual, dtype=dtype) for dtype in DTYPES}
ROWS |= {f"outliers in {n}": partial(outliers, n=n) for n in (64, 1024, 10_000)}


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("rows", ROWS)
def test_statistics_are_near_the_exact_ones(rng, rows, backend, eps):
    x, limit = ROWS[rows](rng), Fraction(501, 1000)
    ulp = lambda value: limit * Fraction(float(np.spacing(abs(float(value)))))
    c = Fraction(1, 2**98 if x.dtype == np.float64 else 2**48)
    cache, exact = (
        sn.layer_norm_forward(x, eps=eps, backend=backend)[1],
        sn.exact_layer_norm(x, eps=eps),
    )
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
        assert np.isnan(cache.statistics.rstd_lo[[1, 4]]).all()
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
