"""`diagnose` of a Dask array: each block a task of its own, merged in a tree."""

import functools
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.core import flatten
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from stablenorm.dask.graph import check_whole_rows, convert, threads_of_task, tree
from stablenorm.diagnosis import diagnose_blocks, in_blocks, merged
from stablenorm.diagnosis.results import Diagnosis
from stablenorm.types import Array

__all__ = ["convert", "diagnose"]


def diagnose(x: Any, options: dict[str, Any]) -> Any:
    """Return the diagnosis of a Dask array, to be computed; `options` are those of `diagnose_blocks`."""
    check_whole_rows(x, options["axis"])
    name = f"diagnose-{tokenize(x, options)}"
    nothing = np.empty((0,) * x.ndim, object)
    found = x.map_blocks(_of_block, options, name=name, meta=nothing)
    last = f"diagnose-merged-{tokenize(x, options)}"
    leaves = [TaskRef(key) for key in flatten(found.__dask_keys__())]
    tasks = tree((last,), leaves, functools.partial(_all, options["top"]))
    return Delayed((last,), HighLevelGraph.from_collections(last, tasks, [found]), layer=last)


def _of_block(x: Array, options: dict[str, Any], block_info: Any) -> Diagnosis:
    """Diagnose a block, whose rows are known by their numbers in the whole array."""
    axes, shape = options["axis"], options["shape"]
    places = enumerate(block_info[0]["array-location"])
    grid = np.ix_(*(range(1) if i in axes else np.arange(*ends) for i, ends in places))
    of_rows = [1 if i in axes else length for i, length in enumerate(shape)]
    numbers = np.ravel_multi_index(grid, of_rows).reshape(-1)
    threads = threads_of_task()
    return diagnose_blocks(in_blocks(x, axes), **options, numbers=numbers, threads=threads)


def _all(top: int, *found: Diagnosis) -> Diagnosis:
    return functools.reduce(functools.partial(merged, top=top), found)
