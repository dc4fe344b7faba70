"""Products in 8 bits in NumPy (S36): the reference of every backend's codes and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from polyamp.recipe.float8 import (
    ACTIVATION_FORMAT,
    LARGEST_EXPONENTS,
    LARGEST_SCALE_EXPONENT,
    SIZE_FACTOR,
    Float8,
)
from polyamp.reference.arrays import DTYPES, Array
from polyamp.reference.tensor import Tensor, cast, tensor

_FORMATS: Final = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


class QuantizedArray(NamedTuple):
    """Array in 8 bits: `numbers / 2 ** exponent`."""

    numbers: Array
    exponent: int


def quantize(values: Any, form: str) -> QuantizedArray:
    """Return `values` times the largest power of two with which the largest magnitude fits `form`, to nearest even.

    With infinity or NaN in `values` every number is NaN. Magnitudes below float32's smallest normal number count as 0.

    Args:
        values: floats of any shape, at least one.
        form: "float8_e4m3fn" or "float8_e5m2".

    Example:
        >>> made = quantize(np.array([0.5, -3.0]), "float8_e4m3fn")
        >>> made.numbers.tolist(), made.exponent
        ([64.0, -384.0], 7)
    """
    wide = np.asarray(values, np.float32)
    largest = np.abs(wide).max()
    if not np.isfinite(largest):
        return QuantizedArray(np.full(wide.shape, np.nan, _FORMATS[form]), 0)
    if largest < np.finfo(np.float32).smallest_normal:
        return QuantizedArray(np.zeros(wide.shape, _FORMATS[form]), 0)
    significand, above = np.frexp(largest)  # the significand is in [0.5, 1)
    exponent = LARGEST_EXPONENTS[form] - (int(above) - 1) - int(2.0 * significand > 1.75)
    exponent = min(exponent, LARGEST_SCALE_EXPONENT)
    return QuantizedArray(np.ldexp(wide, exponent).astype(_FORMATS[form]), exponent)


def multiply_codes(left: QuantizedArray, right: QuantizedArray, dtype: Any) -> Array:
    """Return the product of two matrices of 8-bit numbers, accumulated in float64 and rounded once to `dtype`."""
    with np.errstate(all="ignore"):
        total = left.numbers.astype(np.float64) @ right.numbers.astype(np.float64)
        scaled: Array = np.ldexp(total, -(left.exponent + right.exponent)).astype(dtype)
    return scaled


def accepts(kernel: Array) -> bool:
    """Return whether a parameter's sizes are those of products in 8 bits."""
    return not any(size % SIZE_FACTOR for size in kernel.shape)


def rounding_sums(values: Any, codes: QuantizedArray) -> Array:
    """Return the figures of an operand's rounding for a monitor, a row of `MonitorSlots.products`, float64.

    Example:
        >>> values = np.array([448.0, 2.0**-12, 0.0, 1.0])
        >>> rounding_sums(values, quantize(values, "float8_e4m3fn"))[:3].tolist()
        [4.0, 1.0, 200705.00000005960]
    """
    exact = np.asarray(values, np.float64)
    rounded = np.ldexp(codes.numbers.astype(np.float64), -codes.exponent)
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
    rows, columns = quantize(x.data, ACTIVATION_FORMAT), quantize(w.data, ACTIVATION_FORMAT)

    def back_to_x(g: Array) -> Array:
        return multiply_codes(quantize(g, settings.gradients), _transpose(columns), dtype)

    def back_to_kernel(g: Array) -> Array:
        codes = quantize(g, settings.gradients)
        if watch is not None:
            pairs = ((x.data, rows), (w.data, columns), (g, codes))
            watch(np.stack([rounding_sums(*pair) for pair in pairs]))
        return multiply_codes(_transpose(rows), codes, dtype)

    return Tensor(multiply_codes(rows, columns, dtype), [(x, back_to_x), (w, back_to_kernel)])


def _transpose(codes: QuantizedArray) -> QuantizedArray:
    return codes._replace(numbers=codes.numbers.T)
