"""A user's file, run once; its norm, functions or a class, in the usual form."""

import contextlib
import inspect
import itertools
import math
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check import roles
from stablenorm.check.operation import FaultError, Missing, Unknown, arrays_in
from stablenorm.check.roles import PARAMETERS, RATE, Pair, gradient_role, key_of, role_of
from stablenorm.cli.parts import InputError
from stablenorm.records import Array, Shape

# A class is a layer if it has a method of both lines.
_METHODS = (
    ("forward", "forward_pass", "fwd", "__call__", "call", "apply"),
    ("backward", "backward_pass", "bwd", "backprop", "grad", "vjp"),
)
# By the kind of a norm, and by the way: words of the names of functions.
_NORMS = {"layer": "layernorm|ln", "rms": "rmsnorm|rms"}
_ENDS = {"forward": "forward|fwd", "backward": "backward|bwd|grad|vjp|backprop"}
# The file's __name__: not "__main__", and no other module's name.
_MODULE = "_checked_by_stablenorm"
# Data of a file that are no parameters: arrays of more elements, longer lists and dicts.
_LARGE, _LONG = 2**16, 2**8
# Names that say nothing about what they hold.
_CONTAINERS = "params", "parameters", "value", "data", "weights"
_NOWHERE = Missing("found nowhere: the backward neither returns nor stores it")
_EARLY = Missing(
    "gamma or beta is updated before dx is computed, which depends on the learning rate"
)
_STEP = Unknown(
    "the backward changes it by a step that is not rate * gradient (Adam, a decay, a rate of its own): "
    "store the gradient, or ask for --only x"
)
Path_ = tuple[str, ...]


class UserFile:
    """A file that has been run: its functions and its classes."""

    def __init__(self, path: Path):
        self._path, self._name = path.resolve(), path.name
        self.names = self._run()
        # Undo np.seterr(all="raise") and warnings as errors: the file means its own code only.
        np.seterr(all="ignore")
        warnings.simplefilter("ignore")
        classes = {name: value for name, value in self.names.items() if inspect.isclass(value)}
        self.layers = {
            name: value
            for name, value in classes.items()
            if all(any(callable(getattr(value, n, None)) for n in names) for names in _METHODS)
        }
        self._own = [name for name, value in classes.items() if value.__module__ == _MODULE]
        layers = [name for name in self._own if name in self.layers]
        # Base classes are left out: mostly they are abstract layers.
        bases = {base for name in layers for base in self.layers[name].__mro__[1:]}
        self.classes = [name for name in layers if self.layers[name] not in bases]

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
                fault = FaultError.of(error)
                if isinstance(error, ImportError) and depth < 4:
                    names = {folder.name for folder in folders}
                    if "relative import" in str(error) or error.name in names:
                        continue
                if isinstance(error, (SystemExit, EOFError)):
                    fault.args = (f"{fault}; put the script part under if __name__ == '__main__':",)
                raise fault from None
        raise AssertionError

    def find(self, name: str | None, way: str, kind: str | None) -> tuple[str, Callable[..., Any]]:
        """Return the name and the function: the named one, or a forward or backward of a usual name."""
        callables = [name for name, value in self.names.items() if callable(value)]
        functions = [n for n in callables if n[0] != "_" and not inspect.isclass(self.names[n])]
        name = name or next(_usual(functions, way, kind), "")
        if name in callables:
            return name, self.names[name]
        there = ", ".join(functions) or "no functions"
        if self.classes:
            there += f", and the classes {', '.join(self.classes)}: choose one with --class"
        elif self._own:
            there += f", and the class {self._own[-1]} without forward(x) and backward(dy)"
        wanted = name or f"{kind or 'layer'}_norm_{way}"
        msg = f"{self._name} must have {wanted}, or name one with --{way}; it has {there}"
        raise InputError(msg)


