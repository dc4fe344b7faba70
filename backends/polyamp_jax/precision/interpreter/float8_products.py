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
from polyamp.recipe.float8 import ACTIVATION_FORMAT, SECOND_DERIVATIVES, Float8, accepts_sizes
from polyamp.recipe.resolved_policy import ModulePrecision
from polyamp.rules.float8_codes import Quantizer, ScaledCodes
from polyamp_jax import compat
from polyamp_jax.arrays import materialize
from polyamp_jax.precision.interpreter.program_value import ProgramValue
from polyamp_jax.precision.interpreter.tag_primitive import tag

PRODUCT_TAG: Final = "product"
"""What the figures of a product's operands are tagged as, float32, shape (3, 4): see `MonitorSlots.products`."""
measures_products: Final[ContextVar[bool]] = ContextVar("polyamp_measures_products", default=False)
"""Whether the products of programs that are interpreted here tag their figures."""


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

    def forward(x: Any, w: Any) -> tuple[Any, tuple[ScaledCodes, ScaledCodes, Any]]:
        left, right = (quantizer.quantize(each, ACTIVATION_FORMAT, scaling, 1) for each in (x, w))
        last = _last_axes(left.numbers, contracted), _last_axes(right.numbers, contracted)
        out = _multiply_codes(left, right, last, x.dtype, scaling)
        pairs = ((x, left), (w, right))
        figures = None if path is None else jnp.stack([quantizer.rounding_sums(*pair, scaling) for pair in pairs])
        if scaling != "tensor":  # the backward products sum over the other axes
            left, right = (quantizer.quantize(each, ACTIVATION_FORMAT, scaling, 0) for each in (x, w))
        return out, (left, right, figures)

    def backward(residuals: tuple[ScaledCodes, ScaledCodes, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        left, right, figures = residuals
        g = quantizer.quantize(cotangent, float8.gradients, scaling, 1)
        rows, outputs = left.numbers.ndim - contracted, right.numbers.ndim - contracted
        over = _last_axes(g.numbers, outputs), tuple(range(outputs))
        dx = _multiply_codes(g, right, over, cotangent.dtype, scaling)
        if path is not None:
            figures = jnp.concatenate([figures, quantizer.rounding_sums(cotangent, g, scaling)[None]])
        if scaling != "tensor":
            g = quantizer.quantize(cotangent, float8.gradients, scaling, 0)
        dw = _multiply_codes(g, left, (tuple(range(rows)), tuple(range(rows))), cotangent.dtype, scaling)
        return dx, dw, figures

    gradients_of = jax.custom_vjp(backward)
    gradients_of.defvjp(lambda codes, cotangent: (backward(codes, cotangent), None), _refuse_second_derivatives)

    def tagged(residuals: tuple[ScaledCodes, ScaledCodes, Any], cotangent: Any) -> tuple[Any, Any]:
        dx, dw, figures = gradients_of(residuals, cotangent)
        if path is not None:
            dx, dw, _ = materialize((dx, dw, tag(figures, path, 0, PRODUCT_TAG)))  # a gradient keeps its figures
        return dx, dw

    product.defvjp(forward, tagged)
    return product


def _refuse_second_derivatives(*_: Any) -> Any:
    raise UnsupportedError(SECOND_DERIVATIVES)


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


quantizer: Final = Quantizer(
    jnp, lambda x, dtype: jnp.asarray(x).astype(dtype), jax.lax.bitcast_convert_type, check_bits=_not_mapped
)
"""Rounding to 8 bits."""


def _last_axes(array: Any, count: int) -> tuple[int, ...]:
    return tuple(range(array.ndim - count, array.ndim))


def _multiply_codes(left: ScaledCodes, right: ScaledCodes, axes: tuple[Any, Any], dtype: Any, scaling: str) -> Any:
    """Return the product of two arrays of 8-bit numbers over these axes, accumulated in float32, rounded once."""
    if scaling == "block32":
        a, b = (quantizer.halve(codes, axis) for codes, (axis,) in zip((left, right), axes, strict=True))
        total = jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)
        return (4.0 * total).astype(dtype)
    total = jax.lax.dot_general(left.numbers, right.numbers, (axes, ((), ())), preferred_element_type=jnp.float32)
    if scaling == "row":
        exponent = left.exponent.reshape(-1, 1) + right.exponent.reshape(1, -1)
    else:
        exponent = left.exponent + right.exponent
    return quantizer.unscale(total, exponent, dtype)
