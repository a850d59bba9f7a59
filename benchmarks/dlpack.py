"""
What DLPack copies between frameworks and NumPy: tried, and written into docs/how-to/dlpack.md.

Needs the environment of the benchmarks: ``.venv-bench/bin/python benchmarks/dlpack.py``. Also runs
the autograd function of the page against PyTorch's own layer norm.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from page import DOCS, origin, origin_line, put, table

import stablenorm

# Peers: without types here, and absent where the types are checked.
jax: Any = importlib.import_module("jax")
torch: Any = importlib.import_module("torch")

PAGE = DOCS / "how-to" / "dlpack.md"


def _pointer(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.unsafe_buffer_pointer())


def _attempt(read: Callable[[Any], Any], source: Any) -> str:
    """Say what came of an exchange: the same memory, a copy, or an error."""
    try:
        result = read(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).rstrip('.')}"
    words = "the same memory" if _pointer(result) == _pointer(source) else "a copy"
    if isinstance(result, np.ndarray):
        words += ", writeable" if result.flags.writeable else ", read-only"
    return words


def try_torch() -> list[tuple[str, str]]:
    """Return what was tried with PyTorch, and what came of it."""
    t = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    half, wanted = t.to(torch.bfloat16), torch.ones(2, 3, requires_grad=True)
    y = stablenorm.layer_norm(np.from_dlpack(t))
    fixed = y.copy()
    fixed.flags.writeable = False

    def see_bits(tensor: Any) -> Any:
        return np.from_dlpack(tensor.view(torch.uint16)).view(ml_dtypes.bfloat16)

    here, back = np.from_dlpack, torch.from_dlpack
    return [
        ("`np.from_dlpack(tensor)`", _attempt(here, t)),
        ("the same, transposed", _attempt(here, t.T)),
        ("the same, `requires_grad`", _attempt(here, wanted)),
        ("the same, bfloat16", _attempt(here, half)),
        ("bfloat16, by way of its bits", _attempt(see_bits, half)),
        ("`torch.from_dlpack(y)`", _attempt(back, y)),
        (
            "`torch.from_dlpack` of a read-only array",
            _attempt(back, fixed) + ", which PyTorch may write to",
        ),
    ]


def try_jax() -> list[tuple[str, str]]:
    """Return what was tried with JAX, and what came of it."""
    j = jax.numpy.arange(12, dtype=jax.numpy.float32).reshape(3, 4)
    half, y = j.astype(jax.numpy.bfloat16), stablenorm.layer_norm(np.from_dlpack(j))
    return [
        ("`np.from_dlpack(array)`", _attempt(np.from_dlpack, j)),
        ("the same, bfloat16", _attempt(np.from_dlpack, half)),
        ("`np.asarray(array)`, bfloat16", _attempt(np.asarray, half)),
        ("`jax.dlpack.from_dlpack(y)`", _attempt(jax.dlpack.from_dlpack, y)),
    ]


def check_autograd() -> None:
    """Run the function of the page; raise AssertionError unless PyTorch's own agrees."""
    code = re.search(r"```python\n(class StableLayerNorm.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "np": np, "stablenorm": stablenorm}
    # The code that the page shows, lest what is shown and what was tried drift apart.
    exec(code[1] if code else "", names)  # noqa: S102
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((5, 8), (8,), (8,))]
    x, gamma, beta = leaves
    ours = names["StableLayerNorm"].apply(x, gamma, beta, 1e-5)
    theirs = torch.nn.functional.layer_norm(x, (8,), gamma, beta, 1e-5)
    dy = torch.randn(5, 8)
    mine, others = ((y, *torch.autograd.grad(y, leaves, dy)) for y in (ours, theirs))
    # 64 roundings of float32, on numbers of size 1.
    torch.testing.assert_close(mine, others, rtol=0, atol=64 * 2**-24)


def main() -> None:
    """Check, try, write."""
    check_autograd()
    tables = [
        table((f"{name} {peer.__version__}", "gives"), rows)
        for name, peer, rows in (("PyTorch", torch, try_torch()), ("JAX", jax, try_jax()))
    ]
    text = "\n\n".join([*tables, origin_line("make dlpack", origin())])
    put(PAGE, {"dlpack": text}, __file__)
    print(text)


if __name__ == "__main__":
    main()
