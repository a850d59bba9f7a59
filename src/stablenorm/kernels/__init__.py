"""
The CPU kernels, a fast copy of `stablenorm.reference` compiled by Numba.

`cpu` has `forward` and `backward`, with the parameters of those in the reference, on (rows, n). It
checks nothing: that is done above. y and dx of 16- and 32-bit types have the bits of the reference, in
all but a few in 10^9 elements, where they do not cancel almost completely.
"""
