"""
Somebody's layer norm, in any usual form, as ``forward(x, gamma, beta, eps)`` and ``backward``.

Arguments and gradients are recognized by their names, those without a known name by their order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli.user_file import UserFile, UserFileError, key_of
from stablenorm.types import Array

# The one table of names, compared without underscores and capitals.
NAMES = {
    "x": ("x", "inp", "input", "inputs", "data", "xin", "features", "hidden", "hiddenstates"),
    "gamma": ("gamma", "weight", "scale", "g", "w", "gain", "weights", "lnweight", "lnw"),
    "beta": ("beta", "bias", "b", "shift", "offset", "biases", "lnbias", "lnb"),
    "eps": ("eps", "epsilon", "e", "varianceepsilon", "lnepsilon", "lneps"),
    "settings": ("lnparam", "lnparams", "param", "params", "config", "cfg", "options", "opts", "p"),
    "dy": (
        *("dy", "dout", "grad", "gradoutput", "gradout", "gout", "upstream", "douty", "delta"),
        *("grady", "dldy", "doutput", "upstreamgrad", "gradoutputs", "dz", "do", "gy", "outgrad"),
    ),
    "cache": ("cache", "ctx", "saved", "context", "memo", "state", "tape", "cached", "c"),
}
_ROLES = {name: role for role, names in NAMES.items() for name in names}
# What is put before or after a name to say that it is a gradient of it.
_PREFIXES, _SUFFIXES = ("dld", "dl", "gradof", "gradient", "grad", "d", "g"), ("gradient", "grad")
_POSITIONAL = ("x", "gamma", "beta", "eps")
_FORWARD = ("layer_norm_forward", "ln_forward", "layer_norm_fwd", "forward", "layer_norm")
_BACKWARD = ("layer_norm_backward", "ln_backward", "layer_norm_bwd", "backward", "layer_norm_grad")


class LayerNorm(NamedTuple):
    """Two functions in the form that the check takes, and the assumptions made."""

    forward: Callable[..., tuple[Array, Any]]
    backward: Callable[[Array, Any], Any]
    # Which of gamma and beta the forward takes.
    takes: tuple[str, ...]
    # The value that the forward has when it is given none; None if nothing says it.
    eps: float | None
    takes_eps: bool
    # How both are called, for the reader.
    signature: str


class _Kept(NamedTuple):
    """Our cache: the cache of the user's forward, and the inputs that a backward may ask for."""

    theirs: Any
    given: dict[str, Any]


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None
) -> LayerNorm:
    """Find both functions in the file and give them the usual form."""
    forward = file.find(forward_name, _FORWARD, "--forward")
    backward = file.find(backward_name, _BACKWARD, "--backward")
    takes, wants = _forward_roles(forward), _backward_roles(backward)
    roles = set(takes.values()) if takes else set(_POSITIONAL)
    # A dict of settings holds eps and, where the forward takes no gamma or beta, these as well.
    in_settings = "settings" in roles and not {"gamma", "beta"} & roles
    present = tuple(role for role in ("gamma", "beta") if role in roles or in_settings)

    def call_forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Array, Any]:
        given = dict(zip(_POSITIONAL, (x, gamma, beta, eps), strict=True))
        held = ("eps", "gamma", "beta") if in_settings else ("eps",)
        given["settings"] = {name: given[role] for role in held for name in NAMES[role]}
        result = _call(forward, takes, given) if takes else forward(x, gamma, beta, eps)
        if not (isinstance(result, (tuple, list)) and len(result) >= 2):
            return result, _Kept(None, given)
        return result[0], _Kept(result[1] if len(result) == 2 else tuple(result[1:]), given)

    def call_backward(dy: Array, kept: _Kept) -> Any:
        if wants:
            returned = _call(backward, wants, kept.given | {"dy": dy, "cache": kept.theirs})
        else:
            fields = _fields(kept.theirs)
            returned = backward(dy, *(fields.values() if isinstance(fields, Mapping) else fields))
        found = named_gradients(returned)
        if found.keys() & {"x", "gamma", "beta"}:
            return tuple(found.get(role) for role in ("x", "gamma", "beta"))
        if isinstance(returned, np.ndarray) and not present:
            returned = (returned,)
        if not isinstance(returned, (tuple, list)) or len(returned) != 1 + len(present):
            return tuple(returned) if isinstance(returned, list) else returned
        found = dict(zip(present, returned[1:], strict=True))
        return returned[0], found.get("gamma"), found.get("beta")

    parameters = parameters_of(forward)
    eps = next((parameters[name].default for name, role in takes.items() if role == "eps"), None)
    return LayerNorm(
        call_forward,
        call_backward,
        present,
        float(eps) if isinstance(eps, (int, float)) else None,
        bool({"eps", "settings"} & roles),
        ", ".join(f"{name_of(f)}({', '.join(parameters_of(f))})" for f in (forward, backward)),
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of an object that is called like one."""
    return getattr(function, "__name__", type(function).__name__)


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters by name; none where Python does not know them, or where one is *args."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return {}
    return {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}


def is_required(parameter: inspect.Parameter) -> bool:
    """Tell whether a parameter has no default."""
    return parameter.default is parameter.empty


def role_of(name: str) -> str:
    """Return what a parameter of that name is for; empty if its name does not tell."""
    return _ROLES.get(key_of(name), "")


def gradient_role(name: str) -> str:
    """Return x, gamma or beta for dx, dweight, grad_bias, ...; empty for anything else."""
    key = key_of(name)
    stems = [key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)]
    stems += [key.removesuffix(suffix) for suffix in _SUFFIXES if key.endswith(suffix)]
    return next((r for s in stems if (r := _ROLES.get(s, "")) in ("x", "gamma", "beta")), "")


def named_gradients(returned: Any) -> dict[str, Any]:
    """Return by role what was returned by name: a dict, a NamedTuple, an object; else nothing."""
    names = _fields(returned)
    return (
        {_returned_role(str(n)): g for n, g in names.items()} if isinstance(names, Mapping) else {}
    )


def _returned_role(name: str) -> str:
    # gamma and weight are names of their own gradients too; but "dg" comes before "g".
    plain = role_of(name)
    is_plain = plain == "x" or key_of(name) in ("gamma", "beta")
    return plain if is_plain else gradient_role(name) or plain


def _forward_roles(function: Callable[..., Any]) -> dict[str, str]:
    """Return what each parameter is for; those of unknown name get the roles left, in order."""
    parameters = parameters_of(function)
    known = (*_POSITIONAL, "settings")
    roles = {name: role if (role := role_of(name)) in known else "" for name in parameters}
    left = [role for role in _POSITIONAL if role not in roles.values()]
    for name, role in roles.items():
        if not role and is_required(parameters[name]) and left:
            roles[name] = left.pop(0)
    return roles


def _backward_roles(function: Callable[..., Any]) -> dict[str, str]:
    """Return what each parameter is for, one of them being dy; none for ``backward(dy, *cache)``."""
    parameters = parameters_of(function)
    roles = {name: role_of(name) for name in parameters}
    required = [name for name in parameters if is_required(parameters[name])]
    if parameters and "dy" not in roles.values():
        # dy has no usual name: what is required, and is called like nothing else; else the first.
        unknown = [name for name in required if roles[name] in ("", "gamma")] or list(parameters)
        roles[next((name for name in unknown if not roles[name]), unknown[0])] = "dy"
    if len(required) == 2:
        # The other one is the cache, whatever its name.
        roles |= {name: "cache" for name in required if not roles[name]}
    return roles


def _call(function: Callable[..., Any], roles: dict[str, str], given: dict[str, Any]) -> Any:
    """Call with what each parameter asks for."""
    parameters = parameters_of(function)
    bound = inspect.signature(function).bind_partial()
    for name, role in roles.items():
        if role in given:
            bound.arguments[name] = given[role]
        elif is_required(parameters[name]):
            msg = f"{name_of(function)} must ask for dy, a cache, x, gamma, beta or eps, got {name}"
            raise UserFileError(msg)
    return function(*bound.args, **bound.kwargs)


def _fields(held: Any) -> Mapping[Any, Any] | Sequence[Any]:
    """Return the contents of a cache or of gradients, by name if they have names."""
    if isinstance(held, Mapping):
        return held
    if hasattr(held, "_asdict"):
        return dict(held._asdict())
    if isinstance(held, (tuple, list)):
        return held
    if names := getattr(held, "__dict__", None):
        return dict(names)
    return () if held is None else (held,)
