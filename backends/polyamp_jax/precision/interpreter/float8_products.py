"""Products of activations with parameters in 8 bits (S36): which equations they are, and their two passes.

The operands are arrays of 8-bit floats, or with scales of blocks those floats divided by them; the sums are float32.
With one scale per tensor the backward products reuse the 8-bit numbers of the forward pass; with scales of rows or
blocks they have their own, along the axis over which they sum. A product is linear in both operands, so its derivative
of first order is what is defined here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import UnsupportedError
from polyamp.recipe.float8 import (
    ACTIVATION_FORMAT,
    BLOCK,
    LARGEST_EXPONENTS,
    LARGEST_SCALE_EXPONENT,
    SECOND_DERIVATIVES,
    Float8,
    accepts_sizes,
)
from polyamp.recipe.resolved_policy import ModulePrecision
from polyamp_jax import compat
from polyamp_jax.arrays import materialize
from polyamp_jax.precision.interpreter.program_value import ProgramValue
from polyamp_jax.precision.interpreter.tag_primitive import tag

PRODUCT_TAG: Final = "product"
"""What the figures of a product's operands are tagged as, float32, shape (3, 4): see `MonitorSlots.products`."""
measures_products: Final[ContextVar[bool]] = ContextVar("polyamp_measures_products", default=False)
"""Whether the products of programs that are interpreted here tag their figures."""
_DTYPES: Final = {"float8_e4m3fn": jnp.float8_e4m3fn, "float8_e5m2": jnp.float8_e5m2}


class Product(NamedTuple):
    """An activation times a parameter, in one equation.

    Attributes:
        parameter: position of the parameter among the operands, 0 or 1.
        free: for each operand, its axes that are not contracted.
        contracted: for each operand, its contracted axes, in the same order.
        float8: the settings.
        path: where figures are measured, path of the module that owns the parameter; else None.
    """

    parameter: int
    free: tuple[tuple[int, ...], tuple[int, ...]]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    float8: Float8
    path: str | None = None


class Codes(NamedTuple):
    """An array in 8 bits: `numbers / 2 ** exponent`.

    Attributes:
        numbers: 8-bit floats.
        exponent: int32: a scalar, or one for each row (an axis of size 1) or each block of 32 numbers of a matrix.
    """

    numbers: jax.Array
    exponent: jax.Array


def find_product(
    eqn: compat.JaxprEqn, operands: Sequence[ProgramValue], place: ModulePrecision, reason: str
) -> tuple[Product | None, str]:
    """Return the product of a `dot_general` in 8 bits or None, and the reason for the report (S36)."""
    if place.float8 is None:
        return None, "compute (head or override)"
    contracted, batch = eqn.params["dimension_numbers"]
    parameters = [index for index, v in enumerate(operands) if v.traits.leaf and v.traits.owner is not None]
    if len(parameters) != 1 or any(batch):
        return None, "compute (no parameter)" if not parameters else "compute (batch axes)"
    shapes = [compat.atom_shape(atom) for atom in eqn.invars]
    axes = [tuple(contracted[0]), tuple(contracted[1])]
    free = [tuple(a for a in range(len(shape)) if a not in used) for shape, used in zip(shapes, axes, strict=True)]
    (index,) = parameters
    sizes = [math.prod(shapes[index][axis] for axis in some) for some in (free[index], axes[index])]
    if not accepts_sizes(sizes, place.float8.scaling) or not all(map(math.prod, shapes)):
        return None, "compute (size)"
    path = operands[index].traits.owner if measures_products.get() else None
    return Product(index, (free[0], free[1]), (axes[0], axes[1]), place.float8, path), "float8"


def sizes(product: Product, arrays: Sequence[Any]) -> tuple[int, int, int]:
    """Return the rows of the activation, the contracted size, and the other size of the parameter."""
    index = product.parameter
    shapes = [np.shape(array) for array in arrays]
    rows, outputs = (math.prod(shapes[at][axis] for axis in product.free[at]) for at in (1 - index, index))
    return rows, math.prod(shapes[index][axis] for axis in product.contracted[index]), outputs


