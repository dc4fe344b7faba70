"""The second half of a step as graph code: what it measures and how it commits (S9 to S15).

    measure: the gradients dense and in float32 -> norm and finite flag
    commit:  clip -> optimizer under one condition for all replicas; then scale and counters, as decided

`polyamp.rules.decide` decides in between. Called by the backend and by the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.recipe.scaler import LossScaler
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, decide, refusals
from polyamp.rules.decide import Decision, Measured, Skip
from polyamp_tensorflow.arrays import XP, at_least_float32, dense, is_floating
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.measure import norm_and_flag
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.unused import leaving_alone


def update(states: States, gradients: Sequence[Gradients], skip: Skip) -> list[StepResult]:
    """Flag, clip, optimizer and scale adjustment for states that share a scaler (S14), which it updates in place."""
    _, results = decide.update(states, gradients, skip, _VERBS)
    return results


class _Verbs(decide.Verbs[TensorFlowState, Gradients]):
    """What TensorFlow does in the second half of a step."""

    xp = XP

    def scaler(self, state: TensorFlowState) -> LossScaler:
        return state.recipe.loss_scaler

    def measure(self, state: TensorFlowState, grads: Gradients) -> Measured:
        values = _fitting(state, grads)
        norm, finite = norm_and_flag(list(values.values()))
        return Measured(tf.cast(norm, tf.float32), finite, (values, norm), grads.weight)

    def commit(
        self, state: TensorFlowState, grads: Gradients, measured: Measured, decision: Decision
    ) -> TensorFlowState:
        named: dict[str, Any]
        named, norm = measured.more
        unused = [variable for name, variable in state.variables.parameters.items() if name not in named]
        checks = decision.finite is not None

        def step(values: list[Any], norm: Any) -> None:
            state.commit(dict(zip(named, clipped(values, norm, state.recipe.clip_norm), strict=True)))

        def write(run: replicas.Run, values: Any, running: Any, norm: Any, flags: Any, decided: Any) -> None:
            def apply() -> None:
                state.accept(running)
                with replicas.reduced_already(state.optimizer), leaving_alone(state.optimizer, unused):
                    run(step, values, norm)

            if checks:
                tf.cond(replicas.shared(flags[0]), apply, lambda: None)
            else:
                apply()
            *scale, count = [replicas.shared(value) for value in decided]
            state.conclude(count, scale if checks else None)

        flags = [decision.finite] if checks else []
        decided = [*decision.scale_state, decision.step]
        replicas.together(write, list(named.values()), grads.running, norm, flags, decided)
        return state


_VERBS: Final = _Verbs()


def clipped(values: Sequence[Any], norm: Any, max_norm: float | None) -> list[Any]:
    """Gradients of this norm, clipped to `max_norm` unless it is None (S11)."""
    if max_norm is None:
        return list(values)
    factor = clip.factor(norm, max_norm, XP)
    return [value * tf.cast(factor, value.dtype) for value in values]


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
