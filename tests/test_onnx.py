"""
The node cases of ONNX: 19 of LayerNormalization, 19 of RMSNormalization, float32 throughout.

They are the test_data_set_0 of test_layer_normalization_* and test_rms_normalization_* that
github.com/onnx/onnx (Apache-2.0) kept in onnx/backend/test/data/node until commit a8f77b5b9, opsets
17 and 23. Its generator draws them from NumPy's seed 0, and since then they exist only so. They are
drawn here in the same order; a digest of all their tensors says that no bit differs.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import pytest
from norms import NORMS

# By operator: the digest of X, W, (B,) Y, (Mean, InvStdDev) of all cases, as ONNX stored them.
DIGESTS = {
    "layer": "606f72f8051a09468cd2b580331e288b4c4325347c8d6c935e255d0e919b5e5d",
    "rms": "3670142d597e80c34ad83a48202b76da21292167e1bf400170805c3c33b7f9cd",
}
# The shape of X, epsilon (a float32 attribute), and the axes in the order of the draws. Axis k
# stands for all axes from k on. The second is the default axis.
DRAWS = [
    ((2, 3, 4, 5), 1e-5, (0, -4, 1, -3, 2, -2, 3, -1)),
    ((2, 3, 4, 5), 1e-5, (-1,)),
    ((3, 4), 1e-5, (0, -2, 1, -1)),
    ((2, 3, 5), 1e-1, (0, -3, 1, -2, 2, -1)),
]


class Case(NamedTuple):
    x: np.ndarray
    gamma: np.ndarray
    beta: np.ndarray | None
    eps: float
    axis: tuple[int, ...]

    def rows(self, array):
        """Return an array of the shape of x, or of gamma, as (rows, n)."""
        return array.reshape(-1, self.gamma.size)

    def expected(self):
        """Return Y and, of a layer norm, Mean and InvStdDev as (rows, 1): ONNX's own results."""
        x, n, eps = self.rows(self.x), self.gamma.size, np.float32(self.eps)
        mean = x.sum(axis=1, keepdims=True) / n if self.beta is not None else np.float32(0)
        centered = x - mean
        rstd = np.reciprocal(np.sqrt((centered * centered).sum(axis=1, keepdims=True) / n + eps))
        y = (centered * rstd).reshape(self.x.shape) * self.gamma
        return (y,) if self.beta is None else (y + self.beta, mean, rstd)


def draw(operator):
    for shape, eps, axes in DRAWS:
        rng = np.random.RandomState(0)
        x = rng.standard_normal(shape).astype(np.float32)
        for axis in axes:
            gamma, beta = rng.standard_normal(shape[axis:]).astype(np.float32), None
            if operator == "layer":
                beta = rng.standard_normal(shape[axis:]).astype(np.float32)
            normalized = tuple(range(axis % len(shape), len(shape)))
            yield Case(x, gamma, beta, float(np.float32(eps)), normalized)


@pytest.mark.parametrize("operator", DIGESTS)
def test_the_cases_are_those_of_onnx(operator):
    tensors = [
        array
        for case in draw(operator)
        for array in (case.x, case.gamma, case.beta, *case.expected())
        if array is not None
    ]
    assert len(tensors) == 19 * {"layer": 6, "rms": 3}[operator]
    assert {array.dtype for array in tensors} == {np.dtype("float32")}
    stored = b"".join(array.astype("<f4").tobytes() for array in tensors)
    assert hashlib.sha256(stored).hexdigest() == DIGESTS[operator]


@pytest.mark.parametrize("operator", NORMS)
def test_ours_are_exact(operator, backend):
    forward, _, exact_norm = NORMS[operator]
    for case in draw(operator):
        parameters = [array for array in (case.gamma, case.beta) if array is not None]
        y, _ = forward(case.x, *parameters, eps=case.eps, axis=case.axis, backend=backend)
        flat = [array.ravel() for array in parameters]
        exact = exact_norm(case.rows(case.x), *flat, eps=case.eps)
        assert exact.ulp_errors(y=case.rows(y))["y"].max() <= 0.501
