"""Second half of a step as graph code: measure and commit (S9 to S15).

    measure: the gradients dense and in float32 -> norm and finite flag
    commit:  clip -> optimizer under one condition for all replicas; then scale and counters, as decided

`polyamp.rules.update_decision` makes the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, step_checks
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp_tensorflow.arrays import XP, at_least_float32, is_floating, to_dense
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.unused_parameters import skip_unused_parameters


def update_states(states: States, gradients: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Compute flag, clip, optimizer update and scale for states that share a scaler (S14), and update them in place."""
    fitted = [_fit_gradients(state, item) for state, item in zip(states, gradients, strict=True)]
    found = [global_norm_and_finite(list(values.values())) for values in fitted]
    flags = [finite for _, finite in found]
    results = []
    for state, item, values, (norm, finite) in zip(states, gradients, fitted, found, strict=True):
        stats = GradStats(tf.cast(norm, tf.float32), finite, item.weight)
        decision = decide(state.recipe.loss_scaler, state.scale_state, state.step, stats, flags, skip, XP)
        _commit_update(state, values, item.running, norm, decision)
        results.append(decision.result(stats))
    return results


def _commit_update(
    state: TensorFlowState, named: dict[str, Any], running: Any, norm: Any, decision: UpdateDecision
) -> None:
    """Clip and update on every replica where the decision says so; write the scale and the counters."""
    unused = [variable for name, variable in state.variables.parameters.items() if name not in named]
    checks = decision.finite is not None

    def step(values: list[Any], norm: Any) -> None:
        state.commit(dict(zip(named, clip_gradients(values, norm, state.recipe.clip_norm), strict=True)))

    def write(run: replicas.ReplicaRun, values: Any, running: Any, norm: Any, flags: Any, decided: Any) -> None:
        def apply() -> None:
            state.adopt_running(running)
            with replicas.skip_gradient_reduction(state.optimizer), skip_unused_parameters(state.optimizer, unused):
                run(step, values, norm)

        if checks:
            tf.cond(replicas.read_shared(flags[0]), apply, lambda: None)
        else:
            apply()
        *scale, count = [replicas.read_shared(value) for value in decided]
        state.write_counters(count, scale if checks else None)

    flags = [decision.finite] if checks else []
    decided = [*decision.scale_state, decision.step]
    replicas.merge_replica_calls(write, list(named.values()), running, norm, flags, decided)


def clip_gradients(values: Sequence[Any], norm: Any, max_norm: float | None) -> list[Any]:
    """Clip gradients of this norm to `max_norm`, unless it is None (S11)."""
    if max_norm is None:
        return list(values)
    factor = clip.clip_factor(norm, max_norm, XP)
    return [value * tf.cast(factor, value.dtype) for value in values]


def _fit_gradients(state: TensorFlowState, gradients: Gradients) -> dict[str, Any]:
    """Return the gradients that are not None, dense, in the parameters' order and at least in float32.

    Raises:
        GradientError: they do not match the state, or all are None.
    """
    parameters, received = state.variables.parameters, gradients.values
    if not isinstance(received, dict):
        raise GradientError(
            f"gradients.values must be a dict of parameter path -> tensor. Received: {type(received).__name__}."
        )
    _check_gradients(parameters, received)
    found = {}
    for name, parameter in parameters.items():
        if received[name] is None:
            continue
        value = to_dense(received[name], parameter)
        if not is_floating(value):
            raise GradientError(f"the gradient of {name!r} must be floating. Received dtype: {value.dtype.name}.")
        found[name] = tf.cast(value, at_least_float32(value.dtype))
    return found


def _check_gradients(parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
    step_checks.check_gradients(
        [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in gradients.items()],
    )
