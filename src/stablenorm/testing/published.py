"""
Rows that went wrong in public: the inputs of issue threads, and the right results.

If a thread gives a recipe with random numbers, the recipe draws the rows, from one fixed seed.
"""

from typing import Any, NamedTuple

import numpy as np

from stablenorm.formats import format_of, parse
from stablenorm.types import Array


class Published(NamedTuple):
    """
    Rows that went wrong in public.

    `x` is (rows, n), float64. `y` is the right result of each row where one is known, good to
    `digits` decimals; `gamma` and `beta` are the same for all elements.
    """

    source: str
    title: str
    x: Array
    y: tuple[float, ...] | None = None
    digits: int = 0
    eps: float = 1e-5
    gamma: float = 1.0
    beta: float = 0.0

    def fits(self, dtype: Any) -> bool:
        """Tell whether the range of `dtype` holds the rows and gamma."""
        return bool(max(np.abs(self.x).max(), abs(self.gamma)) <= format_of(parse(dtype)).largest)

    def arguments(self, dtype: Any) -> tuple[Array, Array, Array, float]:
        """Return x, gamma, beta and eps, the arrays rounded to `dtype`; see `fits`."""
        n = self.x.shape[1]
        gamma, beta = np.full(n, self.gamma), np.full(n, self.beta)
        return self.x.astype(dtype), gamma.astype(dtype), beta.astype(dtype), self.eps


_rng, _ones, _steps = np.random.default_rng(51102), np.ones, np.arange(4.0)[None]
_spread = (-1.3416, -0.4472, 0.4472, 1.3416)
_ragged = 1000 + 100 * np.arange(8)[:, None] + (np.arange(769) % 17 - 8) / 8
PUBLISHED = (
    Published("onnxruntime 28463", "40000 to 40003: NaN", 40_000 + _steps, _spread, 4),
    Published("onnxruntime 28463, tvm 19592", "80000 to 80003", 80_000 + _steps, _spread, 4),
    Published("onnxruntime 21935", "256 of 1234: NaN", 1234 * _ones((1, 256)), (0.0,) * 256, 7),
    # std 496 is var 246 000, too large for float16.
    Published("onnxruntime 17692", "float16, std 496", 496 * _rng.standard_normal((4, 96))),
    Published("pytorch 51102", "2000 + N, n = 4", 2000 + _rng.standard_normal((64, 4))),
    Published("pytorch 40302", "100 + 0.01 N", 100 + 0.01 * _rng.standard_normal((8, 500))),
    Published("pytorch 98075", "gamma 1e11", -3 * _ones((1, 1)), (-1.0,), 16, 0.1, 1e11, -1.0),
    Published("pytorch 188372", "n = 1, x = 1e6", 1e6 * _ones((5, 1)), (0.0,), 16),
    Published("burn 5607", "100 + 0.001 i", 100 + 1e-3 * np.arange(64.0).reshape(2, 32)),
    Published("mlx 2238", "16 values of a model near 1449: NaN", np.array([[
        1449.570556640625, 1448.8741455078125, 1450.650390625, 1449.2633056640625, 1449.7763671875,
        1449.317138671875, 1449.3297119140625, 1449.077880859375, 1449.2181396484375,
        1449.4329833984375, 1449.1605224609375, 1449.413330078125, 1449.7933349609375,
        1450.066650390625, 1449.7762451171875, 1450.364990234375]])),
    Published("flax 1491", "a constant of 1e4", 1e4 * _ones((4, 64)), (0.0,) * 64, 7),
    Published("tt-metal 55159", "1e25 N: zeros", 1e25 * _rng.standard_normal((4, 64))),
    Published("quack", "n = 769 far from 0: padding entered the variance", _ragged),
)  # fmt: skip
