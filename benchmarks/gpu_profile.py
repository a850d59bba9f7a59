"""What NVIDIA's profiler said, added up over launches."""

from __future__ import annotations

import csv
import io

METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
_UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def read_profile(text: str) -> dict[str, float]:
    """Add up the metrics of every launch in what ``ncu --csv`` printed."""
    begin = text.find('"ID"')
    rows = list(csv.DictReader(io.StringIO(text[begin:] if begin >= 0 else "")))
    found = dict.fromkeys(METRICS.values(), 0.0)
    for row in rows:
        if (name := METRICS.get(row["Metric Name"])) is not None:
            found[name] += float(row["Metric Value"].replace(",", "")) * _UNITS[row["Metric Unit"]]
    return {"launches": len({row["ID"] for row in rows}), **found}
