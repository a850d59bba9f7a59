"""The contract of every element on every hard family, judged by the exact oracle."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.analysis.families import FAMILIES, PUBLISHED, make_case
from stablenorm.analysis.plain import plain_backward, plain_forward
from stablenorm.oracle import exact_layer_norm

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
FINITE = [name for name, family in FAMILIES.items() if family.finite]
# The oracle's integers grow with the exponents of float64 data: there, long rows are kept to
# families of ordinary exponents, so that the file stays within two minutes.
NARROW = ("float16", "bfloat16", "float32")
LONG_FLOAT64 = ("F01", "F03", "F07", "F11", "F14", "F19", "F23", "F27", "F32", "F35")
LONGEST = ("F01", "F03", "F07", "F09", "F14", "F27")


def combinations(names, lengths, dtypes=tuple(DTYPES)):
    """The families that exist, for these dtypes and lengths, as parameters."""
    return [
        pytest.param(name, dtype, n, id=f"{name}-{dtype}-{n}")
        for name in names
        for dtype in dtypes
        for n in lengths
        if FAMILIES[name].applies(DTYPES[dtype], n)
    ]


def judge(case, backend, forward=layer_norm_forward, backward=layer_norm_backward):
    keywords = {} if backend is None else {"backend": backend}
    y, cache = forward(case.x, case.gamma, case.beta, case.eps, **keywords)
    dx, dgamma, dbeta = backward(case.dy, cache)
    return exact_layer_norm(*case).check_contract(y=y, dx=dx, dgamma=dgamma, dbeta=dbeta)


def assert_contract(name, dtype, n, rows, backend):
    results = judge(make_case(name, DTYPES[dtype], n, rows), backend)
    for output, result in results.items():
        recipe = f"make_case({name!r}, {dtype!r}, n={n}, rows={rows}, rng=0), {output}"
        assert result.passed, f"{recipe}: {result}"


@pytest.mark.parametrize(("name", "dtype", "n"), combinations(FINITE, (1, 2, 3, 127, 768)))
def test_contract(name, dtype, n, backend):
    assert_contract(name, dtype, n, 2, backend)


# 128 elements are one block of NumPy's pairwise summation.
@pytest.mark.parametrize(("name", "dtype", "n"), combinations(("F03", "F07", "F14"), (128, 129)))
def test_contract_at_the_edges_of_a_summation_block(name, dtype, n, backend):
    assert_contract(name, dtype, n, 3, backend)


@pytest.mark.parametrize(
    ("name", "dtype", "n"),
    combinations(FINITE, (8193,), NARROW) + combinations(LONG_FLOAT64, (8193,), ("float64",)),
)
def test_contract_on_long_rows(name, dtype, n, backend):
    assert_contract(name, dtype, n, 1, backend)


@pytest.mark.parametrize(("name", "dtype", "n"), combinations(LONGEST, (50_000,)))
def test_contract_on_very_long_rows(name, dtype, n, backend):
    assert_contract(name, dtype, n, 1, backend)


@pytest.mark.parametrize(
    ("name", "dtype", "n"), combinations(("F01", "F03", "F13", "F16", "F35"), (7,))
)
def test_contract_of_sums_over_many_rows(name, dtype, n, backend):
    """More rows than one block of the reference holds at n = 7."""
    assert_contract(name, dtype, n, 700 if dtype == "float64" else 6000, backend)


def test_the_plain_formula_fails_the_contract():
    """The suite can fail: numerics that everybody writes break most families."""
    broken = [
        name
        for name in FINITE
        if FAMILIES[name].applies("float32", 127)
        and not judge(make_case(name, "float32", 127), None, plain_forward, plain_backward)[
            "y"
        ].passed
    ]
    assert len(broken) >= 14


def test_an_uncentred_cotangent_fails_where_ours_passes():
    case = make_case("F27", "float64", 768)
    results = judge(case, None, plain_forward, plain_backward)
    assert not results["dx"].passed


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}, {row.x[0]}")
def test_published_rows(row, dtype, backend):
    with np.errstate(over="ignore"):
        x = np.array([row.x], dtype=np.float64).astype(dtype)
    if not np.array_equal(x.astype(np.float64)[0], row.x):
        pytest.skip(f"{dtype} cannot hold this row")
    y = layer_norm(x, eps=row.eps, backend=backend).astype(np.float64)
    unit = float(ml_dtypes.finfo(dtype).eps)
    # Printed to that many digits, and rounded to dtype.
    np.testing.assert_allclose(y[0], row.y, rtol=0, atol=0.5 * 10.0**-row.digits + unit)


def test_exact_zeros_of_rows_in_pairs(dtype, backend):
    case = make_case("F35", dtype, 33, rows=64)
    _, cache = layer_norm_forward(*case[:4], backend=backend)
    _, dgamma, dbeta = layer_norm_backward(case.dy, cache)
    np.testing.assert_array_equal(dgamma, np.zeros(33, dtype))
    np.testing.assert_array_equal(dbeta, np.zeros(33, dtype))


def test_a_million_positive_rows_do_not_drift(backend):
    """NumPy's float32 sum over axis 0 is off by 1.8e-4 here: it adds one row at a time."""
    dy = np.random.default_rng(0).random((1_000_000, 2), dtype=np.float32) + 0.5
    _, cache = layer_norm_forward(
        dy, np.ones(2, np.float32), np.zeros(2, np.float32), backend=backend
    )
    dbeta = layer_norm_backward(dy, cache, wrt=("beta",)).dbeta
    expected = dy.sum(axis=0, dtype=np.longdouble)
    np.testing.assert_array_max_ulp(dbeta, expected.astype(np.float32), 1)


