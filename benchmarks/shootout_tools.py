"""
The gradient checkers of the comparison: ours, and those of other packages.

A tool checks one hand-written layer norm, with its own step and tolerance, and says "found" or
"accepted"; ours may say "inconclusive". Packages are imported by name: the type checker does not need them.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from peers import load_all

from stablenorm import __version__
from stablenorm.check import check_gradients, check_layer_norm
from stablenorm.records import Array

_WORDS = {"PASS": "accepted", "FAIL": "found", "INCONCLUSIVE": "inconclusive"}


class Subject(NamedTuple):
    """An implementation to be checked, and its arguments."""

    forward: Callable[..., tuple[Array, Any]]
    backward: Callable[[Array, Any], tuple[Array, Array, Array]]
    args: tuple[Array, Array, Array]
    seed: int


class Tool(NamedTuple):
    """A way to check a gradient."""

    name: str
    version: str
    # The step, and the condition of a failure, in words.
    criterion: str
    # Whether a check of 24576 elements takes seconds or less.
    large: bool
    check: Callable[[Subject], str]


def load_tools() -> tuple[list[Tool], dict[str, str]]:
    """Return the tools whose package can be imported, and the error message of each other package."""
    tools, missing = load_all(LOADERS)
    return [*_ours(), *itertools.chain(*tools.values())], missing


def _ours() -> list[Tool]:
    def layer_norm(subject: Subject) -> str:
        forward, backward, args, seed = subject
        return _WORDS[check_layer_norm(forward, backward, *args, rng=seed).verdict]

    def gradients(subject: Subject) -> str:
        forward, backward, args, seed = subject
        return _WORDS[check_gradients(forward, backward, args, rng=seed).verdict]

    package = f"stablenorm {__version__}"
    criterion = "no tolerance to choose: differs by more than the estimated errors of both sides"
    return [
        Tool("check_layer_norm", package, f"{criterion}; closed form", True, layer_norm),
        Tool("check_gradients", package, criterion, True, gradients),
    ]


def _torch() -> list[Tool]:
    torch: Any = importlib.import_module("torch")
    # One thread, as the other tools have: the arrays are small.
    torch.set_num_threads(1)
    # The module: `torch.autograd.gradcheck` is the function of that name.
    module: Any = importlib.import_module("torch.autograd.gradcheck")
    # After a difference the fast mode runs the slow one, for its message alone: at (32, 768) a
    # Jacobian of 24576 by 24576, and the process dies.
    module._run_slow_mode_and_get_error = lambda *_: ""

    def wrap(subject: Subject) -> Any:
        class LayerNorm(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                y, ctx.cache = subject.forward(*(a.detach().numpy() for a in args))
                return torch.from_numpy(y)

            @staticmethod
            def backward(ctx: Any, dy: Any) -> Any:
                return tuple(map(torch.from_numpy, subject.backward(dy.numpy(), ctx.cache)))

        return LayerNorm.apply

    def check(subject: Subject, fast: bool) -> str:
        args = [torch.from_numpy(a.copy()).requires_grad_() for a in subject.args]
        right = torch.autograd.gradcheck(wrap(subject), args, fast_mode=fast, raise_exception=False)
        return "accepted" if right else "found"

    package = f"torch {torch.__version__}"
    slow = "central, step 1e-6, full Jacobian; |a - n| > 1e-5 + 1e-3 |n|"
    fast = (
        "central, step 1e-6, one direction u and cotangent v, both positive and of norm 1; "
        "|a - n| > 1e-5 sum(u) sum(v) + 1e-3 |n| (here without the slow mode that writes the "
        "message of a failure)"
    )
    return [
        Tool("torch slow", package, slow, False, lambda subject: check(subject, fast=False)),
        Tool("torch fast", package, fast, True, lambda subject: check(subject, fast=True)),
    ]


def _jax() -> list[Tool]:
    jax: Any = importlib.import_module("jax")
    test_util: Any = importlib.import_module("jax.test_util")
    jax.config.update("jax_enable_x64", True)
    # With asynchronous dispatch, a callback deadlocks: it reads its arguments, while the only thread waits for it.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    def wrap(subject: Subject) -> Any:
        def shaped(*arrays: Any) -> Any:
            return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)

        def value(*args: Any) -> Any:
            return subject.forward(*map(np.asarray, args))[0]

        def pull(dy: Any, *args: Any) -> Any:
            _, cache = subject.forward(*map(np.asarray, args))
            return tuple(subject.backward(np.asarray(dy), cache))

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def layer_norm(*args: Any) -> Any:
            return jax.pure_callback(value, shaped(args[0])[0], *args)

        layer_norm.defvjp(
            lambda *args: (layer_norm(*args), args),
            lambda args, dy: jax.pure_callback(pull, shaped(*args), dy, *args),
        )
        return layer_norm

    def check(subject: Subject, dtype: Any) -> str:
        args = tuple(jax.numpy.asarray(a.astype(dtype)) for a in subject.args)
        return _asserts(lambda: test_util.check_grads(wrap(subject), args, order=1, modes=["rev"]))

    return [
        Tool(
            f"JAX {kind}",
            f"jax {jax.__version__}",
            "central, step 1e-4, one N(0, 1) direction and cotangent, seed 0; reverse mode; "
            f"|a - n| > {tolerance} (1 + |n|)",
            True,
            lambda subject, dtype=dtype: check(subject, dtype),  # type: ignore[misc]
        )
        for kind, dtype, tolerance in (("f64", np.float64, "1e-5"), ("f32", np.float32, "2e-3"))
    ]


def _autograd() -> list[Tool]:
    extend: Any = importlib.import_module("autograd.extend")
    test_util: Any = importlib.import_module("autograd.test_util")

    def check(subject: Subject) -> str:
        @extend.primitive  # type: ignore[untyped-decorator]
        def layer_norm(*args: Any) -> Any:
            return subject.forward(*args)[0]

        def pull(position: int) -> Callable[..., Any]:
            def vjp(_: Any, *args: Any) -> Any:
                cache = subject.forward(*args)[1]
                return lambda dy: subject.backward(dy, cache)[position]

            return vjp

        extend.defvjp(layer_norm, pull(0), pull(1), pull(2))
        # autograd draws from NumPy's global state.
        np.random.seed(subject.seed)  # noqa: NPY002
        check_grads = test_util.check_grads(layer_norm, (0, 1, 2), modes=["rev"], order=1)
        return _asserts(lambda: check_grads(*subject.args))

    criterion = (
        "central, step 1e-6, one N(0, 1) direction and cotangent; "
        "|a - n| >= 1e-6 and |a - n| / |a + n| >= 1e-6"
    )
    return [Tool("HIPS", f"autograd {version('autograd')}", criterion, True, check)]


def _asserts(check: Callable[[], Any]) -> str:
    """Run a check that raises AssertionError for a wrong gradient, and return its word."""
    try:
        check()
    except AssertionError:
        return "found"
    return "accepted"


LOADERS = {"torch": _torch, "jax": _jax, "autograd": _autograd}
