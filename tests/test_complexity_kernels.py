"""
The counts of the compiled kernels, held against a run of their own source with numbers that count.

The kernels are Python whose words for vectors and memory are compiler intrinsics. Here the same files
are executed with other words in the place of these: each calculates on NumPy arrays, and counts.
"""

import builtins
import ctypes
import importlib.util
import math
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stablenorm.analysis.complexity import count_terms
from stablenorm.analysis.plain import plain_backward, plain_forward

WIDTH = 8
KERNELS = Path(importlib.util.find_spec("stablenorm.kernels").origin).parent
QUANTITIES = (
    "single", "fused", "divisions", "others", "loaded", "stored", "fetched", "kept", "read", "written",
)  # fmt: skip


class Count:
    """What one run has done."""

    def __init__(self):
        self.__dict__ |= dict.fromkeys(QUANTITIES, 0)


class Lanes:
    """Eight columns of some rows, as `_vectors.Lanes`."""

    def __init__(self, count, values):
        self.count, self.values = count, values

    def _with(self, other, operation, quantity):
        values = operation(self.values, other.values)
        setattr(self.count, quantity, getattr(self.count, quantity) + values.size)
        return Lanes(self.count, values)

    def __add__(self, other):
        return self._with(other, np.add, "single")

    def __sub__(self, other):
        return self._with(other, np.subtract, "single")

    def __mul__(self, other):
        return self._with(other, np.multiply, "single")

    def __truediv__(self, other):
        return self._with(other, np.divide, "divisions")


class Number(float):
    """A float64 of a row, which counts into `count`."""

    def __new__(cls, count, value):
        made = super().__new__(cls, value)
        made.count = count
        return made

    def _made(self, value, quantity):
        setattr(self.count, quantity, getattr(self.count, quantity) + 1)
        return Number(self.count, value)

    def __add__(self, other):
        return self._made(float(self) + float(other), "single")

    def __sub__(self, other):
        return self._made(float(self) - float(other), "single")

    def __mul__(self, other):
        return self._made(float(self) * float(other), "single")

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._made(float(self) / float(other), "divisions")

    def __rtruediv__(self, other):
        return self._made(float(other) / float(self), "divisions")

    def __neg__(self):
        return Number(self.count, -float(self))


class Pointer:
    """An address, and the type of what is there."""

    def __init__(self, count, address, dtype):
        self.count, self.address, self.dtype = count, int(address), np.dtype(dtype)

    def view(self, offset, elements):
        nbytes = elements * self.dtype.itemsize
        memory = (ctypes.c_char * nbytes).from_address(self.address + int(offset))
        return np.frombuffer(memory, np.uint8).view(self.dtype)

    def __getitem__(self, index):
        value = self.view(index * self.dtype.itemsize, 1)[0]
        return Number(self.count, value) if self.dtype.kind == "f" else int(value)

    def __setitem__(self, index, value):
        self.view(index * self.dtype.itemsize, 1)[0] = value


def memory_words(count):
    """Stand in for `_vector_memory`."""

    def moved(at, elements, way):
        size = elements * at.dtype.itemsize
        setattr(count, way, getattr(count, way) + size)
        if at.dtype.itemsize == 8:
            kind = "fetched" if way == "read" else "kept"
        else:
            kind = "loaded" if way == "read" else "stored"
        setattr(count, kind, getattr(count, kind) + elements)

    def load_some(at, offset, stride, some, like):
        values = np.zeros_like(like.values)
        for row in range(len(values)):
            values[row, :some] = at.view(offset + row * stride, some).astype(np.float64)
        moved(at, some * len(values), "read")
        return Lanes(count, values)

    def store_some(at, offset, stride, some, v):
        for row, values in enumerate(v.values):
            at.view(offset + row * stride, some)[:] = values[:some].astype(at.dtype)
        moved(at, some * len(v.values), "written")

    def store(at, offset, stride, v):
        store_some(at, offset, stride, WIDTH, v)

    return {
        "pointer": lambda array: Pointer(count, array.ctypes.data, array.dtype),
        "address": lambda at: at.address,
        "pointer_at": lambda address, like: Pointer(count, address, like.dtype),
        "itemsize": lambda at: at.dtype.itemsize,
        "load": lambda at, offset, stride, like: load_some(at, offset, stride, WIDTH, like),
        "load_some": load_some,
        "store": store,
        "stream": store,
        "store_some": store_some,
        "prefetch": lambda *_: None,
        "prefetch_to_write": lambda *_: None,
    }


