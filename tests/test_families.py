"""The oracle judges features x families x dtypes x roundings: the contract, and every bit of "nearest"."""

from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import NamedTuple

import numpy as np
import pytest
from norms import CANCELLING, FINITE, assert_right, assert_same, compute

from stablenorm import layer_norm_backward, layer_norm_forward
from stablenorm.formats import DTYPES, format_of
from stablenorm.oracle import exact_layer_norm
from stablenorm.testing.families import FAMILIES, make_case

# Few families for long rows and many rows: the oracle takes long there.
LONG, MANY_ROWS = ("F03", "F28b", "F35"), ("F01", "F35")
# LONGER: more elements than a tile of the kernels' forward; from 2**14 on the reference, too, takes one row
# at a time. MORE: more elements than a block of the reference. Neither is a multiple of a vector.
LONGER, MORE = 2**14 + 101, 2**15 + 101


# ---- keywords of the oracle for a case; a function may change the case ----


def nothing(_case, _rng):
    return {}


def offset(_case, rng):
    return {"gamma_offset": rng.choice([1.0, -0.7, 2.0**-60])}


def residual(case, rng):
    """Split x into a part and a residual, except where rounding makes their sum infinite."""
    whole = case.x.copy()
    case.x[...] = (whole * rng.random(whole.shape)).astype(whole.dtype)
    rest = whole - case.x
    beyond = ~np.isfinite(case.x + rest)
    case.x[beyond], rest[beyond] = whole[beyond], 0
    return {"residual": rest}


def added(case, rng):
    """Return old sums of any size, half of them minus the rounded sum: they leave its rounding error."""
    scales = 2.0 ** rng.integers(-9, 9, len(case.gamma))
    sums = compute(case, backend="numpy")
    old = [(rng.standard_normal(scales.shape) * scales).astype(case.x.dtype) for _ in range(2)]
    for array, name in zip(old, ("dgamma", "dbeta"), strict=True):
        lost = np.isfinite(sums[name]) & (np.arange(scales.size) % 2 == 0)
        array[lost] = -sums[name][lost]
    dsum = rng.standard_normal(case.x.shape) * 2.0 ** rng.integers(-9, 9)
    return {"accumulate": old, "dsum": dsum.astype(case.x.dtype)}


def mask(case, rng):
    """Mask all but one element of a row, a whole row, none of a row; masked elements are NaN or infinite."""
    where = rng.random(case.x.shape) < 0.6
    where[0], where[1], where[2] = False, False, True
    where[0, 3] = True
    case.x[~where], case.dy[~where] = np.nan, np.inf
    return {"where": where}


def rows(case, _rng):
    where = (np.arange(len(case.x)) % 2 == 0)[:, None]
    case.x[1::2], case.dy[1::2] = np.nan, np.inf
    return {"where": where}


def tangents(case, rng, names=("tx", "tgamma", "tbeta")):
    """Return tangents of x, gamma, beta or, with other names, cotangents of the double backward."""
    shapes = case.x.shape, case.gamma.shape, case.beta.shape
    drawn = (rng.standard_normal(shape).astype(case.x.dtype) for shape in shapes)
    return dict(zip(names, drawn, strict=True)) | {"gamma_offset": 1.0}


cotangents = partial(tangents, names=("ddx", "ddgamma", "ddbeta"))


class Feature(NamedTuple):
    """A row of the table: a function that makes the keywords of a call, the norm, the roundings."""

    make: Callable
    kind: str = "layer"
    roundings: tuple = ("fast", "nearest")


FAST, WIDE = ("fast",), ("float32", "float64")
FEATURES = {
    "layer norm": Feature(nothing),
    "RMS norm": Feature(nothing, "rms"),
    "gamma_offset": Feature(offset),
    "gamma_offset of RMS norm": Feature(offset, "rms"),
    "residual": Feature(residual),
    "dsum, accumulate": Feature(added, "layer", FAST),
    "accumulate in RMS norm": Feature(added, "rms", FAST),
    "rows that count": Feature(rows),
    "elements that count": Feature(mask, "layer", FAST),
    "elements that count, RMS norm": Feature(mask, "rms", FAST),
    "jvp": Feature(tangents, "layer", FAST),
    "jvp of RMS norm": Feature(tangents, "rms", FAST),
    "double backward": Feature(cotangents, "layer", FAST),
    "double backward of RMS norm": Feature(cotangents, "rms", FAST),
}

# test_any_call.py tests the other features in 16 bits.
OF_ALL_DTYPES = {"gamma_offset", "residual", "dsum, accumulate", "elements that count"}


# Products of jvp and the double backward may leave the range of float64 (test_contracts.py).
SECOND_ORDER = [title for title, row in FEATURES.items() if row.make in (tangents, cotangents)]
OUT_OF_RANGE = {
    "float64": {"F12", "F13", "F14", "F15", "F16", "F17", "F21"},
    "float32": {"F41"},
    "bfloat16": {"F41"},
}


def table(title, names=FINITE, lengths=(17,), rows=4, dtypes=DTYPES):
    """Return parameters for all families, dtypes and lengths that exist together."""
    return [
        pytest.param(title, name, dtype, n, rows, id=f"{title}-{name}-{dtype}-{n}")
        for name in names
        for dtype in dtypes
        for n in lengths
        if FAMILIES[name].applies(dtype, n)
        and not (title in SECOND_ORDER and name in OUT_OF_RANGE.get(dtype, ()))
    ]


