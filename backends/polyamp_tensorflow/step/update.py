"""Second half of a step as graph code: measure and commit (S9 to S15).

    measure: the gradients dense and in float32 -> norm and finite flag
    commit:  clip -> optimizer under one condition for all replicas; then scale and counters, as decided

`polyamp.rules.update_decision` makes the decision.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.errors import GradientError
from polyamp.monitor.slots import MonitorSelection
from polyamp.recipe.clip_limits import ClipLimits
from polyamp.recipe.scaler import LossScaleState
from polyamp.results import Gradients, StepResult
from polyamp.rules import clip, step_checks
from polyamp.rules.update_decision import GradStats, Skip, UpdateDecision, decide
from polyamp_keras.arrays import is_floating
from polyamp_keras.engines.tensorflow import XP, to_dense
from polyamp_keras.own_loop.spec_optimizer import SpecOptimizer
from polyamp_tensorflow.arrays import at_least_float32
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.step.averages import write_averages
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite
from polyamp_tensorflow.step.monitor_slots import MonitoredUpdate
from polyamp_tensorflow.step.state import States, TensorFlowState
from polyamp_tensorflow.step.tensorflow_only.optimizer_patches import skip_gradient_reduction
from polyamp_tensorflow.step.tensorflow_only.scalar_reads import share_scalar_reads
from polyamp_tensorflow.step.unused_parameters import skip_unused_parameters


def update_states(
    states: States, gradients: Sequence[Gradients], skip: Skip, monitor: MonitorSelection | None = None
) -> list[StepResult]:
    """Compute flag, clip, optimizer update and scale for states that share a scaler (S14), and update them in place."""
    fitted = [_zero_waiting(state, _fit_gradients(state, item)) for state, item in zip(states, gradients, strict=True)]
    found = [global_norm_and_finite(list(values.values())) for values in fitted]
    flags = [finite for _, finite in found]
    results = []
    for state, item, values, (norm, finite) in zip(states, gradients, fitted, found, strict=True):
        stats = GradStats(tf.cast(norm, tf.float32), finite, item.weight)
        decision = decide(state.recipe.loss_scaler, state.scale_state, state.step, stats, flags, skip, XP)
        parameters, scale = state.variables.parameters, state.scale_state.scale
        watch = None if monitor is None else MonitoredUpdate(monitor, parameters, values, scale)
        _commit_update(state, values, item.running, norm, decision)
        result = decision.result(stats)
        results.append(result if watch is None else result._replace(monitor=watch.finish()))
    return results


class _StateUpdate(NamedTuple):
    """Update of one state, as one replica computed it.

    Attributes:
        gradients: by parameter, unscaled; without unused parameters.
        norm: their norm before clipping.
        running: the running state of the forward pass.
        finite: whether the update is applied; None if it always is.
        scale_state, step: the loss-scale state and the number of updates after it.
    """

    gradients: dict[str, Any]
    norm: Any
    running: Mapping[str, Any]
    finite: Any
    scale_state: LossScaleState
    step: Any


def _commit_update(
    state: TensorFlowState, gradients: dict[str, Any], running: Any, norm: Any, decision: UpdateDecision
) -> None:
    """Clip and update on every replica where the decision says so; write the scale and the counters."""
    update = _StateUpdate(gradients, norm, running, decision.finite, decision.scale_state, decision.step)
    replicas.merge_replica_calls(functools.partial(_write_update, state), update)


def _write_update(state: TensorFlowState, run: replicas.ReplicaRun, update: _StateUpdate) -> None:
    """Write an update to the state, in the body of `merge_replica_calls`."""
    apply = functools.partial(_apply_update, state, run, update)
    if update.finite is None:
        apply()
    else:
        tf.cond(replicas.read_shared(update.finite), apply, lambda: None)
    scale_state = None if update.finite is None else [replicas.read_shared(value) for value in update.scale_state]
    state.write_counters(replicas.read_shared(update.step), scale_state)


def _apply_update(state: TensorFlowState, run: replicas.ReplicaRun, update: _StateUpdate) -> None:
    """Write the running state and the clipped gradients."""
    state.write_running_state(update.running)
    pairs = [(variable, update.gradients.get(name)) for name, variable in state.variables.parameters.items()]
    run_optimizer(state.optimizer, run, pairs, update.norm, state.recipe.clip)
    write_averages(state, run, update.step)


def run_optimizer(
    optimizer: Any,
    run: replicas.ReplicaRun,
    pairs: Sequence[tuple[Any, Any]],
    norm: Any,
    limits: ClipLimits,
    *,
    warn: bool = False,
) -> None:
    """Clip gradients and run a Keras optimizer in every replica, in the body of `merge_replica_calls`.

    Args:
        optimizer: the optimizer.
        run: runs a function in every replica.
        pairs: every variable with its gradient, or None if it is unused.
        norm: the gradients' norm.
        limits: limits of the gradients.
        warn: whether Keras warns about unused variables.
    """
    variables, present = [variable for variable, _ in pairs], [gradient is not None for _, gradient in pairs]
    if isinstance(optimizer, SpecOptimizer):
        sets = optimizer.clip_sets(variables, limits)
    else:
        sets = clip.clip_sets([(None, limits)] * len(variables))

    def update(gradients: list[Any], norm: Any) -> None:
        given = iter(gradients)
        every = [next(given) if own else None for own in present]

        def norm_of(places: list[int]) -> Any:
            return global_norm_and_finite([every[place] for place in places])[0]

        with share_scalar_reads(optimizer):
            optimizer.apply(clip.clip_gradients(sets, every, norm, norm_of, XP), variables)

    unused = [variable for variable, gradient in pairs if gradient is None]
    with skip_gradient_reduction(optimizer), skip_unused_parameters(optimizer, unused, warn=warn):
        run(update, [gradient for _, gradient in pairs if gradient is not None], norm)


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


def _zero_waiting(state: TensorFlowState, gradients: dict[str, Any]) -> dict[str, Any]:
    """Return the gradients with zeros for parameters that are not trained yet (S27)."""
    if not isinstance(state.optimizer, SpecOptimizer):
        return gradients
    variables = [state.variables.parameters[name] for name in gradients]
    return dict(zip(gradients, state.optimizer.zero_waiting(variables, list(gradients.values())), strict=True))


def _check_gradients(parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
    step_checks.check_gradients(
        [(name, tuple(parameter.shape)) for name, parameter in parameters.items()],
        [(name, None if value is None else tuple(value.shape)) for name, value in gradients.items()],
    )
