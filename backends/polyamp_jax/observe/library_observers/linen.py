"""Observer of flax linen models. An interceptor receives a copy of a module that lives for one call."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from flax import linen

from polyamp.parity.trace.observer import DropoutCount
from polyamp_jax.observe.jax_only.library_observer import LibraryObserver, replace_attention, set_float64
from polyamp_jax.observe.jax_only.output_tags import call_with_tags


class LinenObserver(LibraryObserver):
    """Observer of linen models."""

    def disable_dropout(self, stack: contextlib.ExitStack, count: DropoutCount) -> None:
        stack.enter_context(linen.intercept_methods(_DropoutOff(count)))
        replace_attention(stack, ("flax.linen", "flax.linen.attention"), DropoutCount())

    def tag_outputs(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(linen.intercept_methods(_tag_call))

    def use_float64(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(linen.intercept_methods(_call_in_float64))


OBSERVER: Final = LinenObserver()


class _DropoutOff:
    """Interceptor that sets the rates of modules to 0.

    Args:
        count: counts the calls that would have dropped something. A module of the user's own that has a `dropout_rate`
            may give it to others, which then have a rate of 0: their calls cannot be counted.
    """

    def __init__(self, count: DropoutCount) -> None:
        self._count = count
        self._rates: dict[int, tuple[Any, float]] = {}

    def __call__(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        for name in ("rate", "dropout_rate") if isinstance(module, linen.Dropout) else ("dropout_rate",):
            if isinstance(getattr(module, name, None), float | int):
                self._rates.setdefault(id(module), (module, getattr(module, name)))
                object.__setattr__(module, name, 0.0)
        rate = self._rates.get(id(module), (module, 0.0))[1]
        if rate and context.method_name == "__call__":
            self._count_call(module, args, kwargs)
        return call(*args, **kwargs)

    def _count_call(self, module: Any, args: Any, kwargs: Any) -> None:
        if not isinstance(module, linen.Dropout | linen.MultiHeadDotProductAttention):
            self._count.give_up()
            return
        by_position = args[1] if isinstance(module, linen.Dropout) and len(args) > 1 else None
        given = kwargs.get("deterministic", by_position)
        self._count.add(not (module.deterministic if given is None else given))


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
