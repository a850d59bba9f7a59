"""`diagnose`: its predictions are compared with what the methods lose, against the exact y."""

import json
import math

import lost_bits
import ml_dtypes
import numpy as np
import pytest

import stablenorm.diagnosis
from stablenorm import diagnose, layer_norm
from stablenorm.diagnosis import methods as rows
from stablenorm.diagnosis.methods import MARKS, TITLES


@pytest.fixture(scope="module")
def cases():
    """All families in all dtypes, and in float32 of another length."""
    return [*lost_bits.cases(lengths=(127,)), *lost_bits.cases(("float32",), (768,))]


# In sixteen running sums, as vectorized code, and pairwise.
@pytest.mark.parametrize("lanes", [16, 1024])
@pytest.mark.parametrize("method", TITLES)
def test_predicted_bits_are_those_that_the_method_loses(method, lanes, cases):
    predicted = np.concatenate([case.predicted[method] for case in cases])
    measured = np.concatenate([lost_bits.measure(case, method, lanes) for case in cases])
    # The gate of the project: 2 bits, 95 % of rows. And losses there must be, or it says nothing.
    assert (np.abs(predicted - measured) <= 2).mean() >= 0.95
    assert (measured >= 8).mean() > 0.1


def test_stablenorm_loses_none(cases):
    for case in cases:
        y = layer_norm(case.x, eps=case.eps, backend="numpy")
        assert lost_bits.measure_bits(y, case).max() < 0.5, case.family


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 2, 769])
def test_mean_and_std_are_exact(n, dtype):
    x = (5 + np.random.default_rng(n).standard_normal((9, n))).astype(dtype)
    found, exact = rows.describe_rows(x), x.astype(np.longdouble)
    np.testing.assert_allclose(found.mean + found.mean_lo, exact.mean(axis=1), rtol=1e-15)
    np.testing.assert_allclose(found.std, exact.std(axis=1), rtol=1e-13)


def is_same(actual, expected):
    pairs = zip(actual.per_row, expected.per_row, strict=True)
    return actual.as_dict() == expected.as_dict() and all(
        np.array_equal(one, other) for one, other in pairs
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layout_byte_order_threads_and_blocks_change_nothing(dtype, monkeypatch):
    base = (30 + np.random.default_rng(0).standard_normal((1000, 70))).astype(dtype)
    raw = np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:]
    monkeypatch.setattr(stablenorm.diagnosis, "get_num_threads", lambda: 1)
    expected = diagnose(base)
    monkeypatch.setattr(stablenorm.diagnosis, "get_num_threads", lambda: 3)
    monkeypatch.setattr(stablenorm.diagnosis, "BLOCK", 64 * 70)
    for view in (
        base,
        np.hstack([base, base])[:, :70],
        np.asfortranarray(base),
        raw.view(dtype).reshape(base.shape),
        base.astype(base.dtype.newbyteorder(">")),
    ):
        assert is_same(diagnose(view), expected)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("n", [3, 40])
def test_condition_numbers_are_the_norms_of_the_derivatives(n, eps):
    """By complex steps: the norm of dy/dx, and of d(dx)/dx for a g at right angles to 1 and xhat."""
    rng = np.random.default_rng(n)
    x = 5 + rng.standard_normal(n)

    def xhat(v):
        c = v - v.mean()
        return c / np.sqrt((c * c).mean() + eps)

    def dx(v):
        c = v - v.mean()
        rstd = 1 / np.sqrt((c * c).mean() + eps)
        return rstd * (g - g.mean() - c * rstd * (g * c * rstd).mean())

    g = rng.standard_normal(n)
    for along in (np.ones(n), x - x.mean()):
        g -= along * (g @ along) / (along @ along)
        g -= g.mean()
    steps = np.eye(n) * 1e-30j
    found = diagnose(x[None], eps).per_row
    for function, condition in ((xhat, found.condition_y[0]), (dx, found.condition_dx[0])):
        jacobian = np.array([function(x + step).imag / 1e-30 for step in steps]).T
        size = np.linalg.norm(function(x))
        expected = np.linalg.norm(jacobian, 2) * np.linalg.norm(x) / size
        assert condition == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_every_mark_is_set_by_its_row_alone():
    rng = np.random.default_rng(1)
    special = {
        "not finite": np.full(64, np.inf),
        "constant": np.full(64, 3.0),
        "var below eps": 1e-3 * rng.standard_normal(64),
        "dominating outlier": np.where(np.arange(64) == 9, 1e4, rng.standard_normal(64)),
        "sum overflows": np.full(64, 3e38) * (1 - 1e-4 * rng.random(64)),
        "squares overflow": 1e20 * (1 + 1e-6 * rng.standard_normal(64)),
        "deviations overflow": 1e20 * rng.standard_normal(64),
        "squares underflow": 1e-30 * rng.standard_normal(64),
        "float16 overflows": 1e5 + rng.standard_normal(64),
    }
    x = np.array(list(special.values()), np.float32)
    found = diagnose(x, top=0)
    for place, name in enumerate(special):
        assert found.per_row.marks[list(MARKS).index(name), place], name
    assert found.summary.marks["undefined"] == 0
    assert diagnose(x, eps=0.0).summary.marks["undefined"] == 1
    ordinary = diagnose(rng.standard_normal((5, 64)).astype(np.float32))
    assert not any(ordinary.summary.marks.values())


