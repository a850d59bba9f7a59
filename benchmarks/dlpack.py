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
jnp: Any = importlib.import_module("jax.numpy")
torch: Any = importlib.import_module("torch")

PAGE = DOCS / "how-to" / "dlpack.md"


def _attempt(read: Callable[[], Any], address: Callable[[Any], int], source: int) -> str:
    """Say what came of an exchange: the same memory, a copy, or an error."""
    try:
        result = read()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).rstrip('.')}"
    words = "the same memory" if address(result) == source else "a copy"
    if isinstance(result, np.ndarray):
        words += ", writeable" if result.flags.writeable else ", read-only"
    return words


def _numpy_address(array: Any) -> int:
    return int(array.ctypes.data)


def try_torch() -> list[tuple[str, str]]:
    """Return what was tried with PyTorch, and what came of it."""
    t = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    half = t.to(torch.bfloat16)
    wanted = torch.ones(2, 3, requires_grad=True)
    y = stablenorm.layer_norm(np.from_dlpack(t))
    fixed = y.copy()
    fixed.flags.writeable = False
    bits = half.view(torch.uint16)

    def see_bits() -> Any:
        return np.from_dlpack(bits).view(ml_dtypes.bfloat16)

    def pointer(tensor: Any) -> int:
        return int(tensor.data_ptr())

    here, back = _numpy_address, torch.from_dlpack
    return [
        ("`np.from_dlpack(tensor)`", _attempt(lambda: np.from_dlpack(t), here, pointer(t))),
        ("the same, transposed", _attempt(lambda: np.from_dlpack(t.T), here, pointer(t))),
        ("the same, `requires_grad`", _attempt(lambda: np.from_dlpack(wanted), here, 0)),
        ("the same, bfloat16", _attempt(lambda: np.from_dlpack(half), here, 0)),
        (
            "bfloat16, by way of its bits",
            _attempt(see_bits, here, pointer(half)),
        ),
        ("`torch.from_dlpack(y)`", _attempt(lambda: back(y), pointer, here(y))),
        (
            "`torch.from_dlpack` of a read-only array",
            _attempt(lambda: back(fixed), pointer, here(fixed)) + ", which PyTorch may write to",
        ),
    ]


def try_jax() -> list[tuple[str, str]]:
    """Return what was tried with JAX, and what came of it."""
    j = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    half = j.astype(jnp.bfloat16)
    y = stablenorm.layer_norm(np.from_dlpack(j))

    def pointer(array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def read() -> Any:
        return np.from_dlpack(j)

    return [
        ("`np.from_dlpack(array)`", _attempt(read, _numpy_address, pointer(j))),
        ("the same, bfloat16", _attempt(lambda: np.from_dlpack(half), _numpy_address, 0)),
        (
            "`np.asarray(array)`, bfloat16",
            _attempt(lambda: np.asarray(half), _numpy_address, pointer(half)),
        ),
        (
            "`jax.dlpack.from_dlpack(y)`",
            _attempt(lambda: jax.dlpack.from_dlpack(y), pointer, _numpy_address(y)),
        ),
    ]


def check_autograd() -> None:
    """Run the function of the page; raise AssertionError unless PyTorch's own agrees."""
    code = re.search(r"```python\n(class StableLayerNorm.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "np": np, "stablenorm": stablenorm}
    # The code that the page shows, lest what is shown and what was tried drift apart.
    exec(code[1] if code else "", names)  # noqa: S102
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((5, 8), (8,), (8,))]
    dy = torch.randn(5, 8)
    x, gamma, beta = leaves
    ours = names["StableLayerNorm"].apply(x, gamma, beta, 1e-5)
    theirs = torch.nn.functional.layer_norm(x, (8,), gamma, beta, 1e-5)
    # Sixteen roundings of float32, on numbers of size 1.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=16 * 2**-24)
    for mine, other in zip(
        torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=64 * 2**-24)


def main() -> None:
    """Check, try, write."""
    check_autograd()
    versions = {"PyTorch": torch.__version__, "JAX": jax.__version__}
    tables = [
        table((f"{name} {versions[name]}", "gives"), rows)
        for name, rows in (("PyTorch", try_torch()), ("JAX", try_jax()))
    ]
    text = "\n\n".join([*tables, origin_line("make dlpack", origin())])
    put(PAGE, {"dlpack": text}, __file__)
    print(text)


if __name__ == "__main__":
    main()
