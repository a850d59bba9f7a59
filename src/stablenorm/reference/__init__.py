"""
The equations in NumPy on (rows, n), in float64 or double-double, rounded once: what all else copies.
"""

from stablenorm.reference.equations import backward, forward, project
from stablenorm.reference.nearest import backward_nearest, columns_nearest, forward_nearest

# Here the statistics cost nothing beside the rest.
normalize = forward

__all__ = [
    "backward",
    "backward_nearest",
    "columns_nearest",
    "forward",
    "forward_nearest",
    "normalize",
    "project",
]
