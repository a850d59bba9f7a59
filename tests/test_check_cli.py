"""Broken by what `stablenorm check` reads, adapts, prints and returns; never a traceback."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from checked_files import CORE, PULL, USUAL, shown, write
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
"""
    + PULL,
    "an axis in the middle, three results, keyword-only eps": """
def layer_norm_forward(x, axis=-1, weight=None, bias=None, *, eps):
    y, cache = norm(x, weight, bias, eps)
    return y, *cache
"""
    + PULL,
    "side effects at import": """
import os, sys, warnings
np.seterr(all="raise")
warnings.simplefilter("error")
os.chdir("/")
sys.stdout.reconfigure(encoding="utf-8")
def layer_norm_forward(x, gamma, beta, eps):
    warnings.warn("slow")
    return norm(x, gamma, beta, eps)
PULL
if __name__ == "__main__":
    sys.exit("this is not to be run")
""".replace("PULL", PULL),
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
    def __init__(self, normalized_shape, epsilon, bias=True):
        assert bias is True
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
    "accumulated, with a rate": """
class Norm:
    def __init__(self, d_model=16):
        self.gamma, self.beta = np.ones((1, 1, d_model)), np.zeros((1, 1, d_model))
        self.dgamma, self.dbeta = np.zeros((1, 1, d_model)), np.zeros((1, 1, d_model))
    def forward(self, x):
        self.cache = stats(x, 1e-6)
        return self.gamma * self.cache[0] + self.beta
    def backward(self, dout, learning_rate):
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
    "made of its parameters, lists": """
class LayerNorm:
    def __init__(self, gamma, beta):
        self.params, self.grads = [gamma, beta], [np.zeros_like(gamma), np.zeros_like(beta)]
    def forward(self, x):
        gamma, beta = self.params
        y, self.cache = norm(x, gamma, beta, 1e-7)
        return y
    def backward(self, dout):
        dx, self.grads[0][...], self.grads[1][...] = grads(dout, *self.cache)
        return dx
""",
    "made by the first forward, a list of each": """
class LayerNorm1D:
    def __init__(self):
        self.parameters, self.X = {"scaler": None, "intercept": None}, []
    def forward(self, X):
        if self.parameters["scaler"] is None:
            self.parameters = {"scaler": np.random.rand(X.shape[1]), "intercept": 0 * X[0]}
        self.X.append(X)
        return norm(X, *self.parameters.values(), 1e-5)[0]
    def backward(self, dLdy):
        scale = self.parameters["scaler"]
        found = [grads(dy, *stats(x, 1e-5), scale) for dy, x in zip([dLdy], self.X)]
        self.gradients = {"scaler": found[0][1], "intercept": found[0][2]}
        return [dx for dx, *_ in found]
""",
    "objects of data and grad, a cache beside y, other names": """
class Parameter:
    def __init__(self, data):
        self.data, self.grad = data, np.zeros_like(data)
class LayerNorm:
    def __init__(self, n):
        self.gamma, self.beta = Parameter(np.ones(n)), Parameter(np.zeros(n))
    def forward_pass(self, x):
        return norm(x, self.gamma.data, self.beta.data, 1e-5)
    def backward_pass(self, dy, cache):
        dx, dgamma, dbeta = grads(dy, *cache)
        self.gamma.grad += dgamma
        self.beta.grad += dbeta
        return dx
""",
}
STYLES = FUNCTIONS | CLASSES


@pytest.mark.parametrize("style", STYLES)
def test_right_code_of_any_style_passes(style, capsys):
    before = np.geterr()
    assert main(["check", write(CORE + STYLES[style])]) == 0, capsys.readouterr()
    out, err = shown(capsys)
    # The prints of the file are not among those of the check.
    assert out.startswith("mine.py: ")
    assert (".forward(x), .backward(dy)" in out) == (style in CLASSES)
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
        ("accumulated, with a rate", "--shape 3 4 5", "Norm(5).forward(x), .back|x 3 x 4 x 5"),
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


# ---- wrong use ----

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
        # Parameters without a cache, or with one that comes apart.
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


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("None", "must return dx, dgamma, dbeta, got NoneType\n"),
        ("dx", "must return dx, dgamma, dbeta, got one array of shape 2 x 3 x 8\n"),
        ("dx, dgamma", "must return dx, dgamma, dbeta, got tuple of 2\n"),
        ("dx, None, dbeta", "must return dx, dgamma, dbeta, got tuple of 3: no dgamma\n"),
        ("{'dx': dx, 'dw': dgamma}", "dx, dgamma, dbeta, got dict of dx, dw: no dbeta\n"),
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


def test_json_is_written_whole(tmp_path, capsys):
    moves = USUAL.replace("    return norm", "    import os; os.chdir('/')\n    return norm")
    assert moves != USUAL
    assert main(["check", write(CORE + moves), "--json", "r.json"]) == 0
    shown(capsys)
    held = json.loads((tmp_path / "r.json").read_text())
    assert held["report"]["verdict"] == "PASS"
    assert (held["shape"], held["eps"], held["dtype"]) == ([2, 3, 8], 1e-5, "float64")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "r.json"]


# ---- where a class keeps its parameters, and what a norm is called ----

STORED = """
class LayerNorm:
    def __init__(self, n, eps=1e-5):
        {make}
        self.eps = eps
    def forward(self, x):
        self.held = stats(x, self.eps)
        gamma, beta = {read}
        return gamma * self.held[0] + beta
    def backward(self, dy):
        dx, dgamma, dbeta = grads(dy, *self.held, {read}[0])
        {store}
        return dx
