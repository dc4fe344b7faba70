"""Products in 8 bits in Keras (S36): codes of a tensor, the product with its gradients, and the `call` of dense layers.

What is saved of an activation is codes: those of the forward product, or with scales of rows or blocks those of the
backward product, which sums over another axis. No Keras backend has an operation that multiplies 8-bit floats, so the
codes are multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import keras
from keras import ops

from polyamp.context_values import temporary_value
from polyamp.recipe.float8 import ACTIVATION_FORMAT, Float8
from polyamp.rules.float8_codes import Quantizer, ScaledCodes
from polyamp_keras.engine import ENGINE
from polyamp_keras.precision.layer_method_wrappers import copy_signature

quantizer: Final = Quantizer(ops, ops.cast, ENGINE.bitcast)
"""Rounding to 8 bits."""
FigureSink = Callable[[Any], Any]
"""Receives the figures of a product in its backward pass: float32, shape (3, 4), see `MonitorSlots.products`. On JAX
the gradients depend on what it returns."""
product_watch: Final[ContextVar[Callable[[Any, Any], FigureSink | None] | None]] = ContextVar(
    "polyamp_product_watch", default=None
)
"""Called with the two matrices of each product that runs now. It returns where the product's figures go, or None: they
are not computed."""


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


def multiply(x: Any, w: Any, settings: Float8) -> Any:
    """Return x (rows, k) times w (k, columns), both in the compute dtype, with its two gradients: three products of
    8-bit numbers.

    Args:
        x: the activation.
        w: the parameter.
        settings: scaling, and the format of the gradient that enters the backward products.
    """
    dtype, scaling = keras.backend.standardize_dtype(x.dtype), settings.scaling
    watch = product_watch.get()
    sink = None if watch is None else watch(x, w)

    def forward(x: Any, w: Any) -> tuple[Any, tuple[Any, ...]]:
        left = quantizer.quantize(x, ACTIVATION_FORMAT, scaling, 1)
        right = quantizer.quantize(w, ACTIVATION_FORMAT, scaling, 0)
        out = _multiply_codes(left, right, dtype, scaling)
        pairs = ((x, left, scaling, 1), (w, right, scaling, 0))
        figures = [] if sink is None else [ops.stack([quantizer.rounding_sums(*pair) for pair in pairs])]
        if scaling != "tensor":  # the backward products sum over the other axes
            left = quantizer.quantize(x, ACTIVATION_FORMAT, scaling, 0)
            right = quantizer.quantize(w, ACTIVATION_FORMAT, scaling, 1)
        return out, (*left, *right, *figures)

    def backward(residuals: tuple[Any, ...], g: Any) -> tuple[Any, ...]:
        left, right = ScaledCodes(*residuals[:2]), ScaledCodes(*residuals[2:4])
        codes = quantizer.quantize(g, settings.gradients, scaling, 1)
        dx = _multiply_codes(codes, right, dtype, scaling, transpose_right=True)
        figures: tuple[Any, ...] = ()
        if sink is not None:
            figures = (ops.concatenate([residuals[4], quantizer.rounding_sums(g, codes, scaling)[None]]),)
        if scaling != "tensor":
            codes = quantizer.quantize(g, settings.gradients, scaling, 0)
        return dx, _multiply_codes(left, codes, dtype, scaling, transpose_left=True), *figures

    return ENGINE.custom_vjp(forward, backward, x, w, sink)


def _multiply_codes(
    left: ScaledCodes,
    right: ScaledCodes,
    dtype: str,
    scaling: str,
    *,
    transpose_left: bool = False,
    transpose_right: bool = False,
) -> Any:
    """Return the product of two matrices of 8-bit numbers, accumulated in float32, rounded once."""
    if scaling == "block32":
        a, b = quantizer.halve(left, 0 if transpose_left else 1), quantizer.halve(right, 1 if transpose_right else 0)
    else:
        a, b = ops.cast(left.numbers, "float32"), ops.cast(right.numbers, "float32")
    total = ops.matmul(ops.transpose(a) if transpose_left else a, ops.transpose(b) if transpose_right else b)
    if scaling == "block32":
        return ops.cast(4.0 * total, dtype)
    rows, columns = left.exponent, right.exponent
    if scaling == "row":
        rows, columns = ops.reshape(rows, (-1, 1)), ops.reshape(columns, (1, -1))
    return quantizer.unscale(total, rows + columns, dtype)


def einsum(axes: EinsumAxes, x: Any, kernel: Any, settings: Float8) -> Any:
    """Return the einsum of an activation and a kernel, both in the compute dtype, as a product in 8 bits.

    Several contracted axes are one axis of blocks, in the order in which the kernel has them.
    """
    letters = _expand(axes.x, axes, len(x.shape))
    kept = [letter for letter in letters if letter not in axes.contracted]
    sizes = dict(zip(letters, ops.shape(x), strict=True)) | dict(zip(axes.kernel, kernel.shape, strict=True))
    size = math.prod(sizes[letter] for letter in axes.contracted)
    rows = ops.reshape(_transpose(x, letters, [*kept, *axes.contracted]), (-1, size))
    columns = ops.reshape(_transpose(kernel, axes.kernel, [*axes.contracted, *axes.free]), (size, -1))
    order = [*kept, *axes.free]
    out = ops.reshape(multiply(rows, columns, settings), [sizes[letter] for letter in order])
    return _transpose(out, order, _expand(axes.out, axes, len(x.shape)))


def _expand(letters: str, axes: EinsumAxes, rank: int) -> list[str]:
    """Return the letters of an operand or result, with numbers for the axes of the ellipsis in an `x` of this rank."""
    elided = [str(number) for number in range(rank - len(axes.x.replace(".", "")))]
    return [each for letter in letters for each in (elided if letter == "." else [letter])]


def _transpose(x: Any, given: Sequence[str], wanted: Sequence[str]) -> Any:
    return x if list(given) == list(wanted) else ops.transpose(x, [list(given).index(letter) for letter in wanted])


def watch_products(call: Callable[..., Any], watch: Callable[[Any, Any], FigureSink | None]) -> Callable[..., Any]:
    """Return a layer's `call` in which `watch` is called with the two matrices of each product in 8 bits."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with temporary_value(product_watch, watch):
            return call(*args, **kwargs)

    return copy_signature(call, called)


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
        x = einsum(axes, ops.cast(inputs, dtype), kernel, settings)
        if layer.bias is not None:
            x = ops.add(x, layer.bias)
        return x if layer.activation is None else layer.activation(x)

    return copy_signature(call, call_in_8_bits)
