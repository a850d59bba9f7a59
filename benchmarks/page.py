"""The parts of generated pages: medians, tables, numbers, the line of origin, markers."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import stablenorm
from stablenorm.timing import measure_interleaved

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCS = ROOT / "docs"


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def origin(peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return date, machine and versions, to be stored with the figures."""
    versions = {"stablenorm": stablenorm.__version__, "Python": platform.python_version()}
    versions |= {"NumPy": np.__version__, "ml_dtypes": ml_dtypes.__version__, **(peers or {})}
    return {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "processor": processor(),
        "cpus": os.cpu_count(),
        "versions": versions,
    }


def keep(name: str, doc: str | None, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return results: measured and stored in benchmarks/results or, with `--render`, read from there."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().partition("\n\n")[0])
    parser.add_argument(
        "--render", action="store_true", help="no measurement: write the pages of the last run"
    )
    path = HERE / "results" / f"{name}.json"
    if not parser.parse_args().render:
        path.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def medians(
    calls: Mapping[str, Callable[[], Any]], rounds: int = 21, least: int = 5, limit: float = 2.0
) -> list[float]:
    """Return the median seconds of each call, timed in turns."""
    timings = measure_interleaved(calls, rounds=rounds, least=least, limit=limit)
    return [timing.median for timing in timings.values()]


def origin_line(command: str, made: Mapping[str, Any]) -> str:
    """Say when, on which machine and with which versions `command` made the figures."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return (
        f"Measured by `{command}` on {made['date']}: {made['processor']}, {made['cpus']} cores; "
        f"{versions}."
    )


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def digits(value: float, count: int = 2) -> str:
    """Write a number with `count` significant digits, without an exponent."""
    rounded = float(f"{value:.{count}g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10 ** (count - 1) else f"{rounded:g}"


def unit_of(value: float) -> tuple[float, str]:
    """Return the unit for a time in seconds, and its name."""
    return next((u for u in ((1.0, "s"), (1e-3, "ms")) if value >= u[0]), (1e-6, "us"))


def seconds(value: float) -> str:
    """Write a time in two digits, with its unit."""
    size, unit = unit_of(value)
    return f"{digits(value / size)} {unit}"


def write(name: str, text: str) -> None:
    """Write a whole page of docs/evidence."""
    (DOCS / "evidence" / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def put(path: Path, parts: Mapping[str, str]) -> None:
    """Put each part between its markers in a hand-written page."""
    page = path.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            msg = f"{path.name} must hold {begin} and {end} once each"
            raise ValueError(msg)
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}"
    path.write_text(page, encoding="utf-8")
