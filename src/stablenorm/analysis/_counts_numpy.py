"""
What the array programs do: plain NumPy (`analysis.plain`) and the reference (`reference`).

s is the bytes of an element of x, c those of the arithmetic of plain NumPy (4, or 8 for float64);
k is 1 if these differ and 0 if nothing is converted. The reference calculates in float64, 8 bytes,
and, if x is float64, in double-double. It takes rows in blocks: `blocks` of them, and `halves` rows
are copied in all while each block's rows are added by halves.
"""

from __future__ import annotations

from stablenorm.analysis._counts import Term


def _row_mean(name: str, c: str) -> tuple[Term, Term]:
    """A sum over the elements of each row, and its division by n."""
    return (
        Term(f"sum of {name}", "rows n - rows", read=f"{c} rows n", written=f"{c} rows"),
        Term(f"mean of {name}", divisions="rows", read=f"{c} rows", written=f"{c} rows"),
    )


def _with_column(name: str, c: str) -> Term:
    """An operation of each element with its row's own number."""
    return Term(name, "rows n", read=f"{c} rows n + {c} rows", written=f"{c} rows n")


def _of_two(name: str, c: str) -> Term:
    """An operation of two whole arrays."""
    return Term(name, "rows n", read=f"2 {c} rows n", written=f"{c} rows n")


# ---- plain NumPy: whole arrays, one operation after the other ----


def _plain_cast(name: str, array: str) -> Term:
    size = f"{array} k"
    return Term(name, loaded=size, read=f"{array} s", written=f"{array} c")


def _plain_with_parameter(name: str) -> Term:
    return Term(
        name,
        "rows n",
        loaded="n k",
        read="n s + rows n c + n c",
        written="n c + rows n c",
    )


PLAIN_FORWARD = (
    _plain_cast("x in the precision of the arithmetic", "rows n"),
    *_row_mean("x", "c"),
    _with_column("x - mean", "c"),
    Term("its square", "rows n", read="rows n c", written="rows n c"),
    *_row_mean("squares, var", "c"),
    Term("rstd", "rows", divisions="2 rows", read="3 rows c", written="3 rows c"),
    _with_column("x - mean, once more", "c"),
    _with_column("xhat", "c"),
    _plain_with_parameter("times gamma"),
    _plain_with_parameter("plus beta"),
    Term("y, rounded", stored="rows n k", read="rows n c", written="rows n s"),
)

PLAIN_BACKWARD = (
    _plain_cast("dy in the precision of the arithmetic", "rows n"),
    _plain_with_parameter("g"),
    _of_two("g * xhat", "c"),
    *_row_mean("g * xhat", "c"),
    *_row_mean("g", "c"),
    _with_column("g - mean(g)", "c"),
    _with_column("xhat * mean(g * xhat)", "c"),
    _of_two("their difference", "c"),
    _with_column("times rstd", "c"),
    _of_two("dy * xhat", "c"),
    Term("dgamma: sum over rows", "rows n - n", read="rows n c", written="n c"),
    Term("dbeta: sum over rows", "rows n - n", read="rows n c", written="n c"),
    Term("dgamma, dbeta, rounded", stored="2 n k", read="2 n c", written="2 n s"),
    Term("dx, rounded", stored="rows n k", read="rows n c", written="rows n s"),
)


# ---- the reference: blocks of rows that stay in the caches, in float64 ----


def _lifted(name: str) -> Term:
    return Term(name, loaded="rows n", read="rows n s", written="8 rows n", memory="rows n s")


def _rounded(name: str) -> Term:
    """Rounded once, then put into its place among the rows."""
    return Term(
        name,
        stored="rows n",
        read="8 rows n + rows n s",
        written="2 rows n s",
        memory="rows n s",
    )


def _with_parameter(name: str) -> Term:
    return Term(name, "rows n", read="8 rows n + 8 n blocks", written="8 rows n")


def _sum_over_rows(name: str) -> Term:
    return Term(
        name,
        "rows n - n",
        read="16 rows n - 16 n + 8 n halves",
        written="8 rows n - 8 n + 8 n halves",
    )


