"""S20: what is said of something else in the place of a state, a recipe or a model."""

from __future__ import annotations

from typing import Any

import pytest
from array_state import example

import polyamp
from polyamp import LossScaler, ModelError, Policy, Recipe
from polyamp.results import Gradients, StepResult
from polyamp.train.argument_checks import (
    check_model,
    extra_batch_error,
    is_state,
    not_a_recipe_error,
    not_a_state_error,
)

STATE: Any = example(1)
STATE.recipe = Recipe()
RESULT = StepResult(*range(len(StepResult._fields)))
GRADIENTS = Gradients({}, {})
STEP = "step(state, batch)"
MAKE = "Make one: state = polyamp.init(model, recipe)."


@pytest.mark.parametrize(
    ("given", "other", "call", "said"),
    [
        (None, {}, STEP, f"None. {MAKE}"),
        ({"x": 1}, {}, STEP, f"a dict. {MAKE}"),
        ({"x": 1}, STATE, STEP, f"a dict, and the state as batch. The two are swapped: {STEP}."),
        ("path", STATE, "save(state, path)", "'path', and the state as path. The two are swapped: save(state, path)."),
        (3, STATE, STEP, f"3, and the state as the next argument. The two are swapped: {STEP}."),
        (RESULT, {}, STEP, "a StepResult. A step returns both: state, result = step(state, batch)."),
        (
            GRADIENTS,
            STATE,
            "apply_gradients(state, grads)",
            "a Gradients, and the state as grads. The two are swapped: apply_gradients(state, grads).",
        ),
        ((STATE, RESULT), {}, STEP, "a tuple of a state and a StepResult. A step returns both: state, result = step("),
        ([STATE], {}, STEP, "a list of 1 state. One state at a time: for a loss of several models, polyamp.value_and"),
        ((STATE, STATE), {}, "value_and_grad(states, batch)", "a tuple of 2 states. Several states come as a list: ["),
        ([STATE, 3], {}, STEP, f"a list of 2. {MAKE}"),
        ([], {}, STEP, f"a list of 0. {MAKE}"),
    ],
)
def test_s20_no_state(given: Any, other: Any, call: str, said: str) -> None:
    message = str(not_a_state_error(given, other, call))
    assert message.startswith(f"{call}: state must be what polyamp.init returned. Received: {said}")


def test_s20_a_list_of_states_says_where_the_other_came() -> None:
    message = str(not_a_state_error(3, {}, STEP, several=True, position=1))
    assert "what polyamp.init returned, or a list of states. Received at position 1: 3." in message
    assert (is_state(STATE), is_state(Recipe())) == (True, False)
    assert "Received: 4 arguments. Put the arrays into one batch: step(state, (x, y))" in str(extra_batch_error([1, 2]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Recipe, "Call it: polyamp.Recipe(policy='mixed_float16')."),
        ("mixed_bfloat16", "Write polyamp.Recipe(policy='mixed_bfloat16')."),
        ("recipe.toml", "Write polyamp.Recipe.load('recipe.toml')."),
        (Policy("float32"), "Write polyamp.Recipe(policy=policy)."),
        (polyamp.sgd(0.1), "Write polyamp.Recipe(policy='mixed_float16', optimizer=...)."),
        (LossScaler(), "Write polyamp.Recipe(policy='mixed_float16', scaler=...)."),
        (polyamp.schedules.constant(0.1), "Received: schedules.constant(value=0.1)."),
        ({}, "Write polyamp.Recipe(**fields), or polyamp.Recipe.load(path) for a file."),
        (3, "Received: 3. the call."),
        (dict, "Received: the class dict."),
    ],
)
def test_s20_no_recipe(value: Any, said: str) -> None:
    message = str(not_a_recipe_error(value, "the call"))
    assert message.startswith("recipe must be a polyamp.Recipe. Received: ")
    assert message.endswith(said)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (STATE, "It is a state already; for a new one: polyamp.init(state.model, recipe)."),
        (None, "Received: None. Does the function that makes it lack a `return`?"),
        (Recipe(), "Write polyamp.init(model, recipe)."),
        (dict, "Received: the class dict. Make one: dict(...)."),
        ([3], "Received: a list of 1. Call init for each of several models"),
        ({"w": 1}, "Parameters alone are no model: pass the model that has them. torch: after model.load"),
        (iter([3]), "Pass the model itself, not model.parameters()."),
    ],
)
def test_s20_no_model(model: Any, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_model(model, None)
    assert said in str(caught.value)
    check_model(len, None)
    check_model(dict, "torch")
