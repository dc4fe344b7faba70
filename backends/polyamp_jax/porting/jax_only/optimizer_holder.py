"""`OptimizerHolder`, what an optax state comes in: flax's `TrainState`, `nnx.Optimizer`, `(transformation, state)`, or
the state alone.

The classes are recognised by their attributes, so that no library is imported for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp.errors import ArgumentError, describe_value
from polyamp_jax import compat


class OptimizerHolder:
    """An optax state with what holds it.

    Args:
        optimizer: as the user passed it.

    Attributes:
        transformation: the transformation; None if it is unknown.
        state: the state, of arrays.
        step: the holder's own counter of steps; None if it has none.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.transformation: Any = None
        self.state, self.step = optimizer, None
        if _is_pair(optimizer):
            self.transformation, self.state = optimizer
        elif hasattr(optimizer, "opt_state"):
            self.transformation, self.state = getattr(optimizer, "tx", None), optimizer.opt_state
            step = getattr(optimizer, "step", None)
            self.step = None if step is None else int(_value(step))
        self._held = self.state
        self.state = jax.tree.map(_value, self.state, is_leaf=_is_variable)

    def replaced(self, state: Any, params: Any, model: Any, step: int | None) -> Any:
        """Return the user's object with another state; the given one is unchanged.

        Args:
            state: the new state.
            params: the new parameters.
            model: the new model.
            step: the new counter of steps, if the holder has one.
        """
        own = self.optimizer
        if hasattr(own, "wrt"):
            return self._replaced_nnx(state, model, step)
        state = jax.tree.map(
            lambda old, new: old.replace(new) if _is_variable(old) else new, self._held, state, is_leaf=_is_variable
        )
        if _is_pair(own):
            return own[0], state
        if not hasattr(own, "opt_state"):
            return state
        if not callable(getattr(own, "replace", None)) or not hasattr(own, "params"):
            raise ArgumentError(
                "training(model, optimizer, scaler): of what holds an optax state only flax's TrainState and "
                f"nnx.Optimizer can be made anew. Received: {describe_value(own)}. Give (transformation, state)."
            )
        counter = {} if step is None else {"step": _like(own.step, step)}
        return own.replace(opt_state=state, params=params, **counter)

    def _replaced_nnx(self, state: Any, model: Any, step: int | None) -> Any:
        """Return a copy of an `nnx.Optimizer` with another state, and of a `ModelAndOptimizer` with another model."""
        from flax import nnx

        copy = nnx.clone(self.optimizer)
        held = jax.tree.leaves(copy.opt_state, is_leaf=_is_variable)
        for variable, array in zip(held, jax.tree.leaves(state), strict=True):
            variable.set_value(array)
        if step is not None:
            copy.step.set_value(_like(_value(copy.step), step))
        if "model" in vars(copy):
            copy.model = model
        return copy


def _is_pair(optimizer: Any) -> bool:
    return isinstance(optimizer, tuple) and len(optimizer) == 2 and callable(getattr(optimizer[0], "update", None))


def _is_variable(value: Any) -> bool:
    variable = getattr(compat.loaded_module("flax.nnx"), "Variable", None)
    return variable is not None and isinstance(value, variable)


def _value(value: Any) -> Any:
    return value.get_value() if _is_variable(value) else value


def _like(old: Any, number: int) -> Any:
    """Return a number as the old one is kept: Python's, NumPy's or an array."""
    if isinstance(old, jax.Array):
        return jnp.full(old.shape, number, old.dtype)
    return np.asarray(number, old.dtype) if isinstance(old, np.ndarray | np.generic) else number
