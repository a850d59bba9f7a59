"""The contract of every element on every hard family, judged by the exact oracle."""

import re

import numpy as np
import pytest
from norms import FINITE, assert_contract, compute

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.backends import BACKENDS
from stablenorm.formats import FORMATS, format_of
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, make_case
from stablenorm.testing.plain import plain_backward, plain_forward

DTYPES = {each.dtype.name: each.dtype for each in FORMATS}
# Long rows are what takes the oracle's time: the families of ordinary exponents.
LONG = ("F01", "F03", "F07", "F14", "F19", "F28b", "F35")
MANY_ROWS = ("F01", "F03", "F16", "F35")
# Made to cancel: there the second term of the contract decides the last bits.
CANCELLING = {"y": {"F07", "F32"}, "dx": {"F07", "F08", "F20", "F21", "F28", "F28b"}}
# No multiple of any vector. More elements than a tile of the kernels' forward has: from 2**14 on the
# reference too takes one row at a time. And more elements than a block of the reference has.
LONGER, MORE = 2**14 + 101, 2**15 + 101


def combinations(names, lengths, rows, dtypes=tuple(DTYPES)):
    """The families that exist, for these dtypes and lengths, as parameters."""
    return [
        pytest.param(name, dtype, n, rows, id=f"{name}-{dtype}-{n}")
        for name in names
        for dtype in dtypes
        for n in lengths
        if FAMILIES[name].applies(DTYPES[dtype], n)
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "n", "rows"),
    [
        *combinations(FINITE, (1, 2, 3, 127), 2),
        # Errors of the 16-bit dtypes are those of float64 rounded once more.
        *combinations(FINITE, (768,), 2, ("float32", "float64")),
        # 128 elements are one block of NumPy's pairwise summation.
        *combinations(("F03", "F07", "F14"), (128, 129), 3),
        *combinations(LONG, (8193,), 1, ("float32", "float64")),
        *combinations(("F03",), (8193,), 1, ("float16", "bfloat16")),
        *combinations(("F03", "F07"), (LONGER,), 1, ("float32", "float64")),
        # More rows than one block of the reference holds at n = 7.
        *combinations(("F01",), (7,), MORE // 7, ("float32",)),
        *combinations(MANY_ROWS, (7,), 700, ("float64",)),
    ],
)
def test_contract(name, dtype, n, rows):
    """
    Of all backends; `rows`, or as many as the family needs.

    y and dx of at most 32 bits have the same bits, except where float64 cannot decide them.
    """
    rows = max(rows, FAMILIES[name].smallest_rows)
    case = make_case(name, DTYPES[dtype], n, rows)
    exact, judged = exact_layer_norm(*case), set()
    for backend in BACKENDS:
        outputs = {
            (output, array.dtype, array.shape, array.tobytes()): array
            for output, array in compute(case, backend=backend).items()
        }
        # The same bits need no second verdict, and the oracle is what takes the time.
        new = {key[0]: array for key, array in outputs.items() if key not in judged}
        if judged and dtype != "float64" and n > 100:
            # Of few elements, some cancel in every family (test_tiny.py: ordinary ones of all lengths).
            assert not {o for o in new if name not in CANCELLING.get(o, FAMILIES)}, backend
        judged |= outputs.keys()
        assert_contract(exact, new, f"make_case({name!r}, {dtype!r}, {n=}, {rows=}), {backend}")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_plain_formula_fails_the_contract(dtype):
    """The suite can fail: the formula that everybody writes breaks nearly every family."""
    names = [name for name in FINITE if FAMILIES[name].applies(dtype, 257)]
    outcomes = {}
    for name in names:
        case = make_case(name, dtype, 257, max(2, FAMILIES[name].smallest_rows))
        y, kept = plain_forward(*case[:4])
        dx, dgamma, dbeta = plain_backward(case.dy, kept)
        found = {"y": y, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}
        outcomes[name] = exact_layer_norm(*case).check_contract(**found)
    kept = [name for name in names if all(r.passed for r in outcomes[name].values())]
    assert not kept
    # Of the 26 families that are about x, 14 lose more than 4e4 ulp of y, or all of it; two of
    # these are near that limit, where the draw and the order of NumPy's sums decide.
    ulp = [outcomes[f"F{i:02}"]["y"].worst_ulp for i in range(1, 27)]
    assert sum(not value < 4e4 for value in ulp) >= 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("F99", "float32", 8), "name must be one of F01, F02"),
        (("F21", "float16", 768), "F21 must have another dtype than float16, whose squares"),
        (("F19", "float32", 7), "F19 must have n >= 8, got 7"),
        (("F38", "float32", 8, 2), "F38 must have rows >= 4, got 2"),
    ],
)
def test_a_family_that_does_not_exist_says_why(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_case(*arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_case_has_its_dtype_and_is_repeatable(name, dtype):
    if why_not := FAMILIES[name].why_not(dtype, 33):
        pytest.skip(why_not)
    case, again = make_case(name, dtype, 33, rng=7), make_case(name, dtype, 33, rng=7)
    rows = len(case.x)
    for array, same, shape in zip(
        (case.x, case.gamma, case.beta, case.dy),
        (again.x, again.gamma, again.beta, again.dy),
        ((rows, 33), (33,), (33,), (rows, 33)),
        strict=True,
    ):
        assert (array.dtype, array.shape) == (dtype, shape)
        assert array.tobytes() == same.tobytes()
        assert np.isfinite(array.astype(np.float64)).all() == (
            FAMILIES[name].finite or array is not case.x
        )


# What titles promise: of the case and its exact result, in the dtype's own numbers.
PROMISES = {
    "F07": lambda c, f: np.unique(c.x).size == 2 and float(np.ptp(c.x)) == 2.0 ** (1 - f.digits),
    "F13": lambda c, f: (np.abs(c.x.astype(np.float64)) == f.largest).all(),
    "F16": lambda c, f: (np.abs(c.x.astype(np.float64)) < 2.0**f.emin).all(),
    "F27": lambda c, _: not exact_layer_norm(*c).rounded("dx", np.float64).any(),
    # rstd is 1 to within a tenth; what is left without eps is a rounding of dy.
    "F28b": lambda c, f: (
        np.abs(exact_layer_norm(*c).rounded("dx", "f8")).max() < 8 * 2.0**-f.digits
    ),
    # At most a rounding of gamma * xhat, which is below 8 here; xhat itself is known to 2^-50.
    "F32": lambda c, f: (
        np.abs(exact_layer_norm(*c).rounded("y", "f8")[0]).max() < 8 * (2.0**-f.digits + 2.0**-50)
    ),
    "F35": lambda c, _: not exact_layer_norm(*c).rounded("dgamma", np.float64).any(),
}


@pytest.mark.parametrize("name", PROMISES)
def test_a_family_is_what_its_title_says(name, dtype):
    case = make_case(name, dtype, 257)
    assert PROMISES[name](case, format_of(dtype))


def test_a_million_positive_rows_do_not_drift(backend):
    """NumPy's float32 sum over axis 0 is off by 1.8e-4 here: it adds one row at a time."""
    dy = np.random.default_rng(0).random((1_000_000, 2), dtype=np.float32) + 0.5
    _, cache = layer_norm_forward(
        dy, np.ones(2, np.float32), np.zeros(2, np.float32), backend=backend
    )
    dbeta = layer_norm_backward(dy, cache, wrt=("beta",)).dbeta
    # Below 2^21, of multiples of 2^-24: exact in float64.
    expected = dy.sum(axis=0, dtype=np.float64)
    np.testing.assert_array_equal(dbeta, expected.astype(np.float32))


def test_sums_with_nan_and_inf_and_minus_zero(dtype, backend):
    """F36: row 0 holds NaN, row 1 infinity, the last row -0 (test_contracts.py: the other rows)."""
    case = make_case("F36", dtype, 33, rows=5)
    y, cache = layer_norm_forward(*case[:4], backend=backend)
    dx, dgamma, dbeta = layer_norm_backward(case.dy, cache)
    # xhat of the spoiled rows is NaN in every column, so dgamma is; dbeta does not see x.
    assert np.isnan(dgamma.astype(np.float64)).all()
    without_x = exact_layer_norm(np.zeros_like(case.x), case.gamma, case.beta, 1e-5, case.dy)
    assert without_x.check_contract(dbeta=dbeta)["dbeta"].passed
    # -0 is a zero like the other: adding 0 makes it +0, and no bit of the row changes.
    assert np.signbit(case.x[-1, -1])
    y_plus, cache_plus = layer_norm_forward(
        case.x + np.zeros((), dtype), *case[1:4], backend=backend
    )
    assert y_plus[2:].tobytes() == y[2:].tobytes()
    assert layer_norm_backward(case.dy, cache_plus).dx[2:].tobytes() == dx[2:].tobytes()
