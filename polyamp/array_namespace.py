"""Array namespace in which polyamp's framework-independent formulas are written.

The loss-scale rule (S15) uses the first four functions; schedules and optimizer formulas use the rest. Each backend has
one object of this protocol, most simply made by `array_namespace`. `PYTHON` is the one for plain Python numbers.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
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

    def clip(self, x: Any, low: float, high: float, /) -> Any:
        """Return `x` with its elements limited to [low, high], numbers."""

    # For arrays as a whole: optimizer formulas that are not elementwise use them, with the namespace of arrays.

    def norm(self, x: Any, /) -> Any:
        """Return the Euclidean norm of all elements, a scalar."""

    def mean(self, x: Any, axis: int, /) -> Any:
        """Return the mean over one axis, which stays with length 1."""

    def matmul(self, x: Any, y: Any, /) -> Any:
        """Return the product of two matrices of one dtype, in full precision of that dtype."""

    def swapaxes(self, x: Any, first: int, second: int, /) -> Any:
        """Return the array with two axes exchanged."""

    def astype(self, x: Any, dtype: str, /) -> Any:
        """Return the array cast to "bfloat16", "float32" or "float64"."""

    def gather(self, x: Any, /) -> Any:
        """Return the whole of an array that is divided among devices, if each holds a part that it alone computes."""

    def scatter(self, x: Any, like: Any, /) -> Any:
        """Return the part of a whole array that `like` is of its own; the inverse of `gather`."""


_NAMES: Final = ("where", "minimum", "maximum", "sqrt", "sign", "cos", "floor", "power", "expm1")
"""Functions that most frameworks have under the same name."""


def array_namespace(module: Any, asarray: Callable[[Any, Any], Any], **functions: Callable[..., Any]) -> ArrayNamespace:
    """Return the namespace of a framework.

    Args:
        module: the module that has the functions.
        asarray: see `ArrayNamespace.asarray`.
        **functions: functions by their names here, in place of the module's; those for arrays as a whole have no
            default but `gather` and `scatter`, which return the array itself. Without `clip`, `minimum` and `maximum`
            limit.
    """
    known = {name: getattr(module, name) for name in _NAMES if name not in functions}
    found: Any = types.SimpleNamespace(asarray=asarray, gather=_itself, scatter=lambda x, like: x)
    found.clip = lambda x, low, high: found.minimum(found.maximum(x, found.asarray(low, x)), found.asarray(high, x))
    vars(found).update(known, **functions)
    namespace: ArrayNamespace = found
    return namespace


def _itself(x: Any) -> Any:
    return x


PYTHON: Final = array_namespace(
    math,
    lambda value, like: type(like)(value),
    where=lambda condition, x, y: x if condition else y,
    minimum=min,
    maximum=max,
    sign=lambda x: (x > 0) - (x < 0),
    power=operator.pow,
)
"""The namespace for Python floats and ints, so that a schedule can be called with a plain number."""
