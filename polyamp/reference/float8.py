"""Products in 8 bits in NumPy (S36): the reference of every backend's codes and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from polyamp.recipe.float8 import (
    ACTIVATION_FORMAT,
    BLOCK,
    LARGEST_EXPONENTS,
    LARGEST_SCALE_EXPONENT,
    Float8,
    accepts_sizes,
)
from polyamp.reference.arrays import DTYPES, Array
from polyamp.reference.tensor import Tensor, cast, tensor


class QuantizedArray(NamedTuple):
    """Array in 8 bits: `numbers / 2 ** exponent`.

    Attributes:
        numbers: 8-bit floats.
        exponent: integers: one without axes, or for each row (an axis of size 1), or for each block of 32 numbers.
    """

    numbers: Array
    exponent: Array

    def to_float64(self) -> Array:
        """Return the numbers divided by their scales, which is exact."""
        exponent = self.exponent
        for axis, size in enumerate(self.numbers.shape if exponent.ndim else ()):
            if 1 < exponent.shape[axis] < size:
                exponent = np.repeat(exponent, BLOCK, axis).take(range(size), axis)
        found: Array = np.ldexp(self.numbers.astype(np.float64), -exponent)
        return found


def quantize(values: Any, form: str, scaling: str = "tensor", axis: int = -1) -> QuantizedArray:
    """Return `values` times powers of two, each the largest with which its numbers fit `form`, to nearest even.

    Numbers that share a scale with infinity or NaN become NaN. Magnitudes below float32's smallest normal number count
    as 0.

    Args:
        values: floats of any shape, at least one.
        form: "float8_e4m3fn" or "float8_e5m2".
        scaling: which numbers share a scale: those of the "tensor"; of a "row" along `axis`; or of 32 in a row with
            "block32", where the last block of a row may be shorter.
        axis: the axis over which the product sums.

    Example:
        >>> made = quantize(np.array([0.5, -3.0]), "float8_e4m3fn")
        >>> made.numbers.tolist(), made.exponent.tolist()
        ([64.0, -384.0], 7)
        >>> quantize(np.array([[0.5, -3.0], [64.0, 8.0]]), "float8_e4m3fn", "row").exponent.tolist()
        [[7], [2]]
    """
    wide = np.asarray(values, np.float32)
    if scaling != "block32":
        over = None if scaling == "tensor" else axis
        return _scale(wide, np.abs(wide).max(axis=over, keepdims=over is not None), form)
    blocks = [
        quantize(wide.take(range(start, min(start + BLOCK, wide.shape[axis])), axis), form, "row", axis)
        for start in range(0, wide.shape[axis], BLOCK)
    ]
    return QuantizedArray(*(np.concatenate(parts, axis) for parts in zip(*blocks, strict=True)))


def _scale(wide: Array, largest: Array, form: str) -> QuantizedArray:
    """Return `wide` in 8 bits, with the largest magnitudes of the numbers that share a scale."""
    finite = np.isfinite(largest)
    significand, above = np.frexp(np.where(finite, largest, 1.0))  # the significand is in [0.5, 1)
    exponent = LARGEST_EXPONENTS[form] - (above - 1) - (2.0 * significand > 1.75)
    counts = finite & (largest >= np.finfo(np.float32).smallest_normal)
    exponent = np.where(counts, np.minimum(exponent, LARGEST_SCALE_EXPONENT), 0)
    scaled = np.where(counts, np.ldexp(wide, exponent), np.where(finite, np.float32(0.0), np.float32(np.nan)))
    return QuantizedArray(scaled.astype(getattr(ml_dtypes, form)), exponent)


def multiply_codes(left: QuantizedArray, right: QuantizedArray, dtype: Any) -> Array:
    """Return the product of two matrices in 8 bits, accumulated in float64 and rounded once to `dtype`."""
    with np.errstate(all="ignore"):
        product: Array = (left.to_float64() @ right.to_float64()).astype(dtype)
    return product


def accepts(kernel: Array, settings: Float8) -> bool:
    """Return whether a parameter's sizes are those of products in 8 bits."""
    return accepts_sizes(kernel.shape, settings.scaling)


def multiply(x: Array, w: Array, settings: Float8, dtype: Any, *, forms: tuple[str, str] | None = None) -> Array:
    """Return x @ w as a product in 8 bits, with codes along the axis over which it sums.

    The gradients of x @ w for the cotangent g are such products too: g by w transposed, and x transposed by g.

    Args:
        x: (rows, inputs).
        w: (inputs, outputs).
        settings: those of the policy.
        dtype: dtype of the result.
        forms: formats of both; that of activations and parameters by default.
    """
    left, right = forms or (ACTIVATION_FORMAT, ACTIVATION_FORMAT)
    codes = quantize(x, left, settings.scaling, -1), quantize(w, right, settings.scaling, 0)
    return multiply_codes(*codes, dtype)


def gradients(x: Array, w: Array, g: Array, settings: Float8, dtype: Any) -> tuple[Array, Array]:
    """Return the gradients of x @ w by x and by w for the cotangent g: two products in 8 bits."""
    by_x = multiply(g, w.T, settings, dtype, forms=(settings.gradients, ACTIVATION_FORMAT))
    return by_x, multiply(x.T, g, settings, dtype, forms=(ACTIVATION_FORMAT, settings.gradients))


def rounding_sums(values: Any, codes: QuantizedArray) -> Array:
    """Return the figures of an operand's rounding for a monitor, a row of `MonitorSlots.products`, float64.

    Example:
        >>> values = np.array([448.0, 2.0**-12, 0.0, 1.0])
        >>> rounding_sums(values, quantize(values, "float8_e4m3fn"))[:3].tolist()
        [4.0, 1.0, 200705.0000000596]
    """
    exact = np.asarray(values, np.float64)
    rounded = codes.to_float64()
    lost = (exact != 0.0) & (rounded == 0.0)
    return np.array([exact.size, lost.sum(), np.sum(exact**2), np.sum((exact - rounded) ** 2)])


def matmul(
    left: Any, kernel: Any, compute: str, settings: Float8, watch: Callable[[Array], None] | None = None
) -> Tensor:
    """Return x @ kernel, and differentiate it, with three products of 8-bit numbers.

    In its backward pass `watch`, if given, receives the figures of the operands' rounding, shape (3, 4).
    """
    x, w = cast(left, compute), cast(tensor(kernel), compute)
    dtype = DTYPES[compute]

    def back_to_x(g: Array) -> Array:
        return gradients(x.data, w.data, g, settings, dtype)[0]

    def back_to_kernel(g: Array) -> Array:
        if watch is not None:
            forms = (ACTIVATION_FORMAT, ACTIVATION_FORMAT, settings.gradients)
            operands = zip((x.data, w.data, g), forms, (-1, 0, -1), strict=True)
            watch(
                np.stack([rounding_sums(each, quantize(each, form, settings.scaling, a)) for each, form, a in operands])
            )
        return gradients(x.data, w.data, g, settings, dtype)[1]

    return Tensor(multiply(x.data, w.data, settings, dtype), [(x, back_to_x), (w, back_to_kernel)])
