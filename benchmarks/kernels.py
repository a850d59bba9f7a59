"""
Time the CPU kernels of this tree against those of an earlier commit, into docs: `make kernels`.

Both packages have one name, so each runs in a process of its own. The two take turns of 10 ms on one
thread, and what is compared are medians of one run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from page import DOCS, ROOT, digits, keep, origin, origin_line, table, write

# The kernels before they were written anew: three passes over a row each way.
BEFORE = "e3ec68d"

LENGTHS = (64, 128, 256, 768, 1024, 4096, 16384)
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
PASSES = ("forward", "backward")
# Of x, which with y and dy is in the second-level cache, or nearly.
BYTES = 1 << 20
TURNS = 20

WORKER = """
import json, sys, time
import ml_dtypes, numpy as np
import stablenorm
made = {}
def of(name):
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
def make(dtype, parameters, n, size):
    dtype, parameters = of(dtype), of(parameters)
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
    direction, *case = json.loads(line)
    case = tuple(case)
    stablenorm.set_num_threads(2 if direction.endswith("2") else 1)
    if case not in made:
        made.clear()
        made[case] = make(*case)
    call = made[case][direction.rstrip("2")]
    call()
    times, end = [], time.perf_counter() + 0.01
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    print(json.dumps(times), flush=True)
"""

FIRST = """
import sys, time
import numpy as np
import stablenorm
x, gamma = np.ones((64, 768), sys.argv[1]), np.ones(768, sys.argv[1])
start = time.perf_counter()
y, cache = stablenorm.layer_norm_forward(x, gamma, gamma)
stablenorm.layer_norm_backward(x, cache)
print(time.perf_counter() - start)
"""


class Package:
    """A process that times the package in one folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", WORKER], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(folder)}, text=True,
        )  # fmt: skip

    def times(self, *case: Any) -> list[float]:
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


def compare(*turns: tuple[Package, tuple[Any, ...]]) -> list[float]:
    """Return the median seconds of each package's case, taken in turns."""
    found: list[list[float]] = [[] for _ in turns]
    for _ in range(TURNS):
        for times, (package, case) in zip(found, turns, strict=True):
            times.extend(package.times(*case))
    return [statistics.median(times) for times in found]


def first_calls(dtype: str) -> list[float]:
    """Return the seconds of the first forward and backward: ever, and of a second process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", FIRST, dtype]
        return [
            float(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
            for _ in range(2)
        ]


def measure() -> dict[str, Any]:
    """Return old time over new time, the rates of mixtures, and the first calls."""
    found: dict[str, Any] = {
        "origin": origin(),
        "ratios": {},
        "mixed": {},
        "start": [],
        "first": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "archive", BEFORE, "src"]
        archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        before, now = Package(Path(folder, "src")), Package(ROOT / "src")
        for dtype in SIZES:
            for n in LENGTHS:
                times = [
                    compare((before, case), (now, case))
                    for case in ((each, dtype, dtype, n, BYTES) for each in PASSES)
                ]
                found["ratios"][f"{dtype} {n}"] = [old / new for old, new in times]
                print(dtype, n, *(f"{old / new:.2f}" for old, new in times), flush=True)
        for n in LENGTHS:
            # As many elements of both.
            cases = [("float32", "float64", n, BYTES // 2), ("float64", "float64", n, BYTES)]
            pairs = [compare(*((now, (each, *case)) for case in cases)) for each in PASSES]
            found["mixed"][str(n)] = [wide / mixed for mixed, wide in pairs]
        case = ("float32", "float32", 1024, BYTES)
        for each in PASSES:
            one, two = compare((now, (each, *case)), (now, (each + "2", *case)))
            found["start"].append(two - one / 2)
        before.close()
        now.close()
    found["first"] = {dtype: first_calls(dtype) for dtype in ("float32", "float16", "float64")}
    return found


# Of each dtype, old time over new time that is to be reached, forward and backward.
TARGETS = {
    "float32": (1.2, 1.4),
    "float16": (1.0, 1.0),
    "bfloat16": (1.0, 1.0),
    "float64": (1.2, 1.2),
}


def main() -> None:
    """Measure, and write the page."""
    found = keep("kernels", __doc__ or "", measure)
    lines = []
    for name, pair in found["ratios"].items():
        dtype, n = name.split()
        cells = [
            digits(value, 3) + ("" if value >= target else f" **below {target}**")
            for value, target in zip(pair, TARGETS[dtype], strict=True)
        ]
        lines.append((dtype, n, *cells))
    mixed = [(n, *(digits(value, 3) for value in pair)) for n, pair in found["mixed"].items()]
    first = [
        (dtype, *(f"{value:.2f} s" for value in pair)) for dtype, pair in found["first"].items()
    ]
    start = [
        f"{1e6 * value:.0f} us {each}" for each, value in zip(PASSES, found["start"], strict=True)
    ]
    text = f"""# The kernels against those before

The CPU kernels take two passes over a row each way. Those of commit {BEFORE} took three. Both ran here in
turns on one thread, x of 1 MiB, with `out=`.

## Time of the kernels before over time of these

{table(("dtype", "n", "forward", "backward"), lines)}

## float32 x with float64 gamma and beta

Elements per second, over those of float64 x. The target is 1.

{table(("n", "forward", "backward"), mixed)}

## A second thread

Time of two threads less half that of one, at n = 1024, float32: {" and ".join(start)}. The target is 10 us.

## First calls

One forward and one backward of one dtype, the import of Numba included. The targets are 8 s and 0.6 s.

{table(("dtype", "first ever, compiled", "in a second process"), first)}

{origin_line("make kernels", found["origin"])}
"""
    write(DOCS / "developers" / "kernels.md", text, __file__)


if __name__ == "__main__":
    main()
