"""
How well `diagnose` predicts, and what a large file takes: `make diagnose`.

Keeps its figures in benchmarks/results/diagnose.json and writes docs/evidence/diagnose.md. Needs 1 GB
of disk and three minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from lost_bits import ROWS, cases, measure
from page import DOCS, keep, origin, origin_line, table, write

from stablenorm.diagnosis.rows import TITLES

# Running sums: of vectorized code, of pairwise summation (as many as elements), of a plain loop.
LANES = {16: "sixteen sums", 1024: "pairwise", 1: "one sum"}
# Rows and n of the file: 1 GB of float32.
FILE = (244_141, 1024)

_PROGRAM = (
    "import sys, time; from stablenorm import cli; begin = time.process_time(); "
    "status = cli.main(sys.argv[1:]); seconds = time.process_time() - begin; "
    "held = dict(l.split(':') for l in open('/proc/self/status')); "
    "peak, mapped = (held[name].split()[0] for name in ('VmHWM', 'RssFile')); "
    "print(status, peak, mapped, seconds, file=sys.stderr)"
)


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


def measure_file() -> dict[str, float]:
    """Diagnose a large file: bytes, peak memory, the part of libraries, processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.npy"
        file = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=FILE)
        rng = np.random.default_rng(0)
        for start in range(0, FILE[0], 4096):
            part = file[start : start + 4096]
            part[:] = rng.standard_normal(part.shape, np.float32)
        file.flush()
        command = [sys.executable, "-c", _PROGRAM, "diagnose", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        status, peak, mapped, seconds = map(float, done.stderr.split()[-4:])
        if status:
            raise RuntimeError(done.stderr)
        size = path.stat().st_size
    return {"size": size, "peak": 1024 * peak, "mapped": 1024 * mapped, "seconds": seconds}


def measure_all() -> dict[str, Any]:
    """Measure everything that the page says."""
    return {"origin": origin(), "predictions": measure_predictions(), "file": measure_file()}


def page(found: dict[str, Any]) -> str:
    """docs/evidence/diagnose.md."""
    predictions = table(
        ("method", "rows", "losing 8 bits or more", *LANES.values()),
        [(*line[:3], *(f"{share:.1%}" for share in line[3:])) for line in found["predictions"]],
    )
    file = found["file"]
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

## Speed and memory

A file of {file["size"] / 1e9:.1f} GB (float32, n = {FILE[1]}) took {file["seconds"]:.1f} s of processor time, {file["size"] / file["seconds"] / 1e9:.2g} GB/s. With k
threads it is read up to k times as fast. The peak memory was {file["peak"] / 1e6:.0f} MB, of which {file["mapped"] / 1e6:.0f} MB are
pages of libraries. It does not depend on the size of the file.
"""


if __name__ == "__main__":
    text = page(keep("diagnose", __doc__ or "", measure_all))
    write(DOCS / "evidence" / "diagnose.md", text, __file__)