REFERENCE_FORWARD = (
    Term("gamma, beta in float64", loaded="2 n", read="2 n s", written="16 n", memory="2 n s"),
    _lifted("x in float64"),
    *_row_mean("x", "8"),
    Term("mean, kept", read="8 rows", written="8 rows"),
    _with_column("x - mean", "8"),
    *_row_mean("x - mean", "8"),
    _with_column("less that mean", "8"),
    _of_two("its square", "8"),
    *_row_mean("squares, var", "8"),
    Term(
        "rstd",
        "rows",
        divisions="2 rows",
        read="24 rows + 16 blocks",
        written="24 rows + 8 blocks",
    ),
    _with_column("xhat", "8"),
    _with_parameter("times gamma"),
    _with_parameter("plus beta"),
    _rounded("y, rounded once"),
    Term("statistics", read="24 rows", written="24 rows", memory="24 rows"),
)

REFERENCE_BACKWARD = (
    Term("gamma in float64", loaded="n", read="n s", written="8 n", memory="n s"),
    _lifted("dy in float64"),
    _lifted("x in float64"),
    Term("xhat", "3 rows n", read="24 rows n + 24 rows", written="24 rows n", memory="24 rows"),
    _of_two("dy * xhat", "8"),
    _sum_over_rows("dgamma: sum over rows"),
    _sum_over_rows("dbeta: sum over rows"),
    _with_parameter("g"),
    *_row_mean("g", "8"),
    _with_column("g - mean(g)", "8"),
    _of_two("that times xhat", "8"),
    *_row_mean("(g - mean(g)) * xhat", "8"),
    _with_column("xhat times that mean", "8"),
    _of_two("their difference", "8"),
    _with_column("times rstd", "8"),
    _rounded("dx, rounded once"),
    Term(
        "dgamma, dbeta, rounded once",
        stored="2 n",
        read="16 n + 2 n s",
        written="4 n s",
        memory="2 n s",
    ),
)


# ---- the reference in double-double ----

# Additions, subtractions and multiplications of one operation on pairs: NumPy has no multiply-add,
# so an exact product takes 17, of which 4 split each factor: once for each of its own elements, where
# one factor is a number a row or a parameter. A sum takes 20, a product 24, a division by a count 19
# (beside the splitting of the count) and two divisions, a reciprocal root 110, a division and a root.


def _pair_mean(name: str) -> tuple[Term, Term]:
    return (
        Term(f"sum of {name}", "20 rows n - 20 rows"),
        Term(f"mean of {name}", "19 rows", divisions="2 rows"),
    )


WIDE_REFERENCE_FORWARD = (
    Term("x as pairs", memory="rows n s"),
    *_pair_mean("x"),
    Term("x - mean", "20 rows n"),
    *_pair_mean("x - mean"),
    Term("less that mean", "20 rows n"),
    Term("its square", "24 rows n"),
    *_pair_mean("squares, var"),
    Term("rstd", "130 rows", divisions="2 rows"),
    Term("xhat", "20 rows n + 4 rows"),
    Term("times gamma", "20 rows n + 4 n blocks", memory="n s"),
    Term("plus beta", "20 rows n", memory="n s"),
    Term("y, rounded once", memory="rows n s"),
    Term("statistics", memory="32 rows"),
)

WIDE_REFERENCE_BACKWARD = (
    Term("dy and x as pairs", memory="2 rows n s"),
    Term("xhat", "60 rows n + 4 rows", memory="32 rows"),
    Term("dy * xhat", "24 rows n"),
    Term("dgamma: sum over rows", "20 rows n - 20 n"),
    Term("dbeta: sum over rows", "20 rows n - 20 n"),
    Term("g", "20 rows n + 4 n blocks", memory="n s"),
    *_pair_mean("g"),
    Term("g - mean(g)", "20 rows n"),
    Term("that times xhat", "24 rows n"),
    *_pair_mean("(g - mean(g)) * xhat"),
    Term("xhat times that mean", "20 rows n + 4 rows"),
    Term("their difference", "20 rows n"),
    Term("times rstd", "20 rows n + 4 rows"),
    Term("dx, rounded once", memory="rows n s"),
    Term("dgamma, dbeta, rounded once", memory="2 n s"),
)