def multiply(product: Product, arrays: Sequence[Any]) -> Any:
    """Return the result of the equation on operands in the compute dtype."""
    index, float8 = product.parameter, product.float8
    ordered = [
        jax.lax.transpose(array, (*free, *axes))
        for array, free, axes in zip(arrays, product.free, _in_the_parameters_order(product), strict=True)
    ]
    x, w = ordered[1 - index], ordered[index]
    count = len(product.contracted[0])
    if float8.scaling == "tensor":
        out = _product_function(count, float8, product.path)(x, w)
    else:
        matrices = [each.reshape(-1, math.prod(each.shape[each.ndim - count :])) for each in (x, w)]
        out = _product_function(1, float8, product.path)(*matrices)
        out = out.reshape(*x.shape[: x.ndim - count], *w.shape[: w.ndim - count])
    if index == 1:
        return out
    rows = len(product.free[1])
    return jax.lax.transpose(out, (*range(rows, out.ndim), *range(rows)))


def _in_the_parameters_order(product: Product) -> list[tuple[int, ...]]:
    """Return the contracted axes of both operands, in the order of the parameter's axes: that of the blocks."""
    pairs = sorted(zip(*product.contracted, strict=True), key=lambda pair: pair[product.parameter])
    return [tuple(pair[operand] for pair in pairs) for operand in (0, 1)]


