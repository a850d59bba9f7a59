"""`LayerNorm` and `RMSNorm`: thin holders of gamma, beta and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from stablenorm.api import FUNCTIONS
from stablenorm.arrays import convert
from stablenorm.formats import check_dtype, parse
from stablenorm.functional.checks import checked_norm
from stablenorm.records import NAMES, Array, Cache, Name, Norm, Rounding
from stablenorm.scalars import check_count


class _Layer:
    """The code that both classes share."""

    _kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # Python's messages name a function by its __qualname__: it is to be that of a public class.
        for shared in (_Layer.__init__, _Layer.forward, _Layer.backward):
            own = FunctionType(shared.__code__, shared.__globals__, argdefs=shared.__defaults__)
            own.__kwdefaults__ = shared.__kwdefaults__
            setattr(cls, shared.__name__, functools.update_wrapper(own, shared))
            own.__qualname__ = f"{cls.__name__}.{shared.__name__}"

    def __init__(
        self, shape: int | tuple[int, ...], eps: float = 1e-5,
        *, axis: int | tuple[int, ...] | None = None, gamma: bool = True, beta: bool | None = None,
        dtype: DTypeLike = np.float32, gamma_offset: float = 0.0, rounding: Rounding = "fast",
    ) -> None:  # fmt: skip
        lengths = shape if isinstance(shape, (tuple, list)) else (shape,)
        self.shape = tuple(check_count("shape", length, least=1) for length in lengths)
        if not self.shape:
            msg = "shape must be the length of at least one axis, got none"
            raise ValueError(msg)
        ones = np.ones(self.shape, parse(dtype))
        check_dtype("dtype", ones)
        if axis is None:
            axis = -1 if ones.ndim == 1 else tuple(range(-ones.ndim, 0))
        if np.size(axis) != ones.ndim or not isinstance(axis, (int, tuple)):
            msg = f"axis must be an int, or a tuple of as many as shape {self.shape}, got {axis!r:.60}"
            raise ValueError(msg)
        self.axis = axis
        asked = Norm(ones if gamma else None, None, eps, self._kind, gamma_offset, rounding)
        norm = checked_norm(convert, asked, self.shape, tuple(range(ones.ndim)))
        self.eps, self.gamma_offset, self.rounding = norm.eps, norm.gamma_offset, rounding
        self.parameters: dict[str, Array] = {}
        if gamma:
            self.parameters["gamma"] = (ones - self.gamma_offset).astype(ones.dtype)
        if beta or (beta is None and self._kind == "layer"):
            self.parameters["beta"] = np.zeros_like(ones)
        self.gradients: dict[str, Array] = {}
        self.cache: Cache | None = None

    def __repr__(self) -> str:
        """Return the shape, the options and the names of the parameters."""
        return (
            f"{type(self).__name__}({self.shape}, eps={self.eps}, axis={self.axis}, gamma_offset={self.gamma_offset}, "
            f"rounding={self.rounding!r}; {', '.join(self.parameters) or 'no parameters'})"
        )

    def forward(
        self, x: ArrayLike, *, residual: ArrayLike | None = None, where: ArrayLike | None = None
    ) -> Array:
        """Return the normalized `x`, and remember what `backward` needs; the keywords are those of `layer_norm_forward`."""
        gamma, beta = self.parameters.get("gamma"), self.parameters.get("beta")
        y, cache = FUNCTIONS[self._kind][0](
            x, gamma, beta, self.eps,
            axis=self.axis, gamma_offset=self.gamma_offset, rounding=self.rounding,
            residual=residual, where=where,
        )  # fmt: skip
        lengths = tuple(cache.x.shape[axis] for axis in cache.axis)
        if lengths != self.shape:
            msg = f"x must have lengths {self.shape} along axis {self.axis}, got {lengths}"
            raise ValueError(msg)
        self.cache = cache
        return y

    def __call__(self, x: ArrayLike, **options: Any) -> Array:
        """Return what `forward` returns."""
        return self.forward(x, **options)

    def backward(
        self, dy: ArrayLike, *, wrt: Sequence[Name] = NAMES, out: Sequence[Array | None] | None = None,
        dsum: ArrayLike | None = None, accumulate: bool = False,
    ) -> Array:  # fmt: skip
        """
        Return dx for the latest `forward`, and set `gradients`; the keywords are those of `layer_norm_backward`.

        dx is None if `wrt` leaves it out.
        """
        if self.cache is None:
            msg = "backward needs a forward before it, got none; call forward(x) first"
            raise ValueError(msg)
        dx, dgamma, dbeta = FUNCTIONS[self._kind][1](
            dy, self.cache, wrt=wrt, out=out, dsum=dsum, accumulate=accumulate
        )
        named = {"gamma": dgamma, "beta": dbeta}
        self.gradients = {name: value for name, value in named.items() if value is not None}
        return cast(Array, dx)


# numpydoc does not see the parameters, which _Layer has.
class LayerNorm(_Layer):  # numpydoc ignore=PR02
    """
    Layer normalization with its own gamma and beta.

    Parameters
    ----------
    shape : int or tuple of int
        Lengths of the normalized axes.
    eps : float, default: 1e-5
        Added to the variance. Finite and >= 0.
    axis : int or tuple of int, optional
        The axes of x normalized together, as many as `shape` has lengths. Default: the last ones.
    gamma, beta : bool, default: True
        Whether to have a scale, which begins as ones, and a shift, which begins as zeros.
    dtype : dtype, default: float32
        Of gamma and beta: float16, bfloat16, float32 or float64. x may have another.
    gamma_offset : float, default: 0
        As for `layer_norm`. gamma begins as ones less it.
    rounding : {"fast", "nearest"}, default: "fast"
        As for `layer_norm`.

    Attributes
    ----------
    parameters : dict of str to array
        gamma and beta, as far as there are any; change them in place to train.
    gradients : dict of str to array
        Their gradients, of the latest `backward`; empty before it.
    cache : Cache or None
        That of the latest `forward`: with a residual, `cache.x` is the sum.

    Raises
    ------
    TypeError, ValueError
        If `dtype` is not one of the four, `shape` holds anything but ints of at least 1, `axis` does
        not have as many, `eps` is negative or not finite, `rounding` is neither of the two, or
        `gamma_offset` is not a finite number or without a gamma.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import LayerNorm
    >>> norm = LayerNorm(4)
    >>> y = norm(np.arange(8, dtype=np.float32).reshape(2, 4))  # or norm.forward(...)
    >>> dx = norm.backward(np.ones_like(y))
    >>> norm.gradients["beta"]
    array([2., 2., 2., 2.], dtype=float32)
    """

    _kind = "layer"


# The same.
class RMSNorm(_Layer):  # numpydoc ignore=PR02
    """
    RMS normalization with its own gamma and, if wanted, beta.

    Parameters
    ----------
    shape : int or tuple of int
        As for `LayerNorm`, and so are all the rest, the attributes and the methods.
    beta : bool, default: False
        Whether to have a shift.

    Examples
    --------
    >>> import numpy as np
    >>> from stablenorm import RMSNorm
    >>> norm = RMSNorm(4, gamma_offset=1.0)
    >>> norm.forward(np.full((1, 4), 2.0, np.float32)).round(3)
    array([[1., 1., 1., 1.]], dtype=float32)
    >>> norm.parameters
    {'gamma': array([0., 0., 0., 0.], dtype=float32)}
    """

    _kind = "rms"
