"""
Somebody's layer norm as a class: ``forward(x)`` and ``backward(dy)``, the state in attributes.

Every call works on a copy of its own, so that a cache can be used twice and nothing accumulates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from stablenorm.cli.user_file import UserFile, UserFileError
from stablenorm.cli.user_layer_norm import (
    LayerNorm,
    gradient_role,
    key_of,
    named_gradients,
    parameters_of,
)
from stablenorm.types import Array

# Where a class of parameters, with its gradient beside it, keeps the array.
_VALUES, _GRADIENTS = ("data", "value", "val"), ("grad", "gradient")
# Parameters of __init__ that have a default and are the length of a row all the same.
_SIZES = (
    *("n", "d", "dim", "dims", "size", "shape", "features", "nfeatures", "numfeatures", "ndim"),
    *("hidden", "hiddensize", "hiddendim", "dmodel", "nembd", "embdim", "embeddim", "width"),
    *("normalizedshape", "nunits", "units", "channels"),
)
# Attributes that hold all gradients, by name or in order.
_ALL = ("grads", "gradients", "grad", "dparams", "paramgrads", "gradparams")


class _Place(NamedTuple):
    """Where an instance keeps a parameter: an attribute, or an entry of a dict or a wrapper."""

    attribute: str
    inner: str = ""

    def holder(self, instance: Any) -> Any:
        """Return the dict or wrapper that `inner` is in."""
        return getattr(instance, self.attribute)

    def read(self, instance: Any) -> Any:
        """Return the array."""
        held = self.holder(instance)
        if not self.inner:
            return held
        return held[self.inner] if isinstance(held, dict) else getattr(held, self.inner)

    def write(self, instance: Any, value: Array) -> None:
        """Put an array there, in the shape that the class gave it."""
        value = value.reshape(np.shape(self.read(instance)))
        if not self.inner:
            setattr(instance, self.attribute, value)
        elif isinstance(self.holder(instance), dict):
            self.holder(instance)[self.inner] = value
        else:
            setattr(self.holder(instance), self.inner, value)


def adapt_class(file: UserFile, name: str) -> LayerNorm:
    """Give a class of the file the form that the check takes."""
    return _Class(file, name).layer_norm()


class _Class:
    """A class in the user's file, with the way to construct and call it."""

    def __init__(self, file: UserFile, name: str):
        self._file, self._class, self._name = file, file.find_class(name), name
        methods = [m for m in ("forward", "__call__") if callable(getattr(self._class, m, None))]
        self._forward = methods[0]
        # By length of a row and eps, if it is made with one: an instance that was never called.
        self._made: dict[tuple[int, float | None], Any] = {}
        self.spelled = ""
        made = parameters_of(self._class)
        self._eps_name = next((p.name for p in made if p.role == "eps"), None)
        unknown = [p for p in made if p.role not in ("eps", "gamma", "beta")]
        sizes = [p for p in unknown if p.required or key_of(p.name) in _SIZES]
        self._slot = sizes[0] if sizes else None
        self._given = [p for p in made if p.role in ("gamma", "beta")]

    def layer_norm(self) -> LayerNorm:
        """Return the form that the check takes."""
        # The length that the check begins with.
        instance = self._instance(8, 1e-5)
        places = self._places(instance, 8)
        eps = getattr(instance, "eps", getattr(instance, "epsilon", None))
        return LayerNorm(
            self.forward,
            self.backward,
            tuple(places),
            float(eps) if isinstance(eps, (int, float)) else None,
            self._eps_name is not None or eps is not None,
            f"{self.spelled}, .{self._forward}(x), .backward(dy)",
        )

    def forward(self, x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any]:
        """Call forward on a new copy of the instance; the copy is the cache."""
        instance = copy.deepcopy(self._instance(np.shape(x)[-1], eps))
        for attribute in ("eps", "epsilon"):
            if isinstance(getattr(instance, attribute, None), (int, float)):
                setattr(instance, attribute, eps)
        places = self._places(instance, np.shape(x)[-1])
        for role, value in (("gamma", gamma), ("beta", beta)):
            if role in places and value is not None:
                places[role].write(instance, np.array(value))
        y = self._call(instance, self._forward, x)
        cache = None
        if isinstance(y, tuple) and len(y) == 2:
            y, cache = y
        return y, _State(instance, cache, places)

    def backward(self, dy: Array, state: _State) -> Any:
        """Call backward, and gather the gradients: those returned, then those in attributes."""
        instance = copy.deepcopy(state.instance)
        required = [p for p in parameters_of(type(instance).backward)[1:] if p.required]
        more = () if len(required) < 2 else (state.cache,)
        returned = self._call(instance, "backward", dy, *more)
        found = dict(_attributes(instance)) | _returned(returned)
        if "x" not in found:
            return returned
        for role, place in state.places.items():
            own, gradient = place.read(instance), found.get(role)
            # Of the shape that the class itself gave the parameter: as it should be.
            if gradient is not None and np.shape(gradient) == np.shape(own):
                found[role] = np.reshape(gradient, -1)
        return tuple(found.get(role) for role in ("x", "gamma", "beta"))

    def _call(self, instance: Any, method: str, *args: Any) -> Any:
        return self._file.guard(getattr(instance, method))(*args)

    def _instance(self, n: int, eps: float) -> Any:
        """Return an instance for rows of n; UserFileError says what was tried."""
        key = (n, None if self._eps_name is None else eps)
        if key in self._made:
            return self._made[key]
        options: dict[str, Any] = {} if self._eps_name is None else {self._eps_name: eps}
        # Ones and zeros: what is checked is written into the attributes.
        options |= {p.name: np.ones(n) if p.role == "gamma" else np.zeros(n) for p in self._given}
        attempts: list[tuple[Any, ...]] = [(n,), ((n,),), ()] if self._slot else [()]
        said = []
        for args in attempts:
            placed = dict(zip([self._slot.name] if self._slot else [], args, strict=False))
            try:
                instance = self._file.guard(self._class)(**placed, **options)
                wrong = self._unfit(instance, n)
            except UserFileError as error:
                wrong = error.line
            spelled = f"{self._name}({', '.join(map(str, args))})"
            if not wrong:
                self._made[key] = instance
                self.spelled = self.spelled or spelled
                return instance
            said.append(f"{spelled}: {wrong}")
        msg = f"{self._name} must be made from the length of a row, tried " + "; ".join(said)
        raise UserFileError(msg)

    def _unfit(self, instance: Any, n: int) -> str:
        """Say why an instance is not for rows of n."""
        for name, value in vars(instance).items():
            gamma = gradient_role(name, bare=True) == "gamma" and isinstance(value, np.ndarray)
            if gamma and value.size != n:
                return f"{name} has shape {value.shape}, not ({n},)"
        return ""

    def _places(self, instance: Any, n: int) -> dict[str, _Place]:
        """Return where gamma and beta are."""
        found: dict[str, _Place] = {}
        for name, value in vars(instance).items():
            places = [(name, _Place(name))]
            if isinstance(value, dict):
                places = [(key, _Place(name, key)) for key in value if isinstance(key, str)]
            elif not isinstance(value, np.ndarray):
                places = [(name, _Place(name, inner)) for inner in _VALUES if hasattr(value, inner)]
            for key, place in places:
                role, array = gradient_role(key, bare=True), place.read(instance)
                if role in ("gamma", "beta") and isinstance(array, np.ndarray) and array.size == n:
                    found.setdefault(role, place)
        return {role: found[role] for role in ("gamma", "beta") if role in found}


