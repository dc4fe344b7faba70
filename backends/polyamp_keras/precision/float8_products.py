"""Products in 8 bits in Keras (S36): codes of a tensor, the product with its gradients, and the `call` of dense layers.

The backward products use the codes of the forward pass, which are what is saved of an activation. No Keras backend has
an operation that multiplies 8-bit floats, so the codes are multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import keras
from keras import ops

from polyamp.recipe.float8 import ACTIVATION_FORMAT, LARGEST_EXPONENTS, LARGEST_SCALE_EXPONENT, Float8
from polyamp_keras.engine import ENGINE
from polyamp_keras.precision.layer_method_wrappers import copy_signature

_SIGNIFICAND_LIMIT: Final = 0x600000
"""Fraction bits of 1.75, the significand of both formats' largest number."""


product_watch: Final[ContextVar[Callable[[Any], None] | None]] = ContextVar("polyamp_product_watch", default=None)
"""Receives the figures of products that run now, in their backward passes, for a monitor: float32, shape (3, 4), see
`MonitorSlots.products`. None: they are not computed."""


class Codes(NamedTuple):
    """A tensor in 8 bits: `numbers / 2 ** exponent`, a scalar of int32."""

    numbers: Any
    exponent: Any


class EinsumAxes(NamedTuple):
    """Axes of an einsum of an activation with a kernel that is a matrix product.

    Attributes:
        x: letters of the activation; with "." in place of an ellipsis.
        kernel: letters of the kernel.
        out: letters of the result.
        contracted: letters of the contracted axes.
    """

    x: str
    kernel: str
    out: str
    contracted: str

    @property
    def free(self) -> str:
        """Letters of the kernel's axes that are in the result."""
        return "".join(letter for letter in self.kernel if letter not in self.contracted)


def parse_einsum(equation: str) -> EinsumAxes | None:
    """Return the axes of an einsum of two operands; None if it is no matrix product without batch axes.

    >>> parse_einsum("...x,xy->...y")
    EinsumAxes(x='.x', kernel='xy', out='.y', contracted='x')
    >>> parse_einsum("abc,bcd->abd") is None  # b is a batch axis
    True
    """
    operands, _, out = equation.replace(" ", "").replace("...", ".").partition("->")
    x, _, kernel = operands.partition(",")
    contracted = "".join(letter for letter in kernel if letter in x and letter not in out)
    axes = EinsumAxes(x, kernel, out, contracted)
    kept = "".join(letter for letter in x if letter not in contracted)
    is_product = bool(contracted) and sorted(out) == sorted(kept + axes.free)
    return axes if is_product and all(len(set(each)) == len(each) for each in (x, kernel, out)) else None


def quantize(x: Any, form: str) -> Codes:
    """Return a tensor in 8 bits: times the largest power of two with which its largest magnitude fits, to nearest even.

    A tensor with infinity or NaN becomes NaN (S36). Nothing is cut to the largest number.

    Args:
        x: floats of any shape.
        form: "float8_e4m3fn" or "float8_e5m2".
    """
    wide = ops.cast(x, "float32")
    bits = ops.bitwise_and(ENGINE.bitcast(wide, "int32"), 0x7FFFFFFF)
    largest = ops.max(bits, initial=0)  # of integers, in whose order NaN is the largest
    exponent, fraction = ops.right_shift(largest, 23), ops.bitwise_and(largest, 0x7FFFFF)
    above = ops.cast(fraction > _SIGNIFICAND_LIMIT, "int32")
    k = ops.minimum(LARGEST_EXPONENTS[form] + 127 - exponent - above, LARGEST_SCALE_EXPONENT)
    k = ops.where(ops.logical_or(exponent == 0, exponent == 0xFF), ops.zeros_like(k), k)
    scale = ops.where(exponent == 0xFF, math.nan, _power_of_two(k))
    return Codes(ops.cast(wide * scale, form), k)


def _power_of_two(exponent: Any) -> Any:
    """Return 2 ** exponent in float32, for exponents of normal numbers."""
    return ENGINE.bitcast(ops.left_shift(exponent + 127, 23), "float32")


