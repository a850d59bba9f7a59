"""What was found about a user's layer norm: computed, told in sections, written as a page."""

from stablenorm.report.figures import draw_costs
from stablenorm.report.findings import Findings, Output, Problem, compute, inspect
from stablenorm.report.html import STEPS, make_page
from stablenorm.report.sections import (
    Section,
    Table,
    accuracy_section,
    cost_section,
    gradients_section,
)
from stablenorm.text import number, quantity, shape_text

__all__ = [
    "STEPS", "Findings", "Output", "Problem", "Section", "Table", "accuracy_section", "compute",
    "cost_section", "draw_costs", "gradients_section", "inspect", "make_page", "number",
    "quantity", "shape_text",
]  # fmt: skip
