"""The last step of the sums over rows: add up the tiles, round once."""

from __future__ import annotations

import numpy as np

from stablenorm.kernels._compiling import bits
from stablenorm.kernels._jobs import total_job
from stablenorm.types import Array


def write_total(sums: Array, which: int, out: Array) -> None:
    """Write the sum of dgamma, 0, or dbeta, 1, over the tiles of `sums` into `out`."""
    total = out if out.ndim == 1 and out.flags.c_contiguous else np.empty(out.size, out.dtype)
    total_job(out.dtype)(sums, out.size, which, bits(total))
    if total is not out:
        out[...] = total.reshape(out.shape)
