"""Module calls with tags on their inputs and outputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import jax
import jax.numpy as jnp

from polyamp_jax.precision.interpreter.tags import tag

_call_numbers: Final = itertools.count(1)
_name_scopes_enabled: ContextVar[bool] = ContextVar("polyamp_scoping", default=False)


@contextlib.contextmanager
def enable_name_scopes() -> Iterator[None]:
    """Return a context manager in which each call opens a name scope "/" + path.

    It is for passes without autocast; autocast opens these scopes itself.
    """
    token = _name_scopes_enabled.set(True)
    try:
        yield
    finally:
        _name_scopes_enabled.reset(token)


def call_with_tags(function: Callable[..., Any], args: Any, kwargs: Any, path: str, *, cell: str | None = None) -> Any:
    """Call a module and return its output, tagged.

    Args:
        function: the call.
        args: positional arguments; the first floating array is tagged too.
        kwargs: keyword arguments.
        path: path of the module.
        cell: path of the cell of a flax RNN. The cell is the layer, but runs in a scan, so the RNN is tagged for it.
    """
    number = next(_call_numbers)
    given = next((arg for arg in args if isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating)), None)
    if path:
        tag(given, path if cell is None else cell, number, "input")
    with jax.named_scope(f"/{path}") if _name_scopes_enabled.get() else contextlib.nullcontext():
        output = function(*args, **kwargs)
    if cell is not None:
        if isinstance(output, tuple) and len(output) == 2:
            return output[0], tag(tag(output[1], cell, number), path, number)
        return tag(tag(output, cell, number), path, number)
    return _tag_output(output, path, number)


def _tag_output(output: Any, path: str, number: int) -> Any:
    """Tag the array in a module's output; of several, the first top-level one.

    For a cell that returns (carry, output) this is the output.
    """
    if isinstance(output, jax.Array):
        return tag(output, path, number)
    if isinstance(output, list | tuple):
        place = next((place for place, item in enumerate(output) if isinstance(item, jax.Array)), None)
        if place is None:
            return output
        items = [tag(item, path, number) if n == place else item for n, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        name = next((name for name, item in output.items() if isinstance(item, jax.Array)), None)
        return {key: tag(item, path, number) if key == name else item for key, item in output.items()}
    return output
