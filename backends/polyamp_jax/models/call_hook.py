"""Code around module calls for libraries whose modules are objects (nnx, equinox): a subclass with another `__call__`.

These libraries have no hook around a module's call, and Python looks `__call__` up on the class; so inside the step,
on copies that live for one trace, a module gets a subclass of its own class. JAX keeps every class that is registered
as a pytree for ever, and nested `jit`s find their cached traces again by class; hence one subclass per class and path,
made once. Called by the adapters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import jax

from polyamp_jax.arrays import cast_arguments
from polyamp_jax.models.scopes import Casts

NATIVE: Final = "_polyamp_native"
"""Attribute of the classes that polyamp makes: the user's own."""

_KEPT = 4096
"""Subclasses kept at most; one that is dropped is made anew."""

_calling: ContextVar[Casts | None] = ContextVar("polyamp_casts", default=None)


@contextlib.contextmanager
def calling(casts: Casts) -> Iterator[None]:
    """Around a call of a whole model whose modules have been through `set_class`."""
    token = _calling.set(casts)
    try:
        yield
    finally:
        _calling.reset(token)


def set_class(
    module: Any,
    path: str,
    casts: Casts,
    *,
    inputs: str | None = None,
    outputs: str | None = None,
    kept: tuple[type, ...] = (),
) -> None:
    """Make `module` do what `casts` says around its calls, in place; one that cannot be called stays as it is.

    Args:
        module: a module that belongs to polyamp alone, never the user's own.
        path: its path.
        casts: what to do around calls.
        inputs: cast mode: dtype of the inputs of a pinned module, in place of what `casts` says.
        outputs: cast mode: dtype of the outputs of a pinned module, or None to leave them.
        kept: cast mode: types of what is handed through calls and never cast, such as running statistics.

    Raises:
        PolicyError: an override and the dtype that the module was built with contradict each other.
    """
    kind: Any = type(module)
    if not callable(module) or (inputs is None and not casts.scoped and path not in casts.dtypes):
        return
    if inputs is None:
        casts.check(path, getattr(module, "dtype", None))
    if casts.scoped:
        made = _scoped(kind, path)
    else:
        made = _casting(kind, inputs or casts.dtypes[path], outputs, casts.plan.float64, kept)
    object.__setattr__(module, "__class__", made)


@functools.lru_cache(maxsize=_KEPT)
def _scoped(kind: Any, path: str) -> type:
    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        casts = _calling.get()
        # outside the model's call, in a backward rule that is traced later: the path from the root says it all
        scope = jax.named_scope(f"/{path}") if casts is None else casts.scope(path)
        with scope:
            return kind.__call__(self, *args, **kwargs)

    return _subclass(kind, call)


@functools.lru_cache(maxsize=_KEPT)
def _casting(kind: Any, inputs: str, outputs: str | None, float64: bool, kept: tuple[type, ...]) -> type:
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

    return _subclass(kind, call)


def _subclass(kind: Any, call: Callable[..., Any]) -> type:
    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        NATIVE: native_class(kind),
    }
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


def native_class(kind: Any) -> Any:
    """The user's own class behind one that polyamp made of it."""
    return vars(kind).get(NATIVE, kind)
