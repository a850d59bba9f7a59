"""One warning per process of float64 parameters beside narrower x, at the line of the caller."""

import warnings

import numpy as np
import pytest

from stablenorm import LayerNorm, backends, layer_norm, layer_norm_forward

X = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    monkeypatch.setattr(backends, "_told", False)


@pytest.mark.parametrize("function", [layer_norm, layer_norm_forward, LayerNorm.forward])
@pytest.mark.parametrize("x", [X, X.T.copy().T, X.astype(np.float16)], ids=["C", "F", "f2"])
@pytest.mark.parametrize("which", ["gamma", "beta"])
def test_once_and_at_the_line_of_the_caller(function, x, which):
    given = {which: np.ones(4)}
    if function == LayerNorm.forward:
        norm = LayerNorm(4)
        norm.parameters |= given
        call = lambda: norm.forward(x)
    else:
        call = lambda: function(x, **given)
    with pytest.warns(RuntimeWarning, match=r"np.ones\(768, np.float32\)") as told:
        _ = call(), call()
    assert len(told) == 1
    assert told[0].filename == __file__


def test_an_error_comes_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeWarning, match="gamma and beta should be no wider than float32"):
            layer_norm(X, np.ones(4))


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_not_where_it_makes_no_difference(backend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_norm(X.astype(np.float64), np.ones(4), backend=backend)
        layer_norm(X.astype(np.float64), np.ones(4, np.float32), backend=backend)
        layer_norm(X.astype(np.float16), np.ones(4, np.float32), backend=backend)
        layer_norm(X, np.ones(4), backend="numpy")
