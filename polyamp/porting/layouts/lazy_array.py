"""`Lazy`, an array whose values are read on demand.

A model of many gigabytes is transferred one tensor at a time. Operations work on `Lazy` arrays and know shapes at once;
only writing the target reads values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Lazy:
    """A shape, a dtype, and a function that reads the values.

    Args:
        shape: the array's shape.
        dtype: a NumPy dtype or a value that `numpy.dtype` accepts, including `ml_dtypes.bfloat16`.
        read: function that returns the array or a view of it; readers do not write to it.

    Example:
        >>> import numpy as np
        >>> array = Lazy((2, 3), "float32", lambda: np.ones((2, 3), "float32"))
        >>> array.shape, array.size, float(np.asarray(array).sum())
        ((2, 3), 6, 6.0)
    """

    __slots__ = ("_read", "dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: Any, read: Callable[[], Array]) -> None:
        self.shape = tuple(map(int, shape))
        self.dtype = np.dtype(dtype)
        self._read = read

    @classmethod
    def of(cls, array: Any) -> Lazy:
        """Wrap a NumPy array, or any value that `numpy.asarray` accepts, as it is."""
        if isinstance(array, Lazy):
            return array
        held = np.asarray(array)
        return cls(held.shape, held.dtype, lambda: held)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * int(self.dtype.itemsize)

    def read(self) -> Array:
        """Return the values in this shape and dtype, possibly as a view.

        Raises:
            RuntimeError: the values have another shape or dtype, which is a bug in the creator of this object.
        """
        values = self._read()
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                f"a lazy array of {self.dtype}{list(self.shape)} read as {values.dtype}{list(values.shape)}"
            )
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.read(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"Lazy({self.dtype}{list(self.shape)})"
