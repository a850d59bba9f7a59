"""What was found about a user's layer norm: computed, told in sections, written as a page."""

from stablenorm.report.figures import draw_costs
from stablenorm.report.findings import Findings, Output, Problem, compute, inspect
from stablenorm.report.html import STEPS, Facts, gather, page
from stablenorm.report.sections import (
    Picture,
    Section,
    Table,
    accuracy_section,
    cost_section,
    gradients_section,
    number,
    quantity,
    shape_text,
)

__all__ = [
    "STEPS", "Facts", "Findings", "Output", "Picture", "Problem", "Section", "Table",
    "accuracy_section", "compute", "cost_section", "draw_costs", "gather", "gradients_section",
    "inspect", "number", "page", "quantity", "shape_text",
]  # fmt: skip
