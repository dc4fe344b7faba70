"""Flags that a model is run with in inference, by the names that JAX's libraries and their users give them.

Called by the libraries' `run`, so that dropout is off and running statistics are used on both sides of a comparison.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax.numpy as jnp

FLAGS: Final[Mapping[str, bool]] = {
    "deterministic": True,
    "use_running_average": True,
    "inference": True,
    "train": False,
    "training": False,
    "is_training": False,
}
"""Name of an argument or a setting -> its value in inference."""


def quiet(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, add: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, those of `FLAGS` among them as in inference.

    Args:
        function: what is called; a bound method.
        args: positional arguments.
        kwargs: keyword arguments.
        add: pass flags that the caller leaves to their defaults too, but for those that are settings of the module.
    """
    signature = inspect.signature(function)
    bound = signature.bind_partial(*args, **kwargs)
    module = getattr(function, "__self__", None)
    for name, parameter in signature.parameters.items():
        given = bound.arguments.get(name)
        added = add and given is None and getattr(module, name, None) is None
        if name in FLAGS and parameter.kind is not parameter.VAR_KEYWORD and (added or given is not None):
            bound.arguments[name] = FLAGS[name]
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = bound.arguments.get(name, {})
            bound.arguments[name] = {key: FLAGS.get(key, value) for key, value in rest.items()}
    return bound.args, bound.kwargs


def still(module: Any, names: Mapping[str, Any]) -> None:
    """A module's own settings as in inference and in float32, in place: of a copy that lives for one call.

    Args:
        module: the module.
        names: its settings.
    """
    for name, value in names.items():
        if name in FLAGS and isinstance(value, bool):
            object.__setattr__(module, name, FLAGS[name])
        if (
            name == "dtype"
            and value is not None
            and jnp.issubdtype(value, jnp.floating)
            and jnp.dtype(value).itemsize < 4
        ):
            object.__setattr__(module, name, jnp.float32)
