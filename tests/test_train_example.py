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


def test_the_gradients_of_all_layers_together_are_right_and_a_missing_norm_is_found(example, rng):
    # Two layers, each with a norm, away from gamma = 1 and beta = 0.
    parameters = example.make_parameters(rng, depth=2, width=5, pixels=6)
    parameters = [p + 0.2 * rng.standard_normal(p.shape) for p in parameters]
    arguments = [rng.standard_normal((3, 6)), *parameters]

    def without_the_first_norm(dlogits, cache):
        layers, x, weight = cache
        first = (*layers[0][:3], None)
        gradients = example.backward(dlogits, ([first, *layers[1:]], x, weight))
        # gamma and beta of it are not there then; what is left is in order.
        return [gradients[0], None, None, *gradients[1:]]

    report = check_gradients(example.forward, example.backward, arguments, rng=0)
    assert report.verdict == "PASS", str(report)
    report = check_gradients(example.forward, without_the_first_norm, arguments, rng=0)
    assert report.arguments[0].verdict == "FAIL"


def test_the_loss_and_its_gradient(example, rng):
    logits, labels = rng.standard_normal((4, 10)), np.array([3, 0, 9, 3])

    def forward(logits):
        loss, dlogits = example.cross_entropy(logits, labels)
        return np.asarray(loss), dlogits

    report = check_gradients(forward, lambda dy, dlogits: (dy * dlogits,), [logits], rng=0)
    assert report.verdict == "PASS", str(report)


def test_a_few_steps_lower_the_loss(example):
    losses, parameters = example.train(0.1, example.DEPTH, steps=60)
    # Guessing costs log(10) = 2.30, and is what the network begins at.
    assert np.mean(losses[-10:]) < 2.2 < np.mean(losses[:5])
    assert example.measure_accuracy(parameters, count=300) > 0.15


def test_a_norm_on_the_images_takes_away_brightness_and_contrast(example, rng):
    """The reason that the page gives: to the layers after it, both images are the same."""
    images, _ = example.draw(rng, 4)
    parameters = [p.astype(np.float32) for p in example.make_parameters(rng, norms=1)]
    logits, _ = example.forward(images, *parameters)
    changed, _ = example.forward(np.float32(8) * images + np.float32(4), *parameters)
    # eps, beside the least variance, and the rounding of the changed images: each below 1e-3.
    np.testing.assert_allclose(changed, logits, atol=1e-2 * np.abs(logits).max())
