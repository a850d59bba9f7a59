"""
`layer_norm.cu` on the host: the forward and the backward as functions of NumPy arrays.

The launch follows `_cuda_plan` as on a device; `Setting` is what a device and its caller could
have chosen otherwise, none of which may change a bit. Every tensor is exactly as large as said,
rows of a strided one apart from each other; outputs must be written once, and all of them.
"""

import functools
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm import Gradients
from stablenorm.cuda import plan as _cuda_plan
from stablenorm.cuda.compile import sources
from stablenorm.cuda.plan import DTYPE_CODES, Plan


def load(name: str) -> Any:
    """Import a file beside this one: tests are no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


host_shim = load("host_shim")
READ, WRITE, UNWRITTEN = host_shim.READ, host_shim.WRITE, host_shim.UNWRITTEN

FAST, SLOW = (9, 0), (12, 0)


class Setting(NamedTuple):
    """What may change from device to device and from call to call, and no bit of a result."""

    # Blocks that the device holds at once, and under a cooperative launch (0: it knows none).
    resident: int = 3
    cooperative: int = 1000
    seed: int = 0
    # Elements between the begin of a tensor and a multiple of 16 bytes, and between its rows.
    offset: int = 0
    gap: int = 0
    # Of the same workspace and counters.
    launches: int = 1


PLAIN = Setting()


class Placed(NamedTuple):
    """A (rows, n) or (n,) array in memory of its own: a view, where it is, its rows as tensors."""

    view: np.ndarray
    address: int
    stride: int
    tensors: list[Any]


class Outcome(NamedTuple):
    """What a launch returned, and the records of all launches."""

    arrays: dict[str, np.ndarray]
    records: list[Any]


@functools.cache
def source() -> str:
    """Return the text of layer_norm.cu, its own headers put in their places."""
    texts = {name: text.decode() for name, text in sources().items()}
    main = texts.pop("layer_norm.cu")
    for name, text in texts.items():
        main = main.replace(f'#include "{name}"', text)
    return main


# Neither is looked at by the sanitizers: who plants it is no part of the kernel.
_PLANT = """
static int planted;
__attribute__((no_sanitize_thread, noinline)) static void plant(int fault) { planted = fault; }
__attribute__((no_sanitize_thread, noinline)) static bool has(int fault) { return planted == fault; }
"""


def with_faults(faults: dict[str, tuple[str, str]]) -> str:
    """
    Return the source with all faults in it, so that the compiler runs once.

    A fault is what it replaces and by what, where FAULT is true if it is the one of a launch: the
    number, from 1, that `unused` of its parameters has. 0: none.
    """
    text = source()
    for number, (name, (old, new)) in enumerate(faults.items(), 1):
        if text.count(old) != 1:
            msg = f"{name}: the source must have once what is replaced, has it {text.count(old)} times"
            raise ValueError(msg)
        text = text.replace(old, new.replace("FAULT", f"has({number})"))
    entry = "layer_norm_backward(const Parameters p) {"
    return _PLANT + text.replace(entry, f"{entry}\n    plant(p.unused);")


def build(folder: Path, plan: Plan, *, text: str | None = None, count: bool = False) -> Any:
    """Build the kernel of a plan for fibers, from `text` instead of layer_norm.cu if given."""
    defines = [define.removeprefix("-D") for define in plan.defines]
    text = source() if text is None else text
    return host_shim.build(text, folder, entries=[plan.entry], defines=defines, count=count)


def place(name: str, array: Any, rights: int, setting: Setting) -> Placed | None:
    """Copy an array to where `setting` wants it; one tensor a row if rows are apart."""
    if array is None:
        return None
    itemsize, shape = array.dtype.itemsize, array.shape
    rows, n = (1, *shape) if len(shape) == 1 else shape
    # Nothing but these has a stride.
    gap = setting.gap if name in ("x", "dy", "out") else 0
    words = np.full((rows * (n + gap) + setting.offset) * itemsize + 16, 0xFF, np.uint8)
    begin = -words.ctypes.data % 16 + setting.offset * itemsize
    body = words[begin : begin + rows * (n + gap) * itemsize].view(array.dtype)
    view = body.reshape(rows, n + gap)[:, :n]
    view[...] = array.reshape(rows, n)
    address, pitch = words.ctypes.data + begin, (n + gap) * itemsize
    tensors = (
        [host_shim.Tensor(name, address, array.nbytes, rights)]
        if gap == 0
        else [
            host_shim.Tensor(f"{name}[{row}]", address + row * pitch, n * itemsize, rights)
            for row in range(rows)
        ]
    )
    return Placed(view if len(shape) == 2 else view[0], address, n + gap, tensors)


def _empty(shape: Any, dtype: Any) -> np.ndarray:
    """Return memory that nobody has written: NaN in every format."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(count, 0xFF, np.uint8).view(dtype).reshape(shape)


