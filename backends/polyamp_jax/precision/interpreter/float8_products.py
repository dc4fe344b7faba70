"""Products of activations with parameters in 8 bits (S36): which equations they are, and their two passes.

The operands are arrays of 8-bit floats, the sums float32. The backward products reuse the 8-bit numbers of the forward
pass. A product is linear in both operands, so its derivative of first order is what is defined here.
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
    LARGEST_EXPONENTS,
    LARGEST_SCALE_EXPONENT,
    SECOND_DERIVATIVES,
    SIZE_FACTOR,
    Float8,
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
    """An array in 8 bits: `numbers / 2 ** exponent`, a scalar of int32."""

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
    if any(size % SIZE_FACTOR for size in sizes) or not all(map(math.prod, shapes)):
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
    index = product.parameter
    ordered = [
        jax.lax.transpose(array, (*free, *axes))
        for array, free, axes in zip(arrays, product.free, product.contracted, strict=True)
    ]
    x, w = ordered[1 - index], ordered[index]
    out = _product_function(len(product.contracted[0]), product.float8.gradients, product.path)(x, w)
    if index == 1:
        return out
    rows = len(product.free[1])
    return jax.lax.transpose(out, (*range(rows, out.ndim), *range(rows)))


@functools.lru_cache(maxsize=256)
def _product_function(contracted: int, gradients: str, path: str | None) -> Callable[[Any, Any], Any]:
    """Return the product of x (*rows, *contracted) and w (*outputs, *contracted) with its derivative.

    With a path, the backward pass tags the figures of the operands' rounding with it: once, also where a checkpoint
    runs the forward pass again.
    """

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return forward(x, w)[0]

    def forward(x: Any, w: Any) -> tuple[Any, tuple[Codes, Codes, Any]]:
        left, right = quantize(x, ACTIVATION_FORMAT), quantize(w, ACTIVATION_FORMAT)
        last = _last_axes(left.numbers, contracted), _last_axes(right.numbers, contracted)
        figures = None if path is None else jnp.stack([_rounding_sums(x, left), _rounding_sums(w, right)])
        return _multiply_codes(left, right, last, x.dtype), (left, right, figures)

    def backward(residuals: tuple[Codes, Codes, Any], cotangent: Any) -> tuple[Any, Any, Any]:
        left, right, figures = residuals
        g = quantize(cotangent, gradients)
        rows, outputs = left.numbers.ndim - contracted, right.numbers.ndim - contracted
        dx = _multiply_codes(g, right, (_last_axes(g.numbers, outputs), tuple(range(outputs))), cotangent.dtype)
        dw = _multiply_codes(g, left, (tuple(range(rows)), tuple(range(rows))), cotangent.dtype)
        return dx, dw, None if path is None else jnp.concatenate([figures, _rounding_sums(cotangent, g)[None]])

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


def quantize(x: Any, form: str) -> Codes:
    """Return an array in 8 bits: times the largest power of two with which its largest magnitude fits, to nearest even.

    An array with infinity or NaN becomes NaN (S36). Nothing is cut to the largest number.

    Args:
        x: floats of any shape, at least one.
        form: "float8_e4m3fn" or "float8_e5m2".
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    largest = _largest(bits)  # of integers: XLA's largest float on a CPU is not NaN where one is
    exponent, fraction = (largest >> 23) & 0xFF, largest & 0x7FFFFF
    above = (fraction > 0x600000).astype(jnp.int32)  # beyond 1.75, the significand of both formats' largest number
    k = jnp.minimum(LARGEST_EXPONENTS[form] + 127 - exponent - above, LARGEST_SCALE_EXPONENT)
    k = jnp.where((exponent == 0) | (exponent == 0xFF), 0, k)
    scale = jnp.where(exponent == 0xFF, np.float32(np.nan), _power_of_two(k))
    return Codes((x.astype(jnp.float32) * scale).astype(_DTYPES[form]), k)


@jax.custom_batching.custom_vmap
def _largest(bits: Any) -> Any:
    return jnp.max(bits)


@_largest.def_vmap
def _refuse_vmap(axis_size: int, in_batched: Any, bits: Any) -> Any:
    """Reject a product inside `jax.vmap`, where every example would have a scale of its own."""
    del axis_size, in_batched, bits
    raise UnsupportedError(
        "float8: a product under jax.vmap sees one example at a time, and its scale is that of the whole tensor (S36). "
        "Call the model with the whole batch; an equinox model with polyamp.init(..., axis_name='batch'), which maps "
        "it inside of the policy."
    )


def _rounding_sums(x: Any, codes: Codes) -> Any:
    """Return the figures of an operand, float32, shape (4,): elements, those that became zero, and the sums of the
    squares and of the squared errors."""
    rounded, half = codes.numbers.astype(jnp.float32), _power_of_two(-codes.exponent)
    exact = x.astype(jnp.float32) * _power_of_two(codes.exponent)
    lost = jnp.sum((exact != 0.0) & (rounded == 0.0)).astype(jnp.float32)
    squares = [jnp.sum(jnp.square(each)) * half * half for each in (exact, exact - rounded)]
    return jnp.stack([jnp.full_like(lost, x.size), lost, *squares])


def _power_of_two(exponent: Any) -> Any:
    """Return 2 ** exponent in float32, for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _last_axes(array: Any, count: int) -> tuple[int, ...]:
    return tuple(range(array.ndim - count, array.ndim))


def _multiply_codes(left: Codes, right: Codes, axes: tuple[Any, Any], dtype: Any) -> Any:
    """Return the product of two arrays of 8-bit numbers over these axes, accumulated in float32, rounded once."""
    total = jax.lax.dot_general(left.numbers, right.numbers, (axes, ((), ())), preferred_element_type=jnp.float32)
    exponent = left.exponent + right.exponent
    half = exponent >> 1  # two factors: their product may be outside of float32's range
    return (total * _power_of_two(-half) * _power_of_two(half - exponent)).astype(dtype)
