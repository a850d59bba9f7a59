"""Arguments of a norm by role: by their names or, where names leave it open, by their order."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenorm.check.operation import FaultError
from stablenorm.output import described

Function = Callable[..., Any]
ARGUMENTS, PARAMETERS = ("x", "gamma", "beta", "eps"), ("gamma", "beta")
# Names by role, compared without underscores and capitals. "settings" is a dict with eps, or gamma and beta.
_NAMES = {
    "settings": "lnparam lnparams param params config cfg options opts",
    "x": "x inp input inputs data xin features hidden hiddenstates z src tensor a activations",
    "gamma": "gamma weight scale g w gain weights scaler lnweight lnw alpha a2 gammas lngamma",
    "beta": "beta bias b shift offset biases intercept lnbias lnb b2 betas lnbeta",
    "eps": "eps epsilon e varianceepsilon lnepsilon lneps variance_epsilon",
    "out": "out y output outp result",
    "cache": "cache ctx saved context memo state tape cached res residuals savedtensors stash aux intermediates store caches",
    "dy": "dy dout grad gradoutput gradout upstream dldy dout gy ct cotangent delta dz dnext doutput gradoutputs outgrad error err v ybar g",
    "train": "training train istraining trainmode mode",
    "rate": "rate learningrate lr eta stepsize alpha",
    "shape": "normalizedshape shape",
    "axis": "axis axes",
    # Arguments that no norm of one x has: such code is refused by name.
    "others": "residual skip shortcut identity mask attentionmask attnmask paddingmask dropout rng key generator where keepprob prob p rate",
}
NAMES = {role: names.split() for role, names in _NAMES.items()}
# Names of gradients, with a prefix or suffix: dx, dweight, grad_bias, dL_dx, weight_grad.
_GRADIENTS = {
    role: re.compile(
        r"(?:dld|dl|gradients?|grads?|d|g|delta|nabla)({0})|({0})(?:grad|gradient|g)".format(
            "|".join(NAMES[role])
        )
    )
    for role in ARGUMENTS[:3]
}
# A learning rate: a power of two, so that a step loses no digit.
RATE = 2.0**20
WRAP = "wrap it in functions of (x, gamma, beta, eps), as the page on checking shows"


def key_of(name: object) -> str:
    """Return the name as it is compared: underscores and capitals are a matter of taste."""
    return str(name).replace("_", "").lower()


def role_of(name: object, roles: Sequence[str] = ("settings", *ARGUMENTS)) -> str:
    """Return the role of an argument, among `roles`; empty for a name that is not known."""
    return next((role for role in roles if key_of(name) in NAMES[role]), "")


def gradient_role(name: object) -> str:
    """Return x, gamma or beta for dx, dweight, grad_bias, ...; empty for anything else."""
    return next((r for r, names in _GRADIENTS.items() if names.fullmatch(key_of(name))), "")


def parameters(function: Function) -> dict[str, bool]:
    """Return the parameters except *args and **options, and whether each is required."""
    by_name = inspect.signature(function).parameters
    return {n: p.default is p.empty for n, p in by_name.items() if not str(p).startswith("*")}


def call_by_name(function: Function, values: dict[str, Any]) -> Any:
    """Call a function with values for some of its parameters, by position where that is the only way."""
    bound = inspect.BoundArguments(inspect.signature(function), values)
    return function(*bound.args, **bound.kwargs)


def gradients_by_role(
    returned: Any, takes: Sequence[str], order: Sequence[str] = ()
) -> dict[str, Any]:
    """
    Return the gradients that come by name or, as many as there are, in order; else nothing.

    `order` has the roles of all arguments of the forward: torch wants a result for each.
    """
    named = returned._asdict() if hasattr(returned, "_asdict") else returned
    if isinstance(named, Mapping):
        gradients = {gradient_role(name) or role_of(name): v for name, v in named.items()}
        if "x" in gradients or not isinstance(returned, tuple):
            return gradients
    # dx, and the others together.
    if isinstance(returned, tuple) and len(returned) == 2:
        dx, others = returned
        if isinstance(others, Mapping):
            return gradients_by_role({"dx": dx, **others}, takes)
        if isinstance(others, (tuple, list)) and len(others) == len(takes):
            returned = (dx, *others)
    if isinstance(returned, np.ndarray):
        return {"x": returned}
    if not isinstance(returned, (tuple, list)):
        return {}
    # Some return all three, with None for a missing parameter.
    names = {len(order): order, 3: ARGUMENTS[:3], 1 + len(takes): ("x", *takes), 1: ("x",)}
    return dict(zip(names.get(len(returned), ()), returned, strict=False))


class _Context:
    """The ctx of a static forward, as torch has it."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad = (True,) * 9

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep what the backward needs."""
        self.saved_tensors = tensors


class _Settings(dict[str, Any]):
    """A dict of eps under all its names, in which gamma and beta are found as well."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(dict.fromkeys(NAMES["eps"], values.get("eps")))
        self._values = values

    def __missing__(self, name: str) -> Any:
        """Return the parameter of this name."""
        return self._values[role_of(name, PARAMETERS)]


