"""Files that `stablenorm check` reads and adapts, its words and statuses; never a traceback."""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from interpreter import run_python

from stablenorm.cli import check as command
from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal", "in_this_process")


@pytest.fixture
def in_this_process(monkeypatch):
    """Check in the process of the tests: to start one takes longer than most checks."""
    monkeypatch.setattr(command, "run_apart", lambda work, argument, _: work(argument))
    monkeypatch.setattr(command, "silence", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    with np.errstate(), warnings.catch_warnings():
        yield


# The core of every file that is checked; tests plant a mistake by dropping "- mean".
CORE = """
import numpy as np
def stats(x, eps):
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    return centered * rstd, rstd
def norm(x, gamma, beta, eps):
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, (xhat, rstd, gamma)
def grads(dy, xhat, rstd, gamma):
    g = dy * gamma
    mean = g.mean(-1, keepdims=True)
    dx = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True))
    lead = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(lead), dy.sum(lead)
"""

PULL = "def layer_norm_backward(dy, cache):\n    return grads(dy, *cache)\n"
USUAL = f"""
def layer_norm_forward(x, gamma, beta, eps=1e-5):
    return norm(x, gamma, beta, eps)
{PULL}"""


def write(text, name="mine.py"):
    Path(name).write_text(text, encoding="utf-8")
    return name


def shown(capsys):
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return " ".join(out.split()), err


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
    "no cache": """
def layer_norm(x, gamma, beta, eps=1e-5):
    return norm(x, gamma, beta, eps)[0]
def layer_norm_grad(g, x, gamma, eps=1e-5):
    return grads(g, *norm(x, gamma, 0, eps)[1])
""",
    "results of the forward": """
def layer_norm_forward(x, weight, bias, eps):
    y, (xhat, rstd, _) = norm(x, weight, bias, eps)
    return y, (xhat, rstd)
def layer_norm_vjp(grad_out, inp, normalized, r, weight):
    return grads(grad_out, normalized, r, weight)
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
PULL
if __name__ == "__main__":
    sys.exit("this is not to be run")
""".replace("PULL", PULL),
}

