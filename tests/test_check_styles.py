"""`stablenorm check` on what people write, functions and classes, right and wrong."""

import numpy as np
import pytest
from checked_files import CORE, USUAL, shown, write
from interpreter import run_python

from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal")

FUNCTIONS = {
    "usual": USUAL,
    "dicts, prints": """
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
    "cache first, NamedTuple in another order": """
from typing import NamedTuple
class Grads(NamedTuple):
    grad_bias: object
    grad_weight: object
    grad_input: object
def layer_norm_forward(input, weight, bias, epsilon):
    return norm(input, weight, bias, epsilon)
def layer_norm_backward(ctx, grad_output):
    return Grads(*grads(grad_output, *ctx)[::-1])
""",
    "eps fixed inside": """
def layer_norm_forward(x, gamma, beta):
    return norm(x, gamma, beta, 1e-3)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "an axis in the middle, three results, keyword-only eps": """
def layer_norm_forward(x, axis=-1, weight=None, bias=None, *, eps):
    y, cache = norm(x, weight, bias, eps)
    return y, *cache
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "side effects at import": """
import os, sys, warnings
np.seterr(all="raise")
warnings.simplefilter("error")
os.chdir("/")
sys.stdout.reconfigure(encoding="utf-8")
def layer_norm_forward(x, gamma, beta, eps):
    warnings.warn("slow")
    return norm(x, gamma, beta, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
if __name__ == "__main__":
    sys.exit("this is not to be run")
""",
}

CLASSES = {
    "returned": """
class LayerNorm:
    def __init__(self, n, eps=1e-5):
        self.gamma, self.beta, self.eps = np.ones(n), np.zeros(n), eps
    def forward(self, x):
        self.xhat, self.rstd = stats(x, self.eps)
        return self.gamma * self.xhat + self.beta
    def backward(self, dy):
        return grads(dy, self.xhat, self.rstd, self.gamma)
""",
    "in attributes, a shape, eps to be given": """
class LayerNorm:
    def __init__(self, normalized_shape, epsilon):
        assert len(normalized_shape) == 1
        self.weight, self.bias = np.ones(normalized_shape), np.zeros(normalized_shape)
        self.epsilon, self.g = epsilon, None
    def forward(self, x):
        self.xhat, self.rstd = stats(x, self.epsilon)
        return self.weight * self.xhat + self.bias
    def backward(self, grad_output):
        self.g = grad_output * self.weight
        dx, self.grad_weight, self.bias_grad = grads(grad_output, self.xhat, self.rstd, self.weight)
        return dx
""",
    "accumulated": """
class Norm:
    def __init__(self, d_model=16):
        self.gamma, self.beta = np.ones((1, 1, d_model)), np.zeros((1, 1, d_model))
        self.dgamma, self.dbeta = np.zeros((1, 1, d_model)), np.zeros((1, 1, d_model))
    def forward(self, x):
        self.cache = stats(x, 1e-6)
        return self.gamma * self.cache[0] + self.beta
    def backward(self, dout):
        dx, dg, db = grads(dout, *self.cache, self.gamma)
        self.dgamma += dg
        self.dbeta += db
        return dx
""",
    "slots, a lock and a file": """
import os, threading
NOTHING = os.open(os.devnull, os.O_RDONLY)
class LayerNorm:
    __slots__ = "gamma", "beta", "eps", "held", "dgamma", "dbeta", "lock", "file"
    def __init__(self, n, eps=1e-5):
        self.gamma, self.beta, self.eps = np.ones(n), np.zeros(n), eps
        self.lock, self.file = threading.Lock(), open(NOTHING, closefd=False)
    def forward(self, x):
        with self.lock:
            self.held = stats(x, self.eps)
        return self.gamma * self.held[0] + self.beta
    def backward(self, dy):
        dx, self.dgamma, self.dbeta = grads(dy, *self.held, self.gamma)
        return dx
""",
}
STYLES = FUNCTIONS | CLASSES


@pytest.mark.parametrize("style", STYLES)
def test_right_code_of_any_style_passes(style, capsys):
    before = np.geterr()
    assert main(["check", write(CORE + STYLES[style])]) == 0, capsys.readouterr()
    out, err = shown(capsys)
    # What the file prints is not among what the check does.
    assert out.startswith("mine.py: ")
    assert ("(8).forward(x), .backward(dy)" in out) == (style in CLASSES)
    assert "PASS" in out
    assert "FAIL" not in out
    assert err == "stablenorm: running the code of mine.py\n"
    assert np.geterr() == before


@pytest.mark.parametrize(
    ("style", "options", "words"),
    [
        ("eps fixed inside", "", "the eps given, 1e-05, is not used: it is 0.001 inside"),
        ("CS231n: rows only, ln_param", "--eps 0.5", "ln_param)|x 6 x 8 float64, eps 0.5, seed 0"),
        ("dicts, prints", "--shape 3 5 --dtype float32", "x 3 x 5 float32, eps 1e-05, seed 0"),
        ("accumulated", "--shape 3 4 5", "Norm(5).forward(x), .backward(dy)|x 3 x 4 x 5"),
    ],
)
def test_what_was_assumed_is_said(style, options, words, capsys):
    assert main(["check", write(CORE + STYLES[style]), *options.split()]) == 0
    out, _ = shown(capsys)
    assert [each for each in words.split("|") if each not in out] == [], out
    refused = "note: not for x of shape 2 x 3 x 8: ValueError: too many values to unpack"
    assert (refused in out) == ("rows only" in style)


def test_a_file_that_closes_the_streams_is_judged_all_the_same():
    """Those that Python has, and those that the system has."""
    closing = "import os, sys\nfor s in sys.stdin, sys.stdout, sys.__stdout__: s.close()\n"
    for more in ("", "os.close(0)\n", "os.close(2)\n"):
        write(closing + more + CORE + USUAL)
        done = run_python(
            "from stablenorm.cli import main; raise SystemExit(main(['check', 'mine.py']))"
        )
        assert "PASS: an error of" in done.stdout, done
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
