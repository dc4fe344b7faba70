"""`disable_dropout`: context manager that turns dropout off or feeds it given random numbers.

JAX traces from outside the block are not reused inside, and traces from inside are not reused outside.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.parity.trace.observer import UniformSource
from polyamp_jax import compat

_ATTENTION: Final = ("flax.linen", "flax.linen.attention", "flax.nnx", "flax.nnx.nn.attention")
"""Modules that define flax's attention functions."""
_block_numbers: Final = itertools.count(1)


@contextlib.contextmanager
def disable_dropout(draws: UniformSource | None) -> Iterator[None]:
    """Return the context manager of `Observer.still`, for every supported library."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.separate_trace_cache("still" if draws is None else f"draws {next(_block_numbers)}"))
        if draws is None:
            _replace_dropout(stack)
        else:
            _replace_attribute(stack, jax.random, "bernoulli", functools.partial(_bernoulli, draws))
            _replace_attribute(stack, jax.random, "uniform", functools.partial(_uniform, draws))
        yield


def _replace_dropout(stack: contextlib.ExitStack) -> None:
    if (linen := compat.loaded_module("flax.linen")) is not None:
        stack.enter_context(linen.intercept_methods(_linen_interceptor))
    if (nnx := compat.loaded_module("flax.nnx")) is not None:
        _replace_attribute(stack, nnx.Dropout, "__call__", _identity_call)
        _replace_attribute(
            stack, nnx.MultiHeadAttention, "__call__", _force_deterministic(nnx.MultiHeadAttention.__call__)
        )
    for name in _ATTENTION:
        for function in ("dot_product_attention", "dot_product_attention_weights"):
            module = compat.loaded_module(name)
            if hasattr(module, function):
                _replace_attribute(stack, module, function, _force_deterministic(getattr(module, function)))
    if (equinox := compat.loaded_module("equinox")) is not None:
        _replace_attribute(stack, equinox.nn.Dropout, "__call__", _identity_call)
    for owner, name in compat.haiku_dropout():
        _replace_attribute(stack, owner, name, lambda rng, rate, x, *_, **__: x)


def _replace_attribute(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack closes."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def _linen_interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Set the dropout rate of a linen module to 0; the module is a copy that lives for one call."""
    module = context.module
    names = ("rate", "dropout_rate") if compat.is_a(module, "flax.linen", "Dropout") else ("dropout_rate",)
    for name in names:
        if isinstance(getattr(module, name, None), float | int):
            object.__setattr__(module, name, 0.0)
    return call(*args, **kwargs)


def _identity_call(self: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return inputs


def _force_deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "deterministic" in names and list(names).index("deterministic") < len(args):
            return function(*args, **kwargs)  # passed by position, which flax itself never does
        return function(*args, **{**kwargs, "deterministic": True})

    return call


def _bernoulli(draws: UniformSource, key: Any, p: Any = 0.5, shape: Any = None, **_: Any) -> Any:
    """Replace `jax.random.bernoulli`: True where the draw is >= `1 - p`, the dropout rate if True means keep."""
    shape = np.shape(p) if shape is None else tuple(shape)
    return _draw_array(draws, shape, key) >= 1 - p


def _uniform(
    draws: UniformSource, key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, **_: Any
) -> Any:
    """Replace `jax.random.uniform`."""
    drawn = jnp.asarray(_draw_array(draws, tuple(shape), key), jax.dtypes.canonicalize_dtype(dtype))
    return drawn if (minval, maxval) == (0.0, 1.0) else drawn * (maxval - minval) + minval


def _draw_array(draws: UniformSource, shape: tuple[int, ...], key: Any) -> Any:
    """Return the next draws. If `jax.vmap` maps the key, one draw covers all examples, each with its own key."""
    if not compat.is_mapped(key):
        return draws(shape)

    @jax.custom_batching.custom_vmap
    def numbers(key: Any) -> Any:
        return jnp.zeros(shape, jnp.float32)

    @numbers.def_vmap
    def _(size: int, mapped: Any, key: Any) -> Any:
        return jnp.asarray(_draw_array(draws, (size, *shape), key)), True

    return numbers(key)
