"""
The exact answer of layer normalization and of its gradients, to judge implementations by.

Every float is an integer times a power of two, so mean, variance and all sums of a row are exact
integers over known denominators; the only irrational number is ``rstd``, enclosed by one integer
square root a row. Comparisons that this enclosure leaves open are settled exactly, so whether an
element is correctly rounded is decided, never estimated. Nothing here is shared with the code that
is judged; NumPy only reads and writes the arrays.
"""

from stablenorm.oracle.exact import ContractResult, ExactLayerNorm, exact_layer_norm

__all__ = ["ContractResult", "ExactLayerNorm", "exact_layer_norm"]
