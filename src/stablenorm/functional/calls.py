"""What the public functions share: check everything once, see the array as rows, call a backend."""

import math
from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from stablenorm.arrays import (
    Arrays,
    is_plain,
    normalize_axes,
    normalized_shape,
    on_cuda_device,
    show_axes,
)
from stablenorm.backends import arrays_of, choose, choose_cuda, implementation
from stablenorm.functional import masks, samples
from stablenorm.functional.kept import check_save, restored
from stablenorm.types import (
    NOTHING_EXTRA,
    NOTHING_KEPT,
    Array,
    Cache,
    Extra,
    Gradients,
    Norm,
    Residual,
    SampleNorm,
    check_eps,
    real,
)

NAMES = ("x", "gamma", "beta")


def forward(
    x: ArrayLike,
    norm: Norm,
    axis: int | tuple[int, ...],
    out: Array | None,
    backend: str | None,
    keep: bool = True,
    residual: ArrayLike | None = None,
    where: ArrayLike | None = None,
    save: str = "x",
) -> tuple[Array, Any]:
    """Return y and the cache, given what the user gave; without `keep`, y may overwrite x."""
    if plain := type(axis) is int and axis == -1 and is_plain(x, None):
        name = choose(backend)
        arrays = arrays_of(name)
        axes: tuple[int, ...] = (x.ndim - 1,)
    else:
        name = choose_cuda(backend) if on_cuda_device(x) else choose(backend)
        arrays = arrays_of(name)
        x = arrays.convert("x", x)
        axes = normalize_axes(axis, x.ndim)
    if not (plain and _is_plain_norm(norm, (x.shape[-1],))):
        norm = checked_norm(arrays, norm, x.shape, axes, name)
    if residual is not None:
        residual = of_shape(arrays, "residual", residual, x.shape, name)
    if out is None:
        y = arrays.empty(x.shape, x.dtype, x)
    else:
        y = arrays.target("out", out, x.shape, x.dtype)
        others = {"x": x, "gamma": norm.gamma, "beta": norm.beta, "residual": residual}
        needed = keep and residual is None
        _refuse_overlap(arrays, "out", y, others, but=None if needed else "x")
    if where is not None:
        refuse_cuda("where", name)
        where = masks.check_where(where, x.shape, axes, norm.rounding)
    if type(save) is not str or save != "x":
        refuse_cuda(f"save={save!r}", name)
        check_save(save)
    call = implementation("forward" if keep else "normalize", name)
    # What is added to x, and where the sum goes, which is then what is normalized.
    added = None if residual is None else Residual(residual, arrays.empty(x.shape, x.dtype, x))
    if type(norm) is SampleNorm:
        statistics = samples.forward(name, keep, x, norm, axes, y, added, where)
    else:
        rows = arrays.rows(x, axes)
        # A new array is contiguous.
        of_y = y if out is None and rows is x else arrays.rows(y, axes)
        given: tuple[Any, ...] = (rows, norm, of_y)
        if added is not None:
            given += (Residual(*(arrays.rows(each, axes) for each in added)),)
        if where is None:
            statistics = call(*given)
        else:
            statistics = masks.forward(call, arrays.rows(where, axes), *given)
    if added is not None:
        x = added.sum
    if not keep:
        return y, None
    if save != "x":
        statistics = NOTHING_KEPT
    # As a NamedTuple makes itself, in half the time.
    return y, tuple.__new__(Cache, (x, norm, axes, statistics, name, where, save))


