"""`stablenorm check` on what people write, right and wrong."""

import json
import re

import numpy as np
import pytest
from checked_files import CORE, USUAL, shown, write

from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal")

STYLES = {
    "dict cache, dict of gradients, prints": """
def layer_norm_forward(x, gamma, beta, eps=1e-6):
    print("shape", x.shape)
    y, (xhat, rstd, _) = norm(x, gamma, beta, eps)
    return y, {"xhat": xhat, "rstd": rstd, "gamma": gamma}
def layer_norm_backward(dout, cache):
    dx, dw, db = grads(dout, cache["xhat"], cache["rstd"], cache["gamma"])
    return {"dbias": db, "dx": dx, "dweight": dw}
""",
    "CS231n: rows only, ln_param": """
def layernorm_forward(x, gamma, beta, ln_param):
    N, D = x.shape
    return norm(x, gamma, beta, ln_param.get("eps", 1e-5))
def layernorm_backward(dout, cache):
    return grads(dout, *cache)
""",
    "NamedTuples, in another order": """
from typing import NamedTuple
class Cache(NamedTuple):
    xhat: object
    rstd: object
    weight: object
class Grads(NamedTuple):
    grad_bias: object
    grad_weight: object
    grad_input: object
def layer_norm_forward(input, weight, bias, epsilon):
    y, cache = norm(input, weight, bias, epsilon)
    return y, Cache(*cache)
def layer_norm_backward(grad_output, ctx):
    return Grads(*grads(grad_output, ctx.xhat, ctx.rstd, ctx.weight)[::-1])
""",
    "objects, a data class": """
from dataclasses import dataclass
class Saved: pass
@dataclass
class Gradients:
    dgamma: object
    dbeta: object
    dx: object
def layer_norm_forward(x, gamma, beta, eps):
    saved = Saved()
    y, (saved.xhat, saved.rstd, saved.gamma) = norm(x, gamma, beta, eps)
    return y, saved
def layer_norm_backward(saved, dy):
    dx, dgamma, dbeta = grads(dy, saved.xhat, saved.rstd, saved.gamma)
    return Gradients(dgamma, dbeta, dx)
""",
    "no cache: arguments by name": """
def layer_norm_forward(x, gamma, beta, eps):
    return gamma * stats(x, eps)[0] + beta
def layer_norm_backward(gamma, x, dy, eps=1e-5):
    return grads(dy, *stats(x, eps), gamma)
""",
    "backward(dy, *cache)": USUAL,
    "eps fixed inside": """
def layer_norm_forward(x, gamma, beta):
    return norm(x, gamma, beta, 1e-3)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "keyword-only eps": """
def layer_norm_forward(x, gamma, beta, *, axis=-1, eps):
    return norm(x, gamma, beta, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "an axis in the middle": """
def layer_norm_forward(x, axis=-1, weight=None, bias=None, eps=1e-5):
    return norm(x, weight, bias, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "float32 inside": """
def layer_norm_forward(x, gamma, beta, eps=1e-5):
    return norm(*(a.astype(np.float32) for a in (x, gamma, beta)), np.float32(eps))
def layer_norm_backward(dy, cache):
    return grads(dy.astype(np.float32), *cache)
""",
    "three axes only": """
def layer_norm_forward(x, gamma, beta, eps):
    B, T, D = x.shape
    return norm(x, gamma, beta, eps)
def layer_norm_backward(dy, cache):
    assert dy.ndim == 3
    return grads(dy, *cache)
""",
    "a dict of parameters": """
def layer_norm_forward(x, params):
    return norm(x, params["weight"], params["bias"], params["eps"])
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "no beta": """
def layer_norm_forward(x, gamma, eps):
    return norm(x, gamma, 0, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)[:2]
""",
    "no parameters": """
def layer_norm_forward(x, eps):
    return norm(x, 1.0, 0, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)[0]
""",
    "names that say nothing": """
def layer_norm_forward(p1, p2, p3, p4):
    return norm(p1, p2, p3, p4)
def layer_norm_backward(p1, p2):
    return grads(p1, *p2)
""",
    "side effects at import": """
import os, sys, warnings
np.seterr(all="raise")
warnings.simplefilter("error")
np.random.seed(0)
os.chdir("/")
sys.stdout.reconfigure(encoding="utf-8")
sys.stdout.write("imported as " + __name__ + " with " + repr(len(sys.argv)) + " argument")
def layer_norm_forward(x, gamma, beta, eps):
    warnings.warn("slow")
    return norm(x, gamma, beta, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
if __name__ == "__main__":
    sys.exit("this is not to be run")
""",
}


@pytest.mark.parametrize("style", STYLES)
def test_right_code_of_any_style_passes(style, capsys):
    assert main(["check", write(CORE + STYLES[style])]) == 0, capsys.readouterr()
    out, err = shown(capsys)
    # What the file prints is not among what the check does.
    assert out.startswith("mine.py: layer")
    assert "PASS" in out
    assert "FAIL" not in out
    assert err == "stablenorm: running the code of mine.py\n"


@pytest.mark.parametrize("style", STYLES)
def test_wrong_code_of_any_style_fails(style, capsys):
    assert "mean = g.mean(" in CORE
    wrong = CORE.replace("mean = g.mean(", "mean = 0.99 * g.mean(")
    assert main(["check", write(wrong + STYLES[style])]) == 1, capsys.readouterr()
    out, _ = shown(capsys)
    assert "FAIL" in out
    assert "x" in out


@pytest.mark.parametrize("style", ["no cache: arguments by name", "a dict of parameters"])
def test_a_mistake_in_dgamma_is_not_taken_for_one_in_dx(style, capsys):
    wrong = CORE.replace("(dy * xhat).sum(lead)", "(dy * xhat).sum(lead) * 1.01")
    assert main(["check", write(wrong + STYLES[style]), "--json", "out.json"]) == 1
    shown(capsys)
    with open("out.json", encoding="utf-8") as file:  # noqa: PTH123
        arguments = json.load(file)["report"]["arguments"]
    assert [a["verdict"] for a in arguments] == ["PASS", "FAIL", "PASS"]


def test_what_was_assumed_is_said(capsys):
    assert main(["check", write(CORE + STYLES["eps fixed inside"])]) == 0
    assert "eps 0.001 (read off y: the forward does not take it)" in shown(capsys)[0]
    assert main(["check", write(CORE + STYLES["CS231n: rows only, ln_param"]), "--eps", "0.5"]) == 0
    out, _ = shown(capsys)
    assert "layernorm_forward(x, gamma, beta, ln_param)" in out
    assert "x 6 x 8 float64" in out
    assert "eps 0.5 (passed on)" in out
    assert "so x of any shape is passed to it with 2 axes" in out
    assert re.search(r"not for x of shape \[2, 3, 8\]: mine.py:\d+: ValueError: too many val", out)
    style = STYLES["dict cache, dict of gradients, prints"]
    assert main(["check", write(CORE + style), "--shape", "3", "5", "--dtype", "float32"]) == 0
    out, _ = shown(capsys)
    assert "eps 1e-06 (the forward's default)" in out
    assert "x 3 x 5 float32" in out
    assert 'prints, which is not shown; the first line: "shape (3, 5)"' in out


@pytest.mark.parametrize(
    ("old", "new", "note", "status"),
    [
        # Both directions agree, so that no derivative is wrong; but it is no layer norm.
        (
            "np.mean(centered**2, -1, keepdims=True)",
            "x.var(-1, ddof=1, keepdims=True)",
            "the variance is divided by n - 1 in the forward",
            1,
        ),
        (
            "1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)",
            "1 / (np.sqrt(np.mean(centered**2, -1, keepdims=True)) + eps)",
            "rstd is 1 / (sqrt(var) + eps) in the forward",
            1,
        ),
        # It is one, with another eps: that is said.
        ("+ eps)", "+ 1e-3)", "the eps given, 1e-06, is not used: it is 0.001 inside", 0),
    ],
)
def test_a_forward_that_is_no_layer_norm_is_noticed(old, new, note, status, capsys):
    assert old in CORE
    style = STYLES["dict cache, dict of gradients, prints"]
    found = main(["check", write(CORE.replace(old, new) + style)])
    out, _ = shown(capsys)
    assert found == status, out
    assert note in out


def test_nothing_is_left_changed(tmp_path, capsys):
    before = np.geterr()
    main(["check", write(CORE + STYLES["side effects at import"])])
    shown(capsys)
    assert np.geterr() == before
    assert tmp_path.samefile(".")
