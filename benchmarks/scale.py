"""
What Dask and files cost beside the plain call: `make scale`.

Times whole arrays, their chunks in a loop and Dask's threads; then `stablenorm apply` beside `cp`. Writes
benchmarks/results/scale.json and docs/evidence/scale.md. Eight minutes at most, alone on the machine,
with 33 GB free on its disk.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import dask.array as da
import numpy as np
from dask.base import persist
from page import byte_words, digits, keep, medians, origin, origin_line, seconds, table, write

import stablenorm as sn
from stablenorm.cli.bench import make_problem
from stablenorm.memory import set_idle_limit

# 1 GiB of float32, in chunks of 64 and of 8 MiB.
N, ROWS, CHUNK_ROWS = 1024, 2**18, (2**14, 2**11)
# What a process keeps of the memory of results: of new memory, the system's pages took up to ten times
# as long as the call, and no two calls the same.
IDLE = 6 * 2**30
ONE, BOTH = "forward", "forward and backward"
# Bytes of the files of `apply`.
FILES, LARGE = (2**30, 2**32), 16 * 10**9


def results(x: Any, gamma: Any, beta: Any, dy: Any, direction: str, eps: float) -> list[Any]:
    """Return what is computed of arrays, whole or lazy."""
    if direction == ONE:
        return [sn.layer_norm(x, gamma, beta, eps)]
    y, cache = sn.layer_norm_forward(x, gamma, beta, eps)
    return [y, *sn.layer_norm_backward(dy, cache)]


def calls() -> list[tuple[Any, ...]]:
    """Return the bytes of a chunk, direction, threads, and seconds: whole, in a loop, and by Dask."""
    x, gamma, beta, dy, *_ = make_problem((ROWS, N), "float32")
    # What is still known to a scheduler is not computed again: each call has an eps of its own.
    eps = (1e-5 * (1 + i * 1e-6) for i in itertools.count())
    set_idle_limit(IDLE)

    def call(way: str, pairs: Any, run: Callable[[Any], Any] = list) -> Callable[[], Any]:
        def made() -> Any:
            each = next(eps)
            return [run(results(x, gamma, beta, dy, way, each)) for x, dy in pairs]

        return made

    def persisted(lazy: Any) -> Any:
        return persist(*lazy, scheduler="threads", num_workers=sn.get_num_threads())

    found = []
    for rows, way, threads in itertools.product(CHUNK_ROWS, (ONE, BOTH), (1, 2)):
        sn.set_num_threads(threads)
        chunks = [(x[i : i + rows], dy[i : i + rows]) for i in range(0, ROWS, rows)]
        lazy = [da.from_array(each, (rows, N)) for each in (x, dy)]
        ways = {
            "whole": call(way, [(x, dy)]),
            "loop": call(way, chunks),
            "dask": call(way, [lazy], persisted),
        }
        found.append((4 * N * rows, way, threads, medians(ways, rounds=31, least=3, limit=40)))
    return found


def timed(*command: str) -> tuple[float, int]:
    """Run a command; return its seconds and the most memory that it had."""
    # With the bytecode on disk, as pip leaves it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    start, most = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            lines = Path(f"/proc/{process.pid}/status").read_text("utf8").splitlines()
            peaks = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
            most = max(most, *peaks, 0)
            time.sleep(0.01)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, most


def files() -> dict[str, Any]:
    """Time `stablenorm apply` beside `cp`, page cache warm, and on a file of 16 GB."""
    with tempfile.TemporaryDirectory() as name:
        x, y, small = (str(Path(name, f"{each}.npy")) for each in ("x", "y", "small"))
        apply = sys.executable, "-m", "stablenorm", "apply"
        part = make_problem((FILES[0] // 4 // N, N), "float32")[0]
        np.save(small, np.ones((1, N), "f4"))
        ways = {
            # As `apply` does: it returns when its result is on the disk.
            "cp and sync": ("sh", "-c", f"cp {x} {y} && sync {y}"),
            "cp": ("cp", x, y),
            "start": (*apply, small, "--out", y),
            "apply": (*apply, x, "--out", y),
        }
        found = []
        for size in FILES:
            whole = np.lib.format.open_memmap(x, "w+", "f4", (size // 4 // N, N))
            whole.reshape(-1, *part.shape)[:] = part
            os.sync()
            times: dict[str, list[float]] = {way: [] for way in ways}
            # The first round warms the page cache.
            for _ in range(4):
                for way, command in ways.items():
                    Path(y).unlink(missing_ok=True)
                    times[way].append(timed(*command)[0])
            found.append((size, {way: median(each[1:]) for way, each in times.items()}))
        Path(x).unlink()
        Path(y).unlink()
        large = None
        if shutil.disk_usage(name).free > 2.1 * LARGE:
            # Zeros that take no room.
            np.lib.format.open_memmap(x, "w+", "f4", (LARGE // 4000, 1000)).flush()
            large = timed(*apply, x, "--out", y)
    return {"sizes": found, "large": large}


def measure() -> dict[str, Any]:
    """Return all that the page holds."""
    made = origin({"dask": version("dask")})
    return {"origin": made, "calls": calls(), "files": files()}


def page(found: dict[str, Any]) -> str:
    """docs/evidence/scale.md."""
    of_dask = []
    for nbytes, direction, threads, times in found["calls"]:
        _, loop, lazy = times
        each = f"{1e3 * (lazy - loop) * nbytes / (4 * N * ROWS):+.2f} ms"
        words = byte_words(nbytes), direction, threads, *map(seconds, times)
        of_dask.append((*words, f"{lazy / loop - 1:+.1%}", each))
    of_files = []
    for size, taken in found["files"]["sizes"]:
        taken["`apply` less its start"] = taken["apply"] - taken["start"]
        for way, each in taken.items():
            speed = digits(taken["cp and sync"] / each)
            of_files.append((byte_words(size), way, seconds(each), speed))
    large = "There was no room for a file of 16 GB."
    if found["files"]["large"]:
        spent, most = found["files"]["large"]
        large = (
            f"A file of 16 GB took {seconds(spent)}, {LARGE / spent / 1e9:.2g} GB per second, and at "
            f"most {most / 1e6:.0f} MB of resident memory."
        )
    return f"""# What Dask and files cost

## Dask

x of {byte_words(4 * N * ROWS)}, float32, rows of {N}, default mode. The calls are made on the whole array, on its chunks in a loop,
and by Dask's threads, whose results stay in chunks. What Dask adds is its time over that of the loop. Results
use the memory of earlier ones again (`set_idle_limit`). Processes of `distributed` add more, which is not
measured here: [Many workers](../how-to/dask.md#many-workers).

{table(("chunk", "direction", "threads", "whole", "loop", "Dask", "added", "per chunk"), of_dask)}

## Files

`stablenorm apply` on float32 in the page cache, beside a `cp` whose file is on the disk when it returns, as
that of `apply` is. The start is that of Python with the
kernels, on a file of one row.

{table(("file", "what", "time", "speed over cp and sync"), of_files)}

{large}

{origin_line("make scale", found["origin"])}
"""


if __name__ == "__main__":
    write("scale", page(keep("scale", __doc__, measure)))