def _usual(functions: list[str], way: str, kind: str | None) -> Iterator[str]:
    """Yield functions whose names are usual for one way of a norm; names that tell the kind come first."""
    ends = _ENDS[way]
    for norms in [_NORMS[kind]] if kind else _NORMS.values():
        for form in (f"({norms})({ends})", f"({ends})({norms})"):
            yield from (name for name in functions if re.fullmatch(form, key_of(name)))
    # A plain `layer_norm` is a forward, mostly; a plain `rms` is seldom one.
    plain = "|forward|fwd|layernorm|rmsnorm" if way == "forward" else "|backward|bwd"
    yield from (n for word in plain.split("|")[1:] for n in functions if key_of(n) == word)


class Norm(NamedTuple):
    """A norm in the form that the check takes, its signature for the report, its name that tells the kind."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[[Array, Any], list[Any]]
    # Names among gamma and beta that the forward takes.
    takes: tuple[str, ...]
    signature: Callable[[], str]
    name: str
    # The cure to name if it raises: its constructor, or a dict that it takes, got a guess.
    cure: str = ""
    # Why not all parameters are judged; empty if they are.
    others: str = ""


def adapt_functions(
    file: UserFile, names: tuple[str | None, str | None], kind: str | None, shape: Any, axes: Any
) -> Norm:
    """Find both functions in the file and give them the usual form; ValueError if they cannot have it."""
    name, forward = file.find(names[0], "forward", kind)
    try:
        _, backward = file.find(names[1], "backward", kind)
    except InputError:
        if names[1] or file.classes:
            raise
        # The forward may return y and a function that pulls dy back.
        backward = _pullback
    return _of_functions(forward, backward, name, shape, axes)


def _pullback(dy: Any, cache: Any) -> Any:
    if not callable(cache):
        msg = "the file must have layer_norm_backward, or its forward return y and a function of dy"
        raise FaultError(msg)
    return cache(dy)


def _of_functions(forward: Any, backward: Any, name: str, shape: Any, axes: Any) -> Norm:
    call, pull, pair = roles.adapt(forward, backward)
    settings = [n for n, role in pair.of_forward.items() if role == "settings"]
    is_inside = settings and "gamma" not in pair.of_forward.values()
    cure = f"the forward takes {settings[0]}: {roles.WRAP}" if is_inside else ""
    unknown = {r: n for n, r in pair.of_forward.items() if r in PARAMETERS and not role_of(n)}
    held = {n: v for n, v in getattr(forward, "__globals__", {}).items() if _is_data(n, v)}
    subject = _Subject(lambda _: (forward, backward, [None, held]), pair, axes)
    places = {} if "gamma" in pair.takes else subject.find(shape)[0]
    if unknown and axes == (-1,):
        _exchange(pair, unknown, subject.draw(shape))

    def signature() -> str:
        pulled = f", {roles.spelled(backward, pair.of_backward)}" * (backward is not _pullback)
        return roles.spelled(forward, unknown and pair.of_forward) + pulled + _told(places)

    if places:
        return subject.norm(signature, name, cure)
    is_hidden = held and "gamma" not in pair.takes
    why = "no gamma was found: --only x judges the gradient of x alone" * bool(is_hidden)
    return Norm(call, pull, pair.takes, signature, name, cure, why)


def _told(places: dict[Path_, str]) -> str:
    return "".join(f"; {role} is {_spelled(path)}" for path, role in places.items())


def _is_data(name: str, value: Any) -> bool:
    """Tell whether a name of a module holds what may hold a parameter."""
    no_data = ModuleType, str, int, float, np.number, tuple, type(None)
    if name[:2] == "__" or callable(value) or isinstance(value, no_data):
        return False
    return not isinstance(value, (list, dict)) or len(value) <= _LONG


def _exchange(pair: Pair, unknown: dict[str, str], x: Array) -> None:
    """Exchange the roles of arguments of unknown names if gamma shifts y; FaultError if one does neither."""
    n = x.shape[-1]
    given: dict[str, Any] = {"gamma": np.linspace(0.5, 1.5, n), "beta": np.linspace(-1, 1, n)}
    acts = dict[str, str]()
    for role, name in unknown.items():

        def y_of(x: Array, by: float, role: str = role) -> Any:
            return pair.call(given | {"x": x, "eps": 1e-5, role: given[role] + by})[0]

        try:
            acts[role] = _act(y_of, x)
        except Exception as error:  # noqa: BLE001 - whatever a user's code raises
            raise FaultError.of(error) from None
        if acts[role] not in PARAMETERS:
            msg = f"the forward takes {name}, which neither scales nor shifts y: {roles.WRAP}"
            raise FaultError(msg)
    if acts == {"gamma": "beta", "beta": "gamma"}:
        pair.of_forward.update({unknown["gamma"]: "beta", unknown["beta"]: "gamma"})


def _act(y_of: Callable[[Array, float], Any], x: Array) -> str:
    """Tell whether a step in a parameter scales y, "gamma", shifts it, "beta", does nothing, "none", or what else."""
    zero, one, two = (np.array(y_of(x.copy(), by)) for by in (0, 1, 2))
    step, near = one - zero, 1e-4 * np.max(np.abs(one))
    if not np.max(np.abs(step)) > near:
        return "none"
    other = 2 * x + x**2
    apart = y_of(other.copy(), 1) - np.array(y_of(other.copy(), 0)) - step
    is_linear = np.max(np.abs(two - one - step)) <= near
    return ("gamma", "beta")[int(np.max(np.abs(apart)) <= near)] if is_linear else ""


def adapt_class(file: UserFile, name: str, shape: Any, axes: Any, init: str | None) -> Norm:
    """Give a class of the file, tried on an x of this shape, the form that the check takes."""
    if name not in file.layers:
        classes = ", ".join(file.classes) or "none"
        msg = f"--class must be a class with forward(x) and backward(dy), got {name}; it has {classes}"
        raise InputError(msg)
    class_ = file.layers[name]
    methods = [next(m for m in names if m in dir(class_)) for names in _METHODS]
    if isinstance(inspect.getattr_static(class_, methods[0]), (staticmethod, classmethod)):
        forward, backward = (getattr(class_, method) for method in methods)
        return _of_functions(forward, backward, name, shape, axes)
    make, cure = _maker(file, class_, init)
    held = {n: v for n, v in file.names.items() if _is_data(n, v)}

    def made(lengths: Shape) -> Any:
        instance = make(lengths)
        return *(getattr(instance, method) for method in methods), [instance, held]

    subject = _Subject(made, None, axes)
    places, others = subject.find(shape)
    form = init or f"{name}({'n' if len(axes) == 1 else 'shape'})"
    signature = f"{form}.{methods[0]}(x), .{methods[1]}(dy)" + _told(places)
    norm = subject.norm(lambda: signature, name, cure)
    why = f"y depends on {', '.join(others)} too, which is no gamma and no beta" * bool(others)
    if "gamma" not in norm.takes:
        missing = " and no ".join(role for role in PARAMETERS if role not in norm.takes)
        why = f"no {missing} was found in {name}: --only x judges the gradient of x alone"
    return norm._replace(others=why)


def _spelled(path: Path_) -> str:
    # Without the places in what is searched.
    return ".".join(path).removeprefix("0.").removeprefix("1.")


class _Subject:
    """
    A norm whose parameters are held by something: an object, or the module of functions.

    `make` returns the forward, the backward and the holder for these lengths of the normalized axes.
    """

    def __init__(self, make: Callable[[Shape], Any], pair: Pair | None, axes: Any):
        self._make, self._pair, self._axes = make, pair, axes
        # Paths to the parameters, their roles, and paths to their gradients by role.
        self.places: dict[Path_, str] = {}
        self._stored: dict[str, Path_] | None = None

    def draw(self, shape: Shape) -> Array:
        """Draw an x like this with more rows than one, of another number than columns, which tell gamma from beta."""
        own = {axis % len(shape) for axis in self._axes}
        n = math.prod(shape[axis] for axis in own)
        longer = [m if k in own else max(m, 2 + k + (n == 2 + k)) for k, m in enumerate(shape)]
        return np.random.default_rng(0).standard_normal(longer)

    def _prepared(
        self, x: Array, values: dict[Path_, Array], rate: float = RATE
    ) -> tuple[Pair, Any]:
        """Return the functions, with these values in the parameters, and the holder."""
        forward, backward, held = self._make(tuple(x.shape[axis] for axis in self._axes))
        for name, value in getattr(held[0], "__dict__", {}).copy().items():
            # A learning rate of its own.
            if isinstance(value, float) and role_of(name, ("gamma", "rate")) == "rate":
                setattr(held[0], name, rate)
        # The same for all instances: to find them takes longer than most forwards.
        self._pair = pair = (self._pair or Pair.of(forward, backward))._replace(
            forward=forward, backward=backward
        )
        there = dict(arrays_in(held))
        if not values.keys() <= there.keys():
            # The first forward makes the parameters.
            pair.call({"x": x.copy(), "eps": 1e-5})
            there = dict(arrays_in(held))
        for path, value in values.items():
            place = there.get(path, np.zeros(0))
            if place.size != value.size:
                msg = f"{_spelled(path)} must have {value.size} elements, got {place.size}"
                raise FaultError(msg)
            np.copyto(place, value.reshape(place.shape), casting="unsafe")
        return pair, held

    def find(self, shape: Shape) -> tuple[dict[Path_, str], list[str]]:
        """Find the arrays that scale y, gamma, or shift it, beta; return them, and what else changes y."""
        x = self.draw(shape)
        n = math.prod(shape[axis] for axis in self._axes)
        given = {"eps": 1e-5, "gamma": np.ones(n), "beta": np.zeros(n)}
        pair, held = self._prepared(x, {})
        arrays = dict(arrays_in(held))
        if not any(a.size == n for a in arrays.values()):
            # The first forward may make them.
            with contextlib.suppress(Exception):
                pair.call(given | {"x": x.copy()})
            arrays = dict(arrays_in(held))
        # One path to each array that may be a parameter.
        kept = {
            path: a.copy()
            for path, a in arrays.items()
            if 1 < a.size <= _LARGE and a.dtype.kind == "f" and a.flags.writeable
        }
        paths = {id(arrays[path]): path for path in reversed(kept)}
        rng, acts = np.random.default_rng(1), dict[Path_, str]()
        values = {path: rng.uniform(0.5, 1.5, kept[path].size) for path in paths.values()}
        for path in paths.values():

            def y_of(x: Array, by: float, path: Path_ = path) -> Any:
                pair, _ = self._prepared(x, values | {path: values[path] + by})
                return pair.call(given | {"x": x})[0]

            with contextlib.suppress(Exception):
                if (act := _act(y_of, x)) != "none":
                    acts[path] = act if kept[path].size == n else ""
        # Data of the module, which are no parameters, get their values back.
        for path, a in kept.items():
            np.copyto(arrays[path], a)
        # A name decides between two arrays with one role.
        order = sorted(acts, key=lambda path: not any(role_of(part) == acts[path] for part in path))
        chosen = {acts[path]: path for path in reversed(order) if acts[path]}
        named = [role_of(chosen[role][-1], PARAMETERS) for role in PARAMETERS if role in chosen]
        if named == [*PARAMETERS[::-1]]:
            # Both names say the opposite of what they do: the mistake is in the forward.
            chosen = dict(zip(chosen, reversed(chosen.values()), strict=True))
        self.places = {path: role for role, path in chosen.items()}
        return self.places, [_spelled(path) for path in acts if path not in self.places]

    def _run(self, inputs: Any, rate: float = RATE) -> tuple[Any, Callable[[Array], Any]]:
        """Return y of (x, gamma, beta, eps), and the backward: gradients and steps by role, what was returned."""
        named = dict(zip(("x", *PARAMETERS, "eps"), inputs, strict=True))
        own = {p: named[role] for p, role in self.places.items() if named[role] is not None}
        pair, held = self._prepared(named["x"], own, rate)
        y, saved = pair.call(named)

        def pull(dy: Array) -> tuple[dict[str, Any], dict[str, Any], Any]:
            before = {path: (a, a.copy()) for path, a in arrays_in(held)}
            returned = pair.pull(dy, saved, rate)
            there = dict(arrays_in(held))
            # The first backward shows where they are: later ones may be 0, as if not stored.
            if self._stored is None:
                self._stored = _stored_gradients(there, before, self.places, dy, self._axes)
            gradients: dict[str, Any] = {
                role: there[path] for role, path in self._stored.items() if path in there
            }
            by_role = roles.gradients_by_role(returned, self.takes)
            gradients |= {role: g for role, g in by_role.items() if g is not None}
            steps = dict[str, Any]()
            for path, role in self.places.items():
                old, new, given = before[path][1], there[path], named[role]
                if role not in gradients and not np.array_equal(old, new):
                    gradients[role] = steps[role] = (old - new) / rate
                gradient = gradients.setdefault(role, _NOWHERE)
                if np.shape(gradient) == old.shape and old.size == np.size(given):
                    gradients[role] = np.reshape(gradient, np.shape(given))
            return gradients, steps, returned

        return y, pull

    def _pull(self, dy: Array, inputs: Any) -> list[Any]:
        """Run forward and backward; a gradient that is only applied is believed if the step is rate * gradient."""
        gradients, steps, returned = self._run(deepcopy(inputs))[1](dy.copy())
        if steps:
            faster, faster_steps, _ = self._run(deepcopy(inputs), 2 * RATE)[1](dy.copy())
            _, twice, _ = self._run(deepcopy(inputs))[1](2 * dy)
            for role, step in steps.items():
                apart = faster_steps.get(role, 0) - step, twice.get(role, 0) / 2 - step
                if np.max(np.abs(apart)) > 1e-4 * np.max(np.abs(step)):
                    gradients[role] = _STEP
            if not np.array_equal(faster["x"], gradients["x"]):
                gradients["x"] = _EARLY
        return roles.in_order(gradients, self.takes, returned)

    @property
    def takes(self) -> tuple[str, ...]:
        """Which of gamma and beta there are."""
        there = {*self.places.values(), *(self._pair.takes if self._pair else ())}
        return tuple(role for role in PARAMETERS if role in there)

    def norm(self, signature: Callable[[], str], name: str, cure: str) -> Norm:
        """
        Return the norm.

        Every call makes a new instance, and a backward runs the forward again. So a cache can be used
        twice, no gradient adds to another, and no instance is copied, which might fail.
        """
        forward = lambda *inputs: (self._run(inputs)[0], deepcopy(inputs))
        return Norm(forward, self._pull, self.takes, signature, name, cure)


def _stored_gradients(
    there: dict[Path_, Array],
    before: dict[Path_, Any],
    places: dict[Path_, str],
    dy: Array,
    axes: Any,
) -> dict[str, Path_]:
    """Return by role the paths to the gradients that a backward left in the holder."""
    owned = {id(before[path][0]) for path in places}
    new = {
        path: a
        for path, a in there.items()
        if id(a) not in owned and path not in places and a.dtype.kind == "f"
        and not (path in before and a is before[path][0] and np.array_equal(a, before[path][1], equal_nan=True))
    }  # fmt: skip
    found, parents = dict[str, Path_](), [path[:-1] for path in places]
    # Other arrays may be moments of an optimizer, if the parameters change.
    if any(not np.array_equal(there[path], before[path][1]) for path in places):
        new = {path: a for path, a in new.items() if gradient_role(path[-1])}
    for path, role in places.items():
        # Words of its own name; those of one letter are in every other word.
        names = [k for part in path if len(k := key_of(part)) > 1 and k not in _CONTAINERS]

        def score(other: Path_, path: Any = path, role: Any = role, names: Any = names) -> int:
            last, whole = key_of(other[-1]), key_of("".join(other))
            is_listed = last == key_of(path[-1]) and len(other) > 2
            is_beside = other[:-1] == path[:-1] and len(path) > 2 and parents.count(path[:-1]) == 1
            is_named = role in (gradient_role(last), role_of(last, PARAMETERS))
            return 2 * (is_listed or is_beside or is_named) + any(name in whole for name in names)

        # An array of the right size is preferred.
        rank = lambda other, path=path, score=score: (
            score(other) > 0, new[other].size == before[path][0].size, score(other)
        )  # fmt: skip
        if new and score(best := max(new, key=rank)):
            found[role] = best
            del new[best]
    left = [role for role in PARAMETERS if role in places.values() and role not in found]
    sizes = {before[path][0].size for path in places}
    rest = [path for path, a in new.items() if a.size in sizes]
    if left and len(rest) == len(left):
        # A list without names, in either order: the gradient of beta is the sum of dy.
        summed = dy.sum(axis=tuple({*range(dy.ndim)} - {a % dy.ndim for a in axes}))
        is_beta = [np.allclose(np.ravel(new[path]), np.ravel(summed)) for path in rest]
        found |= zip(left, rest[::-1] if is_beta == [True, False] else rest, strict=True)
    return found


def _maker(file: UserFile, class_: Any, init: str | None) -> tuple[Callable[[Shape], Any], str]:
    """Return the function that makes an instance for these lengths, and words if it had to guess."""
    if init:
        names = file.names | {"np": np}
        return lambda lengths: eval(init, names | {"n": math.prod(lengths)}), ""
    # Role and whether it is required. The first of no known role is the length of a row.
    known = "eps", "axis", *PARAMETERS, "train", "others"
    asked = {n: (role_of(n, known), needed) for n, needed in roles.parameters(class_).items()}
    unknown = [name for name, (role, needed) in asked.items() if needed and not role]
    cure = ", ".join(["n", *(f"{name}=None" for name in unknown[1:])])
    cure = f'say how it is made: --init "{class_.__name__}({cure})"'
    if others := ", ".join(unknown[1:]):
        cure = f"{class_.__name__} also requires {others}; {cure}"

    def make(lengths: Shape) -> Any:
        n, failures, generator = math.prod(lengths), list[str](), np.random.default_rng(0)
        # A required bias may be a switch.
        values: dict[str, list[Any]] = {
            "eps": [1e-5], "axis": [-1], "train": [True], "others": [generator],
            "gamma": [np.ones(n), True], "beta": [np.zeros(n), True],
            "": [*[lengths] * (len(lengths) > 1), n, lengths, 1e-5, generator],
        }  # fmt: skip
        # With a default they are left: bias=True is a switch.
        guesses = {
            name: values[role]
            for name, (role, needed) in asked.items()
            if needed or role in ("eps", "axis")
        }
        # Nothing is required, or *args.
        firsts = [()] if unknown else [(n,), (lengths,), ()]
        for own, first in itertools.product(itertools.product(*guesses.values()), firsts):
            try:
                instance = class_(*first, **dict(zip(guesses, own, strict=True)))
            except Exception as error:  # noqa: BLE001 - whatever a constructor raises
                failures.append(str(FaultError.of(error)))
                continue
            gammas = [a.size for path, a in arrays_in(instance) if role_of(path[-1]) == "gamma"]
            if not gammas or n in gammas:
                return instance
            failures.append(f"its gamma does not have {n} elements")
        msg = f"{class_.__name__} cannot be made from the length of a row: {failures[0]}; {cure}"
        raise FaultError(msg)

    return make, cure * (len(unknown) > 1)