def backward(
    dy: ArrayLike,
    cache: Cache,
    wrt: Sequence[str],
    out: Sequence[Array | None] | None,
    dsum: ArrayLike | None = None,
    kind: str = "layer",
    sum_axes: int | tuple[int, ...] | None = None,
    dmean: ArrayLike | None = None,
    drstd: ArrayLike | None = None,
    accumulate: bool = False,
    sums: Sequence[Array | None] | None = None,
) -> Gradients:
    """Compute the requested gradients. If `sums` is given, write dgamma and dbeta there, unrounded."""
    if not isinstance(cache, Cache):
        raise TypeError(_not_a_cache(dy, cache, kind))
    if cache.save != "x":
        cache = restored(cache)
    x, norm, axes, statistics, name, where, _ = cache
    if norm.kind != kind:
        check_kind(norm, kind)
    arrays = arrays_of(name)
    # What is plain is in host memory: no dy for a cache that is on a device.
    if name == "cuda" or not is_plain(dy, x.shape):
        dy = arrays.convert("dy", dy)
    if dy.shape != x.shape:
        msg = f"dy must have shape {x.shape} to match the y of this cache, got {dy.shape}"
        raise ValueError(msg)
    extra = NOTHING_EXTRA
    if dsum is not None or dmean is not None or drstd is not None:
        extra = _checked_extra(arrays, cache, dsum=dsum, dmean=dmean, drstd=drstd)
    asked, lead, kept = asked_names(wrt), None, None
    if sum_axes is not None:
        refuse_cuda("sum_axes", name)
        lead, kept = samples.check_sum_axes(sum_axes, cache)
    if accumulate:
        refuse_cuda("accumulate=True", name)
    gradients = _gradients(arrays, dy, cache, asked, out, kept, accumulate, extra.dsum)
    if sums is not None:
        gradients = Gradients(gradients.dx, *sums)
    call = implementation("backward", name)
    if lead is not None or type(norm) is SampleNorm:
        samples.backward(call, dy, cache, gradients, lead, extra, accumulate)
        return gradients
    found, dx, rows = gradients, gradients[0], arrays.rows(x, axes)
    # A new array is contiguous.
    if dx is not None and not (out is None and rows is x):
        found = gradients._replace(dx=arrays.rows(dx, axes))
    given: tuple[Any, ...] = (arrays.rows(dy, axes), rows, norm, statistics, found)
    if extra.dsum is not None:
        extra = extra._replace(dsum=arrays.rows(extra.dsum, axes))
    if accumulate:
        extra = extra._replace(old=samples.old_sums(gradients))
    if extra is not NOTHING_EXTRA:
        given += (extra,)
    if where is None:
        call(*given)
    else:
        masks.backward(call, arrays.rows(where, axes), *given)
    return gradients


def _is_plain_norm(norm: Norm, shape: tuple[int, ...]) -> bool:
    """Tell whether all is as most calls have it: a small one would feel the checks of the rest."""
    gamma, beta, eps, _, gamma_offset, rounding = norm
    return (
        (gamma is None or is_plain(gamma, shape))
        and (beta is None or is_plain(beta, shape))
        and type(eps) is float
        and 0.0 <= eps < math.inf
        and gamma_offset == 0.0
        and type(rounding) is str
        and rounding == "fast"
    )


def checked_norm(
    arrays: Arrays, norm: Norm, x_shape: tuple[int, ...], axes: tuple[int, ...], backend: str
) -> Norm:
    """Return `norm` with gamma and beta as arrays and eps as a float, or say what is wrong."""
    gamma, beta, eps, kind, gamma_offset, rounding = norm
    normalized_shape(x_shape, axes)
    if gamma is not None:
        gamma = _parameter(arrays, "gamma", gamma, x_shape, axes, backend)
    if beta is not None:
        beta = _parameter(arrays, "beta", beta, x_shape, axes, backend)
    eps, gamma_offset = check_eps(eps), checked_offset(gamma_offset, gamma)
    check_rounding(rounding)
    if backend == "cuda":
        _check_cuda_options(kind, gamma_offset, rounding)
    leading = any(each is not None and each.ndim > len(axes) for each in (gamma, beta))
    made = SampleNorm if leading else Norm
    return made(gamma, beta, eps, kind, gamma_offset, rounding)


def check_kind(norm: Norm, kind: str, what: str = "backward") -> None:
    """Raise unless a cache is of the norm of which `what` is called."""
    if norm.kind != kind:
        msg = f"cache must be of {kind}_norm_forward; pass this one to {norm.kind}_norm_{what}"
        raise ValueError(msg)


