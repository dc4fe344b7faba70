"""Update of a `LossScaleOptimizer`, or one micro-step of an accumulation, in three parts: measure, decide, commit.

    measure: [the window's sum] -> unscale -> norm and finite flag                            (S7 to S10)
    commit:  clip -> the inner optimizer under one condition for all replicas; scale, window  (S11 to S15)

`polyamp.rules.update_decision` makes the decision. During accumulation only the sums change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp.recipe.scaler import LossScaler, LossScaleState
from polyamp.rules.update_decision import GradStats, UpdateDecision, decide
from polyamp_tensorflow.arrays import XP, assign_values, native_variable
from polyamp_tensorflow.own_loop.loop_memory import count_non_finite
from polyamp_tensorflow.step import replicas
from polyamp_tensorflow.step.grad_stats import global_norm_and_finite
from polyamp_tensorflow.step.unused_parameters import skip_unused_parameters
from polyamp_tensorflow.step.update import clip_gradients


class MicroBatchShare(NamedTuple):
    """Weight of a micro-batch relative to the largest of its accumulation so far (S8), float32 scalars.

    Attributes:
        weight: its weight; at most 1, so that the product cannot overflow.
        most: rows of the largest micro-batch, including this one.
        earlier: factor for the sums of the previous micro-batches; 1 unless this one is larger than all of them.
    """

    weight: Any
    most: Any
    earlier: Any


class LossScaleOptimizerFields(NamedTuple):
    """Variables and settings of a `LossScaleOptimizer` for an update.

    Attributes:
        inner: the inner optimizer.
        scaler, clip_norm, accumulate_steps: as in the constructor.
        owners: index of each variable among those of `build`, by id.
        scale: the variables of the loss-scale state.
        skipped: 1 if the last call skipped its update, else 0.
        not_finite: by variable, the number of non-finite gradient elements at the last skipped update.
        micro_step: calls since the start of the accumulation.
        sums: by variable, the accumulated gradients; empty without accumulation.
        used: by variable, 1 if it had a gradient in this accumulation; None without accumulation.
        rows: rows of the largest micro-batch so far, and the sum of (weight - 1), float32 vector; None without
            accumulation.
        share: share of this call's micro-batch; None if its weight is 1.
    """

    inner: Any
    scaler: LossScaler
    clip_norm: float | None
    accumulate_steps: int
    owners: dict[int, int]
    scale: LossScaleState
    skipped: Any
    not_finite: Any
    micro_step: Any
    sums: list[Any]
    used: Any
    rows: Any = None
    share: MicroBatchShare | None = None


class ApplyCall(NamedTuple):
    """One call of `apply`.

    Attributes:
        held: the optimizer's variables and settings.
        variables: the variables with a gradient in this call; with accumulation, all.
        every: all variables of the call.
        unused: those whose gradient is None.
    """

    held: LossScaleOptimizerFields
    variables: list[Any]
    every: list[Any]
    unused: list[Any]

    @property
    def scale_state(self) -> LossScaleState:
        """The loss-scale state, as tensors."""
        return LossScaleState(*(tf.convert_to_tensor(native_variable(variable)) for variable in self.held.scale))

    @property
    def step(self) -> Any:
        """Number of applied updates, as counted by the inner optimizer."""
        return tf.convert_to_tensor(native_variable(self.held.inner.iterations))


def apply_or_accumulate(call: ApplyCall, gradients: list[Any]) -> None:
    """Apply an update, or accumulate a micro-step. `gradients` of `call.variables` are dense, scaled, and summed over
    replicas.

    With accumulation the unused variables have sums too; whether they were used before is known at its end.
    """
    held = call.held
    if held.sums:
        sums = [native_variable(held.sums[owner]) for owner in _owner_indices(held, call.variables)]
        if held.share is not None:
            sums = [total * tf.cast(held.share.earlier, total.dtype) for total in sums]
        gradients = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    unscaled, stats = _measure_gradients(held, gradients)
    decision = decide(held.scaler, call.scale_state, call.step, stats, [stats.finite], "all", XP)
    _commit_update(call, gradients, unscaled, stats, decision)


def _measure_gradients(held: LossScaleOptimizerFields, gradients: list[Any]) -> tuple[list[Any], GradStats]:
    """Return the unscaled gradients and their statistics; within an accumulation nothing is measured."""
    if not held.sums:
        return _unscaled_grad_stats(held, gradients)
    unscaled, stats = tf.cond(
        _is_last_micro_batch(held),
        lambda: _unscaled_grad_stats(held, gradients),
        lambda: (
            gradients,
            GradStats(tf.constant(1.0), tf.constant(True), None if held.share is None else tf.constant(1.0)),
        ),
    )
    return unscaled, GradStats(*stats)


def _commit_update(
    call: ApplyCall, gradients: list[Any], unscaled: list[Any], stats: GradStats, decision: UpdateDecision
) -> None:
    held = call.held

    def write_all(
        run: replicas.ReplicaRun, sums: Any, unscaled: Any, norm: Any, finite: Any, scale: Any, rows: Any
    ) -> None:
        def end() -> None:
            _apply_window(run, call, unscaled, norm, finite, scale, may_skip=decision.finite is not None)

        if held.sums:
            tf.cond(_is_last_micro_batch(held), end, lambda: _accumulate_gradients(call, sums, rows))
        else:
            end()

    scale, finite = list(decision.scale_state), stats.finite if decision.finite is None else decision.finite
    replicas.merge_replica_calls(write_all, gradients, unscaled, stats.norm, finite, scale, _next_window_rows(held))


def _owner_indices(held: LossScaleOptimizerFields, variables: Sequence[Any]) -> list[int]:
    return [held.owners[id(variable)] for variable in variables]


def _is_last_micro_batch(held: LossScaleOptimizerFields) -> Any:
    return tf.equal(native_variable(held.micro_step), held.accumulate_steps - 1)


def micro_batch_share(held: LossScaleOptimizerFields | None, rows: Any) -> MicroBatchShare:
    """Return the share of a micro-batch by its rows or other weight; the share of a first one if `held` is None."""
    one = tf.ones_like(rows)
    if held is None:
        return MicroBatchShare(tf.where(rows > 0.0, one, 0.0), rows, one)
    before = native_variable(held.rows)[0]
    before = tf.where(tf.equal(native_variable(held.micro_step), 0) | tf.equal(before, 0.0), rows, before)
    most = tf.maximum(before, rows)
    by = tf.where(most > 0.0, most, one)  # all weights are 0 so far
    return MicroBatchShare(rows / by, most, before / by)


def _next_window_rows(held: LossScaleOptimizerFields) -> Any:
    """Return the value of `held.rows` after this call; None if every micro-batch has weight 1."""
    if held.share is None:
        return None
    weight, most, earlier = held.share
    count = tf.cast(native_variable(held.micro_step), tf.float32)
    return tf.stack([most, native_variable(held.rows)[1] * earlier + count * (earlier - 1.0) + weight - 1.0])


def _unscaled_grad_stats(held: LossScaleOptimizerFields, gradients: list[Any]) -> tuple[list[Any], GradStats]:
    """Return the unscaled gradients and their statistics.

    The norm is not computed if neither the flag nor a clip needs it."""
    count: Any = float(held.accumulate_steps)
    scaler, weight = held.scaler, None
    if scaler.scales or held.sums:
        if held.sums:
            after = _next_window_rows(held)
            count = count + (native_variable(held.rows) if after is None else after)[1]
            if held.share is not None:
                weight = count
                count = tf.where(count > 0.0, count, 1.0)
        divisor = native_variable(held.scale.scale) * count if scaler.scales else tf.convert_to_tensor(count)
        gradients = [gradient / tf.cast(divisor, gradient.dtype) for gradient in gradients]
    if not scaler.checks and held.clip_norm is None:
        return gradients, GradStats(tf.constant(1.0), tf.constant(True), weight)
    return gradients, GradStats(*global_norm_and_finite(gradients), weight)


def _accumulate_gradients(call: ApplyCall, sums: Sequence[Any], rows: Any) -> None:
    """Write the sums of a micro-step."""
    held = call.held
    if rows is not None:
        native_variable(held.rows).assign(replicas.read_shared(rows))
    assign_values([held.sums[owner] for owner in _owner_indices(held, call.variables)], sums)
    left = set(_owner_indices(held, call.unused))
    now = tf.constant([int(owner not in left) for owner in range(len(held.sums))])
    native_variable(held.used).assign(tf.maximum(replicas.read_shared(native_variable(held.used)), now))
    native_variable(held.micro_step).assign_add(1)
    native_variable(held.skipped).assign(0)


def _apply_window(
    run: replicas.ReplicaRun, call: ApplyCall, unscaled: Any, norm: Any, finite: Any, scale: Any, *, may_skip: bool
) -> None:
    """Update all replicas or none, and write the decided loss-scale state."""
    held = call.held

    def update_all_but(left: list[Any]) -> None:
        without = {id(variable) for variable in left}

        def step(unscaled: Any, norm: Any) -> None:
            pairs = zip(call.variables, clip_gradients(unscaled, norm, held.clip_norm), strict=True)
            known = {id(variable): gradient for variable, gradient in pairs if id(variable) not in without}
            held.inner.apply([known.get(id(variable)) for variable in call.every], call.every)

        with replicas.skip_gradient_reduction(held.inner), skip_unused_parameters(held.inner, left, warn=True):
            run(step, unscaled, norm)

    def apply() -> None:
        if not (call.unused and held.sums):
            update_all_but(call.unused)
            return
        before = tf.gather(replicas.read_shared(native_variable(held.used)), _owner_indices(held, call.unused))
        tf.cond(tf.reduce_any(before > 0), lambda: update_all_but([]), lambda: update_all_but(call.unused))

    if not may_skip:
        apply()
    else:
        flag = replicas.read_shared(finite)
        tf.cond(flag, apply, lambda: _count_non_finite_gradients(call, unscaled))
        assign_values(held.scale, [replicas.read_shared(value) for value in scale])
        native_variable(held.skipped).assign(tf.where(flag, 0, 1))
    if held.sums:
        assign_values(held.sums, [tf.zeros(total.shape, total.dtype) for total in held.sums])
        native_variable(held.used).assign(tf.zeros(held.used.shape, tf.int32))
        native_variable(held.rows).assign(tf.zeros(2))
        native_variable(held.micro_step).assign(0)


def _count_non_finite_gradients(call: ApplyCall, gradients: Any) -> None:
    """Store the number of non-finite elements of each gradient, for the error about a stuck scale."""
    counts = dict.fromkeys(range(call.held.not_finite.shape[0]), tf.constant(0))
    for owner, gradient in zip(_owner_indices(call.held, call.variables), gradients, strict=True):
        counts[owner] = count_non_finite(replicas.read_shared(gradient))
    native_variable(call.held.not_finite).assign(tf.stack(list(counts.values())))
