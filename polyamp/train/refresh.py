"""`polyamp.refresh`: continuation of a state after a change of its model (S28)."""

from __future__ import annotations

from typing import Any, TypeVar

from polyamp.contract.backend import Backend, State
from polyamp.errors import StateError
from polyamp.rules.refresh import RefreshPlan, parse_globs

M = TypeVar("M")


def refresh(state: State[M], model: Any = None, *, fresh: Any = (), keep: Any = ()) -> State[M]:
    """Return a state that continues with a changed model: layers added, removed, replaced, frozen or unfrozen.

    Scale, counters, steps and the position of schedules continue, and so do, bit for bit, optimizer state and counts of
    every parameter that survives. New parameters start anew. Removed or frozen ones are dropped, so a parameter that is
    unfrozen later starts anew too. Overrides, groups and aliases are resolved again.

    In torch and Keras a parameter survives if it is the same object with the same shape, at any path. In JAX, and in
    other frameworks where a model is a value, it survives if it is the same array, or if path, shape and values equal
    those of an old parameter.

    Args:
        state: the old state. Do not step it again: in torch and Keras it shares the model and the optimizer with the
            new one, and raises.
        model: the changed model, in the form that `init` takes: `model = state.model`, changed. In torch and Keras it
            may be omitted if the state's own model was changed in place.
        fresh: a glob of parameter paths, or a list of globs, whose optimizer state starts anew.
        keep: globs of parameters that keep their optimizer state although they were replaced by others of the same
            shape, or their values were changed by hand.

    Returns:
        The new state. A compiled step compiles again at its next call.

    Raises:
        ModelError: a required model is missing, a glob matches nothing, or an error of `init`. The old state is then
            unchanged.
        UnsupportedError: a native optimizer that cannot be rebuilt.
        StateError: not a state, or one that was already refreshed.

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
    new: State[M] = found.refresh(state, model, RefreshPlan(parse_globs("fresh", fresh), parse_globs("keep", keep)))
    return new
