"""Bytes that live on: of what a backward is handed, and of all that is held at once."""

# What a backward could be handed, and the bytes of it beside x, dy and the parameters.
POLICIES = (
    ("x itself, mean (2 words) and rstd, float64 (ours)", "24 rows", "32 rows"),
    ("xhat and rstd, in float64: as accurate", "8 rows n + 8 rows", "16 rows n + 16 rows"),
    ("xhat and rstd, as plain NumPy keeps them", "c rows n + c rows", "c rows n + c rows"),
    ("y itself and rstd: divides by gamma, which may be 0", "8 rows", "16 rows"),
)

# New bytes at the worst moment, results included, as tracemalloc sees them; `block` is the bytes of
# one block of the reference in float64. Left out is what is a few numbers a row or a column.
HELD = {
    ("plain NumPy", "forward", False): "4 c rows n",
    ("plain NumPy", "backward", False): "4 c rows n",
    ("reference", "forward", False): "s rows n + 24 rows + 3 block",
    ("reference", "backward", False): "s rows n + 2 n s + 6 block",
    ("reference", "forward", True): "s rows n + 40 rows + 14 block",
    ("reference", "backward", True): "s rows n + 2 n s + 21 block",
    ("fused CPU", "forward", False): "s rows n + 24 rows",
    ("fused CPU", "backward", False): "s rows n + 2 n s + 32 tiles m",
    ("fused CPU", "forward", True): "s rows n + 40 rows",
    ("fused CPU", "backward", True): "s rows n + 2 n s + 32 tiles m",
    ("fused GPU", "forward", False): "s rows n + 24 rows",
    ("fused GPU", "backward", False): "s rows n + 2 n s + 16 parts n + 32 segments n",
}
