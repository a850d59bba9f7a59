"""A user's file: run once, apart from the terminal; the norm in it, functions or a class, in the usual form."""

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

# Characters of a message of the user's code: enough to recognize it, with its place, in two lines.
_LONGEST = 120
# The methods of a class that is a layer.
_METHODS = ("forward", "forward_pass", "__call__"), ("backward", "backward_pass")
# The name that the file runs under: not "__main__", and nobody's module.
_MODULE = "_checked_by_stablenorm"
_STREAMS = "stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"


class _Nothing(io.TextIOWrapper):
    """A stream without input and output."""

    def close(self) -> None:
        """Stay open: code of the file may print after it has closed its streams."""


@contextlib.contextmanager
def running(path: Path) -> Iterator["UserFile"]:
    """
    Run a file, and give its names.

    Meanwhile its code has no input and no output. What it closes or sets for the process is restored.
    """
    check_file(path, "a Python file, named *.py", ".py")
    print(f"stablenorm: running the code of {path}", file=sys.stderr)
    kept = {name: getattr(sys, name) for name in _STREAMS}
    with np.errstate(), warnings.catch_warnings(), Path(os.devnull).open("r+b") as file:
        try:
            # input() would wait for somebody who does not know that he is asked.
            vars(sys).update({name: _Nothing(file, encoding="utf-8") for name in _STREAMS})
            yield UserFile(path)
        finally:
            vars(sys).update(kept)


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        self._path, self._name = path.resolve(), path.name
        # The folder stays on the path: functions may import when they are called.
        sys.path.insert(0, str(self._path.parent))
        # A module would write __pycache__ beside the user's file.
        self._names = self.told()(runpy.run_path)(str(self._path), run_name=_MODULE)
        # A file that calls np.seterr(all="raise"), or makes warnings errors, means its own code.
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        self.layers = {
            name: value
            for name, value in self._names.items()
            if inspect.isclass(value) and all(set(names) & set(dir(value)) for names in _METHODS)
        }
        own = [n for n, v in self.layers.items() if v.__module__ == _MODULE]
        # A class that another one is made from is an abstract layer, mostly.
        bases = {base for name in own for base in self.layers[name].__mro__[1:]}
        self.classes = [name for name in own if self.layers[name] not in bases]

    def find(self, given: str | None, way: str, kind: str | None) -> tuple[str, Callable[..., Any]]:
        """Return the function of the name given, or the forward or backward of a usual name."""
        callables = [name for name, value in self._names.items() if callable(value)]
        functions = [n for n in callables if n[0] != "_" and not inspect.isclass(self._names[n])]
        spelled = {key_of(name): name for name in functions}
        usual = (spelled[key] for key in _usual_names(way, kind) if key in spelled)
        name = given or next(usual, "")
        if name in callables:
            return name, self._names[name]
        held = ", ".join(functions) or "no functions"
        if self.classes:
            held += f", and the classes {', '.join(self.classes)}: choose one with --class"
        wanted = given or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self._name} must have {wanted}, or name one with --{way}; it has {held}"
        raise InputError(msg)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Raise what the code raises as a FaultError that says where; a decorator, too."""
        try:
            yield
        except (KeyboardInterrupt, MemoryError):
            raise
        # SystemExit too: exit() in a function ends the function, not the check.
        except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
            place, text = self._name, " ".join(str(error).split())[:_LONGEST].strip()
            if isinstance(error, SyntaxError):
                place, text = f"{Path(error.filename or place).name}:{error.lineno}", error.msg
            # The innermost line of the file itself: what it calls is seldom to blame.
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == str(self._path):
                    place = f"{self._name}:{frame.lineno}"
            if isinstance(error, SystemExit):
                place += "; put what is not to be run under if __name__ == '__main__':"
            msg = " ".join(filter(None, (f"{type(error).__name__}:", text, f"at {place}")))
            raise FaultError(msg, raised=True) from None


def _usual_names(way: str, kind: str | None) -> list[str]:
    """Return what a forward or backward of a norm is called; first the names that say of which kind."""
    kinds = {"layer": ("layernorm", "ln"), "rms": ("rmsnorm", "rms")}
    norms = [name for each in kinds for name in kinds[each] if kind in (each, None)]
    usual = way, f"{way[0]}wd"
    # A plain `layer_norm` is a forward, mostly; `rms` is seldom one.
    last = [name for name in norms if "norm" in name]
    if way == "backward":
        last = [name + end for name in norms for end in ("grad", "vjp")]
    return [*(name + end for end in usual for name in norms), *usual, *last]


class Norm(NamedTuple):
    """Two functions in the form that the check takes; a signature for the reader, a name that tells the kind."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], list[Any]]
    # Names among gamma and beta that the forward takes.
    takes: tuple[str, ...]
    signature: str
    name: str


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None, kind: str | None
) -> Norm:
    """Find both functions in the file and give them the usual form; ValueError if that cannot be."""
    name, forward = file.find(forward_name, "forward", kind)
    _, backward = file.find(backward_name, "backward", kind)
    usual = roles.adapt(file.told()(forward), file.told()(backward), is_strict=True)
    return Norm(*usual, f"{roles.spelled(forward)}, {roles.spelled(backward)}", name)


