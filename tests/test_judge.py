"""The judge of kernels: its limits hold for right kernels, find faults, and name what lost the digits."""

import json
import re
from typing import Any

import numpy as np
import pytest
from judged_norms import FAULTS, KNOWN, ORDERS, inputs, run

from stablenorm import exact_layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.cli import main
from stablenorm.records import bfloat16
from stablenorm.testing import (
    FAMILIES,
    assert_layer_norm,
    assert_rms_norm,
    explain,
    judge,
    make_case,
    plain_backward,
    plain_forward,
)

DTYPES = "float32", "bfloat16", "float16", "float64"
FINITE = [name for name, family in FAMILIES.items() if family.finite]
F32 = np.float32


def normal(rows: int = 4, n: int = 768, offset: float = 0.0, dtype: Any = F32) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x, dy = offset + rng.standard_normal((rows, n)), rng.standard_normal((rows, n))
    gamma, beta = 1 + 0.1 * rng.standard_normal(n), 0.1 * rng.standard_normal(n)
    x, gamma, beta, dy = (a.astype(dtype) for a in (x, gamma, beta, dy))
    return x, gamma, beta, 1e-5, dy


def report_on(results: dict[str, Any], case: tuple[Any, ...], **declared: Any) -> Any:
    x, gamma, beta, eps, dy = case
    others = {name: results[name] for name in ("dx", "dgamma", "dbeta")}
    return explain(results["y"], x, gamma, beta, eps, dy=dy, **others, **declared)


# ---- limits ----