def multiply(x: Any, w: Any, gradients: str) -> Any:
    """Return x (rows, k) times w (k, columns), both in the compute dtype, with its two gradients: three products of
    8-bit numbers.

    Args:
        x: the activation.
        w: the parameter.
        gradients: format of the gradient that enters the backward products.
    """
    dtype = keras.backend.standardize_dtype(x.dtype)

    watch = product_watch.get()

    def forward(x: Any, w: Any) -> tuple[Any, tuple[Any, ...]]:
        left, right = quantize(x, ACTIVATION_FORMAT), quantize(w, ACTIVATION_FORMAT)
        figures = [] if watch is None else [ops.stack([_rounding_sums(x, left), _rounding_sums(w, right)])]
        return _multiply_codes(left, right, dtype), (*left, *right, *figures)

    def backward(residuals: tuple[Any, ...], g: Any) -> tuple[Any, Any]:
        left, right, codes = Codes(*residuals[:2]), Codes(*residuals[2:4]), quantize(g, gradients)
        if watch is not None:
            watch(ops.concatenate([residuals[4], _rounding_sums(g, codes)[None]]))
        dx = _multiply_codes(codes, right, dtype, transpose_right=True)
        return dx, _multiply_codes(left, codes, dtype, transpose_left=True)

    return ENGINE.custom_vjp(forward, backward, x, w)


def _rounding_sums(x: Any, codes: Codes) -> Any:
    """Return the figures of an operand, float32, shape (4,): elements, those that became zero, and the sums of the
    squares and of the squared errors."""
    rounded, half = ops.cast(codes.numbers, "float32"), _power_of_two(-codes.exponent)
    exact = ops.cast(x, "float32") * _power_of_two(codes.exponent)
    lost = ops.sum(ops.cast(ops.logical_and(exact != 0.0, rounded == 0.0), "float32"))
    squares = [ops.sum(ops.square(each)) * half * half for each in (exact, exact - rounded)]
    return ops.stack([ops.cast(ops.size(x), "float32"), lost, *squares])


def _multiply_codes(
    left: Codes, right: Codes, dtype: str, *, transpose_left: bool = False, transpose_right: bool = False
) -> Any:
    """Return the product of two matrices of 8-bit numbers, accumulated in float32, rounded once."""
    a, b = ops.cast(left.numbers, "float32"), ops.cast(right.numbers, "float32")
    total = ops.matmul(ops.transpose(a) if transpose_left else a, ops.transpose(b) if transpose_right else b)
    exponent = left.exponent + right.exponent
    half = ops.right_shift(exponent, 1)  # two factors: their product may be outside of float32's range
    return ops.cast(total * _power_of_two(-half) * _power_of_two(half - exponent), dtype)


def einsum(axes: EinsumAxes, x: Any, kernel: Any, gradients: str) -> Any:
    """Return the einsum of an activation and a kernel, both in the compute dtype, as a product in 8 bits."""
    letters = _expand(axes.x, axes, len(x.shape))
    kept = [letter for letter in letters if letter not in axes.contracted]
    sizes = dict(zip(letters, ops.shape(x), strict=True)) | dict(zip(axes.kernel, kernel.shape, strict=True))
    size = math.prod(sizes[letter] for letter in axes.contracted)
    rows = ops.reshape(_transpose(x, letters, [*kept, *axes.contracted]), (-1, size))
    columns = ops.reshape(_transpose(kernel, axes.kernel, [*axes.contracted, *axes.free]), (size, -1))
    order = [*kept, *axes.free]
    out = ops.reshape(multiply(rows, columns, gradients), [sizes[letter] for letter in order])
    return _transpose(out, order, _expand(axes.out, axes, len(x.shape)))


def _expand(letters: str, axes: EinsumAxes, rank: int) -> list[str]:
    """Return the letters of an operand or result, with numbers for the axes of the ellipsis in an `x` of this rank."""
    elided = [str(number) for number in range(rank - len(axes.x.replace(".", "")))]
    return [each for letter in letters for each in (elided if letter == "." else [letter])]


def _transpose(x: Any, given: Sequence[str], wanted: Sequence[str]) -> Any:
    return x if list(given) == list(wanted) else ops.transpose(x, [list(given).index(letter) for letter in wanted])


def float8_call(layer: Any, settings: Float8) -> Callable[..., Any]:
    """Return the `call` of a Dense or EinsumDense with its product in 8 bits. That of a sparse input is the layer's.

    Args:
        layer: the layer, built, whose `call` is Keras's.
        settings: those of the policy.
    """
    call = type(layer).call.__get__(layer)
    axes = parse_einsum(layer.equation if isinstance(layer, keras.layers.EinsumDense) else "...x,xy->...y")
    assert axes is not None

    def call_in_8_bits(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not ENGINE.is_tensor(inputs):
            return call(inputs, *args, **kwargs)
        dtype = layer.compute_dtype
        kernel = ops.cast(ops.convert_to_tensor(layer.kernel), dtype)
        x = einsum(axes, ops.cast(inputs, dtype), kernel, settings.gradients)
        if layer.bias is not None:
            x = ops.add(x, layer.bias)
        return x if layer.activation is None else layer.activation(x)

    return copy_signature(call, call_in_8_bits)
