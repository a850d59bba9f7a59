"""`diagnose`: what it predicts is held against what the methods return, and against the oracle."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from stablenorm import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm._diagnose import diagnose, fastest_instruments
from stablenorm.analysis._diagnose_conditions import BIT
from stablenorm.analysis._diagnose_count import PLAIN, count_rows, no_counts
from stablenorm.analysis._diagnose_methods import METHODS
from stablenorm.analysis._diagnose_predict import limits, measured_rows, room_for
from stablenorm.analysis._diagnose_simulate import measured_bits, simulate
from stablenorm.analysis._diagnose_sweep import sweep_rows
from stablenorm.analysis.families import FAMILIES, make_case
from stablenorm.kernels._sweep import measure_rows
from stablenorm.kernels._sweep import sweep_rows as compiled_sweep
from stablenorm.kernels._sweep_count import count_rows as compiled_count
from stablenorm.kernels._sweep_predict import HARD
from stablenorm.oracle import exact_layer_norm

DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64"]
NAMES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(scope="module")
def compared():
    """Bits predicted and measured, (methods, rows), over all families, dtypes and two lengths."""
    predicted, measured, ours = [], [], []
    for dtype in DTYPES:
        # The oracle takes 11 ms for a row of 768.
        for n in (127, 768) if dtype == "float32" else (127,):
            for family in FAMILIES.values():
                if not (family.finite and family.applies(dtype, n)):
                    continue
                case = make_case(family.name, dtype, n, rng=3)
                # A sum of many rows is one row more of the same.
                x = case.x[:4]
                exact = exact_layer_norm(x, eps=case.eps).rounded("y", np.float64)
                constant = (x == x[:, :1]).all(axis=1)
                predicted.append(diagnose(x, case.eps).per_row.lost)
                returned = [simulate(name, x, case.eps) for name in METHODS]
                measured.append([measured_bits(y, exact, constant) for y in returned])
                ours.append(measured_bits(layer_norm(x, eps=case.eps), exact, constant))
    return tuple(np.concatenate(parts, axis=-1) for parts in (predicted, measured, ours))


@pytest.mark.parametrize("name", METHODS)
def test_predicted_bits_are_those_that_the_method_loses(compared, name):
    predicted, measured, _ = compared
    place = list(METHODS).index(name)
    near = np.abs(predicted[place] - measured[place]) <= 2
    # The gate of the project: 2 bits, 95 % of rows. And losses there must be, or it says nothing.
    assert near.mean() >= 0.95
    assert (measured[place] >= 8).mean() > 0.1


def test_stablenorm_loses_none(compared):
    *_, ours = compared
    assert ours.max() < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33, 768])
def test_the_compiled_sweep_forms_the_sums_of_its_twin_bit_for_bit(dtype, n):
    rng = np.random.default_rng(n)
    x = (7 + rng.standard_normal((9, n))).astype(dtype)
    x[3] *= x.dtype.type(60.0)
    x[5, n // 2] = np.nan
    x[7, -1] = -np.inf
    actual, expected = compiled_sweep(x), sweep_rows(x)
    # mean, mean_lo and var are summed in another order, in float64.
    np.testing.assert_array_equal(actual[3:], expected[3:])
    scale = 1e-13 * np.nanmax(np.abs(expected[:3]), initial=1, where=np.isfinite(expected[:3]))
    np.testing.assert_allclose(actual[:3], expected[:3], rtol=0, atol=scale)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e6])
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("n", [3, 8, 63, 2500])
def test_compiled_predictions_are_those_of_the_twin(dtype, n, eps):
    """On rows of all conditions and scales, more than one group of sixteen, not a whole number."""
    rng = np.random.default_rng(n)
    scale, offset = 10.0 ** rng.uniform(-4, 3, (77, 1)), 10.0 ** rng.uniform(-4, 4, (77, 1))
    x = (scale * rng.standard_normal((77, n)) + offset).astype(dtype)
    x[5, 0] *= x.dtype.type(900.0)
    written, lost, marks = room_for(len(x))
    measure_rows(x, limits(n, x.dtype, eps), (written, lost, marks))
    expected = measured_rows(compiled_sweep(x), x, eps)
    easy = marks < HARD
    # Constant rows and overflow are the twin's own.
    assert easy.sum() >= 50
    np.testing.assert_array_equal(marks[easy], expected.marks[easy])
    # A logarithm in float32 on one side: half a unit in the last place of 53 is 2e-6.
    np.testing.assert_allclose(lost[:, easy], expected.lost[:, easy], rtol=0, atol=1e-5)
    for one, other in zip(written, expected[:5], strict=True):
        np.testing.assert_allclose(one[easy], other[easy], rtol=1e-12)


def test_rows_that_are_not_ordinary_are_the_twins_own():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 30)).astype(np.float32)
    x[1], x[2, 3], x[3, 4], x[4] = 7, np.nan, np.inf, 3e38
    x[5] *= 1e38
    wide = x.astype(float)
    for data in (x, np.vstack([wide, np.ldexp(wide[6:], -900), np.ldexp(wide[6:], 900)])):
        room = room_for(len(data))
        measure_rows(data, limits(30, data.dtype, 1e-5), room)
        marks = room.marks
        assert (marks[:40] >= HARD).nonzero()[0].tolist()[:4] == [1, 2, 3, 4]
        assert (marks[40:] >= HARD).all()
        # From the same sums: of float64, a rounding of the exact ones is of the size of a loss.
        hard = marks >= HARD
        expected = measured_rows(compiled_sweep(data[hard]), data[hard], 1e-5)
        for one, other in zip(diagnose(data).per_row, expected, strict=True):
            np.testing.assert_array_equal(one[..., hard], other)


def test_compiled_counts_are_those_of_the_twin():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((500, 20)) + 10.0 ** rng.uniform(-2, 20, (500, 1))
    x[3], x[4, 5], x[9] = 1.0, np.nan, 0.0
    for eps in (0.0, 1e-5):
        found = measured_rows(sweep_rows(x), x, eps)
        expected, actual = no_counts(53), no_counts(53)
        for _ in range(2):
            ranks = count_rows(found, *expected), compiled_count(found, *actual)
            np.testing.assert_array_equal(*ranks)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_median_is_not_above_the_worst():
    """It is the middle of a power of two: of a single row, up to 1.4 times what that row has."""
    x = 1.02 * 2.0**15 + np.array([[-1.0, 1.0] * 8])
    assert "3.3e+04 in the median row, 3.3e+04 in the worst" in str(diagnose(x))


def test_strided_and_unaligned_rows_are_swept_alike():
    base = np.random.default_rng(0).standard_normal((50, 700)).astype(np.float32)
    wide = np.zeros((50, 1400), np.float32)
    wide[:, :700] = base
    shifted = np.frombuffer(b"\0" + base.tobytes(), np.uint8)[1:].view(np.float32).reshape(50, 700)
    for view in (wide[:, :700], np.asfortranarray(base), shifted):
        np.testing.assert_array_equal(compiled_sweep(view), compiled_sweep(base))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
@pytest.mark.parametrize("n", [2, 3, 40])
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
    if n > 2:
        for along in (np.ones(n), x - x.mean()):
            g -= along * (g @ along) / (along @ along)
            g -= g.mean()
    steps = np.eye(n) * 1e-30j
    found = diagnose(x[None], eps).per_row
    for function, condition in ((xhat, found.condition_y[0]), (dx, found.condition_dx[0])):
        jacobian = np.array([function(x + step).imag / 1e-30 for step in steps]).T
        size = np.linalg.norm(function(x))
        if size < 1e-12:
            # n = 2, eps = 0: dx is 0.
            continue
        expected = np.linalg.norm(jacobian, 2) * np.linalg.norm(x) / size
        assert condition == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_one_element_has_no_condition_and_loses_nothing():
    found = diagnose(np.array([[3.0], [1e300]]))
    assert (found.per_row.condition_y == 0).all()
    assert (found.per_row.condition_dx == 0).all()
    two_pass, welford, one_pass = found.per_row.lost[:3]
    assert (two_pass == 0).all()
    assert (welford == 0).all()
    # The square of 1e300 is infinite.
    assert one_pass.tolist() == [0, 53]


def test_every_mark_is_set_by_its_row_alone():
    rng = np.random.default_rng(1)
    rows = {
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
    x = np.array(list(rows.values()), np.float32)
    found = diagnose(x, top=0)
    for place, name in enumerate(rows):
        assert found.per_row.marks[place] & BIT[name], name
    assert found.summary.marks["undefined"] == 0
    assert diagnose(x, eps=0.0).summary.marks["undefined"] == 1
    ordinary = diagnose(rng.standard_normal((5, 64)).astype(np.float32))
    assert not any(ordinary.summary.marks.values())


def test_worst_rows_come_in_order_and_across_blocks(monkeypatch):
    monkeypatch.setattr("stablenorm._diagnose._ROWS", 7)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((100, 96)).astype(np.float32)
    x[17] += 4e5
    x[60] += 2e4
    x[93, 5] = np.nan
    found = diagnose(x, top=3)
    assert [row.index for row in found.worst] == [93, 17, 60]
    assert found.worst[0].advice == (
        "row 93: 1 of 96 elements is NaN or infinite, the first at 5; y of the row is NaN in "
        "every layer norm"
    )
    assert found.worst[1].advice.startswith("row 17: |mean|/std = 4")
    assert "; a float32 two-pass loses 15 of 24 bits of y; " in found.worst[1].advice
    assert found.worst[1].advice.endswith("; stablenorm loses none")
    assert found.per_row.mean.shape == (100,)


def test_threads_and_blocks_change_nothing(monkeypatch):
    x = (30 + np.random.default_rng(4).standard_normal((3000, 50))).astype(np.float32)
    monkeypatch.setattr("stablenorm._diagnose.get_num_threads", lambda: 1)
    expected = diagnose(x)
    monkeypatch.setattr("stablenorm._diagnose.get_num_threads", lambda: 3)
    monkeypatch.setattr("stablenorm._diagnose._ROWS", 64)
    actual = diagnose(x)
    assert actual.as_dict() == expected.as_dict()
    for one, other in zip(actual.per_row, expected.per_row, strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_numba_the_twin_says_the_same(monkeypatch):
    x = (200 + np.random.default_rng(5).standard_normal((40, 300))).astype(np.float32)
    expected = diagnose(x)
    monkeypatch.setattr("stablenorm._diagnose.choose", lambda _: "numpy")
    assert fastest_instruments() is PLAIN
    actual = diagnose(x)
    assert [row.index for row in actual.worst] == [row.index for row in expected.worst]
    np.testing.assert_allclose(actual.per_row.lost, expected.per_row.lost, atol=0.01)


def test_float64_of_extreme_size_is_described_exactly():
    rng = np.random.default_rng(6)
    base = 3 + rng.standard_normal((1, 200))
    for power in (-1000, -600, 600, 1000):
        x = np.ldexp(base, power)
        found = diagnose(x, eps=0.0).per_row
        assert math.isclose(found.std[0], math.ldexp(base.std(), power), rel_tol=1e-13)
        assert math.isclose(found.condition_y[0], diagnose(base, eps=0.0).per_row.condition_y[0])


def test_saved_bfloat16_mean_loses_what_the_backward_loses():
    """The rebuilt xhat is not a fiction: dx by our backward with that mean is off as much."""
    x = (40 + np.random.default_rng(7).standard_normal((1, 768))).astype(np.float32)
    lost = diagnose(x).worst[0].lost["saved bfloat16"]
    dy = np.random.default_rng(8).standard_normal(x.shape).astype(np.float32)
    _, cache = layer_norm_forward(x)
    kept = cache.statistics
    mean, rstd = (v.astype(ml_dtypes.bfloat16).astype(float) for v in (kept.mean, kept.rstd))
    spoilt = cache._replace(statistics=kept._replace(mean=mean, rstd=rstd, mean_lo=0 * mean))
    exact, actual = (layer_norm_backward(dy, each).dx for each in (cache, spoilt))
    error = np.sqrt(np.mean((actual - exact) ** 2) / np.mean(exact**2))
    # The shift reaches dx only as far as dy projects on xhat, the factor whole: less, not nothing.
    assert 0 < lost - 24 - math.log2(error) < 9


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x": np.ones((2, 3), int)}, TypeError, "x must be float16, bfloat16, float32 or float64"),
        ({"dtype": "int8"}, TypeError, "dtype must be float16.*got int8"),
        ({"eps": -1.0}, ValueError, "eps must be finite and >= 0, got -1.0"),
        ({"eps": "a"}, TypeError, "eps must be a number"),
        ({"axis": 2}, ValueError, "axis must name axes of x, which has 2 dimensions"),
        ({"top": -1}, ValueError, "top must be >= 0, got -1"),
        ({"top": 1.5}, TypeError, "top must be an int"),
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
