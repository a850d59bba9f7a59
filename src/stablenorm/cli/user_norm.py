"""A user's file, run once; its norm, functions or a class, in the usual form."""

import contextlib
import inspect
import itertools
import math
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import roles
from stablenorm.check.operation import FaultError, Missing, arrays_in
from stablenorm.check.roles import PARAMETERS, Pair, gradient_role, key_of, role_of
from stablenorm.cli.parts import InputError
from stablenorm.records import Array

# A class is a layer if it has a method of both lines.
_METHODS = (
    ("forward", "forward_pass", "fwd", "__call__", "call", "apply"),
    ("backward", "backward_pass", "bwd", "backprop", "grad", "vjp"),
)
# The file's __name__: not "__main__", and no other module's name.
_MODULE = "_checked_by_stablenorm"
# Names that say nothing about what they hold.
_CONTAINERS = "params", "parameters", "value", "data", "weights"
_NOWHERE = Missing("found nowhere: the backward neither returns nor stores it")


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        self._path, self._name = path.resolve(), path.name
        self.names = self._run()
        # Undo np.seterr(all="raise") and warnings as errors: the file means its own code only.
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        self.layers = {
            name: value
            for name, value in self.names.items()
            if inspect.isclass(value)
            and all(any(callable(getattr(value, n, None)) for n in names) for names in _METHODS)
        }
        own = [n for n, v in self.layers.items() if v.__module__ == _MODULE]
        # Base classes are left out: mostly they are abstract layers.
        bases = {base for name in own for base in self.layers[name].__mro__[1:]}
        self.classes = [name for name in own if self.layers[name] not in bases]

    def _run(self) -> dict[str, Any]:
        """Run the file alone or, for relative imports, as a module of its folder, of that one's folder, ..."""
        # The folder stays on the path: functions may import when they are called. No __pycache__ is left there.
        sys.path.insert(0, str(self._path.parent))
        sys.dont_write_bytecode = True
        folders = self._path.parents
        for depth in range(min(len(folders), 5)):
            try:
                if not depth:
                    return runpy.run_path(str(self._path), run_name=_MODULE)
                sys.path.insert(0, str(folders[depth]))
                module = ".".join(self._path.with_suffix("").parts[-depth - 1 :])
                return runpy.run_module(module, run_name=_MODULE)
            except (KeyboardInterrupt, MemoryError):
                raise
            except BaseException as error:  # noqa: BLE001 - whatever a user's code raises
                parents = {folder.name for folder in folders}
                is_relative = isinstance(error, ImportError) and (
                    "relative import" in str(error) or error.name in parents
                )
                if is_relative and depth < 4:
                    continue
                fault = FaultError.of(error)
                if isinstance(error, SystemExit):
                    fault.args = (f"{fault}; put the script part under if __name__ == '__main__':",)
                raise fault from None
        raise AssertionError

    def find(self, name: str | None, way: str, kind: str | None) -> tuple[str, Callable[..., Any]]:
        """Return the name and the function: the named one, or a forward or backward of a usual name."""
        callables = [name for name, value in self.names.items() if callable(value)]
        functions = [n for n in callables if n[0] != "_" and not inspect.isclass(self.names[n])]
        spelled = {key_of(name): name for name in functions}
        usual = (spelled[key] for key in _usual_names(way, kind) if key in spelled)
        name = name or next(usual, "")
        if name in callables:
            return name, self.names[name]
        there = ", ".join(functions) or "no functions"
        if self.classes:
            there += f", and the classes {', '.join(self.classes)}: choose one with --class"
        others = [
            n for n, v in self.names.items() if inspect.isclass(v) and v.__module__ == _MODULE
        ]
        if not self.classes and others:
            there += f", and the class {others[-1]} without forward(x) and backward(dy)"
        wanted = name or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self._name} must have {wanted}, or name one with --{way}; it has {there}"
        raise InputError(msg)


