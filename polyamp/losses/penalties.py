"""Penalties: what a model adds to its loss by itself (S25), and the sum of squares of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyamp.contract.registry import backend_of
from polyamp.errors import LossError


def sum_of_squares(values: Any) -> Any:
    """Return the sum of the squares of all elements (|z|² if complex) in float32: for parameters, their L2 penalty.

    Args:
        values: a floating array, or a mapping, list or tuple of them, such as `polyamp.parameters(model)`.

    Returns:
        A float32 scalar of the framework.

    Raises:
        LossError: there is no array.

    >>> import numpy as np
    >>> float(sum_of_squares({"w": np.array([1.0, 2.0], "f4"), "b": np.array(3.0, "f4")}))
    14.0
    """
    arrays = [part for array in _array_leaves(values) for part in _real_parts(array)]
    if not arrays:
        raise LossError(f"sum_of_squares needs at least one array. Received: {values!r}.")
    losses = backend_of(arrays[0]).losses
    with losses.in_float32():
        squares = [losses.wide(array, arrays[0]) for array in arrays]
        total = losses.sum(squares[0] * squares[0])
        for wide in squares[1:]:
            total = total + losses.sum(wide * wide)
    return total


def regularization(model: Any) -> Any:
    """Return the regularization that a model adds to its loss by itself, for `loss_fn` to add (S25).

    In Keras it is what `compile` and `fit` add: the regularizers of trainable weights, and the terms that `add_loss`
    and the activity regularizers collected in the model's last call. In the other frameworks a model adds nothing.

    Args:
        model: the model that `loss_fn` receives, or a part of it; or a framework's own model, in a custom loop.

    Returns:
        A float32 scalar of the framework; 0 where there is nothing.

    >>> from polyamp.reference import MLP
    >>> float(regularization(MLP.random([4, 1], seed=0)))
    0.0
    """
    return backend_of(model).regularization(model)


def _real_parts(array: Any) -> tuple[Any, ...]:
    """Return a real array, or both parts of a complex one."""
    return (array.real, array.imag) if "complex" in str(getattr(array, "dtype", "")) else (array,)


def _array_leaves(values: Any) -> list[Any]:
    """Return the leaves of nested mappings, lists and tuples, without None."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [array for item in values for array in _array_leaves(item)]
    return [] if values is None else [values]
