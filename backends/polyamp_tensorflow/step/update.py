"""The second half of a step as graph code: flag, clip, optimizer and scale adjustment (S9 to S15).

    norm and finite flag -> clip -> optimizer under tf.cond -> scale adjustment

Called by the backend and by the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, refusals
from polyamp.rules.decide import Skip
from polyamp_tensorflow.arrays import XP, at_least_float32, dense, is_floating
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.measure import norm_and_flag
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.unused import leaving_alone


def update(states: States, gradients: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and scale adjustment for states that share a scaler (S14)."""
    values = [_fitting(state, item) for state, item in zip(states, gradients, strict=True)]
    measured = [norm_and_flag(list(item.values())) for item in values]
    every = tf.reduce_all(tf.stack([finite for _, finite in measured]))
    return [
        _updated(state, own, item.running, norm, every if skip == "all" else finite, every)
        for state, own, item, (norm, finite) in zip(states, values, gradients, measured, strict=True)
    ]


def _updated(
    state: TensorFlowState, gradients: dict[str, Any], running: Any, norm: Any, use: Any, every: Any
) -> StepResult:
    recipe = state.recipe
    unused = [variable for name, variable in state.variables.parameters.items() if name not in gradients]

    def commit(values: list[Any], norm: Any) -> None:
        if recipe.clip_norm is not None:
            factor = clip.factor(norm, recipe.clip_norm, XP)
            values = [value * tf.cast(factor, value.dtype) for value in values]
        state.commit(dict(zip(gradients, values, strict=True)))

    def decide(run: replicas.Run, values: Any, running: Any, norm: Any, use: Any, every: Any) -> None:
        def apply() -> None:
            state.accept(running)
            with replicas.reduced_already(state.optimizer), leaving_alone(state.optimizer, unused):
                run(commit, values, norm)

        if recipe.loss_scaler.checks:
            tf.cond(replicas.shared(use), apply, lambda: None)
            state.adjust_scale(replicas.shared(every))
        else:
            apply()

    replicas.together(decide, list(gradients.values()), running, norm, use, every)
    skipped = tf.logical_not(use) if recipe.loss_scaler.checks else tf.constant(False)
    return StepResult(None, None, norm, state.scale_state.scale, skipped, state.step)


def _fitting(state: TensorFlowState, gradients: Gradients) -> dict[str, Any]:
    """The gradients that there are, dense, in the parameters' order and at least in float32.

    Raises:
        GradientError: they do not fit the state, or every one is None.
    """
    parameters, received = state.variables.parameters, gradients.values
    if not isinstance(received, dict):
        raise GradientError(
            f"gradients.values must be a dict of parameter path -> tensor. Received: {type(received).__name__}."
        )
    _check(parameters, received)
    found = {}
    for name, parameter in parameters.items():
        if received[name] is None:
            continue
        value = dense(received[name], parameter)
        if not is_floating(value):
            raise GradientError(f"the gradient of {name!r} must be floating. Received dtype: {value.dtype.name}.")
        found[name] = tf.cast(value, at_least_float32(value.dtype))
    return found


def _check(parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
    refusals.check_gradients(
        [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in gradients.items()],
    )
