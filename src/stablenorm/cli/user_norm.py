"""Somebody's norm, functions or a class, as ``forward(x, gamma, beta, eps)`` and ``backward``."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import roles
from stablenorm.check.operation import copies
from stablenorm.check.roles import NAMES, PARAMETERS, gradient_role, key_of, role_of
from stablenorm.cli.user_file import UserError, UserFile, line_of
from stablenorm.text import shape_text
from stablenorm.types import Array

_Gradients = tuple[Any, Any, Any]


class Norm(NamedTuple):
    """Two functions in the form that the check takes."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], _Gradients]
    # Names among gamma and beta that the forward takes.
    takes: tuple[str, ...]
    # How both are called, for the reader.
    signature: str
    kind: str


def _kind_of(name: str) -> str:
    """Return the kind that a function or class is called by."""
    return "rms" if "rms" in key_of(name) else "layer"


# ---- functions ----


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None, kind: str | None
) -> Norm:
    """Find both functions in the file and give them the usual form; ValueError if that cannot be."""
    name, forward = file.find(forward_name, "forward", kind)
    _, backward = file.find(backward_name, "backward", kind)

    @functools.wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        result = forward(*args, **options)
        if not isinstance(result, (tuple, list)) or len(result) < 2:
            msg = f"the forward must return y, cache, got {type(result).__name__}"
            raise UserError(msg)
        return result

    @functools.wraps(backward)
    def pull(*args: Any, **options: Any) -> Any:
        returned = backward(*args, **options)
        return _complete(roles.gradients_by_role(returned, takes), takes, returned, ("x", *takes))

    usual_forward, usual_backward, takes = roles.adapt(call, pull)
    signature = ", ".join(map(roles.spelled, (forward, backward)))
    return Norm(usual_forward, usual_backward, takes, signature, kind or _kind_of(name))


def _complete(
    found: Mapping[str, Any], takes: Sequence[str], returned: Any, required: Sequence[str]
) -> _Gradients:
    """Return dx, dgamma and dbeta, or UserError if a required one is missing."""
    if missing := ", ".join(f"d{role}" for role in required if found.get(role) is None):
        what = type(returned).__name__
        if isinstance(returned, Mapping):
            what += f" of {', '.join(map(str, returned))}: no {missing}"
        elif isinstance(returned, (tuple, list)):
            what += f" of {len(returned)}" + f": no {missing}" * (len(returned) == 1 + len(takes))
        elif isinstance(returned, np.ndarray):
            what = f"one array of shape {shape_text(returned.shape)}"
        wanted = ", ".join(f"d{role}" for role in ("x", *takes))
        msg = f"the backward must return {wanted}, got {what}"
        raise UserError(msg)
    return found["x"], found.get("gamma"), found.get("beta")


# ---- a class ----


class _Member(NamedTuple):
    """Something that an instance holds, under a name; `put` puts another one there."""

    name: str
    value: Any
    put: Callable[[Any], object]
    gradient: Any = None


def adapt_class(file: UserFile, name: str, n: int, kind: str | None) -> Norm:
    """Give a class of the file, tried on rows of n, the form that the check takes."""
    class_ = file.find_class(name)
    made = _make(file, class_, n)
    for shape in ((2, 3, n), (6, n)):
        if not _places(made, "gamma"):
            # The first forward may make the parameters.
            with contextlib.suppress(UserError):
                file.method(made, "forward")(np.ones(shape))
    takes = tuple(role for role in PARAMETERS if _places(made, role))

    def run(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Any, Callable[..., Any]]:
        instance = _make(file, class_, x.shape[-1])
        forward, backward = (file.method(instance, way) for way in ("forward", "backward"))
        if not all(_places(instance, role) for role in takes):
            forward(np.array(x))
        for role, value in (("gamma", gamma), ("beta", beta), ("eps", eps)):
            if value is not None and (places := _places(instance, role)):
                # The shape is that of the class; one array goes wherever it held one.
                shape = np.shape(places[0].value)
                given = np.array(value).reshape(shape) if shape else value
                for place in places:
                    place.put(given)
        y, *cache = result if isinstance(result := forward(x), tuple) else (result,)
        return y, instance, _of_dy(backward, x, *cache)

    # Each call has an instance of its own, whose forward is run again for its backward: so a cache
    # can be used twice, no gradient is added to another, and nothing is copied that cannot be.
    def forward(*given: Any) -> tuple[Any, Any]:
        return run(*given)[0], (*copies(given[:3]), given[3])

    def backward(dy: Array, cache: Any) -> _Gradients:
        _, instance, pull = run(*copies(cache[:3]), cache[3])  # type: ignore[arg-type, call-arg]
        returned = pull(dy)
        found = _stored_gradients(instance, takes)
        # A single array, or a list of one, is dx, and the others are stored.
        is_one = isinstance(returned, np.ndarray) or (type(returned) is list and len(returned) == 1)
        found |= roles.gradients_by_role(returned, () if is_one else takes)
        for role in found.keys() & set(takes):
            # The shape that the class itself gave the parameter is as it should be.
            if np.shape(found[role]) == np.shape(_places(instance, role)[0].value):
                found[role] = np.reshape(found[role], -1)
        return _complete(found, takes, returned, ["x"])

    signature = f"{name}({n}).forward(x), .backward(dy)"
    return Norm(forward, backward, takes, signature, kind or _kind_of(name))