@functools.lru_cache(maxsize=256)
def _product_function(contracted: int, float8: Float8, path: str | None) -> Callable[[Any, Any], Any]:
    """Return the product of x (*rows, *contracted) and w (*outputs, *contracted) with its derivative.

    Both are matrices with scales of rows or blocks. With a path, the backward pass tags the figures of the operands'
    rounding with it: once, also where a checkpoint runs the forward pass again.
    """
    scaling = float8.scaling

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> tuple[Any, tuple[Codes, Codes, Any]]:
        left, right = (quantize(each, ACTIVATION_FORMAT, scaling, 1) for each in (x, w))
        last = _last_axes(left.numbers, contracted), _last_axes(right.numbers, contracted)
        out = _multiply_codes(left, right, last, x.dtype, scaling)
        pairs = ((x, left), (w, right))
        figures = None if path is None else jnp.stack([_rounding_sums(*pair, scaling) for pair in pairs])
        if scaling != "tensor":  # the backward products sum over the other axes
            left, right = (quantize(each, ACTIVATION_FORMAT, scaling, 0) for each in (x, w))
        return out, (left, right, figures)

    def backward(residuals: tuple[Codes, Codes, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        left, right, figures = residuals
        g = quantize(cotangent, float8.gradients, scaling, 1)
        rows, outputs = left.numbers.ndim - contracted, right.numbers.ndim - contracted
        over = _last_axes(g.numbers, outputs), tuple(range(outputs))
        dx = _multiply_codes(g, right, over, cotangent.dtype, scaling)
        if path is not None:
            figures = jnp.concatenate([figures, _rounding_sums(cotangent, g, scaling)[None]])
        if scaling != "tensor":
            g = quantize(cotangent, float8.gradients, scaling, 0)
        dw = _multiply_codes(g, left, (tuple(range(rows)), tuple(range(rows))), cotangent.dtype, scaling)
        return dx, dw, figures

    gradients_of = jax.custom_vjp(backward)
    gradients_of.defvjp(lambda codes, cotangent: (backward(codes, cotangent), None), _refuse_second_derivatives)

    def tagged(residuals: tuple[Codes, Codes, Any], cotangent: Any) -> tuple[Any, Any]:
        dx, dw, figures = gradients_of(residuals, cotangent)
        if path is not None:
            dx, dw, _ = materialize((dx, dw, tag(figures, path, 0, PRODUCT_TAG)))  # a gradient keeps its figures
        return dx, dw

    product.defvjp(forward, tagged)
    return product


def _refuse_second_derivatives(*_: Any) -> Any:
    raise UnsupportedError(SECOND_DERIVATIVES)


def quantize(x: Any, form: str, scaling: str = "tensor", axis: int = 1) -> Codes:
    """Return an array in 8 bits: times powers of two, each the largest with which its numbers fit, to nearest even.

    Numbers that share a scale with infinity or NaN become NaN (S36). Nothing is cut to the largest number.

    Args:
        x: floats, at least one: of any shape, or a matrix with scales of rows or blocks.
        form: "float8_e4m3fn" or "float8_e5m2".
        scaling: which numbers share a scale: "tensor", "row" or "block32".
        axis: the axis over which the product sums: that of the rows and blocks.
    """
    bits = _not_mapped(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF)
    largest = _largest(bits, scaling, axis)  # of integers: XLA's largest float on a CPU is not NaN where one is
    exponent, fraction = (largest >> 23) & 0xFF, largest & 0x7FFFFF
    above = (fraction > 0x600000).astype(jnp.int32)  # beyond 1.75, the significand of both formats' largest number
    k = jnp.minimum(LARGEST_EXPONENTS[form] + 127 - exponent - above, LARGEST_SCALE_EXPONENT)
    k = jnp.where((exponent == 0) | (exponent == 0xFF), 0, k)
    scale = jnp.where(exponent == 0xFF, np.float32(np.nan), _power_of_two(k))
    if scaling == "block32":
        scale = _spread(scale, x.shape[axis], axis)
    return Codes((x.astype(jnp.float32) * scale).astype(_DTYPES[form]), k)


def _largest(bits: Any, scaling: str, axis: int) -> Any:
    """Return the largest of the integers whose numbers share a scale."""
    if scaling == "tensor":
        return jnp.max(bits)
    if scaling == "row":
        return jnp.max(bits, axis, keepdims=True)
    missing = -bits.shape[axis] % BLOCK  # in the last block of a number of rows
    bits = jnp.pad(bits, [(0, missing if each == axis else 0) for each in (0, 1)])
    blocks = (*bits.shape[:axis], bits.shape[axis] // BLOCK, BLOCK, *bits.shape[axis + 1 :])
    return jnp.max(bits.reshape(blocks), axis + 1)


def _spread(of_blocks: Any, size: int, axis: int) -> Any:
    """Return the number of each block for each of the `size` elements along an axis."""
    return jax.lax.slice_in_dim(jnp.repeat(of_blocks, BLOCK, axis), 0, size, axis=axis)


@jax.custom_batching.custom_vmap
def _not_mapped(bits: Any) -> Any:
    return bits


@_not_mapped.def_vmap
def _refuse_vmap(axis_size: int, in_batched: Any, bits: Any) -> Any:
    """Reject a product inside `jax.vmap`, where every example would have scales of its own."""
    del axis_size, in_batched, bits
    raise UnsupportedError(
        "float8: a product under jax.vmap sees one example at a time, and its scales are those of the whole batch "
        "(S36). Call the model with the whole batch; an equinox model with polyamp.init(..., axis_name='batch'), which "
        "maps it inside of the policy."
    )


def _rounding_sums(x: Any, codes: Codes, scaling: str) -> Any:
    """Return the figures of an operand, whose rows or blocks are along axis 1, float32, shape (4,): elements, those
    that became zero, and the sums of the squares and of the squared errors."""
    exponent = _spread(codes.exponent, x.shape[1], 1) if scaling == "block32" else codes.exponent
    rounded, unscale = codes.numbers.astype(jnp.float32), _power_of_two(-exponent)
    exact = x.astype(jnp.float32) * _power_of_two(exponent)
    lost = jnp.sum((exact != 0.0) & (rounded == 0.0)).astype(jnp.float32)
    squares = [jnp.sum(jnp.square(each * unscale)) for each in (exact, exact - rounded)]
    return jnp.stack([jnp.full_like(lost, x.size), lost, *squares])


def _power_of_two(exponent: Any) -> Any:
    """Return 2 ** exponent in float32, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _last_axes(array: Any, count: int) -> tuple[int, ...]:
    return tuple(range(array.ndim - count, array.ndim))


def _multiply_codes(left: Codes, right: Codes, axes: tuple[Any, Any], dtype: Any, scaling: str) -> Any:
    """Return the product of two arrays of 8-bit numbers over these axes, accumulated in float32, rounded once."""
    if scaling == "block32":
        a, b = (_half(codes, axis) for codes, (axis,) in zip((left, right), axes, strict=True))
        total = jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)
        return (4.0 * total).astype(dtype)
    total = jax.lax.dot_general(left.numbers, right.numbers, (axes, ((), ())), preferred_element_type=jnp.float32)
    if scaling == "row":
        exponent = left.exponent.reshape(-1, 1) + right.exponent.reshape(1, -1)
    else:
        exponent = left.exponent + right.exponent
    half = exponent >> 1  # two factors: their product may be outside of float32's range
    return (total * _power_of_two(-half) * _power_of_two(half - exponent)).astype(dtype)


def _half(codes: Codes, axis: int) -> Any:
    """Return the numbers divided by their blocks' scales, in float32: half of them, since the whole may be 2^128."""
    scale = _spread(_power_of_two(-codes.exponent - 1), codes.numbers.shape[axis], axis)
    return codes.numbers.astype(jnp.float32) * scale
