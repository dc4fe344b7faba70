"""Moving averages of a state's parameters: their variables, their move after an update, the model with them (S34).

The states are `TensorFlowState`s, annotated as `Any` because `state` imports this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from polyamp.errors import UnsupportedError
from polyamp.recipe.recipe import Recipe
from polyamp.rules.averages import average_share, averaged_paths, move_average
from polyamp_keras.arrays import native_variable
from polyamp_keras.engines.tensorflow import XP
from polyamp_keras.models.copies import copy_model
from polyamp_keras.models.variables import ModelVariables, model_variables
from polyamp_tensorflow.arrays import assign_values

Averages = dict[str, dict[str, Any]]
"""Role, "model" or "running" -> path -> variable; empty without `Recipe(ema=...)`."""


def make_averages(recipe: Recipe, variables: ModelVariables) -> Averages:
    """Return new averages, with the values of their parameters; in the scope of the state's strategy."""
    ema = recipe.ema
    if ema is None:
        return {}
    wide = tf.float64 if recipe.policy.param == "float64" else tf.float32
    running = variables.running if ema.statistics == "average" else {}

    def make(path: str, variable: Any) -> Any:
        value = tf.cast(native_variable(variable).read_value(), wide)
        return tf.Variable(value, trainable=False, name=f"average/{path}".replace("/", "_"))

    paths = averaged_paths(recipe, variables.parameters, backend="tensorflow")
    return {
        "model": {path: make(path, variables.parameters[path]) for path in paths},
        "running": {path: make(path, v) for path, v in running.items() if native_variable(v).dtype.is_floating},
    }


def write_averages(state: Any, run: Callable[..., Any], step: Any) -> None:
    """Move the averages after an applied update, in the body of `merge_replica_calls`.

    Args:
        state: the state.
        run: runs a function in every replica.
        step: number of applied updates after this one, int32 scalar.
    """
    ema = state.recipe.ema
    if ema is None:
        return
    averages, places = _pairs(state)

    def moved(step: Any) -> list[Any]:
        share = average_share(ema, tf.cast(step, averages[0].dtype), None, XP)
        return [
            move_average(average.read_value(), tf.cast(place.read_value(), average.dtype), share, XP)
            for average, place in zip(averages, places, strict=True)
        ]

    assign_values(averages, run(moved, step))


def carry_averages(before: Averages, now: Averages, survivors: Mapping[str, str]) -> None:
    """Copy the averages of surviving parameters from the state that was refreshed (S28)."""
    for path, was in survivors.items():
        if path in now.get("model", ()) and was in before["model"]:
            now["model"][path].assign(before["model"][was])


@contextlib.contextmanager
def averaged(state: Any) -> Iterator[Any]:
    """Context manager that yields the model with its averages in place of the trained parameters.

    Raises:
        ModelError: the model is not built.
        StateError: the state was refreshed, or is in such a block already.
    """
    with state.exclusive_access(), state.strategy.scope():
        state.check_alive()
        averages, places = _pairs(state)
        kept = [tf.identity(place.read_value()) for place in places]
        for average, place in zip(averages, places, strict=True):
            place.assign(tf.cast(_value(average), place.dtype))
        state.has_averages_in_place = True
    try:
        yield state.model
    finally:
        with state.exclusive_access(), state.strategy.scope():
            for value, place in zip(kept, places, strict=True):
                place.assign(value)
            state.has_averages_in_place = False


def averaged_model(state: Any) -> Any:
    """Return a copy of the model with the averages.

    Raises:
        UnsupportedError: the model cannot be copied.
        ModelError: the model is not built.
        StateError: the state was refreshed, or is in `averaged`.
    """
    with state.exclusive_access(), state.strategy.scope():
        state.check_alive()
        own, kind = state.variables, type(state.model).__name__
        try:
            copied = copy_model(state.model)
            twin = model_variables(copied)
            if [len(role) for role in twin] != [len(role) for role in own]:
                raise ValueError("the copy has other variables")
        except Exception as error:
            raise UnsupportedError(
                f"averaged_model cannot copy this {kind} ({type(error).__name__}: {_first_line(error)}). Use `with "
                "polyamp.averaged(state) as model:`, which needs no copy."
            ) from error
        values = {id(place): average for average, place in zip(*_pairs(state), strict=True)}
        for role, copies in zip(own, twin, strict=True):
            for variable, place in zip(role.values(), map(native_variable, copies.values()), strict=True):
                native = native_variable(variable)
                place.assign(tf.cast(_value(values.get(id(native), native)), place.dtype))
        return copied


def _value(average: Any) -> Any:
    return average.read_value() if isinstance(average, tf.Variable) else average


def _optimizer_average(state: Any, index: int, place: Any) -> Any:
    """Return the average that the optimizer has of the parameter at an index."""
    spec, slots = state.optimizer.spec_and_slots(index)
    slots = {name: native_variable(slot).read_value() for name, slot in slots.items()}
    return spec.average(tf.cast(place.read_value(), next(iter(slots.values())).dtype), slots)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _pairs(state: Any) -> tuple[list[Any], list[Any]]:
    """Return the averages, and the variables that they are of; tensors of an optimizer that has averages itself."""
    if not state.averages:
        places = [native_variable(variable) for variable in state.variables.parameters.values()]
        return [_optimizer_average(state, index, place) for index, place in enumerate(places)], places
    roles = {"model": state.variables.parameters, "running": state.variables.running}
    found = [
        (average, native_variable(roles[role][path]))
        for role, own in state.averages.items()
        for path, average in own.items()
    ]
    return [average for average, _ in found], [place for _, place in found]