# A template of classes, and the words of the usual one; FACTOR spoils dgamma.
CLASS = """
{head}
class {name}:
    {slots}
    def __init__(self, {made_of}):
        {make}
    def {forward}{way}(self, {x}):
        {first}
        self.held = stats({x[0]}, {eps})
        return {gamma} * self.held[0] + {beta}{beside}
    def backward{way}(self, {takes}):
        dx, dgamma, dbeta = grads({dy}, *{held}, {gamma})
        dgamma = FACTOR * dgamma
        {store}
        return {returned}
"""
ATTRIBUTES = "self.gamma, self.beta, self.eps = np.ones(n), np.zeros(n), eps"
WORDS = {
    "head": "", "name": "LayerNorm", "slots": "", "made_of": "n, eps=1e-5", "make": ATTRIBUTES,
    "forward": "forward", "way": "", "x": "x", "first": "", "eps": "self.eps", "gamma": "self.gamma", "beta": "self.beta",
    "beside": "", "takes": "dy", "dy": "dy", "held": "self.held", "returned": "dx",
    "store": "self.dgamma, self.dbeta = dgamma, dbeta",
}  # fmt: skip
PARAMETER = """
class Parameter:
    def __init__(self, data): self.data, self.grad = data, np.zeros_like(data)
"""
LISTS = {
    "make": "self.params, self.eps = [np.ones(n), np.zeros(n)], eps",
    "gamma": "self.params[0]", "beta": "self.params[1]", "store": "self.grads = [dgamma, dbeta]",
}  # fmt: skip
DICTS = {
    "make": "self.params, self.eps = {'gamma': np.ones(n), 'beta': np.zeros(n)}, eps",
    "gamma": "self.params['gamma']", "beta": "self.params['beta']",
    "store": "self.grads = {'beta': dbeta, 'gamma': dgamma}",
}  # fmt: skip
CLASSES = {
    "returned": {"store": "", "returned": "dx, dgamma, dbeta"},
    "in attributes, a shape, eps to be given": {
        "made_of": "shape, epsilon, bias=True", "eps": "self.epsilon", "gamma": "self.weight",
        "make": "self.weight, self.bias, self.epsilon = np.ones(shape), np.zeros(shape), epsilon",
        "first": "self.g = x", "beta": "self.bias", "takes": "grad_output", "dy": "grad_output",
        "store": "assert self.bias.ndim == 1; self.grad_weight, self.bias_grad = dgamma, dbeta"},
    "accumulated, with a rate": {
        "name": "Norm", "made_of": "d_model=16, eps=1e-6", "takes": "dy, learning_rate",
        "make": f"n = 1, 1, d_model; {ATTRIBUTES}; self.dgamma, self.dbeta = np.zeros((2, *n))",
        "store": "self.dgamma += dgamma; self.dbeta += dbeta"},
    "slots, a lock and a file": {
        "head": "import os, threading\nNOTHING = os.open(os.devnull, os.O_RDONLY)",
        "slots": "__slots__ = 'gamma beta eps held dgamma dbeta lock file'.split()",
        "make": f"{ATTRIBUTES}; self.lock, self.file = threading.Lock(), open(NOTHING, closefd=0)"},
    "made of its parameters, lists": LISTS | {
        "made_of": "gamma, beta", "eps": "1e-7",
        "make": "self.params, self.grads = [gamma, beta], [0 * gamma, 0 * beta]",
        "store": "self.grads[0][...], self.grads[1][...] = dgamma, dbeta"},
    "made by the first forward, a list of each": {
        "name": "LayerNorm1D", "made_of": "", "x": "X", "takes": "dLdy", "dy": "dLdy",
        "make": "self.parameters, self.X = {'scaler': None, 'intercept': None}, []",
        "first": "if not self.X: self.parameters = dict(scaler=np.random.rand(X.shape[1]), "
        "intercept=0 * X[0])\n        self.X.append(X)",
        "gamma": "self.parameters['scaler']", "beta": "self.parameters['intercept']", "eps": "1e-5",
        "held": "stats(self.X[0], 1e-5)", "returned": "[dx]",
        "store": "self.gradients = {'scaler': dgamma, 'intercept': dbeta}"},
    "objects of data and grad, a cache beside y, other names": {
        "head": PARAMETER, "way": "_pass", "beside": ", self.held", "takes": "dy, cache",
        "make": "self.gamma, self.beta, self.eps = Parameter(np.ones(n)), Parameter(np.zeros(n)), eps",
        "gamma": "self.gamma.data", "beta": "self.beta.data", "held": "cache",
        "store": "self.gamma.grad += dgamma; self.beta.grad += dbeta"},
    "lists": LISTS,
    "tuples": LISTS | {
        "make": "self.params, self.eps = (np.ones(n), np.zeros(n)), eps",
        "store": "self.grads = dgamma, dbeta"},
    "attributes and lists": {
        "make": f"{ATTRIBUTES}; self.params = [self.beta, self.gamma]", "gamma": "self.params[1]",
        "beta": "self.params[0]", "store": "self.grads = [dbeta, dgamma]"},
    "pairs": {"store": "self.grads = [(self.beta, dbeta), (self.gamma, dgamma)]"},
    "dicts": DICTS,
    "a dict of dgamma": {"store": "self.grads = {'dweight': dgamma, 'dbias': dbeta}"},
    "beside the parameters": DICTS | {"store": "self.params.update(dgamma=dgamma, dbeta=dbeta)"},
    "a list of objects": LISTS | {
        "head": PARAMETER, "gamma": "self.params[0].data", "beta": "self.params[1].data",
        "make": "self.params, self.eps = [Parameter(np.ones(n)), Parameter(np.zeros(n))], eps",
        "store": "self.params[0].grad = dgamma; self.params[1].grad = dbeta"},
    "a dict of objects": DICTS | {
        "head": PARAMETER, "gamma": "self.params['g'].data", "beta": "self.params['b'].data",
        "make": "self.params = {'b': Parameter(np.zeros(n)), 'g': Parameter(np.ones(n))}; self.eps = eps",
        "store": "self.params['g'].grad = dgamma; self.params['b'].grad = dbeta"},
    "a cache first, an axis": {
        "made_of": "axis=8", "make": "self.axis, self.gamma, self.eps = axis, None, 1e-5",
        "first": "n, eps = x.shape[self.axis], 1e-5\n        if self.gamma is None: " + ATTRIBUTES,
        "beside": ", *self.held", "takes": "cache, dy", "held": "cache",
        "store": "", "returned": "dx, {'weight': dgamma, 'bias': dbeta}"},
    "a cache and a rate with defaults": {"takes": "dy, cache=None, rate=0.1"},
    "called, a rate by name": {"forward": "__call__", "takes": "dy, *, rate", "store": "", "returned": "dx, [dgamma, dbeta]"},
    "parameters with x, below an abstract layer": {
        "head": "class Layer:\n    def forward(self, x): 1 / 0\n    def backward(self, dy): 1 / 0",
        "name": "Norm(Layer)", "made_of": "", "make": "pass", "x": "x, w, b, eps=1e-5", "eps": "eps",
        "first": "self.w = w", "gamma": "self.w", "beta": "b",
        "store": "", "returned": "dx, dgamma, dbeta"},
    "private slots, a switch": {
        "slots": "__slots__ = '__gamma', '__beta', 'eps', 'held', 'dgamma', 'dbeta'", "made_of": "n, bias",
        "make": "if bias: self.__gamma, self.__beta, self.eps = np.ones(n), np.zeros(n), 1e-5",
        "gamma": "self.__gamma", "beta": "self.__beta"},
    "rebound, by a rate of its own": {
        "make": f"self.lr = 0.1; {ATTRIBUTES}",
        "store": "self.gamma = self.gamma - self.lr * dgamma; self.beta = self.beta - self.lr * dbeta"},
    "x and dy, told that it trains": {
        "x": "x, training", "takes": "input, grad_output", "dy": "grad_output",
        "held": "stats(input, self.eps)"},
}  # fmt: skip


