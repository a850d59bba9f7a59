"""
Somebody's layer norm, in whatever form, as ``forward(x, gamma, beta, eps)`` and ``backward``.

Arguments and gradients are recognised by their names, those without a known name by their order.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli.user_file import UserFile, UserFileError
from stablenorm.types import Array

# Compared without underscores and capitals.
_ROLES = {
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
# What is put before or after a name to say that it is a gradient of it.
_PREFIXES, _SUFFIXES = ("dld", "dl", "gradof", "gradient", "grad", "d", "g"), ("gradient", "grad")
# Never to be looked up in a cache, whatever the keys of that.
_OURS = ("dy", "cache")
_POSITIONAL = ("x", "gamma", "beta", "eps")


class _Parameter(NamedTuple):
    name: str
    role: str
    required: bool
    by_name: bool
    default: Any


@dataclass
class LayerNorm:
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
    # How many axes x must have for them; None if that does not matter. See `fixed`.
    axes: int | None = None

    def fixed(self, axes: int) -> LayerNorm:
        """Return the same for x of any shape, seen as one of so many axes."""

        def forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Array, Any]:
            y, cache = self.forward(_seen(x, axes), gamma, beta, eps)
            return np.reshape(y, x.shape) if np.size(y) == x.size else y, cache

        def backward(dy: Array, cache: Any) -> Any:
            gradients = self.backward(_seen(dy, axes), cache)
            if not isinstance(gradients, (tuple, list)) or len(gradients) == 0:
                return gradients
            dx, *others = gradients
            return (np.reshape(dx, dy.shape) if np.size(dx) == dy.size else dx, *others)

        return replace(self, forward=forward, backward=backward, axes=axes)


class _Kept(NamedTuple):
    """Our cache: the cache of the user's forward, and the inputs that a backward may ask for."""

    theirs: Any
    given: dict[str, Any]


def _seen(a: Array, axes: int) -> Array:
    """See an array with so many axes, the last as it is: ones in front, or the others as one."""
    leading = a.shape[:-1]
    if len(leading) >= axes:
        leading = (math.prod(leading),)
    return np.reshape(a, (*(1,) * (axes - 1 - len(leading)), *leading, a.shape[-1]))


class _Order:
    """The place of dx among gradients without names: settled once, where shapes tell."""

    def __init__(self) -> None:
        self.place: int | None = None

    def sort(self, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
        """Return the gradients with dx first."""
        if self.place is None:
            # Some write dx last: it is the one of the shape of x.
            like_x = [place for place, value in enumerate(values) if np.shape(value) == shape]
            if len(like_x) == 1:
                self.place = like_x[0]
        place = self.place or 0
        return [values[place], *values[:place], *values[place + 1 :]]


def adapt(file: UserFile, forward_name: str | None, backward_name: str | None) -> LayerNorm:
    """Find both functions in the file and give them the usual form."""
    forward = file.find(
        forward_name,
        ("layer_norm_forward", "ln_forward", "layer_norm_fwd", "forward", "layer_norm"),
        "--forward",
    )
    backward = file.find(
        backward_name,
        ("layer_norm_backward", "ln_backward", "layer_norm_bwd", "backward", "layer_norm_grad"),
        "--backward",
    )
    takes = _forward_parameters(forward)
    roles = {parameter.role for parameter in takes}
    dictionary = "settings" in roles and not {"gamma", "beta"} & roles
    present = tuple(role for role in ("gamma", "beta") if role in roles or dictionary)
    wanted = _backward_parameters(backward)
    order = _Order()

    def call_forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Array, Any]:
        given = {"x": x, "gamma": gamma, "beta": beta, "eps": eps}
        given["settings"] = _settings(given, dictionary)
        result = _call(forward, takes, given, ())
        if isinstance(result, (tuple, list)) and len(result) >= 2:
            y, *rest = result
            theirs = rest[0] if len(rest) == 1 else tuple(rest)
        else:
            y, theirs = result, None
        return y, _Kept(theirs, given)

    def call_backward(dy: Array, kept: _Kept) -> Any:
        given = {**kept.given, "dy": dy, "cache": kept.theirs}
        returned = _call(backward, wanted, given, _fields(kept.theirs))
        return _gradients(returned, np.shape(kept.given["x"]), present, order)

    eps = next((p.default for p in takes if p.role == "eps" and not p.required), None)
    return LayerNorm(
        call_forward,
        call_backward,
        present,
        float(eps) if isinstance(eps, (int, float)) else None,
        "eps" in roles or "settings" in roles,
        f"{_spelled(forward)}, {_spelled(backward)}",
    )


def _spelled(function: Callable[..., Any]) -> str:
    names = ", ".join(parameter.name for parameter in parameters_of(function))
    return f"{function.__name__}({names})"


def _settings(given: dict[str, Any], dictionary: bool) -> dict[str, Any]:
    """Return the dict of settings that some forwards take: eps, or every parameter, by all names."""
    eps = given["eps"]
    held: dict[str, Any] = {"eps": eps, "epsilon": eps}
    if dictionary:
        for role in ("gamma", "beta"):
            held |= dict.fromkeys(_ROLES[role], given[role])
    return held


def key_of(name: str) -> str:
    """Return the name as it is compared: without underscores and capitals."""
    return name.replace("_", "").lower()


def _role(name: str) -> str:
    return next((role for role, names in _ROLES.items() if key_of(name) in names), "")


