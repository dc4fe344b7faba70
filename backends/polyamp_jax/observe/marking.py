"""Marks around the calls of a model's modules, by the paths that `polyamp.port` gives them. Called by `watching`.

linen and haiku let a program stand around every call; nnx's and equinox's modules are objects, of which a pass of the
step has copies of its own: these get subclasses of their classes, as in `models.call_hook`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from polyamp_jax import compat
from polyamp_jax.models.parts import Adapter
from polyamp_jax.precision.interpreter.seen import shown


def given(output: Any, path: str) -> Any:
    """What a module gave, its array marked: of several the first that stands by itself, which of a cell that gives its
    carry beside it is the output."""
    if isinstance(output, jax.Array):
        return shown(output, path)
    if isinstance(output, list | tuple):
        number = next((number for number, item in enumerate(output) if isinstance(item, jax.Array)), None)
        if number is None:
            return output
        items = [shown(item, path) if place == number else item for place, item in enumerate(output)]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if type(output) is dict:
        name = next((name for name, item in output.items() if isinstance(item, jax.Array)), None)
        return {key: shown(item, path) if key == name else item for key, item in output.items()}
    return output


def of_sequence(output: Any, cell: str, path: str) -> Any:
    """What an RNN of flax gave, which is marked as what its cell gave too: that runs in a scan, and is the layer."""
    if isinstance(output, tuple) and len(output) == 2:
        return output[0], shown(shown(output[1], cell), path)
    return shown(shown(output, cell), path)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """A block in which linen's and haiku's modules mark what they give."""
    with contextlib.ExitStack() as blocks:
        if (linen := compat.loaded("flax.linen")) is not None:
            blocks.enter_context(linen.intercept_methods(_linen))
        if (haiku := compat.loaded("haiku")) is not None:
            blocks.enter_context(haiku.intercept_methods(_haiku))
        yield


def marked(adapter: Adapter) -> Adapter:
    """The adapter of a model whose modules mark what they give."""
    if compat.is_a(adapter, "polyamp_jax.models.flax", "NnxAdapter"):
        from polyamp_jax.observe.marked_nnx import MarkedNnx

        return MarkedNnx(**_fields(adapter))
    if compat.is_a(adapter, "polyamp_jax.models.equinox", "EquinoxAdapter"):
        from polyamp_jax.observe.marked_equinox import MarkedEquinox

        return MarkedEquinox(**_fields(adapter))
    return adapter


def _fields(adapter: Any) -> Mapping[str, Any]:
    return {field.name: getattr(adapter, field.name) for field in dataclasses.fields(adapter)}


def _linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    output = call(*args, **kwargs)
    module = context.module
    if context.method_name != "__call__" or module.scope is None or not module.path:
        return output
    path = "/".join(module.path)
    if compat.is_a(module, "flax.linen", "RNN"):
        return of_sequence(output, "/".join(module.cell.path), path)
    return given(output, path)


def _haiku(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    output = call(*args, **kwargs)
    return given(output, context.module.module_name) if context.method_name == "__call__" else output


@functools.lru_cache(maxsize=4096)
def marking_class(kind: Any, path: str) -> type:
    """A subclass whose calls mark what they give, one for each class and path: JAX keeps such classes for ever."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        if compat.is_a(self, "flax.nnx", "RNN"):
            return of_sequence(output, f"{path}/cell", path)
        return given(output, path)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made
