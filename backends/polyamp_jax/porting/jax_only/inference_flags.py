"""Inference flags of JAX models, under the usual names in JAX libraries and user code.

They turn dropout off and select running statistics on both sides of a comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax.numpy as jnp

INFERENCE_FLAGS: Final[Mapping[str, bool]] = {
    "deterministic": True,
    "use_running_average": True,
    "inference": True,
    "train": False,
    "training": False,
    "is_training": False,
}
"""Name of an argument or setting -> its value in inference."""


def set_inference_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, add: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with those in `INFERENCE_FLAGS` set for inference.

    Args:
        function: the bound method that is called.
        args: positional arguments.
        kwargs: keyword arguments.
        add: also pass flags that the caller leaves at their defaults, except those that are settings of the module.
    """
    signature = inspect.signature(function)
    bound = signature.bind_partial(*args, **kwargs)
    module = getattr(function, "__self__", None)
    for name, parameter in signature.parameters.items():
        given = bound.arguments.get(name)
        added = add and given is None and getattr(module, name, None) is None
        if name in INFERENCE_FLAGS and parameter.kind is not parameter.VAR_KEYWORD and (added or given is not None):
            bound.arguments[name] = INFERENCE_FLAGS[name]
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = bound.arguments.get(name, {})
            bound.arguments[name] = {key: INFERENCE_FLAGS.get(key, value) for key, value in rest.items()}
    return bound.args, bound.kwargs


def set_inference_flags(module: Any, settings: Mapping[str, Any]) -> None:
    """Set a module's flags for inference, in place.

    Args:
        module: the module, a copy that exists for one call.
        settings: its settings by name.
    """
    for name, value in list(settings.items()):
        if name in INFERENCE_FLAGS and isinstance(value, bool):
            object.__setattr__(module, name, INFERENCE_FLAGS[name])


def set_float32(module: Any, settings: Mapping[str, Any]) -> None:
    """Set a module's `dtype` to float32 if it has fewer bits, in place."""
    dtype = settings.get("dtype")
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
        object.__setattr__(module, "dtype", jnp.float32)
