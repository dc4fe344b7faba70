"""`temporary_value`: a context variable with another value for the length of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

ValueT = TypeVar("ValueT")


@contextlib.contextmanager
def temporary_value(variable: ContextVar[ValueT], value: ValueT) -> Iterator[None]:
    """Return a context manager in which a variable has a value; it then has the one from before, also after an error.

    >>> depth: ContextVar[int] = ContextVar("depth", default=0)
    >>> with temporary_value(depth, 1):
    ...     inside = depth.get()
    >>> inside, depth.get()
    (1, 0)
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
