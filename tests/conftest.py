"""Fixtures that every test file may ask for."""

import ml_dtypes
import numpy as np
import pytest

from stablenorm.backends import BACKENDS


@pytest.fixture(params=sorted(BACKENDS))
def backend(request):
    return request.param


@pytest.fixture(params=["float16", "bfloat16", "float32", "float64"])
def dtype(request):
    return np.dtype(ml_dtypes.bfloat16 if request.param == "bfloat16" else request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(20260229)