class Counters(NamedTuple):
    """The words that launches leave fit for the next one."""

    words: np.ndarray

    @classmethod
    def new(cls) -> "Counters":
        """Return the words of a new stream: zeros."""
        return cls(np.zeros(_cuda_plan.COUNTERS, np.uint32))


def launch(
    kernel: Any,
    plan: Plan,
    shape: tuple[int, int],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    setting: Setting,
    **values: Any,
) -> Outcome:
    """Run `plan` on placed arrays as often as `setting` says; return the outputs."""
    rows, n = shape
    grid = _cuda_plan.grid_blocks(plan, rows, setting.resident)
    mode = _cuda_plan.final_mode(plan, grid, setting.cooperative)
    counters = Counters.new()
    # The last elements of a tensor would hide a read of the next: each has its own memory.
    records, results = [], {}
    for turn in range(setting.launches):
        placed = {name: place(name, array, READ, setting) for name, array in inputs.items()}
        for name, array in outputs.items():
            of_rows = array is not None and array.ndim == 2 and name == "out"
            placed[name] = place(name, array, WRITE, setting if of_rows else PLAIN)
        workspace = _empty(plan.workspace_bytes, np.uint8)
        rights = READ | WRITE | UNWRITTEN
        placed["partials"] = place("partials", workspace, rights, PLAIN)
        placed["counters"] = None
        counter = host_shim.tensor("counters", counters.words, READ | WRITE)
        params = _cuda_plan.pack_parameters(
            plan,
            rows,
            n,
            **{name: held.address for name, held in placed.items() if held is not None},
            counters=counter.address,
            **{
                f"{name}_stride": placed[name].stride
                for name in ("x", "dy", "out")
                if placed.get(name) is not None
            },
            final_mode=mode,
            **values,
        )
        tensors = [
            tensor for held in placed.values() if held is not None for tensor in held.tensors
        ]
        record = host_shim.launch(
            kernel,
            plan.entry,
            grid,
            plan.block,
            plan.shared_bytes,
            params,
            tensors=[*tensors, counter],
            schedule_seed=setting.seed + turn,
            cooperative=mode == _cuda_plan.GRID_BARRIER,
            cluster=plan.cluster,
        )
        for name in outputs:
            if placed[name] is not None:
                for tensor in placed[name].tensors:
                    check_written_once(tensor.name, record.traffic[tensor.name].writes)
        turned = {name: placed[name].view for name in outputs if placed[name] is not None}
        for name, array in results.items():
            assert array.tobytes() == turned[name].tobytes(), f"{name} of launch {turn} differs"
        results = results or {name: array.copy() for name, array in turned.items()}
        records.append(record)
    return Outcome(results, records)


def check_written_once(name: str, writes: np.ndarray) -> None:
    """Raise unless each byte was stored once: none forgotten, none by two threads."""
    if (writes != 1).any():
        byte = int(np.flatnonzero(writes != 1)[0])
        msg = f"{name}: byte {byte} must be stored once, was {writes[byte]} times"
        raise AssertionError(msg)


STATISTICS = ("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail")


