"""What polyamp needs of a Keras backend beyond `keras.ops`, and `ENGINE`: that of the backend that Keras runs on.

Only the module of the current backend is imported: a process with Keras on torch or JAX imports no TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import keras

from polyamp.array_namespace import ArrayNamespace


class KerasEngine(Protocol):
    """Verbs of one Keras backend. Each module of `polyamp_keras.engines` defines them as functions."""

    XP: ArrayNamespace
    """Array namespace of the backend's tensors."""
    FRAMEWORK: str
    """Name of the framework in messages."""
    DTYPE_ERRORS: tuple[type[Exception], ...]
    """Errors that the framework raises for operands of two dtypes; empty if it promotes them."""
    DTYPE_MESSAGE: str
    """Regular expression of the line of such an error that names the dtypes."""
    ONE_DTYPE_CODE: str
    """Code that makes two operands of one dtype, for the error message."""

    def is_float32_constant(self, value: Any, /) -> bool:
        """Return whether a value is a float32 tensor or variable of the framework that has numbers, so no symbol."""

    def is_tensor(self, value: Any, /) -> bool:
        """Return whether a value is a tensor on which attributes can be kept; no variable and no sparse tensor."""

    def gather_in_float32(self, call: Callable[..., Any], x: Any, args: Any, kwargs: Any, /) -> Any:
        """Return the result of a gather of a 16-bit `x`, whose gradient is summed in float32 and rounded once."""

    def integer_casts(self, given: Sequence[Any], /) -> AbstractContextManager[list[str]]:
        """Return a context manager that records the integer dtypes to which operations cast these tensors."""

    def matmul_precision(self, setting: str | None, /) -> AbstractContextManager[None]:
        """Return a context manager with the precision of float32 products (`Policy.float32_matmul`)."""


ENGINE: Final[Any] = importlib.import_module(f"polyamp_keras.engines.{keras.config.backend()}")
"""The `KerasEngine` of the current backend. A module has the protocol's functions as they are."""
