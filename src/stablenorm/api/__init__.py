"""The public functions: signatures, docstrings, and one call each."""

from stablenorm.api.norms import FUNCTIONS as FUNCTIONS
