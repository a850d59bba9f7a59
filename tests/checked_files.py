"""Files for `stablenorm check` to read: what the tests of the command write, and what it shows."""

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

USUAL = """
def layer_norm_forward(*args):
    x, gamma, beta, eps = args
    return gamma * stats(x, eps)[0] + beta, [*stats(x, eps), gamma]
def layer_norm_backward(dy, *cache):
    return list(grads(dy, *cache))
"""


def write(text, name="mine.py"):
    with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
    return name


def shown(capsys):
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return " ".join(out.split()), err
