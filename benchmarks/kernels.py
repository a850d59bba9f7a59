"""
Time the CPU kernels of this tree against those of another commit: ``python benchmarks/kernels.py``.

Both packages have one name, so each runs in a process of its own. The two take turns, a few
milliseconds each, on one thread, and what is compared are medians of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

# The commit that issue-sized targets are stated against: the kernels before two passes.
BEFORE = "e3ec68d"

LENGTHS = (64, 128, 256, 768, 1024, 4096, 16384)
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
# Of x: in the second-level cache with y beside it, or nearly.
BYTES = 1 << 20

WORKER = """
import json, sys, time
import ml_dtypes, numpy as np
import stablenorm
stablenorm.set_num_threads(1)
made = {}
def make(dtype, parameters, n, size):
    dtype, parameters = (np.dtype(getattr(ml_dtypes, d) if d == "bfloat16" else d) for d in (dtype, parameters))
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((size // dtype.itemsize // n, n)).astype(dtype) for _ in range(2))
    gamma, beta = (rng.standard_normal(n).astype(parameters) for _ in range(2))
    y, dx = np.empty_like(x), np.empty_like(x)
    out = dx, np.empty_like(gamma), np.empty_like(beta)
    cache = stablenorm.layer_norm_forward(x, gamma, beta)[1]
    return {
        "forward": lambda: stablenorm.layer_norm(x, gamma, beta, out=y),
        "backward": lambda: stablenorm.layer_norm_backward(dy, cache, out=out),
    }
for line in sys.stdin:
    direction, *case, seconds = json.loads(line)
    case = tuple(case)
    if case not in made:
        made.clear()
        made[case] = make(*case)
    call = made[case][direction]
    call()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)
"""


class Package:
    """A process that times the package in one folder."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment, text=True,
        )  # fmt: skip

    def times(self, *case: object) -> list[float]:
        """Return the seconds of some calls."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(one: Package, other: Package, turns: int, *case: object) -> tuple[float, float]:
    """Return the median seconds of both, in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for times, package in zip(found, (one, other), strict=True):
            times.extend(package.times(*case, 0.01))
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    """Print old time over new time for each dtype, n and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default=BEFORE)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--dtypes", nargs="*", default=SIZES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", given.commit, "src"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        before, now = Package(Path(folder, "src")), Package(ROOT / "src")
        for dtype in given.dtypes:
            for n in given.lengths:
                ratios = []
                for direction in ("forward", "backward"):
                    old, new = compare(before, now, given.turns, direction, dtype, dtype, n, BYTES)
                    rate = BYTES / SIZES[dtype] / new / 1e9
                    ratios.append(f"{direction} {old / new:5.2f} ({rate:.2f} G/s)")
                print(f"{dtype:8} n = {n:5}  " + "  ".join(ratios), flush=True)
        for package in (before, now):
            package.close()


if __name__ == "__main__":
    main()
