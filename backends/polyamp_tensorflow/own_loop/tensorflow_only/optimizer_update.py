"""Update of a `LossScaleOptimizer`, or one micro-step of an accumulation: measure, decide, commit.

    measure: [the accumulated sum] -> unscale -> norm and finite flag                               (S7 to S10)
    commit:  clip -> the inner optimizer under one condition for all replicas; scale, accumulation  (S11 to S15)

`polyamp.rules.update_decision.decide` makes the decision. During accumulation only the sums change.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.recipe.scaler import LossScaleState
from polyamp.rules.update_decision import GradStats, decide
from polyamp_keras.arrays import native_variable
from polyamp_keras.engines.tensorflow import XP
from polyamp_keras.own_loop.gradients import add_to_sums
from polyamp_keras.own_loop.scaler_state import ApplyCall, is_last_micro_batch, next_rows, variable_indices
from polyamp_tensorflow.arrays import assign_values
from polyamp_tensorflow.distributed import replicas
from polyamp_tensorflow.own_loop.gradients import unscale_gradients
from polyamp_tensorflow.own_loop.skip_report import count_non_finite
from polyamp_tensorflow.step.update import run_optimizer


class ReplicaUpdate(NamedTuple):
    """Values of one replica for the update of all.

    Attributes:
        sums: the gradients, with those of earlier micro-batches.
        unscaled, norm: the unscaled gradients and their norm before clipping.
        finite: whether the update is applied; None if it always is.
        scale: the loss-scale state after the call.
        rows: the rows after the call; None if every micro-batch has weight 1.
    """

    sums: list[Any]
    unscaled: list[Any]
    norm: Any
    finite: Any
    scale: LossScaleState
    rows: Any


def apply_or_accumulate(call: ApplyCall, gradients: list[Any]) -> None:
    """Apply an update, or accumulate a micro-step. `gradients` of `call.variables` are dense, scaled, and summed over
    replicas.

    With accumulation the unused variables have sums too; whether they were used before is known at its end.
    """
    optimizer = call.optimizer
    sums = add_to_sums(call, gradients)
    unscaled, stats = _measure_gradients(call, sums)
    step = tf.convert_to_tensor(native_variable(optimizer.iterations))
    decision = decide(optimizer.scaler, optimizer.scale_state, step, stats, [stats.finite], "all", XP)
    values = ReplicaUpdate(sums, unscaled, stats.norm, decision.finite, decision.scale_state, next_rows(call))
    figures = None if optimizer.figures is None else optimizer.figures.begin(call, unscaled, decision.result(stats))
    replicas.merge_replica_calls(functools.partial(_write_call, call), values)
    if figures is not None:
        figures.write()


def _measure_gradients(call: ApplyCall, sums: list[Any]) -> tuple[list[Any], GradStats]:
    """Return the unscaled gradients and their statistics; before the end of an accumulation nothing is measured."""
    if not call.state.sums:
        return unscale_gradients(call, sums)
    unscaled, stats = tf.cond(
        is_last_micro_batch(call), lambda: unscale_gradients(call, sums), lambda: (sums, _no_stats(call))
    )
    return unscaled, GradStats(*stats)


def _no_stats(call: ApplyCall) -> GradStats:
    return GradStats(tf.constant(1.0), tf.constant(True), None if call.share is None else tf.constant(1.0))


def _write_call(call: ApplyCall, run: replicas.ReplicaRun, values: ReplicaUpdate) -> None:
    """Update the variables, or write the sums of a micro-step."""
    end = functools.partial(_end_accumulation, call, run, values)
    if call.state.sums:
        tf.cond(is_last_micro_batch(call), end, functools.partial(_accumulate, call, values))
    else:
        end()


def _accumulate(call: ApplyCall, values: ReplicaUpdate) -> None:
    state = call.state
    if values.rows is not None:
        native_variable(state.rows).assign(replicas.read_shared(values.rows))
    assign_values([state.sums[index] for index in variable_indices(call, call.variables)], values.sums)
    unused = set(variable_indices(call, call.unused))
    now = tf.constant([int(index not in unused) for index in range(len(state.sums))])
    native_variable(state.used).assign(tf.maximum(replicas.read_shared(native_variable(state.used)), now))
    native_variable(state.micro_step).assign_add(1)
    native_variable(state.skipped).assign(0)


def _end_accumulation(call: ApplyCall, run: replicas.ReplicaRun, values: ReplicaUpdate) -> None:
    """Update all replicas or none, and write the decided loss-scale state."""
    state, apply = call.state, functools.partial(_apply, call, run, values)
    if values.finite is None:
        apply()
    else:
        finite = replicas.read_shared(values.finite)
        tf.cond(finite, apply, lambda: count_non_finite(call, values.unscaled))
        assign_values(state.scale, map(replicas.read_shared, values.scale))
        native_variable(state.skipped).assign(tf.where(finite, 0, 1))
    if state.sums:
        assign_values(state.sums, [tf.zeros(total.shape, total.dtype) for total in state.sums])
        native_variable(state.used).assign(tf.zeros(state.used.shape, tf.int32))
        native_variable(state.rows).assign(tf.zeros(2))
        native_variable(state.micro_step).assign(0)


def _apply(call: ApplyCall, run: replicas.ReplicaRun, values: ReplicaUpdate) -> None:
    """Update the variables that have had a gradient in the accumulation."""
    if not (call.unused and call.state.sums):
        _apply_without(call, run, values, call.unused)
        return
    used = tf.gather(replicas.read_shared(native_variable(call.state.used)), variable_indices(call, call.unused))
    apply = functools.partial(_apply_without, call, run, values)
    tf.cond(tf.reduce_any(used > 0), lambda: apply([]), lambda: apply(call.unused))


def _apply_without(call: ApplyCall, run: replicas.ReplicaRun, values: ReplicaUpdate, unused: list[Any]) -> None:
    """Run the inner optimizer in every replica, with None for the gradients of the unused variables."""
    ids = set(map(id, unused))
    known = {id(v): gradient for v, gradient in zip(call.variables, values.unscaled, strict=True) if id(v) not in ids}
    pairs = [(variable, known.get(id(variable))) for variable in call.all_variables]
    optimizer = call.optimizer
    run_optimizer(optimizer.inner_optimizer, run, pairs, values.norm, optimizer.clip, warn=True)
