"""
Somebody's norm, functions or a class, as ``forward(x, gamma, beta, eps)`` and ``backward``.

Arguments and gradients are recognized by their names, those without a known name by their order.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.operation import copies
from stablenorm.cli.parts import InputError
from stablenorm.cli.user_file import UserError, UserFile, key_of, line_of
from stablenorm.types import Array

# The one table of names, compared without underscores and capitals. "settings" is a dict with eps.
_NAMES = {
    "x": ("x", "inp", "input", "inputs", "data", "xin", "features", "hidden", "hiddenstates"),
    "gamma": ("gamma", "weight", "scale", "g", "w", "gain", "weights", "lnweight", "lnw"),
    "beta": ("beta", "bias", "b", "shift", "offset", "biases", "lnbias", "lnb"),
    "eps": ("eps", "epsilon", "e", "varianceepsilon", "lnepsilon", "lneps"),
    "settings": ("lnparam", "lnparams", "param", "params", "config", "cfg", "options", "opts"),
}
_ROLES = {name: role for role, names in _NAMES.items() for name in names}
_ARGUMENTS = ("x", "gamma", "beta", "eps")
# dx, dweight, grad_bias, dL_dx, weight_grad: what is put before or after to say "gradient of".
_GRADIENTS = {
    role: re.compile(r"(dld|dl|grad|d|g)({0})|({0})grad".format("|".join(_NAMES[role])))
    for role in _ARGUMENTS[:3]
}
# With these names the cache is the first argument of a backward: backward(ctx, dy).
_CACHES = ("cache", "ctx", "saved", "context", "memo", "state", "tape", "cached")
_FORWARD = ("layernormforward", "lnforward", "layernormfwd", "forward", "layernorm")
_BACKWARD = ("layernormbackward", "lnbackward", "layernormbwd", "backward", "layernormgrad")
_RMS = [[n.replace("layer", "rms").replace("ln", "rms") for n in u] for u in (_FORWARD, _BACKWARD)]
_USUAL = {"layer": (_FORWARD, _BACKWARD), "rms": _RMS}

_Gradients = tuple[Any, Any, Any]


class LayerNorm(NamedTuple):
    """Two functions in the form that the check takes."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], _Gradients]
    # The parameters that the forward takes: gamma, beta, both or none.
    takes: tuple[str, ...]
    # How both are called, for the reader.
    signature: str


# ---- functions ----


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None, kind: str
) -> LayerNorm:
    """Find both functions in the file and give them the usual form."""
    usual_forward, usual_backward = _USUAL[kind]
    forward = file.find(forward_name, usual_forward, "--forward", kind)
    backward = file.find(backward_name, usual_backward, "--backward", kind)
    roles = _forward_roles(forward)
    takes = tuple(role for role in ("gamma", "beta") if role in roles.values())
    taking, pulling = inspect.signature(forward), inspect.signature(backward)
    required = [name for name, needed in _parameters(backward).items() if needed]
    if len(required) != 2:
        msg = f"the backward must take (dy, cache), got {_spelled(backward)}"
        raise InputError(msg)

    def call_forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        given = dict(zip(_ARGUMENTS, (x, gamma, beta, eps), strict=True))
        given["settings"] = dict.fromkeys(_NAMES["eps"], eps)
        result = _call(forward, taking, {name: given[role] for name, role in roles.items()})
        if not isinstance(result, (tuple, list)) or len(result) < 2:
            msg = f"the forward must return y, cache, got {type(result).__name__}"
            raise UserError(msg)
        return result[0], result[1] if len(result) == 2 else tuple(result[1:])

    def call_backward(dy: Array, cache: Any) -> _Gradients:
        is_cache_first = key_of(required[0]) in _CACHES
        both = (cache, dy) if is_cache_first else (dy, cache)
        returned = _call(backward, pulling, dict(zip(required, both, strict=True)))
        return _complete(_by_role(returned, takes), takes, returned)

    signature = f"{_spelled(forward)}, {_spelled(backward)}"
    return LayerNorm(call_forward, call_backward, takes, signature)


def _call(function: Callable[..., Any], signature: inspect.Signature, given: dict[str, Any]) -> Any:
    """Call a function with arguments by name, whichever are to be given by place and which by name."""
    bound = inspect.BoundArguments(signature, given)
    return function(*bound.args, **bound.kwargs)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the parameters but *args and **options, and whether each has to be given."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        # A function that is not written in Python has no signature.
        raise InputError(str(error)) from None
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p.default is p.empty for name, p in parameters.items() if p.kind not in stars}


def _spelled(function: Callable[..., Any]) -> str:
    return f"{function.__name__}{inspect.signature(function)}"


def _forward_roles(function: Callable[..., Any]) -> dict[str, str]:
    """Return what each parameter is for; those of unknown name get the roles left, in order."""
    parameters = _parameters(function)
    roles = {name: _ROLES[key_of(name)] for name in parameters if key_of(name) in _ROLES}
    left = [role for role in _ARGUMENTS if role not in roles.values()]
    unknown = [name for name, needed in parameters.items() if needed and name not in roles]
    roles |= dict(zip(unknown, left, strict=False))
    if len(unknown) > len(left) or "x" not in roles.values():
        msg = f"the forward must take (x, gamma, beta, eps), got {_spelled(function)}"
        raise InputError(msg)
    return roles


