"""Gradients by arguments that are not all arrays of floats: nnx and equinox modules. Called by `scaled_value_and_grad`.

An nnx module goes through `nnx.value_and_grad`, so that its streams and statistics move in the caller's own object and
the gradients are the `nnx.State` of its parameters. Of an equinox module the inexact arrays are differentiated, as
`eqx.filter_value_and_grad` does, and the gradients are a module with None in every other place. Everything else is
`jax.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyamp_jax import compat


def gradients(fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    """(gradients of the first result of `fun`, its second), with the structures of the argument's own library.

    Args:
        fun: returns a floating scalar, and anything beside it.
        argnums: an int or several; for nnx also `nnx.DiffState`.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if _holds([args, kwargs], compat.nnx_objects()):
        nnx = compat.loaded("flax.nnx")
        (_, aux), grads = nnx.value_and_grad(fun, argnums=argnums, has_aux=True)(*args, **kwargs)
        return grads, aux
    if _holds([args[n] for n in _numbers(argnums) if n < len(args)], compat.equinox_modules()):
        return _filtered(fun, argnums, args, kwargs)
    found: tuple[Any, Any] = jax.grad(fun, argnums, has_aux=True)(*args, **kwargs)
    return found


def _filtered(fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any]:
    eqx = compat.loaded("equinox")
    numbers = _numbers(argnums)
    chosen, rest = eqx.partition([args[n] for n in numbers], eqx.is_inexact_array)

    def inner(chosen: list[Any]) -> Any:
        given = list(args)
        for number, value in zip(numbers, eqx.combine(chosen, rest), strict=True):
            given[number] = value
        return fun(*given, **kwargs)

    grads, aux = jax.grad(inner, has_aux=True)(chosen)
    return (grads[0] if isinstance(argnums, int) else tuple(grads)), aux


def _numbers(argnums: Any) -> list[int]:
    """The argument numbers; of nnx's `DiffState` there is none, since then the arguments are nnx's."""
    several = argnums if isinstance(argnums, Sequence) else [argnums]
    return [number for number in several if isinstance(number, int)]


def _holds(tree: Any, kinds: tuple[type, ...]) -> bool:
    if not kinds:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)