class _State(NamedTuple):
    """The cache of a class: the instance after forward, and what forward returned besides y."""

    instance: Any
    cache: Any
    places: dict[str, _Place]


def _attributes(instance: Any) -> Iterator[tuple[str, Any]]:
    """Yield role and value of the gradients in attributes."""
    for name, value in vars(instance).items():
        if key_of(name) in _ALL and not isinstance(value, np.ndarray):
            yield from _returned(value, ("gamma", "beta")).items()
        role = gradient_role(name)
        if role in ("gamma", "beta") and value is not None:
            yield role, value
        # A wrapper of array and gradient.
        role = gradient_role(name, bare=True)
        for inner in _GRADIENTS:
            held = getattr(value, inner, None)
            if role in ("gamma", "beta") and isinstance(held, np.ndarray):
                yield role, held


def _returned(returned: Any, order: tuple[str, ...] = ("x", "gamma", "beta")) -> dict[str, Any]:
    """Return by role what was returned: one array, several in order, or some by name."""
    named = named_gradients(returned)
    if named is not None:
        return {
            role: value for name, value in named.items() if (role := gradient_role(name, bare=True))
        }
    if isinstance(returned, (tuple, list)):
        if len(returned) == 2 and isinstance(returned[1], (Mapping, tuple, list)):
            return _returned(returned[:1], order[:1]) | _returned(returned[1], order[1:])
        return dict(zip(order, returned, strict=False))
    return {} if returned is None else {order[0]: returned}
