"""
`layer_norm.cu` on the host: the forward and the backward as functions of NumPy arrays.

The launch follows `stablenorm.cuda.plan` as on a device; `Setting` is what a device and its caller
could have chosen otherwise, none of which may change a bit. Every tensor is exactly as large as said,
rows of a strided one apart from each other; outputs must be written once, and all of them.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import host_shim
import numpy as np
from host_shim import READ, WRITE, Tensor

from stablenorm.cuda.compile import sources
from stablenorm.cuda.plan import COUNTERS, DTYPE_CODES, Kernel, choose_kernel, cut, pack_parameters
from stablenorm.types import any_float64


class Setting(NamedTuple):
    """What may change from device to device and from call to call, and no bit of a result."""

    # Blocks that the device holds at once, and whether a launch can be promised that they run.
    resident: int = 3
    cooperative: bool = True
    seed: int = 0
    # Elements between the begin of a tensor and a multiple of 16 bytes, and between its rows.
    offset: int = 0
    gap: int = 0
    # Of the same counters.
    launches: int = 1


PLAIN = Setting()


class Outcome(NamedTuple):
    """What a launch returned, and the traffic of the last one."""

    arrays: dict[str, np.ndarray]
    traffic: dict[str, Any]


@functools.cache
def source() -> str:
    """Return the text of layer_norm.cu, its own headers put in their places."""
    texts = {name: text.decode() for name, text in sources().items()}
    main = texts.pop("layer_norm.cu")
    for name, text in texts.items():
        main = main.replace(f'#include "{name}"', text)
    return main


def with_faults(faults: dict[str, tuple[str, str]]) -> str:
    """
    Return the source with all faults in it, so that the compiler runs once.

    A fault is what it replaces and by what, where FAULT is true if its number, from 1, is the value
    of the library's `planted`.
    """
    text = source()
    for number, (name, (old, new)) in enumerate(faults.items(), 1):
        if text.count(old) != 1:
            msg = f"{name}: the source must have once what is replaced, has it {text.count(old)} times"
            raise ValueError(msg)
        text = text.replace(old, new.replace("FAULT", f"(planted == {number})"))
    return f'extern "C" {{ int planted; }}\n{text}'


def build(folder: Path, kernel: Kernel, text: str | None = None) -> Any:
    """Build a kernel for fibers, from `text` instead of layer_norm.cu if given."""
    return host_shim.build(text or source(), folder, kernel.entry, kernel.defines)


def empty(shape: Any, dtype: Any) -> np.ndarray:
    """Return memory that nobody has written: NaN in every format."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(count, 0xFF, np.uint8).view(dtype).reshape(shape)


def place(
    name: str, array: np.ndarray, rights: int, setting: Setting
) -> tuple[np.ndarray, list[Tensor], int]:
    """Copy an array to where `setting` wants it: a view, one tensor or one for each row, stride."""
    # Nothing but these has a stride.
    gap = setting.gap if name in ("x", "dy", "out") else 0
    rows, n = array.shape if gap else (1, array.size)
    width = array.shape[-1] + gap
    itemsize = array.dtype.itemsize
    words = np.full((rows * (n + gap) + setting.offset) * itemsize + 16, 0xFF, np.uint8)
    begin = -words.ctypes.data % 16 + setting.offset * itemsize
    body = words[begin : begin + rows * (n + gap) * itemsize].view(array.dtype)
    view = body.reshape(rows, n + gap)[:, :n]
    view[...] = array.reshape(rows, n)
    address, pitch = words.ctypes.data + begin, (n + gap) * itemsize
    tensors = [
        Tensor(f"{name}[{row}]" if gap else name, address + row * pitch, n * itemsize, rights)
        for row in range(rows)
    ]
    return view if gap else view.reshape(array.shape), tensors, width


