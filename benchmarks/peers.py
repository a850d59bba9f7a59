"""
The peers: one function each, that loads one library and returns how to call it as its users do.

They are imported by name, lest the type checker's environment had to hold them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from stablenorm._bench import Problem
from stablenorm._types import Array, bfloat16
from stablenorm.analysis.plain import plain_backward, plain_forward

EPS = 1e-5
RESULTS = ("y", "dx", "dgamma", "dbeta")


class Calls(NamedTuple):
    """What is timed of one implementation on one problem, and what it computes there."""

    # Candidates by name; the name says how the library is called if there are several ways.
    forward: dict[str, Callable[[], Any]]
    backward: dict[str, Callable[[], Any]]
    # The arrays that are held against ours: y, and what there is of dx, dgamma, dbeta.
    results: Callable[[], dict[str, Array]]


class Peer(NamedTuple):
    """An implementation that can be timed."""

    name: str
    version: str
    dtypes: tuple[str, ...]
    eps: float
    make: Callable[[Problem], Calls]


def load_peers(threads: int) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can be imported, and of each other one what was raised."""
    peers, missing = [], {}
    for name, load in LOADERS.items():
        try:
            peers.append(load(threads))
        # What a broken installation raises is not foreseen by its authors either.
        except Exception as error:  # noqa: BLE001
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return peers, missing


def _torch(threads: int) -> Peer:
    torch: Any = importlib.import_module("torch")
    functional: Any = importlib.import_module("torch.nn.functional")
    torch.set_num_threads(threads)

    def tensor(array: Array) -> Any:
        """Share memory; NumPy's bfloat16 is known by its bits alone."""
        if array.dtype == bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def back(result: Any) -> Array:
        if result.dtype == torch.bfloat16:
            return result.view(torch.int16).numpy().view(bfloat16)
        return result.numpy()

    def make(problem: Problem) -> Calls:
        x, gamma, beta, dy = map(tensor, problem[:4])
        shape = [x.shape[-1]]

        def plain() -> Any:
            with torch.no_grad():
                return functional.layer_norm(x, shape, gamma, beta, EPS)

        def forward() -> Any:
            return torch.native_layer_norm(x, shape, gamma, beta, EPS)

        _, mean, rstd = forward()
        backward_of_aten = torch.ops.aten.native_layer_norm_backward

        def backward() -> Any:
            return backward_of_aten(dy, x, shape, mean, rstd, gamma, beta, [True, True, True])

        def results() -> dict[str, Array]:
            arrays = (forward()[0], *backward())
            return {name: back(array) for name, array in zip(RESULTS, arrays, strict=True)}

        return Calls(
            {"PyTorch": forward, "PyTorch F.layer_norm": plain}, {"PyTorch": backward}, results
        )

    return Peer(
        "PyTorch", torch.__version__, ("float32", "float16", "bfloat16", "float64"), EPS, make
    )


def _jax(_: int) -> Peer:
    # Its pool has as many threads as the process may use cores; it has no number to set.
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")
    device = jax.devices("cpu")[0]

    def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
        mean = jnp.mean(x, axis=-1, keepdims=True)
        centered = x - mean
        var = jnp.mean(centered * centered, axis=-1, keepdims=True)
        return gamma * centered * jax.lax.rsqrt(var + EPS) + beta

    forward_alone = jax.jit(layer_norm)
    # The pull-back crosses the border of jit with what it keeps: nothing is computed twice.
    forward_keeping = jax.jit(lambda x, gamma, beta: jax.vjp(layer_norm, x, gamma, beta))
    pull_back = jax.jit(lambda pull, dy: pull(dy))

    def make(problem: Problem) -> Calls:
        x, gamma, beta, dy = (jax.device_put(array, device) for array in problem[:4])
        _, pull = forward_keeping(x, gamma, beta)

        def forward() -> Any:
            return jax.block_until_ready(forward_alone(x, gamma, beta))

        def backward() -> Any:
            return jax.block_until_ready(pull_back(pull, dy))

        def results() -> dict[str, Array]:
            arrays = (forward(), *backward())
            return {name: np.asarray(array) for name, array in zip(RESULTS, arrays, strict=True)}

        return Calls({"JAX": forward}, {"JAX": backward}, results)

    return Peer("JAX", jax.__version__, ("float32",), EPS, make)


