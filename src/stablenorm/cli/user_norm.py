"""A user's file, run once, apart from the terminal; its norm, functions or a class, in the usual form."""

import contextlib
import inspect
import io
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import roles
from stablenorm.check.operation import FaultError
from stablenorm.check.roles import ARGUMENTS, NAMES, PARAMETERS, gradient_role, key_of, role_of
from stablenorm.cli.parts import InputError, check_file
from stablenorm.types import Array

# Characters of an error message of the user's code: with its place, it then fits two lines.
_LONGEST = 120
# A class is a layer if it has a method of both lines.
_METHODS = ("forward", "forward_pass", "__call__"), ("backward", "backward_pass")
# The file's __name__: not "__main__", and no other module's name.
_MODULE = "_checked_by_stablenorm"
_STREAMS = "stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"


class _Nothing(io.TextIOWrapper):
    """A stream without input and output."""

    def close(self) -> None:
        """Stay open: code of the file may print after it has closed its streams."""


@contextlib.contextmanager
def running(path: Path) -> Iterator["UserFile"]:
    """
    Run a file and yield it, while its code has no input and no output.

    The end restores all streams, warning filters and settings of np.errstate that the code changed.
    """
    check_file(path, "a Python file, named *.py", ".py")
    print(f"stablenorm: running the code of {path}", file=sys.stderr)
    streams = {name: getattr(sys, name) for name in _STREAMS}
    with np.errstate(), warnings.catch_warnings(), Path(os.devnull).open("r+b") as file:
        try:
            # No input: input() would wait for somebody who does not see its question.
            vars(sys).update({name: _Nothing(file, encoding="utf-8") for name in _STREAMS})
            yield UserFile(path)
        finally:
            vars(sys).update(streams)


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        self._path, self._name = path.resolve(), path.name
        # The folder stays on the path: functions may import when they are called.
        sys.path.insert(0, str(self._path.parent))
        # runpy, since an import would write __pycache__ beside the user's file.
        self._names = self.told()(runpy.run_path)(str(self._path), run_name=_MODULE)
        # Undo np.seterr(all="raise") and warnings as errors: the file means its own code only.
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        self.layers = {
            name: value
            for name, value in self._names.items()
            if inspect.isclass(value) and all(set(names) & set(dir(value)) for names in _METHODS)
        }
        own = [n for n, v in self.layers.items() if v.__module__ == _MODULE]
        # Base classes are left out: mostly they are abstract layers.
        bases = {base for name in own for base in self.layers[name].__mro__[1:]}
        self.classes = [name for name in own if self.layers[name] not in bases]

    def find(self, name: str | None, way: str, kind: str | None) -> tuple[str, Callable[..., Any]]:
        """Return the name and the function: the named one, or a forward or backward of a usual name."""
        callables = [name for name, value in self._names.items() if callable(value)]
        functions = [n for n in callables if n[0] != "_" and not inspect.isclass(self._names[n])]
        spelled = {key_of(name): name for name in functions}
        usual = (spelled[key] for key in _usual_names(way, kind) if key in spelled)
        name = name or next(usual, "")
        if name in callables:
            return name, self._names[name]
        there = ", ".join(functions) or "no functions"
        if self.classes:
            there += f", and the classes {', '.join(self.classes)}: choose one with --class"
        wanted = name or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self._name} must have {wanted}, or name one with --{way}; it has {there}"
        raise InputError(msg)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turn any error of the code into a FaultError that names the line; works as a decorator, too."""
        try:
            yield
        except (KeyboardInterrupt, MemoryError):
            raise
        # SystemExit too: exit() in a function ends the function, not the check.
        except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
            place, text = self._name, " ".join(str(error).split())[:_LONGEST].strip()
            if isinstance(error, SyntaxError):
                place, text = f"{Path(error.filename or place).name}:{error.lineno}", error.msg
            # Name the innermost line of the file itself: code that it calls is seldom to blame.
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self._path):
                    place = f"{self._name}:{frame.lineno}"
            if isinstance(error, SystemExit):
                place += "; put the script part under if __name__ == '__main__':"
            msg = " ".join(filter(None, (f"{type(error).__name__}:", text, f"at {place}")))
            raise FaultError(msg, raised=True) from None


def _usual_names(way: str, kind: str | None) -> list[str]:
    """Return the usual names of a forward or backward of a norm; names that tell the kind come first."""
    kinds = {"layer": ("layernorm", "ln"), "rms": ("rmsnorm", "rms")}
    norms = [name for own, names in kinds.items() for name in names if kind in (own, None)]
    usual = way, f"{way[0]}wd"
    # A plain `layer_norm` is a forward, mostly; a plain `rms` is seldom one.
    last = [name for name in norms if "norm" in name]
    if way == "backward":
        last = [name + end for name in norms for end in ("grad", "vjp")]
    return [*(name + end for end in usual for name in norms), *usual, *last]


class Norm(NamedTuple):
    """A norm in the form that the check takes, its signature for the report, its name that tells the kind."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], list[Any]]
    # Names among gamma and beta that the forward takes.
    takes: tuple[str, ...]
    signature: str
    name: str


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None, kind: str | None
) -> Norm:
    """Find both functions in the file and give them the usual form; ValueError if they cannot have it."""
    name, forward = file.find(forward_name, "forward", kind)
    _, backward = file.find(backward_name, "backward", kind)
    usual = roles.adapt(file.told()(forward), file.told()(backward), is_strict=True)
    return Norm(*usual, f"{roles.spelled(forward)}, {roles.spelled(backward)}", name)


