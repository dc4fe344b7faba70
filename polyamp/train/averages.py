"""`averaged` and `averaged_model`: a model with the moving averages of its parameters, for evaluation (S34)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeVar

from polyamp.contract.backend import KeepsAverages, State
from polyamp.errors import RecipeError
from polyamp.recipe.optimizers import is_spec
from polyamp.train.argument_checks import is_state, not_a_state_error

M = TypeVar("M")


def averaged(state: State[M]) -> AbstractContextManager[M]:
    """Return a context manager that yields the model with its averages, and then puts the trained parameters back.

    In torch and Keras it is `state.model` itself: no second model is made, so this works for models that are sharded or
    cannot be copied. In the block the state cannot be stepped, saved or refreshed. In JAX it is that of
    `averaged_model`.

    Args:
        state: a state whose recipe has `ema`, or an optimizer with an average of its own (`schedule_free`). Before the
            first applied update the averages are the parameters.

    Raises:
        RecipeError: the state's recipe has neither.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(ema=polyamp.Ema(0.99)))
        >>> with polyamp.averaged(state) as model:
        ...     type(model).__name__
        'MLP'
    """
    keeper = _average_keeper(state, "polyamp.averaged(state)")
    found: AbstractContextManager[M] = keeper.averaged(state)
    return found


def averaged_model(state: State[M]) -> M:
    """Return a new model with the averages, which later steps do not change.

    Args:
        state: as in `averaged`.

    Raises:
        RecipeError: the state's recipe has no averages.
        UnsupportedError: the model cannot be copied: it is sharded over processes, or a Keras model that cannot be
            serialized. Use `averaged`.

    Example:
        >>> import polyamp
        >>> from polyamp.reference import MLP
        >>> state = polyamp.init(MLP.random([4, 1], seed=0), polyamp.Recipe(ema=polyamp.Ema(0.99)))
        >>> sorted(polyamp.averaged_model(state).parameters)
        ['dense0/bias', 'dense0/kernel']
    """
    model: M = _average_keeper(state, "polyamp.averaged_model(state)").averaged_model(state)
    return model


def _average_keeper(state: Any, call: str) -> KeepsAverages:
    if not is_state(state):
        raise not_a_state_error(state, None, call)
    if state.recipe.ema is None and not (is_spec(state.recipe.optimizer) and state.recipe.optimizer.has_average):
        raise RecipeError(
            f"{call}: the state's recipe has no averages. Give it some: Recipe(..., ema=polyamp.Ema(decay=0.999))."
        )
    keeper: KeepsAverages = state.backend
    return keeper
