"""
What the fused kernels do: one pass over memory, all the arithmetic of a row while it is in the caches.

Those of the CPU (`kernels`) calculate in vectors of eight columns: m is n filled up to whole vectors,
and what they do in the lanes beyond n is counted, as it takes the same time. A lane adds `spans` parts
of up to 1024 columns. What is one number a row is a lane each, and takes all eight. Rows go in
`groups` of four, which share what is read of gamma, beta and the sums over rows, then one by one;
forward, rows beyond 16384 all go one by one, so there it is `turns`. Each of `tiles` tiles has sums
over rows of its own. `k` is 1 for data of 16 bits, whose conversions keep the adding units busy,
else 0: a sum that is left to the units that multiply is the multiply-add by 1 that it is.
"""

from __future__ import annotations

from stablenorm.analysis._counts import Term

# Of a row: the parts of its spans added up, eight lanes; then these added by halves, 4 + 2 + 1.
_ROW_SUM = "8 rows spans + 7 rows"


def _accumulated(name: str, before: str = "") -> Term:
    """Rows of a group added by pairs; their sum added to a running one, with its rounding error."""
    return Term(
        name,
        f"{before}rows m - groups m + 7 groups m",
        fetched="2 groups m",
        kept="2 groups m",
        read="16 groups m",
        written="16 groups m",
    )


def _totals() -> Term:
    return Term(
        "tiles added up, rounded once",
        "16 tiles m + 4 m",
        others="2 m",
        stored="2 n",
        fetched="4 tiles m",
        read="32 tiles m",
        written="2 n s",
        memory="2 n s",
    )


NARROW_FORWARD = (
    Term(
        "sum of x",
        f"rows m - k rows m + {_ROW_SUM}",
        "k rows m",
        loaded="rows n",
        read="rows n s",
        memory="rows n s",
    ),
    Term("mean", divisions="8 turns", kept="8 turns", written="64 turns"),
    Term(
        "sums of x - mean and of its square",
        f"rows m + {_ROW_SUM} + {_ROW_SUM}",
        "2 rows m",
        loaded="rows n",
        read="rows n s",
    ),
    Term(
        "mean of the rest, var, rstd",
        "32 turns",
        divisions="32 turns",
        kept="16 turns + 3 rows",
        written="128 turns + 24 rows",
        memory="24 rows",
    ),
    Term(
        "y: xhat, times gamma plus beta, rounded once",
        fused="3 rows m",
        loaded="rows n + 2 turns n",
        stored="rows n",
        read="rows n s + 8 turns n",
        written="rows n s",
        memory="rows n s + 2 n s",
    ),
)

NARROW_BACKWARD = (
    Term(
        "statistics, mean of the rest times rstd",
        "8 groups",
        fetched="3 rows",
        kept="24 groups",
        read="24 rows",
        written="192 groups",
        memory="24 rows",
    ),
    Term(
        "sum of g",
        _ROW_SUM,
        "rows m",
        loaded="rows n + groups n",
        read="rows n s + 4 groups n",
        memory="rows n s + n s",
    ),
    Term("mean of g", divisions="8 groups", kept="8 groups", written="64 groups"),
    _accumulated("dbeta: dy added to its sum"),
    Term(
        "sum of (g - mean(g)) * xhat",
        f"rows m - k rows m + {_ROW_SUM}",
        "3 rows m + k rows m",
        loaded="2 rows n + groups n",
        read="2 rows n s + 4 groups n",
        memory="rows n s",
    ),
    _accumulated("dgamma: dy * xhat added to its sum", "rows m + "),
    Term("mean of that", divisions="8 groups", kept="8 groups", written="64 groups"),
    Term(
        "dx: xhat and g once more, projected, rounded once",
        "2 rows m - k rows m",
        "3 rows m + k rows m",
        loaded="2 rows n + groups n",
        stored="rows n",
        read="2 rows n s + 4 groups n",
        written="rows n s",
        memory="rows n s",
    ),
    _totals(),
)


# ---- float64: pairs, one row at a time ----

# On pairs a sum takes 16 and 4 multiply-adds, and one that lets its low part grow 6 and 2; an exact
# product 1 and 1; the sum over eight lanes 51 and 12 of each lane, 408 and 96.

WIDE_FORWARD = (
    Term(
        "sum of x, largest |x|",
        "rows m + 8 rows spans + 408 rows",
        "96 rows",
        others="2 rows m + 24 rows",
        fetched="rows n",
        read="8 rows n",
        memory="8 rows n",
    ),
    Term("mean", divisions="8 rows"),
    Term(
        "sums of x - mean and of its square",
        "18 rows m + 256 rows spans + 816 rows",
        "8 rows m + 64 rows spans + 192 rows",
        fetched="rows n",
        read="8 rows n",
    ),
    Term(
        "mean of the rest, var, rstd",
        "452 rows",
        "136 rows",
        divisions="48 rows",
        memory="40 rows",
    ),
    Term(
        "y: xhat, times gamma plus beta, rounded once",
        "18 rows m",
        "11 rows m",
        fetched="3 rows n",
        kept="rows n",
        read="24 rows n",
        written="8 rows n",
        memory="8 rows n + 16 n",
    ),
)

_PAIR_SUM = Term(
    "",
    "6 rows m",
    "2 rows m",
    fetched="2 rows m",
    kept="2 rows m",
    read="16 rows m",
    written="16 rows m",
)

WIDE_BACKWARD = (
    Term(
        "mean of g, largest and smallest |dy|",
        "7 rows m + 128 rows spans + 440 rows",
        "3 rows m + 32 rows spans + 104 rows",
        divisions="16 rows",
        others="3 rows m + 48 rows",
        fetched="2 rows n",
        read="16 rows n",
        memory="8 rows n + 8 n + 32 rows",
    ),
    _PAIR_SUM._replace(name="dbeta: dy added to its sum"),
    Term(
        "mean of (g - mean(g)) * xhat; xhat and g - mean(g) kept",
        "25 rows m + 128 rows spans + 440 rows",
        "15 rows m + 32 rows spans + 104 rows",
        divisions="16 rows",
        others="2 rows m + 24 rows",
        fetched="3 rows n",
        kept="4 rows m",
        read="24 rows n",
        written="32 rows m",
        memory="8 rows n",
    ),
    _PAIR_SUM._replace(
        name="dgamma: dy * xhat added to its sum", single="7 rows m", fused="4 rows m"
    ),
    Term(
        "dx: projected, rounded once",
        "9 rows m",
        "8 rows m",
        fetched="4 rows m",
        kept="rows n",
        read="32 rows m",
        written="8 rows n",
        memory="8 rows n",
    ),
    _totals()._replace(stored="0", kept="2 n"),
)
