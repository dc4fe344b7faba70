"""`Tensor`: NumPy array with reverse-mode differentiation, and operations that follow a policy.

Under `casting_mode` an operation chooses its dtype by S4: matrix products in the compute dtype, sensitive operations in
float32, the rest in the widest dtype of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import numpy as np

from polyamp.context_values import temporary_value
from polyamp.reference.arrays import DTYPES, Array, dtype_name, is_floating

Vjp = Callable[[Array], Array]


class _CastingMode(NamedTuple):
    """Casts of inputs: the dtype of matrix products, and whether sensitive operations run in float32."""

    compute: str
    sensitive: bool


_CASTING_MODE: Final[ContextVar[_CastingMode | None]] = ContextVar("casting", default=None)


def casting_mode(compute: str, *, sensitive: bool) -> AbstractContextManager[None]:
    """Run operations with matrix products in `compute` and, if `sensitive`, the rest of S4's list in float32."""
    return temporary_value(_CASTING_MODE, _CastingMode(compute, sensitive))


class Tensor:
    """Value with, for each input tensor, the function that maps its cotangent to the input's."""

    __array_ufunc__ = None  # so that `array * tensor` calls __rmul__
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
            full = np.zeros(self.shape, np.promote_types(self.dtype, np.float32))  # repeated rows are summed (S4)
            np.add.at(full, index, g)
            return full.astype(self.dtype)

        return Tensor(self.data[index], [(self, back)])

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __add__(self, other: Any) -> Tensor:
        return _elementwise(np.add, self, other, _slope_one, _slope_one)

    def __sub__(self, other: Any) -> Tensor:
        return _elementwise(np.subtract, self, other, _slope_one, _slope_minus_one)

    def __rsub__(self, other: Any) -> Tensor:
        return tensor(other) - self

    def __mul__(self, other: Any) -> Tensor:
        return _elementwise(np.multiply, self, other, _slope_second, _slope_first)

    def __truediv__(self, other: Any) -> Tensor:
        return _elementwise(np.divide, self, other, _slope_inverse, _slope_quotient)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rtruediv__(self, other: Any) -> Tensor:
        return tensor(other) / self

    def __pow__(self, exponent: float) -> Tensor:
        return power(self, exponent)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)


def _slope_one(a: Any, b: Any) -> Any:
    return 1.0


def _slope_minus_one(a: Any, b: Any) -> Any:
    return -1.0


def _slope_first(a: Any, b: Any) -> Any:
    return a


def _slope_second(a: Any, b: Any) -> Any:
    return b


def _slope_inverse(a: Any, b: Any) -> Any:
    return 1.0 / b


def _slope_quotient(a: Any, b: Any) -> Any:
    return -a / (b * b)


def tensor(value: Any) -> Tensor:
    """Return `value` if it is a tensor, else a constant tensor."""
    return value if isinstance(value, Tensor) else Tensor(value)


def cast(x: Any, dtype: str) -> Tensor:
    """Cast `x` to another floating dtype; its cotangent is cast back. Integers are unchanged (S2)."""
    x = tensor(x)
    if not is_floating(x.data) or dtype_name(x.dtype) == dtype:
        result: Tensor = x
        return result
    return Tensor(x.data.astype(DTYPES[dtype]), [(x, lambda g: g.astype(x.dtype))])


def matmul(left: Any, right: Any) -> Tensor:
    """Return the matrix product in the policy's compute dtype, accumulated in float32 as in matrix units.

    A product over an axis of length 1 is a multiplication and follows its operands' dtype.
    """
    casting = _CASTING_MODE.get()
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
    """Return max(x, 0)."""
    x = tensor(x)
    return Tensor(np.where(x.data > 0, x.data, np.zeros_like(x.data)), [(x, lambda g: g * (x.data > 0))])


def where(condition: Array, x: Any, y: float) -> Tensor:
    """Return `x` where the condition is true, and a constant elsewhere."""
    x = tensor(x)
    other = x.dtype.type(y)
    zero = x.dtype.type(0)
    return Tensor(np.where(condition, x.data, other), [(x, lambda g: np.where(condition, g, zero))])