def _usual_names(way: str, kind: str | None) -> list[str]:
    """Return the usual names of a forward or backward of a norm; names that tell the kind come first."""
    kinds = {"layer": ("layernorm", "ln"), "rms": ("rmsnorm", "rms")}
    norms = [name for own, names in kinds.items() for name in names if kind in (own, None)]
    usual = (
        way,
        f"{way[0]}wd",
        "grad" * (way == "backward"),
        "vjp" * (way == "backward"),
        "backprop" * (way == "backward"),
    )
    # A plain `layer_norm` is a forward, mostly; a plain `rms` is seldom one.
    last = [name for name in norms if "norm" in name] if way == "forward" else []
    both = [name + end for end in usual if end for name in norms]
    return [
        *both,
        *(end + name for end in usual if end for name in norms),
        *filter(None, usual[:2]),
        *last,
    ]


class Norm(NamedTuple):
    """A norm in the form that the check takes, its signature for the report, its name that tells the kind."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], list[Any]]
    # Names among gamma and beta that the forward takes.
    takes: tuple[str, ...]
    signature: Callable[[], str]
    name: str
    # The cure to name if it raises: its constructor got a guess.
    cure: str = ""
    # Why not all parameters are judged; empty if they are.
    others: str = ""
    # Arguments whose role their name does not tell, by role; and the roles of all, by name.
    unknown: Mapping[str, str] = MappingProxyType({})
    roles: Any = None


def adapt_functions(
    file: UserFile, forward_name: str | None, backward_name: str | None, kind: str | None
) -> Norm:
    """Find both functions in the file and give them the usual form; ValueError if they cannot have it."""
    name, forward = file.find(forward_name, "forward", kind)
    try:
        _, backward = file.find(backward_name, "backward", kind)
    except InputError:
        if backward_name or file.classes:
            raise
        # The forward may return y and a function that pulls dy back.
        backward = _pullback
    return _of_pair(forward, backward, name)


def _pullback(dy: Any, cache: Any) -> Any:
    if not callable(cache):
        msg = "the file must have layer_norm_backward, or its forward return y and a function of dy"
        raise FaultError(msg)
    return cache(dy)


def _of_pair(forward: Any, backward: Any, name: str) -> Norm:
    call, pull, pair = roles.adapt(forward, backward)

    def signature() -> str:
        pulled = f", {roles.spelled(backward, pair.of_backward)}" * (backward is not _pullback)
        return roles.spelled(forward, pair.unknown and pair.of_forward) + pulled

    return Norm(
        call, pull, pair.takes, signature, name, unknown=pair.unknown, roles=pair.of_forward
    )


def adapt_class(
    file: UserFile, name: str, shape: tuple[int, ...], axes: tuple[int, ...], init: str | None
) -> Norm:
    """Give a class of the file, tried on an x of this shape, the form that the check takes."""
    if name not in file.layers:
        classes = ", ".join(file.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {classes}"
        raise InputError(msg)
    class_ = file.layers[name]
    methods = [next(m for m in names if m in dir(class_)) for names in _METHODS]
    if isinstance(inspect.getattr_static(class_, methods[0]), (staticmethod, classmethod)):
        forward, backward = (getattr(class_, method) for method in methods)
        return _of_pair(forward, backward, name)
    make, cure = _maker(file, class_, init)
    first = list[Any]()

    def prepared(x: Array, values: dict[Any, Array]) -> tuple[Any, Pair]:
        """Return a new instance with these values in its parameters, and its methods."""
        lengths = tuple(x.shape[axis] for axis in axes)
        instance = make(lengths)
        for attribute, value in getattr(instance, "__dict__", {}).copy().items():
            # A learning rate of its own: a power of two, so that its step loses no digit.
            if isinstance(value, float) and role_of(attribute, ("gamma", "rate")) == "rate":
                setattr(instance, attribute, roles.RATE)
        bound = [getattr(instance, method) for method in methods]
        if not first:
            # The same for all instances: to find them takes longer than most forwards.
            first.append((Pair.of(*bound), [inspect.signature(method) for method in bound]))
        pair, signatures = first[0]
        calls = map(roles.by_name, bound, signatures)
        pair = pair._replace(forward=next(calls), backward=next(calls))
        there = dict(arrays_in(instance))
        if not values.keys() <= there.keys():
            # The first forward makes the parameters.
            pair.call({"x": x.copy(), "eps": 1e-5})
            there = dict(arrays_in(instance))
        for path, value in values.items():
            place = there.get(path, np.zeros(0))
            if place.size != value.size:
                msg = f"{_spelled(path)} must have {value.size} elements, got {place.size}"
                raise FaultError(msg)
            np.copyto(place, value.reshape(place.shape), casting="unsafe")
        return instance, pair

    places, others = _parameters(prepared, shape, axes)
    _, pair = prepared(np.zeros(shape), {})
    takes = tuple(role for role in PARAMETERS if role in {*places.values(), *pair.takes})

    stored = list[dict[str, Any]]()

    def run(x: Array, gamma: Any, beta: Any, eps: float) -> tuple[Any, Callable[[Array], Any]]:
        """Return y and its backward."""
        values = {"gamma": gamma, "beta": beta}
        own = {path: values[role] for path, role in places.items() if values.get(role) is not None}
        instance, pair = prepared(x, own)
        y, saved = pair.call({"x": x, "eps": eps, **values})

        def pull(dy: Array) -> list[Any]:
            before = {path: (a, a.copy()) for path, a in arrays_in(instance)}
            returned = pair.pull(dy, saved)
            # A single array, or a list of one, is dx, and the others are stored.
            single = returned[0] if isinstance(returned, list) and len(returned) == 1 else returned
            gradients = roles.gradients_by_role(single, takes)
            # The first backward shows where they are: later ones may be 0, as if not stored.
            if not stored:
                stored.append(_stored_gradients(instance, before, places, dy, axes))
            there = dict(arrays_in(instance))
            found = {role: there[path] for role, path in stored[0].items() if path in there}
            for path, role in places.items():
                # A learning rate was applied, in place or not.
                if role not in stored[0] and not np.array_equal(there[path], before[path][1]):
                    found[role] = (before[path][1] - there[path]) / roles.RATE
            gradients = found | {role: g for role, g in gradients.items() if g is not None}
            for role in places.values():
                gradients.setdefault(role, _NOWHERE)
                own, given = gradients[role], np.shape(values[role])
                shapes = [np.shape(before[p][0]) for p, r in places.items() if r == role]
                if np.shape(own) in shapes and np.size(own) == np.size(values[role]):
                    gradients[role] = np.reshape(own, given)
            return roles.in_order(gradients, takes, returned)

        return y, pull

    # Every call makes a new instance, and a backward runs the forward again. So a cache can be used
    # twice, no gradient adds to another, and no instance is copied, which might fail.
    forward = lambda *inputs: (run(*inputs)[0], deepcopy(inputs))
    backward = lambda dy, cache: run(*deepcopy(cache))[1](dy)
    told = "; ".join(f"{role} is {_spelled(path)}" for path, role in places.items())
    made = init or f"{name}({'n' if len(axes) == 1 else 'shape'})"
    signature = f"{made}.{methods[0]}(x), .{methods[1]}(dy)" + f"; {told}" * bool(told)
    why = f"y depends on {', '.join(others)} too, which is no gamma and no beta" * bool(others)
    if "gamma" not in takes:
        missing = " and no ".join(role for role in PARAMETERS if role not in takes)
        why = f"no {missing} was found in {name}: --only x judges the gradient of x alone"
    return Norm(forward, backward, takes, lambda: signature, name, cure, why)


def _spelled(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _parameters(
    prepared: Callable[..., Any], shape: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[dict[tuple[str, ...], str], list[str]]:
    """Find the arrays that scale y, gamma, or shift it, beta: paths to them, their roles; and what else changes y."""
    # Several rows, of another number than columns, tell gamma from beta, and parameters from values of rows.
    n, own_axes = math.prod(shape[axis] for axis in axes), {axis % len(shape) for axis in axes}
    longer = [m if k in own_axes else max(m, 2 + k + (n == 2 + k)) for k, m in enumerate(shape)]
    x = np.random.default_rng(0).standard_normal(longer)
    instance, pair = prepared(x, {})
    arrays = dict(arrays_in(instance))
    if not any(a.size == n for a in arrays.values()):
        # The first forward may make them.
        with contextlib.suppress(Exception):
            pair.call({"x": x.copy(), "eps": 1e-5, "gamma": np.ones(n), "beta": np.zeros(n)})
        arrays = dict(arrays_in(instance))
    # One path to each array; x itself is none.
    paths = {
        id(a): path for path, a in reversed(arrays.items()) if a.size > 1 and a.dtype.kind == "f"
    }
    rng, own = np.random.default_rng(1), {}
    given = {"eps": 1e-5, "gamma": np.ones(n), "beta": np.zeros(n)}
    values = {path: rng.uniform(0.5, 1.5, arrays[path].size) for path in paths.values()}

    def y_of(x: Array, path: Any, by: float) -> Array:
        moved = values | {path: values[path] + by}
        _, pair = prepared(x, moved)
        return np.array(pair.call({"x": x.copy(), **given})[0])

    for path in paths.values():
        with contextlib.suppress(Exception):
            zero, one, two = (y_of(x, path, by) for by in (0, 1, 2))
            other = y_of(2 * x + x**2, path, 1) - y_of(2 * x + x**2, path, 0)
            step, size = one - zero, 1e-4 * np.max(np.abs(one))
            if np.max(np.abs(step)) > size:
                is_parameter = np.max(np.abs(two - one - step)) <= size and arrays[path].size == n
                is_shift = np.max(np.abs(step - other)) <= size
                own[path] = "" if not is_parameter else "beta" if is_shift else "gamma"
    # A name decides between two arrays with one role.
    order = sorted(own, key=lambda path: not any(role_of(part) == own[path] for part in path))
    chosen = {own[p]: p for p in reversed(order)}
    left = [_spelled(path) for path in own if not own[path] or path not in chosen.values()]
    return {path: role for role, path in chosen.items() if role}, left


def _stored_gradients(
    instance: Any, before: dict[Any, Any], places: dict[Any, str], dy: Array, axes: tuple[int, ...]
) -> dict[str, Any]:
    """Return by role the paths to the gradients that a backward left in an object."""
    owned = {id(before[path][0]) for path in places}
    new = {
        path: a
        for path, a in arrays_in(instance)
        if id(a) not in owned and path not in places and a.dtype.kind == "f"
        and not (path in before and a is before[path][0] and np.array_equal(a, before[path][1], equal_nan=True))
    }  # fmt: skip
    found = dict[str, Any]()
    parents = [path[:-1] for path in places]
    for path, role in places.items():
        size = before[path][0].size
        # Words of its own name; those of one letter are in every other word.
        names = [k for part in path if len(k := key_of(part)) > 1 and k not in _CONTAINERS]

        def score(
            other: tuple[str, ...], path: Any = path, role: Any = role, names: Any = names
        ) -> int:
            last, whole = key_of(other[-1]), key_of("".join(other))
            is_listed = last == key_of(path[-1]) and len(other) > 1
            is_beside = len(path) > 1 and other[:-1] == path[:-1] and parents.count(path[:-1]) == 1
            is_named = gradient_role(last) == role or role_of(last, PARAMETERS) == role
            return 2 * (is_listed or is_beside or is_named) + any(name in whole for name in names)

        # An array of the right size is preferred.
        own = sorted(
            new, key=lambda other: (score(other) > 0, new[other].size == size, score(other))
        )
        if own and score(own[-1]):
            found[role] = own[-1]
            del new[own[-1]]
    left = [role for role in PARAMETERS if role in places.values() and role not in found]
    sizes = {before[path][0].size for path in places}
    rest = [path for path, a in new.items() if a.size in sizes]
    if left and len(rest) == len(left):
        # A list without names, in either order: the gradient of beta is the sum of dy.
        summed = dy.sum(axis=tuple({*range(dy.ndim)} - {a % dy.ndim for a in axes}))
        is_beta = [np.allclose(np.ravel(new[path]), np.ravel(summed)) for path in rest]
        found |= zip(left, rest[::-1] if is_beta == [True, False] else rest, strict=True)
    return found


def _maker(
    file: UserFile, class_: Any, init: str | None
) -> tuple[Callable[[tuple[int, ...]], Any], str]:
    """Return the function that makes an instance for these lengths, and words if it had to guess."""
    if init:
        names = file.names | {"np": np}
        return lambda lengths: eval(init, names | {"n": math.prod(lengths)}), ""
    asked = roles.parameters(class_)
    required = [name for name, needed in asked.items() if needed]
    generator = np.random.default_rng(0)
    known: dict[str, Any] = {
        "eps": 1e-5,
        "axis": -1,
        "train": True,
        "others": generator,
        "beta": 0,
        "gamma": 1,
    }

    def role(name: str) -> str:
        return role_of(name, ("eps", "gamma", "beta", "train", "others")) or name

    # The first that is not known is the length of a row; for others, guesses are tried.
    unknown = [name for name in required if role(name) not in known]
    cure = ", ".join(["n", *(f"{name}=None" for name in unknown[1:])])
    cure = f'say how it is made: --init "{class_.__name__}({cure})"'
    if others := ", ".join(unknown[1:]):
        cure = f"{class_.__name__} also requires {others}; {cure}"
    works = list[int]()

    def make(lengths: tuple[int, ...]) -> Any:
        n, failures = math.prod(lengths), list[str]()
        values = known | {"gamma": np.ones(n), "beta": np.zeros(n)}
        # With a default they are left: bias=True is a switch.
        options = {
            a: values[role(a)]
            for a, needed in asked.items()
            if role(a) in values and (needed or role(a) in ("eps", "axis"))
        }
        firsts = [lengths, n] if len(lengths) > 1 else [n, lengths]
        rests = itertools.product((1e-5, generator, n), repeat=max(len(unknown) - 1, 0))
        # Nothing is required, or *args.
        ways: list[tuple[dict[str, Any], Any]] = [({}, (n,)), ({}, (lengths,)), ({}, ())]
        if unknown:
            guesses = itertools.product(firsts, rests)
            ways[:0] = [(dict(zip(unknown, (f, *rest), strict=True)), ()) for f, rest in guesses]
        # A required bias may be a switch.
        switched = {a: True if role(a) in PARAMETERS else value for a, value in options.items()}
        for k, ((named, listed), own) in enumerate(itertools.product(ways, (options, switched))):
            if works and k != works[0]:
                continue
            try:
                instance = class_(*listed, **named, **own)
            except Exception as error:  # noqa: BLE001 - whatever a constructor raises
                failures.append(str(FaultError.of(error)))
                continue
            gammas = [a.size for path, a in arrays_in(instance) if role_of(path[-1]) == "gamma"]
            if not gammas or n in gammas:
                works[:] = [k]
                return instance
            failures.append(f"its gamma does not have {n} elements")
        msg = f"{class_.__name__} cannot be made from the length of a row: {failures[0]}; {cure}"
        raise FaultError(msg)

    return make, cure * (len(unknown) > 1)