def parameters_of(function: Callable[..., Any]) -> list[_Parameter]:
    """Return the parameters by their roles; empty where Python does not know them, or *args."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return []
    return [
        _Parameter(
            parameter.name,
            _role(parameter.name),
            parameter.default is parameter.empty,
            parameter.kind is parameter.KEYWORD_ONLY,
            parameter.default,
        )
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    ]


def _forward_parameters(function: Callable[..., Any]) -> list[_Parameter]:
    """Return the parameters, those of unknown name given the roles that are left, in order."""
    parameters = parameters_of(function)
    if not parameters:
        return [_Parameter(role, role, True, False, None) for role in _POSITIONAL]
    left = [role for role in _POSITIONAL if role not in {p.role for p in parameters}]
    named = []
    for parameter in parameters:
        role = parameter.role if parameter.role in (*_POSITIONAL, "settings") else ""
        if not role and parameter.required and left:
            role = left.pop(0)
        named.append(parameter._replace(role=role))
    return named


def _backward_parameters(function: Callable[..., Any]) -> list[_Parameter]:
    """Return the parameters, one of them being dy; empty for ``backward(dy, *cache)``."""
    parameters = parameters_of(function)
    if parameters and not any(parameter.role == "dy" for parameter in parameters):
        # dy has no usual name: what is required, and is called like nothing else; else the first.
        unknown = [p for p in parameters if p.required and p.role in ("", "gamma")]
        first = next((p for p in unknown if not p.role), (unknown or parameters)[0])
        parameters = [p._replace(role="dy") if p is first else p for p in parameters]
    if sum(parameter.required for parameter in parameters) == 2:
        # The other one is the cache, whatever its name.
        parameters = [
            p._replace(role="cache") if p.required and not p.role else p for p in parameters
        ]
    return parameters


def _call(
    function: Callable[..., Any],
    parameters: list[_Parameter],
    given: dict[str, Any],
    fields: Mapping[str, Any] | Sequence[Any],
) -> Any:
    """Call with what each parameter asks for, by role, by name in the cache, or in order."""
    if not parameters:
        rest = fields.values() if isinstance(fields, Mapping) else fields
        return function(given["dy"], *rest)
    args: list[Any] = []
    options: dict[str, Any] = {}
    unknown = [p for p in parameters if p.required and p.role not in _OURS]
    # backward(dy, *cache), spelled out: the cache has one value for each.
    spread = (
        isinstance(fields, Sequence)
        and len(fields) == len(unknown)
        and not any(p.role == "cache" for p in parameters)
        and any(p.role not in given for p in unknown)
    )
    in_order = list(fields) if isinstance(fields, Sequence) else []
    skipped = False
    for parameter in parameters:
        name = parameter.name
        if spread and parameter in unknown:
            value = in_order.pop(0)
        elif isinstance(fields, Mapping) and name in fields and parameter.role not in _OURS:
            value = fields[name]
        elif parameter.role in given:
            value = given[parameter.role]
        elif not parameter.required:
            skipped = True
            continue
        elif in_order:
            value = in_order.pop(0)
        else:
            msg = (
                f"{function.__name__} must ask for dy, a cache, x, gamma, beta, eps or what the "
                f"forward returned, got {name}"
            )
            raise UserFileError(msg)
        if parameter.by_name or skipped:
            options[name] = value
        else:
            args.append(value)
    return function(*args, **options)


def _fields(cache: Any) -> Mapping[str, Any] | Sequence[Any]:
    """Return the contents of a cache, by name if it has names."""
    if isinstance(cache, Mapping):
        return cache
    if hasattr(cache, "_asdict"):
        return dict(cache._asdict())
    if isinstance(cache, (tuple, list)):
        return cache
    held = getattr(cache, "__dict__", None)
    if held:
        return dict(held)
    return () if cache is None else (cache,)


def gradient_role(name: str, *, bare: bool = False) -> str:
    """
    Return x, gamma or beta for dx, dweight, grad_bias, ...; empty for anything else.

    `bare`: gamma and weight are gradients of themselves too, as names of what is returned.
    """
    key = key_of(name)
    candidates = [key.removeprefix(prefix) for prefix in _PREFIXES if key.startswith(prefix)]
    candidates += [key.removesuffix(suffix) for suffix in _SUFFIXES if key.endswith(suffix)]
    # The name itself first if it is one of the usual ones, else last: "dg" before "g".
    plain = key in (*_ROLES["x"], "gamma", "beta")
    if bare:
        candidates = [key, *candidates] if plain else [*candidates, key]
    roles = ("x", "gamma", "beta")
    return next((r for c in candidates for r in roles if c in _ROLES[r]), "")


def _gradients(
    returned: Any, shape: tuple[int, ...], present: tuple[str, ...], order: _Order
) -> Any:
    """Return (dx, dgamma, dbeta), None for what the forward does not take."""
    named = named_gradients(returned)
    if named is not None:
        found = {gradient_role(name, bare=True): value for name, value in named.items()}
        if found.keys() & {"x", "gamma", "beta"}:
            return tuple(found.get(role) for role in ("x", "gamma", "beta"))
    if isinstance(returned, np.ndarray) and not present:
        returned = (returned,)
    if named is not None and not isinstance(returned, tuple):
        # Names that say nothing: the check says what came.
        return returned
    if not isinstance(returned, (tuple, list)):
        return returned
    values = list(returned)
    if len(values) != 1 + len(present):
        return tuple(values)
    values = order.sort(values, shape)
    found = dict(zip(("x", *present), values, strict=True))
    return tuple(found.get(role) for role in ("x", "gamma", "beta"))


def named_gradients(returned: Any) -> dict[str, Any] | None:
    """Return the values by name; None if they have none."""
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()}
    if hasattr(returned, "_asdict"):
        return dict(returned._asdict())
    if isinstance(returned, (tuple, list, np.ndarray)) or returned is None:
        return None
    return dict(getattr(returned, "__dict__", {})) or None
