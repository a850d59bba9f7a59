"""
A deep network for drawn digits, in NumPy alone, trained with a layer norm and without.

Every backward is written by hand: that of the layer norm is stablenorm's, that of the rest is here,
and `check_gradients` checks all of it together. Run it: ``python examples/train_digits.py``. It
checks the gradients, then trains at three rates; half a minute.

The digits are drawn by `draw`, from the 5x7 letters below: moved, of every brightness, with noise.
They are no data set of anybody's, and easy for a network that sees a million of them. What they
show is how far the training gets, and how much that depends on the rate.
"""

import numpy as np

from stablenorm import check_gradients, layer_norm_backward, layer_norm_forward

# Written for this file; a # is ink.
FONT = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #...# ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# #...#
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .###.
"""
INK = np.array([[list(letter) for letter in line.split()] for line in FONT.split("\n")[1:-1]])
# (10, 7, 5)
DIGITS = (INK == "#").transpose(1, 0, 2)

SIDE = 12
# Deep enough that without a layer norm the rate must be chosen with care.
DEPTH, WIDTH = 6, 96
# How many of the layers begin with a layer norm: each, the first (which sees the images), none.
NORMS = {"in every layer": DEPTH, "on the images only": 1, "nowhere": 0}
RATES = (0.01, 0.1, 1.0)
STEPS, BATCH = 1000, 64


def draw(rng, count):
    """Draw `count` images, (count, 144), and the digits on them."""
    labels = rng.integers(10, size=count)
    images = 0.2 * rng.standard_normal((count, SIDE, SIDE))
    for image, label in zip(images, labels, strict=True):
        top, left = rng.integers(SIDE - 6), rng.integers(SIDE - 4)
        image[top : top + 7, left : left + 5] += DIGITS[label]
    # Every image has a brightness and a contrast of its own, as photographs have.
    contrast = np.exp(rng.uniform(-2, 2, (count, 1, 1)))
    images = contrast * (images + rng.uniform(-2, 2, (count, 1, 1)))
    return images.reshape(count, -1).astype(np.float32), labels


def make_parameters(rng, depth=DEPTH, width=WIDTH, norms=DEPTH, pixels=SIDE**2):
    """Return one list: for each layer gamma and beta, if it has a norm, then weight and bias."""
    parameters = []
    for layer, inputs in enumerate([pixels] + [width] * (depth - 1)):
        # He's variance, made for half of a signal lost: it keeps its size, with a norm or without.
        if layer < norms:
            parameters += [np.ones(inputs), np.zeros(inputs)]
        parameters += [rng.standard_normal((inputs, width)) * np.sqrt(2 / inputs), np.zeros(width)]
    parameters += [rng.standard_normal((width, 10)) * np.sqrt(1 / width), np.zeros(10)]
    return parameters


def sigmoid(z):
    """Return 1 / (1 + exp(-z)); exp overflows to inf, which gives 0, for z < -88 in float32."""
    return 1 / (1 + np.exp(-z))


def forward(x, *parameters):
    """Return the logits, and what `backward` needs: for each layer input, weight, z and cache."""
    layers = []
    left = list(parameters)
    while len(left) > 2:
        cache = None
        # Vectors come first only where there is a norm: its gamma and beta.
        if left[0].ndim == 1:
            x, cache = layer_norm_forward(x, left.pop(0), left.pop(0))
        weight, bias = left.pop(0), left.pop(0)
        z = x @ weight + bias
        layers.append((x, weight, z, cache))
        x = z * sigmoid(z)
    weight, bias = left
    return x @ weight + bias, (layers, x, weight)


def backward(dlogits, cache):
    """Return the gradients of x and of the parameters, in the order of `forward`."""
    layers, x, weight = cache
    gradients = [x.T @ dlogits, dlogits.sum(axis=0)]
    dx = dlogits @ weight.T
    for inputs, weight, z, norm_cache in reversed(layers):
        p = sigmoid(z)
        # The product rule on z * sigmoid(z), where sigmoid' = p (1 - p).
        dz = dx * p * (1 + z * (1 - p))
        gradients = [inputs.T @ dz, dz.sum(axis=0), *gradients]
        dx = dz @ weight.T
        if norm_cache is not None:
            dx, dgamma, dbeta = layer_norm_backward(dx, norm_cache)
            gradients = [dgamma, dbeta, *gradients]
    return [dx, *gradients]


def cross_entropy(logits, labels):
    """Return the mean of -log softmax(logits)[label], and its gradient: (softmax - one-hot)/rows."""
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    dlogits = np.exp(log_p)
    dlogits[rows, labels] -= 1
    return float(-log_p[rows, labels].mean()), dlogits / np.float32(len(labels))


def train(rate, norms, steps=STEPS, seed=0):
    """Train by plain gradient descent, new images in every step; return losses and parameters."""
    rng = np.random.default_rng(seed)
    parameters = [p.astype(np.float32) for p in make_parameters(rng, norms=norms)]
    losses = []
    # Without the norm and at a high rate it overflows; that is a result, not an accident.
    with np.errstate(all="ignore"):
        for _ in range(steps):
            x, labels = draw(rng, BATCH)
            logits, cache = forward(x, *parameters)
            loss, dlogits = cross_entropy(logits, labels)
            losses.append(loss)
            for parameter, gradient in zip(parameters, backward(dlogits, cache)[1:], strict=True):
                parameter[...] -= np.float32(rate) * gradient
    return losses, parameters


def measure_accuracy(parameters, count=2000):
    """Return the part of `count` new images whose digit is found."""
    # A seed of its own: no image of the training.
    x, labels = draw(np.random.default_rng(99), count)
    with np.errstate(all="ignore"):
        logits, _ = forward(x, *parameters)
    return float((logits.argmax(axis=-1) == labels).mean())


def check(seed=0):
    """Check the gradients of a small one, of three layers, in float64; return the report."""
    rng = np.random.default_rng(seed)
    parameters = make_parameters(rng, depth=3, width=7, pixels=9)
    # Not at their beginnings: gamma = 1 would hide a gamma that is missing, beta = 0 a beta.
    parameters = [p + 0.2 * rng.standard_normal(p.shape) for p in parameters]
    args = [rng.standard_normal((5, 9)), *parameters]
    return check_gradients(forward, backward, args, rng=seed)


def main():
    """Check, then train with each number of norms at each rate, and say how far it got."""
    print("gradients of all layers together:", check().verdict)
    print(f"{'layer norm':<20} {'rate':<6} {'loss, last 50 steps':<20} digits found")
    for name, norms in NORMS.items():
        for rate in RATES:
            losses, parameters = train(rate, norms)
            last, accuracy = np.mean(losses[-50:]), measure_accuracy(parameters)
            print(f"{name:<20} {rate:<6} {last:<20.3f} {accuracy:.1%}")


if __name__ == "__main__":
    main()