def layer(style, core=CORE, factor="1"):
    return core + CLASS.replace("FACTOR", factor).format(**WORDS | CLASSES[style])


def few(style, rows):
    """Return options for fewer elements, which save calls of the forward. A factor is sure from n = 5 on."""
    return ["--shape", *["1"] * (style == "accumulated, with a rate"), rows, "5"]


STYLES = {style: CORE + text for style, text in FUNCTIONS.items()}
STYLES |= {style: layer(style) for style in CLASSES}


@pytest.mark.parametrize("style", STYLES)
def test_right_code_of_any_style_passes(style, capsys):
    options = few(style, "3") if style in CLASSES and "first forward" not in style else []
    assert main(["check", write(STYLES[style]), *options]) == 0, capsys.readouterr()
    out, err = shown(capsys)
    # The prints of the file come before the report.
    assert out.startswith("shape (" if "prints" in style else "mine.py: ")
    assert (", .backward" in out) == (style in CLASSES)
    assert "PASS" in out
    assert "FAIL" not in out
    assert "NOT CHECKED" not in out
    assert err == "stablenorm: running the code of mine.py\n"


@pytest.mark.parametrize("style", CLASSES)
def test_two_mistakes_in_a_class_of_any_style_are_named(style, capsys):
    file = write(layer(style, CORE.replace("- mean ", ""), "0.5"))
    assert main(["check", file, *few(style, "1")]) == 1
    out, _ = shown(capsys)
    assert "FAIL: wrong gradient of x and gamma" in out
    assert "the mean of g is missing from dx" in out
    assert "dgamma is off by a factor of 1/2" in out


# ---- status and words ----

FORWARD = "def layer_norm_forward(x, gamma, beta, eps):\n    "
BACKWARD = "\ndef layer_norm_backward(dy, cache):\n    "
LAYER = "class {}:\n  def __init__(self, {}): self.gamma = {}\n  forward = backward = lambda self, x: x\n"
BOTH = (
    LAYER.format("Sum", "n", "None")
    + LAYER.format("Norm1", "n", "None")
    + LAYER.format("Norm2", "n", "None")
)
FIXED = "import numpy\n" + LAYER.format("L", "n=4", "numpy.ones(4)")
NO_CACHE = f"{FORWARD}return x, x\ndef layer_norm_backward(dy, mean, rstd): ..."


# An RMS norm whose dx has the mean of g, as in a layer norm; the same without it.
WRONG_RMS = CORE.replace("x - x.mean(-1, keepdims=True)", "x")
RMS = WRONG_RMS.replace("- mean ", "")
RMS_FUNCTIONS = """
def rms_norm_forward(x, gamma, eps):
    return norm(x, gamma, 0, eps)
def rmsnorm_backward(dy, cache):
    return grads(dy, *cache)[:2]
"""
RMS_CLASS = CLASS.replace("FACTOR", "1").format(**WORDS | {
    "name": "RMSNorm", "make": "self.weight, self.eps = np.ones(n), eps", "gamma": "self.weight",
    "beta": "0", "store": "self.dweight = dgamma"})  # fmt: skip
