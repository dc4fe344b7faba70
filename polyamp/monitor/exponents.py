"""Statistics of a module on the host: of its parameters from counts of exponent fields, of its outputs and products in
8 bits from sums."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from polyamp.float_formats import FORMATS
from polyamp.monitor.records import OutputStats, ProductStats, RoundingStats, TensorStats
from polyamp.monitor.slots import EXPONENT_FIELDS

_BIAS: Final = 127
_NOT_FINITE: Final = EXPONENT_FIELDS - 1


def tensor_stats(counts: np.ndarray[Any, Any], norm: float, compute: str, factor: float = 1.0) -> TensorStats | None:
    """Return the statistics of elements multiplied by a factor; None if there is no element.

    Args:
        counts: elements with each exponent field, integers, shape (256,).
        norm: the L2 norm that is reported.
        compute: name of the dtype that the elements are cast to.
        factor: multiplies the elements before they are judged; rounded down to a power of two.

    Example:
        >>> import numpy as np
        >>> counts = np.zeros(256, int)
        >>> counts[[0, 127 - 30, 127 - 20, 127]] = 1  # zero, 2^-30, 2^-20 and 1
        >>> found = tensor_stats(counts, 1.0, "float16")
        >>> found.zero, found.underflow, found.subnormal, found.overflow
        (0.25, 0.25, 0.25, 0.0)
    """
    elements = int(counts.sum())
    if not elements:
        return None
    shift = math.floor(math.log2(factor)) if factor > 0.0 and math.isfinite(factor) else 0
    form = FORMATS[compute]
    normal = math.frexp(form.smallest_normal)[1] - 1
    smallest = normal - form.fraction_bits
    above = math.frexp(form.largest)[1]
    exponents = {
        field - _BIAS + shift: int(count) for field, count in enumerate(counts) if count and 0 < field < _NOT_FINITE
    }

    def share(low: float, high: float) -> float:
        return sum(count for exponent, count in exponents.items() if low <= exponent < high) / elements

    first, last = min(exponents, default=0), max(exponents, default=-1)
    return TensorStats(
        elements=elements,
        zero=int(counts[0]) / elements,
        underflow=share(-math.inf, smallest - 1),
        subnormal=share(smallest - 1, normal),
        overflow=share(above, math.inf) + int(counts[_NOT_FINITE]) / elements,
        norm=norm,
        first_exponent=first,
        exponents=[exponents.get(exponent, 0) for exponent in range(first, last + 1)],
    )


def output_stats(sums: np.ndarray[Any, Any], largest: float) -> OutputStats | None:
    """Return the statistics of a module's outputs from `OutputFigures`; None if there is no element.

    Example:
        >>> import numpy as np
        >>> found = output_stats(np.array([8.0, 4.0, 2.0, 0.0, 0.0, 32.0]), 4.0)
        >>> found.zero, found.underflow, found.rms, found.largest
        (0.5, 0.25, 2.0, 4.0)
    """
    elements, zeros, underflow, subnormal, overflow, squares = map(float, sums)
    if not elements:
        return None
    return OutputStats(
        elements=round(elements),
        zero=zeros / elements,
        underflow=underflow / elements,
        subnormal=subnormal / elements,
        overflow=overflow / elements,
        rms=math.sqrt(squares / elements) if squares >= 0.0 else squares,  # NaN stays
        largest=largest,
    )


def product_stats(sums: np.ndarray[Any, Any]) -> ProductStats | None:
    """Return the statistics of a module's products in 8 bits from `MonitorSlots.products`; None if there is no element.

    Example:
        >>> import numpy as np
        >>> found = product_stats(np.array([[4.0, 1.0, 100.0, 1.0], [4.0, 0.0, 1.0, 0.0], [4.0, 0.0, 0.0, 0.0]]))
        >>> found.inputs
        RoundingStats(elements=4, underflow=0.25, sqnr=20.0)
        >>> found.weights.sqnr, found.gradients.sqnr
        (inf, None)
    """
    inputs, weights, gradients = ([float(number) for number in row] for row in sums)
    if not inputs[0]:
        return None
    return ProductStats(
        inputs=_rounding_stats(*inputs), weights=_rounding_stats(*weights), gradients=_rounding_stats(*gradients)
    )


def _rounding_stats(elements: float, underflow: float, squares: float, errors: float) -> RoundingStats:
    ratio = None
    if squares > 0.0 and math.isfinite(squares) and math.isfinite(errors):
        ratio = 10.0 * math.log10(squares / errors) if errors else math.inf
    return RoundingStats(elements=round(elements), underflow=underflow / elements, sqnr=ratio)


def exponent_counts(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the number of a NumPy array's elements with each float32 exponent field, shape (256,)."""
    fields = (np.ascontiguousarray(array, np.float32).reshape(-1).view(np.int32) >> 23) & (EXPONENT_FIELDS - 1)
    counts: np.ndarray[Any, Any] = np.bincount(fields, minlength=EXPONENT_FIELDS)
    return counts
