"""The peers on a GPU, as far as they are installed: PyTorch, torch.compile, Liger-Kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from peers import load_all

# Given arrays of CuPy's by name and a direction, the call to time. A forward returns y, or a tuple
# that begins with it; a backward dx, dgamma and dbeta.
Peer = Callable[[dict[str, Any], str], Callable[[], Any]]


def load_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be loaded, and why the others cannot."""
    loaders = {"PyTorch": _torch, "torch.compile": _compiled, "Liger-Kernel": _liger}
    return load_all({name: partial(_through_autograd, load) for name, load in loaders.items()})


def _through_autograd(load: Callable[[Any], Callable[..., Any]]) -> Peer:
    """Time a differentiable function; its backward is the graph's, gradients not accumulated."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        msg = "this PyTorch has no CUDA"
        raise RuntimeError(msg)
    function = load(torch)

    def peer(arrays: dict[str, Any], direction: str) -> Callable[[], Any]:
        leaves = [torch.from_dlpack(arrays[k]).requires_grad_() for k in ("x", "gamma", "beta")]
        if direction == "forward":
            return lambda: function(*leaves)
        y, dy = function(*leaves), torch.from_dlpack(arrays["dy"])
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return peer


def _torch(torch: Any) -> Callable[..., Any]:
    def function(x: Any, gamma: Any, beta: Any) -> Any:
        return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)

    return function


def _compiled(torch: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(_torch(torch), dynamic=False)
    return compiled


def _liger(_: Any) -> Callable[..., Any]:
    liger: Any = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    call = liger.apply
    return lambda x, gamma, beta: call(x, gamma, beta, 1e-5)
