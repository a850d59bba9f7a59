"""
How well `diagnose` predicts: `make diagnose`.

Keeps its figures in benchmarks/results/diagnose.json and writes docs/evidence/diagnose.md. Three
minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from lost_bits import ROWS, cases, measure
from page import DOCS, keep, origin, origin_line, table, write

from stablenorm.diagnosis.rows import TITLES

# Running sums: of vectorized code, of pairwise summation (as many as elements), of a plain loop.
LANES = {16: "sixteen sums", 1024: "pairwise", 1: "one sum"}


def measure_predictions() -> list[list[Any]]:
    """Return, for each method, the rows, those that lose 8 bits, the shares predicted within 2."""
    lines = []
    found = list(cases())
    for name, title in TITLES.items():
        predicted = np.concatenate([case.predicted[name] for case in found])
        every = [np.concatenate([measure(case, name, lanes) for case in found]) for lanes in LANES]
        shares = [float((np.abs(predicted - lost) <= 2).mean()) for lost in every]
        large = int((every[0] >= 8).sum())
        lines.append([title.format(working="float32"), len(predicted), large, *shares])
    return lines


def page(found: dict[str, Any]) -> str:
    """docs/evidence/diagnose.md."""
    predictions = table(
        ("method", "rows", "losing 8 bits or more", *LANES.values()),
        [(*line[:3], *(f"{share:.1%}" for share in line[3:])) for line in found["predictions"]],
    )
    return f"""# How well `diagnose` predicts

{origin_line("make diagnose", found["origin"])} How to use it: [Diagnose your
data](../how-to/diagnose-your-data.md).

## Predicted and lost

The data are all [families of hard inputs](accuracy.md), in float16, bfloat16, float32 and float64
where they exist, with n = 127 and 768 and {ROWS} rows each. Each method is computed step by step. Every
operation is rounded as the method rounds it, and y is compared with the exact y. The bits lost are
log2 of the RMS error of y over a row, in units of 2^-p max(rms(y), smallest normal), between 0 and p.

The last three columns are the shares of rows whose loss is predicted within 2 bits.

{predictions}

float64 data is computed in float64 where the title says float32. The prediction assumes the order of
vectorized code, several running sums. An implementation that sums in another order loses about as
much. "Pairwise" adds two by two, as NumPy does. "One sum" is a plain loop, which loses more.
"""


if __name__ == "__main__":
    measure_all = lambda: {"origin": origin(), "predictions": measure_predictions()}
    text = page(keep("diagnose", __doc__ or "", measure_all))
    write(DOCS / "evidence" / "diagnose.md", text, __file__)
