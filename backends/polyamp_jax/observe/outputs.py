"""Calls of modules, with marks on what they are given and give. Called by the other modules of this room."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.models.call_hook import NATIVE, native_class
from polyamp_jax.precision.interpreter.seen import shown

_numbers: Final = itertools.count(1)
_scoping: ContextVar[bool] = ContextVar("polyamp_scoping", default=False)


@contextlib.contextmanager
def scoping() -> Iterator[None]:
    """A block in which each call is a scope of its path, "/" before it: where autocast, which opens scopes itself, does
    not act."""
    token = _scoping.set(True)
    try:
        yield
    finally:
        _scoping.reset(token)


def called(function: Callable[..., Any], args: Any, kwargs: Any, path: str, *, cell: str | None = None) -> Any:
    """What a module's call gives, marked.

    Args:
        function: the call.
        args: positional arguments; the first floating array is marked too.
        kwargs: keyword arguments.
        path: of the module.
        cell: of an RNN of flax, the path of its cell: that is the layer, and runs in a scan.
    """
    number = next(_numbers)
    given = next((arg for arg in args if isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating)), None)
    if path:
        shown(given, path if cell is None else cell, number, "input")
    with jax.named_scope(f"/{path}") if _scoping.get() else contextlib.nullcontext():
        output = function(*args, **kwargs)
    if cell is not None:
        if isinstance(output, tuple) and len(output) == 2:
            return output[0], shown(shown(output[1], cell, number), path, number)
        return shown(shown(output, cell, number), path, number)
    return _marked(output, path, number)


def _marked(output: Any, path: str, number: int) -> Any:
    """What a module gave, its array marked: of several the first that stands by itself, which of a cell that gives its
    carry beside it is the output."""
    if isinstance(output, jax.Array):
        return shown(output, path, number)
    if isinstance(output, list | tuple):
        place = next((place for place, item in enumerate(output) if isinstance(item, jax.Array)), None)
        if place is None:
            return output
        items = [shown(item, path, number) if n == place else item for n, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        name = next((name for name, item in output.items() if isinstance(item, jax.Array)), None)
        return {key: shown(item, path, number) if key == name else item for key, item in output.items()}
    return output


@functools.lru_cache(maxsize=4096)
def marking_class(kind: Any, path: str) -> type:
    """A subclass whose calls are marked, one for each class and path: JAX keeps such classes for ever."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cell = f"{path}/cell" if compat.is_a(self, "flax.nnx", "RNN") else None
        return called(functools.partial(kind.__call__, self), args, kwargs, path, cell=cell)

    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        NATIVE: native_class(kind),
    }
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made
