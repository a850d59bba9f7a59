"""The public functions: signatures, docstrings, and one call each."""

from stablenorm.api.derivatives import (
    layer_norm_double_backward,
    layer_norm_jvp,
    rms_norm_double_backward,
    rms_norm_jvp,
)
from stablenorm.api.layer_norm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from stablenorm.api.rms_norm import rms_norm, rms_norm_backward, rms_norm_forward

__all__ = [
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_double_backward",
    "layer_norm_forward",
    "layer_norm_jvp",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_double_backward",
    "rms_norm_forward",
    "rms_norm_jvp",
]

# By the kind of the norm: forward and backward.
FUNCTIONS = {
    "layer": (layer_norm_forward, layer_norm_backward),
    "rms": (rms_norm_forward, rms_norm_backward),
}
