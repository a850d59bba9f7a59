"""`diagnose` of a Dask array: each block a task of its own, merged in a tree."""

import functools
import itertools
import math
from typing import Any

import numpy as np
from dask._task_spec import TaskRef
from dask.base import tokenize
from dask.delayed import Delayed

from stablenorm.arrays import as_matrix, as_rows
from stablenorm.dask.graph import (
    Block,
    blocks_of,
    check_whole_rows,
    graph_of,
    threads_of_task,
    tree,
)
from stablenorm.diagnosis import BLOCK, diagnose_blocks, merged
from stablenorm.diagnosis.results import Diagnosis
from stablenorm.types import Array


def diagnose(x: Any, options: dict[str, Any]) -> Any:
    """Return the diagnosis of a Dask array, to be computed; `options` are those of `diagnose_blocks`."""
    axes = options["axis"]
    check_whole_rows(x, axes)
    token = tokenize(x, options)
    starts = [[0, *itertools.accumulate(sizes)] for sizes in x.chunks]

    def task(at: Block) -> tuple[Any, ...]:
        first = tuple(starts[axis][i] for axis, i in enumerate(at) if axis not in axes)
        return _of_block, TaskRef((x.name, *at)), first, options

    tasks = blocks_of(f"diagnose-{token}", x, task)
    leaves = [TaskRef(key) for key in tasks]
    last = tree(
        (f"diagnose-merged-{token}",), leaves, functools.partial(_all, options["top"]), tasks
    )
    return Delayed(last.key, graph_of(f"diagnose-{token}", tasks, x), layer=f"diagnose-{token}")


def _of_block(x: Array, first: tuple[int, ...], options: dict[str, Any]) -> Diagnosis:
    """Diagnose a block whose rows begin at `first`, counted along the axes that are not normalized."""
    axes, shape = options["axis"], options["shape"]
    mine, all_ = ([k for i, k in enumerate(s) if i not in axes] for s in (x.shape, shape))
    grid = np.ix_(*(np.arange(start, start + k) for start, k in zip(first, mine, strict=True)))
    numbers = np.ravel_multi_index(grid, all_).reshape(-1) if mine else np.zeros(1, int)
    rows = as_matrix(as_rows(x, axes))
    step = max(1, BLOCK // math.prod(shape[axis] for axis in axes))
    blocks = (rows[i : i + step] for i in range(0, rows.shape[0], step))
    return diagnose_blocks(blocks, **options, numbers=numbers, threads=threads_of_task())


def _all(top: int, *found: Diagnosis) -> Diagnosis:
    return functools.reduce(functools.partial(merged, top=top), found)