def of_shape(
    arrays: Arrays, name: str, value: ArrayLike, shape: tuple[int, ...], backend: str, of: str = "x"
) -> Array:
    """Return an argument of the shape of x, or of what else `of` says."""
    refuse_cuda(name, backend)
    array: Array = arrays.convert(name, value)
    if array.shape != shape:
        msg = f"{name} must have shape {shape}, that of {of}, got {array.shape}"
        raise ValueError(msg)
    return array


def _checked_extra(arrays: Arrays, cache: Cache, **given: ArrayLike | None) -> Extra:
    """Return what else is added to dx: dsum, and dmean and drstd, one float64 for each row."""
    x, norm, axes, _, backend = cache[:5]
    of_rows = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "dsum":
            found[name] = of_shape(arrays, name, value, x.shape, backend)
            continue
        if norm.rounding == "nearest":
            msg = f'{name} cannot be rounded to nearest yet; use rounding="fast"'
            raise ValueError(msg)
        array = of_shape(arrays, name, value, of_rows, backend, "cache.rstd")
        found[name] = array.astype(float).reshape(-1)
    return Extra(**found)


def checked_offset(offset: Any, gamma: Array | None) -> float:
    """Return `gamma_offset` as a float, or say what is wrong with it."""
    value = real("gamma_offset", offset)
    if not math.isfinite(value):
        msg = f"gamma_offset must be finite, got {offset}"
        raise ValueError(msg)
    if value and gamma is None:
        msg = f"gamma must be given with gamma_offset={offset}, got None; leave gamma_offset away"
        raise ValueError(msg)
    return value


def check_rounding(rounding: Any) -> None:
    """Raise unless `rounding` is one of the two."""
    if not isinstance(rounding, str) or rounding not in ("fast", "nearest"):
        msg = f'rounding must be "fast" or "nearest", got {shorten(repr(rounding), 60)}'
        raise ValueError(msg)


def _check_cuda_options(kind: str, gamma_offset: float, rounding: str) -> None:
    if rounding == "nearest":
        msg = 'rounding must be "fast" on a CUDA device, got "nearest"; pass x.get() for that'
        raise ValueError(msg)
    if kind != "layer" or gamma_offset:
        what = f"gamma_offset={gamma_offset}" if kind == "layer" else "RMS norm"
        msg = f"x must be in host memory for {what}, got one on a CUDA device; pass x.get()"
        raise ValueError(msg)


def _not_a_cache(dy: Any, cache: Any, kind: str) -> str:
    """Say what is wrong with `cache`, and what the cure is."""
    forward, backward = f"{kind}_norm_forward", f"{kind}_norm_backward"
    cure = f"write y, cache = {forward}(...), then {backward}(dy, cache)"
    if isinstance(dy, Cache):
        cure = f"the two are swapped, write {backward}(dy, cache)"
    elif isinstance(cache, tuple) and any(isinstance(each, Cache) for each in cache):
        cure = f"this is all that {forward} returned, write y, cache = {forward}(...)"
    return f"cache must be the Cache that {forward} returns, got {type(cache).__name__}; {cure}"


def _parameter(
    arrays: Arrays,
    name: str,
    value: ArrayLike,
    x_shape: tuple[int, ...],
    axes: tuple[int, ...],
    backend: str,
) -> Array:
    array: Array = arrays.convert(name, value)
    shape, leading = normalized_shape(x_shape, axes), array.ndim - len(axes)
    if array.shape == shape:
        return array
    cure = ""
    if leading > 0 and array.shape[leading:] == shape:
        refuse_cuda(f"a {name} with leading axes", backend)
        lengths = samples.lengths_of(x_shape, axes)
        if samples.fits(array.shape[:leading], lengths):
            return array
        cure = f", or that after axes that broadcast against {lengths}"
    msg = (
        f"{name} must have shape {shape} to match x normalized over axis {show_axes(axes)}{cure}, "
        f"got {array.shape}"
    )
    raise ValueError(msg)


