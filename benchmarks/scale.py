"""
What Dask costs beside the plain call: `make scale`.

Times whole arrays, their chunks in a loop and Dask's threads. Writes benchmarks/results/scale.json and
docs/evidence/scale.md. Six minutes at most, alone on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import dask.array as da
from dask.base import persist
from page import byte_words, keep, medians, origin, origin_line, seconds, table, write

import stablenorm as sn
from stablenorm.memory import set_idle_limit
from stablenorm.timing import make_problem

# 1 GiB of float32, in chunks of 64 and of 8 MiB.
N, ROWS, CHUNK_ROWS = 1024, 2**18, (2**14, 2**11)
# Bytes that a process keeps for later results: of new memory, the system's pages took up to ten times
# as long as the call, and no two calls the same.
IDLE = 6 * 2**30
ONE, BOTH = "forward", "forward and backward"


def results(x: Any, gamma: Any, beta: Any, dy: Any, direction: str, eps: float) -> list[Any]:
    """Return what is computed of arrays, whole or lazy."""
    if direction == ONE:
        return [sn.layer_norm(x, gamma, beta, eps)]
    y, cache = sn.layer_norm_forward(x, gamma, beta, eps)
    return [y, *sn.layer_norm_backward(dy, cache)]


def calls() -> list[tuple[Any, ...]]:
    """Return the bytes of a chunk, direction, threads, and seconds: whole, in a loop, and by Dask."""
    x, gamma, beta, dy, *_ = make_problem((ROWS, N), "float32")
    # A scheduler does not compute again what it still knows: each call has an eps of its own.
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


def measure() -> dict[str, Any]:
    """Return all that the page holds."""
    made = origin({"dask": version("dask")})
    return {"origin": made, "calls": calls()}


def page(found: dict[str, Any]) -> str:
    """docs/evidence/scale.md."""
    of_dask = []
    for nbytes, direction, threads, times in found["calls"]:
        _, loop, lazy = times
        each = f"{1e3 * (lazy - loop) * nbytes / (4 * N * ROWS):+.2f} ms"
        words = byte_words(nbytes), direction, threads, *map(seconds, times)
        of_dask.append((*words, f"{lazy / loop - 1:+.1%}", each))
    return f"""# What Dask costs

x of {byte_words(4 * N * ROWS)}, float32, rows of {N}, default mode. The calls are made on the whole array, on its chunks in a loop,
and by Dask's threads, whose results stay in chunks. What Dask adds is its time over that of the loop. Results
use the memory of earlier ones again (`set_idle_limit`). Processes of `distributed` add more, which is not
measured here: [Many workers](../how-to/dask.md#many-workers).

{table(("chunk", "direction", "threads", "whole", "loop", "Dask", "added", "per chunk"), of_dask)}

{origin_line("make scale", found["origin"])}
"""


if __name__ == "__main__":
    write("scale", page(keep("scale", __doc__, measure)))
