"""
Who is measured for docs/explanation/stability.md: one loader for each library.

Libraries are imported by name, lest the type checker's environment had to hold them all, and
called as their users call them. Everything is on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm import __version__, layer_norm_backward, layer_norm_forward
from stablenorm._types import Array, bfloat16
from stablenorm.testing.plain import plain_backward, plain_forward

OUTPUTS = ("y", "dx", "dgamma", "dbeta")
OURS = "stablenorm"


class Subject(NamedTuple):
    """
    An implementation: what it returns of y, dx, dgamma, dbeta.

    `compute` takes x, gamma, beta, eps and dy, arrays of one of `dtypes`.
    """

    name: str
    version: str
    dtypes: tuple[str, ...]
    compute: Callable[[Array, Array, Array, float, Array], dict[str, Array]]
    # Without a backward there is y alone.
    outputs: tuple[str, ...] = OUTPUTS


ALL = ("float16", "bfloat16", "float32", "float64")


def load_subjects() -> tuple[list[Subject], dict[str, str]]:
    """Return whom this environment can measure, and of each other one what was raised."""
    subjects: list[Subject] = []
    missing = {}
    for name, load in LOADERS.items():
        try:
            subjects += load()
        # What a broken installation raises is not foreseen by its authors either.
        except Exception as error:  # noqa: BLE001
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return subjects, missing


def load_ours(backend: str | None = None) -> list[Subject]:
    """Return the package, by one of its backends."""

    def compute(x: Array, gamma: Array, beta: Array, eps: float, dy: Array) -> dict[str, Array]:
        y, cache = layer_norm_forward(x, gamma, beta, eps, backend=backend)
        return {"y": y, **layer_norm_backward(dy, cache)._asdict()}

    return [Subject(OURS, __version__, ALL, compute)]


def _plain() -> list[Subject]:
    def compute(x: Array, gamma: Array, beta: Array, eps: float, dy: Array) -> dict[str, Array]:
        y, cache = plain_forward(x, gamma, beta, eps)
        return dict(zip(OUTPUTS, (y, *plain_backward(dy, cache)), strict=True))

    return [Subject("plain NumPy", np.__version__, ALL, compute)]


def _torch() -> list[Subject]:
    torch: Any = importlib.import_module("torch")

    def tensor(array: Array) -> Any:
        if array.dtype == bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def back(result: Any) -> Array:
        if result.dtype == torch.bfloat16:
            return result.view(torch.int16).numpy().view(bfloat16)
        return result.numpy()

    def compute(x: Array, gamma: Array, beta: Array, eps: float, dy: Array) -> dict[str, Array]:
        shape = [x.shape[-1]]
        args = [tensor(np.ascontiguousarray(a)) for a in (x, gamma, beta, dy)]
        y, mean, rstd = torch.native_layer_norm(args[0], shape, args[1], args[2], eps)
        gradients = torch.ops.aten.native_layer_norm_backward(
            args[3], args[0], shape, mean, rstd, args[1], args[2], [True] * 3
        )
        return {name: back(a) for name, a in zip(OUTPUTS, (y, *gradients), strict=True)}

    def flushing(x: Array, gamma: Array, beta: Array, eps: float, dy: Array) -> dict[str, Array]:
        if not torch.set_flush_denormal(True):
            msg = "this processor cannot flush subnormals"
            raise RuntimeError(msg)
        try:
            return compute(x, gamma, beta, eps, dy)
        finally:
            torch.set_flush_denormal(False)

    version = torch.__version__.split("+")[0]
    return [
        Subject("PyTorch", version, ALL, compute),
        Subject("PyTorch, set_flush_denormal", version, ("float32",), flushing),
    ]


def _jax() -> list[Subject]:
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")

    def formula(x: Any, gamma: Any, beta: Any, eps: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        centered = wide - mean
        var = jnp.mean(centered * centered, axis=-1, keepdims=True)
        return (gamma * centered * jax.lax.rsqrt(var + eps) + beta).astype(x.dtype)

    def standardize(x: Any, gamma: Any, beta: Any, eps: Any) -> Any:
        return gamma * jax.nn.standardize(x, epsilon=eps) + beta

    def subject(name: str, function: Callable[..., Any], dtypes: tuple[str, ...]) -> Subject:
        value = jax.jit(function)
        # Under one jit, the pull-back is taken within it.
        pull = jax.jit(
            lambda x, g, b, eps, dy: jax.vjp(lambda *a: function(*a, eps), x, g, b)[1](dy)
        )

        def compute(x: Array, gamma: Array, beta: Array, eps: float, dy: Array) -> dict[str, Array]:
            eps32 = np.float32(eps)
            results = (value(x, gamma, beta, eps32), *pull(x, gamma, beta, eps32, dy))
            return {name: np.asarray(a) for name, a in zip(OUTPUTS, results, strict=True)}

        return Subject(name, jax.__version__, dtypes, compute)

    return [
        subject("JAX, the formula", formula, ("float16", "bfloat16", "float32")),
        subject("jax.nn.standardize", standardize, ("float32",)),
    ]


def _onnxruntime() -> list[Subject]:
    onnx: Any = importlib.import_module("onnx")
    helper: Any = importlib.import_module("onnx.helper")
    runtime: Any = importlib.import_module("onnxruntime")

    def session(shape: tuple[int, ...], eps: float) -> Any:
        float32 = onnx.TensorProto.FLOAT
        shapes = {"x": shape, "gamma": shape[-1:], "beta": shape[-1:], "y": shape}
        values = {k: helper.make_tensor_value_info(k, float32, s) for k, s in shapes.items()}
        names = ("x", "gamma", "beta")
        node = helper.make_node("LayerNormalization", names, ["y"], axis=-1, epsilon=eps)
        graph = helper.make_graph([node], "g", [values[name] for name in names], [values["y"]])
        # Opset 17 has the operator first; with it goes the version 8 of the format.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return runtime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )

    def compute(x: Array, gamma: Array, beta: Array, eps: float, _: Array) -> dict[str, Array]:
        inputs = {"x": x, "gamma": gamma, "beta": beta}
        return {"y": session(x.shape, eps).run(None, inputs)[0]}

    return [Subject("ONNX Runtime", runtime.__version__, ("float32",), compute, ("y",))]


LOADERS: dict[str, Callable[[], list[Subject]]] = {
    "plain NumPy": _plain,
    "PyTorch": _torch,
    "JAX": _jax,
    "ONNX Runtime": _onnxruntime,
    OURS: load_ours,
}