def test_worst_rows_come_in_order_and_across_blocks(monkeypatch):
    monkeypatch.setattr(stablenorm.diagnosis, "BLOCK", 7 * 96)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((100, 96)).astype(np.float32)
    x[17] += 4e5
    x[60] += 2e4
    x[93, 5] = np.nan
    found = diagnose(x, top=3)
    assert [row.index for row in found.worst] == [93, 17, 60]
    assert found.worst[0].advice == "row 93: not finite: 1 of 96 elements, the first at 5"
    assert found.worst[1].advice.startswith("row 17: |mean|/std = 4")
    assert "; a float32 two-pass loses 15 of 24 bits of y, " in found.worst[1].advice
    assert found.per_row.mean.shape == (100,)


def test_float64_of_extreme_size_is_described_exactly():
    rng = np.random.default_rng(6)
    base = 3 + rng.standard_normal((1, 200))
    for power in (-1000, -600, 600, 1000):
        x = np.ldexp(base, power)
        found = diagnose(x, eps=0.0).per_row
        assert math.isclose(found.std[0], math.ldexp(base.std(), power), rel_tol=1e-13)
        assert math.isclose(found.condition_y[0], diagnose(base, eps=0.0).per_row.condition_y[0])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x": np.ones((2, 3), int)}, TypeError, "x must be float16, bfloat16, float32 or float64"),
        ({"dtype": "int8"}, TypeError, "dtype must be float16.*got int8"),
        ({"eps": -1.0}, ValueError, "eps must be finite and >= 0, got -1.0"),
        ({"top": -1}, ValueError, "top must be at least 0, got -1"),
        ({"x": np.ones((2, 0))}, ValueError, "at least one element along axis 1"),
        ({"x": np.ma.ones((2, 3))}, TypeError, "got a masked one"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        diagnose(**{"x": np.ones((2, 3)), **arguments})


def test_no_rows_and_nothing_but_nan_work():
    assert "no rows" in str(diagnose(np.zeros((0, 5))))
    found = diagnose(np.full((3, 5), np.nan))
    assert "not finite: 3 rows" in str(found)
    assert json.loads(found.to_json())["worst"][0]["mean"] == "nan"


@pytest.mark.parametrize(
    ("row", "eps", "words"),
    [
        ([1, np.inf, np.nan], 1e-5, "not finite: 2 of 3 elements, the first at 1"),
        ([4, 4, 4], 0.0, "undefined (constant, and eps is 0: y is 0/0, NaN)"),
        ([4, 4, 4], 1e-5, "constant (all elements equal: y is beta); a float32 two-pass loses 0"),
        ([3e20, -3e20, 0], 1e-5, "squares overflow (the sum of x^2 overflows float32); "),
        ([1, 2, 4], 1e-5, "|mean|/std = 1.9; a float32 two-pass loses 1 of 24 bits of y, "),
    ],
)
def test_advice_names_what_is_special(row, eps, words):
    found = diagnose(np.array([row], np.float32), eps)
    assert found.worst[0].advice.startswith(f"row 0: {words}")


def test_dtype_judges_the_data_as_what_it_would_be():
    x = 1e3 + np.random.default_rng(9).standard_normal((3, 100))
    assert diagnose(x, dtype=np.float16).dtype == "float16"
    assert diagnose(x * 1e3, dtype="float16").summary.marks["not finite"] == 3
    assert diagnose(x, dtype=ml_dtypes.bfloat16).bits == 8


def test_axes_are_numpys():
    x = np.random.default_rng(10).standard_normal((4, 5, 6))
    moved = diagnose(np.ascontiguousarray(np.moveaxis(x, 1, -1)))
    np.testing.assert_array_equal(diagnose(x, axis=1).per_row.std, moved.per_row.std)
    assert diagnose(x, axis=(0, 2)).n == 24


def test_json_is_whole_and_the_picture_is_drawn(tmp_path):
    x = np.random.default_rng(11).standard_normal((30, 40)).astype(np.float32)
    found = diagnose(x)
    held = json.loads(found.to_json(tmp_path / "d.json"))
    assert json.loads((tmp_path / "d.json").read_text()) == held
    assert sum(held["summary"]["lost"]["two-pass"]) == 30
    for kind in ("png", "svg"):
        found.plot(tmp_path / f"d.{kind}")
        assert (tmp_path / f"d.{kind}").stat().st_size > 10_000


def test_the_median_row_is_said_to_be_no_worse_than_the_worst(rng):
    """Its condition number is known to a power of two: "below 2, 1 in the worst"."""
    said = str(diagnose(rng.standard_normal((8, 64))))
    assert "at most 1 in the median row, 1 in the worst" in said


@pytest.mark.parametrize("method", ["one-pass", "saved bfloat16", "float16"])
def test_predicted_bits_of_an_rms_norm_are_those_that_the_method_loses(method, rng):
    # From squares that are 0 in float16 to squares beyond it.
    x = np.ldexp(rng.standard_normal((24, 768)), np.arange(-14, 10)[:, None]).astype(np.float32)
    eps, wide = 1e-6, x.astype(np.float64)
    exact = wide / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + eps)
    with np.errstate(all="ignore"):
        square = np.square(x).astype(np.float16 if method == "float16" else x.dtype)
        kind = square.dtype.type
        var = square.sum(axis=1, keepdims=True, dtype=np.float32) / np.float32(768)
        rstd = kind(1) / np.sqrt(var.astype(kind) + kind(eps))
        if method == "saved bfloat16":
            rstd = rstd.astype(ml_dtypes.bfloat16)
        y = x * rstd.astype(np.float32)
        errors = np.sqrt(np.mean((y - exact) ** 2, axis=1) / np.mean(exact**2, axis=1))
        measured = np.clip(24 + np.log2(errors), 0, 24)
    found = diagnose(x, eps, kind="rms", top=1)
    predicted = found.per_row.lost[list(found.methods).index(method)]
    assert np.abs(predicted - measured).max() <= 2
    assert (measured.max() > 8) == (method != "one-pass")
    assert found.as_dict()["kind"] == "rms"


def test_every_mark_of_an_rms_norm_is_set_by_its_row():
    x = np.ones((8, 768), np.float32)
    x[0, 3], x[1], x[3, 5] = np.nan, 0, 100
    x[2] *= 1e-3
    x[4], x[5], x[6, 0] = 1e20, 1e-25, 256
    found = diagnose(x, 1e-5, kind="rms")
    marks = {row.index: set(row.marks) for row in found.worst}
    beyond, below = "float16 squares overflow", "mean(x^2) below eps"
    assert marks == {
        0: {"not finite"},
        1: {"zero"},
        2: {below},
        3: {"dominating outlier"},
        4: {"squares overflow", beyond},
        5: {"squares underflow", below},
        6: {"dominating outlier", beyond},
        7: set(),
    }
    assert {row.mean for row in found.worst if row.index} == {0.0}
    assert "y is 0/0" in str(diagnose(np.zeros((1, 8)), 0.0, kind="rms"))
    with pytest.raises(ValueError, match="kind must be layer or rms, got 'batch'"):
        diagnose(x, kind="batch")