def _gradient_role(name: str) -> str:
    """Return x, gamma or beta for dx, dweight, grad_bias, ...; empty for anything else."""
    return next((r for r, names in _GRADIENTS.items() if names.fullmatch(key_of(name))), "")


def _by_role(returned: Any, takes: Sequence[str]) -> dict[str, Any]:
    """Return the gradients that come by name or, as many as there are, in order; else nothing."""
    if hasattr(returned, "_asdict"):
        returned = returned._asdict()
    if isinstance(returned, Mapping):
        return {_gradient_role(n) or _ROLES.get(key_of(n), ""): g for n, g in returned.items()}
    if isinstance(returned, np.ndarray) and not takes:
        returned = (returned,)
    if isinstance(returned, (tuple, list)) and len(returned) == 1 + len(takes):
        return dict(zip(("x", *takes), returned, strict=True))
    return {}


def _complete(found: Mapping[str, Any], takes: Sequence[str], returned: Any) -> _Gradients:
    """Return dx, dgamma and dbeta, or UserError if one is missing."""
    roles = ("x", *takes)
    if missing := [f"d{role}" for role in roles if found.get(role) is None]:
        wanted = ", ".join(f"d{role}" for role in roles)
        what = type(returned).__name__
        if isinstance(returned, Mapping):
            what += f" of {', '.join(map(str, returned))}: no {', '.join(missing)}"
        elif isinstance(returned, (tuple, list)):
            is_as_long = len(returned) == len(roles)
            what += f" of {len(returned)}" + f": no {', '.join(missing)}" * is_as_long
        elif isinstance(returned, np.ndarray):
            what = f"one array of shape {returned.shape}"
        msg = f"the backward must return {wanted}, got {what}"
        raise UserError(msg)
    return found["x"], found.get("gamma"), found.get("beta")


# ---- a class ----


def adapt_class(file: UserFile, name: str, n: int) -> LayerNorm:
    """Give a class of the file, tried on rows of n, the form that the check takes."""
    class_ = file.find_class(name)
    made = _make(file, class_, n)
    places = {role: place for role in _ARGUMENTS[1:] if (place := _place(made, role))}
    takes = tuple(role for role in places if role != "eps")

    def run(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        instance = _make(file, class_, x.shape[-1])
        for role, value in (("gamma", gamma), ("beta", beta), ("eps", eps)):
            if role in places and value is not None:
                # In the shape that the class gave it.
                shape = np.shape(getattr(instance, places[role]))
                setattr(instance, places[role], np.array(value).reshape(shape) if shape else value)
        return file.guard(instance.forward)(x), instance

    # Each call has an instance of its own, whose forward is run again for its backward: so a cache
    # can be used twice, no gradient is added to another, and nothing is copied that cannot be.
    def forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        kept = (*copies((x, gamma, beta)), eps)
        return run(x, gamma, beta, eps)[0], kept

    def backward(dy: Array, cache: Any) -> _Gradients:
        *arrays, eps = cache
        _, instance = run(*copies(arrays), eps)  # type: ignore[arg-type, call-arg]
        returned = file.guard(instance.backward)(dy)
        held = [n for n in dir(instance) if not callable(getattr(instance, n, None))]
        found: dict[str, Any] = {_gradient_role(n): getattr(instance, n, None) for n in held}
        # A single array is dx, and the others are stored.
        found |= _by_role(returned, () if isinstance(returned, np.ndarray) else takes)
        for role in found.keys() & set(takes):
            # A gradient of the shape that the class gave the parameter is as it should be.
            if np.shape(found[role]) == np.shape(getattr(instance, places[role])):
                found[role] = np.reshape(found[role], -1)
        return _complete(found, takes, returned)

    return LayerNorm(forward, backward, takes, f"{name}({n}).forward(x), .backward(dy)")


def _make(file: UserFile, class_: type, n: int) -> Any:
    """Return an instance for rows of n; UserError says what was tried."""
    options = {name: 1e-5 for name in _parameters(class_) if _ROLES.get(key_of(name)) == "eps"}
    said = []
    for arguments in ((n,), ((n,),), ()):
        try:
            instance = file.guard(class_)(*arguments, **options)
            gamma = _place(instance, "gamma")
            if not gamma or getattr(instance, gamma).size == n:
                return instance
            why = f"{gamma} does not have {n} elements"
        except UserError as error:
            why = line_of(error)
        said.append(f"{class_.__name__}({', '.join(map(str, arguments))}): {why}")
    msg = f"{class_.__name__} must be made from the length of a row, tried {'; '.join(said)}"
    raise UserError(msg)


def _place(instance: Any, role: str) -> str:
    """Return the attribute that holds gamma, beta or eps; empty if none does."""
    kind: Any = (int, float) if role == "eps" else np.ndarray
    attributes = {key_of(name): name for name in dir(instance)}
    held = (attributes[name] for name in _NAMES[role] if name in attributes)
    # A slot may be empty yet.
    return next((name for name in held if isinstance(getattr(instance, name, None), kind)), "")
