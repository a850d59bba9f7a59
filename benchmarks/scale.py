"""
What Dask and files cost beside the plain call: `make scale`.

Writes docs/evidence/scale.md. Six minutes, alone on the machine, with 33 GB free on its disk.
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
import distributed
import numpy as np
from dask import config
from dask.base import persist
from page import DOCS, byte_words, digits, keep, origin, origin_line, seconds, table, write

import stablenorm as sn
from stablenorm.cli.bench import make_problem
from stablenorm.memory import set_idle_limit
from stablenorm.timing import measure_interleaved

# 1 GiB of float32, in chunks of 64 and of 8 MiB.
N, ROWS, CHUNK_ROWS = 1024, 2**18, (2**14, 2**11)
# What a process keeps of the memory of results: of new memory, the system's pages took up to ten times
# as long as the call, and no two calls the same.
IDLE, IDLE_OF_WORKER = 6 * 2**30, 2 * 2**30
MB = 10**6
ONE, BOTH = DIRECTIONS = "forward", "forward and backward"
# What Dask alone takes: a function of each chunk that returns it.
NOTHING = "nothing"
# Bytes of the files of `apply`.
FILES, LARGE = (2**30, 2**32), 16 * 10**9
# 2 GB of x through two workers of 300 MB.
BLOCKS, BLOCK, LIMIT = 250, (2000, 1000), 300 * MB
# Of it 160 MB are Python with Dask and the kernels: by default Dask would spill all that it can.
SHARES = {"target": 0.15, "spill": 0.85, "pause": 0.9, "transfer": 0.05}


def cluster(limit: int = 0) -> distributed.LocalCluster:
    """Return two processes of one thread each, over loopback."""
    return distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="tcp://127.0.0.1",
        dashboard_address="127.0.0.1:0", scheduler_kwargs={"dashboard": False}, memory_limit=limit,
    )  # fmt: skip


def results(x: Any, gamma: Any, beta: Any, dy: Any, direction: str, **keywords: Any) -> list[Any]:
    """Return what is computed of arrays, whole or lazy."""
    if direction == NOTHING:
        return [da.map_blocks(np.asarray, x, dtype=x.dtype, meta=x._meta, token=f"{keywords}")]
    if direction == ONE:
        return [sn.layer_norm(x, gamma, beta, **keywords)]
    y, cache = sn.layer_norm_forward(x, gamma, beta, **keywords)
    return [y, *sn.layer_norm_backward(dy, cache)]


def filled(rows: int, block: tuple[int, int], value: float) -> Any:
    """Return an array whose chunks are whole in memory; those of da.full are of one number each."""
    chunks = (block[0],) * (rows // block[0]), block[1:]
    return da.map_blocks(np.full, block, value, "f4", chunks=chunks, dtype="f4")


def calls() -> list[tuple[Any, ...]]:
    """Time whole arrays, their chunks in a loop, and Dask: bytes of a chunk, direction, medians."""
    x, gamma, beta, dy, *_ = make_problem((ROWS, N), "float32")
    # What is still known to a scheduler is not computed again: each call has an eps of its own.
    eps = (1e-5 * (1 + i * 1e-6) for i in itertools.count())
    kinds = list(itertools.product(CHUNK_ROWS, (NOTHING, *DIRECTIONS)))
    set_idle_limit(IDLE)

    def call(threads: int, way: str, pairs: Any, run: Any = len) -> Any:
        def made() -> Any:
            sn.set_num_threads(threads)
            each = next(eps)
            return [run(results(x, gamma, beta, dy, way, eps=each)) for x, dy in pairs]

        return made

    def plain(k: int, way: str, rows: int) -> dict[str, Any]:
        if way == NOTHING:
            return {}
        chunks = [(x[i : i + rows], dy[i : i + rows]) for i in range(0, ROWS, rows)]
        return {"whole": call(k, way, [(x, dy)]), "loop": call(k, way, chunks, list)}

    def threaded(lazy: Any) -> Any:
        return persist(*lazy, scheduler="threads", num_workers=sn.get_num_threads())

    def spread(lazy: Any) -> None:
        distributed.wait(client.persist(lazy))

    found = []

    def take(workers: str, ways: dict[str, Any], rows: int, way: str) -> None:
        # Rounds enough that the figures that a gate is for come again: with nine, they came within 10 %.
        rounds, limit = (31, 40) if rows == CHUNK_ROWS[0] and "thread" in workers else (9, 10)
        taken = measure_interleaved(ways, rounds=rounds, least=3, limit=limit)
        times = [taken[name].median if name in taken else 0.0 for name in ("whole", "loop", "dask")]
        found.append((4 * N * rows, 4 * N * ROWS, way, workers, times))

    # First, since even an idle cluster takes its share.
    for (rows, way), k in itertools.product(kinds, (1, 2)):
        local = [tuple(da.from_array(each, (rows, N)) for each in (x, dy))]
        ways = plain(k, way, rows) | {"dask": call(k, way, local, threaded)}
        take(f"{k} thread{'s' * (k > 1)}", ways, rows, way)
    with cluster() as workers, distributed.Client(workers) as client:
        client.run(sn.set_num_threads, 1)
        client.run(set_idle_limit, IDLE_OF_WORKER)
        for rows, way in kinds:
            far = client.persist([filled(ROWS, (rows, N), k) for k in (1, 2)])
            distributed.wait(far)
            take(
                "2 processes",
                plain(2, way, rows) | {"dask": call(2, way, [far], spread)},
                rows,
                way,
            )
            del far
    return found


def resident(pid: Any = "self") -> int:
    """Return the most memory that a process has had; 0 once it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text("utf8").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def timed(*command: str) -> tuple[float, int]:
    """Run a command; return its seconds and its most memory."""
    # With the bytecode on disk, as pip leaves it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    start, most = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            most = max(most, resident(process.pid))
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


