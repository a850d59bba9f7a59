"""`stablenorm check`: what people write, right and wrong; each exit status; never a traceback."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

import stablenorm._check_file as job
from stablenorm import report_check
from stablenorm.cli import main
from stablenorm.gradcheck import ArgumentResult, GradientReport


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    # What a checked file leaves behind is of no other test's concern.
    monkeypatch.setattr(sys, "path", list(sys.path))


# The core of every file below; MEAN is where the mistake is planted.
CORE = """
import numpy as np
def stats(x, eps):
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)
    return centered * rstd, rstd
def grads(dy, xhat, rstd, gamma):
    g = dy * gamma
    mean = g.mean(-1, keepdims=True)
    dx = rstd * (g - mean - xhat * (g * xhat).mean(-1, keepdims=True))
    lead = tuple(range(dy.ndim - 1))
    return dx, (dy * xhat).sum(lead), dy.sum(lead)
"""

STYLES = {
    "dict cache, dict of gradients, prints": """
def layer_norm_forward(x, gamma, beta, eps=1e-6):
    print("shape", x.shape)
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, {"xhat": xhat, "rstd": rstd, "gamma": gamma}
def layer_norm_backward(dout, cache):
    dx, dw, db = grads(dout, **cache) if 0 else grads(dout, cache["xhat"], cache["rstd"], cache["gamma"])
    return {"dbias": db, "dx": dx, "dweight": dw}
""",
    "CS231n: rows only, ln_param": """
def layernorm_forward(x, gamma, beta, ln_param):
    N, D = x.shape
    xhat, rstd = stats(x, ln_param.get("eps", 1e-5))
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layernorm_backward(dout, cache):
    xhat, rstd, gamma = cache
    dx, dgamma, dbeta = grads(dout, xhat, rstd, gamma)
    return dx, dgamma, dbeta
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
    xhat, rstd = stats(input, epsilon)
    return weight * xhat + bias, Cache(xhat, rstd, weight)
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
    saved.xhat, saved.rstd = stats(x, eps)
    saved.gamma = gamma
    return gamma * saved.xhat + beta, saved
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
    "statistics returned one by one": """
def layer_norm_forward(x, scale, shift, eps=1e-5):
    xhat, rstd = stats(x, eps)
    return scale * xhat + shift, xhat, rstd
def layer_norm_backward(dy, xhat, rstd, scale):
    return grads(dy, xhat, rstd, scale)
""",
    "backward(dy, *cache), spelled out": """
def layer_norm_forward(x, gamma, beta, eps):
    return gamma * stats(x, eps)[0] + beta, (gamma, *stats(x, eps))
def layer_norm_backward(upstream, gamma, normalized, inverse):
    return grads(upstream, normalized, inverse, gamma)
""",
    "backward(dy, *cache)": """
def layer_norm_forward(*args):
    x, gamma, beta, eps = args
    return gamma * stats(x, eps)[0] + beta, [*stats(x, eps), gamma]
def layer_norm_backward(dy, *cache):
    return list(grads(dy, *cache))
""",
    "names from the cache": """
def layer_norm_forward(x, gamma, beta, eps):
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, dict(xhat=xhat, rstd=rstd)
def layer_norm_backward(dy, rstd, xhat, gamma):
    return grads(dy, xhat, rstd, gamma)
""",
    "eps fixed inside": """
def layer_norm_forward(x, gamma, beta):
    xhat, rstd = stats(x, 1e-3)
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "keyword-only eps, dx last": """
def layer_norm_forward(x, gamma, beta, *, axis=-1, eps):
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    dx, dgamma, dbeta = grads(dy, *cache)
    return dgamma, dbeta, dx
""",
    "an axis in the middle": """
def layer_norm_forward(x, axis=-1, weight=None, bias=None, eps=1e-5):
    xhat, rstd = stats(x, eps)
    return weight * xhat + bias, (xhat, rstd, weight)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
""",
    "float32 inside": """
