"""Gradients of a scaled loss with respect to pytrees, nnx modules and equinox modules; their unscaling.

- nnx modules use `nnx.value_and_grad`: random streams and statistics advance in the caller's object, and the gradients
  are the `nnx.State` of its parameters.
- equinox modules are differentiated with respect to their inexact arrays, as by `eqx.filter_value_and_grad`; the
  gradients are a module with None for all other leaves.
- Everything else uses `jax.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp_jax import compat
from polyamp_jax.step.grad_stats import unscale_leaf


def argument_gradients(fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    """Return (gradients of the first result of `fun`, its second result).

    The gradients have the structure that the argument's library uses.

    Args:
        fun: returns a floating scalar and a second result of any kind.
        argnums: an int or several; for nnx also `nnx.DiffState`.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if _has_instances([args, kwargs], compat.nnx_container_classes()):
        nnx = compat.loaded_module("flax.nnx")
        (_, aux), grads = nnx.value_and_grad(fun, argnums=argnums, has_aux=True)(*args, **kwargs)
        return grads, aux
    if _has_instances([args[n] for n in _argument_numbers(argnums) if n < len(args)], compat.equinox_module_classes()):
        return _filtered_gradients(fun, argnums, args, kwargs)
    found: tuple[Any, Any] = jax.grad(fun, argnums, has_aux=True)(*args, **kwargs)
    return found


def unscale_gradients(scaler: LossScaler, grads: Any, scale_state: LossScaleState) -> tuple[Any, jax.Array]:
    """Return float32 gradients divided by the scale, and their finite flag; True if the scaler does no check (S19)."""
    if scaler.checks:
        return scaler.unscale(grads, scale_state)
    return jax.tree.map(lambda grad: unscale_leaf(grad, None), grads), jnp.asarray(True)


def _filtered_gradients(fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    eqx = compat.loaded_module("equinox")
    numbers = _argument_numbers(argnums)
    chosen, rest = eqx.partition([args[n] for n in numbers], eqx.is_inexact_array)

    def inner(chosen: list[Any]) -> Any:
        given = list(args)
        for number, value in zip(numbers, eqx.combine(chosen, rest), strict=True):
            given[number] = value
        return fun(*given, **kwargs)

    grads, aux = jax.grad(inner, has_aux=True)(chosen)
    return (grads[0] if isinstance(argnums, int) else tuple(grads)), aux


def _argument_numbers(argnums: Any) -> list[int]:
    """Return the integer argument numbers. An `nnx.DiffState` is left out: its argument is an nnx object."""
    several = argnums if isinstance(argnums, Sequence) else [argnums]
    return [number for number in several if isinstance(number, int)]


def _has_instances(tree: Any, kinds: tuple[type, ...]) -> bool:
    if not kinds:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)