def vector_words(count):
    """Stand in for `_vectors`."""

    def lanes(values):
        return Lanes(count, values)

    def counted(values, quantity):
        setattr(count, quantity, getattr(count, quantity) + values.size)
        return lanes(values)

    def of_rows(numbers, like):
        rows = len(like.values)
        return lanes(np.repeat([[float(numbers[row])] for row in range(rows)], WIDTH, axis=1))

    def row_totals(v):
        values = v.values
        while values.shape[1] > 1:
            half = values.shape[1] // 2
            values = counted(values[:, :half] + values[:, half:], "single").values
        return lanes(np.pad(values.T, ((0, 0), (0, WIDTH - len(values)))))

    def sum_rows(v):
        parts = v.values
        while len(parts) > 1:
            parts = counted(parts[::2] + parts[1::2], "single").values
        return lanes(parts)

    def add_in_order(total, v):
        for row in v.values:
            total = total + lanes(row[None])
        return total

    def keep(v, some):
        return lanes(np.where(np.arange(WIDTH) < some, v.values, 0.0))

    def smaller_nonzero(a, b):
        less = (b.values < a.values) & (b.values != 0)
        return counted(np.where(less, b.values, a.values), "others")

    def larger(a, b):
        return counted(np.where(b.values > a.values, b.values, a.values), "others")

    def finite_or(a, b):
        # A subtraction finds out which is which.
        count.single += b.values.size
        return counted(np.where(np.isfinite(b.values), a.values, b.values), "others")

    swapped = {
        far: lambda v, far=far: lanes(v.values[:, np.arange(WIDTH) ^ far]) for far in (4, 2, 1)
    }
    return {
        "ZEROS": {rows: lambda rows=rows: lanes(np.zeros((rows, WIDTH))) for rows in (1, 4, 8)},
        "SWAPPED": swapped,
        "count_rows": lambda v: len(v.values),
        "splat": lambda value, like: lanes(np.full_like(like.values, float(value))),
        "of_rows": of_rows,
        "in_rows": lambda v, like: lanes(np.broadcast_to(v.values, like.values.shape)),
        "plus": lambda a, b: counted(a.values + b.values, "fused"),
        "minus": lambda a, b: counted(a.values - b.values, "fused"),
        "fma": lambda a, b, c: counted(a.values * b.values + c.values, "fused"),
        "negative": lambda v: lanes(-v.values),
        "magnitude": lambda v: counted(np.abs(v.values), "others"),
        "larger": larger,
        "finite_or": finite_or,
        "smaller_nonzero": smaller_nonzero,
        "square_root": lambda v: counted(np.sqrt(v.values), "divisions"),
        "row_totals": row_totals,
        "sum_rows": sum_rows,
        "add_in_order": add_in_order,
        "first_lane": lambda v: Number(count, v.values[0, 0]),
        "keep": keep,
    }


def kernels(count):
    """Return what loads a module of the kernels with words that count."""

    def as_is(function=None, **_options):
        return function if function is not None else as_is

    def root(number):
        count.divisions += 1
        return Number(count, math.sqrt(number))

    words = {
        "_inner": {"inner": as_is, "inlined": as_is},
        "_ir": {"WIDTH": WIDTH},
        "_memory": {
            "LINE": 64,
            "fence": lambda: None,
            "stream_bytes": lambda to, source, size: ctypes.memmove(int(to), int(source), size),
        },
        "_vector_memory": memory_words(count),
        "_vectors": vector_words(count),
        "numba": {"njit": as_is},
        "math": {"sqrt": root},
    }
    loaded = {name: types.SimpleNamespace(**held) for name, held in words.items()}

    def load(name):
        if name not in loaded:
            space = {"__builtins__": {**vars(builtins), "__import__": bring}, "__name__": name}
            source = (KERNELS / f"{name}.py").read_text("utf8")
            exec(compile(source, name, "exec"), space)  # noqa: S102  # the kernels' own
            loaded[name] = types.SimpleNamespace(**space)
        return loaded[name]

    def bring(name, globals_=None, locals_=None, names=(), level=0):
        short = name.removeprefix("stablenorm.kernels.")
        if short != name or short in words:
            return load(short)
        return __import__(name, globals_, locals_, names, level)

    return load