def exp(x: Any) -> Tensor:
    """Return e to the x; sensitive."""
    x = _cast_sensitive(x)
    value = np.exp(x.data)
    return Tensor(value, [(x, lambda g: g * value)])


def log(x: Any) -> Tensor:
    """Return the natural logarithm; sensitive."""
    x = _cast_sensitive(x)
    return Tensor(np.log(x.data), [(x, lambda g: g / x.data)])


def sigmoid(x: Any) -> Tensor:
    """Return 1 / (1 + e to the -x); sensitive, because a logarithm or `1 - x` may follow."""
    x = _cast_sensitive(x)
    one = x.data.dtype.type(1.0)
    value = one / (one + np.exp(-x.data))
    return Tensor(value, [(x, lambda g: g * value * (one - value))])


def inner(left: Any, right: Any) -> Tensor:
    """Return the inner product along the last axis; sensitive, because it has no free axes."""
    return total(_cast_sensitive(left) * _cast_sensitive(right), axis=-1)


def outer(left: Any, right: Any) -> Tensor:
    """Return the outer product of two vectors: a multiplication, which follows its operands' dtype."""
    a, b = tensor(left), tensor(right)
    result: Tensor = _match_precision(a) * b
    return result


def power(x: Any, exponent: float) -> Tensor:
    """Return x to a constant power; sensitive."""
    x = _cast_sensitive(x)
    p = x.data.dtype.type(exponent)
    one = x.data.dtype.type(1.0)
    return Tensor(np.power(x.data, p), [(x, lambda g: g * p * np.power(x.data, p - one))])


def total(x: Any, axis: int | None = None) -> Tensor:
    """Return the sum over one axis or all; sensitive."""
    x = _cast_sensitive(x)

    def back(g: Array) -> Array:
        wide = g if axis is None else np.expand_dims(g, axis)
        return np.broadcast_to(wide, x.shape).astype(x.dtype)

    return Tensor(x.data.sum(axis=axis, dtype=x.dtype), [(x, back)])


def mean(x: Any, axis: int | None = None) -> Tensor:
    """Return the mean over one axis or all; sensitive."""
    x = _cast_sensitive(x)
    count = x.data.size if axis is None else x.shape[axis]
    result: Tensor = total(x, axis) / x.dtype.type(count)
    return result


def cumulative_sum(x: Any) -> Tensor:
    """Return the cumulative sum along the last axis; sensitive."""
    x = _cast_sensitive(x)
    return Tensor(np.cumsum(x.data, axis=-1, dtype=x.dtype), [(x, lambda g: np.cumsum(g[..., ::-1], -1)[..., ::-1])])


def log_sum_exp(x: Any) -> Tensor:
    """Return log(sum(exp(x))) along the last axis; sensitive."""
    x = _cast_sensitive(x)
    peak = x.data.max(axis=-1, keepdims=True)
    parts = np.exp(x.data - peak)
    sums = parts.sum(axis=-1, keepdims=True, dtype=x.dtype)
    value = (np.log(sums) + peak)[..., 0]
    return Tensor(value, [(x, lambda g: g[..., None] * (parts / sums))])


def log_softmax(x: Any) -> Tensor:
    """Return x - logsumexp(x) along the last axis; sensitive."""
    x = _cast_sensitive(x)
    normal = log_sum_exp(x)
    result: Tensor = x - Tensor(normal.data[..., None], [(normal, lambda g: g[..., 0])])
    return result


def softmax(x: Any) -> Tensor:
    """Return the softmax along the last axis; sensitive."""
    return exp(log_softmax(x))


def normalize(x: Any, epsilon: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) over the last axis; sensitive."""
    x = _cast_sensitive(x)
    centred = x - _match_precision(mean(x, axis=-1))
    variance = mean(centred * centred, axis=-1)
    result: Tensor = centred * _match_precision(power(variance + x.dtype.type(epsilon), -0.5))
    return result


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Array | None]:
    """Return the derivative of a scalar by each input, in the input's dtype; None if it does not depend on it."""
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


def _match_precision(x: Tensor) -> Tensor:
    return Tensor(x.data[..., None], [(x, lambda g: g[..., 0])])


def _cast_sensitive(x: Any) -> Tensor:
    casting = _CASTING_MODE.get()
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
