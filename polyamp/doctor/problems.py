"""Inputs of the doctor's measurements: sizes per kind of device, random arrays, and the rounding of a format.

The sizes of a CPU are such that an operation takes about a millisecond on one core, so that one which is 300 times
slower, as some in float16 are, ends within a second. On an accelerator a product has to be large to keep it busy.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from polyamp.doctor.measurements import FORMATS_MEASURED, Operation
from polyamp.doctor.probe import HostArray

_ACCUMULATION_SHAPE: Final = (64, 4096, 64)
"""Rows, terms and columns of the product whose error is measured."""


class ProblemSizes(NamedTuple):
    """Sizes of the measured operations.

    Attributes:
        matmul: m, k, n.
        convolution: images, channels, height and width.
        attention: batch, heads, length, features.
    """

    matmul: tuple[int, int, int]
    convolution: tuple[int, int, int]
    attention: tuple[int, int, int, int]

    def inputs(self, operation: Operation) -> list[HostArray]:
        """Return the float32 inputs of an operation, each element within 0.5 and 2 in size."""
        generator = np.random.default_rng(0)
        if operation == "matmul":
            m, k, n = self.matmul
            return [random_array(generator, (m, k)), random_array(generator, (k, n))]
        if operation == "convolution":
            images, channels, side = self.convolution
            shapes = ((images, channels, side, side), (channels, channels, 3, 3))
            return [random_array(generator, shape) for shape in shapes]
        return [random_array(generator, self.attention) for _ in range(3)]


CPU_SIZES: Final = ProblemSizes((512, 512, 512), (2, 32, 28), (2, 4, 128, 64))
ACCELERATOR_SIZES: Final = ProblemSizes((4096, 4096, 4096), (32, 128, 56), (8, 16, 1024, 64))


class AccumulationProblem(NamedTuple):
    """A matrix product of many terms, with what float64 makes of it.

    Attributes:
        a, b: float32 inputs that the dtype represents exactly (TF32: float32 numbers).
        exact: their product in float64.
        rounding_error: relative error of `exact` once rounded; None for 8-bit formats.
    """

    a: HostArray
    b: HostArray
    exact: HostArray
    rounding_error: float | None


def accumulation_problem(dtype: str) -> AccumulationProblem:
    """Return the product whose error shows how a dtype accumulates."""
    rows, terms, columns = _ACCUMULATION_SHAPE
    generator, form = np.random.default_rng(1), FORMATS_MEASURED[dtype]
    a, b = random_array(generator, (rows, terms)), random_array(generator, (terms, columns))
    if form.bits <= 16:
        a, b = round_to(a, form.fraction_bits), round_to(b, form.fraction_bits)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    once: HostArray | None = None
    if dtype == "tf32":
        once = round_to(a, form.fraction_bits).astype(np.float64) @ round_to(b, form.fraction_bits)
    elif form.bits >= 16:
        once = round_to(exact, form.fraction_bits)
    return AccumulationProblem(a, b, exact, None if once is None else relative_error(once, exact))


def random_array(generator: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Return float32 numbers of both signs within 0.5 and 2 in size, which no format underflows on."""
    size = np.exp2(generator.uniform(-1.0, 1.0, shape))
    values: HostArray = (size * generator.choice((-1.0, 1.0), shape)).astype(np.float32)
    return values


def round_to(values: HostArray, fraction_bits: int) -> HostArray:
    """Round to nearest, ties to even, with so many stored bits of the significand. The range is not limited.

    >>> round_to(np.array([1.0 + 2**-9, 1.0 + 2**-7]), 7).tolist()
    [1.0, 1.0078125]
    """
    significand, exponent = np.frexp(values)
    rounded: HostArray = np.ldexp(np.rint(np.ldexp(significand, fraction_bits + 1)), exponent - fraction_bits - 1)
    return rounded


def relative_error(found: HostArray, exact: HostArray) -> float:
    """Return the root mean square of the differences, relative to that of the exact values."""
    difference = found.astype(np.float64) - exact
    return float(np.sqrt(np.mean(difference**2) / np.mean(exact**2)))