"""
LIST = "self.params = [np.ones(n), np.zeros(n)]; self.grads = [np.zeros(n), np.zeros(n)]"
DICT = "self.params = {'gamma': np.ones(n), 'beta': np.zeros(n)}"
MADE = "from types import SimpleNamespace as P; gamma, beta = P(data=np.ones(n), grad=None), "
MADE += "P(data=np.zeros(n), grad=None)"
# How parameters are made and read, and where their gradients go.
PLACES = {
    "lists": (LIST, "self.params", "self.grads = [dgamma, dbeta]"),
    "tuples": ("self.params = np.ones(n), np.zeros(n)", "self.params", "self.grads = dgamma, dbeta"),
    "attributes and lists": (
        "self.gamma, self.beta = np.ones(n), np.zeros(n); self.params = [self.beta, self.gamma]",
        "self.params[::-1]", "self.grads = [dbeta, dgamma]"),
    "dicts": (
        DICT, "(self.params['gamma'], self.params['beta'])",
        "self.grads = {'beta': dbeta, 'gamma': dgamma}"),
    "a dict of dgamma": (
        "self.weight, self.bias = np.ones(n), np.zeros(n)", "(self.weight, self.bias)",
        "self.grads = {'dweight': dgamma, 'dbias': dbeta}"),
    "beside the parameters": (
        DICT, "(self.params['gamma'], self.params['beta'])",
        "self.params.update({'dgamma': dgamma, 'dbeta': dbeta})"),
    "a list of objects": (
        f"{MADE}; self.params = [gamma, beta]", "[p.data for p in self.params]",
        "self.params[0].grad = dgamma; self.params[1].grad = dbeta"),
    "a dict of objects": (
        f"{MADE}; self.params = {{'beta': beta, 'gamma': gamma}}",
        "(self.params['gamma'].data, self.params['beta'].data)",
        "self.params['gamma'].grad = dgamma; self.params['beta'].grad = dbeta"),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_gradients_stored_by_order_or_name_are_found(place, capsys):
    make, read, store = PLACES[place]
    text = CORE + STORED.format(make=make, read=read, store=store)
    assert main(["check", write(text)]) == 0, capsys.readouterr()
    assert "NOT CHECKED" not in shown(capsys)[0]
    wrong = text.replace("[dgamma, ", "[dgamma / 2, ").replace("= dgamma", "= dgamma / 2")
    wrong = wrong.replace(", dgamma]", ", dgamma / 2]").replace("': dgamma", "': dgamma / 2")
    assert wrong != text
    assert main(["check", write(wrong)]) == 1
    assert "FAIL: wrong gradient of gamma dgamma is off by a factor of 0.5" in shown(capsys)[0]


BESIDE = """
class LayerNorm:
    def __init__(self, axis=8):
        self.axis, self.gamma = axis, None
    def forward(self, x):
        if self.gamma is None:
            self.gamma, self.beta = np.ones(x.shape[self.axis]), np.zeros(x.shape[self.axis])
        self.held = stats(x, 1e-5)
        return self.gamma * self.held[0] + self.beta, *self.held
    def backward({}):
        {}; dx, dgamma, dbeta = grads(dy, *held, self.gamma)
        return {}
"""


@pytest.mark.parametrize(
    ("takes", "held"),
    [
        ("self, cache, dy", "held = cache"),
        ("self, dy, cache=None, rate=0.1", "held = self.held"),
        ("self, dy, *, rate", "held = self.held"),
        ("self, input, grad_output", "dy = grad_output; held = stats(input, 1e-5)"),
    ],
)
@pytest.mark.parametrize("returned", ["{'weight': dgamma, 'bias': dbeta}", "[dgamma, dbeta]"])
def test_the_arguments_of_a_class_are_recognized(takes, held, returned, capsys):
    text = CORE + BESIDE.format(takes, held, f"dx, {returned}")
    for wrong in ("", "- mean ", "* gamma"):
        status = main(["check", write(text.replace(wrong, "") if wrong else text)])
        assert status == bool(wrong), capsys.readouterr()
    assert "gamma is not applied in dx" in shown(capsys)[0]


@pytest.mark.parametrize(("spoil", "status"), [("", 0), ("- mean ", 1)])
def test_dx_is_judged_where_no_other_gradient_is_found(spoil, status, capsys):
    make, read, _ = PLACES["lists"]
    text = CORE.replace(spoil, "") if spoil else CORE
    text += STORED.format(make=make.partition(";")[0], read=read, store="self.hidden = None")
    assert main(["check", write(text)]) == status
    out = shown(capsys)[0]
    assert "gamma: NOT CHECKED" in out
    assert "NOTE: dgamma is checked: the backward gives none" in out
    assert "NOTE: dbeta is checked" in out
    assert ("the mean of g is missing from dx" in out) == bool(status)


RMS_CORE = """
import numpy as np
def rms(x, eps):
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * rstd, rstd
def pull(dy, xhat, rstd, w):
    g = w * dy
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdims=True) SPOIL)
    return dx, (dy * xhat).sum(tuple(range(dy.ndim - 1)))
