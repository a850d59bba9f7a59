"""`stablenorm check`, the command: wrong use, each exit status, what it writes; never a traceback."""

import json
import sys

import pytest
from checked_files import CORE, USUAL, shown, write

from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal")


FORWARD = "def layer_norm_forward(x, gamma, beta, eps):\n    "
BACKWARD = "\ndef layer_norm_backward(dy, cache):\n    "
LAYER = "class {}:\n  def __init__(self, {}): self.gamma = {}\n  forward = backward = None\n"
BOTH = LAYER.format("LayerNorm", "n", "None") + LAYER.format("Norm", "n", "None")
FIXED = "import numpy\n" + LAYER.format("L", "n=4", "numpy.ones(4)")
NO_CACHE = f"{FORWARD}return x, x\ndef layer_norm_backward(dy, x, gamma=1, *, rstd): ..."


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("def layer_norm_forward(:", "", "SyntaxError: invalid syntax at mine.py:1\n"),
        ("\n\n1 / 0", "", "ZeroDivisionError: division by zero at mine.py:3\n"),
        ("import torch_is_not_here", "", "ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)", "", "SystemExit: 3 at mine.py:2; put what is not to be run"),
        ("input('Which one? ')", "", "EOFError: EOF when reading a line at mine.py:1"),
        ("\x00", "", "null bytes"),
        ("", "", "must have layer_norm_forward, or name one with --forward; it has no functions\n"),
        ("def ln(x): ...\ndef _ln(x): ...\nclass L: ...", "", "with --forward; it has ln\n"),
        (CORE + USUAL, "--backward b", "must have b, or name one with --backward; it has stat"),
        (f"{FORWARD}raise NotImplementedError{BACKWARD}0", "", "NotImplementedError: at mine.py:2"),
        (f"{FORWARD}exit(){BACKWARD}pass", "", "SystemExit: None at mine.py:2"),
        (f"{FORWARD}return x, x{BACKWARD}return dy @ dy,", "--shape 2 3", " at mine.py:4\n"),
        # What is left out: no cache, or one that comes apart.
        (NO_CACHE, "", "must take (dy, cache), got layer_norm_backward(dy, x, gamma=1, *, rstd)"),
        (f"def f(*args): 0{BACKWARD}0", "--forward f", "must take (x, gamma, beta, eps), got f(*a"),
        (f"f = max{BACKWARD}pass", "--forward f", "no signature found for builtin"),
        (BOTH, "", "no functions, and the classes LayerNorm, Norm: choose one with --class\n"),
        (BOTH, "--class L", "must be a class with forward(x) and backward(dy), got L; it has"),
        (BOTH, "--class Norm --forward stats", "--class must be given without --forward"),
        (LAYER.format("L", "a, n", "0"), "", "tried L(8): TypeError: L.__init__() missing"),
        (FIXED, "", "L(): gamma does not have 8 elements\n"),
    ],
)
def test_code_that_cannot_be_run_is_one_line(text, options, message, capsys):
    assert main(["check", write(text), *options.split()]) == 2
    out, err = shown(capsys)
    assert out == ""
    assert err.count("\n") == 2
    assert message in err


RMS = """
import numpy as np
def rms_norm_forward(x, weight, eps):
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return (1 + weight) * x * rstd, (x, weight, rstd)
def rms_norm_backward(dy, cache):
    x, weight, rstd = cache
    g, xhat = (1 + weight) * dy, x * rstd
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdims=True) MEAN)
    return dx, (dy * xhat).sum(tuple(range(dy.ndim - 1)))
"""


@pytest.mark.parametrize(
    ("term", "options", "status", "words"),
    [
        ("", "--gamma-offset 1", 0, "PASS: an error of"),
        ("", "", 1, "this is not the RMS normalization asked for"),
        ("- g.mean(-1, keepdims=True)", "--gamma-offset 1", 1, "mean of g is subtracted in dx"),
    ],
)
def test_an_rms_norm_without_a_beta_is_checked_as_one(term, options, status, words, capsys):
    file = write(RMS.replace("MEAN", term))
    assert main(["check", file, "--kind", "rms", *options.split()]) == status
    assert words in shown(capsys)[0]
    assert main(["check", file]) == 2
    assert "must have layer_norm_forward" in shown(capsys)[1]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "must return dx, dgamma, dbeta, got NoneType\n"),
        ("dx", "must return dx, dgamma, dbeta, got one array of shape ("),
        ("dx, dgamma", "must return dx, dgamma, dbeta, got tuple of 2\n"),
        ("dx, None, dbeta", "must return dx, dgamma, dbeta, got tuple of 3: no dgamma\n"),
        (
            "{'dx': dx, 'dw': dgamma}",
            "must return dx, dgamma, dbeta, got dict of dx, dw: no dbeta\n",
        ),
        ("{3: dx}", "got dict of 3: no dx"),
        ("dx, dgamma, 'no'", ""),
        ("dx.astype(complex), dgamma, dbeta", ""),
    ],
)
def test_a_backward_that_returns_anything_is_told_apart(returned, words, capsys):
    text = CORE + USUAL.replace(
        "return grads(dy, *cache)", f"dx, dgamma, dbeta = grads(dy, *cache)\n    return {returned}"
    )
    assert "dgamma" in text
    assert main(["check", write(text)]) == (2 if words else 1)
    assert words in shown(capsys)[1]


def test_helpers_beside_the_file_are_found_and_nothing_is_left_behind(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    write(CORE, "sub/my_own_core.py")
    write("from my_own_core import *\n" + USUAL, "sub/mine.py")
    try:
        assert main(["check", "sub/mine.py"]) == 0
    finally:
        sys.modules.pop("my_own_core", None)
    shown(capsys)
    assert sorted(p.name for p in (tmp_path / "sub").glob("*.py")) == ["mine.py", "my_own_core.py"]
    assert not list((tmp_path / "sub").glob("__pycache__/mine*"))


def test_plot_and_json_are_written_whole(tmp_path, capsys):
    moves = USUAL.replace("    return norm", "    import os; os.chdir('/')\n    return norm")
    assert moves != USUAL
    argv = ["check", write(CORE + moves), "--plot", "p.png", "--json", "r.json"]
    assert main(argv) == 0
    shown(capsys)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    held = json.loads((tmp_path / "r.json").read_text())
    assert held["report"]["verdict"] == "PASS"
    assert (held["shape"], held["eps"], held["dtype"]) == ([2, 3, 8], 1e-5, "float64")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "p.png", "r.json"]
