"""Arguments of a norm by role: recognized by their names or, without a known name, by their order."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stablenorm.check.operation import FaultError
from stablenorm.text import described

Function = Callable[..., Any]
# Names by role, compared without underscores and capitals. "settings" is a dict with eps.
NAMES = {
    "settings": ("lnparam", "lnparams", "param", "params", "config", "cfg", "options", "opts"),
    "x": ("x", "inp", "input", "inputs", "data", "xin", "features", "hidden", "hiddenstates"),
    "gamma": ("gamma", "weight", "scale", "g", "w", "gain", "weights", "scaler", "lnweight", "lnw"),
    "beta": ("beta", "bias", "b", "shift", "offset", "biases", "intercept", "lnbias", "lnb"),
    "eps": ("eps", "epsilon", "e", "varianceepsilon", "lnepsilon", "lneps"),
    "parameters": ("params", "parameters", "param"),
    "gradients": ("grads", "gradients", "grad", "dparams"),
    "cache": ("cache", "ctx", "saved", "context", "memo", "state", "tape", "cached"),
}
ARGUMENTS, PARAMETERS = ("x", "gamma", "beta", "eps"), ("gamma", "beta")
# Names of gradients, with a prefix or suffix: dx, dweight, grad_bias, dL_dx, weight_grad.
_GRADIENTS = {
    role: re.compile(r"(dld|dl|grad|d|g)({0})|({0})grad".format("|".join(NAMES[role])))
    for role in ARGUMENTS[:3]
}


def key_of(name: object) -> str:
    """Return the name as it is compared: underscores and capitals are a matter of taste."""
    return str(name).replace("_", "").lower()


def role_of(name: object) -> str:
    """Return the role of an argument; empty for a name that is not known."""
    return next((role for role in ("settings", *ARGUMENTS) if key_of(name) in NAMES[role]), "")


def gradient_role(name: object) -> str:
    """Return x, gamma or beta for dx, dweight, grad_bias, ...; empty for anything else."""
    return next((r for r, names in _GRADIENTS.items() if names.fullmatch(key_of(name))), "")


def parameters(function: Function) -> dict[str, bool]:
    """Return the parameters except *args and **options, and whether each is required."""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    by_name = inspect.signature(function).parameters
    return {name: p.default is p.empty for name, p in by_name.items() if p.kind not in stars}


def spelled(function: Function) -> str:
    """Write how a function is called."""
    return f"{getattr(function, '__name__', 'a function')}{inspect.signature(function)}"


def gradients_by_role(returned: Any, takes: Sequence[str]) -> dict[str, Any]:
    """Return the gradients that come by name or, as many as there are, in order; else nothing."""
    named = returned._asdict() if hasattr(returned, "_asdict") else returned
    if isinstance(named, Mapping):
        gradients = {gradient_role(name) or role_of(name): v for name, v in named.items()}
        if "x" in gradients or not isinstance(returned, tuple):
            return gradients
    # dx, and the others together.
    if isinstance(returned, tuple) and len(returned) == 2:
        dx, others = returned
        if isinstance(others, Mapping):
            return gradients_by_role({"dx": dx, **others}, takes)
        if isinstance(others, (tuple, list)) and len(others) == len(takes):
            returned = (dx, *others)
    if isinstance(returned, np.ndarray) and not takes:
        returned = (returned,)
    if not isinstance(returned, (tuple, list)):
        return {}
    # Some return all three, with None for a missing parameter.
    names = {3: ARGUMENTS[:3], 1 + len(takes): ("x", *takes)}
    return dict(zip(names.get(len(returned), ()), returned, strict=False))


def in_order(
    named: Mapping[str, Any], takes: Sequence[str], returned: Any, required: Sequence[str] = ("x",)
) -> list[Any]:
    """Return dx, dgamma and dbeta, or FaultError if a required one is missing."""
    if missing := ", ".join(f"d{role}" for role in required if named.get(role) is None):
        wanted = ", ".join(f"d{role}" for role in ("x", *takes))
        msg = f"the backward must return {wanted}, got {described(returned)}"
        # A tuple of another length does not tell which gradient is missing.
        msg += f": no {missing}" * ("x" in named or isinstance(returned, Mapping))
        raise FaultError(msg)
    return [named.get(role) for role in ARGUMENTS[:3]]


def adapt(
    forward: Function, backward: Function, *, is_strict: bool = False
) -> tuple[Function, Function, tuple[str, ...]]:
    """Return forward(x, gamma, beta, eps), backward(dy, cache) and the parameters, or say why not."""
    is_required = parameters(forward)
    # The first of several names for one role: a `scale` beside gamma, say, has a default of its own.
    names = {role: name for name in reversed(is_required) if (role := role_of(name))}
    # Parameters of unknown name get the remaining roles, in order.
    left = [role for role in ARGUMENTS if role not in names]
    unknown = [n for n, needed in is_required.items() if needed and n not in names.values()]
    names |= dict(zip(left, unknown, strict=False))
    if len(unknown) > len(left) or "x" not in names:
        msg = f"the forward must take (x, gamma, beta, eps), got {spelled(forward)}"
        raise ValueError(msg)
    order = _names_of_backward(backward)
    call_forward, call_backward = by_role(forward, names), by_role(backward, order)
    takes = tuple(role for role in PARAMETERS if role in names)
    is_usual, results = "cache" in order, [role for role in order if role.isdigit()]

    def call(x: Any, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        settings = dict.fromkeys(NAMES["eps"], eps)
        values = {"x": x, "gamma": gamma, "beta": beta, "eps": eps, "settings": settings}
        result = call_forward(**values)
        y, *saved = result if isinstance(result, (tuple, list)) else (result,)
        if is_usual and saved:
            return y, saved[0] if len(saved) == 1 else tuple(saved)
        if len(results) > 1 and len(saved) == 1 and isinstance(saved[0], (tuple, list)):
            saved = [*saved[0]]
        # With another number of results, one might be the wrong one. A backward that takes none computes its own.
        if is_usual or (results and len(saved) != len(results)):
            wanted = f"y and the {len(results)} that the backward takes of it"
            wanted = "(y, cache)" if is_usual else wanted
            msg = f"the forward must return {wanted}, got {described(result)}"
            raise FaultError(msg)
        return y, values | dict(zip(results, saved, strict=False))

    def pull(dy: Any, cache: Any) -> list[Any]:
        returned = call_backward(dy=dy, **({"cache": cache} if is_usual else cache))
        # If not strict, None marks a gradient that is not to be checked.
        required = ("x", *takes) if is_strict else ("x",)
        return in_order(gradients_by_role(returned, takes), takes, returned, required)

    return call, pull, takes


def _names_of_backward(backward: Function) -> dict[str, str]:
    """Return names by role: dy and cache; or dy, arguments of the forward, and "1", "2", ... for its results after y."""
    is_required = parameters(backward)
    required = [name for name, needed in is_required.items() if needed]
    # A cotangent that comes first may be called g, like a gamma.
    first = [name for name in required[:1] if key_of(name) == "g"]
    known = {r: n for n in reversed(is_required) if n not in first and (r := role_of(n))}
    if len(required) == 2 and "x" not in known:
        order = ("cache", "dy") if key_of(required[0]) in NAMES["cache"] else ("dy", "cache")
        return dict(zip(order, required, strict=True))
    others = [name for name in required if name not in known.values()]
    if not others or "x" not in known:
        msg = f"the backward must take (dy, cache), or dy, x and more by name, got {spelled(backward)}"
        raise ValueError(msg)
    dy, *results = others
    return {"dy": dy, **known} | {str(k): name for k, name in enumerate(results, 1)}


def by_role(function: Function, names: dict[str, str]) -> Function:
    """Return `function` as one that takes its arguments by role; `names` has the parameter of each role."""
    signature = inspect.signature(function)

    def call(**values: Any) -> Any:
        bound = inspect.BoundArguments(signature, {n: values[r] for r, n in names.items()})
        return function(*bound.args, **bound.kwargs)

    return call
