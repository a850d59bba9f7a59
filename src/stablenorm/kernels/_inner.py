"""How the functions that the jobs are made of are compiled: to be called by one another alone."""

from __future__ import annotations

from typing import Any

from numba import njit

# Division by zero gives what IEEE 754 says, not an exception. Without the ways in from Python and
# from C, which hold copies of the function, the first call compiles in three quarters of the time;
# but to call one from Python is to jump to address 0.
_options: dict[str, Any] = {
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
inner = njit(**_options)

# The same, but part of whatever calls it: with vectors among the arguments, and more than one place
# to be called from, a call would take as long as ten rounds of a loop.
inlined = njit(forceinline=True, **_options)