def _onnxruntime(threads: int) -> Peer:
    onnx: Any = importlib.import_module("onnx")
    helper: Any = importlib.import_module("onnx.helper")
    runtime: Any = importlib.import_module("onnxruntime")
    float32 = onnx.TensorProto.FLOAT

    def make(problem: Problem) -> Calls:
        x, gamma, beta, *_ = problem
        names = ("x", "gamma", "beta")
        shapes = {"x": x.shape, "gamma": gamma.shape, "beta": beta.shape, "y": x.shape}
        values = {
            name: helper.make_tensor_value_info(name, float32, s) for name, s in shapes.items()
        }
        node = helper.make_node("LayerNormalization", names, ["y"], axis=-1, epsilon=EPS)
        graph = helper.make_graph([node], "g", [values[name] for name in names], [values["y"]])
        # Opset 17 has the operator first; with it goes the version 8 of the format.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        session = runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        inputs = {"x": x, "gamma": gamma, "beta": beta}

        def forward() -> Any:
            return session.run(None, inputs)

        return Calls({"ONNX Runtime": forward}, {}, lambda: {"y": forward()[0]})

    return Peer("ONNX Runtime", runtime.__version__, ("float32",), EPS, make)


def _thinc(_: int) -> Peer:
    version = importlib.import_module("thinc.about").__version__
    api: Any = importlib.import_module("thinc.api")

    def make(problem: Problem) -> Calls:
        n = problem.x.shape[-1]
        # It takes matrices only; both are views.
        x, dy = problem.x.reshape(-1, n), problem.dy.reshape(-1, n)
        with api.use_ops("numpy"):
            model = api.LayerNorm(n)
            model.initialize(X=x[:1])
        model.set_param("G", problem.gamma.copy())
        model.set_param("b", problem.beta.copy())
        _, backprop = model.begin_update(x)

        def forward() -> Any:
            return model.begin_update(x)

        def backward() -> Any:
            return backprop(dy)

        def results() -> dict[str, Array]:
            # It adds the gradients of the parameters to those that it holds.
            for name in ("G", "b"):
                model.set_grad(name, np.zeros_like(model.get_param(name)))
            y, dx = forward()[0], backward()
            shape = problem.x.shape
            return {
                "y": y.reshape(shape),
                "dx": dx.reshape(shape),
                "dgamma": model.get_grad("G").copy(),
                "dbeta": model.get_grad("b").copy(),
            }

        return Calls({"thinc": forward}, {"thinc": backward}, results)

    # Its eps is a constant in its code.
    return Peer("thinc", str(version), ("float32",), 1e-8, make)


def _plain(_: int) -> Peer:
    def make(problem: Problem) -> Calls:
        x, gamma, beta, dy, *_ = problem
        _, cache = plain_forward(x, gamma, beta, EPS)

        def forward() -> Any:
            return plain_forward(x, gamma, beta, EPS)

        def backward() -> Any:
            return plain_backward(dy, cache)

        def results() -> dict[str, Array]:
            return dict(zip(RESULTS, (forward()[0], *backward()), strict=True))

        return Calls({"plain NumPy": forward}, {"plain NumPy": backward}, results)

    dtypes = ("float32", "float16", "bfloat16", "float64")
    return Peer("plain NumPy", np.__version__, dtypes, EPS, make)


LOADERS: dict[str, Callable[[int], Peer]] = {
    "PyTorch": _torch,
    "JAX": _jax,
    "ONNX Runtime": _onnxruntime,
    "thinc": _thinc,
    "plain NumPy": _plain,
}


def copies(source: Array, target: Array) -> dict[str, Callable[[], Any]]:
    """Return the copies of peers that have one of their own, to be timed beside NumPy's."""
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError):
        return {}
    # Only bytes are moved: integers, so that every dtype can be.
    from_, to = (torch.from_numpy(array.reshape(-1).view(np.int16)) for array in (source, target))
    return {"copy, PyTorch": lambda: to.copy_(from_)}