class Pair(NamedTuple):
    """A forward and its backward, and the role of each of their arguments, by its name."""

    forward: Function
    backward: Function
    of_forward: dict[str, str]
    of_backward: dict[str, str]

    @classmethod
    def of(cls, forward: Function, backward: Function) -> "Pair":
        """Find the roles; ValueError if an argument has none."""
        of_forward = _of_forward(forward)
        return cls(forward, backward, of_forward, _of_backward(backward, of_forward))

    @property
    def takes(self) -> tuple[str, ...]:
        """Which of gamma and beta the forward takes, as an argument or in its settings."""
        roles = {*self.of_forward.values()}
        if "settings" in roles and hasattr(self.forward, "__code__"):
            words = [c for c in self.forward.__code__.co_consts if isinstance(c, str)]
            roles |= {role_of(word, PARAMETERS) for word in words}
        return tuple(role for role in PARAMETERS if role in roles)

    def call(self, values: dict[str, Any]) -> tuple[Any, Any]:
        """Return y and what the backward may need: values by role or name, and results after y."""
        x, roles = values["x"], [*self.of_forward.values()]
        values = values | {
            "settings": _Settings(values), "cache": _Context(), "train": True,
            "out": np.zeros_like(x), "shape": x.shape[-1:],
        }  # fmt: skip
        rows = x.size // x.shape[-1], x.shape[-1]
        sizes = iter({x.ndim: x.shape, 1: x.shape[-1:]}.get(roles.count("size"), rows))
        for name, role in self.of_forward.items():
            buffer = next(sizes) if role == "size" else np.zeros(x.shape[:-1])
            values[name] = values.get(role, buffer)
        result = call_by_name(self.forward, {name: values[name] for name in self.of_forward})
        wanted = {
            *self.of_backward,
            *(role.removeprefix("d") for role in self.of_backward.values()),
        }
        kept = {name: value for name, value in values.items() if name in wanted and name != "cache"}
        if "out" in roles:
            return values["out"], (kept, [])
        if "cache" in roles:
            return result, (kept, [values["cache"]])
        y, *saved = result if isinstance(result, (tuple, list)) else (result,)
        return y, (kept, saved)

    def pull(self, dy: Any, cache: Any, rate: float = RATE) -> Any:
        """Return what the backward returns; gradients that it writes into arguments, by their names."""
        (values, saved), roles = cache, self.of_backward
        values, results = values | {"dy": dy, "rate": rate}, [*roles.values()].count("result")
        if len(saved) == 1 and results > 1 and isinstance(saved[0], (tuple, list)):
            saved = [*saved[0]]
        # All but dy may come from the cache, gamma too, of the shape that it has.
        own_names = [name for name, role in roles.items() if role != "dy"]
        if results and len(saved) == len(own_names) > results:
            stored = dict(zip(own_names, saved, strict=True))
            if all(np.shape(stored[n]) == np.shape(values[n]) for n in own_names if n in values):
                values, saved = values | stored, []
        if results and len(saved) not in (0, results):
            msg = f"the forward must return y and the {results} that the backward takes of it, got y and {len(saved)}"
            raise FaultError(msg)
        if "cache" in roles.values() and not saved:
            msg = "the forward must return (y, cache), got y alone"
            raise FaultError(msg)
        values["cache"] = saved[0] if len(saved) == 1 else tuple(saved)
        left, own, written = iter(saved), dict[str, Any](), dict[str, Any]()
        for name, role in roles.items():
            if role[:1] == "d" and role != "dy":
                own[name] = written[name] = np.zeros_like(values.get(role[1:], dy))
            elif role in ("dy", "cache", "rate") or name not in values:
                # Without results, what remains is a learning rate.
                own[name] = values[role] if role in values else next(left, rate)
            else:
                own[name] = values[name]
        returned = call_by_name(self.backward, own)
        return written if returned is None and written else returned


def _of_forward(forward: Function) -> dict[str, str]:
    """Return the roles of the arguments that a forward gets, by name."""
    is_required = parameters(forward)
    roles, unknown = dict[str, str](), list[str]()
    is_output = any(needed and role_of(name, ("out",)) for name, needed in is_required.items())
    known = "cache", "settings", *ARGUMENTS, "train", "shape", *["out"] * is_output
    for name, needed in is_required.items():
        role = role_of(name, known)
        if role_of(name, ("others",)) and needed:
            msg = f"the forward takes {name}: {WRAP}"
            raise ValueError(msg)
        # The first of several names for one role: a `scale` beside gamma has a default of its own.
        is_new = role and role not in roles.values()
        if is_new and (needed or role not in ("cache", "settings", "shape")):
            roles[name] = role
        elif (
            needed and name.isupper() and len(name) == 1 and (role == "beta" or name not in "XGWB")
        ):
            roles[name] = "size"
        elif needed and is_output:
            roles[name] = "buffer"
        elif needed:
            roles[name] = ""
            unknown.append(name)
    # Arguments of unknown names get the remaining roles, in order.
    left = [role for role in ARGUMENTS if role not in roles.values()]
    if len(unknown) > len(left) or "x" not in {*roles.values(), *left[: len(unknown)]}:
        msg = f"the forward must take (x, gamma, beta, eps), got {spelled(forward)}"
        raise ValueError(msg)
    return roles | dict(zip(unknown, left, strict=False))


