"""`inferring`: a model as in inference, by the flags that libraries and users give their modules. Called by `working`.

They are those that `polyamp.port` runs a model with (`porting.inference`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax

from polyamp_jax import compat
from polyamp_jax.porting.inference import FLAGS, quiet
from polyamp_jax.porting.library import Batch

_KEYS = ("key", "rng")
"""Arguments of functions that take a random key; in inference nothing is drawn with it."""


def inferring(model: Any, stack: contextlib.ExitStack) -> Any:
    """A model that belongs to a comparison alone, as in inference; linen's and haiku's until the end of the block."""
    first = model[0] if isinstance(model, tuple) and model else model
    if compat.is_a(model, "flax.nnx", "Module"):
        model.eval()
        for keys, module in list(compat.nnx_modules(model)):
            _set_flags(module, vars(module))
            if callable(module):
                kind: Any = type(module)
                object.__setattr__(module, "__class__", _quiet_class(kind, root=not keys))
        return model
    if compat.is_a(first, "equinox", "Module"):
        quieted = compat.loaded("equinox").nn.inference_mode(first)
        return (quieted, *model[1:]) if isinstance(model, tuple) else quieted
    if compat.is_a(first, "flax.linen", "Module"):
        stack.enter_context(compat.loaded("flax.linen").intercept_methods(_linen))
        return model
    if any(compat.is_a(first, "haiku", name) for name in ("Transformed", "TransformedWithState")):
        stack.enter_context(compat.loaded("haiku").intercept_methods(_haiku))
        stateful = compat.is_a(first, "haiku", "TransformedWithState")
        return (first._replace(apply=_haiku_apply(first.apply, stateful=stateful)), *model[1:])
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return _function(first), model[1]
    return model


def _set_flags(module: Any, settings: Mapping[str, Any]) -> None:
    for name, value in list(settings.items()):
        if name in FLAGS and isinstance(value, bool):
            object.__setattr__(module, name, FLAGS[name])


@functools.lru_cache(maxsize=4096)
def _quiet_class(kind: Any, *, root: bool) -> type:
    """A subclass that is called as in inference; one for each class, since JAX keeps them for ever."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = quiet(functools.partial(kind.__call__, self), args, kwargs, add=root)
        return kind.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


def _linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    _set_flags(module, vars(module))
    if context.method_name == "__call__":
        args, kwargs = quiet(module.__call__, args, kwargs, add=not module.path)
    return call(*args, **kwargs)


def _haiku(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == "__call__":
        args, kwargs = quiet(context.orig_method, args, kwargs, add=False)
    return call(*args, **kwargs)


def _haiku_apply(apply: Any, *, stateful: bool) -> Any:
    """`apply` with the flags that it takes: haiku hides the signature of what it transformed, so it is asked."""
    from polyamp_jax.porting.haiku_modules import flags_of

    first = 1 + stateful + (list(inspect.signature(apply).parameters)[1 + stateful :][:1] == ["rng"])

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **{**flags_of(apply, args[:first], Batch(args[first:], kwargs)), **kwargs})

    return call


def _function(apply: Any) -> Any:
    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = quiet(apply, args, kwargs, add=True)
        bound = inspect.signature(apply).bind_partial(*args, **kwargs).arguments
        for name, parameter in inspect.signature(apply).parameters.items():
            if name in _KEYS and name not in bound and parameter.default is parameter.empty:
                kwargs[name] = jax.random.key(0)
        return apply(*args, **kwargs)

    return call