class Run:
    """Forward and backward of one tile, with their counts."""

    def __init__(self, rows, n, dtype):
        rng = np.random.default_rng(0)
        kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        self.wide, parameters = kind == np.float64, np.float64 if kind == np.float64 else np.float32
        self.x, self.dy = (rng.standard_normal((rows, n)).astype(kind) for _ in range(2))
        self.gamma = rng.uniform(0.5, 1.5, n).astype(parameters)
        self.beta = rng.standard_normal(n).astype(parameters)
        self.y, self.dx = np.empty_like(self.x), np.empty_like(self.x)
        self.numbers, self.tails = np.zeros((4, rows)), np.zeros(rows)
        self.totals = np.empty((2, n), kind)

    def forward(self):
        count = Count()
        load = kernels(count)
        pointer = load("_vector_memory").pointer
        rows, n = self.x.shape
        stride = self.x.strides[0]
        head = (pointer(self.x), stride, 0, rows, n, pointer(self.gamma), pointer(self.beta), 1e-5)
        tail = (pointer(self.y), stride, False)
        if self.wide:
            hard = np.zeros(rows, np.uint8)
            kept = (pointer(self.numbers), rows, pointer(self.tails))
            load("_wide_forward").forward_tile(*head, *kept, *tail, pointer(hard))
            assert not hard.any()
        else:
            load("_narrow_forward").forward_tile(*head, pointer(self.numbers), rows, *tail)
        return count

    def backward(self):
        count = Count()
        load = kernels(count)
        pointer = load("_vector_memory").pointer
        (rows, n), stride = self.x.shape, self.x.strides[0]
        size = load("_sums").sums_size(n)
        sums = np.full((1, 2, size), np.nan)
        head = (pointer(self.dy), stride, pointer(self.x), stride, 0, rows, n, pointer(self.gamma))
        if self.wide:
            known = np.zeros(rows, np.uint8)
            load("_wide_backward").backward_tile(
                *head, pointer(self.numbers), rows, pointer(self.tails), False,
                pointer(self.dx), stride, True, False, pointer(sums), size, True,
                pointer(known), False,
            )  # fmt: skip
        else:
            load("_narrow_backward").backward_tile(
                *head, pointer(self.numbers), rows, pointer(self.dx), stride, True, False,
                pointer(sums), True,
            )  # fmt: skip
        for which in range(2):
            load("_sums").total_of_tiles(pointer(sums), 1, n, which, pointer(self.totals[which]))
        return count

    def agrees(self):
        """Tell whether the results are those of a layer norm: the run was a real one."""
        x, dy, gamma, beta = (
            array.astype(np.float64) for array in (self.x, self.dy, self.gamma, self.beta)
        )
        y, cache = plain_forward(x, gamma, beta)
        expected = (y, *plain_backward(dy, cache))
        actual = (self.y, self.dx, *self.totals)
        # Roundings to the type of x, of numbers of order 1 to sqrt(rows).
        room = 8 * float(ml_dtypes.finfo(self.x.dtype).eps)
        return all(
            np.allclose(one.astype(np.float64), other, rtol=room, atol=room)
            for one, other in zip(actual, expected, strict=True)
        )


SHAPES = [(8, 64), (7, 100), (9, 1031), (3, 4103)]
CASES = [(*shape, t) for shape in SHAPES for t in ("float32", "float16", "bfloat16", "float64")]


# The last: rows that the forward takes one by one, and the backward by fours.
@pytest.mark.parametrize(("rows", "n", "dtype"), [*CASES, (5, 16392, "float32")])
def test_counts_of_the_compiled_kernels_are_those_of_their_source(rows, n, dtype):
    run = Run(rows, n, dtype)
    for direction, count in (("forward", run.forward()), ("backward", run.backward())):
        costs = [cost for _, cost in count_terms("fused CPU", direction, (rows, n), dtype)]
        expected = {q: getattr(count, q) for q in QUANTITIES}
        actual = {q: sum(getattr(cost, q) for cost in costs) for q in QUANTITIES}
        assert actual == expected, direction
    assert run.agrees()