def refuse_cuda(what: str, backend: str) -> None:
    """Raise if arrays are on a CUDA device."""
    if backend == "cuda":
        msg = (
            f"{what} is not for arrays on a CUDA device yet; copy them to the host, as x.get() does"
        )
        raise ValueError(msg)


def asked_names(wrt: object) -> tuple[str, ...]:
    """Return what `wrt` names."""
    if wrt is NAMES:
        return NAMES
    names = tuple(wrt) if np.iterable(wrt) and not isinstance(wrt, str) else (wrt,)
    if unknown := [name for name in names if not (isinstance(name, str) and name in NAMES)]:
        msg = f"wrt must name some of 'x', 'gamma', 'beta', got {shorten(repr(unknown[0]), 60)}"
        raise ValueError(msg)
    return names


def _refuse_overlap(
    arrays: Arrays,
    name: str,
    array: Array,
    others: dict[str, Array | None],
    but: str | None = None,
) -> None:
    """Raise if `array` shares memory with one of `others`; with `but` it may, if it is the same."""
    for other, there in others.items():
        if there is not None and arrays.overlap(array, there):
            # Asked last: of arrays that do not overlap, which is nearly always, it need not be.
            if other == but and arrays.same_elements(array, there):
                continue
            msg = f"{name} must not share memory with {other}, which is still needed; pass a copy"
            raise ValueError(msg)


def _check_old_sums(likes: Sequence[Array | None], out: Any) -> None:
    for name, wanted, array in zip(NAMES, likes, out, strict=False):
        if wanted is not None and array is None:
            msg = f"out.d{name} must be the array to add to with accumulate=True, got None"
            raise ValueError(msg)


def _gradients(
    arrays: Arrays,
    dy: Array,
    cache: Cache,
    asked: tuple[str, ...],
    out: Any,
    kept: tuple[int, ...] | None,
    accumulate: bool,
    dsum: Array | None,
) -> Gradients:
    """Return the arrays to write into: those of `out`, checked, or new ones; None if not asked."""
    like, norm = cache.x, cache.norm
    gamma = norm.gamma if "gamma" in asked else None
    beta = norm.beta if "beta" in asked else None
    if kept is not None:
        # Only their shapes and dtypes count from here on.
        gamma, beta = (samples.sums_like(each, kept, cache) for each in (gamma, beta))
    if out is not None and not np.iterable(out):
        msg = f"out must have three entries, for dx, dgamma and dbeta, got {type(out).__name__}"
        raise TypeError(msg)
    if accumulate:
        _check_old_sums((None, gamma, beta), (None,) * 3 if out is None else out)
    if out is None:
        return Gradients(
            arrays.empty(like.shape, like.dtype, like) if "x" in asked else None,
            None if gamma is None else arrays.empty(gamma.shape, gamma.dtype, like),
            None if beta is None else arrays.empty(beta.shape, beta.dtype, like),
        )
    given = tuple(out)
    if len(given) != len(NAMES):
        msg = f"out must have three entries, for dx, dgamma and dbeta, got {len(given)}"
        raise ValueError(msg)
    likes = like if "x" in asked else None, gamma, beta
    others: dict[str, Array | None] = {"x": like, "gamma": norm.gamma, "dy": dy, "dsum": dsum}
    found: list[Array | None] = []
    for name, wanted, array in zip(NAMES, likes, given, strict=True):
        if wanted is None:
            found.append(None)
        elif array is None:
            found.append(arrays.empty(wanted.shape, wanted.dtype, like))
        else:
            called = f"out.d{name}"
            checked = arrays.target(called, array, wanted.shape, wanted.dtype)
            _refuse_overlap(arrays, called, checked, others, but="dy" if name == "x" else None)
            # New ones are not among these: nothing that was given can share memory with them.
            others[called] = checked
            found.append(checked)
    return Gradients(found[0], found[1], found[2])
