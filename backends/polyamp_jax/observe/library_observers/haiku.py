"""Observer of haiku models."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import haiku as hk

from polyamp.parity.trace.observer import DropoutCount
from polyamp_jax.models import library_compat
from polyamp_jax.observe.jax_only.library_observer import LibraryObserver, replace_attribute
from polyamp_jax.observe.jax_only.output_tags import call_with_tags


class HaikuObserver(LibraryObserver):
    """Observer of haiku models."""

    def disable_dropout(self, stack: contextlib.ExitStack, count: DropoutCount) -> None:
        def identity(rng: Any, rate: Any, x: Any, *_: Any, **__: Any) -> Any:
            count.add(0 if isinstance(rate, float | int) and not rate else 1)
            return x

        for owner, name in library_compat.haiku_dropout():
            replace_attribute(stack, owner, name, identity)

    def tag_outputs(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(hk.intercept_methods(_tag_call))


OBSERVER: Final = HaikuObserver()


def _tag_call(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    return call_with_tags(call, args, kwargs, context.module.module_name)