def _of_backward(backward: Function, of_forward: dict[str, str]) -> dict[str, str]:
    """Return the roles of the arguments that a backward gets: dy, cache, "dx" to be written, results, ..."""
    is_required = parameters(backward)
    needed = [name for name, is_needed in is_required.items() if is_needed]
    usual = [name for name in needed if role_of(name, ("dy",))]
    # A cotangent that comes first may be called g, like a gamma.
    dy = next((n for n in usual if key_of(n) != "g" or n == needed[0]), usual[-1] if usual else "")
    others = [name for name in needed if name != dy and name not in of_forward]
    cache = next((name for name in others if role_of(name, ("cache",))), "")
    rates = [n for n in is_required if n not in of_forward and role_of(n, ("rate",))]
    roles = {dy: "dy", cache: "cache"} | dict.fromkeys(rates, "rate")
    roles.pop("", None)
    open_names = list[str]()
    for name in (name for name in is_required if name not in roles):
        role = of_forward.get(name) or role_of(name)
        is_own = name in of_forward or role not in roles.values()
        if "out" in of_forward.values() and (written := gradient_role(name)):
            roles[name] = f"d{written}"
        elif role and (name in needed or role == "eps") and is_own:
            roles[name] = role
        elif name in needed:
            open_names.append(name)
    if not dy and open_names:
        roles[open_names.pop(0)] = "dy"
    if len(needed) == 2 and len(open_names) == 1 and len(roles) == 1:
        roles[open_names.pop()] = "cache"
    roles |= {n: "train" if role_of(n, ("train",)) else "result" for n in open_names}
    if "dy" not in roles.values():
        msg = f"the backward must take (dy, cache), or dy, x and more by name, got {spelled(backward)}"
        raise ValueError(msg)
    return {name: roles[name] for name in is_required if name in roles}


def spelled(function: Function, roles: Mapping[str, str] | None = None) -> str:
    """Write how a function is called; roles are added to names that do not tell them."""
    told = []
    for parameter in inspect.signature(function).parameters.values():
        name = re.split("[:=]", str(parameter))[0]
        role = (roles or {}).get(name, "")
        is_open = role in ("dy", "cache", *PARAMETERS) and not role_of(name, (role,))
        told.append(name + f": {role}" * is_open)
    return f"{getattr(function, '__name__', 'a function')}({', '.join(told)})"


def in_order(named: Mapping[str, Any], takes: Sequence[str], returned: Any) -> list[Any]:
    """Return dx, dgamma and dbeta, or FaultError without dx."""
    if named.get("x") is None:
        wanted = ", ".join(f"d{role}" for role in ("x", *takes))
        msg = f"the backward must return {wanted}, got {described(returned)}"
        # A tuple of another length does not tell which gradient is missing.
        raise FaultError(msg + ": no dx" * isinstance(returned, Mapping))
    return [named.get(role) for role in ARGUMENTS[:3]]


def adapt(forward: Function, backward: Function) -> tuple[Function, Function, Pair]:
    """Return forward(x, gamma, beta, eps), backward(dy, cache) and the roles, or ValueError says why not."""
    pair = Pair.of(forward, backward)
    # Two arguments without known names: the first call that works decides which one is dy.
    is_told = any(role_of(name, ("dy", "cache")) for name in pair.of_backward)
    orders = [pair.of_backward]
    if {*pair.of_backward.values()} == {"dy", "cache"} and not is_told:
        one, other = pair.of_backward
        orders.append({one: "cache", other: "dy"})

    def call(*values: Any) -> tuple[Any, Any]:
        return pair.call(dict(zip(ARGUMENTS, values, strict=True)))

    def pull(dy: Any, cache: Any) -> list[Any]:
        faults = list[Exception]()
        for order in [*orders]:
            try:
                pair.of_backward.update(order)
                returned = pair.pull(dy, cache)
            except Exception as fault:  # noqa: BLE001 - the usual order raises, as it did
                faults.append(fault)
            else:
                orders[:] = [order]
                break
        else:
            raise faults[0]
        wanted = [role for role in pair.of_forward.values() if role != "cache"]
        takes = [role for role in wanted if role in PARAMETERS] or pair.takes
        gradients = gradients_by_role(returned, takes, wanted)
        if takes == ["beta", "gamma"] and isinstance(returned, tuple):
            # In the order of the arguments or, as usual, gamma first: the gradient of beta is the sum of dy.
            total = dy.reshape(-1, dy.shape[-1]).sum(axis=0)
            gamma = np.asarray(gradients.get("gamma"))
            if gamma.shape == total.shape and np.allclose(gamma, total):
                gradients |= {"gamma": gradients["beta"], "beta": gamma}
        return in_order(gradients, takes, returned)

    return call, pull, pair
