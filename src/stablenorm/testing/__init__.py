"""For test suites of other layer norms: hard inputs, the plain formula, limits that follow."""

from stablenorm.testing.asserts import Report, assert_layer_norm, assert_rms_norm, explain
from stablenorm.testing.families import FAMILIES, Case, Family, make_case
from stablenorm.testing.fixed import (
    NearMidpoint,
    digest,
    digest_inputs,
    near_midpoints,
    published_digests,
)
from stablenorm.testing.judge import JudgeReport, judge
from stablenorm.testing.limits import Arithmetic
from stablenorm.testing.plain import plain_backward, plain_forward

__all__ = [
    "FAMILIES", "Arithmetic", "Case", "Family", "JudgeReport", "NearMidpoint", "Report", "assert_layer_norm",
    "assert_rms_norm", "digest", "digest_inputs", "explain", "judge", "make_case", "near_midpoints",
    "plain_backward", "plain_forward", "published_digests",
]  # fmt: skip