def run(
    built: Any,
    kernel: Kernel,
    work: int,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    setting: Setting,
    partials: int = 0,
    **values: Any,
) -> Outcome:
    """Launch on placed arrays as often as `setting` says; return the outputs."""
    grid = min(work, setting.resident)
    barrier = bool(partials) and setting.cooperative
    counters = np.zeros(COUNTERS, np.uint32)
    results: dict[str, np.ndarray] = {}
    for turn in range(setting.launches):
        # The last elements of a tensor would hide a read of the next: each has its own memory.
        placed = {k: place(k, a, READ, setting) for k, a in inputs.items() if a is not None}
        made = {k: place(k, a, WRITE, setting) for k, a in outputs.items() if a is not None}
        workspace = {"partials": empty(partials, np.uint8), "counters": counters}
        tensors = [t for _, found, _ in (placed | made).values() for t in found]
        for name, words in workspace.items():
            tensors.append(Tensor(name, words.ctypes.data, words.nbytes, READ | WRITE))
        addresses = {k: found[0].address for k, (_, found, _) in (placed | made).items()}
        addresses |= {k: words.ctypes.data for k, words in workspace.items()}
        strides = {
            f"{k}_stride": (placed | made)[k][2] for k in ("x", "dy", "out") if k in addresses
        }
        parameters = pack_parameters(**addresses, **strides, **values, barrier=barrier)
        traffic = host_shim.launch(
            built, grid, kernel.block, kernel.shared_bytes, parameters, tensors,
            seed=setting.seed + turn, cooperative=barrier,
        )  # fmt: skip
        for name, (view, found, _) in made.items():
            for tensor in found:
                writes = traffic[tensor.name].writes
                assert (writes == 1).all(), f"{tensor.name}: a byte is not stored once"
            if turn:
                assert results[name].tobytes() == view.tobytes(), f"{name} of launch {turn} differs"
            results[name] = view.copy()
    return Outcome(results, traffic)


def forward(
    folder: Path,
    x: np.ndarray,
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    setting: Setting = PLAIN,
) -> Outcome:
    """Return y as `out` and the statistics."""
    rows, n = x.shape
    pairs = any_float64(x, gamma, beta)
    kernel = choose_kernel(True, n, x.dtype, x.dtype, pairs)
    words = ("mean", "mean_lo", "rstd", "rstd_lo", "mean_tail")[: 5 if pairs else 3]
    outputs = {"out": empty(x.shape, x.dtype), **{name: empty(rows, np.float64) for name in words}}
    if pairs:
        outputs["exponent"] = empty((rows, 2), np.int16)
    inputs = {"x": x, "gamma": gamma, "beta": beta}
    values = {"rows": rows, "n": n, "eps": eps, **codes(gamma=gamma, beta=beta)}
    work = -(-rows // kernel.slots)
    return run(build(folder, kernel), kernel, work, inputs, outputs, setting, **values)


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
    text: str | None = None,
    fault: int = 0,
) -> Outcome:
    """Return dx as `out`, dgamma and dbeta, in the dtypes of gamma and of beta (or of x)."""
    rows, n = x.shape
    pairs = any_float64(x, gamma, dy) or "rstd_lo" in statistics
    kernel = choose_kernel(False, n, x.dtype, dy.dtype, pairs)
    chunks = cut(rows, kernel.slots)
    built = build(folder, kernel, text)
    if text is not None:
        host_shim.ctypes.c_int.in_dll(built[0], "planted").value = fault
    gamma_dtype = x.dtype if gamma is None else gamma.dtype
    types = {"gamma": gamma_dtype, "beta": np.dtype(beta_dtype or gamma_dtype)}
    outputs = {"out": empty(x.shape, x.dtype) if "x" in wrt else None}
    outputs |= {f"d{k}": empty(n, dtype) if k in wrt else None for k, dtype in types.items()}
    inputs = {"x": x, "dy": dy, "gamma": gamma, **statistics}
    values = {"rows": rows, "n": n, "chunks": chunks.number, "chunk_rows": chunks.rows}
    values |= {f"{k}_type": DTYPE_CODES[dtype] for k, dtype in types.items()}
    summing = "gamma" in wrt or "beta" in wrt
    partials = 2 * n * chunks.number * kernel.number_bytes if summing else 0
    return run(built, kernel, chunks.number, inputs, outputs, setting, partials, **values)


def codes(**arrays: Any) -> dict[str, int]:
    """Return the codes of the dtypes of gamma and beta."""
    return {f"{k}_type": DTYPE_CODES[a.dtype] for k, a in arrays.items() if a is not None}


def both(folder: Path, case: Any, setting: Setting = PLAIN) -> dict[str, np.ndarray]:
    """Return y and the gradients of `case`: x, gamma, beta, eps, dy."""
    x, gamma, beta, eps, dy = case
    kept = forward(folder, x, gamma, beta, eps, setting).arrays
    y = kept.pop("out")
    beta_dtype = None if beta is None else beta.dtype
    made = backward(folder, dy, x, gamma, kept, setting, beta_dtype=beta_dtype).arrays
    return {"y": y, "dx": made["out"], "dgamma": made["dgamma"], "dbeta": made["dbeta"]}
