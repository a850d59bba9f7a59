"""Check hand-written gradients against finite differences that estimate their own error."""

from stablenorm.check.gradients import assert_gradients, check_gradients
from stablenorm.check.norms import check_layer_norm, check_rms_norm
from stablenorm.check.results import ArgumentResult, Finding, GradientReport

__all__ = [
    "ArgumentResult", "Finding", "GradientReport",
    "assert_gradients", "check_gradients", "check_layer_norm", "check_rms_norm",
]  # fmt: skip
