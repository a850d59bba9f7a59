"""
Somebody's layer norm as a class: ``forward(x)`` and ``backward(dy)``, the state in attributes.

Every call works on a copy of its own, so that a cache can be used twice and nothing accumulates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenorm.cli.user_file import UserFile, UserFileError, key_of
from stablenorm.cli.user_functions import (
    LayerNorm,
    gradient_role,
    is_required,
    named_gradients,
    parameters_of,
    role_of,
)
from stablenorm.types import Array

# Attributes that hold all gradients, by name or in order.
_ALL = ("grads", "gradients", "grad", "dparams", "paramgrads", "gradparams")
_PARAMETERS = ("gamma", "beta")


def adapt_class(file: UserFile, name: str) -> LayerNorm:
    """Give a class of the file the form that the check takes."""
    class_ = file.find_class(name)
    made = parameters_of(class_)
    takes_eps = [name for name in made if role_of(name) == "eps"]

    def forward(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        instance, _ = _make(file, class_, x.shape[-1], dict.fromkeys(takes_eps, eps))
        for attribute in ("eps", "epsilon"):
            if isinstance(getattr(instance, attribute, None), (int, float)):
                setattr(instance, attribute, eps)
        for role, value in (("gamma", gamma), ("beta", beta)):
            place = _find(instance, x.shape[-1]).get(role)
            if place is not None and value is not None:
                holder, key = place
                # In the shape that the class gave it.
                holder[key] = np.array(value).reshape(holder[key].shape)
        return file.guard(instance.forward)(x), instance

    def backward(dy: Array, cache: Any) -> Any:
        instance = copy.deepcopy(cache)
        returned = file.guard(instance.backward)(dy)
        found = {r: g for name, g in _gradients(instance) if (r := gradient_role(name))}
        found |= _returned(returned)
        if "x" not in found:
            return returned
        for role, (holder, key) in _find(instance, dy.shape[-1]).items():
            # Of the shape that the class itself gave the parameter: as it should be.
            if role in found and np.shape(found[role]) == holder[key].shape:
                found[role] = np.reshape(found[role], -1)
        return tuple(found.get(role) for role in ("x", *_PARAMETERS))

    # The length that the check begins with.
    instance, spelled = _make(file, class_, 8, dict.fromkeys(takes_eps, 1e-5))
    eps = getattr(instance, "eps", getattr(instance, "epsilon", None))
    return LayerNorm(
        forward,
        backward,
        tuple(role for role in _PARAMETERS if role in _find(instance, 8)),
        float(eps) if isinstance(eps, (int, float)) else None,
        bool(takes_eps) or eps is not None,
        f"{spelled}, .forward(x), .backward(dy)",
    )


def _make(file: UserFile, class_: type, n: int, options: dict[str, float]) -> tuple[Any, str]:
    """Return an instance for rows of n, and how it was made; UserFileError says what was tried."""
    parameters = parameters_of(class_)
    unknown = [name for name in parameters if name not in options]
    required = [name for name in unknown if is_required(parameters[name])]
    attempts: list[dict[str, Any]] = [] if required else [{}]
    attempts += [{name: length} for name in required or unknown for length in (n, (n,))]
    said = []
    for attempt in attempts:
        spelled = f"{class_.__name__}({', '.join(map(str, attempt.values()))})"
        try:
            instance = file.guard(class_)(**attempt, **options)
        except UserFileError as error:
            said.append(f"{spelled}: {error.line}")
            continue
        gammas = [(name, h[key]) for name, h, key in _arrays(instance) if role_of(name) == "gamma"]
        wrong = [f"{name} has shape {a.shape}, not ({n},)" for name, a in gammas if a.size != n]
        if not wrong:
            return instance, spelled
        said.append(f"{spelled}: {wrong[0]}")
    msg = f"{class_.__name__} must be made from the length of a row, tried " + "; ".join(said)
    raise UserFileError(msg)


def _arrays(instance: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each array in an attribute, and the dict and the key that hold it."""
    for name, value in vars(instance).items():
        if isinstance(value, dict):
            prefix = "grad_" if key_of(name) in _ALL else ""
            yield from ((f"{prefix}{key}", value, key) for key in value if _holds(value, key))
        elif _holds(vars(instance), name):
            yield name, vars(instance), name


def _holds(holder: dict[str, Any], key: str) -> bool:
    return isinstance(holder.get(key), np.ndarray)


def _find(instance: Any, n: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the dict and the key that hold gamma and beta."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name, holder, key in _arrays(instance):
        if role_of(name) in _PARAMETERS and holder[key].size == n:
            found.setdefault(role_of(name), (holder, key))
    return found


def _gradients(instance: Any) -> Iterator[tuple[str, Any]]:
    """Yield the gradients in attributes, each with a name that says of what it is one."""
    for name, holder, key in _arrays(instance):
        yield name, holder[key]
    for name, value in vars(instance).items():
        if key_of(name) in _ALL and isinstance(value, (tuple, list)):
            yield from zip(("grad_gamma", "grad_beta"), value, strict=False)


def _returned(returned: Any) -> dict[str, Any]:
    """Return by role what was returned: one array, several in order, or some by name."""
    if found := named_gradients(returned):
        return found
    if isinstance(returned, (tuple, list)):
        return dict(zip(("x", *_PARAMETERS), returned, strict=False))
    return {} if returned is None else {"x": returned}