def layer_norm_forward(x, gamma, beta, eps=1e-5):
    x, gamma, beta = (a.astype(np.float32) for a in (x, gamma, beta))
    xhat, rstd = stats(x, np.float32(eps))
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    return grads(dy.astype(np.float32), *cache)
""",
    "three axes only": """
def layer_norm_forward(x, gamma, beta, eps):
    B, T, D = x.shape
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    assert dy.ndim == 3
    return grads(dy, *cache)
""",
    "a dict of parameters": """
def layer_norm_forward(x, params):
    xhat, rstd = stats(x, params["eps"])
    return params["weight"] * xhat + params["bias"], (xhat, rstd, params)
def layer_norm_backward(dy, cache):
    xhat, rstd, params = cache
    return grads(dy, xhat, rstd, params["weight"])
""",
    "no beta": """
def layer_norm_forward(x, gamma, eps):
    xhat, rstd = stats(x, eps)
    return gamma * xhat, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)[:2]
""",
    "no parameters": """
def layer_norm_forward(x, eps):
    return stats(x, eps)[0], stats(x, eps)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache, 1.0)[0]
""",
    "names that say nothing": """
def layer_norm_forward(p1, p2, p3, p4):
    xhat, rstd = stats(p1, p4)
    return p2 * xhat + p3, (xhat, rstd, p2)
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
    xhat, rstd = stats(x, eps)
    return gamma * xhat + beta, (xhat, rstd, gamma)
def layer_norm_backward(dy, cache):
    return grads(dy, *cache)
if __name__ == "__main__":
    sys.exit("this is not to be run")
