"""The network of examples/train_digits.py: its gradients, and that it learns."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from stablenorm import check_gradients

PATH = Path(__file__).parent.parent / "examples" / "train_digits.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(example, rng):
    """Two layers, each with a norm, away from gamma = 1 and beta = 0."""
    parameters = example.make_parameters(rng, depth=2, width=5, pixels=6)
    parameters = [p + 0.2 * rng.standard_normal(p.shape) for p in parameters]
    return [rng.standard_normal((3, 6)), *parameters]


def test_the_gradients_of_all_layers_together_are_right(example, rng):
    report = check_gradients(example.forward, example.backward, small(example, rng), rng=0)
    assert report.verdict == "PASS", str(report)


def test_a_backward_without_the_norm_of_one_layer_is_found(example, rng):
    """The check of the page can fail: it is no ornament."""

    def without_the_first_norm(dlogits, cache):
        layers, x, weight = cache
        first = (*layers[0][:3], None)
        gradients = example.backward(dlogits, ([first, *layers[1:]], x, weight))
        # gamma and beta of it are not there then; what is left is in order.
        return [gradients[0], None, None, *gradients[1:]]

    report = check_gradients(example.forward, without_the_first_norm, small(example, rng), rng=0)
    assert report.verdict == "FAIL"
    assert report.arguments[0].verdict == "FAIL"


def test_the_loss_and_its_gradient(example, rng):
    logits, labels = rng.standard_normal((4, 10)), np.array([3, 0, 9, 3])

    def forward(logits):
        loss, dlogits = example.cross_entropy(logits, labels)
        return np.asarray(loss), dlogits

    def backward(dy, dlogits):
        return (dy * dlogits,)

    report = check_gradients(forward, backward, [logits], rng=0)
    assert report.verdict == "PASS", str(report)


def test_equal_logits_cost_log_10(example):
    loss, _ = example.cross_entropy(np.zeros((2, 10)), np.array([0, 9]))
    assert loss == pytest.approx(np.log(10), rel=1e-15)


def test_a_few_steps_lower_the_loss_and_are_the_same_again(example):
    losses, parameters = example.train(0.1, example.DEPTH, steps=60)
    again, _ = example.train(0.1, example.DEPTH, steps=5)
    assert losses[:5] == again
    # Guessing costs log(10) = 2.30, and is what the network begins at.
    assert np.mean(losses[-10:]) < 2.2 < np.mean(losses[:5])
    assert example.measure_accuracy(parameters, count=300) > 0.15
    assert all(p.dtype == np.float32 for p in parameters)


def test_the_digits_are_ten_different_ones_of_the_sizes_told(example, rng):
    assert example.DIGITS.shape == (10, 7, 5)
    assert len({digit.tobytes() for digit in example.DIGITS}) == 10
    images, labels = example.draw(rng, 500)
    assert images.shape == (500, example.SIDE**2)
    assert images.dtype == np.float32
    assert set(labels) == set(range(10))


def test_a_norm_on_the_images_takes_away_brightness_and_contrast(example, rng):
    """The reason that the page gives: to the layers after it, both images are the same."""
    images, _ = example.draw(rng, 4)
    parameters = [p.astype(np.float32) for p in example.make_parameters(rng, norms=1)]
    logits, _ = example.forward(images, *parameters)
    changed, _ = example.forward(np.float32(8) * images + np.float32(4), *parameters)
    # eps, beside the least variance, and the rounding of the changed images: each below 1e-3.
    np.testing.assert_allclose(changed, logits, atol=1e-2 * np.abs(logits).max())
