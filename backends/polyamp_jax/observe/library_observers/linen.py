"""Observer of flax linen models. An interceptor receives a copy of a module that lives for one call."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from flax import linen

from polyamp_jax.observe.jax_only.library_observer import LibraryObserver, replace_attention, set_float64
from polyamp_jax.observe.jax_only.output_tags import call_with_tags


class LinenObserver(LibraryObserver):
    """Observer of linen models."""

    def disable_dropout(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(linen.intercept_methods(_call_without_dropout))
        replace_attention(stack, ("flax.linen", "flax.linen.attention"))

    def tag_outputs(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(linen.intercept_methods(_tag_call))

    def use_float64(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(linen.intercept_methods(_call_in_float64))


OBSERVER: Final = LinenObserver()


def _call_without_dropout(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    for name in ("rate", "dropout_rate") if isinstance(module, linen.Dropout) else ("dropout_rate",):
        if isinstance(getattr(module, name, None), float | int):
            object.__setattr__(module, name, 0.0)
    return call(*args, **kwargs)


def _tag_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if context.method_name != "__call__" or module.scope is None or not module.path:
        return call(*args, **kwargs)
    cell = "/".join(module.cell.path) if isinstance(module, linen.RNN) else None
    return call_with_tags(call, args, kwargs, "/".join(module.path), cell=cell)


def _call_in_float64(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.module.scope is not None:
        set_float64(context.module)
    return call(*args, **kwargs)
