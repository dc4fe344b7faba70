"""`still`: a block without random numbers: dropout passes its input on, or takes its masks from numbers that are given.

Called by `observer`. What JAX traced outside of the block is not used again inside, nor the other way round.
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

from polyamp.parity.observing import Draws
from polyamp_jax import compat

_ATTENTION: Final = ("flax.linen", "flax.linen.attention", "flax.nnx", "flax.nnx.nn.attention")
"""Modules in which flax keeps its functions of attention."""
_blocks: Final = itertools.count(1)


@contextlib.contextmanager
def still(draws: Draws | None) -> Iterator[None]:
    """See `Observer.still`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.apart("still" if draws is None else f"draws {next(_blocks)}"))
        if draws is None:
            _without_dropout(stack)
        else:
            _with(stack, jax.random, "bernoulli", functools.partial(_bernoulli, draws))
            _with(stack, jax.random, "uniform", functools.partial(_uniform, draws))
        yield


def _without_dropout(stack: contextlib.ExitStack) -> None:
    if (linen := compat.loaded("flax.linen")) is not None:
        stack.enter_context(linen.intercept_methods(_linen))
    if (nnx := compat.loaded("flax.nnx")) is not None:
        _with(stack, nnx.Dropout, "__call__", _passed_on)
        _with(stack, nnx.MultiHeadAttention, "__call__", _deterministic(nnx.MultiHeadAttention.__call__))
    for name in _ATTENTION:
        for function in ("dot_product_attention", "dot_product_attention_weights"):
            module = compat.loaded(name)
            if hasattr(module, function):
                _with(stack, module, function, _deterministic(getattr(module, function)))
    if (equinox := compat.loaded("equinox")) is not None:
        _with(stack, equinox.nn.Dropout, "__call__", _passed_on)
    for owner, name in compat.haiku_dropout():
        _with(stack, owner, name, lambda rng, rate, x, *_, **__: x)


def _with(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Put a value in a place until the end of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def _linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """A module of linen that drops, with a rate of 0: modules are copies that live for one call."""
    module = context.module
    names = ("rate", "dropout_rate") if compat.is_a(module, "flax.linen", "Dropout") else ("dropout_rate",)
    for name in names:
        if isinstance(getattr(module, name, None), float | int):
            object.__setattr__(module, name, 0.0)
    return call(*args, **kwargs)


def _passed_on(self: Any, inputs: Any, *_: Any, **__: Any) -> Any:
    return inputs


def _deterministic(function: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "deterministic" in names and list(names).index("deterministic") < len(args):
            return function(*args, **kwargs)  # given by position, which flax itself never does
        return function(*args, **{**kwargs, "deterministic": True})

    return call


def _bernoulli(draws: Draws, key: Any, p: Any = 0.5, shape: Any = None, **_: Any) -> Any:
    """`jax.random.bernoulli`: a draw of at least `1 - p`, the rate of whoever keeps where this is true, is a yes."""
    shape = np.shape(p) if shape is None else tuple(shape)
    return _drawn(draws, shape, key) >= 1 - p


def _uniform(
    draws: Draws, key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, **_: Any
) -> Any:
    """`jax.random.uniform`."""
    drawn = jnp.asarray(_drawn(draws, tuple(shape), key), jax.dtypes.canonicalize_dtype(dtype))
    return drawn if (minval, maxval) == (0.0, 1.0) else drawn * (maxval - minval) + minval


def _drawn(draws: Draws, shape: tuple[int, ...], key: Any) -> Any:
    """The next numbers; those of all examples where `jax.vmap` maps the key, which each has one of its own of."""
    if not compat.is_mapped(key):
        return draws(shape)

    @jax.custom_batching.custom_vmap
    def numbers(key: Any) -> Any:
        return jnp.zeros(shape, jnp.float32)

    @numbers.def_vmap
    def _(size: int, mapped: Any, key: Any) -> Any:
        return jnp.asarray(_drawn(draws, (size, *shape), key)), True

    return numbers(key)