RAISES = CORE + USUAL.replace("return grads(dy, *cache)", "return grads(dy, *cache, 1)")
HIDDEN = layer("lists").replace("self.grads = ", "self.hidden = ")
NOWHERE = layer("lists").replace("self.grads = ", "lost = ")
UNKNOWN = layer("returned").replace("self.gamma", "self.a_2").replace("self.beta", "self.b_2")
UNSEEN = layer("returned").replace("np.ones(n)", "[1.0] * n").replace("np.zeros(n)", "[0.0] * n")
MY_RMS = RMS_FUNCTIONS.replace("rms_norm", "my").replace("rmsnorm", "my")
MINE = "--forward my_forward --backward my_backward"
PLUS_1 = RMS_FUNCTIONS.replace("norm(x, gamma", "norm(x, 1 + gamma")
# Parameters in the module: the backward sees them, or not.
MODULE = (
    """
P = {}
def layer_norm_forward(x, eps=1e-5):
    n = x.shape[-1]
    return norm(x, *P.setdefault(n, (np.ones(n), np.zeros(n))), eps)
"""
    + PULL
)
IN_A_DICT = (
    """
def layer_norm_forward(x, params, eps=1e-5):
    return norm(x, params["gamma"], params["beta"], eps)
"""
    + PULL
)
EXCHANGED = layer("returned").replace(
    "self.gamma * self.held[0] + self.beta", "self.beta * self.held[0] + self.gamma"
)
STEPS = "self.gamma -= {0} * dgamma; self.beta -= {0} * dbeta"


def applied(rate):
    style = {"store": STEPS.format(rate), "first": "self.step = 1", "takes": "dy, learning_rate"}
    return CORE + CLASS.replace("FACTOR", "1").format(**WORDS | style)


