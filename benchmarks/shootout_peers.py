"""
The gradient checkers of other packages, pointed at NumPy functions: one loader each.

They are imported by name, lest the type checker's environment had to hold them all.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from shootout_tools import Outcome, Subject, Tool, said


def load_tools() -> tuple[list[Tool], dict[str, str]]:
    """Return the tools whose package can be imported, and of each other one what was raised."""
    tools: list[Tool] = []
    missing = {}
    for name, load in LOADERS.items():
        try:
            tools += load()
        # What a broken installation raises is not foreseen by its authors either.
        except Exception as error:  # noqa: BLE001
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return tools, missing


def _torch() -> list[Tool]:
    torch: Any = importlib.import_module("torch")
    # One thread: arrays are small, and the others have one.
    torch.set_num_threads(1)
    # A function and its module bear one name; this is the module.
    module: Any = importlib.import_module("torch.autograd.gradcheck")
    # Once the fast mode has found a difference it runs the slow one, for its message alone: at
    # (32, 768) a Jacobian of 24576 by 24576, and the process dies.
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

    def check(subject: Subject, fast: bool) -> Outcome:
        args = [torch.from_numpy(a.copy()).requires_grad_() for a in subject.args]
        right = torch.autograd.gradcheck(wrap(subject), args, fast_mode=fast, raise_exception=False)
        return said(not right)

    return [
        Tool(
            "torch slow",
            True,
            f"torch {torch.__version__}",
            "central, step 1e-6, full Jacobian; |a - n| > 1e-5 + 1e-3 |n|",
            False,
            lambda subject: check(subject, fast=False),
        ),
        Tool(
            "torch fast",
            True,
            f"torch {torch.__version__}",
            "central, step 1e-6, one direction u and cotangent v, both positive and of norm 1; "
            "|a - n| > 1e-5 sum(u) sum(v) + 1e-3 |n| (here without the slow mode that writes "
            "the message of a failure)",
            True,
            lambda subject: check(subject, fast=True),
        ),
    ]


def _jax() -> list[Tool]:
    jax: Any = importlib.import_module("jax")
    test_util: Any = importlib.import_module("jax.test_util")
    jax.config.update("jax_enable_x64", True)
    # A callback that reads its arguments while the only thread waits for it would wait for ever.
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

    def check(subject: Subject, dtype: Any) -> Outcome:
        args = tuple(jax.numpy.asarray(a.astype(dtype)) for a in subject.args)
        return _asserts(lambda: test_util.check_grads(wrap(subject), args, order=1, modes=["rev"]))

    return [
        Tool(
            f"JAX {kind}",
            True,
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
    metadata: Any = importlib.import_module("importlib.metadata")

    def check(subject: Subject) -> Outcome:
        @extend.primitive  # type: ignore[untyped-decorator]
        def layer_norm(*args: Any) -> Any:
            return subject.forward(*args)[0]

        def pull(position: int) -> Callable[..., Any]:
            def vjp(_: Any, *args: Any) -> Any:
                cache = subject.forward(*args)[1]
                return lambda dy: subject.backward(dy, cache)[position]

            return vjp

        extend.defvjp(layer_norm, pull(0), pull(1), pull(2))
        # It draws from NumPy's global state.
        np.random.seed(subject.seed)  # noqa: NPY002
        check_grads = test_util.check_grads(layer_norm, (0, 1, 2), modes=["rev"], order=1)
        return _asserts(lambda: check_grads(*subject.args))

    return [
        Tool(
            "HIPS",
            True,
            f"autograd {metadata.version('autograd')}",
            "central, step 1e-6, one N(0, 1) direction and cotangent; "
            "|a - n| >= 1e-6 and |a - n| / |a + n| >= 1e-6",
            True,
            check,
        )
    ]


def _scipy() -> list[Tool]:
    scipy: Any = importlib.import_module("scipy")
    optimize: Any = importlib.import_module("scipy.optimize")

    def check(subject: Subject) -> Outcome:
        value, at, actual = subject.loss()
        # All elements, if that takes no more than seconds.
        how: dict[str, Any] = {}
        if at.size > 1000:
            how = {"direction": "random", "rng": subject.seed}
        number = optimize.check_grad(value, lambda _: actual, at, **how)
        return Outcome("no verdict", number=float(number))

    return [
        Tool(
            "scipy",
            True,
            f"scipy {scipy.__version__}",
            "check_grad: forward, step 1.5e-8, every element (one direction from 1000 elements "
            "on); returns a 2-norm and no verdict",
            True,
            check,
        )
    ]


def _numdifftools() -> list[Tool]:
    nd: Any = importlib.import_module("numdifftools")

    def check(subject: Subject) -> Outcome:
        value, at, actual = subject.loss()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = nd.Gradient(value, full_output=True)(at)
        error = np.asarray(found.error_estimate).reshape(-1)
        return said(bool(np.any(np.abs(actual - found.estimate) > error)))

    return [
        Tool(
            "numdifftools",
            True,
            f"numdifftools {nd.__version__}",
            "Richardson and Wynn, adaptive, every element; its derivatives, and here: some element "
            "differs by more than its error_estimate (it has no check of its own)",
            False,
            check,
        )
    ]


LOADERS: dict[str, Callable[[], list[Tool]]] = {
    "torch": _torch,
    "jax": _jax,
    "autograd": _autograd,
    "scipy": _scipy,
    "numdifftools": _numdifftools,
}


def _asserts(check: Callable[[], Any]) -> Outcome:
    """Run a check that raises AssertionError where it finds something."""
    try:
        check()
    except AssertionError:
        return said(True)
    return said(False)
