"""The public functions: signatures, docstrings, and one call each."""

from stablenorm.api.norms import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

# By the kind of the norm: forward and backward.
FUNCTIONS = {
    "layer": (layer_norm_forward, layer_norm_backward),
    "rms": (rms_norm_forward, rms_norm_backward),
}