def _of_dy(backward: Callable[..., Any], x: Array, *cache: Any) -> Callable[[Array], Any]:
    """Return a backward of dy alone: some take x, or a cache, or, of a layer that learns there, a rate."""
    names = [name for name, needed in roles.parameters(backward).items() if needed]
    if len(names) < 2:
        return backward
    others = [name for name in names if role_of(name) != "x"] or names
    if key_of(others[0]) in NAMES["cache"]:
        others[:2] = others[1::-1]
    order = zip(others, ("dy", "cache", *names), strict=False)
    pull = roles.by_role(backward, dict.fromkeys(names, "x") | dict(order))
    given = {"x": x, "cache": cache[0] if len(cache) == 1 else cache or 0.0}
    return lambda dy: pull(**dict.fromkeys(names, 0.0) | given | {"dy": dy})


def _make(file: UserFile, class_: type, n: int) -> Any:
    """Return an instance for rows of n; UserError says what was tried."""
    # A class may want its parameters by name; bias=True, which has a default, is something else.
    wanted = {"eps": 1e-5, "axis": -1, "gamma": np.ones(n), "beta": np.zeros(n)}
    options = {
        name: wanted[role]
        for name, needed in roles.parameters(class_).items()
        if (role := role_of(name) or name) in wanted and (needed or role in ("eps", "axis"))
    }
    said = []
    for arguments in ((n,), ((n,),), ()):
        try:
            instance = file.guard(class_)(*arguments, **options)
            places = _places(instance, "gamma")
            if not places or places[0].value.size == n:
                return instance
            why = f"{places[0].name} does not have {n} elements"
        except UserError as error:
            why = line_of(error)
        said.append(f"{class_.__name__}({', '.join(map(str, arguments))}): {why}")
    msg = f"{class_.__name__} must be made from the length of a row, tried {'; '.join(said)}"
    raise UserError(msg)


def _attributes(instance: Any) -> dict[str, Any]:
    # A slot may be empty yet.
    held = ((name, getattr(instance, name, None)) for name in dir(instance) if name[:2] != "__")
    return {name: value for name, value in held if not callable(value)}


def _held(name: str, value: Any, put: Callable[[Any], object]) -> _Member:
    # Some put a parameter and its gradient into an object: its data and grad.
    if isinstance(getattr(value, "data", None), np.ndarray) and hasattr(value, "grad"):
        return _Member(name, value.data, partial(setattr, value, "data"), value.grad)
    return _Member(name, value, put)


def _members(instance: Any, what: str = "", order: Sequence[str] = ()) -> Iterator[_Member]:
    """Yield the attributes or, by `what` they are called, what a dict or an ordered list holds."""
    attributes = _attributes(instance)
    if not what:
        yield from (_held(n, v, partial(setattr, instance, n)) for n, v in attributes.items())
        return
    for kept in (value for name, value in attributes.items() if key_of(name) in NAMES[what]):
        if isinstance(kept, dict):
            yield from (_held(str(k), v, partial(kept.__setitem__, k)) for k, v in kept.items())
        elif isinstance(kept, (list, tuple)):
            for i, (role, value) in enumerate(zip(order, kept, strict=False)):
                # A parameter that is an attribute as well is called like that.
                same = (n for n, other in attributes.items() if other is value and role_of(n))
                put: Any = partial(np.copyto, value)
                if isinstance(kept, list):
                    put = partial(kept.__setitem__, i)
                yield _held(next(same, role), value, put)


def _places(instance: Any, role: str) -> list[_Member]:
    """Return where gamma, beta or eps is, in an attribute or a member of `params`; empty if nowhere."""
    kind: Any = (int, float) if role == "eps" else np.ndarray
    known = {key: i for i, key in enumerate(NAMES[role])}
    held = [*_members(instance), *_members(instance, "parameters", PARAMETERS)]
    found = [each for each in held if key_of(each.name) in known and isinstance(each.value, kind)]
    found.sort(key=lambda each: known[key_of(each.name)])
    return [each for each in found if each.value is found[0].value]


def _stored_gradients(instance: Any, takes: Sequence[str]) -> dict[str, Any]:
    """Return by role the gradients in attributes and in lists and dicts of them."""
    held = [*_members(instance, "parameters", PARAMETERS)]
    order = [role_of(each.name) for each in held]
    listed = _members(instance, "gradients", order if set(order) == set(takes) else list(takes))
    found = {gradient_role(each.name) or role_of(each.name): each.value for each in listed}
    held += _members(instance)
    found |= {role_of(each.name): each.gradient for each in held if each.gradient is not None}
    return found | {gradient_role(each.name): each.value for each in held if each.value is not None}
