"""Tags on the inputs and outputs of module calls, by the module paths of `polyamp.port`.

linen and haiku have interceptors for calls. nnx and equinox have none: the calls of the step's copies of their modules
are hooked, as in `models.call_hook`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from polyamp_jax import compat
from polyamp_jax.models.call_casts import CallCasts
from polyamp_jax.models.call_hook import hook_calls
from polyamp_jax.observe.jax_only.library_observer import loaded_observers
from polyamp_jax.observe.jax_only.tagged_calls import call_with_tags


@contextlib.contextmanager
def tag_module_outputs() -> Iterator[None]:
    """Return a context manager in which linen and haiku modules tag their outputs."""
    with contextlib.ExitStack() as blocks:
        for observer in loaded_observers():
            observer.tag_outputs(blocks)
        yield


class TaggingCasts(CallCasts):
    """Casts and scopes of a call whose nnx or equinox modules tag their outputs."""

    is_active = True

    def hook_module(self, module: Any, path: str, *, is_pinned: bool = False, uncast: tuple[type, ...] = ()) -> None:
        if path:
            hook_calls(module, _tag_call, path)
        super().hook_module(module, path, is_pinned=is_pinned, uncast=uncast)


def _tag_call(call: Callable[..., Any], module: Any, args: Any, kwargs: Any, path: str) -> Any:
    cell = f"{path}/cell" if compat.is_a(module, "flax.nnx", "RNN") else None
    return call_with_tags(call, args, kwargs, path, cell=cell)