def written(dask_worker: Any) -> float:
    """Return bytes spilled so far."""
    return float(dask_worker.data.cumulative_metrics["disk-write", "bytes"])


def larger() -> list[tuple[Any, ...]]:
    """
    Return what 2 GB of x take through two workers of 300 MB, in each rounding.

    Seconds, the most memory of a worker before and in all, and bytes spilled.
    """
    found = []
    memory = {f"distributed.worker.memory.{key}": share for key, share in SHARES.items()}
    for rounding in ("fast", "nearest"):
        with (
            config.set(memory),
            cluster(LIMIT) as workers,
            distributed.Client(workers) as client,
        ):
            most = []
            # With small blocks, a process is what it is without data.
            for rows in (2, BLOCK[0]):
                x, dy = (filled(BLOCKS * rows, (rows, BLOCK[1]), k) for k in (1, 2))
                gamma, beta = np.ones((2, BLOCK[1]), "f4")
                y, dx, *sums = results(x, gamma, beta, dy, BOTH, rounding=rounding)
                start = time.perf_counter()
                client.gather(client.compute([y.sum(), dx.sum(), *sums]))
                taken = time.perf_counter() - start
                most.append(max(client.run(resident).values()))
            spilled = sum(client.run(written).values())
            found.append((rounding, taken, x.nbytes, *most, spilled))
    return found


def measure() -> dict[str, Any]:
    """Return all that the pages hold."""
    parts: tuple[Callable[[], Any], ...] = calls, files, larger
    made = origin({name: version(name) for name in ("dask", "distributed")})
    load = os.getloadavg()[0]
    return {"origin": made, "load": load, **{part.__name__: part() for part in parts}}


def megabytes(nbytes: float) -> str:
    """Return bytes in words."""
    return f"{nbytes / MB:.0f} MB"


def evidence(found: Any) -> str:
    """Return the page of what was measured."""
    body = []
    for nbytes, size, direction, workers, times in found["calls"]:
        _, loop, lazy = times
        shown = f"{lazy / loop - 1:+.1%}" if loop else ""
        each = f"{1e3 * (lazy - loop) * nbytes / size:+.2f} ms"
        words = [seconds(each) if each else "" for each in times]
        body.append((byte_words(nbytes), direction, workers, *words, shown, each))
    sizes = " or ".join(sorted({byte_words(size) for _, size, *_ in found["calls"]}))
    speeds = []
    for size, taken in found["files"]["sizes"]:
        taken["`apply` less its start"] = taken["apply"] - taken["start"]
        for way, each in taken.items():
            speeds.append(
                (byte_words(size), way, seconds(each), digits(taken["cp and sync"] / each))
            )
    large = "There was no room for a file of 16 GB."
    if found["files"]["large"]:
        spent, most = found["files"]["large"]
        large = (
            f"A file of 16 GB took {seconds(spent)}, {LARGE / spent / 1e9:.2g} GB per second, and at "
            f"most {megabytes(most)} of resident memory."
        )
    two = [(way, seconds(t), *map(megabytes, sizes)) for way, t, *sizes in found["larger"]]
    return f"""# What Dask and files cost

## Dask

x of {sizes}, float32, rows of {N}, default mode. The calls are made on the whole array, on its chunks in a loop,
and by Dask, whose results stay in chunks. What Dask adds is its time over that of the loop. The rows "{NOTHING}" are what Dask alone takes: `map_blocks` of a
function that returns its block. The processes hold their x and dy before the clock starts. Results use the memory
of earlier ones again (`set_idle_limit`).

{table(("chunk", "direction", "workers", "whole", "loop", "Dask", "added", "per chunk"), body)}

## Files

`stablenorm apply` on float32 in the page cache, beside a `cp` whose file is on the disk when it returns, as
that of `apply` is. The start is that of Python with the
kernels, on a file of one row.

{table(("file", "what", "time", "speed over cp and sync"), speeds)}

{large}

## More than the workers may hold

x in blocks of 8 MB, and as much of dy, forward and backward by two processes of at most 300 MB each,
with the [settings](../explanation/scale.md#memory-of-a-worker) for so little. Before that, the same on
blocks of two rows, to see what a process takes without data.

{table(("rounding", "time", "x", "most memory of one before", "in all", "spilled by both"), two)}

{origin_line("make scale", found["origin"])}
Load of the machine when it began: {found["load"]:.1f}.
"""


def main() -> int:
    """Measure or read, write the pages."""
    found = keep("scale", __doc__ or "", measure)
    write(DOCS / "evidence" / "scale.md", evidence(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
