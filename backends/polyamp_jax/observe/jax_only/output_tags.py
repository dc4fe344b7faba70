"""Tags on the inputs and outputs of module calls, by the module paths of `polyamp.port`.

linen and haiku have interceptors for calls. nnx and equinox have none: the step's copies of their modules get
subclasses of their classes, as in `models.call_hook`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.model_parts import ModelAdapter
from polyamp_jax.observe.jax_only.tagged_calls import call_with_tags


@contextlib.contextmanager
def tag_module_outputs() -> Iterator[None]:
    """Return a context manager in which linen and haiku modules tag their outputs."""
    with contextlib.ExitStack() as blocks:
        if (linen := compat.loaded_module("flax.linen")) is not None:
            blocks.enter_context(linen.intercept_methods(_linen_interceptor))
        if (haiku := compat.loaded_module("haiku")) is not None:
            blocks.enter_context(haiku.intercept_methods(_haiku_interceptor))
        yield


def tagging_adapter(adapter: ModelAdapter) -> ModelAdapter:
    """Return an adapter whose nnx or equinox modules tag their outputs; other adapters are returned unchanged."""
    if compat.is_a(adapter, "polyamp_jax.models.flax", "NnxAdapter"):
        from polyamp_jax.observe.jax_only.tagged_nnx import NnxTagAdapter

        return NnxTagAdapter(**_adapter_fields(adapter))
    if compat.is_a(adapter, "polyamp_jax.models.equinox", "EquinoxAdapter"):
        from polyamp_jax.observe.jax_only.tagged_equinox import EquinoxTagAdapter

        return EquinoxTagAdapter(**_adapter_fields(adapter))
    return adapter


def _adapter_fields(adapter: Any) -> Mapping[str, Any]:
    return {field.name: getattr(adapter, field.name) for field in dataclasses.fields(adapter)}


def _linen_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if context.method_name != "__call__" or module.scope is None or not module.path:
        return call(*args, **kwargs)
    cell = "/".join(module.cell.path) if compat.is_a(module, "flax.linen", "RNN") else None
    return call_with_tags(call, args, kwargs, "/".join(module.path), cell=cell)


def _haiku_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    return call_with_tags(call, args, kwargs, context.module.module_name)
