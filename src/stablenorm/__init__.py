"""Layer normalization and its hand-derived gradients for NumPy, correctly rounded."""

from stablenorm._threads import get_num_threads, set_num_threads
from stablenorm._types import Cache, Gradients
from stablenorm.functional import layer_norm, layer_norm_backward, layer_norm_forward
from stablenorm.gradcheck import (
    GradientReport,
    assert_gradients,
    check_gradients,
    check_layer_norm,
)
from stablenorm.layer import LayerNorm
from stablenorm.oracle import exact_layer_norm
from stablenorm.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "GradientReport",
    "Gradients",
    "LayerNorm",
    "Workspace",
    "assert_gradients",
    "check_gradients",
    "check_layer_norm",
    "exact_layer_norm",
    "get_num_threads",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "set_num_threads",
]
