"""Files for `stablenorm check` to read: what the tests of the command write, and what it shows."""

from pathlib import Path

# The core of every file that is checked; MEAN is where the mistake is planted.
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
