"""Layer normalization and its hand-derived gradients for NumPy, within 0.501 ulp."""

import importlib
from typing import TYPE_CHECKING, Any

from stablenorm.api.derivatives import (
    layer_norm_double_backward,
    layer_norm_jvp,
    rms_norm_double_backward,
    rms_norm_jvp,
)
from stablenorm.api.norms import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from stablenorm.layer import LayerNorm, RMSNorm
from stablenorm.records import Cache, Gradients
from stablenorm.threads import get_num_threads, set_num_threads

if TYPE_CHECKING:
    from stablenorm.check import (
        GradientReport,
        assert_gradients,
        check_gradients,
        check_layer_norm,
        check_rms_norm,
    )
    from stablenorm.diagnosis import Diagnosis, diagnose
    from stablenorm.oracle import exact_layer_norm, exact_rms_norm

__version__ = "0.1.0"

__all__ = [
    "Cache", "Diagnosis", "GradientReport", "Gradients", "LayerNorm", "RMSNorm", "assert_gradients",
    "check_gradients", "check_layer_norm", "check_rms_norm", "diagnose", "exact_layer_norm",
    "exact_rms_norm", "get_num_threads", "layer_norm", "layer_norm_backward",
    "layer_norm_double_backward", "layer_norm_forward", "layer_norm_jvp", "rms_norm",
    "rms_norm_backward", "rms_norm_double_backward", "rms_norm_forward", "rms_norm_jvp",
    "set_num_threads",
]  # fmt: skip

# The instruments are loaded when first asked for: they take twice as long as all the rest, 0.06 s.
_LATER = {
    "check": "GradientReport assert_gradients check_gradients check_layer_norm check_rms_norm",
    "diagnosis": "Diagnosis diagnose",
    "oracle": "exact_layer_norm exact_rms_norm",
}


def __getattr__(name: str) -> Any:
    for room, names in _LATER.items():
        if name in names.split():
            module = importlib.import_module(f"{__name__}.{room}")
            value = globals()[name] = getattr(module, name)
            return value
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