def test_the_same_numbers_in_another_order(dtype, backend):
    case = make_case("F37", dtype, 768, rows=4)
    y = layer_norm(*case[:4], backend=backend).astype(np.float64)
    ordered = np.sort(y, axis=-1)
    unit = np.abs(ordered[0]) * float(ml_dtypes.finfo(dtype).eps)
    assert (np.abs(ordered - ordered[0]) <= np.maximum(unit, 2.0**-48)).all()


def test_nan_and_inf_and_minus_zero(dtype, backend):
    case = make_case("F36", dtype, 33, rows=3)
    y = layer_norm(*case[:4], backend=backend).astype(np.float64)
    assert np.isnan(y[0]).all()
    results = exact_layer_norm(case.x[1:], *case[1:4]).check_contract(y=y[1:].astype(dtype))
    assert results["y"].passed


@pytest.mark.parametrize("offset", [0, 10, 1e3, 1e4, 1e5, 1e6])
def test_no_offset_costs_a_digit(offset, backend):
    """Eight wheels of others lose 1e-5 to everything here (pytorch 51102, keras-core 866)."""
    x = (offset + np.random.default_rng(1).standard_normal((3, 768))).astype(np.float32)
    y = layer_norm(x, backend=backend)
    assert exact_layer_norm(x).check_contract(y=y)["y"].misrounded < 1e-5


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e19, 1e25, 3e38])
def test_no_silent_zeros_at_any_scale(scale, backend):
    """Above 1.8e19 squares overflow: zeros or NaN elsewhere (tt-metal 55159, nntrainer 3935)."""
    x = (scale * np.tanh(np.random.default_rng(1).standard_normal((3, 768)))).astype(np.float32)
    y = layer_norm(x, eps=0.0, backend=backend)
    assert exact_layer_norm(x, eps=0.0).check_contract(y=y)["y"].passed
    assert abs(float((y**2).mean()) - 1) < 1e-5


PUBLIC_FAILURES = {
    "pytorch 51102: 2000 + N, n = 4, var 48 425": (lambda g: 2000 + g.standard_normal((64, 4)), 4),
    "pytorch 40302: 100 + 0.01 N, var 0": (lambda g: 100 + 0.01 * g.standard_normal((8, 500)), 500),
    "burn 5607: mean + 1e-3 i": (lambda _: 100 + 1e-3 * np.arange(64.0).reshape(2, 32), 32),
    "mlx 2238: 16 values near 1449": (lambda g: 1449 + 0.05 * g.standard_normal((4, 16)), 16),
    "tt-metal 55159: 1e25 N": (lambda g: 1e25 * g.standard_normal((4, 64)), 64),
    "flax 1491: a constant of 1e4": (lambda g: 1e4 + 0 * g.standard_normal((4, 64)), 64),
}


@pytest.mark.parametrize("failure", sorted(PUBLIC_FAILURES))
def test_what_failed_in_public(failure, backend):
    make, n = PUBLIC_FAILURES[failure]
    rng = np.random.default_rng(51102)
    x = make(rng).astype(np.float32)
    gamma, beta = rng.standard_normal((2, n)).astype(np.float32)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    y, cache = layer_norm_forward(x, gamma, beta, backend=backend)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    exact = exact_layer_norm(x, gamma, beta, 1e-5, dy)
    results = exact.check_contract(y=y, dx=dx, dgamma=dgamma, dbeta=dbeta)
    assert all(result.passed for result in results.values()), results


@pytest.mark.parametrize("value", [1e6, 1e10, 3e38])
def test_one_element_and_a_huge_gamma(value, dtype, backend):
    """n = 1: y is beta and dgamma 0, whatever x and gamma (pytorch 188372, 98075)."""
    with np.errstate(over="ignore"):
        x = np.minimum(value, float(ml_dtypes.finfo(dtype).max)) * np.ones((5, 1))
    x, beta = x.astype(dtype), np.full(1, 0.3, dtype)
    y, cache = layer_norm_forward(x, x[0], beta, backend=backend)
    assert (y == beta).all()
    dx, dgamma, dbeta = layer_norm_backward(np.ones_like(x), cache)
    assert not dx.any()
    assert not dgamma.any()
    assert dbeta == np.asarray(5, dtype)


@pytest.mark.parametrize("n", [3, 17, 127, 769, 1023])
def test_no_padding_lane_enters_the_variance(n, backend):
    """A row length that is no power of two, far from zero (Liger 518, unsloth 1867)."""
    row = np.arange(8)[:, None]
    x = (1000 + 100 * row + (np.arange(n) % 17 - 8) / 8).astype(np.float32)
    y = layer_norm(x, backend=backend)
    assert exact_layer_norm(x).check_contract(y=y)["y"].passed


def test_many_rows_of_two_normalized_axes(backend):
    """Rows beyond 65 536 with a 2-D normalized shape were written out of bounds (pytorch 192016)."""
    x = np.random.default_rng(2).standard_normal((70_000, 2, 2)).astype(np.float32)
    y = layer_norm(x, axis=(1, 2), backend=backend)
    np.testing.assert_array_equal(
        y[-3:], layer_norm(x[-3:].reshape(3, 4), backend=backend).reshape(3, 2, 2)
    )
    assert np.isfinite(y).all()
