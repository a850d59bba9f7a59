"""`stablenorm check` on classes with forward(x) and backward(dy), as people write them."""

import pytest
from checked_files import CORE, shown, write

from stablenorm.cli import main

pytestmark = pytest.mark.usefixtures("plain_terminal")

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
    "in attributes, a shape": """
class LayerNorm:
    def __init__(self, normalized_shape):
        self.weight = np.ones(normalized_shape)
        self.bias = np.zeros(normalized_shape)
        self.eps = 1e-5
        self.g = None
    def forward(self, x):
        assert isinstance(self.weight.shape, tuple)
        self.xhat, self.rstd = stats(x, self.eps)
        return self.weight * self.xhat + self.bias
    def backward(self, grad_output):
        self.g = grad_output * self.weight
        dx, self.grad_weight, self.grad_bias = grads(grad_output, self.xhat, self.rstd, self.weight)
        return dx
""",
    "accumulated": """
class Norm:
    def __init__(self, d_model):
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
    "dicts": """
class LayerNorm:
    def __init__(self, n=16, axis=-1):
        self.params = {"gamma": np.ones(n), "beta": np.zeros(n)}
        self.grads = {}
    def forward(self, x):
        self.cache = stats(x, 1e-5)
        return self.params["gamma"] * self.cache[0] + self.params["beta"]
    def backward(self, dy):
        dx, self.grads["gamma"], self.grads["beta"] = grads(dy, *self.cache, self.params["gamma"])
        return dx
""",
    "a list of gradients, eps to be given": """
class LayerNorm:
    def __init__(self, size, epsilon):
        self.scale, self.shift, self.epsilon = np.ones(size), np.zeros(size), epsilon
    def forward(self, x):
        self.xhat, self.rstd = stats(x, self.epsilon)
        return self.scale * self.xhat + self.shift
    def backward(self, dy):
        dx, *self.grads = grads(dy, self.xhat, self.rstd, self.scale)
        return dx
""",
    "no parameters": """
class LayerNorm:
    eps = 1e-5
    def forward(self, x):
        self.xhat, self.rstd = stats(x, self.eps)
        return self.xhat
    def backward(self, dy):
        return grads(dy, self.xhat, self.rstd, 1.0)[0]
""",
}


@pytest.mark.parametrize("style", CLASSES)
def test_a_right_class_passes(style, capsys):
    assert main(["check", write(CORE + CLASSES[style])]) == 0, capsys.readouterr()
    out, _ = shown(capsys)
    assert ".forward(x), .backward(dy)" in out
    assert "PASS" in out
    if style != "no parameters":
        assert "gamma: PASS" in out
        assert "beta: PASS" in out


@pytest.mark.parametrize("style", CLASSES)
def test_a_wrong_class_fails_and_is_diagnosed(style, capsys):
    wrong = CORE.replace("(g - mean - xhat", "(g - xhat")
    assert wrong != CORE
    assert main(["check", write(wrong + CLASSES[style])]) == 1, capsys.readouterr()
    assert "the mean of g is missing from dx" in shown(capsys)[0]


@pytest.mark.parametrize("style", ["returned", "in attributes, a shape", "dicts"])
def test_a_wrong_dgamma_is_found_wherever_it_is(style, capsys):
    wrong = CORE.replace("(dy * xhat).sum(lead)", "(dy * xhat).mean(lead)")
    assert main(["check", write(wrong + CLASSES[style])]) == 1, capsys.readouterr()
    assert "dgamma is averaged over the rows, not summed" in shown(capsys)[0]


BOTH = CLASSES["returned"] + CLASSES["accumulated"]
NO_GAMMA = CORE + CLASSES["returned"].replace("def __init__(self, n", "def __init__(self, a, n")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CORE + BOTH, [], "and the classes LayerNorm, Norm: choose one with --class"),
        (CORE + BOTH, ["--class", "Layer"], "--class must be a class with forward(x) and"),
        (CORE + BOTH, ["--class", "Norm", "--forward", "stats"], "--class must be given without"),
        (
            NO_GAMMA,
            [],
            "LayerNorm must be made from the length of a row, tried LayerNorm(8): mine.py: TypeE",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line(text, options, message, capsys):
    assert main(["check", write(text), *options]) == 2
    out, err = shown(capsys)
    assert out == ""
    assert message in err


def test_one_of_several_classes_is_chosen(capsys):
    assert main(["check", write(CORE + BOTH), "--class", "Norm"]) == 0
    assert "eps 1e-06 (read off y: the forward does not take it)" in shown(capsys)[0]
