"""Types of what the states of each framework have, checked by the suite `types` and never run.

`polyamp.init` returns a `State`. `isinstance` makes it a framework's own, whose attributes have types; so does an
annotation of an argument. A step returns the kind of state that it was given.
"""

from typing import Any, assert_type

import jax
import torch

import polyamp
import polyamp_jax
import polyamp_tensorflow
import polyamp_torch


def torch_state(model: torch.nn.Linear, recipe: polyamp.Recipe, step: Any) -> None:
    state = polyamp.init(model, recipe)
    assert_type(state.model, torch.nn.Linear)
    assert isinstance(state, polyamp_torch.TorchState)
    assert_type(state.optimizer, torch.optim.Optimizer)
    assert_type(state.parameters, dict[str, torch.nn.Parameter])
    assert_type(state.step, torch.Tensor)


def named_torch_state(
    state: polyamp_torch.TorchState[torch.nn.Linear], gradients: polyamp.Gradients, recipe: polyamp.Recipe
) -> None:
    assert_type(state.model.weight, torch.Tensor)
    stepped, _ = polyamp.train_step(lambda model, batch: model(batch).sum(), recipe)(state, torch.ones(2))
    assert_type(stepped, polyamp_torch.TorchState[torch.nn.Linear])
    applied, _ = polyamp.apply_gradients(state, gradients)
    assert_type(applied, polyamp_torch.TorchState[torch.nn.Linear])
    assert_type(polyamp.restore(state, "checkpoint"), polyamp_torch.TorchState[torch.nn.Linear])


def jax_state(state: polyamp_jax.JaxState, recipe: polyamp.Recipe) -> None:
    assert_type(state.rngs, dict[str, jax.Array])
    assert_type(state.averages, dict[str, dict[str, jax.Array]])
    print(state.opt_state, state.params)  # pytrees: of the optimizer, and of the model
    stepped, result = polyamp.train_step(lambda model, batch: model(batch).sum(), recipe)(state, 1.0)
    assert_type(stepped, polyamp_jax.JaxState)
    assert_type(result, polyamp.StepResult)


def tensorflow_state(recipe: polyamp.Recipe, model: Any) -> None:
    state = polyamp.init(model, recipe)
    assert isinstance(state, polyamp_tensorflow.TensorFlowState)
    print(state.optimizer, state.variables.parameters, state.strategy)


def values(state: polyamp.State) -> None:
    polyamp.save(state, "checkpoint", extra={"best_val_loss": 1.5})
    assert_type(polyamp.load_extra("checkpoint"), dict[str, Any])