"""
RMS_FORMS = {
    "functions": """
def rms_norm_forward(x, gamma, eps):
    xhat, rstd = rms(x, eps)
    return gamma * xhat, (xhat, rstd, gamma)
def rmsnorm_backward(dy, cache):
    return pull(dy, *cache)
""",
    "a class": """
class RMSNorm:
    def __init__(self, n, eps=1e-6):
        self.weight, self.eps = np.ones(n), eps
    def forward(self, x):
        self.held = rms(x, self.eps)
        return self.weight * self.held[0]
    def backward(self, dy):
        dx, self.dweight = pull(dy, *self.held, self.weight)
        return dx
""",
}


@pytest.mark.parametrize(
    ("term", "options", "status", "words"),
    [
        ("", "--gamma-offset 1", 0, "PASS: an error of"),
        ("", "", 1, "this is not the RMS normalization asked for"),
        ("- g.mean(-1, keepdims=True)", "--gamma-offset 1", 1, "mean of g is subtracted in dx"),
    ],
)
def test_an_rms_norm_that_adds_1_to_gamma_is_checked_as_one(term, options, status, words, capsys):
    text = RMS_CORE.replace("SPOIL", term) + RMS_FORMS["functions"]
    file = write(text.replace("xhat, rstd = rms", "gamma = 1 + gamma; xhat, rstd = rms"))
    assert main(["check", file, "--kind", "rms", *options.split()]) == status
    assert words in shown(capsys)[0]
    assert main(["check", file, "--kind", "layer"]) == 2
    assert "must have layer_norm_forward" in shown(capsys)[1]


@pytest.mark.parametrize("form", RMS_FORMS)
def test_the_kind_follows_the_name(form, capsys):
    text = RMS_CORE + RMS_FORMS[form]
    assert main(["check", write(text.replace("SPOIL", ""))]) == 0, capsys.readouterr()
    spoiled = text.replace("SPOIL", "- g.mean(-1, keepdims=True)")
    assert main(["check", write(spoiled)]) == 1
    assert "the mean of g is subtracted in dx" in shown(capsys)[0]
    names = text.replace("SPOIL", "").replace("rms_norm", "my").replace("RMSNorm", "Norm")
    names = names.replace("rmsnorm", "my")
    options = ["--forward", "my_forward", "--backward", "my_backward"] if "my_" in names else []
    assert main(["check", write(names), *options]) == 1
    assert "it is that of an RMS norm: say --kind rms" in shown(capsys)[0]
    assert main(["check", write(names), "--kind", "rms", *options]) == 0
    assert main(["check", write(text.replace("SPOIL", "")), "--kind", "layer"]) in (1, 2)
    shown(capsys)


def test_parameters_of_unknown_names_and_a_factor_near_1_are_told(capsys):
    make, read = "self.a_2, self.b_2 = np.ones(n), np.zeros(n)", "(self.a_2, self.b_2)"
    assert main(["check", write(CORE + STORED.format(make=make, read=read, store=""))]) == 0
    assert "note: no gamma and no beta is found: dx alone is judged" in shown(capsys)[0]
    near = CORE.replace("rstd * (g", "(1 + 1e-9) * rstd * (g") + USUAL
    assert main(["check", write(near)]) == 1
    assert "dx is off by a factor of 1 +1.0e-09" in shown(capsys)[0]


def test_a_backward_that_raises_fails(capsys):
    text = CORE + USUAL.replace("return grads(dy, *cache)", "return grads(dy, *cache, 1)")
    assert main(["check", write(text), "--json", "r.json"]) == 1
    assert "FAIL: wrong gradient of x, gamma and beta" in (out := shown(capsys)[0])
    assert "backward raised TypeError: grads() takes 4 positional arguments but 5 were given" in out
    assert json.loads(Path("r.json").read_text())["report"]["verdict"] == "FAIL"
    dot = f"{FORWARD}return x, x{BACKWARD}return dy @ dy,"
    assert main(["check", write(dot), "--shape", "2", "3"]) == 1
    assert "backward raised ValueError: matmul" in (out := shown(capsys)[0])
    assert "at mine.py:4" in out


def test_piped_output_is_not_wrapped_at_80_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    assert main(["check", write(CORE + USUAL)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) > 80
    (line,) = [line for line in out.splitlines() if line.startswith("mine.py: ")]
    assert line.endswith("layer_norm_backward(dy, cache)")