@pytest.mark.parametrize("bound", ["probable", "worst"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FINITE)
def test_right_kernels_keep_their_limits(name: str, dtype: str, bound: str) -> None:
    """In every order of sums, in all dtypes, on every family."""
    if FAMILIES[name].why_not(dtype, 100):
        pytest.skip("the family does not exist")
    case = make_case(name, dtype, 100)
    for total in ORDERS.values():
        with np.errstate(all="ignore"):
            results = run(*case, total=total)
        report = report_on(results, case, bound=bound)
        assert report.passed, report


def upwards(a: Any) -> Any:
    """Sum one by one, each sum rounded up: the worst that roundings can do to positive terms."""
    total = a[..., :1].astype(float)
    for j in range(1, a.shape[-1]):
        exact = total + a[..., j : j + 1]
        total = np.nextafter(exact.astype(F32), F32(np.inf)).astype(float)
    return total.astype(a.dtype)


def test_the_worst_case_is_reached_and_the_probable_one_is_exceeded() -> None:
    x, gamma, beta, eps, dy = normal(n=4096, offset=100.0)
    results = run(x, gamma, beta, eps, dy, total=upwards)
    assert_layer_norm(results["y"], x, gamma, beta, eps, bound="worst")
    worst = explain(results["y"], x, gamma, beta, eps, bound="worst").outputs["y"].shares.max()
    # The partial sums of a running sum are half of the whole, on average; nextafter is up to 2 u.
    assert 0.3 < worst <= 1
    with pytest.raises(AssertionError, match="FAIL"):
        assert_layer_norm(results["y"], x, gamma, beta, eps)


def test_a_running_sum_of_like_terms_is_found_by_its_order() -> None:
    """0.1 as often as there are rows: the roundings have the same sign, and no order but this errs so."""

    def back(dy: Any, cache: Any) -> Any:
        dx, dgamma, _ = plain_backward(dy, cache)
        return dx, dgamma, np.add.accumulate(dy, axis=0)[-1]

    few = {"dtypes": ["float32"], "families": ["F01"], "lengths": [33]}
    assert judge(forward, back, **few).passed
    blocks = judge(forward, back, **few, sums=640)
    assert [v.problem.family for v in blocks.verdicts if not v.passed] == ["many rows"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_exceeds_a_limit(fault: str) -> None:
    """On at least one input of two kinds: offset, or a variance around eps."""
    failed = []
    for offset, scale in ((100.0, 1.0), (0.0, 1e-2), (3.0, 1e-2)):
        x, gamma, beta, eps, dy = normal(n=100, offset=offset)
        case = ((scale * x).astype(F32), gamma, beta, eps, dy)
        failed.append(not report_on(run(*case, change=FAULTS[fault]), case).passed)
    assert any(failed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_one_wrong_element_fail(dtype: str) -> None:
    x, gamma, beta, eps, _ = normal(n=33, dtype=bfloat16 if dtype == "bfloat16" else dtype)
    y = exact_layer_norm(x, gamma, beta, eps).rounded("y", x.dtype)
    assert_layer_norm(y, x, gamma, beta, eps)
    with pytest.raises(AssertionError):
        assert_layer_norm(0 * y, x, gamma, beta, eps)
    y[2, -1] = np.nan
    with pytest.raises(AssertionError, match=r"element \(2, 32\)"):
        assert_layer_norm(y, x, gamma, beta, eps)


def test_a_correctly_rounded_result_uses_none_of_its_limit() -> None:
    x, gamma, beta, eps, _ = normal(dtype=np.float16)
    y = exact_layer_norm(x, gamma, beta, eps).rounded("y", np.float16)
    assert explain(y, x, gamma, beta, eps).outputs["y"].shares.max() == 0


def test_a_cast_before_gamma_must_be_declared() -> None:
    """Hugging Face's order rounds xhat to bfloat16, then its product with gamma."""
    x, gamma, beta, eps, dy = normal(dtype=bfloat16)
    y = run(x, gamma, 0 * beta, eps, dy, kind="rms", cast="xhat")["y"]
    assert_rms_norm(y, x, gamma, eps=eps, cast="xhat")
    with pytest.raises(AssertionError):
        assert_rms_norm(y, x, gamma, eps=eps)


def test_statistics_in_bfloat16_must_be_declared() -> None:
    case = normal()
    results = run(*case, change=FAULTS["rstd in bfloat16"])
    assert not report_on(results, case).passed
    assert report_on(results, case, statistics=bfloat16).passed


def test_what_overflows_is_beyond_the_declared_arithmetic() -> None:
    case = make_case("F12", "float32", 100)
    with np.errstate(all="ignore"):
        report = report_on(run(*case), case)
    assert report.passed
    assert report.outputs["y"].beyond == 1
    assert "beyond the declared arithmetic" in str(report)


def test_our_own_norms_are_within_the_limits() -> None:
    x, gamma, beta, eps, dy = normal(offset=1e4)
    y, cache = layer_norm_forward(x, gamma, beta, eps)
    dx, dgamma, dbeta = layer_norm_backward(dy, cache)
    # float64 inside, rounded once.
    kept = {"dy": dy, "dx": dx, "dgamma": dgamma, "dbeta": dbeta, "statistics": "float64"}
    assert_layer_norm(y, x, gamma, beta, eps, **kept)


# ---- where the digits went ----


@pytest.mark.parametrize("name", KNOWN)
def test_the_largest_part_is_named(name: str) -> None:
    """No part is named wrongly: 36 norms of known arithmetic."""
    known = KNOWN[name]
    case = inputs(known)
    with np.errstate(all="ignore"):
        report = report_on(run(*case, **known.options), case)
    account = report.accounts[known.output]
    assert max(account.shares, key=lambda part: account.shares[part]) == known.part, account
    assert not known.mistake or known.mistake in " ".join(account.mistakes)


def test_a_failure_shows_element_error_limit_cause_and_advice() -> None:
    x, gamma, beta, eps, dy = normal()
    y = run(x, gamma, beta, eps, dy, change=FAULTS["rstd in bfloat16"])["y"]
    with pytest.raises(AssertionError) as caught:
        assert_layer_norm(y, x, gamma, beta, eps)
    text = str(caught.value)
    assert re.search(r"y\[\d, \d+\] is -?\d\.\d+, exactly -?\d\.\d+", text)
    assert re.search(r"off by [\d ]+ ulp of float32; the limit is [\d ]+\n", text)
    assert "all of it is rstd, off by up to 0." in text
    assert text.endswith("kept in bfloat16. Keep it in float32.")


def test_what_16_bits_hide_is_said() -> None:
    x, gamma, beta, eps, dy = normal(dtype=bfloat16)
    report = explain(run(x, gamma, beta, eps, dy)["y"], x, gamma, beta, eps)
    assert "Not visible in bfloat16" in str(report.accounts["y"])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cast": "z"}, ValueError, "cast must be y or xhat, got 'z'"),
        ({"bound": "best"}, ValueError, "bound must be probable or worst"),
        ({"sums": 0}, ValueError, 'sums must be "any" or a number of additions, got 0'),
        ({"statistics": "int32"}, TypeError, "statistics must be float16"),
        ({"kind": "batch"}, ValueError, "kind must be layer or rms"),
        ({"dx": np.zeros((1, 2), F32)}, ValueError, "dy must be given for dx"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: Any, words: str) -> None:
    x = np.ones((1, 2), F32) * [1, 2]
    with pytest.raises(error, match=words):
        explain(x.astype(F32), x.astype(F32), **arguments)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"y must have shape \(1, 2\), got \(2,\)"):
        explain(np.zeros(2, F32), np.zeros((1, 2), F32))


def test_the_oracle_gives_floats_within_an_ulp() -> None:
    for name in ("F01", "F13", "F16", "F28b", "F41"):
        exact = exact_layer_norm(*make_case(name, "float64", 20))
        for output in ("y", "dx", "dgamma", "dbeta", "xhat"):
            near, rounded = exact.floats(output), exact.rounded(output, np.float64)
            np.testing.assert_array_max_ulp(near, rounded, 1)


def test_no_rows_and_short_rows_are_judged() -> None:
    for shape in ((0, 4), (3, 1), (5,), (2, 3, 7)):
        x = np.linspace(1, 2, int(np.prod(shape)), dtype=F32).reshape(shape)
        report = explain(plain_forward(x)[0], x)
        assert report.passed, report
        assert str(report)


# ---- judge ----


def forward(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    return plain_forward(x, gamma, beta, eps)


def one_pass(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
    return plain_forward(x, gamma, beta, eps, "one-pass")


FEW = {"dtypes": ["float32"], "families": ["F01", "F03", "F12"], "lengths": [3, 33, 129]}
ONE = {"dtypes": ["float32"], "families": ["F01"], "lengths": [64, 33, 129, 257, 65]}


def test_judge_passes_a_right_kernel_and_fails_a_wrong_one() -> None:
    right = judge(forward, plain_backward, **FEW)
    assert right.passed, right
    wrong = judge(one_pass, plain_backward, **FEW)
    assert not wrong.passed
    assert {v.problem.family for v in wrong.verdicts if not v.passed} >= {"F03"}
    assert "F03" in wrong.mistakes["rstd: the variance is E[x**2] - mean**2"]


def test_the_worst_case_can_be_pasted_into_a_test() -> None:
    report = judge(one_pass, plain_backward, dtypes=["float32"], families=["F03"], lengths=[129])
    lines = report.worst.split("to paste into a test:\n")[1]
    names = {"make_case": make_case, "forward": one_pass, "backward": plain_backward}
    names |= {"assert_layer_norm": assert_layer_norm}
    with pytest.raises(AssertionError, match="FAIL"):
        exec("\n".join(line.strip() for line in lines.split("\n")), names)  # noqa: S102


def test_every_pair_of_family_length_dtype_and_layout_is_judged() -> None:
    report = judge(
        lambda x, *_: x, dtypes=["float32", "float16"], families=["F01", "F02", "F03", "F38"]
    )
    problems = [v.problem for v in report.verdicts][:-2]
    for first, second in (
        ("family", "n"),
        ("family", "dtype"),
        ("n", "layout"),
        ("dtype", "layout"),
    ):
        values = [{getattr(p, name) for p in problems} for name in (first, second)]
        pairs = {(getattr(p, first), getattr(p, second)) for p in problems}
        assert len(pairs) == len(values[0]) * len(values[1]), (first, second)


def test_what_a_kernel_declines_is_no_failure() -> None:
    def picky(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        if x.shape[-1] % 32 or not x.flags.c_contiguous:
            msg = "n must be a multiple of 32, and x contiguous"
            raise ValueError(msg)
        return plain_forward(x, gamma, beta, eps)[0]

    report = judge(picky, **ONE)
    assert report.passed
    assert "declined: ValueError: n must be a multiple of 32" in str(report)
    assert not judge(lambda *_: 1 / 0, **ONE).passed


def test_a_wrong_shape_or_a_read_beside_the_row_fails() -> None:
    def flat(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        return plain_forward(x, gamma, beta, eps)[0].reshape(-1)

    def beside(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        whole = x if x.base is None else x.base
        rows = whole.reshape(-1)[: x.size].reshape(x.shape)
        return plain_forward(rows, gamma, beta, eps)[0]

    assert not judge(flat, **ONE).passed
    report = judge(beside, **ONE)
    assert {v.problem.layout for v in report.verdicts if not v.passed} == {
        "rows apart", "one element off", "columns apart",
    }  # fmt: skip


def test_other_bits_are_reported() -> None:
    calls = []

    def unsteady(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        calls.append(None)
        y, _ = plain_forward(x, gamma, beta, eps)
        return np.nextafter(y, F32(len(calls) % 2))

    report = judge(unsteady, **ONE)
    assert report.same["twice"] == "other bits of float32 y"


def test_a_converter_takes_arrays_to_the_kernel_and_back() -> None:
    class Tensor:
        def __init__(self, array: Any):
            self.array, self.shape = array, array.shape

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self.array

    def on_tensors(x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        return Tensor(plain_forward(x.array, gamma.array, beta.array, eps)[0])

    assert judge(on_tensors, **ONE, convert=Tensor).passed


# ---- the command ----

RIGHT = """
from stablenorm.testing import plain_backward, plain_forward
def layer_norm_forward(x, gamma, beta, eps): return plain_forward(x, gamma, beta, eps)
def layer_norm_backward(dy, cache): return plain_backward(dy, cache)
"""
RMS = """
import numpy as np
def rms_norm(x, gamma, eps):
    wide = x.astype(np.float32)
    xhat = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(eps))
    return (gamma * xhat).astype(x.dtype)
"""


@pytest.fixture
def judged(tmp_path: Any, capsys: Any, monkeypatch: Any) -> Any:
    """Judge a source text by the command; return the status and what it prints."""
    monkeypatch.chdir(tmp_path)

    def command(text: str, *options: str, name: str = "kernel.py") -> tuple[int, str]:
        (tmp_path / "kernel.py").write_text(text)
        status = main(["judge", name, "--dtypes", "float32", "--lengths", "33", "129", *options])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return command


def test_the_command_passes_a_right_kernel(judged: Any, tmp_path: Any) -> None:
    status, text = judged(RIGHT, "--families", "F01", "F03", "--json", "judge.json")
    assert status == 0, text
    assert "PASS" in text
    assert json.loads((tmp_path / "judge.json").read_text())["passed"] is True


def test_the_command_fails_a_wrong_kernel_with_annotations(judged: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    wrong = RIGHT.replace("beta, eps)\ndef", "beta, eps, 'one-pass')\ndef")
    status, text = judged(wrong, "--families", "F01", "F03")
    assert status == 1
    assert "::error file=kernel.py,title=stablenorm judge::F03, float32" in text


def test_the_command_judges_a_forward_alone(judged: Any) -> None:
    status, text = judged(RMS, "--families", "F01")
    assert status == 0, text
    assert "dx" not in text


def test_the_command_takes_a_module_and_functions(judged: Any) -> None:
    name = "kernel:layer_norm_forward,layer_norm_backward"
    status, text = judged(RIGHT, "--families", "F01", name=name)
    assert status == 0, text


def test_the_command_says_what_it_lacks(judged: Any) -> None:
    status, text = judged("x = 1\n")
    assert status == 2
    assert "must have layer_norm_forward" in text
    assert len(text.strip().split("\n")) == 2
