"""
The exact answers of layer norm, RMS norm and their derivatives, to judge implementations by.

Every float is an integer times a power of two, so mean, variance and all sums of a row are exact
integers over known denominators; the only irrational number is ``rstd``, enclosed by one integer
square root a row. Comparisons that this enclosure leaves open are settled exactly, so whether an
element is correctly rounded is decided, never estimated. Nothing here is shared with the code that
is judged; NumPy only reads and writes the arrays.
"""

from stablenorm.oracle.exact import ContractResult, ExactNorm
from stablenorm.oracle.norms import exact_double_backward, exact_layer_norm, exact_rms_norm

__all__ = [
    "ContractResult", "ExactNorm", "exact_double_backward", "exact_layer_norm", "exact_rms_norm",
]  # fmt: skip