NO_GAMMA = CORE.replace("g = dy * gamma", "g = dy")
# The file, options, the status, words of the output or, with status 2, of the error line.
SAID = [
    # The report says its assumptions.
    (STYLES["eps fixed inside"], "", 0, "the eps given, 1e-05, is not used: it is 0.001 inside"),
    (STYLES["CS231n: rows only, ln_param"], "--eps 0.5", 0,
     "ln_param)|; x 6 x 8 float64"),
    (STYLES["CS231n: rows only, ln_param"], "--eps 0.5 --verbose", 0,
     "x 6 x 8 float64, eps 0.5, seed 0|note: not for x of shape 2 x 3 x 8 float64: ValueError: too many values to"),
    (STYLES["dicts, prints"], "--shape 3 5 --dtype float32", 0, "; x 3 x 5 float32"),
    (STYLES["accumulated, with a rate"], "--shape 3 4 5", 0, "Norm(n).forward(x), .back|x 3 x 4 x 5"),
    # The check finds no gradient but dx, or no parameter.
    (HIDDEN, "--shape 2 4", 0, ""),
    (NOWHERE, "--shape 2 4", 1, "cause dgamma: found nowhere: the backward neither|cause dbeta: found nowhere"),
    (NOWHERE, "--shape 2 4 --only x", 0, "PASS for dx alone dgamma and dbeta were not judged"),
    (UNKNOWN, "", 0, "gamma is a_2; beta is b_2"),
    # Its gamma stays 1, and a backward without gamma is right.
    (UNSEEN, "", 3, "PASS for dx alone no gamma and no beta was found in LayerNorm"),
    (UNSEEN.replace("[0.0] * n", "np.zeros(n)"), "", 3, "PASS for dx, dbeta alone no gamma was found in LayerNorm"),
    (UNSEEN, "--only x", 0, "PASS"),
    (CORE.replace("rstd * (g", "(1 + 1e-9) * rstd * (g") + USUAL, "", 1, "dx is off by a factor of 1 +1.0e-09"),
    # Parameters of the module, or in a dict; a forward that exchanges them.
    (CORE + MODULE, "", 0, "gamma is P.8.0; beta is P.8.1"),
    (NO_GAMMA + MODULE, "", 1, "gamma is missing from dx"),
    (CORE + IN_A_DICT, "", 0, "PASS"),
    (NO_GAMMA + IN_A_DICT, "", 1, "gamma is missing from dx"),
    (EXCHANGED, "", 1, "gamma and beta are exchanged in the forward"),
    # Gradients that are only applied: by the rate that is given, by another, by the square of the gradient.
    (applied("learning_rate"), "", 0, "PASS"),
    (applied("learning_rate / 6"), "", 1, "dgamma and dbeta are off by a factor of"),
    (applied("0.01"), "", 3, "PASS for dx alone dgamma and dbeta were not judged: the backward changes it by a step"),
    (applied("learning_rate * dgamma"), "", 3, "a step that is not rate * gradient"),
    # Code for two axes alone; a gradient summed in float16.
    (STYLES["CS231n: rows only, ln_param"].replace("(dy * xhat).sum(lead)", "(dy * xhat).sum(-1)"), "", 1,
     "dgamma: the gradient must have shape 8, got 6"),
    (layer("returned", factor="np.float16(1)").replace("np.float16(1) * dgamma", "dgamma.astype(np.float16)"), "", 1,
     "not read back: it is of float16, x of float64"),
    # RMS norms, by their name or by --kind; an offset of gamma.
    *((RMS + form, "--shape 2 4", 0, "") for form in (RMS_FUNCTIONS, RMS_CLASS)),
    *((WRONG_RMS + form, "--shape 2 4", 1, "the mean of g is subtracted in dx") for form in (RMS_FUNCTIONS, RMS_CLASS)),
    (RMS + MY_RMS, f"--shape 2 4 {MINE}", 1, "it is that of an RMS norm: say --kind rms"),
    (RMS + MY_RMS, f"--shape 2 4 --kind rms {MINE}", 0, ""),
    (RMS + RMS_CLASS.replace("RMSN", "N"), "--shape 2 4", 1, "it is that of an RMS norm: say --kind rms"),
    (RMS + RMS_CLASS.replace("RMSN", "N"), "--shape 2 4 --kind rms", 0, ""),
    (RMS + RMS_CLASS, "--shape 2 4 --kind layer", 1, ""),
    (RMS + RMS_FUNCTIONS, "--shape 2 4 --kind layer", 2, "must have layer_norm_forward"),
    (RMS + PLUS_1, "--kind rms --gamma-offset 1", 0, "PASS"),
    (RMS + PLUS_1, "--kind rms", 1, "the forward adds 1 to gamma: say --gamma-offset 1"),
    (WRONG_RMS + PLUS_1, "--kind rms --gamma-offset 1", 1, "mean of g is subtracted in dx"),
    # Backwards that raise, or return something else.
    (RAISES, "", 1, "FAIL: your backward raised TypeError|line 20, in layer_norm_backward|grads() takes 4 positional ar"),
    (f"{FORWARD}return x, x{BACKWARD}return dy @ dy,", "--shape 2 3", 1, "backward raised ValueError: matmul|at mine.py:4"),
    *((CORE + USUAL.replace("return grads(dy, *cache)", f"dx, dw, db = grads(dy, *cache)\n    return {returned}"), "",
       status, words) for returned, status, words in (
        ("None", 2, "must return dx, dgamma, dbeta, got NoneType\n"),
        ("dx", 3, "PASS for dx alone dgamma and dbeta were not judged: backward returned None for it"),
        ("dx, dw", 2, "must return dx, dgamma, dbeta, got tuple of 2\n"),
        ("dx, None, db", 3, "PASS for dx, dbeta alone dgamma was not"),
        ("{'dx': dx, 'dw': dw}", 3, "PASS for dx, dgamma alone dbeta was not"),
        ("{3: dx}", 2, "got dict of 3: no dx"),
        ("dx, dw, 'no'", 1, "dbeta: the gradient must"),
        ("dx.astype(complex), dw, db", 1, "dx: the gradient must"))),
    # Files that cannot be run.
    ("def layer_norm_forward(:", "", 2, "SyntaxError: invalid syntax at mine.py:1\n"),
    ("\n\n1 / 0", "", 2, "ZeroDivisionError: division by zero at mine.py:3\n"),
    ("import torch_is_not_here", "", 2, "ModuleNotFoundError: No module named"),
    ("import sys\nsys.exit(3)", "", 2, "SystemExit: 3 at mine.py:2; put the script part under"),
    ("\x00", "", 2, "null bytes"),
    ("", "", 2, "must have layer_norm_forward, or name one with --forward; it has no functions\n"),
    ("def ln(x): ...\ndef _ln(x): ...\nclass L: ...", "", 2, "with --forward; it has ln, and the class L without forward(x)"),
    (CORE + USUAL, "--backward b", 2, "must have b, or name one with --backward; it has stat"),
    (f"{FORWARD}raise NotImplementedError{BACKWARD}0", "", 2, "NotImplementedError at mine.py:2"),
    (f"{FORWARD}exit(){BACKWARD}pass", "", 2, "SystemExit: None at mine.py:2"),
    (NO_CACHE, "", 2, "y and the 2 that the backward takes of it, got y and 1\n"),
    (f"{FORWARD}return x, eps, x\ndef layer_norm_backward(dy, x, rstd): ...", "", 2,
     "y and the 1 that the backward takes of it, got y and 2\n"),
    (f"def f(*args): 0{BACKWARD}0", "--forward f", 2, "must take (x, gamma, beta, eps), got f(*a"),
    (f"f = max{BACKWARD}pass", "--forward f", 2, "no signature found for builtin"),
    (BOTH, "", 2, "no functions, and the classes Sum, Norm1, Norm2: choose one with --class\n"),
    (BOTH, "--class L", 2, "must be a class with forward(x) and backward(dy), got L; it has"),
    (BOTH, "--class Norm1 --forward stats", 2, "--class must be given without --forward"),
    (LAYER.format("L", "a, n", "1 / 0"), "", 2, 'L also requires n; say how it is made: --init "L(n, n=None)"'),
    (FIXED, "", 2, "its gamma does not have 8 elements"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "status", "words"), SAID, ids=range(len(SAID)))
