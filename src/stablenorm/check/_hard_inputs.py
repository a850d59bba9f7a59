"""Inputs on which layer norms lose digits: how many, and which are wrong rather than inaccurate."""

from __future__ import annotations

import math

import numpy as np

from stablenorm.check._cases import Hard, hard_inputs
from stablenorm.check._expected import Case, unit
from stablenorm.check._program import Judged, Program
from stablenorm.check._report import Finding

LAYER = "hard inputs"
# Digits that even single precision keeps of a well-conditioned problem; a formula that is wrong
# there in the fourth digit is wrong.
_FOUR_DIGITS = 1e-4


def check_hard_inputs(program: Program, like: Case, rng: np.random.Generator) -> list[Finding]:
    """Run the program on hard inputs; loss of digits is a note, a wrong result a failure."""
    return [_judge(program, hard) for hard in hard_inputs(like, rng)]


def _judge(program: Program, hard: Hard) -> Finding:
    name = f"right for {hard.name}"
    outcome = program.run(hard.case)
    if outcome.error:
        # A restriction that the program states itself, not a wrong gradient.
        return Finding(LAYER, name, "NOTE", outcome.error)
    judged = program.judge(hard.case, outcome)
    for each in judged.values():
        if not np.isfinite(each.actual).all():
            message = f"{each.name} is not finite for {hard.name}"
            return Finding(LAYER, name, "FAIL" if hard.harmless else "NOTE", message)
    worst = max(judged.values(), key=lambda each: each.relative / each.u, default=None)
    if worst is None:
        return Finding(LAYER, name, "NOTE", "nothing was returned")
    resolution = max(each.resolution for each in judged.values())
    wrong = [each for each in judged.values() if each.wrong and each.relative > _FOUR_DIGITS]
    if hard.harmless and wrong:
        message = f"{wrong[0].name} is off by {wrong[0].relative:.1e} of what it is made of"
        return Finding(LAYER, name, "FAIL", message, resolution)
    lost = _digits_lost(worst)
    # A plain program loses to an offset what a careful one keeps: to be known, not to be blamed.
    if lost and not (hard.harmless and worst.right):
        digits = "1 digit" if lost == 1 else f"{lost} digits"
        # All that the precision has.
        if lost >= math.floor(-math.log10(worst.u)):
            digits = "all digits"
        message = f"{worst.name} is inaccurate here: loses {digits} at {hard.name}"
        return Finding(LAYER, name, "NOTE", message, resolution)
    return Finding(LAYER, name, "PASS", "", resolution)


def _digits_lost(judged: Judged) -> int:
    """Count the decimal digits lost of those that the sums of a plain program would keep."""
    kept = unit(max(judged.bounds.value.shape), judged.u)
    ratio = judged.relative / kept
    if not math.isfinite(ratio):
        return 16
    return max(0, math.floor(math.log10(ratio))) if ratio > 0 else 0
