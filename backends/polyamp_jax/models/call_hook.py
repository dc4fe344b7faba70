"""Call hooks for libraries whose modules are objects (nnx, equinox): subclasses that override `__call__`.

These libraries have no hook around a module's call, and Python looks `__call__` up on the class. The modules of a copy
that polyamp made get subclasses of their classes. There is exactly one subclass per class, hook and arguments of the
hook, for two reasons: JAX never frees a class registered as a pytree, and nested `jit`s look up their cached traces by
class.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Final

NATIVE_CLASS_ATTRIBUTE: Final = "_polyamp_native"
"""Attribute of the classes that polyamp makes. Its value is the user's own class."""

_CACHE_SIZE = 4096
"""Maximum number of cached subclasses. A dropped one is rebuilt."""

CallHook = Callable[..., Any]
"""`hook(call, module, args, kwargs, *key)`: returns the output of the module, whose own call is `call`."""


def hook_calls(module: Any, hook: CallHook, *key: Any, is_native: bool = False) -> None:
    """Run the calls of a module through a hook, in place. A module that is not callable is left unchanged.

    Args:
        module: a copy that polyamp made, never the user's own module.
        hook: a function of a Python module: one object for all calls.
        *key: hashable arguments of the hook, such as the module's path.
        is_native: whether `native_class` of the new class is that class itself, so that the hook stays.
    """
    kind: Any = type(module)
    if callable(module):
        object.__setattr__(module, "__class__", _hooked_class(kind, hook, key, is_native))


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _hooked_class(kind: Any, hook: CallHook, key: tuple[Any, ...], is_native: bool) -> type:
    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(types.MethodType(kind.__call__, self), self, args, kwargs, *key)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if not is_native:
        names[NATIVE_CLASS_ATTRIBUTE] = native_class(kind)
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


def native_class(kind: Any) -> Any:
    """Return the user's own class that a polyamp class was derived from, or the class itself."""
    return vars(kind).get(NATIVE_CLASS_ATTRIBUTE, kind)
