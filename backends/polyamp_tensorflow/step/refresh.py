"""Refresh of a state after its Keras model was changed in place, or replaced by one around its layers (S28).

A parameter survives if it is the same variable. Optimizers of polyamp's specs are created anew and get the values of
surviving parameters. A native optimizer is the user's object, so it is rebuilt in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from polyamp.errors import ModelError, UnsupportedError
from polyamp.recipe.optimizers import is_spec
from polyamp.rules.refresh import KnownParameter, RefreshPlan
from polyamp_keras.arrays import native_variable
from polyamp_keras.compat import (
    NON_SLOT_ATTRIBUTES,
    moving_averages,
    own_trainable_variables,
    reset_optimizer,
    variable_index,
)
from polyamp_keras.models.layers import check_is_model, is_built
from polyamp_keras.models.variables import model_variables
from polyamp_keras.own_loop.optimizer_checks import optimizer_members
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
from polyamp_tensorflow.step.averages import carry_averages
from polyamp_tensorflow.step.state import TensorFlowState

NamedVariables = Mapping[str, Any]


def refresh_state(state: TensorFlowState, model: Any, plan: RefreshPlan) -> TensorFlowState:
    """Return a new state; the old one then raises at each step. If this fails, nothing has changed.

    Raises:
        ModelError: the model is not built, or `init` would raise.
        UnsupportedError: a native optimizer that cannot be rebuilt.
    """
    model = state.model if model is None else model
    check_is_model(model)
    if not is_built(model) or not state.is_ready:
        raise ModelError(
            "refresh: the model is not built, so its variables do not exist yet. Call the changed model once, or give "
            "its new layers an input shape, then polyamp.refresh."
        )
    with state.exclusive_access(), state.strategy.scope():
        state.check_alive()
        before, now = state.variables.parameters, model_variables(model).parameters
        survivors = plan.surviving_parameters(_known_parameters(before), _known_parameters(now))
        if is_spec(state.recipe.optimizer):
            new = TensorFlowState(model, state.recipe, state.backend)
            _carry_spec_optimizer(state.optimizer, new.optimizer, before, now, survivors)
        else:
            with _reset_native_optimizer(state.optimizer) as (old, built_for):
                new = TensorFlowState(model, state.recipe, state.backend)
                indices = {id(native_variable(variable)): number for number, variable in enumerate(built_for)}
                pairs = [
                    (variable_index(new.optimizer, now[n]), indices[id(native_variable(before[was]))])
                    for n, was in survivors.items()
                ]
                _carry_native_optimizer(old, vars(new.optimizer), len(indices), pairs)
                _start_averages(new.optimizer, {number for number, _ in pairs})
            new.optimizer_settings = state.optimizer_settings  # as they were at init, for checkpoints
        carry_averages(state.averages, new.averages, survivors)
        new.take_over(state)
        return new


def _known_parameters(named: NamedVariables) -> dict[str, KnownParameter]:
    return {
        name: KnownParameter(id(native_variable(variable)), tuple(variable.shape)) for name, variable in named.items()
    }


def _carry_spec_optimizer(
    old: SpecOptimizer, new: SpecOptimizer, before: NamedVariables, now: NamedVariables, survivors: Mapping[str, str]
) -> None:
    """Copy slots, rate and counts. A new parameter counts as having missed all updates so far (S23)."""
    slots = old.named_slots(list(before))
    for name, slot in new.named_slots(list(now)).items():
        path, _, word = name.rpartition("/")
        found = slots.get(f"{survivors[path]}/{word}") if path in survivors else None
        if found is not None:
            native_variable(slot).assign(native_variable(found))
    missed, count = native_variable(old.missed_updates).numpy(), int(native_variable(old.iterations))
    indices = {name: number for number, name in enumerate(before)}
    kept = [missed[indices[survivors[name]]] if name in survivors else count for name in now]
    native_variable(new.missed_updates).assign(np.array(kept, np.int32))
    native_variable(new.iterations).assign(native_variable(old.iterations))
    if not callable(new.spec.learning_rate) and not callable(old.spec.learning_rate):
        native_variable(new.learning_rate).assign(native_variable(old.learning_rate))  # a callback may have changed it


@contextlib.contextmanager
def _reset_native_optimizer(optimizer: Any) -> Iterator[tuple[NamedVariables, list[Any]]]:
    """Context manager that resets a native optimizer to the unbuilt state, and restores it if the block fails. Yields
    its previous attributes and the variables that it was built for.

    Raises:
        UnsupportedError: it has a variable that cannot be assigned to parameters.
    """
    if len(optimizer_members(optimizer)) > 1:
        raise UnsupportedError(
            "refresh does not build a keras.optimizers.MultiOptimizer again. Use one optimizer, or one of polyamp's "
            "specs with groups=[polyamp.Group(...)]."
        )
    old, built_for = dict(vars(optimizer)), list(own_trainable_variables(optimizer))
    _check_slots(optimizer, old)
    try:
        reset_optimizer(optimizer)
        yield old, built_for
    except BaseException:
        vars(optimizer).clear()
        vars(optimizer).update(old)
        raise


def _start_averages(optimizer: Any, kept: Collection[int]) -> None:
    """Start the moving average (`use_ema`) of a new parameter at its value, as Keras does at the first update. An
    average that starts at 0 would overwrite the parameter with values near 0."""
    for variable, average in moving_averages(optimizer) if optimizer.use_ema else ():
        if variable_index(optimizer, variable) not in kept:
            average.assign(variable)


def _check_slots(optimizer: Any, attributes: NamedVariables) -> None:
    """Raise for an optimizer with variables that are neither scalars nor slots in a list as long as the parameters."""
    count = len(own_trainable_variables(optimizer))
    known = {id(v) for name, value in attributes.items() for v in _attribute_variables(name, value, count)}
    for variable in optimizer.variables:
        if id(variable) not in known:
            raise UnsupportedError(
                f"refresh cannot tell which parameter {type(optimizer).__qualname__} keeps {variable.path!r} for. Use "
                "one of polyamp's specs, or an optimizer that keeps a list for each kind of slot."
            )


def _attribute_variables(name: str, value: Any, count: int) -> list[Any]:
    """Return the variables of one attribute: a single variable, or a slot of every parameter."""
    if hasattr(value, "assign"):
        return [value]
    slots = isinstance(value, list) and len(value) == count and name not in NON_SLOT_ATTRIBUTES
    return [slot for slot in value if hasattr(slot, "assign")] if slots else []


def _carry_native_optimizer(old: NamedVariables, new: NamedVariables, count: int, pairs: list[tuple[int, int]]) -> None:
    """Copy values by the names of the optimizer's attributes: single variables, and slots of surviving parameters.

    Args:
        old, new: its attributes before and now.
        count: number of parameters before.
        pairs: indices of each surviving parameter, now and before.
    """
    for name, value in new.items():
        was = old.get(name)
        if hasattr(value, "assign") and hasattr(was, "assign"):
            value.assign(was)
        elif (
            isinstance(value, list) and name not in NON_SLOT_ATTRIBUTES and isinstance(was, list) and len(was) == count
        ):
            for mine, its in pairs:
                if hasattr(value[mine], "assign") and hasattr(was[its], "assign"):
                    value[mine].assign(was[its])
