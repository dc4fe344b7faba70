"""Tensors in 8 bits (S36): the scales of numbers that share one, their codes, and the figures of what rounding lost.

The functions are those that `jax.numpy` and `keras.ops` have under NumPy's names, so that one code is of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from polyamp.recipe.float8 import BLOCK, LARGEST_EXPONENTS, LARGEST_SCALE_EXPONENT

_SIGNIFICAND_LIMIT: Final = 0x600000
"""Fraction bits of 1.75, the significand of both formats' largest number."""


class ScaledCodes(NamedTuple):
    """A tensor in 8 bits: `numbers / 2 ** exponent`.

    Attributes:
        numbers: 8-bit floats.
        exponent: int32: a scalar, or one for each row (an axis of size 1) or each block of 32 numbers of a matrix.
    """

    numbers: Any
    exponent: Any


class Quantizer:
    """Rounding of a framework's tensors to 8 bits.

    Args:
        ops: module of its functions, under NumPy's names.
        cast: `(tensor, dtype)` -> the tensor in another dtype.
        bitcast: `(tensor, dtype)` -> its bits as another dtype of the same size.
        check_bits: called with the bits of each tensor that is rounded, whose result takes their place.
    """

    def __init__(
        self,
        ops: Any,
        cast: Callable[[Any, Any], Any],
        bitcast: Callable[[Any, str], Any],
        check_bits: Callable[[Any], Any] = lambda bits: bits,
    ) -> None:
        self._ops, self._cast, self._bitcast, self._check_bits = ops, cast, bitcast, check_bits

    def quantize(self, x: Any, form: str, scaling: str = "tensor", axis: int = 1) -> ScaledCodes:
        """Return a tensor in 8 bits: times powers of two, each the largest with which its numbers fit, to nearest even.

        Numbers that share a scale with infinity or NaN become NaN (S36). Nothing is cut to the largest number.

        Args:
            x: floats of any shape, or a matrix with scales of rows or blocks.
            form: "float8_e4m3fn" or "float8_e5m2".
            scaling: which numbers share a scale: "tensor", "row" or "block32".
            axis: the axis over which the product sums: that of the rows and blocks.
        """
        ops, wide = self._ops, self._cast(x, "float32")
        bits = self._check_bits(ops.bitwise_and(self._bitcast(wide, "int32"), 0x7FFFFFFF))
        largest = self._largest(bits, scaling, axis)  # of integers: XLA's largest float on a CPU loses a NaN
        exponent, fraction = ops.right_shift(largest, 23), ops.bitwise_and(largest, 0x7FFFFF)
        above = self._cast(fraction > _SIGNIFICAND_LIMIT, "int32")
        k = ops.minimum(LARGEST_EXPONENTS[form] + 127 - exponent - above, LARGEST_SCALE_EXPONENT)
        k = ops.where(ops.logical_or(exponent == 0, exponent == 0xFF), ops.zeros_like(k), k)
        scale = ops.where(exponent == 0xFF, math.nan, self._power_of_two(k))
        if scaling == "block32":
            scale = self._spread(scale, ops.shape(x)[axis], axis)
        return ScaledCodes(self._cast(wide * scale, form), k)

    def rounding_sums(self, x: Any, codes: ScaledCodes, scaling: str, axis: int = 1) -> Any:
        """Return the figures of an operand, whose rows or blocks are along an axis, float32, shape (4,): elements,
        those that became zero, and the sums of the squares and of the squared errors."""
        ops, exponent = self._ops, codes.exponent
        if scaling == "block32":
            exponent = self._spread(exponent, ops.shape(x)[axis], axis)
        rounded, unscale = self._cast(codes.numbers, "float32"), self._power_of_two(-exponent)
        exact = self._cast(x, "float32") * self._power_of_two(exponent)
        lost = ops.sum(self._cast(ops.logical_and(exact != 0.0, rounded == 0.0), "float32"))
        squares = [ops.sum(ops.square(each * unscale)) for each in (exact, exact - rounded)]
        return ops.stack([ops.zeros_like(lost) + self._cast(ops.size(x), "float32"), lost, *squares])

    def halve(self, codes: ScaledCodes, axis: int) -> Any:
        """Return the numbers divided by their blocks' scales, in float32: half of them, since the whole may be 2^128.
        The product of two of them is a fourth."""
        scale = self._power_of_two(-codes.exponent - 1)
        return self._cast(codes.numbers, "float32") * self._spread(scale, self._ops.shape(codes.numbers)[axis], axis)

    def unscale(self, total: Any, exponent: Any, dtype: Any) -> Any:
        """Return a product of 8-bit numbers divided by 2 ** exponent, the sum of the operands', rounded once."""
        half = self._ops.right_shift(exponent, 1)  # two factors: their product may be outside of float32's range
        return self._cast(total * self._power_of_two(-half) * self._power_of_two(half - exponent), dtype)

    def _largest(self, bits: Any, scaling: str, axis: int) -> Any:
        """Return the largest of the integers whose numbers share a scale."""
        ops = self._ops
        if scaling == "tensor":
            return ops.max(bits, initial=0)
        if scaling == "row":
            return ops.max(bits, axis, keepdims=True, initial=0)
        missing = -ops.shape(bits)[axis] % BLOCK  # in the last block of a number of rows, which a graph may not know
        bits = ops.pad(bits, [[0, missing], [0, 0]] if axis == 0 else [[0, 0], [0, missing]])
        columns = bits.shape[1]
        blocks = (-1, BLOCK, columns) if axis == 0 else (-1, columns // BLOCK, BLOCK)
        return ops.max(ops.reshape(bits, blocks), axis + 1, initial=0)

    def _spread(self, of_blocks: Any, size: Any, axis: int) -> Any:
        """Return the number of each block for each of the `size` elements along an axis."""
        spread = self._ops.repeat(of_blocks, BLOCK, axis)
        return spread[:size] if axis == 0 else spread[:, :size]

    def _power_of_two(self, exponent: Any) -> Any:
        """Return 2 ** exponent in float32, for exponents of normal numbers."""
        return self._bitcast(self._ops.left_shift(exponent + 127, 23), "float32")
