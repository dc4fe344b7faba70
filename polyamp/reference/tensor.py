"""`Tensor`: a NumPy array that remembers how it was made, and the operations that obey a policy.

Called by the reference models and losses. Under `under_policy` an operation picks its dtype as S4 says: matrix
products in the compute dtype, sensitive operations in float32, the rest in the widest dtype of its inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.reference.arrays import DTYPES, Array, dtype_name, is_floating

Vjp = Callable[[Array], Array]


class _Casting(NamedTuple):
    """What an operation does to its inputs: dtype of matrix products, and whether sensitive ones go to float32."""

    compute: str
    sensitive: bool


_CASTING: Final[ContextVar[_Casting | None]] = ContextVar("casting", default=None)


@contextlib.contextmanager
def under_policy(compute: str, *, sensitive: bool) -> Iterator[None]:
    """Run operations with matrix products in `compute` and, if `sensitive`, the rest of S4's list in float32."""
    token = _CASTING.set(_Casting(compute, sensitive))
    try:
        yield
    finally:
        _CASTING.reset(token)


class Tensor:
    """A value and, for each tensor it came from, the function that carries a cotangent back to it."""

    __array_ufunc__ = None  # so that `array * tensor` comes to __rmul__
    __slots__ = ("data", "parents")
    data: Array
    parents: tuple[tuple[Tensor, Vjp], ...]

    def __init__(self, data: Any, parents: Sequence[tuple[Tensor, Vjp]] = ()) -> None:
        self.data = np.asarray(data)
        self.parents = tuple(parents)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def __float__(self) -> float:
        return float(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.data, dtype=dtype)

    def __repr__(self) -> str:
        return f"Tensor({self.data!r})"

    def __getitem__(self, index: Any) -> Tensor:
        def back(g: Array) -> Array:
            full = np.zeros(self.shape, np.promote_types(self.dtype, np.float32))  # rows read twice are a sum (S4)
            np.add.at(full, index, g)
            return full.astype(self.dtype)

        return Tensor(self.data[index], [(self, back)])

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __add__(self, other: Any) -> Tensor:
        return _elementwise(np.add, self, other, _one, _one)

    def __sub__(self, other: Any) -> Tensor:
        return _elementwise(np.subtract, self, other, _one, _minus_one)

    def __rsub__(self, other: Any) -> Tensor:
        return tensor(other) - self

    def __mul__(self, other: Any) -> Tensor:
        return _elementwise(np.multiply, self, other, _second, _first)

    def __truediv__(self, other: Any) -> Tensor:
        return _elementwise(np.divide, self, other, _inverse, _quotient_slope)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rtruediv__(self, other: Any) -> Tensor:
        return tensor(other) / self

    def __pow__(self, exponent: float) -> Tensor:
        return power(self, exponent)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)


def _one(a: Any, b: Any) -> Any:
    return 1.0


def _minus_one(a: Any, b: Any) -> Any:
    return -1.0


def _first(a: Any, b: Any) -> Any:
    return a


def _second(a: Any, b: Any) -> Any:
    return b


def _inverse(a: Any, b: Any) -> Any:
    return 1.0 / b


def _quotient_slope(a: Any, b: Any) -> Any:
    return -a / (b * b)


def tensor(value: Any) -> Tensor:
    """`value` itself if it is a tensor, else a constant."""
    return value if isinstance(value, Tensor) else Tensor(value)


def cast(x: Any, dtype: str) -> Tensor:
    """`x` in another floating dtype; its cotangent is cast back. Integers stay as they are (S2)."""
    x = tensor(x)
    if not is_floating(x.data) or dtype_name(x.dtype) == dtype:
        result: Tensor = x
        return result
    return Tensor(x.data.astype(DTYPES[dtype]), [(x, lambda g: g.astype(x.dtype))])


def matmul(left: Any, right: Any) -> Tensor:
    """Matrix product in the policy's compute dtype, accumulated in float32 as matrix units do.

    With a shared axis of length 1 it contracts nothing, so it is a multiplication and follows its operands.
    """
    casting = _CASTING.get()
    a, b = tensor(left), tensor(right)
    if casting is not None and a.shape[-1] != 1:
        a, b = cast(a, casting.compute), cast(b, casting.compute)

    def product(x: Array, y: Array, dtype: Any) -> Array:
        wide = np.promote_types(dtype, np.float32)
        result: Array = (x.astype(wide) @ y.astype(wide)).astype(dtype)
        return result

    dtype = np.promote_types(a.dtype, b.dtype)
    return Tensor(
        product(a.data, b.data, dtype),
        [(a, lambda g: product(g, b.data.T, a.dtype)), (b, lambda g: product(a.data.T, g, b.dtype))],
    )


def relu(x: Any) -> Tensor:
    """max(x, 0)."""
    x = tensor(x)
    return Tensor(np.where(x.data > 0, x.data, np.zeros_like(x.data)), [(x, lambda g: g * (x.data > 0))])


def where(condition: Array, x: Any, y: float) -> Tensor:
    """`x` where the condition holds, and a constant elsewhere."""
    x = tensor(x)
    other = x.dtype.type(y)
    zero = x.dtype.type(0)
    return Tensor(np.where(condition, x.data, other), [(x, lambda g: np.where(condition, g, zero))])


def exp(x: Any) -> Tensor:
    """e to the x; sensitive."""
    x = _sensitive(x)
    value = np.exp(x.data)
    return Tensor(value, [(x, lambda g: g * value)])


