"""The small array namespace in which polyamp's framework-independent formulas are written.

The loss-scale rule (S15) uses the first four functions; schedules and optimizer formulas use the rest. Each
backend has one object of this shape, and `PYTHON` is the one for plain Python numbers.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol


class ArrayNamespace(Protocol):
    """What a framework must offer for polyamp's formulas to run on its arrays, on their device."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        """Elementwise choice."""

    def minimum(self, x: Any, y: Any, /) -> Any:
        """Elementwise minimum."""

    def maximum(self, x: Any, y: Any, /) -> Any:
        """Elementwise maximum."""

    def asarray(self, value: Any, like: Any, /) -> Any:
        """`value` as a scalar array with the dtype and device of `like`."""

    def sqrt(self, x: Any, /) -> Any:
        """Elementwise square root."""

    def sign(self, x: Any, /) -> Any:
        """Elementwise sign."""

    def cos(self, x: Any, /) -> Any:
        """Elementwise cosine."""

    def floor(self, x: Any, /) -> Any:
        """Elementwise floor."""

    def power(self, x: Any, y: Any, /) -> Any:
        """Elementwise power."""

    def expm1(self, x: Any, /) -> Any:
        """Elementwise exp(x) - 1, accurate near zero."""


class PythonNamespace:
    """`ArrayNamespace` for Python floats and ints, so that a schedule can be called with a plain number."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        return x if condition else y

    def minimum(self, x: Any, y: Any, /) -> Any:
        return min(x, y)

    def maximum(self, x: Any, y: Any, /) -> Any:
        return max(x, y)

    def asarray(self, value: Any, like: Any, /) -> Any:
        return type(like)(value)

    def sqrt(self, x: Any, /) -> Any:
        return math.sqrt(x)

    def sign(self, x: Any, /) -> Any:
        return (x > 0) - (x < 0)

    def cos(self, x: Any, /) -> Any:
        return math.cos(x)

    def floor(self, x: Any, /) -> Any:
        return math.floor(x)

    def power(self, x: Any, y: Any, /) -> Any:
        return x**y

    def expm1(self, x: Any, /) -> Any:
        return math.expm1(x)


PYTHON: Final[ArrayNamespace] = PythonNamespace()