def test_a_file_has_its_status_and_words_that_say_why(text, options, status, words, capsys):
    assert main(["check", write(text), *options.split()]) == status
    out, err = shown(capsys)
    said = err if status == 2 else out
    assert [phrase for phrase in words.split("|") if phrase not in said] == [], said
    assert status != 2 or (out, err.count("\n")) == ("", 2)
    assert ("note: not for x of shape" in out) == ("not for x" in words)


CODE = CORE + USUAL
# Files, run in a process of their own: options, the status, and words of stderr or, with status 0, of stdout.
APART = {
    "ends at import": ("import os; os._exit(0)", "", 2, "no verdict: the process that ran the code ended with status 0"),
    "crashes": ("import os, signal\ndef layer_norm_backward(dy, cache): os.kill(os.getpid(), signal.SIGABRT)", "", 2, "ended by the signal SIGABRT"),
    "never returns": ("import time\nwhile True: time.sleep(1)", "--timeout 2", 2, "no verdict within 2 s, see --timeout"),
    "breaks the interpreter": ("import builtins\ndel builtins.len, builtins.isinstance", "", 2, "no verdict"),
    "closes all": ("import os; os.closerange(0, 256)", "", 2, "ended with status 1"),
    "closes the streams": ("import os, sys; sys.stdout.close(); os.close(0); os.close(2)", "", 0, "PASS"),
    "leaves a thread": ("import threading, time; threading.Thread(target=time.sleep, args=[99]).start(); print('at work')",
                        "", 0, "at work\nmine.py: layer"),
    "is quiet": ("print('at work')", "--quiet-code", 0, "mine.py: layer"),
    "reads": ("input()", "", 2, "EOFError: EOF when reading a line at mine.py:1"),
}  # fmt: skip


@pytest.mark.parametrize("how", APART)
def test_a_process_of_its_own_has_a_status_whatever_the_code_does(how):
    text, options, status, words = APART[how]
    own, _, last = text.partition("\ndef ")
    write(f"{own}\n{CODE}\n" + f"def {last}" * bool(last))
    run = f"from stablenorm.cli import main; raise SystemExit(main(['check', 'mine.py', *{options.split()}]))"
    done = run_python(f"if __name__ == '__main__':\n    {run}")
    assert done.returncode == status, done
    assert words in (done.stdout if status == 0 else done.stderr)
    assert "Traceback" not in done.stderr
    assert ("at work" in done.stdout) == (how == "leaves a thread")
    assert status == 0 or (done.stdout, done.stderr.count("\n")) == ("", 2)


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
    assert main(["check", write(RAISES), "--json", "r.json"]) == 1
    assert json.loads((tmp_path / "r.json").read_text())["report"]["verdict"] == "FAIL"
    assert main(["check", write(CORE + moves), "--json", "r.json"]) == 0
    shown(capsys)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["report"]["verdict"] == "PASS"
    assert (written["shape"], written["eps"], written["dtype"]) == ([2, 3, 8], 1e-5, "float64")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "r.json"]


def test_piped_output_has_lines_of_up_to_100_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    assert main(["check", write(CORE + USUAL)]) == 0
    assert 80 < max(map(len, capsys.readouterr().out.splitlines())) <= 100
