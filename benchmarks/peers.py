"""
The peers: each loader imports one library and returns calls as its users make them.

Libraries are imported by name, so the type checker's environment need not contain them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from stablenorm import __version__, layer_norm_backward, layer_norm_forward
from stablenorm.formats import DTYPES
from stablenorm.records import Array, bfloat16
from stablenorm.testing.plain import plain_backward, plain_forward
from stablenorm.timing import Problem

EPS = 1e-5
OURS = "stablenorm"
RESULTS = ("y", "dx", "dgamma", "dbeta")
T = TypeVar("T")


class Calls(NamedTuple):
    """The calls of one implementation on one problem, and their results."""

    forward: Callable[[], Any]
    # A library without a backward has None.
    backward: Callable[[], Any] | None
    # By name: y and, with a backward, dx, dgamma and dbeta.
    results: Callable[[], dict[str, Array]]
    # Other ways to call the forward, by name.
    other: dict[str, Callable[[], Any]] = {}  # noqa: RUF012


class Peer(NamedTuple):
    """An implementation; `make` takes a problem and eps."""

    name: str
    version: str
    dtypes: tuple[str, ...]
    make: Callable[[Problem, float], Calls]


def load_all(loaders: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Return by name the loaded libraries, and the error message of each one that fails to load."""
    loaded, missing = {}, {}
    for name, load in loaders.items():
        try:
            loaded[name] = load()
        # A broken installation may raise anything.
        except Exception as error:  # noqa: BLE001
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return loaded, missing


def load_peers(names: Iterable[str], threads: int = 0) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can be imported, and the error message of each other one."""
    peers, missing = load_all({name: partial(LOADERS[name], threads) for name in names})
    return list(peers.values()), missing


def _named(arrays: Iterable[Array]) -> dict[str, Array]:
    return dict(zip(RESULTS, arrays, strict=True))


def _torch(threads: int) -> Peer:
    torch: Any = importlib.import_module("torch")
    functional: Any = importlib.import_module("torch.nn.functional")
    if threads:
        torch.set_num_threads(threads)

    def tensor(array: Array) -> Any:
        """Return a tensor that shares memory; PyTorch knows NumPy's bfloat16 by its bits alone."""
        if array.dtype == bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def to_numpy(result: Any) -> Array:
        is_narrow = result.dtype == torch.bfloat16
        array: Array = (result.view(torch.int16) if is_narrow else result).numpy()
        return array.view(bfloat16) if is_narrow else array

    def make(problem: Problem, eps: float) -> Calls:
        x, gamma, beta, dy = map(tensor, problem[:4])
        shape = [x.shape[-1]]
        pull = torch.ops.aten.native_layer_norm_backward
        forward = partial(torch.native_layer_norm, x, shape, gamma, beta, eps)
        _, mean, rstd = forward()

        def plain() -> Any:
            with torch.no_grad():
                return functional.layer_norm(x, shape, gamma, beta, eps)

        def backward(mean: Any = mean, rstd: Any = rstd) -> Any:
            return pull(dy, x, shape, mean, rstd, gamma, beta, [True, True, True])

        def results() -> dict[str, Array]:
            # Fresh statistics: a setting of the processor may have changed since the first forward.
            y, *statistics = forward()
            return _named(map(to_numpy, (y, *backward(*statistics))))

        return Calls(forward, backward, results, {"PyTorch F.layer_norm": plain})

    return Peer("PyTorch", torch.__version__.split("+")[0], DTYPES, make)


def _jax(name: str, standardize: bool, dtypes: tuple[str, ...]) -> Callable[[int], Peer]:
    def load(_: int) -> Peer:
        # JAX has a thread for each core that the process may use, and no setting for their number.
        jax: Any = importlib.import_module("jax")
        jnp: Any = importlib.import_module("jax.numpy")

        def layer_norm(x: Any, gamma: Any, beta: Any, eps: Any) -> Any:
            if standardize:
                return gamma * jax.nn.standardize(x, epsilon=eps) + beta
            wide = x.astype(jnp.float32)
            centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
            var = jnp.mean(centered * centered, axis=-1, keepdims=True)
            return (gamma * centered * jax.lax.rsqrt(var + eps) + beta).astype(x.dtype)

        jitted = jax.jit(layer_norm)
        # jit can return the pull-back with its saved values: the backward repeats no forward.
        with_pull = jax.jit(lambda *a, eps: jax.vjp(lambda x, g, b: layer_norm(x, g, b, eps), *a))
        pull_back = jax.jit(lambda pull, dy: pull(dy))

        def make(problem: Problem, eps: float) -> Calls:
            *parameters, dy = (jax.device_put(a, jax.devices("cpu")[0]) for a in problem[:4])
            eps32 = np.float32(eps)
            _, pull = with_pull(*parameters, eps=eps32)

            def forward() -> Any:
                return jax.block_until_ready(jitted(*parameters, eps32))

            def backward() -> Any:
                return jax.block_until_ready(pull_back(pull, dy))

            def results() -> dict[str, Array]:
                return _named(np.asarray(array) for array in (forward(), *backward()))

            return Calls(forward, backward, results)

        return Peer(name, jax.__version__, dtypes, make)

    return load


def _onnxruntime(threads: int) -> Peer:
    onnx: Any = importlib.import_module("onnx")
    helper: Any = importlib.import_module("onnx.helper")
    runtime: Any = importlib.import_module("onnxruntime")
    float32 = onnx.TensorProto.FLOAT

    def make(problem: Problem, eps: float) -> Calls:
        inputs = {"x": problem.x, "gamma": problem.gamma, "beta": problem.beta}
        shapes = {name: array.shape for name, array in inputs.items()} | {"y": problem.x.shape}
        values = {k: helper.make_tensor_value_info(k, float32, s) for k, s in shapes.items()}
        node = helper.make_node("LayerNormalization", list(inputs), ["y"], axis=-1, epsilon=eps)
        graph = helper.make_graph([node], "g", [values[name] for name in inputs], [values["y"]])
        # Opset 17 is the first with this operator; it goes with version 8 of the format.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        session = runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        def forward() -> Any:
            return session.run(None, inputs)

        return Calls(forward, None, lambda: {"y": forward()[0]})

    return Peer("ONNX Runtime", runtime.__version__, ("float32",), make)


def of_pair(name: str, version: str, forward: Callable[..., Any], backward: Any) -> Peer:
    """Return a peer of two functions like ours: forward(*args) -> (y, cache), backward(dy, cache)."""

    def make(problem: Problem, eps: float) -> Calls:
        run = partial(forward, *problem[:3], eps)
        pull = partial(backward, problem.dy, run()[1])
        return Calls(run, pull, lambda: _named((run()[0], *pull())))

    return Peer(name, version, DTYPES, make)


def ours() -> Peer:
    """Return the package with its default backend."""
    return of_pair(OURS, __version__, layer_norm_forward, layer_norm_backward)


LOADERS: dict[str, Callable[[int], Peer]] = {
    "plain NumPy": lambda _: of_pair("plain NumPy", np.__version__, plain_forward, plain_backward),
    "PyTorch": _torch,
    "JAX, the formula": _jax("JAX, the formula", False, ("float32", "float16", "bfloat16")),
    "jax.nn.standardize": _jax("jax.nn.standardize", True, ("float32",)),
    "ONNX Runtime": _onnxruntime,
    OURS: lambda _: ours(),
}
