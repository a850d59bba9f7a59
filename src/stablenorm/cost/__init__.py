"""
What a layer or RMS norm costs: counted by formulas, and measured beside the roofline of this machine.

Three programs are counted: the plain formula in NumPy, the reference, and the fused CPU kernel.
They do the same algebra. What tells them apart is how often each byte is moved.
"""

from stablenorm.cost._counts import DIRECTIONS, PROGRAMS, Cost, count_cost, count_kept
from stablenorm.cost._measure import Line, Measured, Roofline, draw_roofline, measure_costs

__all__ = [
    "DIRECTIONS", "PROGRAMS", "Cost", "Line", "Measured", "Roofline", "count_cost",
    "count_kept", "draw_roofline", "measure_costs",
]  # fmt: skip