def log(x: Any) -> Tensor:
    """Natural logarithm; sensitive."""
    x = _sensitive(x)
    return Tensor(np.log(x.data), [(x, lambda g: g / x.data)])


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + e to the -x); sensitive, for the logarithm or the `1 - x` that it may feed."""
    x = _sensitive(x)
    one = x.data.dtype.type(1.0)
    value = one / (one + np.exp(-x.data))
    return Tensor(value, [(x, lambda g: g * value * (one - value))])


def inner(left: Any, right: Any) -> Tensor:
    """Inner product along the last axis; sensitive, because it has no free axes."""
    return total(_sensitive(left) * _sensitive(right), axis=-1)


def outer(left: Any, right: Any) -> Tensor:
    """Outer product of two vectors: it contracts nothing, so it is a multiplication and follows its operands."""
    a, b = tensor(left), tensor(right)
    result: Tensor = _keep(a) * b
    return result


def power(x: Any, exponent: float) -> Tensor:
    """x to a constant power; sensitive."""
    x = _sensitive(x)
    p = x.data.dtype.type(exponent)
    one = x.data.dtype.type(1.0)
    return Tensor(np.power(x.data, p), [(x, lambda g: g * p * np.power(x.data, p - one))])


def total(x: Any, axis: int | None = None) -> Tensor:
    """Sum over one axis or all; sensitive."""
    x = _sensitive(x)

    def back(g: Array) -> Array:
        wide = g if axis is None else np.expand_dims(g, axis)
        return np.broadcast_to(wide, x.shape).astype(x.dtype)

    return Tensor(x.data.sum(axis=axis, dtype=x.dtype), [(x, back)])


def mean(x: Any, axis: int | None = None) -> Tensor:
    """Mean over one axis or all; sensitive."""
    x = _sensitive(x)
    count = x.data.size if axis is None else x.shape[axis]
    result: Tensor = total(x, axis) / x.dtype.type(count)
    return result


def cumulative_sum(x: Any) -> Tensor:
    """Cumulative sum along the last axis; sensitive."""
    x = _sensitive(x)
    return Tensor(np.cumsum(x.data, axis=-1, dtype=x.dtype), [(x, lambda g: np.cumsum(g[..., ::-1], -1)[..., ::-1])])


def log_sum_exp(x: Any) -> Tensor:
    """log(sum(exp(x))) along the last axis; sensitive."""
    x = _sensitive(x)
    peak = x.data.max(axis=-1, keepdims=True)
    parts = np.exp(x.data - peak)
    sums = parts.sum(axis=-1, keepdims=True, dtype=x.dtype)
    value = (np.log(sums) + peak)[..., 0]
    return Tensor(value, [(x, lambda g: g[..., None] * (parts / sums))])


def log_softmax(x: Any) -> Tensor:
    """x - logsumexp(x) along the last axis; sensitive."""
    x = _sensitive(x)
    normal = log_sum_exp(x)
    result: Tensor = x - Tensor(normal.data[..., None], [(normal, lambda g: g[..., 0])])
    return result


def softmax(x: Any) -> Tensor:
    """Softmax along the last axis; sensitive."""
    return exp(log_softmax(x))


def normalize(x: Any, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the last axis; sensitive."""
    x = _sensitive(x)
    centred = x - _keep(mean(x, axis=-1))
    variance = mean(centred * centred, axis=-1)
    result: Tensor = centred * _keep(power(variance + x.dtype.type(epsilon), -0.5))
    return result


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Array | None]:
    """Derivative of a scalar with respect to each input, in the input's dtype; None where it does not depend on it."""
    order: list[Tensor] = []
    seen: set[int] = set()

    def visit(node: Tensor) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for parent, _ in node.parents:
                visit(parent)
            order.append(node)

    visit(output)
    cotangents: dict[int, Array] = {id(output): np.ones_like(output.data)}
    for node in reversed(order):
        incoming = cotangents.get(id(node))
        if incoming is None:
            continue
        for parent, vjp in node.parents:
            carried = vjp(incoming)
            known = cotangents.get(id(parent))
            cotangents[id(parent)] = carried if known is None else known + carried
    return [cotangents.get(id(item)) for item in inputs]


def _keep(x: Tensor) -> Tensor:
    return Tensor(x.data[..., None], [(x, lambda g: g[..., 0])])


def _sensitive(x: Any) -> Tensor:
    casting = _CASTING.get()
    x = tensor(x)
    return cast(x, "float32") if casting is not None and casting.sensitive else x


def _elementwise(
    function: Any, left: Any, right: Any, slope_a: Callable[[Any, Any], Any], slope_b: Callable[[Any, Any], Any]
) -> Tensor:
    a, b = tensor(left), tensor(right)
    scalar = not isinstance(right, Tensor) and not isinstance(right, (np.ndarray, np.generic))
    value = function(a.data, right if scalar else b.data)

    def back(source: Tensor, slope: Callable[[Any, Any], Any]) -> Vjp:
        return lambda g: _unbroadcast(g * slope(a.data, b.data), source.shape).astype(source.dtype)

    return Tensor(value, [(a, back(a, slope_a)), (b, back(b, slope_b))])


def _unbroadcast(g: Any, shape: tuple[int, ...]) -> Array:
    extra = g.ndim - len(shape)
    g = g.sum(axis=tuple(range(extra)), dtype=g.dtype) if extra else g
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and g.shape[i] != 1)
    result: Array = g.sum(axis=axes, keepdims=True, dtype=g.dtype) if axes else g
    return result