def adapt_class(file: UserFile, name: str, n: int) -> Norm:
    """Give a class of the file, tried on rows of n, the form that the check takes."""
    if name not in file.layers:
        classes = ", ".join(file.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {classes}"
        raise InputError(msg)
    class_ = file.layers[name]
    trial, slots = _make(file, class_, n)
    methods = [next(m for m in names if hasattr(trial, m)) for names in _METHODS]
    asked = [roles.parameters(getattr(trial, method)) for method in methods]
    # Methods with a required flag of training get True.
    flags = [{n: True for n, needed in a.items() if needed and "train" in n} for a in asked]

    def bind(instance: Any) -> list[Callable[..., Any]]:
        both = zip(methods, flags, strict=True)
        return [file.told()(partial(getattr(instance, method), **told)) for method, told in both]

    for shape in ((2, 3, n), (6, n)):
        if not _places(slots, "gamma"):
            # The first forward may make the parameters.
            with contextlib.suppress(FaultError):
                bind(trial)[0](np.ones(shape))
            slots = _slots(trial)
    stored = [role for role in PARAMETERS if _places(slots, role)]
    # The forward may take gamma and beta with x.
    named = {
        role: name
        for name, needed in asked[0].items()
        if (role := role_of(name)) in ARGUMENTS[1:] and (needed or not _places(slots, role))
    }
    takes = tuple(role for role in PARAMETERS if role in named or role in stored)
    wanted = [name for name, needed in asked[1].items() if needed and name not in flags[1]]

    def run(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Callable[[Array], Any]]:
        """Return y and its backward."""
        instance, slots = _make(file, class_, x.shape[-1])
        forward, backward = bind(instance)
        if not all(_places(slots, role) for role in stored):
            forward(np.array(x))
            slots = _slots(instance)
        options, shapes = dict[str, Any](), dict[str, tuple[int, ...]]()
        for role, value in (("gamma", gamma), ("beta", beta), ("eps", eps)):
            if role in named:
                options[named[role]] = value
            elif value is not None and (places := _places(slots, role)):
                # The class keeps its own shape of a parameter; all its places get one array.
                shapes[role] = np.shape(places[0].value)
                parameter = np.array(value).reshape(shapes[role]) if shapes[role] else value
                for place in places:
                    place.put(parameter)
        result = forward(x, **options)
        y, *cache = result if isinstance(result, tuple) else (result,)

        def pull(dy: Array) -> list[Any]:
            returned = backward(**_arguments(wanted, x, cache, dy))
            slots = _slots(instance, takes)
            gradients = {gradient_role(s.name): s.value for s in slots if s.value is not None}
            # A single array, or a list of one, is dx, and the others are stored.
            is_one = isinstance(returned, list) and len(returned) == 1
            is_one |= isinstance(returned, np.ndarray)
            gradients |= roles.gradients_by_role(returned, () if is_one else takes)
            for role in gradients.keys() & shapes.keys():
                # A gradient may have the shape that the class gave its parameter.
                if np.shape(gradients[role]) == shapes[role]:
                    gradients[role] = np.reshape(gradients[role], -1)
            return roles.in_order(gradients, takes, returned)

        return y, pull

    # Every call makes a new instance, and a backward runs the forward again. So a cache can be used
    # twice, no gradient adds to another, and no instance is copied, which might fail.
    forward = lambda *inputs: (run(*inputs)[0], deepcopy(inputs))
    backward = lambda dy, cache: run(*deepcopy(cache))[1](dy)
    arguments = ", ".join(("x", *named.values()))
    return Norm(forward, backward, takes, f"{name}({n}).forward({arguments}), .backward(dy)", name)


def _make(file: UserFile, class_: Any, n: int) -> tuple[Any, list["_Slot"]]:
    """Return an instance for rows of n, and its slots; FaultError lists the ways that were tried."""
    # A class may want its parameters by name. With a default they are left: bias=True is a switch.
    wanted = {"eps": 1e-5, "axis": -1, "gamma": np.ones(n), "beta": np.zeros(n)}
    options = {
        name: wanted[role]
        for name, needed in roles.parameters(class_).items()
        if (role := role_of(name) or name) in wanted and (needed or role in ("eps", "axis"))
    }
    failures = []
    for arguments in ((n,), ((n,),), ()):
        try:
            instance = file.told()(class_)(*arguments, **options)
            slots = _slots(instance)
            places = _places(slots, "gamma")
            if not places or places[0].value.size == n:
                return instance, slots
            why = f"{places[0].name} does not have {n} elements"
        except FaultError as error:
            why = str(error)
        failures.append(f"{class_.__name__}({', '.join(map(str, arguments))}): {why}")
    msg = f"{class_.__name__} must be made from the length of a row, tried {'; '.join(failures)}"
    raise FaultError(msg)


def _arguments(names: list[str], x: Array, cache: Sequence[Any], dy: Array) -> dict[str, Any]:
    """Return the arguments of a backward: dy and, if it takes them, x, the cache, a learning rate of 0."""
    others = [name for name in names if role_of(name) != "x"] or names
    if key_of(others[0]) in NAMES["cache"]:
        others[:2] = others[1::-1]
    values: dict[str, Any] = dict.fromkeys(names, x) | dict.fromkeys(others, 0.0)
    if cache and len(others) > 1:
        values[others[1]] = cache[0] if len(cache) == 1 else cache
    return values | {others[0]: dy}


class _Slot(NamedTuple):
    """A value of an instance, and its name; `put` stores another value there."""

    name: str
    value: Any
    put: Callable[[Any], object]


def _slots(instance: Any, takes: Sequence[str] = PARAMETERS) -> list[_Slot]:
    """Return the values in `grads`, attributes and `params`; the last of two gradients of one name counts."""
    # Names in __slots__ may have no value yet.
    pairs = ((name, getattr(instance, name, None)) for name in dir(instance) if name[:2] != "__")
    attributes = {name: value for name, value in pairs if not callable(value)}
    members = [*_members(attributes, "parameters", PARAMETERS)]
    order = [role_of(slot.name) for slot in members]
    listed = _members(attributes, "gradients", order if set(order) == set(takes) else takes)
    named = [_Slot(n, v, partial(setattr, instance, n)) for n, v in attributes.items()] + members
    # A parameter and its gradient may be one object: its data and grad.
    objects = [s for s in named if isinstance(getattr(s.value, "data", 0), np.ndarray)]
    objects = [s for s in objects if hasattr(s.value, "grad")]
    return [
        *(s if gradient_role(s.name) else s._replace(name=f"d{s.name}") for s in listed),
        *(_Slot(f"d{name}", value.grad, put) for name, value, put in objects),
        *named,
        *(_Slot(name, value.data, partial(setattr, value, "data")) for name, value, _ in objects),
    ]


def _members(attributes: dict[str, Any], kind: str, order: Sequence[str]) -> Iterator[_Slot]:
    """Yield the members of all dicts, lists and tuples whose name is of this kind; `order` has the roles in a list."""
    for group in (value for name, value in attributes.items() if key_of(name) in NAMES[kind]):
        if isinstance(group, dict):
            yield from (_Slot(str(k), v, partial(group.__setitem__, k)) for k, v in group.items())
        elif isinstance(group, (list, tuple)):
            for i, (role, member) in enumerate(zip(order, group, strict=False)):
                # A gradient may come in a pair, after its parameter.
                is_pair = isinstance(member, tuple) and len(member) == 2
                owner, value = member if is_pair else (member, member)
                # A parameter that is an attribute as well has its name.
                same = (n for n, other in attributes.items() if other is owner and role_of(n))
                put: Any = partial(np.copyto, value)
                if isinstance(group, list):
                    put = partial(group.__setitem__, i)
                yield _Slot(next(same, role), value, put)


def _places(slots: list[_Slot], role: str) -> list[_Slot]:
    """Return the slots that hold gamma, beta or eps; empty if none does."""
    kind: Any = (int, float) if role == "eps" else np.ndarray
    places = [s for s in slots if role_of(s.name) == role and isinstance(s.value, kind)]
    places.sort(key=lambda slot: NAMES[role].index(key_of(slot.name)))
    return [slot for slot in places if slot.value is places[0].value]
