"""Call hooks for libraries whose modules are objects (nnx, equinox): subclasses that override `__call__`.

These libraries have no hook around a module's call, and Python looks `__call__` up on the class. Inside the step the
modules are copies that live for one trace, and each gets a subclass of its class. There is exactly one subclass per
class and path, for two reasons: JAX never frees a class registered as a pytree, and nested `jit`s look up their cached
traces by class.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import jax

from polyamp_jax.arrays import cast_arguments
from polyamp_jax.models.call_casts import CallCasts

NATIVE_CLASS_ATTRIBUTE: Final = "_polyamp_native"
"""Attribute of the classes that polyamp makes. Its value is the user's own class."""

_CACHE_SIZE = 4096
"""Maximum number of cached subclasses. A dropped one is rebuilt."""

_current_casts: ContextVar[CallCasts | None] = ContextVar("polyamp_casts", default=None)


@contextlib.contextmanager
def activate_casts(casts: CallCasts) -> Iterator[None]:
    """Activate `casts` during a call of a model whose modules were processed by `set_class`."""
    token = _current_casts.set(casts)
    try:
        yield
    finally:
        _current_casts.reset(token)


def set_class(
    module: Any,
    path: str,
    casts: CallCasts,
    *,
    inputs: str | None = None,
    outputs: str | None = None,
    kept: tuple[type, ...] = (),
) -> None:
    """Wrap the calls of `module` as `casts` specifies, in place. A module that is not callable is left unchanged.

    Args:
        module: a copy that polyamp made, never the user's own module.
        path: its path.
        casts: the casts or scopes around calls.
        inputs: cast mode: dtype of the inputs of a pinned module. Takes precedence over `casts`.
        outputs: cast mode: dtype of the outputs of a pinned module, or None to leave them.
        kept: cast mode: types of arguments that are never cast, such as running statistics.

    Raises:
        PolicyError: an override contradicts the dtype that the module was built with.
    """
    kind: Any = type(module)
    if not callable(module) or (inputs is None and not casts.scoped and path not in casts.dtypes):
        return
    if inputs is None:
        casts.check(path, getattr(module, "dtype", None))
    if casts.scoped:
        made = _scoped_class(kind, path)
    else:
        made = _casting_class(kind, inputs or casts.dtypes[path], outputs, casts.plan.float64, kept)
    object.__setattr__(module, "__class__", made)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _scoped_class(kind: Any, path: str) -> type:
    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts = _current_casts.get()
        # Outside the model's call, in a backward rule that is traced later, the scope is the full path from the root.
        scope = jax.named_scope(f"/{path}") if casts is None else casts.scope(path)
        with scope:
            return kind.__call__(self, *args, **kwargs)

    return _make_subclass(kind, call)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _casting_class(kind: Any, inputs: str, outputs: str | None, float64: bool, kept: tuple[type, ...]) -> type:
    def cast(tree: Any, dtype: str) -> Any:
        if not kept:
            return cast_arguments(tree, dtype, float64=float64)
        parts, structure = jax.tree.flatten(tree, is_leaf=lambda part: isinstance(part, kept))
        return jax.tree.unflatten(
            structure,
            [part if isinstance(part, kept) else cast_arguments(part, dtype, float64=float64) for part in parts],
        )

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast((args, kwargs), inputs)
        result = kind.__call__(self, *args, **kwargs)
        return result if outputs is None else cast(result, outputs)

    return _make_subclass(kind, call)


def _make_subclass(kind: Any, call: Callable[..., Any]) -> type:
    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        NATIVE_CLASS_ATTRIBUTE: native_class(kind),
    }
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


def native_class(kind: Any) -> Any:
    """Return the user's own class that a polyamp class was derived from, or the class itself."""
    return vars(kind).get(NATIVE_CLASS_ATTRIBUTE, kind)
