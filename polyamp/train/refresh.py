"""`polyamp.refresh`: a state that goes on after its model was changed (S28)."""

from __future__ import annotations

from typing import Any, TypeVar

from polyamp.contract.backend import Backend, State
from polyamp.errors import StateError
from polyamp.rules.growing import Growth, globs

M = TypeVar("M")


def refresh(state: State[M], model: Any = None, *, fresh: Any = (), keep: Any = ()) -> State[M]:
    """A state that goes on with a changed model: layers added, taken out or replaced, frozen or thawed.

    Scale, counters, steps and the position of schedules go on, and so do optimizer state and counts of every parameter
    that stayed, bit for bit. What is new starts anew; what went, or is frozen now, is dropped, so that a parameter that
    is thawed later starts anew too. Overrides, groups and aliases are resolved again.

    In torch and Keras a parameter stayed if it is the same object with the same shape, wherever it lies now. In JAX,
    and in other frameworks where a model is a value, it stayed if it is the same array, or has the path, the shape and
    the values of one before.

    Args:
        state: the state before. Do not step it again: in torch and Keras it shares the model and the optimizer with the
            new one, and says so.
        model: the changed model, in the form that `init` takes: `model = state.model`, changed. In torch and Keras it
            may be left out where the state's own model was changed in place.
        fresh: a glob of parameter paths, or a list of them, whose optimizer state starts anew.
        keep: the same of parameters whose optimizer state is kept though they were replaced by others of their shape,
            or given other values by hand.

    Returns:
        The state to go on with. A compiled step compiles again at its next call.

    Raises:
        ModelError: no model where one is needed; a glob that matches nothing; what `init` raises. The given state is
            then as it was.
        UnsupportedError: a native optimizer that cannot be built again.
        StateError: not a state, or one that was refreshed already.

    Example:
        >>> import numpy as np, polyamp
        >>> from polyamp.reference import MLP
        >>> recipe = polyamp.Recipe(policy="float32", optimizer=polyamp.adam(0.1))
        >>> state = polyamp.init(MLP.random([4, 8, 2], seed=0), recipe)
        >>> head = {"dense1/kernel": np.ones((8, 3), "f4"), "dense1/bias": np.ones(3, "f4")}
        >>> state = polyamp.refresh(state, MLP({**state.model.parameters, **head}))
        >>> state.model.parameters["dense1/kernel"].shape
        (8, 3)
    """
    backend = getattr(state, "backend", None)
    if backend is None:
        raise StateError(
            f"refresh takes a state that polyamp.init or a step returned. Received: {type(state).__name__}. Call "
            "polyamp.refresh(state) or polyamp.refresh(state, model)."
        )
    found: Backend = backend
    new: State[M] = found.refresh(state, model, Growth(globs("fresh", fresh), globs("keep", keep)))
    return new
