"""The peers on a GPU, as far as they are installed: PyTorch, torch.compile, Liger-Kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

# Given arrays of CuPy's by name and a direction, the call to time. A forward returns y, or a tuple
# that begins with it; a backward dx, dgamma and dbeta.
Peer = Callable[[dict[str, Any], str], Callable[[], Any]]


def load_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be loaded, and why the others cannot."""
    loaders = {"PyTorch": _torch, "torch.compile": _compiled, "Liger-Kernel": _liger}
    found, missing = {}, {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except Exception as error:  # noqa: BLE001  # they raise whatever they like
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found, missing


def _import_torch() -> Any:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        msg = "this PyTorch has no CUDA"
        raise RuntimeError(msg)
    return torch


def _torch() -> Peer:
    torch = _import_torch()
    native = torch.ops.aten

    def peer(arrays: dict[str, Any], direction: str) -> Callable[[], Any]:
        t = {name: torch.from_dlpack(arrays[name]) for name in ("x", "gamma", "beta", "dy")}
        shape = (t["x"].shape[1],)
        given = t["x"], shape, t["gamma"], t["beta"], 1e-5
        if direction == "forward":
            return lambda: native.native_layer_norm(*given)
        _, mean, rstd = native.native_layer_norm(*given)
        kept = (t["dy"], t["x"], shape, mean, rstd, t["gamma"], t["beta"], [True] * 3)
        return lambda: native.native_layer_norm_backward(*kept)

    return peer


def _through_autograd(torch: Any, function: Callable[..., Any]) -> Peer:
    """Time a differentiable function; its backward is the graph's, gradients not accumulated."""

    def peer(arrays: dict[str, Any], direction: str) -> Callable[[], Any]:
        leaves = [torch.from_dlpack(arrays[k]).requires_grad_() for k in ("x", "gamma", "beta")]
        if direction == "forward":
            return lambda: function(*leaves)
        y, dy = function(*leaves), torch.from_dlpack(arrays["dy"])
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return peer


def _compiled() -> Peer:
    torch = _import_torch()

    def function(x: Any, gamma: Any, beta: Any) -> Any:
        return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)

    return _through_autograd(torch, torch.compile(function, dynamic=False))


def _liger() -> Peer:
    liger: Any = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    call = liger.apply
    return _through_autograd(_import_torch(), lambda x, gamma, beta: call(x, gamma, beta, 1e-5))