def adapt_class(file: UserFile, name: str, n: int) -> Norm:
    """Give a class of the file, tried on rows of n, the form that the check takes."""
    if name not in file.layers:
        held = ", ".join(file.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {held}"
        raise InputError(msg)
    class_ = file.layers[name]
    made, slots = _make(file, class_, n)
    methods = [next(m for m in names if hasattr(made, m)) for names in _METHODS]
    asked = [roles.parameters(getattr(made, method)) for method in methods]
    # Some must be told that they are in training.
    flags = [{n: True for n, needed in each.items() if needed and "train" in n} for each in asked]

    def bind(instance: Any) -> list[Callable[..., Any]]:
        both = zip(methods, flags, strict=True)
        return [file.told()(partial(getattr(instance, method), **told)) for method, told in both]

    for shape in ((2, 3, n), (6, n)):
        if not _places(slots, "gamma"):
            # The first forward may make the parameters.
            with contextlib.suppress(FaultError):
                bind(made)[0](np.ones(shape))
            slots = _slots(made)
    stored = [role for role in PARAMETERS if _places(slots, role)]
    # Some take gamma and beta with x.
    named = {
        role: name
        for name, needed in asked[0].items()
        if (role := role_of(name)) in ARGUMENTS[1:] and (needed or not _places(slots, role))
    }
    takes = tuple(role for role in PARAMETERS if role in named or role in stored)
    wanted = [name for name, needed in asked[1].items() if needed and name not in flags[1]]

    def run(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Callable[[Array], Any]]:
        """Return y, and the backward that goes with it."""
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
                # The shape is that of the class; one array goes wherever it held one.
                shapes[role] = np.shape(places[0].value)
                given = np.array(value).reshape(shapes[role]) if shapes[role] else value
                for place in places:
                    place.put(given)
        result = forward(x, **options)
        y, *cache = result if isinstance(result, tuple) else (result,)

        def pull(dy: Array) -> list[Any]:
            returned = backward(**_arguments(wanted, x, cache, dy))
            held = _slots(instance, takes)
            found = {gradient_role(s.name): s.value for s in held if s.value is not None}
            # A single array, or a list of one, is dx, and the others are stored.
            is_one = isinstance(returned, list) and len(returned) == 1
            is_one |= isinstance(returned, np.ndarray)
            found |= roles.gradients_by_role(returned, () if is_one else takes)
            for role in found.keys() & shapes.keys():
                # The shape that the class itself gave the parameter is as it should be.
                if np.shape(found[role]) == shapes[role]:
                    found[role] = np.reshape(found[role], -1)
            return roles.in_order(found, takes, returned)

        return y, pull

    # Each call has an instance of its own, whose forward is run again for its backward: so a cache
    # can be used twice, no gradient is added to another, and nothing is copied that cannot be.
    forward = lambda *given: (run(*given)[0], deepcopy(given))
    backward = lambda dy, cache: run(*deepcopy(cache))[1](dy)
    given = ", ".join(("x", *named.values()))
    return Norm(forward, backward, takes, f"{name}({n}).forward({given}), .backward(dy)", name)


def _make(file: UserFile, class_: Any, n: int) -> tuple[Any, list["_Slot"]]:
    """Return an instance for rows of n, and what it holds; FaultError says what was tried."""
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
            instance = file.told()(class_)(*arguments, **options)
            slots = _slots(instance)
            places = _places(slots, "gamma")
            if not places or places[0].value.size == n:
                return instance, slots
            why = f"{places[0].name} does not have {n} elements"
        except FaultError as error:
            why = str(error)
        said.append(f"{class_.__name__}({', '.join(map(str, arguments))}): {why}")
    msg = f"{class_.__name__} must be made from the length of a row, tried {'; '.join(said)}"
    raise FaultError(msg)


def _arguments(names: list[str], x: Array, cache: Sequence[Any], dy: Array) -> dict[str, Any]:
    """Return what a backward is to be given: dy; of some x, or a cache, or, where a layer learns there, a rate."""
    others = [name for name in names if role_of(name) != "x"] or names
    if key_of(others[0]) in NAMES["cache"]:
        others[:2] = others[1::-1]
    given: dict[str, Any] = dict.fromkeys(names, x) | dict.fromkeys(others, 0.0)
    if cache and len(others) > 1:
        given[others[1]] = cache[0] if len(cache) == 1 else cache
    return given | {others[0]: dy}


class _Slot(NamedTuple):
    """A value that an instance holds, under a name; `put` puts another one there."""

    name: str
    value: Any
    put: Callable[[Any], object]


def _slots(instance: Any, takes: Sequence[str] = PARAMETERS) -> list[_Slot]:
    """Return what is in `grads`, in attributes and in `params`; of two gradients of one, the last counts."""
    # A slot of the class may be empty yet.
    held = ((name, getattr(instance, name, None)) for name in dir(instance) if name[:2] != "__")
    attributes = {name: value for name, value in held if not callable(value)}
    members = [*_members(attributes, "parameters", PARAMETERS)]
    order = [role_of(slot.name) for slot in members]
    listed = _members(attributes, "gradients", order if set(order) == set(takes) else takes)
    named = [_Slot(n, v, partial(setattr, instance, n)) for n, v in attributes.items()] + members
    # Some put a parameter and its gradient into an object: its data and grad.
    objects = [s for s in named if isinstance(getattr(s.value, "data", 0), np.ndarray)]
    objects = [s for s in objects if hasattr(s.value, "grad")]
    return [
        *(s if gradient_role(s.name) else s._replace(name=f"d{s.name}") for s in listed),
        *(_Slot(f"d{name}", value.grad, put) for name, value, put in objects),
        *named,
        *(_Slot(name, value.data, partial(setattr, value, "data")) for name, value, _ in objects),
    ]


def _members(attributes: dict[str, Any], what: str, order: Sequence[str]) -> Iterator[_Slot]:
    """Yield what the dicts and lists hold that are called so; a list is in this order."""
    for kept in (value for name, value in attributes.items() if key_of(name) in NAMES[what]):
        if isinstance(kept, dict):
            yield from (_Slot(str(k), v, partial(kept.__setitem__, k)) for k, v in kept.items())
        elif isinstance(kept, (list, tuple)):
            for i, (role, value) in enumerate(zip(order, kept, strict=False)):
                # A gradient may come in a pair, after its parameter.
                is_pair = isinstance(value, tuple) and len(value) == 2
                owner, held = value if is_pair else (value, value)
                # A parameter that is an attribute as well is called like that.
                same = (n for n, other in attributes.items() if other is owner and role_of(n))
                put: Any = partial(np.copyto, held)
                if isinstance(kept, list):
                    put = partial(kept.__setitem__, i)
                yield _Slot(next(same, role), held, put)


def _places(slots: list[_Slot], role: str) -> list[_Slot]:
    """Return where gamma, beta or eps is; empty if nowhere."""
    kind: Any = (int, float) if role == "eps" else np.ndarray
    found = [s for s in slots if role_of(s.name) == role and isinstance(s.value, kind)]
    found.sort(key=lambda slot: NAMES[role].index(key_of(slot.name)))
    return [slot for slot in found if slot.value is found[0].value]
