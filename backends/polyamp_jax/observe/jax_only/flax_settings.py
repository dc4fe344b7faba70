"""Settings of flax's modules and attention functions, which linen and nnx share, for a comparison."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp

from polyamp_jax import compat
from polyamp_jax.observe.jax_only.library_observer import replace_attribute

_DTYPE_ATTRIBUTES: Final = ("dtype", "param_dtype")
"""Attributes of flax layers: the compute dtype and the parameter dtype."""


def replace_attention(stack: contextlib.ExitStack, modules: Sequence[str]) -> None:
    """Run flax's attention functions without dropout until `stack` closes.

    Args:
        stack: restores the functions.
        modules: the modules that define or export them.
    """
    for name in modules:
        for function in ("dot_product_attention", "dot_product_attention_weights"):
            module = compat.loaded_module(name)
            if hasattr(module, function):
                replace_attribute(stack, module, function, force_deterministic(getattr(module, function)))


def force_deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of flax that is called with `deterministic=True`."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "deterministic" in names and list(names).index("deterministic") < len(args):
            return function(*args, **kwargs)  # passed by position, which flax itself never does
        return function(*args, **{**kwargs, "deterministic": True})

    return call


def set_float64(module: Any) -> None:
    """Set a module's floating dtype attributes to float64."""
    for name in _DTYPE_ATTRIBUTES:
        value = getattr(module, name, None)
        if value is not None and not callable(getattr(value, "astype", None)) and _is_floating(value):
            object.__setattr__(module, name, jnp.float64)


def _is_floating(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating))
    except TypeError:  # a user attribute with the same name
        return False
