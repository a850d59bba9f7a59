"""`check` of other operations, of a forward alone, of nested arguments, and its example on paper."""

import textwrap
from typing import Any

import numpy as np
import pytest

from stablenorm.check import check_gradients, check_layer_norm
from stablenorm.cli import main
from stablenorm.figures import draw_sizes

SOFTMAX = """
import numpy as np
def softmax_forward(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p, p
def softmax_backward(dy, p):
    return (p * (dy - (p * dy).sum(-1, keepdims=True)),)
"""
NORM = """
import numpy as np
def layer_norm_forward(x, gamma, beta, eps):
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + eps)
    return gamma * (centered * rstd) + beta, (centered * rstd, rstd, gamma)
def layer_norm_backward(dy, cache):
    xhat, rstd, gamma = cache
    g, n = gamma * dy, dy.shape[-1]
    dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    return dx, (dy * xhat).reshape(-1, n).sum(0), dy.reshape(-1, n).sum(0)
"""
MISSING = NORM.replace("g - g.mean(-1, keepdims=True) -", "g -")


@pytest.fixture
def checked(tmp_path: Any, capsys: Any, monkeypatch: Any) -> Any:
    """Check a source text by the command; return the status and what it prints."""
    monkeypatch.chdir(tmp_path)

    def command(text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "mine.py").write_text(textwrap.dedent(text))
        status = main(["check", "mine.py", *options])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return command


def test_another_operation_is_checked_on_the_shapes_given(checked: Any) -> None:
    status, text = checked(SOFTMAX, "--args", "x=(4,8)")
    assert (status, "x: right (32 of 32 elements" in text) == (0, True), text
    wrong = SOFTMAX.replace("(p * (dy - (p * dy).sum(-1, keepdims=True)),)", "(p * dy,)")
    status, text = checked(wrong, "--args", "x=(4,8)")
    assert (status, "wrong gradient of x" in text) == (1, True), text


@pytest.mark.parametrize("given", ["x=(4,", "4, 8", "x='a'", "x=(0,)", ""])
def test_shapes_that_cannot_be_read_are_refused(checked: Any, given: str) -> None:
    status, text = checked(SOFTMAX, "--args", given or " ")
    assert (status, "--args must be names and shapes" in text) == (2, True), text


def test_an_operation_of_unknown_name_must_be_named(checked: Any) -> None:
    text = SOFTMAX.replace("softmax_backward", "other")
    status, said = checked(text, "--args", "x=(4,8)")
    assert (status, "name the backward with --backward" in said) == (2, True), said
    assert checked(text, "--args", "x=(4,8)", "--backward", "other")[0] == 0


def test_a_forward_alone_is_judged(checked: Any) -> None:
    alone = NORM.partition("def layer_norm_backward")[0]
    alone = alone.replace("+ beta, (centered * rstd, rstd, gamma)", "+ beta")
    status, text = checked(alone)
    assert (status, "y alone" in text) == (0, True), text
    status, text = checked(alone.replace("+ eps)", ")"))
    assert (status, "eps is missing" in text) == (1, True), text


def test_the_example_on_paper_shows_the_missing_term(checked: Any) -> None:
    status, text = checked(MISSING, "--example")
    assert status == 1
    assert "right dx = (-17, -49, 41, 25)/32" in text
    assert "yours    = (-21, -53, 37, 21)/32, too large by rstd mean(g)" in text
    assert "on paper" not in checked(MISSING)[1]
    assert "on paper" not in checked(NORM, "--example")[1]


def test_no_example_where_eps_is_fixed_inside(checked: Any) -> None:
    status, text = checked(MISSING.replace("+ eps)", "+ 1e-5)"), "--example")
    assert (status, "on paper" in text) == (1, False)


def test_arguments_may_be_dicts_and_lists_of_arrays() -> None:
    rng = np.random.default_rng(0)
    layer = {"weight": rng.standard_normal((3, 2)), "bias": [rng.standard_normal(2)]}

    def forward(x: Any, layer: Any) -> Any:
        return x @ layer["weight"] + layer["bias"][0], (x, layer)

    def backward(dy: Any, cache: Any) -> Any:
        x, layer = cache
        return dy @ layer["weight"].T, {"weight": x.T @ dy, "bias": [dy.sum(0)]}

    x = rng.standard_normal((4, 3))
    report = check_gradients(forward, backward, [x, layer], names=["x", "layer"], rng=0)
    assert report.passed, report
    assert [r.name for r in report.arguments] == ["x", "layer['weight']", "layer['bias'][0]"]

    def wrong(dy: Any, cache: Any) -> Any:
        dx, gradients = backward(dy, cache)
        return dx, gradients | {"bias": [dy.mean(0)]}

    report = check_gradients(forward, wrong, [x, layer], names=["x", "layer"], rng=0)
    assert [r.verdict for r in report.arguments] == ["PASS", "PASS", "FAIL"]


def test_noise_that_is_known_is_no_fault() -> None:
    noise = np.random.default_rng(1)

    def backward(dy: Any, x: Any) -> Any:
        return (dy * np.cos(x) * (1 + 1e-7 * noise.uniform(-1, 1, x.shape)),)

    def forward(x: Any) -> Any:
        return np.sin(x), x

    x = np.linspace(-1, 2, 8)
    assert not check_gradients(forward, backward, [x], rng=0).passed
    report = check_gradients(forward, backward, [x], rng=0, noise=1e-6)
    assert report.passed, report
    # A fault above the noise is still found.
    off = lambda dy, x: tuple(1.001 * g for g in backward(dy, x))
    assert not check_gradients(forward, off, [x], rng=0, noise=1e-6).passed


def test_the_errors_of_each_gradient_are_an_array() -> None:
    x = np.linspace(-1, 2, 8).reshape(2, 4)
    off = np.zeros_like(x)
    off[1, 2] = 0.25
    report = check_gradients(
        lambda x: (np.sin(x), x), lambda dy, x: (dy * np.cos(x) + off,), [x], rng=0
    )
    np.testing.assert_allclose(report.errors["args[0]"], off, atol=1e-9)
    assert "errors" not in report.as_dict()["arguments"][0]
    rng = np.random.default_rng(0)
    names: dict[str, Any] = {}
    exec(MISSING, names)  # noqa: S102
    forward, backward = names["layer_norm_forward"], names["layer_norm_backward"]
    x = rng.standard_normal((3, 5))
    report = check_layer_norm(forward, backward, x, np.ones(5), np.zeros(5))
    # mean(g) is missing: the error is the same in a row.
    errors = report.errors["x"]
    assert errors.shape == (3, 5)
    assert np.ptp(errors, axis=1).max() < 1e-12 < np.abs(errors).max()
    # Its picture: 3 rows of 5 columns, the powers of ten of the errors; blank where there is none.
    pytest.importorskip("matplotlib")
    axes, _ = report.plot("x").axes
    powers = axes.images[0].get_array()
    np.testing.assert_allclose(10.0**powers, np.abs(errors))
    assert draw_sizes("none", np.zeros(4)).axes[0].images[0].get_array().mask.all()
