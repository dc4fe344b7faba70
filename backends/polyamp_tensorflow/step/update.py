"""Second half of a step as graph code: measure and commit (S9 to S15).

    measure: the gradients dense and in float32 -> norm and finite flag
    commit:  clip -> optimizer under one condition for all replicas; then scale and counters, as decided

`polyamp.rules.update_decision` makes the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, step_checks, update_decision
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision
from polyamp_tensorflow.arrays import XP, at_least_float32, is_floating, to_dense
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.unused_parameters import skip_unused_parameters


def update_states(states: States, gradients: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Compute flag, clip, optimizer update and scale for states that share a scaler (S14), and update them in place."""
    _, results = update_decision.apply_update(states, gradients, skip, _UPDATE_HOOKS)
    return results


class _TensorFlowUpdateHooks(update_decision.UpdateHooks[TensorFlowState, Gradients]):
    """TensorFlow's operations in the second half of a step."""

    xp = XP

    def scaler(self, state: TensorFlowState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: TensorFlowState, grads: Gradients) -> GradStats:
        values = _fit_gradients(state, grads)
        norm, finite = global_norm_and_finite(list(values.values()))
        return GradStats(tf.cast(norm, tf.float32), finite, (values, norm), grads.weight)

    def commit(
        self, state: TensorFlowState, grads: Gradients, measured: GradStats, decision: UpdateDecision
    ) -> TensorFlowState:
        named: dict[str, Any]
        named, norm = measured.more
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
        replicas.merge_replica_calls(write, list(named.values()), grads.running, norm, flags, decided)
        return state


_UPDATE_HOOKS: Final = _TensorFlowUpdateHooks()


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
