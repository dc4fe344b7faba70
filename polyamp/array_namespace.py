"""Array namespace in which polyamp's framework-independent formulas are written.

The loss-scale rule (S15) uses the first four functions; schedules and optimizer formulas use the rest. Each backend has
one object of this protocol, and `PYTHON` is the one for plain Python numbers.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol


class ArrayNamespace(Protocol):
    """Array functions of a framework that polyamp's formulas use, on the arrays' own device."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        """Choose elementwise between `x` and `y`."""

    def minimum(self, x: Any, y: Any, /) -> Any:
        """Return the elementwise minimum."""

    def maximum(self, x: Any, y: Any, /) -> Any:
        """Return the elementwise maximum."""

    def asarray(self, value: Any, like: Any, /) -> Any:
        """Return `value` as a scalar array with the dtype and device of `like`."""

    def sqrt(self, x: Any, /) -> Any:
        """Return the elementwise square root."""

    def sign(self, x: Any, /) -> Any:
        """Return the elementwise sign."""

    def cos(self, x: Any, /) -> Any:
        """Return the elementwise cosine."""

    def floor(self, x: Any, /) -> Any:
        """Return the elementwise floor."""

    def power(self, x: Any, y: Any, /) -> Any:
        """Return the elementwise power."""

    def expm1(self, x: Any, /) -> Any:
        """Return the elementwise exp(x) - 1, accurate near zero."""


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