def forward(
    folder: Path,
    x: np.ndarray,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    setting: Setting = PLAIN,
    *,
    capability: tuple[int, int] = FAST,
    cluster_limit: int = 1,
    text: str | None = None,
    count: bool = False,
) -> Outcome:
    """Return y as `out` and the statistics."""
    rows, n = x.shape
    which = _cuda_plan.arithmetic(capability, x, gamma, beta)
    plan = _cuda_plan.plan_forward(rows, n, x.dtype, which, cluster_limit=cluster_limit)
    kernel = build(folder, plan, text=text, count=count)
    wide = which == _cuda_plan.DOUBLE_PAIRS
    kept = STATISTICS if wide else STATISTICS[:3]
    outputs = {"out": _empty(x.shape, x.dtype), **{name: _empty(rows, np.float64) for name in kept}}
    if which != _cuda_plan.DOUBLE:
        outputs["exponent"] = _empty((rows, 2), np.int16)
    inputs = {"x": x, "gamma": gamma, "beta": beta}
    return launch(kernel, plan, x.shape, inputs, outputs, setting, eps=eps, **codes(gamma, beta))


def backward(
    folder: Path,
    dy: np.ndarray,
    x: np.ndarray,
    gamma: Any,
    statistics: dict[str, np.ndarray],
    setting: Setting = PLAIN,
    *,
    wrt: Sequence[str] = ("x", "gamma", "beta"),
    beta_dtype: Any = None,
    capability: tuple[int, int] = FAST,
    shared_limit: int = _cuda_plan.SHARED_BYTES,
    cluster_limit: int = 1,
    text: str | None = None,
    fault: int = 0,
    count: bool = False,
) -> Outcome:
    """Return dx as `out`, dgamma and dbeta, in the dtypes of gamma and of beta (or of x)."""
    rows, n = x.shape
    which = _cuda_plan.arithmetic(capability, x, gamma, dy)
    if "rstd_lo" in statistics:
        which = _cuda_plan.DOUBLE_PAIRS
    summing = "gamma" in wrt or "beta" in wrt
    limits = {"shared_limit": shared_limit, "cluster_limit": cluster_limit}
    plan = _cuda_plan.plan_backward(rows, n, x.dtype, dy.dtype, which, summing=summing, **limits)
    kernel = build(folder, plan, text=text, count=count)
    gamma_dtype = x.dtype if gamma is None else gamma.dtype
    beta_dtype = gamma_dtype if beta_dtype is None else beta_dtype
    outputs = {
        "out": _empty(x.shape, x.dtype) if "x" in wrt else None,
        "dgamma": _empty(n, gamma_dtype) if "gamma" in wrt else None,
        "dbeta": _empty(n, beta_dtype) if "beta" in wrt else None,
    }
    inputs = {"x": x, "dy": dy, "gamma": gamma, **statistics}
    values = {
        "gamma_type": DTYPE_CODES[gamma_dtype],
        "beta_type": DTYPE_CODES[np.dtype(beta_dtype)],
        "unused": fault,
    }
    return launch(kernel, plan, x.shape, inputs, outputs, setting, **values)


def codes(gamma: Any, beta: Any) -> dict[str, int]:
    """Return the codes of the dtypes of gamma and beta."""
    return {
        f"{name}_type": DTYPE_CODES[array.dtype]
        for name, array in (("gamma", gamma), ("beta", beta))
        if array is not None
    }


def both(
    folder: Path, case: Any, setting: Setting = PLAIN, **options: Any
) -> tuple[np.ndarray, Gradients]:
    """Return y and the gradients of `case`: x, gamma, beta, eps, dy."""
    x, gamma, beta, eps, dy = case
    results = forward(folder, x, gamma, beta, eps, setting, **options).arrays
    y = results.pop("out")
    beta_dtype = None if beta is None else beta.dtype
    given = backward(
        folder, dy, x, gamma, results, setting, beta_dtype=beta_dtype, **options
    ).arrays
    return y, Gradients(given.get("out"), given.get("dgamma"), given.get("dbeta"))
