"""
What a layer norm costs: operations, bytes moved and bytes held, from formulas in rows, n and itemsize.

One model of four implementations: plain NumPy (`analysis.plain`), the reference, the fused CPU kernel
and the fused GPU kernel. The tests hold all four against instrumented runs, by nothing but the
formulas shown. It knows nothing of what runs: tiles, launches and ceilings come from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stablenorm.analysis import _counts_fused, _counts_numpy
from stablenorm.analysis._counts import Cost, Term, cost_of, evaluate, total
from stablenorm.analysis._counts_gpu import GPU_BACKWARD, GPU_FORWARD, Launch, count_lanes
from stablenorm.analysis._counts_held import HELD, POLICIES

IMPLEMENTATIONS = ("plain NumPy", "reference", "fused CPU", "fused GPU")
DIRECTIONS = ("forward", "backward")
ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# Of the kernels and of the reference: rows that go together and how long they may be, columns of a
# span, elements of a block. The tests compare each with the place where it is in force.
GROUP, LONGEST_IN_GROUP, SPAN, BLOCK = 4, 16384, 1024, 1 << 15

_TERMS: dict[tuple[str, str, bool], tuple[Term, ...]] = {
    ("plain NumPy", "forward", False): _counts_numpy.PLAIN_FORWARD,
    ("plain NumPy", "backward", False): _counts_numpy.PLAIN_BACKWARD,
    ("reference", "forward", False): _counts_numpy.REFERENCE_FORWARD,
    ("reference", "backward", False): _counts_numpy.REFERENCE_BACKWARD,
    ("reference", "forward", True): _counts_numpy.WIDE_REFERENCE_FORWARD,
    ("reference", "backward", True): _counts_numpy.WIDE_REFERENCE_BACKWARD,
    ("fused CPU", "forward", False): _counts_fused.NARROW_FORWARD,
    ("fused CPU", "backward", False): _counts_fused.NARROW_BACKWARD,
    ("fused CPU", "forward", True): _counts_fused.WIDE_FORWARD,
    ("fused CPU", "backward", True): _counts_fused.WIDE_BACKWARD,
    ("fused GPU", "forward", False): GPU_FORWARD,
    ("fused GPU", "backward", False): GPU_BACKWARD,
}


class Ceilings(NamedTuple):
    """
    What a machine can do at most, each measured, a second.

    `memory` is bytes that a copy beyond the caches reads and writes, `cached` those of one within
    them, in as many threads as what is predicted uses; the others are what compiled loops do:
    floating-point operations of multiply-adds alone, two to each; additions alone; additions and
    multiply-adds together, as many of each; divisions; elements of the type of x read and
    converted, or rounded and written; float64 words read, or written.
    """

    memory: float
    cached: float
    flops: float
    additions: float
    operations: float
    divisions: float
    loads: float
    stores: float
    fetches: float
    keeps: float


class Time(NamedTuple):
    """Seconds that a model predicts, and what they are made of."""

    seconds: float
    memory: float
    arithmetic: float


def count_terms(
    implementation: str,
    direction: str,
    matrix: tuple[int, int],
    dtype: str,
    *,
    tiles: int = 1,
    launch: Launch | None = None,
) -> list[tuple[Term, Cost]]:
    """
    Count what each step of an implementation does.

    Parameters
    ----------
    implementation : {"plain NumPy", "reference", "fused CPU", "fused GPU"}
        Whose steps.
    direction : {"forward", "backward"}
        All outputs of it.
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.
    tiles : int, default: 1
        Into how many the backward of the fused CPU kernel divides the rows.
    launch : Launch, optional
        Of the fused GPU kernel, which is not counted without it.

    Returns
    -------
    list of pairs of a Term and a Cost
        The formulas, and their values; empty where the implementation does not take the dtype.

    Notes
    -----
    The fused CPU kernel takes rows of fewer than 64 elements (backward: of up to 40) a row a lane;
    these counts are of the kernel for longer rows. The arithmetic of the reference on float64 is
    counted, its temporary bytes are not. The fused GPU kernel is counted for 16- and 32-bit data in
    float64 arithmetic; its arithmetic in pairs, which float64 takes, is not.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import count_terms
    >>> term, cost = count_terms("plain NumPy", "forward", (10, 768), "float32")[1]
    >>> term.name, term.single, cost.flops
    ('sum of x', 'rows n - rows', 7670)
    """
    if implementation == "fused GPU" and launch is None:
        return []
    values = count_sizes(matrix, dtype, tiles, launch)
    wide = dtype == "float64" and implementation != "plain NumPy"
    terms = _TERMS.get((implementation, direction, wide), ())
    counted = [(term, cost_of(term, values)) for term in terms]
    if implementation == "plain NumPy":
        # Whole arrays, each new: nothing of them is still in the caches when it is needed.
        return [(term, cost._replace(memory=cost.moved)) for term, cost in counted]
    return counted


def count_all(
    implementation: str,
    direction: str,
    matrix: tuple[int, int],
    dtype: str,
    *,
    tiles: int = 1,
    launch: Launch | None = None,
) -> Cost | None:
    """
    Count what an implementation does in all.

    Parameters
    ----------
    implementation : {"plain NumPy", "reference", "fused CPU", "fused GPU"}
        Whose steps.
    direction : {"forward", "backward"}
        All outputs of it.
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.
    tiles : int, default: 1
        Into how many the backward of the fused CPU kernel divides the rows.
    launch : Launch, optional
        Of the fused GPU kernel, which is not counted without it.

    Returns
    -------
    Cost or None
        The sum of all terms; None where the implementation does not take the dtype.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import count_all
    >>> count_all("fused CPU", "forward", (1000, 768), "float32").memory == 1000 * (8 * 768 + 24) + 8 * 768
    True
    """
    terms = count_terms(implementation, direction, matrix, dtype, tiles=tiles, launch=launch)
    return total(cost for _, cost in terms) if terms else None


def count_sizes(
    matrix: tuple[int, int], dtype: str, tiles: int = 1, launch: Launch | None = None
) -> dict[str, int]:
    """
    Give the names in the formulas their values.

    Parameters
    ----------
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.
    tiles : int, default: 1
        Into how many the backward of the fused CPU kernel divides the rows.
    launch : Launch, optional
        Of the fused GPU kernel.

    Returns
    -------
    dict of str to int
        By name: rows, n, s and what follows from these.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import count_sizes
    >>> count_sizes((10, 100), "float32")["m"]
    104
    """
    rows, n = matrix
    s = ITEMSIZES[dtype]
    step = max(1, BLOCK // n)
    whole, rest = divmod(rows, step)
    return {
        "rows": rows,
        "n": n,
        "s": s,
        # Plain NumPy calculates in float32, or in float64 what is float64.
        "c": 8 if s == 8 else 4,
        "k": int(s == 2),
        "blocks": whole + (rest > 0),
        "halves": whole * _halves(step) + _halves(rest),
        "m": n + -n % 8,
        "spans": -(-n // SPAN),
        "groups": rows // GROUP + rows % GROUP,
        "turns": rows // GROUP + rows % GROUP if n <= LONGEST_IN_GROUP else rows,
        "tiles": tiles,
        "block": 8 * min(step, rows) * n,
        **({} if launch is None else count_lanes(launch, rows, n, s)),
    }


def _halves(rows: int) -> int:
    """Rows copied while so many are added up by halves."""
    copied = 0
    while rows > 1:
        rows = (rows + 1) // 2
        copied += rows
    return copied


def count_held(
    implementation: str,
    direction: str,
    matrix: tuple[int, int],
    dtype: str,
    *,
    tiles: int = 1,
    launch: Launch | None = None,
) -> tuple[str, int] | None:
    """
    Count the new bytes held at the worst moment, results included.

    Parameters
    ----------
    implementation : {"plain NumPy", "reference", "fused CPU", "fused GPU"}
        Whose steps.
    direction : {"forward", "backward"}
        All outputs of it.
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.
    tiles : int, default: 1
        Into how many the backward of the fused CPU kernel divides the rows.
    launch : Launch, optional
        Of the fused GPU kernel, which is not counted without it.

    Returns
    -------
    tuple of str and int, or None
        The formula and its value; None where the implementation does not take the dtype.

    Notes
    -----
    What is a few numbers a row or a column is left out, and so is what the kernels keep on their
    stack and in a stage of 16 KiB a thread.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import count_held
    >>> count_held("plain NumPy", "forward", (1000, 768), "float32")
    ('4 c rows n', 12288000)
    """
    wide = dtype == "float64" and implementation != "plain NumPy"
    formula = HELD.get((implementation, direction, wide))
    if formula is None or (implementation == "fused GPU" and launch is None):
        return None
    return formula, evaluate(formula, count_sizes(matrix, dtype, tiles, launch))


def count_saved(matrix: tuple[int, int], dtype: str) -> list[tuple[str, str, int]]:
    """
    Count the bytes that must live from the forward to the backward, by what is saved.

    Parameters
    ----------
    matrix : tuple of two ints
        Rows, and elements of a row.
    dtype : {"float16", "bfloat16", "float32", "float64"}
        Of x, gamma, beta and dy alike.

    Returns
    -------
    list of tuples of str, str and int
        What is saved, the formula of its bytes beside x and the parameters, and its value.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import count_saved
    >>> count_saved((1000, 768), "float32")[0][2]
    24000
    """
    values = count_sizes(matrix, dtype)
    wide = dtype == "float64"
    return [
        (what, formulas[wide], evaluate(formulas[wide], values)) for what, *formulas in POLICIES
    ]


def predict_fused(cost: Cost, ceilings: Ceilings) -> Time:
    """
    Predict the time of a fused kernel: the longer one of memory's and of the arithmetic's.

    Parameters
    ----------
    cost : Cost
        All its terms, added up.
    ceilings : Ceilings
        Of the machine.

    Returns
    -------
    Time
        The larger of the two, and both.

    Notes
    -----
    The larger and not the sum, since the lines of the rows to come are asked for while a row is
    calculated: both go on at once. Within the arithmetic it is the sum of conversions, divisions
    and operations. Processors add and multiply side by side as far as they have units for each, so
    the operations take the longest of three: additions at the rate of additions alone,
    multiply-adds at theirs, all of them at the rate of both together.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import Ceilings, count_all, predict_fused
    >>> one = Ceilings(2e10, 1e11, 2e11, 1e11, 1e11, 1e10, 5e10, 2e10, 5e10, 2e10)
    >>> time = predict_fused(count_all("fused CPU", "forward", (8192, 768), "float32"), one)
    >>> time.seconds == time.memory > time.arithmetic
    True
    """
    memory = cost.memory / ceilings.memory
    operations = max(
        (cost.single + cost.others) / ceilings.additions,
        2 * cost.fused / ceilings.flops,
        cost.operations / ceilings.operations,
    )
    arithmetic = (
        operations
        + cost.divisions / ceilings.divisions
        + cost.loaded / ceilings.loads
        + cost.stored / ceilings.stores
        + cost.fetched / ceilings.fetches
        + cost.kept / ceilings.keeps
    )
    return Time(max(memory, arithmetic), memory, arithmetic)


def predict_passes(costs: Sequence[Cost], ceilings: Ceilings, *, in_memory: bool) -> Time:
    """
    Predict the time of an array program: pass after pass, each bound by what it moves.

    Parameters
    ----------
    costs : sequence of Cost
        Of its terms, one or a few operations on whole arrays or blocks each.
    ceilings : Ceilings
        Of the machine, one thread.
    in_memory : bool
        Whether its arrays, temporary ones too, are larger than the caches.

    Returns
    -------
    Time
        The sum over passes, of which none overlaps with another, and its two parts.

    Notes
    -----
    New temporaries cost page faults as well; these are not in the model.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import Ceilings, count_terms, predict_passes
    >>> one = Ceilings(2e10, 1e11, 2e11, 1e11, 1e11, 1e10, 5e10, 2e10, 5e10, 2e10)
    >>> costs = [cost for _, cost in count_terms("plain NumPy", "forward", (8192, 768), "float32")]
    >>> predict_passes(costs, one, in_memory=True).seconds > 0.02
    True
    """
    if in_memory:
        memory, cached = sum(cost.moved for cost in costs) / ceilings.memory, 0.0
    else:
        memory = sum(cost.memory for cost in costs) / ceilings.memory
        cached = sum(cost.moved for cost in costs) / ceilings.cached
    arithmetic = sum(
        2 * cost.operations / ceilings.flops + cost.divisions / ceilings.divisions for cost in costs
    )
    seconds = memory + max(cached, arithmetic) if cached else max(memory, arithmetic)
    return Time(seconds, memory, max(cached, arithmetic))


def fit_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """
    Fit the exponent p of ``seconds ~ sizes**p``: the slope of a line through the logarithms.

    Parameters
    ----------
    sizes, seconds : sequence of float
        At least two, positive.

    Returns
    -------
    float
        1 if the time grows as the size does.

    Raises
    ------
    ValueError
        If there are not two different sizes, or something is not positive.

    Examples
    --------
    >>> from stablenorm.analysis.complexity import fit_exponent
    >>> round(fit_exponent([1, 2, 4], [3.0, 12.0, 48.0]), 3)
    2.0
    """
    if len(set(sizes)) < 2 or min(*sizes, *seconds) <= 0:
        msg = f"sizes must be two or more different ones, all > 0, got {list(sizes)}"
        raise ValueError(msg)
    x, y = np.log(sizes), np.log(seconds)
    x = x - x.mean()
    return float(np.dot(x, y) / np.dot(x, x))
