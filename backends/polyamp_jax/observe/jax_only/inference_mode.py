"""`inference_model`: models in inference mode, set by the flags that libraries and users define on modules.

The flags are those that `polyamp.port` runs a model with (`porting.jax_only.inference_flags`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax

from polyamp_jax import compat
from polyamp_jax.porting.jax_only.inference_flags import INFERENCE_FLAGS, set_inference_arguments
from polyamp_jax.porting.libraries.library import CallInputs

_KEY_ARGUMENTS = ("key", "rng")
"""Names of random-key arguments of functions; inference draws nothing from the key."""


def inference_model(model: Any, stack: contextlib.ExitStack) -> Any:
    """Return a model copy in inference mode. linen and haiku models are in inference mode until `stack` closes."""
    first = model[0] if isinstance(model, tuple) and model else model
    if compat.is_a(model, "flax.nnx", "Module"):
        model.eval()
        for keys, module in list(compat.walk_nnx_modules(model)):
            _set_flags(module, vars(module))
            if callable(module):
                kind: Any = type(module)
                object.__setattr__(module, "__class__", _inference_class(kind, root=not keys))
        return model
    if compat.is_a(first, "equinox", "Module"):
        quieted = compat.loaded_module("equinox").nn.inference_mode(first)
        return (quieted, *model[1:]) if isinstance(model, tuple) else quieted
    if compat.is_a(first, "flax.linen", "Module"):
        stack.enter_context(compat.loaded_module("flax.linen").intercept_methods(_linen_interceptor))
        return model
    if any(compat.is_a(first, "haiku", name) for name in ("Transformed", "TransformedWithState")):
        stack.enter_context(compat.loaded_module("haiku").intercept_methods(_haiku_interceptor))
        stateful = compat.is_a(first, "haiku", "TransformedWithState")
        return (first._replace(apply=_haiku_apply(first.apply, stateful=stateful)), *model[1:])
    if isinstance(model, tuple) and len(model) == 2 and callable(first):
        return _inference_function(first), model[1]
    return model


def _set_flags(module: Any, settings: Mapping[str, Any]) -> None:
    for name, value in list(settings.items()):
        if name in INFERENCE_FLAGS and isinstance(value, bool):
            object.__setattr__(module, name, INFERENCE_FLAGS[name])


@functools.lru_cache(maxsize=4096)
def _inference_class(kind: Any, *, root: bool) -> type:
    """Return a subclass whose calls use inference mode. Cached per class, since JAX never frees registered classes."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = set_inference_arguments(functools.partial(kind.__call__, self), args, kwargs, add=root)
        return kind.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), names)
    return made


def _linen_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if module.scope is None or context.method_name == "setup":
        return call(*args, **kwargs)
    _set_flags(module, vars(module))
    if context.method_name == "__call__":
        args, kwargs = set_inference_arguments(module.__call__, args, kwargs, add=not module.path)
    return call(*args, **kwargs)


def _haiku_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    if context.method_name == "__call__":
        args, kwargs = set_inference_arguments(context.orig_method, args, kwargs, add=False)
    return call(*args, **kwargs)


def _haiku_apply(apply: Any, *, stateful: bool) -> Any:
    """Wrap `apply` to pass inference flags. haiku hides the signature, so `inference_flags` finds them by calling."""
    from polyamp_jax.porting.libraries.haiku_modules import inference_flags

    first = 1 + stateful + (list(inspect.signature(apply).parameters)[1 + stateful :][:1] == ["rng"])

    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **{**inference_flags(apply, args[:first], CallInputs(args[first:], kwargs)), **kwargs})

    return call


def _inference_function(apply: Any) -> Any:
    @functools.wraps(apply)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = set_inference_arguments(apply, args, kwargs, add=True)
        bound = inspect.signature(apply).bind_partial(*args, **kwargs).arguments
        for name, parameter in inspect.signature(apply).parameters.items():
            if name in _KEY_ARGUMENTS and name not in bound and parameter.default is parameter.empty:
                kwargs[name] = jax.random.key(0)
        return apply(*args, **kwargs)

    return call