@pytest.mark.parametrize(
    ("feature", "name", "dtype", "n", "rows"),
    [
        *table("layer norm", lengths=(1, 2, 3, 127), rows=2),
        # No 16 bits here: their errors are those of float64, rounded once more.
        *table("layer norm", lengths=(768,), rows=1, dtypes=("float32",)),
        # 128 elements are one block of NumPy's pairwise summation.
        *table("layer norm", ("F03", "F07", "F14"), (128, 129), 3),
        *table("layer norm", ("F07", "F11"), (2049,), 2, WIDE),
        *table("layer norm", LONG, (2049,), 1, ("float64",)),
        *table("layer norm", ("F07",), (LONGER,), 1, WIDE),
        # More rows than one block of the reference holds.
        *table("layer norm", ("F01",), (1031,), MORE // 1031 + 1, ("float32",)),
        *table("layer norm", MANY_ROWS, (7,), 300, ("float64",)),
        *table("RMS norm", lengths=(1, 40), rows=2),
        *(
            row
            for title in list(FEATURES)[2:]
            for row in table(title, dtypes=DTYPES if title in OF_ALL_DTYPES else WIDE)
        ),
    ],
)
def test_contract(feature, name, dtype, n, rows):
    """
    All backends keep the contract, for `rows` or as many as the family needs.

    y and dx of at most 32 bits have the same bits, except where float64 cannot decide them.
    """
    make, kind, roundings = FEATURES[feature]
    case = make_case(name, dtype, n, max(rows, FAMILIES[name].smallest_rows))
    if case.x.size > 2**13:
        # Integers take seconds for so many elements.
        roundings = FAST
    with np.errstate(over="ignore"):
        keywords = make(case, np.random.default_rng([FINITE.index(name), n]))
    results = assert_right(case, kind, roundings=roundings, **keywords)
    if make is nothing and kind == "layer" and dtype != "float64" and n > 100:
        # In short rows some elements cancel in every family (test_any_call.py has ordinary ones).
        one, *others = (arrays for (_, rounding), arrays in results.items() if rounding == "fast")
        for output in ("y", "dx"):
            if name not in CANCELLING[output]:
                assert all(one[output].tobytes() == other[output].tobytes() for other in others)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_case_has_its_dtype_and_is_repeatable(name, dtype):
    if why_not := FAMILIES[name].why_not(dtype, 33):
        pytest.skip(why_not)
    case, again = make_case(name, dtype, 33, rng=7), make_case(name, dtype, 33, rng=7)
    arrays, same = ([*drawn[:3], drawn.dy] for drawn in (case, again))
    assert_same(arrays, same)
    like_x = len(case.x), 33
    assert [array.shape for array in arrays] == [like_x, (33,), (33,), like_x]
    assert {array.dtype for array in arrays} == {dtype}
    finite = [np.isfinite(array.astype(np.float64)).all() for array in arrays]
    assert finite == [FAMILIES[name].finite, True, True, True]


# Promises that titles make about x.
PROMISES = {
    "F07": lambda x, f: np.unique(x).size == 2 and float(np.ptp(x)) == 2.0 ** (1 - f.digits),
    "F13": lambda x, f: (np.abs(x.astype(np.float64)) == f.largest).all(),
    "F16": lambda x, f: (np.abs(x.astype(np.float64)) < 2.0**f.emin).all(),
}
# The output that vanishes in the first row, and the size of its remainder, in roundings: dy and gamma * xhat are below
# 8 here; xhat itself is known to 2^-50.
VANISHING = {"F27": ("dx", 0), "F28b": ("dx", 8), "F32": ("y", 8), "F35": ("dgamma", 0)}


@pytest.mark.parametrize("name", [*PROMISES, *VANISHING])
def test_a_family_is_what_its_title_says(name, dtype):
    case, form = make_case(name, dtype, 257), format_of(dtype)
    if name in PROMISES:
        assert PROMISES[name](case.x, form)
    else:
        output, most = VANISHING[name]
        left = np.atleast_2d(exact_layer_norm(*case).rounded(output, np.float64))[0]
        assert np.abs(left).max() <= most * (2.0**-form.digits + 2.0**-50)


def test_a_million_positive_rows_do_not_drift(backend):
    """NumPy's float32 sum over axis 0 is off by 1.8e-4 here: it adds one row at a time."""
    dy = np.random.default_rng(0).random((1_000_000, 2), dtype=np.float32) + 0.5
    gamma, beta = np.ones(2, np.float32), np.zeros(2, np.float32)
    _, cache = layer_norm_forward(dy, gamma, beta, backend=backend)
    dbeta = layer_norm_backward(dy, cache, wrt=("beta",)).dbeta
    # The sum is below 2^21 and a multiple of 2^-24: exact in float64.
    expected = dy.sum(axis=0, dtype=np.float64)
    np.testing.assert_array_equal(dbeta, expected.astype(np.float32))


def test_real_data_agrees_with_another_implementation():
    """The bundled file has y, dx, dgamma, dbeta in float64, by another project's autodiff."""
    path = resources.files("stablenorm").joinpath("data/minilm_layer0_output.npz")
    with path.open("rb") as file:
        data = dict(np.load(file, allow_pickle=False))
    x, gamma, beta, dy = (data[k].astype(np.float64) for k in ("x", "gamma", "beta", "dy"))
    for name, array in compute((x, gamma, beta, float(data["eps"]), dy)).items():
        # The file is good to about 1e-13 of the largest.
        atol = 1e-12 * np.abs(data[name]).max()
        np.testing.assert_allclose(array, data[name], rtol=0, atol=atol)
