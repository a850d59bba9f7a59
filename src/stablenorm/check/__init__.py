"""
Check hand-written gradients against finite differences that estimate their own error.

An instrument: it takes functions and knows nothing of the ones it is pointed at. `forward(*args)`
returns ``(y, cache)``, `backward(dy, cache)` the gradients in the order of `args`.
"""

from stablenorm.check.gradients import assert_gradients, check_gradients
from stablenorm.check.layer_norm import check_layer_norm, check_rms_norm
from stablenorm.check.results import ArgumentResult, Finding, GradientReport

__all__ = [
    "ArgumentResult", "Finding", "GradientReport",
    "assert_gradients", "check_gradients", "check_layer_norm", "check_rms_norm",
]  # fmt: skip
