"""The peers on a GPU, as far as they are installed: PyTorch, torch.compile, Liger, fla, quack."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Problem = dict[str, Any]
# Given a problem of CuPy's arrays and a direction, the call to time. A forward returns y, or a tuple
# that begins with it; a backward dx, dgamma and dbeta, and perhaps more.
Peer = Callable[[Problem, str], Callable[[], Any]]


def load_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can be loaded, and why the others cannot."""
    loaders: dict[str, Callable[[], Peer]] = {
        "PyTorch": _torch,
        "torch.compile": _compiled,
        "Liger-Kernel": _liger,
        "fla": _fla,
        "quack": _quack,
    }
    found, missing = {}, {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except Exception as error:  # noqa: BLE001  # they raise whatever they like
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return found, missing


def _tensors(problem: Problem) -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")

    names = ("x", "gamma", "beta", "dy")
    return {name: torch.from_dlpack(problem[name]) for name in names}


def _torch() -> Peer:
    torch: Any = importlib.import_module("torch")

    if not torch.cuda.is_available():
        msg = "this PyTorch has no CUDA"
        raise RuntimeError(msg)
    native = torch.ops.aten

    def peer(problem: Problem, direction: str) -> Callable[[], Any]:
        t = _tensors(problem)
        shape = (t["x"].shape[1],)
        arguments = t["x"], shape, t["gamma"], t["beta"], 1e-5
        if direction == "forward":
            return lambda: native.native_layer_norm(*arguments)
        _, mean, rstd = native.native_layer_norm(*arguments)
        given = (t["dy"], t["x"], shape, mean, rstd, t["gamma"], t["beta"], [True] * 3)
        return lambda: native.native_layer_norm_backward(*given)

    return peer


def _through_autograd(function: Callable[..., Any]) -> Peer:
    """Time a differentiable function; its backward is the graph's, gradients not accumulated."""
    torch: Any = importlib.import_module("torch")

    def peer(problem: Problem, direction: str) -> Callable[[], Any]:
        t = _tensors(problem)
        leaves = [t[name].detach().requires_grad_() for name in ("x", "gamma", "beta")]
        if direction == "forward":
            return lambda: function(*leaves)
        y = function(*leaves)
        return lambda: torch.autograd.grad(y, leaves, t["dy"], retain_graph=True)

    return peer


def _compiled() -> Peer:
    torch: Any = importlib.import_module("torch")

    _torch()

    def function(x: Any, gamma: Any, beta: Any) -> Any:
        return torch.nn.functional.layer_norm(x, gamma.shape, gamma, beta, 1e-5)

    return _through_autograd(torch.compile(function, dynamic=False))


def _liger() -> Peer:
    liger: Any = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return _through_autograd(lambda x, gamma, beta: liger.apply(x, gamma, beta, 1e-5))


def _fla() -> Peer:
    # In fla-core 0.6.0 a name for fla.modules.norm.layernorm, and where it was before.
    fla: Any = importlib.import_module("fla.modules.layernorm")
    return _through_autograd(lambda x, gamma, beta: fla.layer_norm(x, gamma, beta, eps=1e-5))


def _quack() -> Peer:
    # Of quack-kernels 0.6.5. Its layer norm is two functions, without autograd; both take gamma and
    # beta in float32 alone, whatever x is.
    quack: Any = importlib.import_module("quack.rmsnorm")

    def peer(problem: Problem, direction: str) -> Callable[[], Any]:
        t = _tensors(problem)
        x, dy, gamma, beta = t["x"], t["dy"], t["gamma"].float(), t["beta"].float()

        def forward(**options: Any) -> Any:
            return quack.layernorm_fwd(x, gamma, beta, eps=1e-5, **options)

        if direction == "forward":
            return forward
        _, rstd, mean = forward(return_rstd=True, return_mean=True)
        return lambda: quack.layernorm_bwd(x, gamma, dy, rstd, mean)

    return peer