""",
}
USUAL = STYLES["backward(dy, *cache)"]


def write(text, name="mine.py"):
    with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
    return name


def shown(capsys):
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return " ".join(out.split()), err


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
        ("np.mean(centered**2, -1, keepdims=True)", "x.var(-1, ddof=1, keepdims=True)", "n - 1", 1),
        (
            "1 / np.sqrt(np.mean(centered**2, -1, keepdims=True) + eps)",
            "1 / (np.sqrt(np.mean(centered**2, -1, keepdims=True)) + eps)",
            "adds eps = 1e-06 to the standard deviation, not to the variance",
            1,
        ),
        # It is one, with another eps: that is said.
        ("+ eps)", "+ 1e-3)", "eps = 1e-06 was passed, but y is as with eps = 0.001", 0),
    ],
)
def test_a_forward_that_is_no_layer_norm_is_noticed(old, new, note, status, capsys):
    assert old in CORE
    style = STYLES["dict cache, dict of gradients, prints"]
    found = main(["check", write(CORE.replace(old, new) + style)])
    out, _ = shown(capsys)
    assert found == status, out
    assert note in out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("def layer_norm_forward(:", [], r"mine.py:1: SyntaxError: invalid syntax"),
        ("\n\n1 / 0", [], r"mine.py:3: ZeroDivisionError: division by zero"),
        ("import torch_is_not_here", [], "mine.py:1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)", [], "mine.py:2: SystemExit: 3 (exit in the file; put it"),
        ("input('Which one? ')", [], "mine.py:1: EOFError"),
        ("from . import other", [], "mine.py:1: ImportError: attempted relative import"),
        ("\x00", [], "null bytes"),
        (
            "",
            [],
            "mine.py must have layer_norm_forward, or name one with --forward; it has no func",
        ),
        (
            "def ln(x): ...\ndef _hidden(x): ...\ndef dln(x): ...\nfrom math import sin",
            [],
            "name one with --forward; it has ln, dln\n",
        ),
        (
            CORE + USUAL,
            ["--backward", "bwd"],
            "must have bwd, or name one with --backward; it has stats",
        ),
        ("class LayerNorm: ...", [], "it has no functions, but LayerNorm: write two functions"),
        ("fwd = 3", ["--forward", "fwd"], "--forward must be a function, got fwd, a int"),
        (
            (
                "def layer_norm_forward(x, gamma, beta, eps):\n    raise NotImplementedError\n"
                "def layer_norm_backward(dy, cache): ..."
            ),
            [],
            "mine.py:2: NotImplementedError\n",
        ),
        (
            (
                "def layer_norm_forward(x, gamma, beta, eps):\n    assert x.shape == (5, 5), 'five'\n"
                "def layer_norm_backward(dy, cache): ..."
            ),
            [],
            "mine.py:2: AssertionError: five\n",
        ),
        (
            (
                "def layer_norm_forward(x, gamma, beta, eps):\n    return x, x\n"
                "def layer_norm_backward(dy, cache):\n    return dy @ dy,\n"
            ),
            ["--shape", "2", "3"],
            "mine.py:4: ValueError: matmul",
        ),
        (
            (
                "def layer_norm_forward(x, gamma, beta, eps):\n    return x, x\n"
                "def layer_norm_backward(dy, xhat, rstd, var):\n    return dy,\n"
            ),
            [],
            (
                "layer_norm_backward must ask for dy, a cache, x, gamma, beta, eps or what the forward "
                "returned, got rstd\n"
            ),
        ),
        (
            (
                "def layer_norm_forward(x, gamma, beta, eps):\n    exit()\n"
                "def layer_norm_backward(dy, cache): ..."
            ),
            [],
            "mine.py:2: SystemExit",
        ),
    ],
)
def test_code_that_cannot_be_run_is_one_line(text, options, message, capsys):
    assert main(["check", write(text), *options]) == 2
    out, err = shown(capsys)
    assert out == ""
    assert err.count("\n") == 2
    assert message in err


def test_a_file_that_is_not_text_is_one_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_bytes(b"x = '\xff'\n")
    assert main(["check", "mine.py"]) == 2
    assert "SyntaxError" in shown(capsys)[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.py"], "FILE must be a Python file, got .*nowhere.py, which is not there"),
        (["."], "FILE must be a Python file, got .*, a directory"),
        (["book.ipynb"], "save the functions as a .py file"),
        (["mine.py", "--plot", "p.txt"], "--plot must be a .png or .svg or .pdf file"),
        (["mine.py", "--json", "no/where.json"], "--json must be in an existing directory"),
        (["mine.py", "--json", "out.txt"], "--json must be a .json file"),
        (["mine.py", "--shape", "3", "0"], "--shape must be of lengths >= 1, got 3 0"),
        (["mine.py", "--shape", "9" * 9, "9999"], "--shape must fit in memory"),
        (["mine.py", "--eps", "nan"], "--eps must be finite and >= 0, got nan"),
        (["mine.py", "--eps=-1"], "--eps must be finite and >= 0, got -1.0"),
        (["mine.py", "--seed=-1"], "--seed must be >= 0, got -1"),
        (["mine.py", "--dtype", "int8"], "invalid choice"),
        ([], "arguments are required"),
    ],
)
def test_wrong_use_is_one_line_and_runs_nothing(argv, message, tmp_path, capsys):
    write("import pathlib\npathlib.Path('ran').touch()")
    write("{}", "book.ipynb")
    assert main(["check", *argv]) == 2
    err = shown(capsys)[1].splitlines()[-1]
    assert re.search(message, err), err
    assert not (tmp_path / "ran").exists()


def test_a_backward_of_wrong_shape_is_a_failure_not_an_error(capsys):
    wrong = CORE.replace("dy.sum(lead)", "dy.sum(lead)[:-1]")
    assert main(["check", write(wrong + USUAL)]) == 1
    assert "must have shape (8,), that of its argument, got (7,)" in shown(capsys)[0]


def test_a_gradient_left_out_is_not_passed(capsys):
    left_out = CORE.replace("(dy * xhat).sum(lead), dy.sum", "None, dy.sum")
    assert main(["check", write(left_out + USUAL)]) == 3
    assert "INCONCLUSIVE: no verdict on the gradient of gamma" in shown(capsys)[0]


@pytest.mark.parametrize(
    "returned", ["None", "(dx, dgamma)", "{'a': dx}", "3.0", "(dx, dgamma, 'no')", "[]"]
)
def test_a_backward_that_returns_anything_is_told_apart(returned, capsys):
    text = CORE + USUAL.replace(
        "return list(grads(dy, *cache))",
        f"dx, dgamma, dbeta = grads(dy, *cache)\n    return {returned}",
    )
    assert main(["check", write(text)]) in (1, 2, 3)
    shown(capsys)


@pytest.mark.parametrize("returned", ["None", "(None, None)", "x.sum(), 3", "'y', 3", "(), ()"])
def test_a_forward_that_returns_anything_is_told_apart(returned, capsys):
    text = f"def layer_norm_forward(x, gamma, beta, eps):\n    return {returned}\n"
    text += "def layer_norm_backward(dy, cache):\n    return dy, dy, dy"
    assert main(["check", write(text)]) in (1, 2, 3)
    shown(capsys)


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
    moves = USUAL.replace("    x, gamma", "    import os; os.chdir('/')\n    x, gamma")
    assert moves != USUAL
    argv = ["check", write(CORE + moves), "--plot", "p.png", "--json", "r.json"]
    assert main(argv) == 0
    shown(capsys)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    held = json.loads((tmp_path / "r.json").read_text())
    assert held["report"]["verdict"] == "PASS"
    assert (held["shape"], held["eps"], held["dtype"]) == ([2, 3, 8], 1e-5, "float64")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py", "p.png", "r.json"]


PASS = GradientReport((ArgumentResult("x", "PASS", 1, 1, resolution=1e-9),), 7)


def outcome(monkeypatch, result):
    """Make the check itself return or raise `result`."""

    def check(*_, **__):
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(job, "check_layer_norm", check)
    return main(["check", write(CORE + USUAL)])


def test_an_inconclusive_check_has_a_status_of_its_own(monkeypatch, capsys):
    unclear = replace(PASS.arguments[0], verdict="INCONCLUSIVE", message="too noisy")
    assert outcome(monkeypatch, replace(PASS, arguments=(unclear,))) == 3
    out, _ = shown(capsys)
    assert "INCONCLUSIVE" in out
    assert "too noisy" in out


def test_an_interrupt_has_a_status_of_its_own(monkeypatch, capsys):
    assert outcome(monkeypatch, KeyboardInterrupt()) == 130
    assert shown(capsys)[1].endswith("stablenorm: interrupted\n")


@pytest.mark.parametrize("error", [RuntimeError("what?"), TypeError("y must be floating\nhere")])
def test_whatever_the_check_raises_is_one_line(monkeypatch, capsys, error):
    assert outcome(monkeypatch, error) == 2
    assert " ".join(str(error).split()) in shown(capsys)[1].splitlines()[-1]


def test_a_full_memory_is_one_line(monkeypatch, capsys):
    assert outcome(monkeypatch, MemoryError("17 GiB")) == 2
    assert shown(capsys)[1].endswith("stablenorm: x must fit in memory, got: 17 GiB\n")


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("patience", "bar"), [(0.0, True), (60.0, False)])
def test_a_bar_comes_only_after_a_while_and_only_on_a_terminal(monkeypatch, patience, bar):
    monkeypatch.setattr(report_check, "_PATIENCE_S", patience)
    for stream in (Terminal(), StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with report_check.patient_bar("comparing") as progress:
            progress(1, 2)
            progress(2, 2)
        assert ("comparing" in stream.getvalue()) == (bar and stream.isatty())


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    out, _ = shown(capsys)
    for words in ("THE CODE OF THE FILE IS RUN", "exit status: 0", "--plot", "mine.py"):
        assert words in out


def test_it_runs_as_a_command(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "stablenorm", "check", write(CORE + USUAL)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (result.returncode, result.stderr) == (0, "stablenorm: running the code of mine.py\n")


def test_nothing_is_left_changed(tmp_path, capsys):
    before = np.geterr()
    main(["check", write(CORE + STYLES["side effects at import"])])
    shown(capsys)
    assert np.geterr() == before
    assert tmp_path.samefile(".")
