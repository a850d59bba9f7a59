"""The public functions."""

from stablenorm.functional.layer_norm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)

__all__ = ["layer_norm", "layer_norm_backward", "layer_norm_forward"]
