"""Marks around the calls of a model's modules, by the paths that `polyamp.port` gives them. Called by `watching`.

linen and haiku let a program stand around every call; nnx's and equinox's modules are objects, of which a pass of the
step has copies of its own: these get subclasses of their classes, as in `models.call_hook`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.parts import Adapter
from polyamp_jax.observe.outputs import called


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
    module = context.module
    if context.method_name != "__call__" or module.scope is None or not module.path:
        return call(*args, **kwargs)
    cell = "/".join(module.cell.path) if compat.is_a(module, "flax.linen", "RNN") else None
    return called(call, args, kwargs, "/".join(module.path), cell=cell)


def _haiku(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    return called(call, args, kwargs, context.module.module_name)
